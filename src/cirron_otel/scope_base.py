"""What every scope is, whichever provider its span comes from.

A scope has a **canonical parent** (:attr:`BaseScope.above`), the scope it stands in; the spool's
tree is made of these. Its OTel parent may be another span: a third-party span in between, or the
root of a window trace. Both travel in one OTel context: under OpenTelemetry's own key lies the
current span, under ours the current scope, so wherever the application carries the context
(threads, tasks, generators) both arrive.

A scope ends itself and nothing else. Scopes that a loop opened on the user's behalf (``auto``)
end with the scope they stand in.
"""

from __future__ import annotations

import traceback
from threading import get_ident
from typing import TYPE_CHECKING, Any, Self

from msgspec import UNSET, UnsetType
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags

from cirron_otel import semconv
from cirron_otel.batch import MAX_MARK_IDS, LogRecord, MarkRecord, SpanOtel, SpanRecord
from cirron_otel.context import GONE, SCOPE_KEY, SPAN_KEY, attach_context, get_current
from cirron_otel.core import ScopeCore, TraceCore
from cirron_otel.scope_core import ENDED, INHERITED, MAX_DEPTH, NEW, NO_ATTRS, OPEN
from cirron_otel.values import Deferred, attribute_value, attributes, clean_text, cut_text

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType

    from cirron_otel.recorder import Recorder

_MAX_STACK_TEXT = 16 * 1024
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1


class Trace(TraceCore):
    """One OTel trace: its id, its size so far, and where its overflow goes.

    ``limit`` is the number of spans after which children open in a *window* trace instead.
    """

    __slots__ = ("flags", "id", "root")

    window: Trace | None
    last: BaseScope | None
    parent: BaseScope | None

    def __init__(self, trace_id: str, *, sampled: bool, limit: float) -> None:
        self.id = trace_id
        self.low = trace_id[16:]
        self.flags = TraceFlags(TraceFlags.SAMPLED if sampled else TraceFlags.DEFAULT)
        self.otel = SpanOtel(trace_id=trace_id[:16], sampled=UNSET if sampled else False)
        #: What the rows of a window's direct children share; None in any other trace.
        self.child_otel = None
        self.count = 0
        self.limit = limit
        #: The root scope, where it is one of ours.
        self.root: BaseScope | None = None
        self.window = None
        self.parent = self.last = None
        self.root_context = Context()


class Extra:
    """What few scopes have: kept apart so that the many stay small."""

    __slots__ = (
        "cpu_ns", "cpu_start", "device_time", "dropped_events", "dropped_links", "error_type",
        "events", "gpu_ns", "instrumentation", "kind", "links", "mark_values",
        "memory_peak_bytes", "memory_start", "otel_parent", "parent_context", "reentered",
        "status", "status_message",
    )  # fmt: skip

    def __init__(self) -> None:
        self.cpu_ns: int | None = None
        self.cpu_start: int | None = None
        self.gpu_ns: int | None = None
        #: Resolves to ``gpu_ns`` once the device has got that far.
        self.device_time: Deferred | None = None
        self.error_type: str | None = None
        #: The instrumentation scope, where it is not ours.
        self.instrumentation: Any = None
        self.memory_peak_bytes: int | None = None
        self.memory_start: tuple[int, int] | None = None
        self.events: list[Any] = []
        self.links: list[Any] = []
        self.dropped_events = 0
        self.dropped_links = 0
        self.kind = otel_trace.SpanKind.INTERNAL
        self.mark_values: dict[str, Any] | None = None
        #: The OTel parent, where it is not the canonical parent's span.
        self.otel_parent: SpanContext | None = None
        self.parent_context: Context | None = None
        self.reentered = 0
        self.status: otel_trace.StatusCode = otel_trace.StatusCode.UNSET
        self.status_message: str | None = None


