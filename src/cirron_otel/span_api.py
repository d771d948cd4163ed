"""What OpenTelemetry asks of a span: the ``Span`` methods, and the fields exporters read.

:class:`SpanMethods` is the part that every scope has, whichever provider its span comes from, so
that what ``with ci.scope("x") as s`` gives may be used wherever a span is expected.
:class:`ReadableMethods` is the ``ReadableSpan`` part, for scopes that are their own span.

Limits (``OTEL_SPAN_*``, ``OTEL_ATTRIBUTE_*``) bound what the readable part shows, never what the
spool keeps.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as otel_trace
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.trace import (
    INVALID_SPAN_CONTEXT,
    Link,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceState,
)

from cirron_otel import semconv
from cirron_otel.batch import MarkRecord
from cirron_otel.scope_base import BaseScope, Extra
from cirron_otel.scope_core import ENDED, NEW, OPEN
from cirron_otel.values import attribute_value, attributes

if TYPE_CHECKING:
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope
    from opentelemetry.util.types import Attributes

logger = logging.getLogger("cirron_otel")

_EMPTY_STATE = TraceState()
_VALUE_TYPES = {float: "float", int: "int", str: "string", bool: "bool", type(None): "float"}


class SpanMethods(BaseScope):
    """``opentelemetry.trace.Span`` on a scope. Thread-safe; never raises, never blocks."""

    __slots__ = ()

    def is_recording(self) -> bool:
        """Whether the span takes attributes and events: from its start to its end."""
        return self._state == OPEN

    def set_attribute(self, key: str, value: object) -> None:
        """Set one attribute; ignored (logged) once the span has ended."""
        if self._writable("set_attribute"):
            self.clean = None
            self.attrs[key] = value

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Set several attributes at once."""
        if self._writable("set_attributes"):
            self.clean = None
            self.attrs.update(attributes)

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Add a span event; it is kept in the spool beside the marks."""
        if self._writable("add_event"):
            self.note_event(name, dict(attributes or {}), timestamp)

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span; an invalid one that says nothing is left out."""
        if self._writable("add_link") and valid_link(context, attributes):
            extra = self.extra = self.extra or Extra()
            extra.links.append(Link(context, attributes))
            if len(extra.links) > self._rec.limits.max_links:
                del extra.links[0]
                extra.dropped_links += 1

    def update_name(self, name: str) -> None:
        """Rename the span."""
        if self._writable("update_name"):
            self.rename(name)

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status: OK is final, UNSET is ignored."""
        if not self._writable("set_status"):
            return
        code, text = (
            (status.status_code, status.description)
            if isinstance(status, Status)
            else (status, description)
        )
        extra = self.extra = self.extra or Extra()
        if extra.status is StatusCode.OK or code is StatusCode.UNSET:
            return
        extra.status = code
        extra.status_message = text if code is StatusCode.ERROR else None

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT001, FBT002, ARG002 - OTel's signature
    ) -> None:
        """Record an exception as a span event; the status stays as it is."""
        if self._writable("record_exception"):
            noted = _Noted()
            BaseScope.note_exception(noted, exception)  # type: ignore[arg-type]
            self.note_event(
                semconv.EXCEPTION_EVENT, {**noted.event, **(attributes or {})}, timestamp
            )

    def end(self, end_time: int | None = None) -> None:
        """End the span; the context is put right by whoever attached it."""
        if self._state == ENDED:
            logger.warning("Calling end() on an ended span.")
            return
        self.close(end_ns=end_time, restore=False)

    def _writable(self, what: str) -> bool:
        if self._state == OPEN:
            return True
        if self._state == ENDED:
            logger.warning("%s() on the ended span %r has no effect", what, self.name)
        return False


otel_trace.Span.register(SpanMethods)


class _Noted:
    """Takes what :meth:`BaseScope.note_exception` would leave on a scope, to use the event only."""

    def __init__(self) -> None:
        self.extra = Extra()
        self.attrs: dict[str, Any] = {}
        self.event: dict[str, Any] = {}

    def note_event(
        self,
        name: str,  # noqa: ARG002 - as a scope's
        attrs: dict[str, Any],
        timestamp: int | None = None,  # noqa: ARG002
    ) -> None:
        """Take the event's attributes."""
        self.event = attrs


