"""Scopes through a provider that the application already has.

The application's tracer makes the span, so its sampler, limits, processors and exporters see our
scopes as they see any other; the scope beside it keeps the canonical tree and writes the spool
row. A span that the sampler dropped is still recorded in the spool: sampling decides export.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
)

from cirron_otel import semconv
from cirron_otel.batch import MAX_MARK_IDS, MarkRecord, SpanOtel, SpanRecord
from cirron_otel.core import JoinedCore
from cirron_otel.processor import SpoolSpanProcessor
from cirron_otel.provider import Limits, blame
from cirron_otel.scope_base import BaseScope, Extra
from cirron_otel.scope_core import NEW, NO_ATTRS
from cirron_otel.span_api import SpanMethods, mark_attributes, shown_value
from cirron_otel.values import attributes

if TYPE_CHECKING:
    from collections.abc import Mapping

    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.util.types import Attributes

    from cirron_otel.recorder import Recorder

#: Attributes that a scope does not share with its children.
_OWN = (semconv.INDEX, semconv.PARENT_ID)
_LOW = (1 << 64) - 1


class SpoolOnlySpan(otel_trace.NonRecordingSpan):
    """The current span where the application's sampler dropped it: recorded for the spool only."""

    def __init__(self, context: SpanContext, scope: JoinedScope) -> None:
        super().__init__(context)
        self._scope = scope

    def is_recording(self) -> bool:
        """Whether the scope takes attributes and events."""
        return self._scope.is_recording()

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
        self._scope.add_event(name, attributes, timestamp)

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to the scope."""
        self._scope.add_link(context, attributes)

    def update_name(self, name: str) -> None:
        """Rename the scope."""
        self._scope.update_name(name)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the scope's status."""
        self._scope.set_status(status, description)

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT001, FBT002 - OTel's signature
    ) -> None:
        """Record an exception on the scope."""
        self._scope.record_exception(exception, attributes, timestamp, escaped)

    def end(self, end_time: int | None = None) -> None:
        """End the scope."""
        self._scope.end(end_time)


