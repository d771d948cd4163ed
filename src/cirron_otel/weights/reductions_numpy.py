"""Pieces of memory read with numpy: see :mod:`cirron_otel.weights.reductions_buffer`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from cirron_otel.weights.dtypes import PIECE, DType
from cirron_otel.weights.numbers import BINS

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Doubles = NDArray[np.float64]


def pieces(flat: memoryview, dtype: DType) -> Iterator[Doubles]:
    """The values in double precision, some at a time."""
    letter = dtype.letter or "H"
    step = PIECE * dtype.size
    for at in range(0, flat.nbytes, step):
        part = np.frombuffer(flat[at : at + step], dtype=f"<{letter}")
        if not dtype.letter:  # bfloat16 is the upper half of a float
            part = (part.astype(np.uint32) << 16).view(np.float32)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            yield part.astype(np.float64)


def range_of(piece: Doubles) -> tuple[int, int, int, int, float, float]:
    """NaN, inf, -inf, finite values, the lowest and the highest of them."""
    finite = piece[np.isfinite(piece)]
    odd = (np.isnan(piece), piece == np.inf, piece == -np.inf)
    nans, pos_infs, neg_infs = (int(np.count_nonzero(one)) for one in odd)
    if not finite.size:
        return nans, pos_infs, neg_infs, 0, np.inf, -np.inf
    return nans, pos_infs, neg_infs, finite.size, float(finite.min()), float(finite.max())


def sums_of(piece: Doubles, exponent: int) -> tuple[float, float]:
    """Mean and sum of squared distances of the finite values, divided by ``2**exponent``."""
    finite = piece[np.isfinite(piece)]
    if exponent:
        finite = np.ldexp(finite, -exponent)
    mean = finite.mean()
    away = finite - mean
    return float(mean), float(np.dot(away, away))


def counts_of(piece: Doubles, inner: list[float]) -> list[int]:
    """How many finite values lie in each bin between the edges."""
    finite = piece[np.isfinite(piece)]
    found = np.searchsorted(np.array(inner), finite, side="right")
    return [int(one) for one in np.bincount(found, minlength=BINS)]
