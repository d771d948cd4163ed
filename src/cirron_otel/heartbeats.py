"""Heartbeats: every so often one log record that says where this process is.

A span reaches a backend when it ends, so of a scope that is open for hours nothing is seen but that
it began. A heartbeat names the scopes that have been open for long, lies in the innermost of them,
and its absence says that the process is gone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cirron_otel import semconv
from cirron_otel.batch import LogRecord
from cirron_otel.long_scopes import is_long
from cirron_otel.scope_base import set_place

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

#: OpenTelemetry's severity number and text.
_INFO = (9, "INFO")
#: A service may have thousands of requests open.
_MAX_SCOPES = 16


class Heartbeats:
    """Writes a heartbeat of one process whenever ``heartbeat`` seconds have passed."""

    def __init__(self, rec: Recorder) -> None:
        """Write nothing yet: the first one comes when the first ``heartbeat`` seconds are over."""
        self._rec = rec
        self._every_s = rec.settings.heartbeat
        self._last_s = time.monotonic()

    def tick(self, scopes: Sequence[BaseScope]) -> None:
        """Queue a log record if it is time. ``scopes`` are those open now; the flush thread."""
        now = time.monotonic()
        if not self._every_s or now - self._last_s < self._every_s:
            return
        self._last_s = now
        row = self._record(scopes)
        if row is not None:
            self._rec.batcher.append_log(row)

    def _record(self, scopes: Sequence[BaseScope]) -> LogRecord | None:
        rec = self._rec
        now_ns = rec.clock.now()
        long = [
            scope
            for scope in scopes
            if scope.otel.window is not True and is_long(scope.name, now_ns - scope.start_ns)
        ]
        if not long:
            return None
        long.sort(key=lambda scope: (scope.depth, scope.start_ns))
        inner = long[-1]
        shown = long if len(long) <= _MAX_SCOPES else [*long[: _MAX_SCOPES - 1], inner]
        names = [_label(scope) for scope in shown]
        iteration = None if rec.loops is None else int(rec.loops.iteration)
        seconds = round((now_ns - inner.start_ns) / 1e9, 1)
        at = "" if not iteration else f", iteration {iteration}"
        row = LogRecord(
            now_ns, *_INFO, semconv.HEARTBEAT, f"in {names[-1]} for {seconds:g} s{at}",
            {
                semconv.HEARTBEAT_SCOPES: names,
                semconv.HEARTBEAT_SPANS: [scope.id[:16] for scope in shown],
                semconv.HEARTBEAT_OPEN: [
                    round((now_ns - scope.start_ns) / 1e9, 3) for scope in shown
                ],
                semconv.HEARTBEAT_COUNT: len(long),
            },
        )  # fmt: skip
        if iteration is not None:
            row.attrs[semconv.ITERATION] = iteration
        set_place(row, inner)
        return row


def _label(scope: BaseScope) -> str:
    return scope.name if scope.index is None else f"{scope.name}[{scope.index}]"
