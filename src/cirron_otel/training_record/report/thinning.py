"""Series of any length in bounded memory: neighbours are merged, their extremes kept.

A series starts with one column per check. When it has twice as many columns as it is meant to
keep, pairs of neighbours become one, and each further column takes twice as many checks. So a
short run is exact, a long one even, and no single extreme value is ever lost.
"""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")

_NAN = math.nan


class Columns:
    """The common time axis of a run's series: which steps each column covers."""

    __slots__ = ("_in_last", "first", "keep", "last", "stride")

    def __init__(self, keep: int) -> None:
        self.keep = keep
        #: Checks per column.
        self.stride = 1
        self.first = array("q")
        self.last = array("q")
        self._in_last = 0

    def __len__(self) -> int:
        return len(self.first)

    def full(self) -> bool:
        """Whether the next check would open one column too many: merge first."""
        return len(self.first) >= 2 * self.keep and self._in_last >= self.stride

    def merge(self) -> None:
        """Make one column of each two. The series on this axis must do the same."""
        self.first = self.first[::2]
        self.last = array("q", (max(pair) for pair in _pairs(self.last)))
        self.stride *= 2
        self._in_last = self.stride

    def add(self, step: int) -> int:
        """The column that the check at ``step`` falls into."""
        if not self.first or self._in_last >= self.stride:
            self.first.append(step)
            self.last.append(step)
            self._in_last = 0
        self._in_last += 1
        self.last[-1] = max(self.last[-1], step)
        return len(self.first) - 1


class Band:
    """Lowest, highest and mean finite value per column, and how many were not finite.

    A column without a value has NaN.
    """

    __slots__ = ("bad", "count", "high", "low", "total")

    def __init__(self) -> None:
        self.low = array("d")
        self.high = array("d")
        self.total = array("d")
        self.count = array("q")
        self.bad = array("q")

    def __len__(self) -> int:
        return len(self.low)

    def add(self, column: int, value: float | None) -> None:
        """Take one value: a number, or None (or a number that is not finite) for a bad one."""
        if column >= len(self.low):
            self.extend(column + 1)
        if value is None or not math.isfinite(value):
            self.bad[column] += 1
            return
        # "not >=" and not "<": the first value meets NaN.
        if not value >= self.low[column]:
            self.low[column] = value
        if not value <= self.high[column]:
            self.high[column] = value
        self.total[column] += value
        self.count[column] += 1

    def extend(self, columns: int) -> None:
        """Empty columns up to this many."""
        missing = columns - len(self.low)
        if missing > 0:
            self.low.extend([_NAN] * missing)
            self.high.extend([_NAN] * missing)
            self.total.extend([0.0] * missing)
            self.count.extend([0] * missing)
            self.bad.extend([0] * missing)

    def merge(self, columns: int) -> None:
        """One column of each two, of the ``columns`` that the axis had."""
        self.extend(columns)
        self.low = array("d", (_least(pair) for pair in _pairs(self.low)))
        self.high = array("d", (_most(pair) for pair in _pairs(self.high)))
        self.total = array("d", (sum(pair) for pair in _pairs(self.total)))
        self.count = array("q", (sum(pair) for pair in _pairs(self.count)))
        self.bad = array("q", (sum(pair) for pair in _pairs(self.bad)))

    def mean(self, column: int) -> float:
        """The mean of a column's finite values, NaN where there are none."""
        count = self.count[column]
        return self.total[column] / count if count else _NAN


class Peaks:
    """The highest count per column, for each of several kinds."""

    __slots__ = ("kinds",)

    def __init__(self, kinds: int) -> None:
        self.kinds = [array("q") for _ in range(kinds)]

    def add(self, column: int, values: list[int]) -> None:
        """Take one check's counts, one per kind."""
        if column >= len(self.kinds[0]):
            self.extend(column + 1)
        for series, value in zip(self.kinds, values, strict=False):
            series[column] = max(series[column], value)

    def extend(self, columns: int) -> None:
        """Zeros up to this many columns."""
        for series in self.kinds:
            if columns > len(series):
                series.extend([0] * (columns - len(series)))

    def merge(self, columns: int) -> None:
        """One column of each two, of the ``columns`` that the axis had."""
        self.extend(columns)
        self.kinds = [array("q", (max(pair) for pair in _pairs(series))) for series in self.kinds]


class Marks:
    """Where on the axis of steps something happened, in bounded memory: how often, and an example.

    Neighbouring places become one when there are too many; none is ever left out.
    """

    __slots__ = ("most", "places", "width")

    def __init__(self, most: int = 512) -> None:
        self.most = most
        #: Steps per place.
        self.width = 1
        #: Place to how many, the first step, and what happened there first.
        self.places: dict[int, tuple[int, int, str]] = {}

    def add(self, step: int, what: str) -> None:
        """Note one; ``what`` says what it was."""
        self._put(step // self.width, 1, step, what)
        while len(self.places) > self.most:
            self.width *= 2
            places, self.places = self.places, {}
            for many, first, told in places.values():
                self._put(first // self.width, many, first, told)

    def _put(self, place: int, many: int, step: int, what: str) -> None:
        known = self.places.get(place)
        if known is None:
            self.places[place] = (many, step, what)
        else:
            first = min((known[1], known[2]), (step, what))
            self.places[place] = (known[0] + many, *first)

    def all(self) -> list[tuple[int, int, str]]:
        """Each place in order: how many, the first step, what it was."""
        return [self.places[place] for place in sorted(self.places)]


@dataclass(slots=True)
class Kept(Generic[T]):
    """The first and the last of many, and how many there were in all."""

    limit: int
    head: list[T] = field(default_factory=list)
    tail: list[T] = field(default_factory=list)
    total: int = 0

    def add(self, item: T) -> None:
        """Take one; the oldest of the last half goes when there is no more room."""
        self.total += 1
        half = self.limit // 2
        if len(self.head) < half:
            self.head.append(item)
            return
        self.tail.append(item)
        if len(self.tail) >= 2 * half:
            del self.tail[:half]

    def all(self) -> list[T]:
        """What was kept, in order."""
        return self.head + self.tail[-(self.limit - len(self.head)) :] if self.tail else self.head

    @property
    def omitted(self) -> int:
        """How many were not kept, from the middle."""
        return self.total - len(self.all())


Number = TypeVar("Number", int, float)


def _pairs(values: array[Number]) -> list[tuple[Number, ...]]:
    return [tuple(values[at : at + 2]) for at in range(0, len(values), 2)]


def _least(pair: tuple[float, ...]) -> float:
    return min((value for value in pair if not math.isnan(value)), default=_NAN)


def _most(pair: tuple[float, ...]) -> float:
    return max((value for value in pair if not math.isnan(value)), default=_NAN)
