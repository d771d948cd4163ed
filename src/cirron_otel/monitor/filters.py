"""What weights say of channels: of which layers they need a closer look, and what that is."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

_INFINITY = float("inf")
#: Of the rows of a weight, one in so many is copied to look at it; more are looked at in place.
_MANY = 8


class Rows(NamedTuple):
    """What a producer's channels are, each a vector on the CPU with one entry per channel.

    ``row_max`` is max |weight| of the row; where only zero rows matter, as no ReLU follows, any
    other row may have 1. ``bias`` is the producer's own; ``gamma`` and ``beta`` its BatchNorm's.
    """

    row_max: torch.Tensor
    bias: torch.Tensor | None
    gamma: torch.Tensor | None
    beta: torch.Tensor | None


class Wanted(NamedTuple):
    """A producer to look at: its tensors now.

    ``tolerance`` is the part of a layer's median below which a row is small; None where it only
    matters whether a row is zero.
    """

    name: str
    #: With a row for each channel; None where nothing says how large they are.
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    peak: torch.Tensor | None
    tolerance: float | None
    #: A size that the filters have had: rows that are small beside it are not ordinary either.
    usual: float = 0.0


#: One with its weight, of those that have one.
_Sized = tuple[Wanted, torch.Tensor]
#: The four of :class:`Rows`, where they lie.
Vectors = tuple[torch.Tensor | None, ...]


def look(wanted: Iterable[Wanted]) -> tuple[dict[str, Vectors], dict[str, float]]:
    """The vectors of :class:`Rows` by producer, of those of which any row or scale may be small.

    And about how large the largest filter is, by producer with a ReLU of which there are none. On
    the CPU most are told to be ordinary without looking at each number twice; on a device that
    would be a wait, and there are vectors of all.
    """
    sizes: dict[str, float] = {}
    some = [(one, one.weight) for one in wanted if one.weight is not None]
    if all(weight.device.type == "cpu" for _, weight in some):
        some = unusual(some, sizes)
    return {one.name: row_vectors(one, weight) for one, weight in some}, sizes


def unusual(some: Sequence[_Sized], sizes: dict[str, float]) -> list[_Sized]:
    """Those that need a closer look, as a row or a scale may be zero or small. On the CPU only.

    What is usual is asked of all layers at once, and of each only where the answer is no. ``sizes``
    takes in how large the filters of a layer are.
    """
    scales_are_usual = _have_usual_scales([one for one, _ in some])
    no_row_is_zero = _have_no_zero_row([w for one, w in some if one.tolerance is None])

    def is_ordinary(one: Wanted, weight: torch.Tensor) -> bool:
        if one.tolerance is None:
            has_rows = no_row_is_zero or _have_no_zero_row([weight])
        else:
            has_rows = _are_alike(one, weight, one.tolerance, sizes)
        return has_rows and (scales_are_usual or _have_usual_scales([one]))

    return [(one, weight) for one, weight in some if not is_ordinary(one, weight)]


def _have_usual_scales(wanted: Sequence[Wanted]) -> bool:
    """Whether no scale of any layer is zero, negative, or small beside the largest of all."""
    scales = [one.gamma.detach() for one in wanted if one.gamma is not None]
    if not scales:
        return True
    if len({scale.dtype for scale in scales}) > 1:
        return False
    smallest, largest = map(float, torch.cat(scales).aminmax())
    tolerance = max(one.tolerance or 0.0 for one in wanted)
    return smallest > 0 and smallest > tolerance * largest


def _have_no_zero_row(weights: Sequence[torch.Tensor]) -> bool:
    """Whether the first number of no row is zero: then no row is one of zeros."""
    firsts = [_first_of_rows(weight) for weight in weights]
    if len({first.dtype for first in firsts}) > 1:
        return False
    return not firsts or bool(torch.cat(firsts).all())


def _first_of_rows(weight: torch.Tensor) -> torch.Tensor:
    return weight.detach().as_strided((weight.shape[0],), (weight.stride(0),))


def _are_alike(
    one: Wanted, weight: torch.Tensor, tolerance: float, sizes: dict[str, float]
) -> bool:
    """Whether no row can be zero, or small beside the others or what they were.

    That is told by the L2 norms, which take one fast pass: of n numbers whose largest is r the norm
    lies between r and sqrt(n) r, and so does the median of all rows.
    """
    norms = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())))
    smallest, largest = map(float, norms.aminmax())
    root = math.sqrt(weight.numel() // max(1, weight.shape[0]))
    sizes[one.name] = largest / root
    return smallest > root * tolerance * max(largest, one.usual)


def row_vectors(one: Wanted, weight: torch.Tensor) -> Vectors:
    """The four vectors of a producer with this weight."""
    weight = weight.detach()
    if one.tolerance is not None or weight.device.type != "cpu":
        largest = row_max(weight)
        if one.tolerance is None:
            largest = (largest != 0).to(torch.float32)
    else:
        largest = _nonzero_rows(weight)
    return (largest, *(None if v is None else v.detach() for v in (one.bias, one.gamma, one.beta)))


def row_max(weight: torch.Tensor) -> torch.Tensor:
    """Give max |w| of each row (dim 0), without a copy of the weight."""
    others = tuple(range(1, weight.dim()))
    if weight.device.type != "cpu":
        largest: torch.Tensor = torch.linalg.vector_norm(weight, _INFINITY, dim=others)
        return largest
    # Four times as fast there as the norm.
    return torch.maximum(weight.amax(others), weight.amin(others).neg_())


def _nonzero_rows(weight: torch.Tensor) -> torch.Tensor:
    """1 for each row that is not all zero; its first number settles that for nearly all."""
    found = _first_of_rows(weight) != 0
    if not bool(found.all()):
        rest = (~found).nonzero().flatten()
        if _MANY * rest.numel() > found.numel():
            found = row_max(weight) != 0
        else:
            found[rest] = row_max(weight[rest]) != 0
    return found.to(torch.float32)
