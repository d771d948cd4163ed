"""The values of a checkpoint in one pass: what each tensor holds, and the peak of each row."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from operator import neg

from cirron_otel.checkpoints.tables import Tensor
from cirron_otel.weights.dtypes import BYTES_CODE, DTYPES, LITTLE_ENDIAN, PARTS, DType, byte_table
from cirron_otel.weights.elements import values as elements
from cirron_otel.weights.reductions_buffer import reduce_uncompiled
from cirron_otel.weights.reductions_kernel import COMPILED, kernel, usable_threads

#: What the kernel says of a row: the fields of :class:`~cirron_otel.weights.numbers.Reduced`.
_Row = tuple[int, int, int, int, float, float, float, float, float, tuple[int, ...] | None]
#: Rows and bytes of one call: enough for all threads, little to hold at once.
_MOST_ROWS_AT_ONCE = 4096
_MOST_BYTES = 1 << 26
#: Of tensors with more rows only the whole is looked at.
_MOST_ROWS = 1 << 20
_THREADS = 8


@dataclass(slots=True)
class Facts:
    """What one tensor holds. ``lo``, ``hi`` and ``norm`` are of its finite values."""

    tensor: Tensor
    finite: int = 0
    nans: int = 0
    infinite: int = 0
    lo: float = math.inf
    hi: float = -math.inf
    norm: float = 0.0
    #: The largest magnitude in each row, infinite where a value is not finite; None for vectors.
    peaks: array[float] | None = None

    @property
    def nonfinite(self) -> int:
        """How many values are NaN or infinite."""
        return self.nans + self.infinite

    @property
    def is_zero(self) -> bool:
        """Whether every value is 0."""
        return self.finite > 0 and not self.nonfinite and self.lo == 0 == self.hi

    def add(self, rows: Sequence[_Row]) -> None:
        """Take in the next rows."""
        finite, nans, highs, lows, lo, hi, _, _, norm, _ = zip(*rows, strict=True)
        odd = sum(nans) + sum(highs) + sum(lows)
        self.finite += sum(finite)
        self.nans += sum(nans)
        self.infinite += sum(highs) + sum(lows)
        self.norm = math.hypot(self.norm, *norm)
        if self.peaks is not None:
            self.peaks.extend(map(max, map(neg, lo), hi))
        if odd:
            self._add_odd(rows)
        else:
            self.lo, self.hi = min(self.lo, *lo), max(self.hi, *hi)

    def _add_odd(self, rows: Sequence[_Row]) -> None:
        """Of rows some of which have values that are not finite: the range and the peaks."""
        full = [row for row in rows if row[0]]
        self.lo = min(self.lo, *(row[4] for row in full), math.inf)
        self.hi = max(self.hi, *(row[5] for row in full), -math.inf)
        if self.peaks is not None:
            first = len(self.peaks) - len(rows)
            for at, row in enumerate(rows, first):
                if any(row[1:4]):
                    self.peaks[at] = math.inf


class _Pass:
    """Rows of many tensors, read some thousand at a time."""

    def __init__(self) -> None:
        self._items: list[tuple[memoryview, int, int, bytes | None]] = []
        #: Whose they are, how many each has, of which type, and what has to live until they have
        #: been read.
        self._owners: list[tuple[Facts, int, DType, object]] = []
        self._bytes = 0

    def add(self, facts: Facts, dtype: DType) -> None:
        """Read a tensor, now or with the next ones."""
        tensor = facts.tensor
        view, keeper = tensor.load()
        if not len(view):
            return
        rows = 1
        if len(tensor.shape) > 1 and tensor.shape[0] <= _MOST_ROWS:
            rows = tensor.shape[0]
            facts.peaks = array("d")
        table = byte_table(dtype.name) if dtype.code == BYTES_CODE else None
        step = len(view) // rows
        count, code = step // dtype.size, dtype.code
        # So many rows at once as fill what is left of a call.
        some = max(1, min(_MOST_ROWS_AT_ONCE, _MOST_BYTES // step))
        for first in range(0, rows, some):
            end = min(first + some, rows)
            self._items += [
                (view[at : at + step], count, code, table)
                for at in range(first * step, end * step, step)
            ]
            self._owners.append((facts, end - first, dtype, keeper))
            self._bytes += (end - first) * step
            if len(self._items) >= _MOST_ROWS_AT_ONCE or self._bytes >= _MOST_BYTES:
                self.finish()

    def finish(self) -> None:
        """Read what was added. Blocks, and leaves the interpreter to others meanwhile."""
        rows = self._reduced()
        at = 0
        for facts, count, *_ in self._owners:
            facts.add(rows[at : at + count])
            at += count
        self._items.clear()
        self._owners.clear()
        self._bytes = 0

    def _reduced(self) -> Sequence[_Row]:
        if not COMPILED:
            types = chain.from_iterable(repeat(dtype, n) for _, n, dtype, _ in self._owners)
            return [
                reduce_uncompiled(view, dtype, histogram=False)
                for (view, *_), dtype in zip(self._items, types, strict=True)
            ]
        if not self._items:
            return []
        made: list[_Row] = kernel.reduce(self._items, usable_threads(_THREADS), False)  # noqa: FBT003 - of C
        return made


def measure(tensors: Iterable[Tensor]) -> dict[str, Facts]:
    """The facts of each tensor of floating-point numbers. Blocks while it reads all of them."""
    found: dict[str, Facts] = {}
    reading = _Pass()
    for one in tensors:
        dtype = DTYPES.get(PARTS.get(one.dtype, one.dtype))
        if one.is_float and dtype is not None:
            facts = found[one.name] = Facts(one)
            reading.add(facts, dtype)
    reading.finish()
    return found


def values_of(tensor: Tensor) -> Sequence[float]:
    """All values, as Python's numbers: for the short tensors of norms."""
    view, _ = tensor.load()
    if LITTLE_ENDIAN and tensor.dtype == "float32":
        return array("f", bytes(view))
    return [float(value) for value in elements(bytes(view), tensor.dtype)]
