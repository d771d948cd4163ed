"""Scopes through a provider that the application already has.

The application's tracer makes the span, so its sampler, limits, processors and exporters see our
scopes as they see any other; the scope beside it keeps the canonical tree and writes the spool
row. A span that the sampler dropped is still recorded in the spool: sampling decides export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry import trace as otel_trace
from opentelemetry.trace import Status, StatusCode, TraceFlags

from cirron_otel import ids, semconv
from cirron_otel.batch import MarkRecord, SpanOtel
from cirron_otel.processor import SpoolSpanProcessor
from cirron_otel.provider import Limits
from cirron_otel.scope_base import BaseScope, Extra
from cirron_otel.spans import mark_attributes
from cirron_otel.values import attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import SpanContext
    from opentelemetry.util.types import Attributes

    from cirron_otel.recorder import Recorder


class SpoolOnlySpan(otel_trace.NonRecordingSpan):
    """The current span where the application's sampler dropped it: recorded for the spool only."""

    def __init__(self, context: SpanContext, scope: JoinedScope) -> None:
        super().__init__(context)
        self._scope = scope

    def is_recording(self) -> bool:
        """Whether the scope takes attributes and events."""
        return self._scope.is_open

    def set_attribute(self, key: str, value: object) -> None:
        """Set one attribute of the scope."""
        self._scope.set_attribute(key, value)

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Set several attributes of the scope."""
        self._scope.set_attributes(attributes)

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Add an event to the scope."""
        if self._scope.is_open:
            BaseScope.note_event(self._scope, name, dict(attributes or {}), timestamp)


class JoinedScope(BaseScope):
    """A scope whose span the application's provider made (:attr:`span`)."""

    __slots__ = ("_given", "_marks_shown", "exported", "span")

    span: otel_trace.Span
    _given: dict[str, Any]
    _marks_shown: int
    #: Whether the application's sampler keeps the span.
    exported: bool

    def rename(self, name: str) -> None:
        """Rename scope and span."""
        self.name = name
        self.span.update_name(name)

    def set_attribute(self, key: str, value: object) -> None:
        """Set one attribute."""
        if self.is_open:
            self.attrs = {**self.attrs, key: value}

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Set several attributes."""
        if self.is_open:
            self.attrs = {**self.attrs, **attributes}

    def is_recording(self) -> bool:
        """Whether the scope takes attributes and marks."""
        return self.is_open

    def get_span_context(self) -> SpanContext:
        """The context of the application's span."""
        return self.span.get_span_context()

    def _span(self) -> otel_trace.Span:
        return self.span

    def _begin(self, context: Context, start_ns: int) -> None:
        rec = self._rec
        user = attributes(self.attrs)[0] if self.attrs else {}
        self._given = {**user, **rec.exported_attributes(self)}
        self._marks_shown = 0
        links = None if self.extra is None else self.extra.links
        span = rec.spans.tracer.start_span(
            self.name, context, attributes=self._given, links=links, start_time=start_ns
        )
        made = span.get_span_context()
        self.exported = span.is_recording()
        self.span = span = span if self.exported else SpoolOnlySpan(made, self)
        self.id = ids.spool_id(made.span_id, made.trace_id)
        if rec.session is None:
            self._given[semconv.SESSION_ID] = self.id
            if self.exported:
                span.set_attribute(semconv.SESSION_ID, self.id)
        trace = self.trace
        if trace.root is self:
            trace.id = f"{made.trace_id:032x}"
            trace.low = trace.id[16:]
            trace.flags = TraceFlags(made.trace_flags)
            trace.otel = self.otel = SpanOtel(
                trace_id=trace.id[:16], sampled=UNSET if made.trace_flags.sampled else False
            )
        elif not made.trace_flags.sampled and self.otel.sampled is UNSET:
            self.otel = SpanOtel(
                trace_id=self.otel.trace_id, parent_span_id=self.otel.parent_span_id, sampled=False
            )

    def _finish(self, end_ns: int) -> None:
        span, extra = self.span, self.extra
        if not self.exported:
            return
        late = attributes(self.attrs)[0] if self.attrs else {}
        if extra is not None:
            late.update(self._rec.exported_attributes(self))
            if extra.status is not StatusCode.UNSET:
                span.set_status(Status(extra.status, extra.status_message))
        changed = {key: value for key, value in late.items() if self._given.get(key) != value}
        if changed:
            span.set_attributes(changed)
        self._take_over(span, len(self._given.keys() | changed.keys()))
        span.end(end_ns)

    def _take_over(self, span: Any, known: int) -> None:  # noqa: ANN401 - an SDK span
        """What somebody set on the span directly belongs into the spool too."""
        try:
            found = span.attributes
            if len(found) > known:
                ours = self._rec.exported_attributes(self)
                self.attrs = {
                    **{key: value for key, value in found.items() if key not in ours},
                    **self.attrs,
                }
            noted = 0 if self.extra is None else len(self.extra.events)
            events = span.events if noted + self._marks_shown < self._rec.limits.max_events else ()
            if len(events) > noted + self._marks_shown:
                extra = self.extra = self.extra or Extra()
                mine = {(name, timestamp) for name, timestamp, _ in extra.events}
                for event in events:
                    attrs = dict(event.attributes or {})
                    seen = semconv.MARK_ID in attrs or (event.name, event.timestamp) in mine
                    if not seen:
                        extra.events.append((event.name, event.timestamp, attrs))
            status = span.status
            if status.status_code is not StatusCode.UNSET:
                extra = self.extra = self.extra or Extra()
                extra.status, extra.status_message = status.status_code, status.description
        except AttributeError:
            return  # not an SDK span after all: nothing can be read back

    def note_event(self, name: str, attrs: dict[str, Any], timestamp: int | None = None) -> None:
        """Keep an event, and show it on the application's span."""
        timestamp = timestamp or self._rec.clock.now()
        super().note_event(name, attrs, timestamp)
        if self.exported:
            self.span.add_event(name, attrs, timestamp)

    def mark_event(self, record: MarkRecord, *, deferred: bool) -> None:
        """Show a mark as event now, and as attribute when the span ends."""
        if not self.exported:
            return
        self._marks_shown += 1
        self.span.add_event(
            record.name, mark_attributes(record, deferred=deferred), record.ts_ns
        )
        if not deferred and record.value is not None:
            extra = self.extra = self.extra or Extra()
            values = extra.mark_values = extra.mark_values or {}
            values[semconv.MARK_PREFIX + record.name] = record.value


class JoinedLoopScope(JoinedScope):
    """A scope that a loop opened on the user's behalf."""

    __slots__ = ()
    auto = True


class JoinedSpans:
    """How the recorder makes scopes with the application's provider."""

    description = "joined"
    lean = False
    processors: tuple[Any, ...] = ()
    scope_class: type[BaseScope] = JoinedScope
    loop_class: type[BaseScope] = JoinedLoopScope

    def __init__(self, rec: Recorder, provider: TracerProvider) -> None:
        self.limits = Limits()
        self.provider = provider
        self.tracer = provider.get_tracer(semconv.INSTRUMENTATION_NAME, rec.sdk_version)
        self._processor = SpoolSpanProcessor.on(provider)
        self._processor.recorder = rec

    def sample_next(self) -> None:
        """Costs are estimated for our own spans only."""

    def sampled(self, trace_id: str) -> bool:  # noqa: ARG002 - the provider's sampler decides
        """What a trace is taken for until its root span exists."""
        return True

    def shutdown(self) -> None:
        """Let go of the provider; it stays the application's."""
        self._processor.recorder = None
