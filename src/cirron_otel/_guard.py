"""Our bug never reaches the user's program.

Every boundary between the user's code and ours catches ``Exception`` and hands it to
:func:`swallow`: counted by place, logged once a minute per place, and raised again only under
``CIRRON_OTEL_STRICT=1``, which our own tests set. ``KeyboardInterrupt`` and friends are never ours
to catch.
"""

from __future__ import annotations

import logging
import os
import time
from collections import Counter

logger = logging.getLogger("cirron_otel")

_LOG_INTERVAL_S = 60.0


class Guard:
    """Counts what was swallowed and what was lost, and says so without flooding the log.

    Safe from any thread: plain dictionary updates, no lock, so it may be used anywhere, even in
    a signal handler. A count may be off by one under a race; it is never lost altogether.
    """

    def __init__(self) -> None:
        self.swallowed: Counter[str] = Counter()
        self.losses: Counter[str] = Counter()
        self._last_logged: dict[str, float] = {}
        self._warned: set[str] = set()

    def swallow(self, place: str, error: BaseException) -> None:
        """Take an exception of ours that was raised at ``place`` out of the user's way."""
        self.swallowed[place] += 1
        if self._may_log(place):
            logger.warning(
                "cirron-otel: internal error in %s (counted, your program is not affected): %r",
                place,
                error,
                exc_info=error,
            )
        if os.environ.get("CIRRON_OTEL_STRICT") == "1":
            raise error

    def lost(self, reason: str, count: int = 1) -> None:
        """Count records that will never reach the disk."""
        self.losses[reason] += count

    def warn(self, key: str, message: str) -> None:
        """Tell the user something once per process: a log line at WARNING, never a raise."""
        if key not in self._warned:
            self._warned.add(key)
            logger.warning("cirron-otel: %s", message)

    def repeat_warning(self, place: str, message: str) -> None:
        """Tell the user of a lasting trouble, once a minute."""
        if self._may_log(place):
            logger.warning("cirron-otel: %s", message)

    def _may_log(self, place: str) -> bool:
        now = time.monotonic()
        last = self._last_logged.get(place)
        if last is not None and now - last < _LOG_INTERVAL_S:
            return False
        self._last_logged[place] = now
        return True
