"""Statistics of values in memory of which no library knows: a tensor in a file, mapped.

The compiled kernel where it was built, else numpy where it is installed, else Python. Nothing here
imports torch: a checkpoint is described on a machine that has none.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Protocol

from cirron_otel.weights.dtypes import (
    BYTES_CODE,
    DTYPES,
    PIECE,
    DType,
    byte_values,
    dtype_name,
)
from cirron_otel.weights.numbers import (
    BINS,
    NOTHING,
    Reduced,
    Skipped,
    Sums,
    TensorStats,
    describe,
    describe_empty,
    edges,
    finish,
    scale_exponent,
)
from cirron_otel.weights.reductions_kernel import COMPILED, reduce_memory, usable_threads


def buffer_stats(
    buffer: Any,  # noqa: ANN401 - whatever has the buffer protocol
    dtype: str,
    shape: Sequence[int],
    *,
    histogram: bool = True,
    threads: int = 2,
) -> TensorStats | Skipped:
    """The numbers of a tensor's bytes, little-endian and without gaps; see :func:`tensor_stats`.

    Reads the memory as it is, in place; a file that is mapped and gets shorter meanwhile ends the
    process, as it does with every reader of mapped files. Blocks until the numbers are there.

    Args:
        buffer: Bytes, a memoryview, an mmap: one dimension or many, contiguous.
        dtype: As torch (``bfloat16``) or safetensors (``BF16``) spell it.
        shape: Sizes of the dimensions; ``()`` is one value.
        histogram: False leaves the histogram out.
        threads: How many to use at most.

    Raises:
        ValueError: The buffer has another size than the shape and dtype say.
    """
    name = dtype_name(dtype)
    known = DTYPES.get(name)
    if known is None:
        reason = "complex" if name.startswith("complex") else "dtype"
        return Skipped(reason, f"{dtype} is none that is described")
    size = math.prod(shape)
    with memoryview(buffer) as view, view.cast("B") as flat:
        if flat.nbytes != size * known.size:
            raise ValueError(
                f"a tensor of {size:,} {name} has {size * known.size:,} bytes, "
                f"this buffer has {flat.nbytes:,}"
            )
        if not size:
            return describe_empty(name, shape, {}, histogram=histogram)
        return describe(_reduce(flat, known, histogram=histogram, threads=threads), name, shape)


def _reduce(flat: memoryview, dtype: DType, *, histogram: bool, threads: int) -> Reduced:
    if COMPILED:
        stretch = (flat, flat.nbytes // dtype.size, dtype.name)
        return reduce_memory([stretch], histogram=histogram, threads=usable_threads(threads))[0]
    return reduce_uncompiled(flat, dtype, histogram=histogram)


def reduce_uncompiled(flat: memoryview, dtype: DType, *, histogram: bool) -> Reduced:
    """The numbers of bytes where the kernel was not built."""
    if dtype.code == BYTES_CODE:
        return _reduce_bytes(flat, dtype.name, histogram=histogram)
    try:
        from cirron_otel.weights import reductions_numpy as way  # noqa: PLC0415 - if it is there
    except ImportError:
        from cirron_otel.weights import reductions_python as way  # type: ignore[no-redef]  # noqa: PLC0415
    return reduce_pieces(partial(way.pieces, flat, dtype), way, histogram=histogram)


def _reduce_bytes(flat: memoryview, name: str, *, histogram: bool) -> Reduced:
    """The numbers of a type of one byte, from how often each byte is there."""
    seen: Counter[int] = Counter()
    for at in range(0, len(flat), PIECE):
        seen.update(bytes(flat[at : at + PIECE]))
    values = byte_values(name)
    counted = [(values[byte], times) for byte, times in seen.items()]
    odd = (
        sum(times for value, times in counted if math.isnan(value)),
        sum(times for value, times in counted if value == math.inf),
        sum(times for value, times in counted if value == -math.inf),
    )
    finite = [(value, times) for value, times in counted if math.isfinite(value)]
    if not finite:
        return NOTHING._replace(nans=odd[0], pos_infs=odd[1], neg_infs=odd[2])
    lo, hi = min(finite)[0], max(finite)[0]
    count = sum(times for _, times in finite)
    mean = math.fsum(value * times for value, times in finite) / count
    m2 = math.fsum((value - mean) ** 2 * times for value, times in finite)
    counts = [0] * BINS
    inner = edges(lo, hi)[1:BINS]
    for value, times in finite:
        counts[bisect_right(inner, value)] += times
    return finish(odd, count, lo, hi, mean, m2, 0, counts if histogram else None)


#: A list of numbers, or an array.
_Piece = Any


class _Way(Protocol):
    """How pieces of any kind are read."""

    def range_of(self, piece: _Piece, /) -> tuple[int, int, int, int, float, float]:
        """NaN, inf, -inf, finite values, the lowest and the highest of them."""

    def sums_of(self, piece: _Piece, exponent: int, /) -> tuple[float, float]:
        """Mean and sum of squared distances of the finite values, divided by ``2**exponent``."""

    def counts_of(self, piece: _Piece, inner: list[float], /) -> list[int]:
        """How many finite values lie in each bin between the edges."""


def reduce_pieces(
    pieces: Callable[[], Iterator[Any]], way: _Way | ModuleType, *, histogram: bool
) -> Reduced:
    """The numbers of pieces, which are read up to three times."""
    ranges = [way.range_of(piece) for piece in pieces()]
    nans, pos_infs, neg_infs, count = (sum(int(one[k]) for one in ranges) for k in range(4))
    odd = (nans, pos_infs, neg_infs)
    if not count:
        return NOTHING._replace(nans=nans, pos_infs=pos_infs, neg_infs=neg_infs)
    lo, hi = min(one[4] for one in ranges), max(one[5] for one in ranges)
    exponent = scale_exponent(lo, hi)
    sums = Sums()
    for piece, (_, _, _, size, *_) in zip(pieces(), ranges, strict=True):
        if size:
            sums.add(size, *way.sums_of(piece, exponent))
    counts = None
    if histogram:
        inner = edges(lo, hi)[1:BINS]
        each = [way.counts_of(piece, inner) for piece in pieces()]
        counts = [sum(column) for column in zip(*each, strict=True)]
    return finish(odd, count, lo, hi, sums.mean, sums.m2, exponent, counts)
