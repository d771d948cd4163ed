"""A lean OpenTelemetry span for our own provider.

:class:`ScopeSpan` is scope and span in one object: the official context is used as it is, every
``Span`` method and every ``ReadableSpan`` field is there, so stock processors and exporters can be
added; but nothing is allocated that a plain ``with ci.scope("x")`` does not need.

``__enter__`` and ``__exit__`` are the hot path: they do inline what :meth:`BaseScope.open` and
:meth:`BaseScope.close` do in general, for the case that nothing special is going on
(``Recorder.busy`` is false and the parent is simply the current scope).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from threading import get_ident
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import Event
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceState
from opentelemetry.util.types import Attributes

from cirron_otel import semconv
from cirron_otel.batch import MarkRecord, SpanRecord
from cirron_otel.context import SCOPE_KEY, SPAN_KEY, attach_context, get_current
from cirron_otel.scope_base import (
    ENDED,
    MAX_DEPTH,
    NEW,
    NO_ATTRS,
    OPEN,
    BaseScope,
    Extra,
)
from cirron_otel.values import attribute_value, attributes

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

logger = logging.getLogger("cirron_otel")

_EMPTY_STATE = TraceState()


class ScopeSpan(BaseScope):
    """A scope that is its own OTel span. See :class:`BaseScope` for its promises.

    After the end the object is frozen and is handed to processors as it is: it also satisfies
    what exporters read of a ``ReadableSpan``.
    """

    __slots__ = ("_events", "_read")

    _context: SpanContext | None = None

    def __init__(
        self,
        rec: Any,  # noqa: ANN401 - Recorder; see BaseScope
        name: str,
        index: int | None,
        attrs: dict[str, Any],
    ) -> None:
        self._rec = rec
        self.name = name
        self.index = index
        self.attrs = attrs
        self.marks = None
        self.ctx = None
        self.ops = 0
        self._state = NEW

    # --- hot path ------------------------------------------------------------------------------

    def __enter__(self) -> ScopeSpan:  # noqa: PYI034 - subclasses are ours
        """Open the scope under the current one; it becomes current."""
        try:
            if not self.open_here(None, None, 0):
                self.open()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("scope.enter", error)
        return self

    def open_here(self, start_ns: int | None, iteration: int | None, reserve: int) -> bool:
        """Open under the current scope, if that can be done the short way; says whether it was.

        ``start_ns`` back-dates, ``iteration`` numbers a step, ``reserve`` is the room that must be
        left in the trace. Where it says False nothing has happened: use :meth:`open`.
        """
        rec = self._rec
        context = get_current()
        parent: Any = context.get(SCOPE_KEY)
        if (
            rec.busy
            or parent is None
            or parent._state != OPEN
            or parent.ctx is not context
            or self._state
            or (depth := parent.depth + 1) > MAX_DEPTH
            or (
                (trace := parent.trace).count >= trace.limit - reserve
                and ((trace := trace.window) is None or trace.count >= trace.limit - reserve)
            )
        ):
            return False
        trace.count += 1
        try:
            self.id = rec.pop_span_id() + trace.low
        except IndexError:
            self.id = rec.next_span_id() + trace.low
        self.trace = trace
        if trace is parent.trace:
            self.otel = trace.otel
        else:
            self.otel = trace.child_otel
            trace.last = self
        self.above = parent
        self.depth = depth
        self.iteration = parent.iteration if iteration is None else iteration
        self.thread_id = get_ident()
        self.prev = context
        if len(context) == 2:  # noqa: PLR2004 - our two keys and nothing else
            self.ctx = new = Context({SPAN_KEY: self, SCOPE_KEY: self})
        else:
            self.ctx = new = Context({**context, SPAN_KEY: self, SCOPE_KEY: self})
        attach_context(new)
        clock = rec.clock
        self._offset = offset = clock.offset_ns
        if start_ns is None:
            start_ns = clock.monotonic_ns() + offset
        self.start_ns = self.last_ns = start_ns
        self._state = OPEN
        rec.open[self.id] = self
        return True

    def add_closed(
        self, name: str, start_ns: int, end_ns: int, exc: BaseException | None = None
    ) -> None:
        """Record a child that is over already."""
        rec, trace = self._rec, self.trace
        if rec.busy or exc is not None or self._state != OPEN or trace.count >= trace.limit:
            super().add_closed(name, start_ns, end_ns, exc)
            return
        trace.count += 1
        self.ops += 1
        self.last_ns = max(self.last_ns, end_ns)
        rec.append_span(
            SpanRecord(
                rec.next_span_id() + trace.low, name, self.id, None, start_ns, end_ns,
                None, None, None, self.thread_id, rec.pid, rec.rank, NO_ATTRS, (), UNSET,
                self.iteration, UNSET, trace.otel,
            )
        )  # fmt: skip

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End this scope and nothing else; an exception is recorded and flies on."""
        rec = self._rec
        try:
            if (
                exc is not None
                or self._state != OPEN
                or rec.busy
                or self.extra is not None
                or get_current() is not self.ctx
                or (above := self.above) is None
                or above._state != OPEN
            ):
                super().__exit__(exc_type, exc, tb)
                return
            self._state = ENDED
            self.end_ns = end = rec.clock.monotonic_ns() + self._offset
            attach_context(self.prev)
            above.last_ns = end
            if self.ops:
                rec.overhead_mark(self, end)
                above.ops += self.ops
            above.ops += 1
            if self.attrs or self.marks:
                rec.append_span(self.row(end))
            else:
                rec.append_span(
                    SpanRecord(
                        self.id, self.name, above.id, self.index, self.start_ns, end,
                        None, None, None, self.thread_id, rec.pid, rec.rank, NO_ATTRS, (), UNSET,
                        self.iteration, UNSET, self.otel,
                    )
                )  # fmt: skip
            del rec.open[self.id]
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("scope.exit", error)

    # --- what BaseScope asks for -----------------------------------------------------------------

    def _begin(self, context: Context, start_ns: int) -> None:
        self.id = self._rec.next_span_id() + self.trace.low
        self._started(context)

    def _started(self, context: Context) -> None:
        for processor in self._rec.processors:
            if self.extra is None:
                self.extra = Extra()
            self.extra.parent_context = context
            try:
                processor.on_start(self, context)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - a foreign processor may raise anything
                self._rec.guard.swallow("processor.on_start", error)

    def _finish(self, end_ns: int) -> None:
        for processor in self._rec.processors:
            try:
                processor.on_end(self)  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - a foreign processor may raise anything
                self._rec.guard.swallow("processor.on_end", error)

    def _span(self) -> otel_trace.Span:
        return self  # type: ignore[return-value] # registered as a virtual subclass below

    def mark_event(self, record: MarkRecord, *, deferred: bool) -> None:
        """Keep a mark as span event too, while there are processors to see it."""
        if not self._rec.processors:
            return
        extra = self.extra = self.extra or Extra()
        extra.events.append((record.name, record.ts_ns, mark_attributes(record, deferred=deferred)))
        if len(extra.events) > self._rec.limits.max_events:
            del extra.events[0]
            extra.dropped_events += 1
        if not deferred and record.value is not None:
            values = extra.mark_values = extra.mark_values or {}
            values[semconv.MARK_PREFIX + record.name] = record.value

    # --- opentelemetry.trace.Span ------------------------------------------------------------------

    def get_span_context(self) -> SpanContext:
        """Trace id, span id and flags; made when first asked for."""
        made = self._context
        if made is None:
            made = self._context = SpanContext(
                int(self.trace.id, 16), int(self.id[:16], 16), is_remote=False,
                trace_flags=self.trace.flags, trace_state=_EMPTY_STATE,
            )  # fmt: skip
        return made

    context = property(get_span_context)

    def is_recording(self) -> bool:
        """Whether the span takes attributes and events: from its start to its end."""
        return self._state == OPEN

    def set_attribute(self, key: str, value: object) -> None:
        """Set one attribute; ignored (logged) once the span has ended."""
        if self._writable("set_attribute"):
            self.attrs = {**self.attrs, key: value}

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Set several attributes at once."""
        if self._writable("set_attributes"):
            self.attrs = {**self.attrs, **attributes}

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Add a span event; it is kept in the spool beside the marks."""
        if self._writable("add_event"):
            self.note_event(name, dict(attributes or {}), timestamp)

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span; the oldest is dropped past the limit."""
        if context is None or not self._writable("add_link"):
            return
        if context.is_valid or attributes or context.trace_state:
            extra = self.extra = self.extra or Extra()
            extra.links.append(Link(context, attributes))
            if len(extra.links) > self._rec.limits.max_links:
                del extra.links[0]
                extra.dropped_links += 1

    def update_name(self, name: str) -> None:
        """Rename the span."""
        if self._writable("update_name"):
            self.name = name

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
        if not self._writable("record_exception"):
            return
        extra = self.extra = self.extra or Extra()
        kept = (extra.status, extra.status_message, self.attrs)
        self.note_exception(exception)
        extra.status, extra.status_message, self.attrs = kept
        if attributes or timestamp:
            name, noted, attrs = extra.events[-1]
            extra.events[-1] = (name, timestamp or noted, {**attrs, **(attributes or {})})

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

    # --- opentelemetry.sdk.trace.ReadableSpan --------------------------------------------------------

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
    def attributes(self) -> Mapping[str, Any]:
        """The user's attributes and ours; at most the span limit of the user's."""
        if self._state == ENDED:
            try:
                return self._read  # type: ignore[has-type, no-any-return]
            except AttributeError:
                self._read = self._exported()
                return self._read
        return self._exported()

    def _exported(self) -> Mapping[str, Any]:
        limits = self._rec.limits
        found, _ = attributes(self.attrs)
        if limits.max_attributes is not None and len(found) > limits.max_attributes:
            found = dict(list(found.items())[-limits.max_attributes :])
        if limits.max_attribute_length is not None:
            found = {
                key: value[: limits.max_attribute_length] if isinstance(value, str) else value
                for key, value in found.items()
            }
        return {**found, **self._rec.exported_attributes(self)}

    @property
    def events(self) -> Sequence[Event]:
        """Span events in order, the newest up to the span limit."""
        if self._state == ENDED:
            try:
                return self._events  # type: ignore[has-type, no-any-return]
            except AttributeError:
                self._events: Sequence[Event] = self._make_events()
                return self._events
        return self._make_events()

    def _make_events(self) -> tuple[Event, ...]:
        if self.extra is None:
            return ()
        return tuple(
            Event(
                name, {key: attribute_value(value) for key, value in attrs.items()}, timestamp=ts
            )
            for name, ts, attrs in sorted(self.extra.events, key=lambda event: event[1])
        )

    @property
    def links(self) -> Sequence[Link]:
        """Links to other spans."""
        return () if self.extra is None else tuple(self.extra.links)

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
        """How many of the user's attributes the span limit left out."""
        limit = self._rec.limits.max_attributes
        return 0 if limit is None else max(0, len(self.attrs) - limit)

    @property
    def dropped_events(self) -> int:
        """How many events the span limit left out."""
        return 0 if self.extra is None else self.extra.dropped_events

    @property
    def dropped_links(self) -> int:
        """How many links the span limit left out."""
        return 0 if self.extra is None else self.extra.dropped_links

    def to_json(self, indent: int | None = 4) -> str:
        """The span as the SDK's console exporter prints it."""
        parent = self.parent
        return json.dumps(
            {
                "name": self.name,
                "context": {
                    "trace_id": f"0x{self.trace.id}",
                    "span_id": f"0x{self.id[:16]}",
                    "trace_state": "[]",
                },
                "kind": str(self.kind),
                "parent_id": None if parent is None else f"0x{parent.span_id:016x}",
                "start_time": self.start_ns,
                "end_time": self.end_time,
                "status": {"status_code": self.status.status_code.name},
                "attributes": dict(self.attributes),
                "events": [
                    {
                        "name": event.name,
                        "timestamp": event.timestamp,
                        "attributes": dict(event.attributes or {}),
                    }
                    for event in self.events
                ],
                "links": [],
                "resource": json.loads(self.resource.to_json()),
            },
            indent=indent,
            default=str,
        )


otel_trace.Span.register(ScopeSpan)


def mark_attributes(record: MarkRecord, *, deferred: bool) -> dict[str, Any]:
    """The attributes of the span event that a mark becomes."""
    attrs: dict[str, Any] = dict(record.attrs)
    if deferred:
        attrs[semconv.MARK_DEFERRED] = True
    elif record.value is not None:
        attrs[semconv.MARK_VALUE] = record.value
    else:
        attrs[semconv.MARK_VALUE] = float(str(record.value_nonfinite))
    attrs[semconv.MARK_ID] = record.id
    attrs[semconv.MARK_KIND] = record.kind
    attrs[semconv.MARK_VALUE_TYPE] = record.value_type
    return attrs


