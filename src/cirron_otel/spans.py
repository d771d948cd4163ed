"""A lean OpenTelemetry span for our own provider.

:class:`ScopeSpan` is scope and span in one object: the official context is used as it is, every
``Span`` method and every ``ReadableSpan`` field is there, so stock processors and exporters can be
added; but nothing is allocated that a plain ``with ci.scope("x")`` does not need.

``__enter__`` and ``__exit__`` are the hot path: :mod:`cirron_otel.core`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron_otel import semconv
from cirron_otel.batch import MarkRecord
from cirron_otel.core import ScopeCore
from cirron_otel.scope_base import BaseScope, Extra, Trace
from cirron_otel.span_api import MarkEvents, ReadableMethods, shown_value

if TYPE_CHECKING:
    from opentelemetry import trace as otel_trace
    from opentelemetry.context import Context
    from opentelemetry.trace import SpanContext

    from cirron_otel.provider import OwnSpans


class ScopeSpan(ReadableMethods):
    """A scope that is its own OTel span. See :class:`BaseScope` for its promises.

    After the end the object is frozen and is handed to processors as it is: it also satisfies
    what exporters read of a ``ReadableSpan``.
    """

    __slots__ = ()

    __enter__ = ScopeCore.enter
    __exit__ = ScopeCore.exit

    def add_closed(
        self, name: str, start_ns: int, end_ns: int, exc: BaseException | None = None
    ) -> None:
        """Record a child that is over already."""
        if exc is not None or not self.add_here(name, start_ns, end_ns):
            super().add_closed(name, start_ns, end_ns, exc)

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
