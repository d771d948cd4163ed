"""How times between the chunks of a stream are spread, in little memory however long it is.

A sketch of buckets that grow by a constant factor: any quantile is right within
:data:`RELATIVE_ERROR`, and the number of buckets is bounded by the range of the values, not by
their number (Masson, Rim, Lee: DDSketch, VLDB 2019).
"""

from __future__ import annotations

import math

#: How far a quantile may be off, relative to its value.
RELATIVE_ERROR = 0.03
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_BUCKET = 1 / math.log(_GAMMA)
_log = math.log


class Gaps:
    """The times between neighbours, ns. Not thread-safe: one consumer at a time."""

    __slots__ = ("_buckets", "count", "max_ns")

    def __init__(self) -> None:
        self.count = 0
        self.max_ns = 0
        self._buckets: dict[int, int] = {}

    def add(self, gap_ns: int) -> None:
        """Take one more."""
        self.count += 1
        self.max_ns = max(self.max_ns, gap_ns)
        bucket = int(_log(gap_ns) * _PER_BUCKET) if gap_ns > 1 else 0
        buckets = self._buckets
        buckets[bucket] = buckets.get(bucket, 0) + 1

    def quantile(self, share: float) -> float | None:
        """The gap, ns, that ``share`` of them (0 to 1) do not exceed; None where there is none."""
        if not self.count:
            return None
        rank = max(1, math.ceil(share * self.count))
        seen = 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                # The middle of the bucket, in the sense that both ends are equally far off.
                middle = _GAMMA**bucket * 2 * _GAMMA / (_GAMMA + 1)
                return min(middle, float(self.max_ns))
        return float(self.max_ns)
