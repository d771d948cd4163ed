# ruff: noqa: ANN001, ANN201, N803, PLR0124, PLR0913, PLR0915, PLR0917
# mypy: ignore-errors
"""The kernels of :mod:`cirron_otel.weights.reductions_triton`.

Triton compiles the text of these functions: types and names are its own, and what is repeated here
is what it keeps in registers. ``work`` is the table of :class:`reductions_triton._Work`: addresses
and sizes of the tensors, then tensor and place of each chunk.
"""

import triton
import triton.language as tl

#: Whatever the number of tensors and the place of a table's parts: one compilation serves all.
_jit = triton.jit(
    do_not_specialize=["tensors", "chunks"],
    do_not_specialize_on_alignment=["first", "count"],
)


@_jit
def sum_chunk(
    work,
    rows,
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
):
    """One chunk's row: finite values, NaN, inf, -inf, their sum, lowest, highest, 0."""
    pid = tl.program_id(0)
    which = tl.load(work + 2 * tensors + pid)
    start = tl.load(work + 2 * tensors + chunks + pid) * CHUNK
    base = tl.load(work + which).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    end = tl.minimum(start + CHUNK, tl.load(work + tensors + which))
    inf = float("inf")
    total = tl.zeros([BLOCK], tl.float64)
    finite = tl.zeros([BLOCK], tl.int32)
    nans = tl.zeros([BLOCK], tl.int32)
    highs = tl.zeros([BLOCK], tl.int32)
    lows = tl.zeros([BLOCK], tl.int32)
    lo = tl.full([BLOCK], inf, tl.float32)
    hi = tl.full([BLOCK], -inf, tl.float32)
    for at in range(0, CHUNK, BLOCK):
        index = start + at + tl.arange(0, BLOCK)
        there = index < end
        x = tl.load(base + index, mask=there, other=0).to(tl.float32)
        good = there & (tl.abs(x) < inf)
        total += tl.where(good, x, 0.0).to(tl.float64)
        lo = tl.minimum(lo, tl.where(good, x, inf))
        hi = tl.maximum(hi, tl.where(good, x, -inf))
        finite += good.to(tl.int32)
        nans += (there & (x != x)).to(tl.int32)
        highs += (there & (x == inf)).to(tl.int32)
        lows += (there & (x == -inf)).to(tl.int32)
    row = rows + pid.to(tl.int64) * 8
    tl.store(row, tl.sum(finite, 0).to(tl.float64))
    tl.store(row + 1, tl.sum(nans, 0).to(tl.float64))
    tl.store(row + 2, tl.sum(highs, 0).to(tl.float64))
    tl.store(row + 3, tl.sum(lows, 0).to(tl.float64))
    tl.store(row + 4, tl.sum(total, 0))
    tl.store(row + 5, tl.min(lo, 0).to(tl.float64))
    tl.store(row + 6, tl.max(hi, 0).to(tl.float64))
    tl.store(row + 7, 0.0)


