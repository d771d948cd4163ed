"""Calls of a tracker that may fail without the program: its outage is counted, not raised.

After a call that failed the tracker is left alone for as long as that call took (a second at least,
five minutes at most), so that a training that logs in every step loses no more than half of its
time to an outage. What was to be logged meanwhile is in our spool.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

_LEAST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 300.0
#: Whose exceptions are no word of a tracker: mistakes of the program, faults of a device, ours.
_NOT_THEIRS = frozenset({"builtins", "torch", "cirron_otel"})


def is_outage(error: Exception) -> bool:
    """Whether an exception is the tracker's trouble: of the network, the disk, or its own kind.

    Python's own exceptions but for those of the system (``OSError``) are mistakes of the program.
    """
    if isinstance(error, OSError):
        return True
    return type(error).__module__.partition(".")[0] not in _NOT_THEIRS


class Guarded:
    """The calls of one library. Any thread; its counts may be off by one under a race."""

    def __init__(
        self,
        rec: Recorder,
        library: str,
        outage: Callable[[Exception], bool] = is_outage,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._rec = rec
        self.library = library
        self.is_outage = outage
        self._clock = clock
        #: False once the recording is over: then calls are the library's own again.
        self.active = True
        self.failed = 0
        self.skipped = 0
        self.last_error: str | None = None
        self._rests_until = 0.0

    def call(
        self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - what the call returns
        """``original(*args, **kwargs)``; None where the tracker is out, or is being left alone."""
        if not self.active:
            return original(*args, **kwargs)
        begun = self._clock()
        if begun < self._rests_until:
            self.skipped += 1
            return None
        try:
            return original(*args, **kwargs)
        except Exception as error:
            if not self.is_outage(error):
                raise
            pause = self.rest(self._clock() - begun)
            self.note(
                error,
                f"the next try is in {pause:.0f} s, and what is logged until then is in the spool "
                "only",
            )
            return None

    def rest(self, took_s: float) -> float:
        """Begin a pause after a call that took so long in vain; returns its length."""
        pause = min(max(took_s, _LEAST_PAUSE_S), _LONGEST_PAUSE_S)
        self._rests_until = self._clock() + pause
        return pause

    def note(self, error: Exception, then: str) -> None:
        """Count a call that failed, and say so and what comes ``then``."""
        self.failed += 1
        self.last_error = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        self._rec.guard.repeat_warning(
            f"tee.{self.library}",
            f"{self.library} failed and your program goes on: {self.last_error}; {then}",
        )