class BaseScope(ScopeCore):
    """A scope: context manager, sync and async; see the module for what it promises.

    Not thread-safe as a whole (a scope belongs to the code that opened it), but opening and
    closing on different threads is fine. Never raises, never blocks.

    Attributes that users may read: ``id`` (spool id, 32 hex), ``name``, ``index``, ``attrs``
    (a dict they may change until the scope ends), ``start_ns``, ``end_ns``, ``iteration``.
    """

    __slots__ = ("__dict__", "__weakref__")

    above: BaseScope | None
    trace: Trace
    extra: Extra | None
    # What few scopes set is no slot: it costs nothing until it is.
    #: Opened by a loop on the user's behalf.
    auto: bool = False
    #: Of an epoch: how many children of a kind a loop has numbered in it.
    counters: dict[str, int] | None = None

    def at(self, monotonic_ns: int) -> int:
        """A monotonic time as this scope counts: its length stays right across a clock step."""
        return monotonic_ns + self._offset

    def rename(self, name: str) -> None:
        """Give the scope another name."""
        self.name = name

    # --- what a provider adds ----------------------------------------------------------------

    def _begin(self, context: Context, start_ns: int) -> None:
        """Start the span; sets ``id`` and tells processors. ``context`` holds the OTel parent."""
        raise NotImplementedError

    def _finish(self, end_ns: int) -> None:
        """End the span; tells processors. Attributes are final before this is called."""
        raise NotImplementedError

    def _span(self) -> otel_trace.Span:
        """The OTel span, for the context."""
        raise NotImplementedError

    def get_span_context(self) -> SpanContext:
        """The OTel span's context: trace id, span id, flags."""
        raise NotImplementedError

    # --- opening -----------------------------------------------------------------------------

    @property
    def is_open(self) -> bool:
        """Whether the scope was entered and has not ended."""
        return self._state == OPEN

    def __enter__(self) -> Self:
        """Open the scope under the current one; it becomes current."""
        try:
            self.open()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("scope.enter", error)
        return self

    def open(  # noqa: C901 - one condition after the other
        self,
        *,
        parent: BaseScope | None = None,
        start_ns: int | None = None,
        iteration: int | None = None,
        attach: bool = True,
        depth_limit: int = MAX_DEPTH,
    ) -> bool:
        """Open the scope; says whether it was opened.

        ``parent`` (default: the innermost open scope of the current context, else the session)
        is the canonical parent, ``start_ns`` back-dates, ``attach=False`` leaves the context
        alone.
        """
        rec = self._rec
        if self._state != NEW or not rec.active:
            if self._state != NEW:
                self._reenter()
            return False
        if rec.is_child and (worker := rec.worker_id()) is not None:
            self.attrs = {**self.attrs, semconv.WORKER_ID: worker}
        if not rec.flushes.started:
            rec.ensure_started()
        if rec.pending:
            rec.loops.activity()
        context = get_current()
        if parent is None:
            parent = current_scope(rec, context)
        if parent is None:
            return False
        self.depth = parent.depth + 1
        if self.depth > depth_limit:
            rec.guard.lost("depth_limit")
            rec.guard.warn(
                "depth_limit",
                f"scope {self.name!r} is more than {MAX_DEPTH} scopes deep and is not recorded "
                "(its body runs); a scope is probably opened again and again without closing",
            )
            return False
        clock = rec.clock
        self._offset = clock.offset_ns
        now = clock.monotonic_ns() + self._offset
        self.above = parent
        self.iteration = parent.iteration if iteration is None else iteration
        self.thread_id = get_ident()
        self.start_ns = self.last_ns = now if start_ns is None else start_ns
        self._begin(self._place(parent, context), self.start_ns)
        self._state = OPEN
        rec.open[self.id] = self
        if rec.resources:
            rec.resources.start(self)
        if attach:
            self.prev = context
            self.ctx = self.attached(context)
            attach_context(self.ctx)
            if rec.listening.scopes:
                rec.listening.opened(self)
        return True

    def attached(self, context: Context) -> Context:
        """``context`` with this scope as the current one."""
        return Context({**context, SPAN_KEY: self._span(), SCOPE_KEY: self})

    def open_root(self, links: list[Any]) -> None:
        """Open as the session: a trace of its own, linked to what it came from; current."""
        rec = self._rec
        self._open_in(rec.new_trace(), links)
        if rec.resources:
            rec.resources.start(self)
        rec.open[self.id] = self
        context = get_current()
        self.prev = context
        self.ctx = self.attached(context)
        attach_context(self.ctx)

    def open_window_root(self, window: Trace, linked: list[BaseScope | None]) -> None:
        """Open as the root of a window trace; no part of the canonical tree, never current."""
        links = [otel_trace.Link(one.get_span_context()) for one in linked if one is not None]
        self._open_in(window, links)

    def finish_window_root(self) -> None:
        """End the root of a window trace; its row is the recorder's to write."""
        self._state = ENDED
        self.end_ns = max(self._rec.clock.monotonic_ns() + self._offset, self.start_ns)
        self._finish(self.end_ns)

    def _open_in(self, trace: Trace, links: list[Any]) -> None:
        rec = self._rec
        self.above = None
        self.depth = 0
        self.iteration = UNSET
        self.thread_id = get_ident()
        self.trace = trace
        self.otel = trace.otel
        trace.root = self
        trace.count += 1
        if links:
            self.extra = Extra()
            self.extra.links = links
        self._offset = rec.clock.offset_ns
        self.start_ns = self.last_ns = rec.clock.monotonic_ns() + self._offset
        self._begin(Context(), self.start_ns)
        self._state = OPEN

    def restore_after_session(self) -> None:
        """After the session has ended: nothing of ours stays current on this thread."""
        context = get_current()
        scope = context.get(SCOPE_KEY)
        if isinstance(scope, BaseScope) and scope._rec is self._rec:  # noqa: SLF001
            before = Context() if self.ctx is None else self.prev
            span = context.get(SPAN_KEY)
            restored: dict[str, Any] = {
                key: value for key, value in context.items() if key not in (SPAN_KEY, SCOPE_KEY)
            }
            if SPAN_KEY in before:
                restored[SPAN_KEY] = before[SPAN_KEY]
            elif span is not scope._span():  # noqa: SLF001 - a third-party span stays current
                restored[SPAN_KEY] = span
            attach_context(Context(restored))

    def _reenter(self) -> None:
        if self._state == OPEN:
            if self.extra is None:
                self.extra = Extra()
            self.extra.reentered += 1
        self._rec.guard.warn(
            "reentered",
            f"scope {self.name!r} was entered a second time; a scope is opened once, "
            "call ci.scope() again for the next one",
        )

    def _place(self, parent: BaseScope, context: Context) -> Context:
        """Choose the trace and the OTel parent; returns the context to start the span in."""
        current = otel_trace.get_current_span(context)
        parent_span = parent._span()
        if current is not parent_span:
            scope = context.get(SCOPE_KEY)
            between = current.get_span_context()
            if (
                between.is_valid
                and not (isinstance(scope, BaseScope) and scope._span() is current)  # noqa: SLF001
                and getattr(current, "end_time", None) is None
            ):
                return self._under_foreign(current, between, context)
            context = otel_trace.set_span_in_context(parent_span, context)
        trace = parent.trace
        reserve = self._rec.headroom if self.auto and self.name != semconv.EPOCH else 0
        if trace.count < trace.limit - reserve:
            trace.count += 1
            self.trace = trace
            self.otel = trace.otel
            return context
        with self._rec.window_lock:  # two threads may find it full at once
            window = trace.window
            if window is None or window.count >= window.limit - (reserve or 1):
                if window is not None:
                    self._rec.close_window(window)
                window = trace.window = self._rec.open_window(self, parent)
            window.count += 1
            window.last = self
        self.trace = window
        self.otel = window.child_otel or window.otel
        root = window.root
        if root is None:
            return context
        return otel_trace.set_span_in_context(root._span(), context)  # noqa: SLF001

    def _under_foreign(
        self,
        current: otel_trace.Span,  # noqa: ARG002 - as in ScopeSpan
        between: SpanContext,
        context: Context,
    ) -> Context:
        """Stand under a foreign span, ``current`` in ``context``; that is the one to start in."""
        self.trace = Trace(
            f"{between.trace_id:032x}", sampled=between.trace_flags.sampled, limit=float("inf")
        )
        self.otel = SpanOtel(
            trace_id=self.trace.id[:16],
            parent_span_id=f"{between.span_id:016x}",
            sampled=self.trace.otel.sampled,
        )
        self.extra = self.extra or Extra()
        self.extra.otel_parent = between
        return context

    # --- closing -----------------------------------------------------------------------------

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End this scope and nothing else; an exception is recorded and flies on."""
        try:
            self.leave(exc_type, exc, tb)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("scope.exit", error)

    def leave(
        self,
        exc_type: type[BaseException] | None,  # noqa: ARG002 - as the with statement has them
        exc: BaseException | None,
        tb: TracebackType | None,  # noqa: ARG002
    ) -> None:
        """What the end of a ``with`` block does, the long way."""
        if self.extra is not None and self.extra.reentered:
            self.extra.reentered -= 1
            return
        self.close(exc=exc)

    async def __aenter__(self) -> Self:
        """As :meth:`__enter__`."""
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """As :meth:`__exit__`."""
        self.__exit__(exc_type, exc, tb)

    def close(
        self,
        *,
        end_ns: int | None = None,
        exc: BaseException | None = None,
        truncated: bool = False,
        restore: bool = True,
    ) -> None:
        """End the scope; a second call does nothing but put the context right."""
        if self._state == OPEN:
            now = self._rec.clock.monotonic_ns() + self._offset if end_ns is None else end_ns
            if restore and self.ctx is not None:
                self._end_inner(get_current(), now)
            self._state = ENDED
            self.end_ns = end = max(now, self.start_ns)
            if exc is not None and not isinstance(exc, GeneratorExit):
                self.note_exception(exc, end)
                if self._rec.listening.at_error:
                    self._rec.listening.failed(self, exc)
            if truncated:
                self.attrs = {**self.attrs, semconv.TRUNCATED: True}
            self._wrap_up(end)
        if self.ctx is not None:
            if restore:
                self._restore()
            self.ctx = GONE

    def _wrap_up(self, end: int) -> None:
        """Everything after the scope has ended: overhead, parent's count, row, processors."""
        rec = self._rec
        above = self.above
        if rec.resources:
            rec.resources.stop(self)
        if self.ops:
            rec.overhead_mark(self, end)
        if above is not None:
            above.ops += self.ops + 1
            above.last_ns = max(above.last_ns, end)
        self._finish(end)
        rec.open.pop(self.id, None)
        rec.emit(self)
        if rec.listening.scopes:
            rec.listening.closed(self)

    def _end_inner(self, context: Context, end_ns: int) -> None:
        """Close the loop scopes that were opened inside this one and are still current."""
        scope = context.get(SCOPE_KEY)
        inner: list[BaseScope] = []
        while isinstance(scope, BaseScope) and scope is not self:
            if scope.is_open:
                if not scope.auto:
                    return
                inner.append(scope)
            scope = scope.above
        if scope is self:
            for one in inner:
                one.close(end_ns=max(one.last_ns, one.start_ns) if one.name == semconv.EPOCH
                          else end_ns, restore=False)  # fmt: skip

    def _restore(self) -> None:
        """Make the nearest open ancestor current, if this scope (or what ended in it) is."""
        context = get_current()
        scope = context.get(SCOPE_KEY)
        while isinstance(scope, BaseScope) and scope is not self and not scope.is_open:
            scope = scope.above
        if scope is not self:
            return
        current = context.get(SPAN_KEY)
        if context is not self.ctx and isinstance(current, otel_trace.Span):
            holder = context.get(SCOPE_KEY)
            if isinstance(holder, BaseScope) and current is not holder._span():  # noqa: SLF001
                return  # a third-party span is current: it is not ours to put away
        before, above = self.prev, self.above
        while above is not None and above._state not in (OPEN, INHERITED):  # noqa: SLF001
            if above.ctx is not None:
                before = above.prev
            above = above.above
        if context is self.ctx:
            attach_context(before)
            return
        restored: dict[str, Any] = {
            key: value for key, value in context.items() if key not in (SPAN_KEY, SCOPE_KEY)
        }
        for key in (SPAN_KEY, SCOPE_KEY):
            if key in before:
                restored[key] = before[key]
        attach_context(Context(restored))

    def add_closed(
        self, name: str, start_ns: int, end_ns: int, exc: BaseException | None = None
    ) -> None:
        """Record a child that is over already."""
        child = self._rec.make_scope(name, None, {})
        child.auto = True
        if child.open(parent=self, start_ns=start_ns, attach=False):
            child.close(end_ns=end_ns, exc=exc, restore=False)

    # --- what is recorded --------------------------------------------------------------------

    def note_exception(self, exc: BaseException, ts_ns: int | None = None) -> None:
        """Leave an exception on the scope: status, ``exception`` event, attribute ``error``."""
        kind = type(exc)
        name = kind.__qualname__ if kind.__module__ == "builtins" else (
            f"{kind.__module__}.{kind.__qualname__}"
        )  # fmt: skip
        message = str(attribute_value(_message(exc)))
        extra = self.extra = self.extra or Extra()
        extra.error_type = name
        short = cut_text(f"{kind.__name__}: {message}" if message else kind.__name__, 1024)
        if extra.status is not otel_trace.StatusCode.OK:
            extra.status = otel_trace.StatusCode.ERROR
            extra.status_message = short
        self.attrs = {**self.attrs, semconv.ERROR: short}
        stack = _stack(exc)
        self.note_event(
            semconv.EXCEPTION_EVENT,
            {
                semconv.EXCEPTION_TYPE: name,
                semconv.EXCEPTION_MESSAGE: cut_text(message, _MAX_STACK_TEXT),
                semconv.EXCEPTION_STACKTRACE: clean_text(stack),
            },
            ts_ns,
        )

    def note_event(self, name: str, attrs: dict[str, Any], timestamp: int | None = None) -> None:
        """Keep a span event that is not a mark."""
        extra = self.extra = self.extra or Extra()
        extra.events.append((name, timestamp or self._rec.clock.now(), attrs))
        if len(extra.events) > self._rec.limits.max_events:
            del extra.events[0]
            extra.dropped_events += 1

    def note_mark(self, mark_id: str) -> None:
        """Count a mark as this scope's."""
        if self.marks is None:
            self.marks = [mark_id]
        elif len(self.marks) < MAX_MARK_IDS:
            self.marks.append(mark_id)
        else:
            self.more_marks += 1

    def show_number(self, record: MarkRecord) -> None:
        """Show a mark that is a finite number and a point on the OTel span."""
        self.mark_event(record, deferred=False)

    def mark_event(self, record: MarkRecord, *, deferred: bool) -> None:
        """Show a mark on the OTel span, where somebody may be reading it."""

    def row(self, end_ns: int | UnsetType = UNSET) -> SpanRecord:
        """The scope as the spool writes it; without ``end_ns`` as it stands, still open."""
        extra, marks = self.extra, self.marks
        attrs, cut = attributes(self.attrs) if self.attrs else (NO_ATTRS, [])
        count = len(marks) + self.more_marks if marks and self.more_marks else UNSET
        # What a user has set in these three must not make a batch that nobody can read.
        name, iteration = self.name, _whole_number(self.iteration)
        return SpanRecord(
            self.id,
            name if type(name) is str else str(attribute_value(name)),
            self.above.id if self.above is not None else None,
            _whole_number(self.index),
            self.start_ns,
            end_ns,
            extra.cpu_ns if extra is not None else None,
            extra.gpu_ns if extra is not None else None,
            extra.memory_peak_bytes if extra is not None else None,
            self.thread_id,
            self._rec.pid,
            self._rec.rank,
            attrs,
            tuple(marks) if marks else (),
            count,
            UNSET if iteration is None else iteration,
            cut or UNSET,
            self.otel if extra is None else self._otel(extra),
        )

    def _otel(self, extra: Extra) -> SpanOtel:
        """The row's ``otel`` object, where the shared one does not say it all."""
        base, status = self.otel, extra.status
        dropped = {
            key: count
            for key, count in (("events", extra.dropped_events), ("links", extra.dropped_links))
            if count
        }
        return SpanOtel(
            trace_id=base.trace_id,
            parent_span_id=base.parent_span_id,
            sampled=base.sampled,
            window=base.window,
            kind=UNSET if extra.kind is otel_trace.SpanKind.INTERNAL else extra.kind.name.lower(),
            status=UNSET if status is otel_trace.StatusCode.UNSET else status.name.lower(),
            status_message=UNSET if extra.status_message is None else extra.status_message,
            links=[link_row(link) for link in extra.links] or UNSET,
            events=[event_row(*event) for event in extra.events] or UNSET,
            dropped=dropped or UNSET,
        )


