"""The channels of a BatchNorm: which are dead, constant, decayed or dormant, by the weights alone.

With ``y = gamma * normalised(x) + beta`` a channel is constant where what feeds it is exactly zero
or gamma is; behind a ReLU it is dead where that constant, beta, is not above zero. A file does not
show an optimizer, so none of this says that a channel cannot come back.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from cirron_otel.checkpoints.grouping import BatchNorm
from cirron_otel.checkpoints.measuring import Facts, values_of

#: A filter or scale at most this part of its layer's median is decayed.
RELATIVE = 1e-5
_COLLAPSED = 1e-12
#: Within so many standard deviations nearly all of what a BatchNorm makes lies.
_DEVIATIONS = 3
#: Of many, findings and JSON name so many.
MOST_LISTED = 64


@dataclass(slots=True)
class Channels:
    """The classes of one BatchNorm's channels; each channel is in one at most."""

    batchnorm: BatchNorm
    dead: list[int] = field(default_factory=list)
    flat: list[int] = field(default_factory=list)
    decayed: list[int] = field(default_factory=list)
    dormant: list[int] = field(default_factory=list)
    #: How many running variances are as good as zero.
    collapsed: int = 0

    def to_dict(self) -> dict[str, object]:
        """For JSON: of each class the number and the first of them."""
        one = self.batchnorm
        classes = {"dead": self.dead, "flat": self.flat, "decayed": self.decayed,
                   "dormant": self.dormant}  # fmt: skip
        return {
            "layer": one.producer,
            "batchnorm": one.name,
            "channels": one.channels,
            **{name: found[:MOST_LISTED] for name, found in classes.items()},
            "counts": {name: len(found) for name, found in classes.items()},
            "collapsed_var": self.collapsed,
            "feeds_relu": one.feeds_relu,
            "wiring": one.wiring,
        }


def classify(norm: BatchNorm, facts: Mapping[str, Facts]) -> Channels:
    """The classes of each channel. A channel with a value that is not finite is in none."""
    found = Channels(norm)
    gamma, beta = values_of(norm.weight), values_of(norm.bias)
    variances = values_of(norm.running_var)
    if min(variances) < _COLLAPSED:
        found.collapsed = sum(1 for one in variances if 0 <= one < _COLLAPSED)
    peaks, bias = _fed_by(norm, facts)
    sizes = [abs(value) for value in gamma]
    small_row, small_gamma = _small(peaks), _small(sizes)
    for i, (peak, size, shift) in enumerate(zip(peaks, sizes, beta, strict=True)):
        # Nearly all channels of nearly all models are sound: those first, in one comparison.
        if peak > small_row and size > small_gamma and shift + _DEVIATIONS * size > 0:
            continue
        if math.isfinite(size + shift + bias[i]) and peak != math.inf:
            _put(found, i, peak, size, shift, bias[i], small_row, small_gamma)
    return found


def _fed_by(norm: BatchNorm, facts: Mapping[str, Facts]) -> tuple[Sequence[float], Sequence[float]]:
    """The peaks of the rows that feed each channel, ordinary where unknown, and their biases."""
    size = norm.channels
    peaks: Sequence[float] = [1.0] * size
    bias: Sequence[float] = [0.0] * size
    if norm.producer is not None:
        own = facts.get(f"{norm.producer}.weight")
        if own is not None and own.peaks is not None and len(own.peaks) == size:
            peaks = own.peaks
        shift = facts.get(f"{norm.producer}.bias")
        if shift is not None and shift.tensor.shape == (size,):
            bias = values_of(shift.tensor)
    return peaks, bias


def _put(  # noqa: PLR0913, PLR0917 - what decides of a channel
    found: Channels, i: int, peak: float, size: float, shift: float, bias: float,
    small_row: float, small_gamma: float,
) -> None:  # fmt: skip
    """Put a channel into its class."""
    closed = shift <= 0
    shut = closed and found.batchnorm.feeds_relu
    if size == 0 or (peak == 0 and bias == 0):
        (found.dead if shut else found.flat).append(i)
    elif peak == 0:  # a constant comes out as beta up to rounding
        (found.decayed if shut else found.flat).append(i)
    elif peak <= small_row or size <= small_gamma:
        if closed:
            (found.decayed if shut else found.flat).append(i)
    elif found.batchnorm.feeds_relu and shift + _DEVIATIONS * size <= 0:
        found.dormant.append(i)


def _small(sizes: Sequence[float]) -> float:
    """Up to which size one is decayed; 0 where none of them is."""
    # What is usual is at most the largest.
    return 0.0 if min(sizes) > RELATIVE * max(sizes) else RELATIVE * usual(sizes)


def usual(sizes: Sequence[float]) -> float:
    """The lower median of those that are not zero; of the larger ones, where half are tiny.

    Without that a layer most of which has decayed would have a tiny median, and look sound.
    """
    ranked = sorted(one for one in sizes if 0 < one < math.inf)
    if not ranked:
        return 0.0
    median = ranked[(len(ranked) - 1) // 2]
    high = ranked[(len(ranked) - 1) * 9 // 10]
    return high if median <= RELATIVE * high else median
