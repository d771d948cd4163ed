"""Statistics with torch's operations of what the host can read, where the kernel does not do it.

A piece at a time, in double precision: see :mod:`cirron_otel.weights.reductions_buffer`, which puts
the pieces together. Asks each piece for values, so a device would be waited for again and again:
:mod:`cirron_otel.weights.reductions_torch` is for those.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from cirron_otel.weights.numbers import BINS, Reduced
from cirron_otel.weights.reductions_buffer import reduce_pieces
from cirron_otel.weights.reductions_torch import pieces

#: Elements of a piece: the most that torch gives to one thread. Its others cost more than they do.
PIECE = 32_000
#: Rounding of a place in the histogram, in units of the largest number that takes part.
_ROUNDING = 2.0**-46


def reduce_all(tensors: Sequence[torch.Tensor], *, histogram: bool) -> list[Reduced]:
    """The numbers of strided tensors of real dtypes that are not empty."""
    return [reduce_pieces(partial(_doubles, one), Pieces(), histogram=histogram) for one in tensors]


def _doubles(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    room = torch.empty(
        PIECE, dtype=torch.float64, device="cpu"
    )  # one, as finding new pages is dear
    for piece in pieces(tensor, PIECE):
        yield room[: piece.numel()].copy_(piece)


class Pieces:
    """How a piece is read."""

    def range_of(self, piece: torch.Tensor, /) -> tuple[int, int, int, int, float, float]:
        """NaN, inf, -inf, finite values, the lowest and the highest of them."""
        lo, hi = (float(one) for one in piece.aminmax())
        if math.isfinite(lo) and math.isfinite(hi):
            return 0, 0, 0, piece.numel(), lo, hi
        odd = (piece.isnan(), piece == math.inf, piece == -math.inf)
        nans, pos_infs, neg_infs = (int(one.sum()) for one in odd)
        finite = _finite(piece)
        if not finite.numel():
            return nans, pos_infs, neg_infs, 0, math.inf, -math.inf
        lo, hi = (float(one) for one in finite.aminmax())
        return nans, pos_infs, neg_infs, finite.numel(), lo, hi

    def sums_of(self, piece: torch.Tensor, exponent: int, /) -> tuple[float, float]:
        """Mean and sum of squared distances of the finite values, divided by ``2**exponent``."""
        finite = _finite(piece)
        if exponent:
            finite = torch.ldexp(finite, torch.tensor(-float(exponent), device="cpu").double())
        mean = float(finite.mean())
        away = finite - mean  # torch.dot would start threads
        return mean, float(away.square_().sum())

    def counts_of(self, piece: torch.Tensor, inner: list[float], /) -> list[int]:
        """How many finite values lie in each bin between the edges."""
        finite = _finite(piece)
        places = _places(finite, inner)
        if places is None:
            edges = torch.tensor(inner, dtype=torch.float64, device="cpu")
            places = torch.bucketize(finite, edges, out_int32=True, right=True)
        return [int(one) for one in torch.bincount(places, minlength=BINS).tolist()]


def _finite(piece: torch.Tensor) -> torch.Tensor:
    """The finite values; the piece itself where all are."""
    return piece if math.isfinite(float(piece.sum())) else piece[piece.isfinite()]


def _places(finite: torch.Tensor, inner: list[float]) -> torch.Tensor | None:
    """The bins by one division, which is quicker than a search; None where rounding might show."""
    width = (inner[-1] - inner[0]) / (BINS - 2)
    most = max(abs(inner[0]), abs(inner[-1])) + width
    if not (math.isfinite(most) and width > 0 and most / width < 1 / _ROUNDING):
        return None
    place = finite.sub(inner[0]).div_(width).add_(1).clamp_(0.25, BINS - 0.25)
    whole = place.to(torch.uint8)  # floor() would start threads
    near, far = (float(one) for one in place.sub_(whole).aminmax())
    rounding = _ROUNDING * most / width
    if near < rounding or far > 1 - rounding:
        return None
    return whole