def event_row(name: str, ts_ns: int, attrs: Mapping[str, Any] | None) -> dict[str, Any]:
    """A span event as ``otel.events[]`` holds it."""
    return {"name": name, "ts_ns": ts_ns, "attrs": attributes(attrs or {})[0]}


def link_row(link: Any) -> dict[str, Any]:  # noqa: ANN401 - an OTel link
    """A link as ``otel.links[]`` holds it."""
    return {
        "trace_id": f"{link.context.trace_id:032x}",
        "span_id": f"{link.context.span_id:016x}",
        "attrs": attributes(link.attributes or {})[0],
    }


class RemoteScope(BaseScope):
    """A scope of another process, as the parent of what this one records."""

    __slots__ = ("_remote",)

    def __init__(self, rec: Recorder, carried: dict[str, Any]) -> None:
        super().__init__(rec, str(carried["name"]), carried.get("index"), {})
        self.id = str(carried["id"])
        self.trace = Trace(
            str(carried["trace_id"]), sampled=bool(carried["sampled"]), limit=float("inf")
        )
        self.otel = self.trace.otel
        self.above = None
        self.depth = int(carried.get("depth", 0))
        iteration = carried.get("iteration")
        self.iteration = UNSET if iteration is None else iteration
        self.start_ns = self.last_ns = int(carried.get("start_ns", 0))
        self.thread_id = 0
        self._state = INHERITED
        self._remote = otel_trace.NonRecordingSpan(
            SpanContext(
                int(self.trace.id, 16), int(self.id[:16], 16), is_remote=True,
                trace_flags=self.trace.flags,
            )
        )  # fmt: skip

    def _span(self) -> otel_trace.Span:
        return self._remote

    def get_span_context(self) -> SpanContext:
        """The context of the other process's span."""
        return self._remote.get_span_context()