@_jit
def bin_chunk(
    work,
    means,
    edges,
    rows,
    tensors,
    chunks,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    ELEMENT: tl.constexpr,
    ALIGNED: tl.constexpr,
    EDGES: tl.constexpr,
):
    """One chunk's row: squared distances from the mean; values at or above each inner edge."""
    pid = tl.program_id(0)
    which = tl.load(work + 2 * tensors + pid)
    start = tl.load(work + 2 * tensors + chunks + pid) * CHUNK
    base = tl.load(work + which).to(tl.pointer_type(ELEMENT))
    if ALIGNED:
        base = tl.multiple_of(base, 16)
    end = tl.minimum(start + CHUNK, tl.load(work + tensors + which))
    mean = tl.load(means + which)
    inf = float("inf")
    m2 = tl.zeros([BLOCK], tl.float64)
    e0 = tl.load(edges + which * 16 + 0)
    e1 = tl.load(edges + which * 16 + 1)
    e2 = tl.load(edges + which * 16 + 2)
    e3 = tl.load(edges + which * 16 + 3)
    e4 = tl.load(edges + which * 16 + 4)
    e5 = tl.load(edges + which * 16 + 5)
    e6 = tl.load(edges + which * 16 + 6)
    e7 = tl.load(edges + which * 16 + 7)
    e8 = tl.load(edges + which * 16 + 8)
    e9 = tl.load(edges + which * 16 + 9)
    e10 = tl.load(edges + which * 16 + 10)
    e11 = tl.load(edges + which * 16 + 11)
    e12 = tl.load(edges + which * 16 + 12)
    e13 = tl.load(edges + which * 16 + 13)
    e14 = tl.load(edges + which * 16 + 14)
    n0 = tl.zeros([BLOCK], tl.int32)
    n1 = tl.zeros([BLOCK], tl.int32)
    n2 = tl.zeros([BLOCK], tl.int32)
    n3 = tl.zeros([BLOCK], tl.int32)
    n4 = tl.zeros([BLOCK], tl.int32)
    n5 = tl.zeros([BLOCK], tl.int32)
    n6 = tl.zeros([BLOCK], tl.int32)
    n7 = tl.zeros([BLOCK], tl.int32)
    n8 = tl.zeros([BLOCK], tl.int32)
    n9 = tl.zeros([BLOCK], tl.int32)
    n10 = tl.zeros([BLOCK], tl.int32)
    n11 = tl.zeros([BLOCK], tl.int32)
    n12 = tl.zeros([BLOCK], tl.int32)
    n13 = tl.zeros([BLOCK], tl.int32)
    n14 = tl.zeros([BLOCK], tl.int32)
    for at in range(0, CHUNK, BLOCK):
        index = start + at + tl.arange(0, BLOCK)
        there = index < end
        x = tl.load(base + index, mask=there, other=0).to(tl.float32)
        good = there & (tl.abs(x) < inf)
        away = tl.where(good, x.to(tl.float64) - mean, 0.0)
        m2 += away * away
        if EDGES:
            kept = tl.where(good, x, -inf)
            n0 += (kept >= e0).to(tl.int32)
            n1 += (kept >= e1).to(tl.int32)
            n2 += (kept >= e2).to(tl.int32)
            n3 += (kept >= e3).to(tl.int32)
            n4 += (kept >= e4).to(tl.int32)
            n5 += (kept >= e5).to(tl.int32)
            n6 += (kept >= e6).to(tl.int32)
            n7 += (kept >= e7).to(tl.int32)
            n8 += (kept >= e8).to(tl.int32)
            n9 += (kept >= e9).to(tl.int32)
            n10 += (kept >= e10).to(tl.int32)
            n11 += (kept >= e11).to(tl.int32)
            n12 += (kept >= e12).to(tl.int32)
            n13 += (kept >= e13).to(tl.int32)
            n14 += (kept >= e14).to(tl.int32)
    row = rows + pid.to(tl.int64) * 16
    tl.store(row, tl.sum(m2, 0))
    tl.store(row + 1, tl.sum(n0, 0).to(tl.float64))
    tl.store(row + 2, tl.sum(n1, 0).to(tl.float64))
    tl.store(row + 3, tl.sum(n2, 0).to(tl.float64))
    tl.store(row + 4, tl.sum(n3, 0).to(tl.float64))
    tl.store(row + 5, tl.sum(n4, 0).to(tl.float64))
    tl.store(row + 6, tl.sum(n5, 0).to(tl.float64))
    tl.store(row + 7, tl.sum(n6, 0).to(tl.float64))
    tl.store(row + 8, tl.sum(n7, 0).to(tl.float64))
    tl.store(row + 9, tl.sum(n8, 0).to(tl.float64))
    tl.store(row + 10, tl.sum(n9, 0).to(tl.float64))
    tl.store(row + 11, tl.sum(n10, 0).to(tl.float64))
    tl.store(row + 12, tl.sum(n11, 0).to(tl.float64))
    tl.store(row + 13, tl.sum(n12, 0).to(tl.float64))
    tl.store(row + 14, tl.sum(n13, 0).to(tl.float64))
    tl.store(row + 15, tl.sum(n14, 0).to(tl.float64))


@_jit
def add_rows(
    rows,
    first,
    count,
    out,
    WIDTH: tl.constexpr,
    LOW: tl.constexpr,
    HIGH: tl.constexpr,
    TILE: tl.constexpr,
):
    """One tensor's row from those of its chunks, in their order: sums, but for two columns."""
    which = tl.program_id(0)
    start = tl.load(first + which)
    size = tl.load(count + which)
    column = tl.arange(0, WIDTH)
    inf = float("inf")
    total = tl.zeros([WIDTH], tl.float64)
    lo = tl.full([WIDTH], inf, tl.float64)
    hi = tl.full([WIDTH], -inf, tl.float64)
    for at in range(0, size, TILE):
        line = at + tl.arange(0, TILE)
        there = (line < size)[:, None] & (column >= 0)[None, :]
        place = (start + line)[:, None] * WIDTH + column[None, :]
        found = tl.load(rows + place, mask=there, other=0.0)
        total += tl.sum(found, 0)
        lo = tl.minimum(lo, tl.min(tl.where(there, found, inf), 0))
        hi = tl.maximum(hi, tl.max(tl.where(there, found, -inf), 0))
    result = tl.where(column == LOW, lo, tl.where(column == HIGH, hi, total))
    tl.store(out + which * WIDTH + column, result)
