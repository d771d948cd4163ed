"""Time: wall clock for where things stand, a monotonic clock for how long they took.

Every timestamp is ``monotonic_ns() + offset_ns``. The offset is taken once and again by
:meth:`Clock.resync` (flush thread, once per flush) when the wall clock has moved away from it by
more than ten milliseconds. A scope keeps the offset it was opened with, so its length is a
difference of monotonic readings: a clock step never makes a negative or wrong duration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

#: How far the wall clock may drift from ours before later timestamps follow it.
RESYNC_NS = 10_000_000


class _ClockCore:
    """What a scope reads of its clock; compiled code reads it without a look-up."""

    __slots__ = ("monotonic_ns", "offset_ns")

    offset_ns: int
    monotonic_ns: Callable[[], int]


if TYPE_CHECKING:
    ClockCore = _ClockCore
else:
    try:
        from cirron_otel._fast import ClockCore
    except ImportError:  # not built here
        ClockCore = _ClockCore


class Clock(ClockCore):
    """The two clocks of a recorder. Tests hand in their own functions. Thread-safe."""

    __slots__ = ("wall_ns",)

    def __init__(
        self,
        wall_ns: Callable[[], int] = time.time_ns,
        monotonic_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.wall_ns = wall_ns
        self.monotonic_ns = monotonic_ns
        self.offset_ns = wall_ns() - monotonic_ns()

    def now(self) -> int:
        """Nanoseconds since the Unix epoch, monotonic between two resyncs."""
        return self.monotonic_ns() + self.offset_ns

    def resync(self) -> bool:
        """Follow the wall clock if it was stepped or has drifted; says whether it did."""
        offset = self.wall_ns() - self.monotonic_ns()
        if abs(offset - self.offset_ns) <= RESYNC_NS:
            return False
        self.offset_ns = offset
        return True