def carried(scope: BaseScope) -> dict[str, Any]:
    """A scope as :class:`RemoteScope` takes it in another process."""
    return {
        "name": scope.name,
        "index": scope.index,
        "id": scope.id,
        "trace_id": scope.trace.id,
        "sampled": bool(scope.trace.flags.sampled),
        "depth": scope.depth,
        "iteration": None if scope.iteration is UNSET else scope.iteration,
        "start_ns": scope.start_ns,
    }


def set_place(row: LogRecord, scope: BaseScope | None) -> None:
    """Say in a log record in which span it was made."""
    if scope is not None:
        row.trace_id, row.span_id = scope.trace.id, scope.id[:16]
        row.trace_flags = int(scope.trace.flags)


def current_scope(rec: Recorder, context: Context) -> BaseScope | None:
    """The innermost open scope of ``rec`` in ``context``, else its session, else None."""
    scope = context.get(SCOPE_KEY)
    while isinstance(scope, BaseScope):
        if scope._rec is rec:  # noqa: SLF001 - a scope's own kind
            if scope._state == OPEN:  # noqa: SLF001
                return scope
            if scope._state == INHERITED:  # noqa: SLF001
                return rec.parent_in_child(scope)
        scope = scope.above
    session = rec.session
    open_states = (OPEN, INHERITED)
    return session if session is not None and session._state in open_states else None  # noqa: SLF001


def _whole_number(value: object) -> int | None:
    """``value`` where a 64-bit field can hold it, else None."""
    if type(value) is int and _INT_MIN <= value <= _INT_MAX:
        return value
    try:
        number = int(value.__index__())  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001 - whatever the user's object raises
        return None
    return number if _INT_MIN <= number <= _INT_MAX else None


def _message(exc: BaseException) -> str:
    try:
        return str(exc)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return "<no message: __str__ raised>"


def _stack(exc: BaseException) -> str:
    try:
        text = "".join(traceback.format_exception(type(exc), exc, exc.__traceback__))
    except Exception as error:  # noqa: BLE001 - hardly any stack left, or an odd exception class
        return f"<no traceback: {type(error).__name__}>"
    half = _MAX_STACK_TEXT // 2
    return text if len(text) <= _MAX_STACK_TEXT else f"{text[:half]}\n[...]\n{text[-half:]}"
