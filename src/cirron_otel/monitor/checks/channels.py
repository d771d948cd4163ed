"""Channels of Conv and Linear layers that cannot fire, or do not: which are of which class.

The classes, for row i of a producer's weight with r = max |row|, its bias b, and gamma and beta
of the BatchNorm behind it; *closed* means that the shift (beta, or b without a BatchNorm) is at
most 0:

* **zero** row: r = 0 and (with a BatchNorm) b = 0, closed; **zero scale**: gamma = 0, closed.
  Either is a *candidate* for a certificate; one that gets none counts as constant.
* **constant**: r = 0 or gamma = 0, not closed: the channel puts out one number for every input.
* **decayed**: closed, a ReLU behind it, and r or |gamma| above 0 but at most ``decayed_rel_tol``
  times the layer's median.
* **silent**: a ReLU behind it, and its largest output was at most 0 at ``patience`` checks on end.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cirron_otel.monitor.filters import Rows

LEVELS = ("none", "some", "most", "all")


class Classes(NamedTuple):
    """What the weights say of each channel: boolean vectors over the channels."""

    #: The row is zero, or the scale is, and the channel is closed.
    zero_row: torch.Tensor
    zero_scale: torch.Tensor
    constant: torch.Tensor
    decayed: torch.Tensor

    @property
    def candidate(self) -> torch.Tensor:
        """Those for which a certificate is asked."""
        return self.zero_row | self.zero_scale


class Channels(NamedTuple):
    """The channels of one producer at one check: ascending indices by class, disjoint."""

    total: int
    certified: list[int]
    flat: list[int]
    silent: list[int]
    decayed: list[int]

    @property
    def stuck(self) -> int:
        """How many are of any class."""
        return len(self.certified) + len(self.flat) + len(self.silent) + len(self.decayed)

    @property
    def level(self) -> str:
        """``none``, ``some`` (less than half), ``most`` or ``all``."""
        stuck = self.stuck
        if stuck == 0:
            return "none"
        if stuck == self.total:
            return "all"
        return "most" if 2 * stuck >= self.total else "some"

    def row(self) -> list[int]:
        """The four counts as a metrics row has them."""
        return [len(self.certified), len(self.flat), len(self.silent), len(self.decayed)]


def nothing_stuck(rows: Rows, *, has_relu: bool, tolerance: float) -> bool:
    """Whether no channel can be of a class of the weights: the usual case, found out at once."""
    smallest, largest = rows.row_max.aminmax()
    if not smallest > (tolerance * largest if has_relu else 0.0):
        return False
    if rows.gamma is None:
        return True
    smallest, largest = rows.gamma.abs().aminmax()
    return bool(smallest > (tolerance * largest if has_relu else 0.0))


def classify(rows: Rows, *, has_relu: bool, tolerance: float) -> Classes:
    """Sort the channels of one producer by what its weights say."""
    zero = rows.row_max == 0
    nowhere = torch.zeros_like(zero)
    if rows.gamma is None or rows.beta is None:
        shift = rows.bias
        closed = nowhere.logical_not() if shift is None else shift <= 0
        zero_row, zero_scale, near_constant = zero & closed, nowhere, nowhere
        constant = zero & ~closed
        small = _small(rows.row_max, tolerance)
    else:
        closed = rows.beta <= 0
        zero_gamma = rows.gamma == 0
        has_bias = nowhere if rows.bias is None else rows.bias != 0
        zero_row, zero_scale = zero & ~has_bias & closed, zero_gamma & closed
        near_constant = zero & has_bias & ~zero_gamma
        constant = ((zero & ~has_bias) | zero_gamma | near_constant) & ~closed
        small = _small(rows.row_max, tolerance) | _small(rows.gamma.abs(), tolerance)
    exactly = zero_row | zero_scale | constant
    decayed = (near_constant | small) & closed & ~exactly if has_relu else nowhere
    return Classes(zero_row, zero_scale, constant, decayed)


def channels_of(
    total: int, classes: Classes | None, certified: torch.Tensor | None,
    quiet: torch.Tensor | None,
) -> Channels:  # fmt: skip
    """The channels by class; a candidate without a certificate counts as constant."""
    if classes is None or certified is None:
        return Channels(total, [], [], [] if quiet is None else indices(quiet), [])
    flat = (classes.constant | classes.candidate) & ~certified
    known = flat | certified | classes.decayed
    silent = [] if quiet is None else indices(quiet & ~known)
    return Channels(total, indices(certified), indices(flat), silent, indices(classes.decayed))


def _small(sizes: torch.Tensor, tolerance: float) -> torch.Tensor:
    """Above 0 and at most ``tolerance`` times the lower median of those that are not 0."""
    nonzero = sizes[sizes != 0]
    if not nonzero.numel():
        return torch.zeros_like(sizes, dtype=torch.bool)
    return (sizes > 0) & (sizes <= tolerance * nonzero.median())


class Silence:
    """For how many checks on end each channel of one producer has not fired."""

    def __init__(self, channels: int) -> None:
        self._streak = torch.zeros(channels, dtype=torch.int32)
        self._is_quiet = False

    def update(self, peak: torch.Tensor | None) -> None:
        """Take in the largest outputs of a window; None where none was seen."""
        if peak is None or peak.numel() != self._streak.numel():
            return
        if not self._is_quiet and bool(peak.min() > 0):
            return  # the usual case
        self._streak = torch.where(peak <= 0, self._streak + 1, 0)
        self._is_quiet = bool(self._streak.any())

    def lasting(self, patience: int) -> torch.Tensor | None:
        """Which have been quiet at ``patience`` checks on end; None for none of them."""
        if not self._is_quiet:
            return None
        found = self._streak >= patience
        return found if bool(found.any()) else None


def indices(mask: torch.Tensor) -> list[int]:
    """The channels of a mask, ascending."""
    found: list[int] = mask.nonzero().flatten().tolist()
    return found
