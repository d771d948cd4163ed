"""Statistics with torch's own operations on a device, a piece of the tensor at a time.

What is used where there is no fused kernel for the device, or not for the dtype. Nothing here asks
for a value before all is computed: one wait per call.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from cirron_otel.weights.devices import Coming
from cirron_otel.weights.dtypes import PIECE
from cirron_otel.weights.numbers import BINS, Reduced, Sums, finish

#: Dtypes whose squares may be beyond a double.
_WIDE = frozenset({torch.float64})


def reduce_all(
    tensors: Sequence[torch.Tensor],
    *,
    histogram: bool,
    piece: int = PIECE,
) -> list[Reduced]:
    """The numbers of strided tensors of real dtypes, any device; blocks until they are there."""
    pending = [_Reduction(one, histogram=histogram, piece=piece) for one in tensors]
    rows = [one.rows for one in pending]
    by_device: dict[torch.device, list[int]] = {}
    for number, one in enumerate(rows):
        by_device.setdefault(one.device, []).append(number)
    found: list[list[list[float]]] = [[] for _ in rows]
    for numbers in by_device.values():
        flat = Coming(torch.cat([rows[number] for number in numbers])).rows()
        start = 0
        for number in numbers:
            end = start + rows[number].shape[0]
            found[number] = flat[start:end]
            start = end
    return [one.finish(table) for one, table in zip(pending, found, strict=True)]


class _Reduction:
    """One tensor's reduction; every number stays on its device until :meth:`finish`.

    ``rows`` holds, for each piece: how many values are finite, NaN, inf, -inf; mean and m2; the
    lowest and highest of all pieces, the exponent of the power by which values were divided; then
    16 counts.
    """

    def __init__(self, tensor: torch.Tensor, *, histogram: bool, piece: int) -> None:
        self.histogram = histogram
        self.whole = not tensor.is_floating_point()
        kept = tensor.numel() <= piece
        doubles = [_double(part) for part in pieces(tensor, piece)] if kept else None

        def parts() -> Iterator[torch.Tensor]:
            return iter(doubles) if doubles else map(_double, pieces(tensor, piece))

        ranges = [self._range(part) for part in parts()]
        lo = torch.stack([one[0] for one in ranges]).amin()
        hi = torch.stack([one[1] for one in ranges]).amax()
        exponent = torch.zeros_like(lo)
        self.wide = tensor.dtype in _WIDE
        if self.wide:
            found = torch.frexp(torch.maximum(lo.abs(), hi.abs())).exponent
            plain = (found.abs() < 400) | ~(lo <= hi)  # noqa: PLR2004 - as scale_exponent
            exponent = torch.where(plain, 0, found.clamp(-1000, 1000)).to(lo.dtype)
        inner = inner_edges(lo, hi) if histogram else None
        table = [torch.stack([*self._sums(part, exponent), lo, hi, exponent]) for part in parts()]
        self.rows = torch.stack(table)
        if inner is not None:
            counts = [self._counts(part, inner) for part in parts()]
            self.rows = torch.cat([self.rows, torch.stack(counts)], dim=1)

    def _range(self, part: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.whole:
            lo, hi = part.aminmax()
            return lo, hi
        bad = ~part.isfinite()
        return part.masked_fill(bad, math.inf).amin(), part.masked_fill(bad, -math.inf).amax()

    def _sums(self, part: torch.Tensor, exponent: torch.Tensor) -> list[torch.Tensor]:
        """Finite values, NaN, inf, -inf, mean and m2."""
        zero = torch.zeros_like(exponent)
        if self.whole:
            mean = part.mean()
            m2 = (part - mean).square_().sum()
            return [zero + part.numel(), zero, zero, zero, mean, m2]
        bad = ~part.isfinite()
        odd = [part.isnan().sum(), (part == math.inf).sum(), (part == -math.inf).sum()]
        count = part.numel() - bad.sum()
        small = part.masked_fill(bad, 0)
        if self.wide:
            small = torch.ldexp(small, -exponent)
        mean = small.sum() / count.clamp(min=1)
        m2 = small.sub_(mean).masked_fill_(bad, 0).square_().sum()
        return [one.to(zero.dtype) for one in (count, *odd, mean, m2)]

    def _counts(self, part: torch.Tensor, inner: torch.Tensor) -> torch.Tensor:
        """How many finite values lie in each bin."""
        if not self.whole:
            part = part.masked_fill(~part.isfinite(), math.nan)
        # bincount would wait for the device, histc is not deterministic there.
        above = torch.stack([(part >= edge).sum() for edge in inner])
        total = (part == part).sum().reshape(1)  # noqa: PLR0124 - which NaN is not
        rest = torch.zeros_like(total)
        return (torch.cat([total, above]) - torch.cat([above, rest])).to(inner.dtype)

    def finish(self, table: list[list[float]]) -> Reduced:
        """The numbers of the whole from the rows of its pieces."""
        sums = Sums()
        totals = [sum(column) for column in zip(*table, strict=True)]
        for row in table:
            if row[0]:
                sums.add(int(row[0]), row[4], row[5])
        lo, hi, exponent = table[0][6:9]
        nans, pos_infs, neg_infs = (int(one) for one in totals[1:4])
        counts = [int(one) for one in totals[9:]] if self.histogram else None
        odd = (nans, pos_infs, neg_infs)
        return finish(odd, sums.count, lo, hi, sums.mean, sums.m2, int(exponent), counts)


def _double(part: torch.Tensor) -> torch.Tensor:
    return part.to(torch.float64)


def inner_edges(lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
    """The fifteen inner edges, as :func:`cirron_otel.weights.numbers.edges` has them.

    Of one tensor, or of many whose ends are in columns of one.
    """
    one = lo == hi
    hi = torch.where(one, lo + 1, hi)
    width = (hi - lo) / BINS
    width = torch.where(width.isfinite(), width, hi / BINS - lo / BINS)
    places = torch.arange(1, BINS, device=lo.device, dtype=lo.dtype)
    return torch.minimum(lo + places * width, hi)


def pieces(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    """The tensor's values in flat pieces of at most ``size``, in any order, each value once.

    A piece is a view where the memory allows it, else a copy of that piece only.
    """
    flat = flat_view(tensor)
    if flat is not None:
        yield from torch.split(flat, size)
    else:
        yield from _cut(tensor, size)


def _cut(tensor: torch.Tensor, size: int) -> Iterator[torch.Tensor]:
    if tensor.numel() <= size:
        yield tensor.reshape(-1)
        return
    shape = tensor.shape
    longest = max(range(len(shape)), key=shape.__getitem__)
    rest = tensor.numel() // shape[longest]
    step = max(1, size // rest) if rest < size else (shape[longest] + 1) // 2
    for part in torch.split(tensor, step, dim=longest):
        yield from _cut(part, size)


def flat_view(tensor: torch.Tensor) -> torch.Tensor | None:
    """The values as one dimension over the same memory, in whatever order; None where it has gaps.

    Channels-last and transposed tensors have such a view; slices and expanded tensors have none.
    """
    if tensor.is_contiguous():
        return tensor.view(-1)
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return None
            expected *= size
    return tensor.as_strided((tensor.numel(),), (1,))