class JoinedScope(SpanMethods, JoinedCore):
    """A scope whose span the application's provider made (:attr:`span`)."""

    __slots__ = ()

    __enter__ = JoinedCore.enter
    __exit__ = JoinedCore.exit

    def share_nothing(self) -> None:
        """Children need not repeat what this scope bears."""
        self._shared = {}

    # --- what BaseScope asks for -----------------------------------------------------------------

    def rename(self, name: str) -> None:
        """Rename scope and span."""
        self.name = name
        if self.exported:
            self.span.update_name(name)

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span."""
        super().add_link(context, attributes)
        if self.is_open and self.exported:
            self.span.add_link(context, attributes)

    def get_span_context(self) -> SpanContext:
        """The context of the application's span."""
        return INVALID_SPAN_CONTEXT if self._state == NEW else self.span.get_span_context()

    def _span(self) -> otel_trace.Span:
        return self.span

    def _begin(self, context: Context, start_ns: int) -> None:
        rec = self._rec
        given = rec.exported_attributes(self)
        self._shared = {key: value for key, value in given.items() if key not in _OWN}
        self._start_span(context, given, start_ns)
        made = self.span.get_span_context()
        if rec.session is None:
            for known in (self._given, self._shared):
                known[semconv.SESSION_ID] = self.id
            if self.exported:
                self.span.set_attribute(semconv.SESSION_ID, self.id)
        trace = self.trace
        if trace.root is self:
            trace.id = f"{made.trace_id:032x}"
            trace.low = trace.id[16:]
            trace.flags = TraceFlags(made.trace_flags)
            trace.otel = self.otel = SpanOtel(
                trace_id=trace.id[:16], sampled=UNSET if made.trace_flags.sampled else False
            )

    def _start_span(self, context: Context, given: dict[str, Any], start_ns: int) -> None:
        """Have the application's tracer make the span; sets ``span``, ``exported`` and ``id``."""
        rec, extra = self._rec, self.extra
        if self.attrs:
            self._seen = dict(self.attrs)
            given = {**attributes(self._seen)[0], **given}
        else:
            self._seen = None
        self._given = given
        try:
            span = rec.spans.tracer.start_span(  # type: ignore[union-attr] # it made this scope
                self.name, context, attributes=given or None,
                kind=SpanKind.INTERNAL if extra is None else extra.kind,
                links=None if extra is None else extra.links, start_time=start_ns,
            )  # fmt: skip
        except Exception as error:  # noqa: BLE001 - see _guard
            self._no_span(context, error)
        else:
            self._take_span(context, span)

    def _take_span(self, context: Context, span: otel_trace.Span) -> None:
        """Take what the tracer made, which may be a span that is dropped, or none at all."""
        # A tracer that is switched off may hand out the current span, even where it is ours.
        self.exported = type(span) is not SpoolOnlySpan and bool(span.is_recording())
        self._identify(context, span, failed=False)

    def _no_span(self, context: Context, error: Exception) -> None:
        """Go on without a span of the tracer's, whose processors raised."""
        blame(self._rec.guard, "on_start", error, "a processor of the application")
        self.exported = False
        self._identify(context, otel_trace.INVALID_SPAN, failed=True)

    def _identify(self, context: Context, span: otel_trace.Span, *, failed: bool) -> None:
        made = span.get_span_context()
        if not self.exported:
            above = otel_trace.get_current_span(context).get_span_context()
            if not made.is_valid or made.span_id == above.span_id:
                # There is no span at all, but the spool needs one: it gets an id of ours. Where a
                # processor failed, the spans below are to be exported all the same.
                made = SpanContext(
                    above.trace_id if above.is_valid else int(self.trace.id, 16),
                    int(self._rec.next_span_id(), 16), is_remote=False,
                    trace_flags=self.trace.flags if failed else above.trace_flags,
                    trace_state=above.trace_state,
                )  # fmt: skip
            span = SpoolOnlySpan(made, self)
        if bool(made.trace_flags & TraceFlags.SAMPLED) is (self.otel.sampled is False):
            self.otel = SpanOtel(
                trace_id=self.otel.trace_id, parent_span_id=self.otel.parent_span_id,
                sampled=UNSET if made.trace_flags.sampled else False,
            )  # fmt: skip
        self.span = span
        self.id = f"{made.span_id:016x}{made.trace_id & _LOW:016x}"

    def _blame_end(self, error: Exception) -> None:
        blame(self._rec.guard, "on_end", error, "a processor of the application")

    def _finish(self, end_ns: int) -> None:
        if not self.exported:
            return
        span = self.span
        try:
            if not span.is_recording():
                return  # somebody ended it before us
            extra = self.extra
            if extra is not None or self.values or (self.attrs and self._changed()):
                self._set_late(span, extra)
            span.end(end_ns)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._blame_end(error)

    def row(self, end_ns: int | Any = UNSET) -> SpanRecord:  # noqa: ANN401 - UNSET while open
        """The scope as the spool writes it, with what somebody set on the span directly."""
        span = self.span
        if self.exported and isinstance(span, ReadableSpan) and end_ns is not UNSET:
            self._take_over(span)
        return super().row(end_ns)

    def _set_late(self, span: otel_trace.Span, extra: Extra | None) -> None:
        late = attributes(self.attrs)[0] if self.attrs and self._changed() else {}
        given = self._given
        for name, value in (self.values or NO_ATTRS).items():
            late[semconv.MARK_PREFIX + name] = value
        if extra is not None:
            if extra.error_type is not None or self._rec.resources or extra.gpu_ns is not None:
                late.update(self._rec.exported_attributes(self))
            if extra.status is not StatusCode.UNSET:
                span.set_status(Status(extra.status, extra.status_message))
        late = {key: value for key, value in late.items() if given.get(key) != value}
        if late:
            span.set_attributes(late)
            self._given = {**given, **late}  # these are no stranger's

    def _changed(self) -> bool:
        """Whether the user's attributes are others than at the start."""
        try:
            return self.attrs != self._seen
        except Exception:  # noqa: BLE001 - arrays do not like to be compared
            return True

    def _take_over(self, span: Any) -> None:  # noqa: ANN401 - an SDK span
        """What somebody set on the span directly belongs into the spool too."""
        self.name = span.name
        found = span.attributes
        if self.attrs or len(found) > len(self._given):
            self._take_attributes(found)
        extra, events, links = self.extra, span.events, span.links
        noted = len(self.marks or ()) + self.more_marks
        if events and len(events) > noted + (0 if extra is None else len(extra.events)):
            extra = self.extra = extra or Extra()
            mine = {(name, timestamp) for name, timestamp, _ in extra.events}
            extra.events += [
                (event.name, event.timestamp, dict(event.attributes or {}))
                for event in events
                if (event.name, event.timestamp) not in mine
                and not self._is_mark(event.timestamp, event.attributes or {})
            ]
        if links and (extra is None or len(links) > len(extra.links)):
            extra = self.extra = extra or Extra()
            extra.links = list(links)
        status = span.status
        if status.status_code is not StatusCode.UNSET:
            extra = self.extra = extra or Extra()
            extra.status, extra.status_message = status.status_code, status.description

    def _is_mark(self, ts_ns: int, attrs: Mapping[str, Any]) -> bool:
        if semconv.MARK_VALUE not in attrs and semconv.MARK_DEFERRED not in attrs:
            return False
        marks = self.marks or []
        return len(marks) >= MAX_MARK_IDS or self._rec.mark_id(self, ts_ns) in marks

    def _take_attributes(self, found: Mapping[str, Any]) -> None:
        given, mine = self._given, self.attrs
        theirs = {
            key: value for key, value in found.items()
            if key not in given or (key in mine and _overwritten(given[key], value))
        }  # fmt: skip
        if theirs:
            # Where both set the same one, the scope's own word comes last: it is exported last.
            self.attrs = {**theirs, **mine} if self._changed() else {**mine, **theirs}

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
        self.span.add_event(record.name, mark_attributes(record, deferred=deferred), record.ts_ns)
        if not deferred:
            self.values = self.values or {}
            self.values[record.name] = shown_value(record)


