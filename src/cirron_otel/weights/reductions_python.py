"""Pieces of memory read without any library: see :mod:`cirron_otel.weights.reductions_buffer`."""

from __future__ import annotations

import math
import struct
from bisect import bisect_right
from collections.abc import Iterator

from cirron_otel.weights.dtypes import PIECE, DType
from cirron_otel.weights.numbers import BINS


def pieces(flat: memoryview, dtype: DType) -> Iterator[list[float]]:
    """The values, some at a time."""
    step = PIECE * dtype.size
    for at in range(0, flat.nbytes, step):
        part = bytes(flat[at : at + step])
        letter = dtype.letter
        if not letter:  # bfloat16 is the upper half of a float
            wide = bytearray(2 * len(part))
            wide[2::4], wide[3::4] = part[::2], part[1::2]
            part, letter = bytes(wide), "f"
        size = len(part) // struct.calcsize(f"<{letter}")
        yield [float(value) for value in struct.unpack(f"<{size}{letter}", part)]


def range_of(piece: list[float]) -> tuple[int, int, int, int, float, float]:
    """NaN, inf, -inf, finite values, the lowest and the highest of them."""
    finite = _finite(piece)
    nans = sum(map(math.isnan, piece))
    odd = (nans, piece.count(math.inf), piece.count(-math.inf))
    return (*odd, len(finite), min(finite, default=math.inf), max(finite, default=-math.inf))


def sums_of(piece: list[float], exponent: int) -> tuple[float, float]:
    """Mean and sum of squared distances of the finite values, divided by ``2**exponent``."""
    finite = _finite(piece)
    if exponent:
        finite = [math.ldexp(value, -exponent) for value in finite]
    mean = math.fsum(finite) / len(finite)
    return mean, math.fsum((value - mean) ** 2 for value in finite)


def counts_of(piece: list[float], inner: list[float]) -> list[int]:
    """How many finite values lie in each bin between the edges."""
    counts = [0] * BINS
    for value in _finite(piece):
        counts[bisect_right(inner, value)] += 1
    return counts


def _finite(piece: list[float]) -> list[float]:
    return [value for value in piece if math.isfinite(value)]
