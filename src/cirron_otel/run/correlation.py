"""What ties a run to what others record of it: ids on the program's log lines, its GPU's UUID."""

from __future__ import annotations

import logging
import sys
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as otel_trace

from cirron_otel import recorder, semconv
from cirron_otel.context import get_current
from cirron_otel.run.memory_reading import in_use
from cirron_otel.scope_base import BaseScope, current_scope
from cirron_otel.values import capture_gate

if TYPE_CHECKING:
    from cirron_otel.batching import Sealed
    from cirron_otel.recorder import Recorder


# --- log lines ----------------------------------------------------------------------------------


class LoggingFilter(logging.Filter):
    """Lets every record pass, with the fields of :func:`logging_filter` on it."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Put the fields on a record; those that it has already stay."""
        try:
            fields = _fields()
        except Exception:  # noqa: BLE001 - see _guard
            fields = dict.fromkeys(_NAMES, "")
            rec = recorder._current  # noqa: SLF001
            # Not by the guard's log line: that would come back here.
            if rec is not None:
                rec.guard.swallowed["logging_filter"] += 1
        for name, value in fields.items():
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


_NAMES = ("trace_id", "span_id", "run_id", "attempt", "rank", "epoch", "iteration")


def _fields() -> dict[str, Any]:
    fields: dict[str, Any] = dict.fromkeys(_NAMES, "")
    context = get_current()
    span = otel_trace.get_current_span(context).get_span_context()
    rec = recorder._current  # noqa: SLF001
    if rec is not None and not rec.active:
        rec = None
    if rec is not None and rec.session is not None and not span.is_valid:
        span = rec.session.get_span_context()  # where a scope opened here would hang
    if span.is_valid:
        fields["trace_id"] = otel_trace.format_trace_id(span.trace_id)
        fields["span_id"] = otel_trace.format_span_id(span.span_id)
    if rec is None:
        return fields
    fields["run_id"], fields["rank"] = rec.run_id, rec.rank
    fields["attempt"] = rec.run_state.attempt
    scope = current_scope(rec, context)
    if scope is not None and type(scope.iteration) is int:
        fields["iteration"] = scope.iteration
    above: BaseScope | None = scope
    while above is not None:
        if above.name == semconv.EPOCH and type(above.index) is int:
            fields["epoch"] = above.index
            break
        above = above.above
    return fields


def logging_filter() -> logging.Filter:
    """A filter for the program's own log handlers: what was logged in which step of which run.

    ::

        handler.addFilter(ci.logging_filter())
        handler.setFormatter(
            logging.Formatter("%(message)s run=%(run_id)s rank=%(rank)s it=%(iteration)s "
                              "trace=%(trace_id)s span=%(span_id)s")
        )

    Every record passes and gets ``trace_id`` and ``span_id`` (hex, of the current OpenTelemetry
    span, whoever made it; else of the session), ``run_id``, ``attempt``, ``rank``, ``epoch`` and
    ``iteration`` (of the run, from 0). What is not known is the empty text, so use ``%s`` for all
    of them; fields that the program set itself (``extra=``) stay. It belongs on a handler: a filter
    of a logger does not see the records of the loggers below it. May be made before ``profile()``.
    Any thread; never raises, never blocks.
    """
    return LoggingFilter()


# --- the GPU ------------------------------------------------------------------------------------


class DeviceInUse:
    """Puts the UUID of the GPU on the resource once the program uses one. On the flush thread.

    The GPU that counts is the one on which this process has reserved the most memory; it is looked
    for until there is one, and CUDA is never started for it.
    """

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec

    def written(self, batch: Sealed) -> None:
        """Nothing to do."""

    def flushed(self) -> None:
        """Look whether the program has begun to use a GPU."""
        uuid = self._uuid()
        if uuid is None:
            return
        rec = self._rec
        rec.out.watchers = [one for one in rec.out.watchers if one is not self]
        envelope = rec.batcher.envelope
        known = envelope.get("resource") or {}
        if known.get(semconv.GPU_ID) != uuid:
            rec.batcher.envelope = {**envelope, "resource": {**known, semconv.GPU_ID: uuid}}

    def _uuid(self) -> str | None:
        if capture_gate.captures:
            return None
        devices = (one for one in in_use() if one.kind == "cuda")
        found = max(devices, key=lambda one: one.reserved, default=None)
        if found is None:
            return None
        properties = sys.modules["torch"].cuda.get_device_properties(found.device)
        uuid = getattr(properties, "uuid", None)
        if uuid is None:  # a torch that does not tell: nobody asks again
            return str(self._rec.resource.attributes.get(semconv.GPU_ID, "")) or None
        text = str(uuid)
        return text if text.startswith(("GPU-", "MIG-")) else f"GPU-{text}"


def watch_device(rec: Recorder) -> None:
    """Have the GPU's UUID put on the resource of what ``rec`` writes, once it is known."""
    rec.out.watchers.append(DeviceInUse(rec))