def _overwritten(given: object, found: object) -> bool:
    """Whether an attribute has another value now; one cut to the limit has not."""
    if isinstance(found, str):
        return not (isinstance(given, str) and given.startswith(found))
    return isinstance(found, (bool, int, float)) and found != given


class JoinedLoopScope(JoinedScope):
    """A scope that a loop opened on the user's behalf."""

    __slots__ = ()
    auto = True


class JoinedSpans:
    """How the recorder makes scopes with the application's provider."""

    description = "joined"
    lean = False
    #: The application's sampler decides, when its tracer makes a span.
    keeps_all = True
    processors: tuple[Any, ...] = ()
    scope_class: type[BaseScope] = JoinedScope
    loop_class: type[BaseScope] = JoinedLoopScope

    def __init__(self, rec: Recorder, provider: TracerProvider) -> None:
        self.limits = Limits()
        self.provider = provider
        self.tracer = provider.get_tracer(semconv.INSTRUMENTATION_NAME, rec.sdk_version)
        self._rec = rec
        self._processor = SpoolSpanProcessor.on(provider)
        self._processor.follow(rec)

    def session_opened(self, session: BaseScope) -> None:
        """From here on the instrumentation scope says what is the same for every span.

        Each attribute of a span costs a microsecond with this SDK, on the training thread.
        """
        rec = self._rec
        if isinstance(session, JoinedScope):
            session.share_nothing()
        self.tracer = self.provider.get_tracer(
            semconv.INSTRUMENTATION_NAME, rec.sdk_version, None,
            {
                semconv.SESSION_ID: session.id,
                semconv.RANK: rec.rank,
                semconv.RUN_ID: rec.run_id,
                semconv.THREAD_ID: session.thread_id,
            },
        )  # fmt: skip

    def common_attributes(self, scope: BaseScope) -> dict[str, Any]:
        """What the instrumentation scope does not say already."""
        session = self._rec.session
        if session is None:
            return {semconv.RANK: self._rec.rank, semconv.THREAD_ID: scope.thread_id}
        if scope.thread_id != session.thread_id:
            return {semconv.THREAD_ID: scope.thread_id}
        return {}

    def sample_next(self) -> None:
        """Costs are estimated for our own spans only."""

    def sampled(self, trace_id: str) -> bool:  # noqa: ARG002 - the provider's sampler decides
        """What a trace is taken for until its root span exists."""
        return True

    def shutdown(self) -> None:
        """Let go of the provider; it stays the application's."""
        self._processor.follow(None)