class MarkEvents:
    """The newest marks of a span as events, and how many there were in all."""

    __slots__ = ("count", "kept")

    def __init__(self, limit: int | None) -> None:
        self.kept: deque[tuple[MarkRecord, bool]] = deque(maxlen=limit)
        self.count = 0

    def add(self, record: MarkRecord, *, deferred: bool) -> None:
        """Keep one more; past the limit the oldest goes."""
        self.count += 1
        self.kept.append((record, deferred))


class ReadableMethods(SpanMethods):
    """``opentelemetry.sdk.trace.ReadableSpan`` on a scope that is its own span.

    While the span is open each read shows it as it stands; once it has ended nothing changes any
    more, and what was read first is kept.
    """

    __slots__ = ("_events", "_links", "_read")

    _context: SpanContext | None = None
    _marks_shown: MarkEvents | None = None
    #: The user's attributes as they were at the end.
    _final: dict[str, Any] | None = None

    def get_span_context(self) -> SpanContext:
        """Trace id, span id and flags; made when first asked for."""
        made = self._context
        if made is None:
            if self._state == NEW:
                return INVALID_SPAN_CONTEXT  # it was never opened
            # A trace of our own has no state; one that came from elsewhere passes its on.
            parent = self.parent if self.trace.root is None else None
            made = self._context = SpanContext(
                int(self.trace.id, 16), int(self.id[:16], 16), is_remote=False,
                trace_flags=self.trace.flags,
                trace_state=_EMPTY_STATE if parent is None else parent.trace_state,
            )  # fmt: skip
        return made

    context = property(get_span_context)

    @property
    def parent(self) -> SpanContext | None:
        """The OTel parent's context; None for the root of a trace."""
        extra, above = self.extra, self.above
        if extra is not None and extra.otel_parent is not None:
            return extra.otel_parent
        if above is None:
            return None
        above = above if above.trace is self.trace else self.trace.root
        return None if above is None else above.get_span_context()

    @property
    def kind(self) -> SpanKind:
        """The span kind; INTERNAL unless it was started with another."""
        return SpanKind.INTERNAL if self.extra is None else self.extra.kind

    @property
    def start_time(self) -> int:
        """Start, ns since the Unix epoch."""
        return self.start_ns

    @property
    def end_time(self) -> int | None:
        """End, ns since the Unix epoch; None while the span is open."""
        return self.end_ns if self._state == ENDED else None

    @property
    def status(self) -> Status:
        """The status set, or the exception that ended the scope."""
        extra = self.extra
        return Status() if extra is None else Status(extra.status, extra.status_message)

    @property
    def attributes(self) -> BoundedAttributes:
        """The user's attributes and ours, the newest up to the span limit."""
        if self._state != ENDED:
            return self._make_attributes()
        try:
            return self._read
        except AttributeError:
            self._read: BoundedAttributes = self._make_attributes()
            return self._read

    def _make_attributes(self) -> BoundedAttributes:
        limits = self._rec.limits
        given = self.attrs if self._final is None else self._final
        return BoundedAttributes(
            limits.max_attributes,
            {**attributes(given)[0], **self._rec.exported_attributes(self)},
            max_value_len=limits.max_attribute_length,
        )

    @property
    def events(self) -> Sequence[Event]:
        """Span events and marks by time, the newest up to the span limit."""
        if self._state != ENDED:
            return self._make_events()
        try:
            return self._events
        except AttributeError:
            self._events: Sequence[Event] = self._make_events()
            return self._events

    def _make_events(self) -> tuple[Event, ...]:
        extra, marks = self.extra, self._marks_shown
        found: list[tuple[int, str, dict[str, Any]]] = []
        if marks is not None:
            found = [
                (record.ts_ns, record.name, mark_attributes(record, deferred=deferred))
                for record, deferred in tuple(marks.kept)
            ]
        if extra is not None:
            found += [
                (ts, name, {key: attribute_value(value) for key, value in attrs.items()})
                for name, ts, attrs in tuple(extra.events)
            ]
        if not found:
            return ()
        limits = self._rec.limits
        found.sort(key=lambda event: event[0])
        if limits.shown_events is not None:
            found = found[max(0, len(found) - limits.shown_events) :]
        return tuple(
            Event(
                name,
                BoundedAttributes(
                    limits.max_event_attributes, attrs, max_value_len=limits.max_value_length
                ),
                timestamp=ts,
            )
            for ts, name, attrs in found
        )

    @property
    def links(self) -> Sequence[Link]:
        """Links to other spans, the newest up to the span limit."""
        if self.extra is None or not self.extra.links:
            return ()
        limits = self._rec.limits
        found = tuple(self.extra.links)
        if limits.shown_links is not None:
            found = found[max(0, len(found) - limits.shown_links) :]
        return tuple(
            Link(
                link.context,
                BoundedAttributes(
                    limits.max_link_attributes,
                    {key: attribute_value(value) for key, value in (link.attributes or {}).items()},
                    max_value_len=limits.max_value_length,
                ),
            )
            for link in found
        )

    @property
    def resource(self) -> Resource:
        """The resource of our provider."""
        return self._rec.resource

    @property
    def instrumentation_scope(self) -> InstrumentationScope:
        """Ours, or that of the tracer the span was made with."""
        extra = self.extra
        if extra is not None and extra.instrumentation is not None:
            return extra.instrumentation  # type: ignore[no-any-return]
        return self._rec.instrumentation_scope

    @property
    def instrumentation_info(self) -> InstrumentationScope:
        """Old name of ``instrumentation_scope``."""
        return self.instrumentation_scope

    @property
    def dropped_attributes(self) -> int:
        """How many attributes the span limit left out."""
        return self.attributes.dropped

    @property
    def dropped_events(self) -> int:
        """How many events and marks the span limit left out."""
        extra, marks = self.extra, self._marks_shown
        total = 0 if marks is None else marks.count
        if extra is not None:
            total += len(extra.events) + extra.dropped_events
        return total - len(self.events) if total else 0

    @property
    def dropped_links(self) -> int:
        """How many links the span limit left out."""
        extra = self.extra
        if extra is None or not extra.links:
            return 0
        return extra.dropped_links + len(extra.links) - len(self.links)

    def to_json(self, indent: int | None = 4) -> str:
        """The span as the SDK's console exporter prints it."""
        readable = ReadableSpan(
            name=self.name,
            context=self.get_span_context(),
            parent=self.parent,
            resource=self.resource,
            attributes=dict(self.attributes),
            events=self.events,
            links=self.links,
            kind=self.kind,
            status=self.status,
            start_time=self.start_time,
            end_time=self.end_time,
            instrumentation_scope=self.instrumentation_scope,
        )
        return str(readable.to_json(indent))


