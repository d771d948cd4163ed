"""Histograms that are added to, batch by batch: with given buckets, or with exponential ones.

Exponential buckets are those of OpenTelemetry's data model (metrics, *ExponentialHistogram*): at
scale ``s`` bucket ``i`` holds what is above ``base**i`` and at most ``base**(i + 1)``, with
``base = 2**(2**-s)``. Their scale falls as the range of what was measured grows.

Not thread-safe, no I/O.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence

import msgspec

from cirron_otel.otlp.instruments import Scale

#: OpenTelemetry's defaults: so many buckets at most, as fine as this at first.
MAX_BUCKETS = 160
MAX_SCALE = 20
_FINEST = float(1 << MAX_SCALE)


class Histogram(msgspec.Struct, array_like=True, gc=False):
    """Lengths in ns since the writer's start, in buckets with given upper bounds."""

    count: int
    sum_ns: int
    least_ns: int
    most_ns: int
    buckets: list[int]

    def add(self, lengths: Sequence[int], buckets: Sequence[int]) -> None:
        """Take in lengths, each with the number of its bucket."""
        _add(self, lengths)
        for bucket in buckets:
            self.buckets[bucket] += 1

    def shape(self) -> tuple[tuple[int, ...], None]:
        """The counts of its buckets, whose bounds are the instrument's."""
        return tuple(self.buckets), None


class Exponential(msgspec.Struct, array_like=True, gc=False):
    """The same in exponential buckets of seconds; ``buckets`` holds those that are not empty."""

    count: int
    sum_ns: int
    least_ns: int
    most_ns: int
    zero_count: int = 0
    scale: int = MAX_SCALE
    buckets: dict[int, int] = {}

    def add(self, lengths: Sequence[int]) -> None:
        """Take in lengths."""
        _add(self, lengths)
        buckets, shift = self.buckets, MAX_SCALE - self.scale
        for length in lengths:
            if length:
                at = index_of(length / 1e9) >> shift
                buckets[at] = buckets.get(at, 0) + 1
            else:
                self.zero_count += 1
        while buckets and max(buckets) - min(buckets) >= MAX_BUCKETS:
            self.scale -= 1
            coarser: dict[int, int] = {}
            for at, count in buckets.items():
                coarser[at >> 1] = coarser.get(at >> 1, 0) + count
            self.buckets = buckets = coarser

    def shape(self) -> tuple[tuple[int, ...], Scale]:
        """The counts of its buckets, and where these lie."""
        first, counts = self.dense()
        return counts, Scale(self.scale, first, self.zero_count)

    def dense(self) -> tuple[int, tuple[int, ...]]:
        """The first bucket's index, and the counts from there to the last one."""
        if not self.buckets:
            return 0, ()
        first, last = min(self.buckets), max(self.buckets)
        return first, tuple(self.buckets.get(at, 0) for at in range(first, last + 1))


def _add(known: Histogram | Exponential, lengths: Sequence[int]) -> None:
    known.count += len(lengths)
    known.sum_ns += sum(lengths)
    known.least_ns = min(known.least_ns, *lengths)
    known.most_ns = max(known.most_ns, *lengths)


def buckets_of(bounds_ns: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The number of each length's bucket, where these are the buckets' upper bounds in ns."""
    return [bisect_left(bounds_ns, length) for length in lengths]


def index_of(value: float) -> int:
    """The bucket of a number above 0 at :data:`MAX_SCALE`; shifted right, at each lower scale."""
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5:  # noqa: PLR2004 - a power of 2 is the upper bound of its bucket
        return ((exponent - 1) << MAX_SCALE) - 1
    return math.floor(math.log2(mantissa) * _FINEST) + (exponent << MAX_SCALE)
