"""The span processor that a joined provider gets.

Scopes of ours write their own rows when they end; what this processor adds is everybody else's
spans, when ``profile(spans="all")`` asks for them, and that flushing or shutting down the
application's provider flushes the spool too.

A processor cannot be taken off a provider again. So there is one per provider for the life of the
process, remembered on the provider itself, and it follows whichever recorder is current.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanKind, StatusCode

from cirron_otel import ids, semconv
from cirron_otel.batch import SpanOtel, SpanRecord
from cirron_otel.scope_base import event_row, link_row
from cirron_otel.values import attributes

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

    from cirron_otel.recorder import Recorder

_ATTRIBUTE = "_cirron_otel_processor"


class SpoolSpanProcessor(SpanProcessor):
    """Writes foreign spans to the spool of the current recorder. Never raises, never blocks."""

    def __init__(self) -> None:
        self.recorder: Recorder | None = None

    @classmethod
    def on(cls, provider: TracerProvider) -> SpoolSpanProcessor:
        """The processor of ``provider``; added to it the first time."""
        found = getattr(provider, _ATTRIBUTE, None)
        if isinstance(found, cls):
            return found
        made = cls()
        provider.add_span_processor(made)
        setattr(provider, _ATTRIBUTE, made)
        return made

    def on_end(self, span: ReadableSpan) -> None:
        """Write a span that is not one of our scopes, if all spans are wanted."""
        rec = self.recorder
        if rec is None or not rec.active or rec.settings.spans != "all":
            return
        try:
            scope = span.instrumentation_scope
            if scope is None or scope.name != semconv.INSTRUMENTATION_NAME:
                rec.append_span(foreign_row(rec, span))
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("processor.on_end", error)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Write everything recorded so far to the spool."""
        return self.recorder is None or self.recorder.flush(timeout_millis / 1000)

    def shutdown(self) -> None:
        """Flush; the recorder itself goes on until ``ci.shutdown()``."""
        self.force_flush(5000)


def foreign_row(rec: Recorder, span: ReadableSpan) -> SpanRecord:
    """A third-party span as a row: its parent is the OTel parent, or the session for a root."""
    context: Any = span.get_span_context()
    parent = span.parent
    session = rec.session.id if rec.session is not None else None
    local = parent is not None and not parent.is_remote
    status = span.status.status_code
    attrs, cut = attributes(span.attributes or {})
    scope = span.instrumentation_scope
    end = span.end_time or rec.clock.now()
    return SpanRecord(
        id=ids.spool_id(context.span_id, context.trace_id),
        name=span.name,
        parent_id=ids.spool_id(parent.span_id, parent.trace_id)
        if local and parent is not None
        else session,
        index=None,
        start_ns=span.start_time or end,
        end_ns=end,
        pid=rec.pid,
        rank=rec.rank,
        attrs=attrs,
        attrs_truncated=cut or UNSET,
        otel=SpanOtel(
            trace_id=f"{context.trace_id:032x}"[:16],
            parent_span_id=f"{parent.span_id:016x}" if parent is not None and not local else UNSET,
            kind=UNSET if span.kind is SpanKind.INTERNAL else span.kind.name.lower(),
            status=UNSET if status is StatusCode.UNSET else status.name.lower(),
            status_message=span.status.description or UNSET,
            events=[event_row(e.name, e.timestamp, e.attributes) for e in span.events] or UNSET,
            links=[link_row(link) for link in span.links] or UNSET,
            scope={"name": scope.name, "version": scope.version} if scope is not None else UNSET,
        ),
    )