def valid_link(context: SpanContext | None, attributes: Attributes) -> bool:
    """Whether a link says anything: where to, or at least something."""
    return context is not None and bool(context.is_valid or attributes or context.trace_state)


def mark_attributes(record: MarkRecord, *, deferred: bool) -> dict[str, Any]:
    """The attributes of the span event that a mark becomes.

    What can be told is not said again: never the id (see ``Recorder.mark_id``),
    ``cirron.mark.kind`` only where it is not ``point``, ``cirron.mark.value_type`` only where it is
    not the type of ``value``.
    """
    attrs: dict[str, Any] = dict(record.attrs)
    value = record.value
    if deferred:
        attrs[semconv.MARK_DEFERRED] = True
    elif value is not None:
        attrs[semconv.MARK_VALUE] = value
    else:
        attrs[semconv.MARK_VALUE] = float(str(record.value_nonfinite))
        attrs[semconv.MARK_NONFINITE] = record.value_nonfinite
    if record.kind != "point":
        attrs[semconv.MARK_KIND] = record.kind
    if record.value_type != _VALUE_TYPES.get(type(value)):
        attrs[semconv.MARK_VALUE_TYPE] = record.value_type
    return attrs


def shown_value(record: MarkRecord) -> Any:  # noqa: ANN401 - bool, int, float or str
    """A mark's value as attribute ``cirron.mark.<name>``: as any other, NaN becomes its name."""
    return record.value if record.value is not None else record.value_nonfinite
