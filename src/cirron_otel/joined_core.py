"""A joined scope's fields and its hot path, in Python: what ``_joined.h`` does, compiled.

A joined scope costs what the application's tracer takes for a span, and what we add to it; here it
must not add more than a span made current costs by the tracer's own means. The short way is for
the case that nothing special is going on: the parent is a joined scope, simply the current one, of
the same thread, and the tracer keeps the span. Everything else is :meth:`BaseScope.open` and
``leave``.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry.context import Context
from opentelemetry.trace import StatusCode

from cirron_otel import semconv
from cirron_otel.batch import MarkRecord, SpanRecord
from cirron_otel.context import GONE, SCOPE_KEY, SPAN_KEY, attach_context, get_current
from cirron_otel.scope_core import ENDED, MAX_DEPTH, NEW, NO_ATTRS, OPEN, ScopeCore

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry import trace as otel_trace


class JoinedCore(ScopeCore):
    """A scope's fields and its hot path, where the application's tracer makes the span."""

    __slots__ = ("_given", "_seen", "_shared", "exported", "span")

    #: The application's span.
    span: otel_trace.Span
    #: What the span was started with: all of it, the user's part before cleaning, and the part
    #: that is the same for the children.
    _given: dict[str, Any]
    _seen: dict[str, Any] | None
    _shared: dict[str, Any]
    #: Whether the application's sampler keeps the span.
    exported: bool
    #: The last value of each mark.
    values: dict[str, Any] | None = None

    def enter(self) -> Any:  # noqa: ANN401 - the scope itself
        """Open the scope under the current one; it becomes current."""
        try:
            if not self.open_here(None, None, 0):
                self.open()  # type: ignore[attr-defined] # BaseScope's
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("scope.enter", error)
        return self

    def open_here(self, start_ns: int | None, iteration: int | None, reserve: int) -> bool:
        """Open under the current scope, if that can be done the short way; says whether it was."""
        rec = self._rec
        context = get_current()
        parent: Any = context.get(SCOPE_KEY)
        if (
            iteration is not None
            or self.name == semconv.EPOCH  # its children carry its index
            or rec.detour
            or parent is None
            or parent._state != OPEN  # noqa: SLF001 - a scope's own kind
            or parent.ctx is not context
            or parent._rec is not rec  # noqa: SLF001 - a scope's own kind
            or self._state != NEW
            or not parent.exported
            or parent.thread_id != get_ident()
            or (depth := parent.depth + 1) > MAX_DEPTH
        ):
            return False
        trace = parent.trace
        start_in = context
        if trace.count >= trace.limit - reserve:
            trace = trace.window
            if (
                trace is None
                or trace.count >= trace.limit - reserve
                or trace.parent is not parent
                or len(context) != 2  # noqa: PLR2004 - our two keys and nothing else
            ):
                return False
            start_in = trace.root_context
            trace.last = self
        trace.count += 1
        if not trace.count & 63:
            rec.batcher.relieve()
        clock = rec.clock
        self._offset = offset = clock.offset_ns
        if start_ns is None:
            start_ns = clock.monotonic_ns() + offset
        self.trace = trace
        self.otel = trace.otel if trace is parent.trace else trace.child_otel
        self.above = parent
        self.depth = depth
        self.iteration = parent.iteration
        self.thread_id = parent.thread_id
        self.start_ns = self.last_ns = start_ns
        self._shared = given = parent._shared  # noqa: SLF001 - a scope's own kind
        if self.index is not None:
            given = {**given, semconv.INDEX: self.index}
        self._start_span(start_in, given, start_ns)  # type: ignore[attr-defined] # JoinedScope's
        self.prev = context
        span = self.span
        if len(context) == 2:  # noqa: PLR2004 - our two keys and nothing else
            self.ctx = new = Context({SPAN_KEY: span, SCOPE_KEY: self})
        else:
            self.ctx = new = Context({**context, SPAN_KEY: span, SCOPE_KEY: self})
        attach_context(new)
        self._state = OPEN
        rec.open[self.id] = self
        return True

    def exit(
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
                or self.extra is not None
                or rec.detour
                or get_current() is not self.ctx
                or (above := self.above) is None
                or above._state != OPEN  # noqa: SLF001 - a scope's own kind
            ):
                self.leave(exc_type, exc, tb)  # type: ignore[attr-defined] # BaseScope's
                return
            self._state = ENDED
            self.end_ns = end = rec.clock.monotonic_ns() + self._offset
            attach_context(self.prev)
            self.ctx = GONE
            above.last_ns = end
            above.ops += self.ops + 1
            if self.attrs or self.values is not None or not self.exported:
                self._finish(end)  # type: ignore[attr-defined] # JoinedScope's
                rec.emit(self)  # type: ignore[arg-type] # every scope is a BaseScope
            elif self._end_plain(end):
                rec.append_span(
                    SpanRecord(
                        self.id, self.name, above.id, self.index, self.start_ns, end,
                        None, None, None, self.thread_id, rec.pid, rec.rank, NO_ATTRS, (),
                        UNSET, self.iteration, UNSET, self.otel,
                    )
                )  # fmt: skip
            else:
                rec.emit(self)  # type: ignore[arg-type] # as above
            rec.open.pop(self.id, None)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("scope.exit", error)

    def _end_plain(self, end_ns: int) -> bool:
        """End a span to which we add nothing; says whether nobody else added anything either."""
        span: Any = self.span
        try:
            if span.is_recording():
                span.end(end_ns)
        except Exception as error:  # noqa: BLE001 - a processor of the application
            self._blame_end(error)  # type: ignore[attr-defined] # JoinedScope's
        try:
            return (
                not span.events
                and not span.links
                and len(span.attributes) == len(self._given)
                and span.name == self.name
                and span.status.status_code is StatusCode.UNSET
            )
        except AttributeError:  # no SDK span: nothing can be read back
            return True

    def show_number(self, record: MarkRecord) -> None:
        """As :meth:`mark_event`, for a plain number: the short way."""
        if self.exported:
            name, value = record.name, record.value
            self.span.add_event(name, {"value": value}, record.ts_ns)
            values = self.values
            if values is None:
                self.values = {name: value}  # type: ignore[misc] # BaseScope has a dict
            else:
                values[name] = value


def nothing(*args: object, **kwargs: object) -> None:
    """Do nothing: a span processor's method that has nothing to do."""
