"""How times between the chunks of a stream are spread, in little memory however long it is.

A sketch of buckets that grow by a constant factor: any quantile is right within
:data:`RELATIVE_ERROR`, and the number of buckets is bounded by the range of the values, not by
their number (Masson, Rim, Lee: DDSketch, VLDB 2019). A service may hold ten thousand of them, so
the counts lie side by side, four bytes each.
"""

from __future__ import annotations

import math
from array import array
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    _Array = array[int]
else:
    _Array = array  # to be subscripted from Python 3.12 on

#: How far a quantile may be off, relative to its value.
RELATIVE_ERROR = 0.03
_GAMMA = (1 + RELATIVE_ERROR) / (1 - RELATIVE_ERROR)
_PER_BUCKET = 1 / math.log(_GAMMA)
_log = math.log


class Gaps(_Array):
    """The times between neighbours, ns. Not thread-safe: one consumer at a time.

    It is the counts themselves, one for each bucket from the lowest that is not empty.
    """

    __slots__ = ("_low", "max_ns")

    def __new__(cls) -> Self:
        """None yet."""
        return super().__new__(cls, "I")  # type: ignore[return-value] # as array has it

    def __init__(self) -> None:
        self.max_ns = 0
        self._low = 0

    def add(self, gap_ns: int) -> None:
        """Take one more."""
        self.max_ns = max(self.max_ns, gap_ns)
        bucket = int(_log(gap_ns) * _PER_BUCKET) if gap_ns > 1 else 0
        at = bucket - self._low
        if not 0 <= at < len(self):
            at = self._reach(bucket)
        self[at] += 1

    def _reach(self, bucket: int) -> int:
        """Have a count for that bucket, too; returns where it is."""
        if not self:
            self._low = bucket
        missing = self._low - bucket
        if missing > 0:
            self[:0] = array("I", bytes(self.itemsize * missing))
            self._low = bucket
        else:
            self.frombytes(bytes(self.itemsize * (bucket - self._low + 1 - len(self))))
        return bucket - self._low

    def quantile(self, share: float) -> float | None:
        """The gap, ns, that ``share`` of them (0 to 1) do not exceed; None where there is none."""
        count = sum(self)
        if not count:
            return None
        rank = max(1, math.ceil(share * count))
        seen = 0
        for bucket, number in enumerate(self, self._low):
            seen += number
            if seen >= rank:
                # The middle of the bucket, in the sense that both ends are equally far off.
                middle = _GAMMA**bucket * 2 * _GAMMA / (_GAMMA + 1)
                return min(middle, float(self.max_ns))
        return float(self.max_ns)
