"""A lean OpenTelemetry span for our own provider.

:class:`ScopeSpan` is scope and span in one object: the official context is used as it is, every
``Span`` method and every ``ReadableSpan`` field is there, so stock processors and exporters can be
added; but nothing is allocated that a plain ``with ci.scope("x")`` does not need.

``__enter__`` and ``__exit__`` are the hot path: they do inline what :meth:`BaseScope.open` and
:meth:`BaseScope.close` do in general, for the case that nothing special is going on
(``Recorder.busy`` is false and the parent is simply the current scope).
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry.context import Context

from cirron_otel import semconv
from cirron_otel.batch import MarkRecord, SpanRecord
from cirron_otel.context import GONE, SCOPE_KEY, SPAN_KEY, attach_context, get_current
from cirron_otel.scope_base import (
    ENDED,
    MAX_DEPTH,
    NEW,
    NO_ATTRS,
    OPEN,
    BaseScope,
    Extra,
    Trace,
)
from cirron_otel.span_api import MarkEvents, ReadableMethods, shown_value

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry import trace as otel_trace
    from opentelemetry.trace import SpanContext

    from cirron_otel.provider import OwnSpans


class ScopeSpan(ReadableMethods):
    """A scope that is its own OTel span. See :class:`BaseScope` for its promises.

    After the end the object is frozen and is handed to processors as it is: it also satisfies
    what exporters read of a ``ReadableSpan``.
    """

    __slots__ = ()

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
        self.extra = None
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
            or parent._state != OPEN  # noqa: SLF001 - a scope's own kind
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
        # Bound to locals first: a call through an instance attribute is not specialised.
        pop = rec.pop_span_id
        try:
            self.id = pop() + trace.low
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
            monotonic_ns = clock.monotonic_ns
            start_ns = monotonic_ns() + offset
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
                or above._state != OPEN  # noqa: SLF001 - a scope's own kind
            ):
                super().__exit__(exc_type, exc, tb)
                return
            self._state = ENDED
            monotonic_ns = rec.clock.monotonic_ns
            self.end_ns = end = monotonic_ns() + self._offset
            attach_context(self.prev)
            self.ctx = GONE
            above.last_ns = end
            if self.ops:
                rec.overhead_mark(self, end)
                above.ops += self.ops
            above.ops += 1
            append = rec.append_span
            if self.attrs or self.marks:
                append(self.row(end))
            else:
                append(
                    SpanRecord(
                        self.id, self.name, above.id, self.index, self.start_ns, end,
                        None, None, None, self.thread_id, rec.pid, rec.rank, NO_ATTRS, (), UNSET,
                        self.iteration, UNSET, self.otel,
                    )
                )  # fmt: skip
            del rec.open[self.id]
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("scope.exit", error)

    @property
    def _own(self) -> OwnSpans:
        return self._rec.spans  # type: ignore[return-value] # a span of ours is made by no other

    # --- what BaseScope asks for -----------------------------------------------------------------

    def _begin(self, context: Context, start_ns: int) -> None:  # noqa: ARG002 - as in BaseScope
        self.id = self._rec.next_span_id() + self.trace.low
        self._started(context)

    def _started(self, context: Context) -> None:
        for processor in self._rec.processors:
            try:
                processor.on_start(self, parent_context=context)
            except Exception as error:  # noqa: BLE001 - a foreign processor may raise anything
                self._own.blame("on_start", error, processor)

    def _finish(self, end_ns: int) -> None:  # noqa: ARG002 - as in BaseScope
        processors = self._rec.processors
        if not processors:
            return
        self._final = dict(self.attrs)  # whoever changes the scope's now, changes no span
        for what in ("_on_ending", "on_end"):
            for processor in processors:
                try:
                    told = getattr(processor, what, None)
                    if told is not None:
                        told(self)
                except Exception as error:  # noqa: BLE001 - a foreign processor may raise anything
                    self._own.blame(what, error, processor)

    def _under_foreign(
        self, current: otel_trace.Span, between: SpanContext, context: Context
    ) -> Context:
        context = super()._under_foreign(current, between, context)
        theirs: object = current
        if not isinstance(theirs, BaseScope):
            sampled = self._own.decide(context, between.trace_id, self)
            if sampled != between.trace_flags.sampled:
                self.trace = Trace(self.trace.id, sampled=sampled, limit=self.trace.limit)
                self.otel.sampled = self.trace.otel.sampled
        return context

    def _span(self) -> otel_trace.Span:
        return self  # type: ignore[return-value] # registered as a virtual subclass below

    def mark_event(self, record: MarkRecord, *, deferred: bool) -> None:
        """Keep a mark as span event too, while there are processors to see it."""
        if not self._rec.processors:
            return
        shown = self._marks_shown
        if shown is None:
            shown = self._marks_shown = MarkEvents(self._rec.limits.shown_events)
        shown.add(record, deferred=deferred)
        if not deferred:
            extra = self.extra = self.extra or Extra()
            values = extra.mark_values = extra.mark_values or {}
            values[semconv.MARK_PREFIX + record.name] = shown_value(record)
