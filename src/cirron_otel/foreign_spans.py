"""Spans that others made, as rows of the spool."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry.trace import SpanKind, StatusCode

from cirron_otel import ids
from cirron_otel.batch import SpanOtel, SpanRecord
from cirron_otel.scope_base import event_row, link_row
from cirron_otel.values import attributes, clean_text

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan


def foreign_row(
    span: ReadableSpan, *, session: str | None, pid: int, rank: int, now_ns: int
) -> SpanRecord:
    """An ended span of any tracer as a row. Pure; may raise for a span that is not OTel's.

    Its parent is the OTel parent where that is in this process, else ``session``, the spool id
    of the session. ``now_ns`` stands for an end that is missing.
    """
    context: Any = span.get_span_context()
    parent = span.parent
    local = parent is not None and not parent.is_remote
    status = span.status.status_code
    attrs, cut = attributes(span.attributes or {})
    scope = span.instrumentation_scope
    end = span.end_time or now_ns
    return SpanRecord(
        id=ids.spool_id(context.span_id, context.trace_id),
        name=clean_text(span.name),
        parent_id=ids.spool_id(parent.span_id, parent.trace_id)
        if local and parent is not None
        else session,
        index=None,
        start_ns=span.start_time or end,
        end_ns=end,
        pid=pid,
        rank=rank,
        attrs=attrs,
        attrs_truncated=cut or UNSET,
        otel=SpanOtel(
            trace_id=f"{context.trace_id:032x}"[:16],
            parent_span_id=f"{parent.span_id:016x}" if parent is not None and not local else UNSET,
            kind=UNSET if span.kind is SpanKind.INTERNAL else span.kind.name.lower(),
            status=UNSET if status is StatusCode.UNSET else status.name.lower(),
            status_message=clean_text(span.status.description or "") or UNSET,
            events=[event_row(e.name, e.timestamp, e.attributes) for e in span.events] or UNSET,
            links=[link_row(link) for link in span.links] or UNSET,
            scope={"name": scope.name, "version": scope.version} if scope is not None else UNSET,
        ),
    )
