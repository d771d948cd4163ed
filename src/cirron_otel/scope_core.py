"""A scope's fields and its hot path, in Python: what ``_fast.c`` does, where that was not built.

Opening and closing a scope is most of what we cost a training step, and there it runs cold: after
milliseconds of tensor work nothing of it is left in a processor's caches. The compiled twin takes a
third of the time for a tight loop, and a quarter inside a training step. Both pass the same tests.

The short way is for the case that nothing special is going on (``Recorder.busy`` is false and the
parent is simply the current scope); everything else is :meth:`BaseScope.open` and ``close``.
"""

from __future__ import annotations

from threading import get_ident
from typing import TYPE_CHECKING, Any, TypeVar

from msgspec import UNSET
from opentelemetry.context import Context

from cirron_otel import semconv
from cirron_otel.batch import MAX_MARK_IDS, MarkRecord, SpanOtel, SpanRecord
from cirron_otel.context import GONE, SCOPE_KEY, SPAN_KEY, attach_context, get_current

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from cirron_otel.recorder import Recorder

_F = TypeVar("_F", bound="Callable[..., Any]")

#: INHERITED: open in the process this one was forked from, which will write its row.
NEW, OPEN, ENDED, INHERITED = 0, 1, 2, 3
MAX_DEPTH = 64
NO_ATTRS: dict[str, Any] = {}
#: Attributes of the mark that says what our own instrumentation took.
ESTIMATED: dict[str, Any] = {semconv.ESTIMATED: True}


def _is_number(value: object) -> bool:
    """Whether a row's field of 64 bits can hold it; a user may have set something else."""
    return type(value) is int and _INT_MIN <= value <= _INT_MAX


class RecorderCore:
    """What a scope reads of its recorder."""

    #: Between the beginning of the session and its end.
    active: bool
    #: The class of the scopes that a hook may make the short way; None: not this one.
    quick_kind: Any
    #: Anything that makes scopes of our own provider take the general path.
    busy: bool
    #: Anything that makes marks, and scopes of a joined provider, take theirs.
    detour: bool
    #: Whether somebody sees marks on spans.
    shows_marks: bool
    #: Sampled cost of recording one scope.
    overhead_ns: float
    #: Spans kept free in a trace when a loop opens a scope in it.
    headroom: int
    clock: Any
    #: Ids drawn in advance, used from the end.
    span_ids: list[str]
    mark_ids: list[str]
    #: The open scopes of this process by their ids.
    open: dict[str, Any]
    append_span: Callable[[SpanRecord], None]
    append_mark: Callable[[MarkRecord], None]
    #: Where the compiled hot path writes rows as text; None: rows are objects.
    span_rows: Any
    mark_rows: Any
    pid: int
    rank: int


class TraceCore:
    """What a scope reads of its trace."""

    __slots__ = (
        "child_otel", "count", "last", "limit", "low", "otel", "parent", "root_context", "window",
    )  # fmt: skip

    low: str
    otel: SpanOtel
    count: int
    limit: float
    #: What the rows of a window's direct children share; None in any other trace.
    child_otel: SpanOtel | None
    window: Any
    #: Of a window: its newest scope, the canonical parent that its root is linked to, and the
    #: context in which its direct children start.
    last: Any
    parent: Any
    root_context: Context

    def fill(self, low: str, otel: SpanOtel, limit: float, context: Context) -> None:
        """Make a new trace's fields, but for those that only Python reads."""
        self.low = low
        self.otel = otel
        self.limit = limit
        self.root_context = context
        self.count = 0
        self.child_otel = self.window = self.last = self.parent = None


class ScopeCore:
    """A scope's fields and its hot path."""

    __slots__ = (
        "_offset", "_rec", "_state", "above", "attrs", "clean", "ctx", "depth", "end_ns", "extra",
        "id", "index", "iteration", "last_ns", "marks", "more_marks", "name", "ops", "otel", "prev",
        "start_ns", "thread_id", "trace",
    )  # fmt: skip

    _rec: Recorder
    name: str
    index: int | None
    attrs: dict[str, Any]
    #: ``attrs`` itself, where whoever made it knows that it can be written as it is.
    clean: dict[str, Any] | None
    id: str
    above: Any
    trace: Any
    otel: SpanOtel
    ctx: Context | None
    depth: int
    prev: Context
    start_ns: int
    end_ns: int
    last_ns: int
    iteration: int | Any
    #: Ids of the first marks, and how many more there are.
    marks: list[str] | None
    more_marks: int
    extra: Any
    ops: int
    thread_id: int
    _offset: int
    _state: int

    def __init__(self, rec: Recorder, name: str, index: int | None, attrs: dict[str, Any]) -> None:
        self._rec = rec
        self.name = name
        self.index = index
        self.attrs = attrs
        self.clean = None
        self.marks = None
        self.extra = None
        self.ctx = None
        self.id = self.iteration = None  # type: ignore[assignment] # until the scope is opened
        self.start_ns = self.end_ns = self.last_ns = 0
        self.ops = 0
        self.more_marks = 0
        self._state = NEW

    def enter(self) -> Any:  # noqa: ANN401 - the scope itself
        """Open the scope: the ``with`` statement's way."""
        try:
            if not self.open_here(None, None, 0):
                self.open()  # type: ignore[attr-defined] # BaseScope's
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("scope.enter", error)
        return self

    def exit(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """Close the scope: the ``with`` statement's way."""
        try:
            if exc is not None or not self._close_here():
                self.leave(exc_type, exc, tb)  # type: ignore[attr-defined] # BaseScope's
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("scope.exit", error)

    def around(
        self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:  # noqa: ANN401 - what the call returns
        """The call in this scope; its exceptions are recorded and fly on."""
        self.enter()
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            self.exit(type(error), error, error.__traceback__)
            raise
        self.exit(None, None, None)
        return result

    def open_here(self, start_ns: int | None, iteration: int | None, reserve: int) -> bool:
        """Open under the current scope, if that can be done the short way; says whether it was.

        ``start_ns`` back-dates, ``iteration`` numbers a step, ``reserve`` is the room that must be
        left in the trace. Where it says False nothing has happened: use :meth:`BaseScope.open`.
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
        ids = rec.span_ids
        self.id = (ids.pop() if ids else rec.next_span_id()) + trace.low
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
        clock = rec.clock
        self._offset = offset = clock.offset_ns
        if start_ns is None:
            monotonic_ns = clock.monotonic_ns
            start_ns = monotonic_ns() + offset
        self.start_ns = self.last_ns = start_ns
        attach_context(new)
        self._state = OPEN
        rec.open[self.id] = self
        return True

    def open_in(
        self,
        parent: Any,  # noqa: ANN401 - a scope
        trace: Any,  # noqa: ANN401 - a trace
        otel: SpanOtel,
        attach: bool,  # noqa: FBT001 - compiled it takes no names
        /,
    ) -> bool:
        """Open under ``parent`` at the beginning of ``trace``; says whether it was done.

        The short way, for a context that is empty or the one that ``parent`` attached. ``otel`` is
        what the row says; without ``attach`` it does not become current. Where it says False
        nothing has happened: use :meth:`BaseScope.open`.
        """
        rec = self._rec
        context = get_current()
        if (
            rec.busy
            or self._state
            or parent._state != OPEN  # noqa: SLF001 - a scope's own kind
            or (context and parent.ctx is not context)
            or (depth := parent.depth + 1) > MAX_DEPTH
        ):
            return False
        trace.count += 1
        ids = rec.span_ids
        self.id = (ids.pop() if ids else rec.next_span_id()) + trace.low
        self.trace = trace
        self.otel = otel
        self.above = parent
        self.depth = depth
        self.iteration = parent.iteration
        self.thread_id = get_ident()
        clock = rec.clock
        self._offset = offset = clock.offset_ns
        monotonic_ns = clock.monotonic_ns
        self.start_ns = self.last_ns = monotonic_ns() + offset
        if attach:
            self.prev = context
            self.ctx = new = Context({**context, SPAN_KEY: self, SCOPE_KEY: self})
            attach_context(new)
        self._state = OPEN
        rec.open[self.id] = self
        return True

    def add_here(self, name: str, start_ns: int, end_ns: int) -> bool:
        """Record a child that is over already the short way; says whether it was."""
        rec, trace = self._rec, self.trace
        if rec.busy or self._state != OPEN or trace.count >= trace.limit:
            return False
        trace.count += 1
        self.ops += 1
        self.last_ns = max(self.last_ns, end_ns)
        ids = rec.span_ids
        rec.append_span(
            SpanRecord(
                (ids.pop() if ids else rec.next_span_id()) + trace.low, name, self.id, None,
                start_ns, end_ns, None, None, None, self.thread_id, rec.pid, rec.rank, NO_ATTRS,
                (), UNSET, self.iteration, UNSET, trace.otel,
            )
        )  # fmt: skip
        return True

    def _close_here(self) -> bool:
        rec = self._rec
        if (
            self._state != OPEN
            or rec.busy
            or self.extra is not None
            or get_current() is not self.ctx
            or (above := self.above) is None
            or above._state != OPEN  # noqa: SLF001 - a scope's own kind
        ):
            return False
        attach_context(self.prev)
        self._state = ENDED
        monotonic_ns = rec.clock.monotonic_ns
        self.end_ns = end = monotonic_ns() + self._offset
        self.ctx = GONE
        above.last_ns = end
        if self.ops:
            rec.overhead_mark(self, end)  # type: ignore[arg-type] # every scope is a BaseScope
            above.ops += self.ops
        above.ops += 1
        append = rec.append_span
        attrs, marks = self.attrs, self.marks
        if (
            (attrs and attrs is not self.clean)
            or self.more_marks
            or type(self.name) is not str
            or not (self.index is None or _is_number(self.index))
            or not (self.iteration is UNSET or _is_number(self.iteration))
        ):
            append(self.row(end))  # type: ignore[attr-defined] # BaseScope's
        else:
            append(
                SpanRecord(
                    self.id, self.name, above.id, self.index, self.start_ns, end,
                    None, None, None, self.thread_id, rec.pid, rec.rank, attrs or NO_ATTRS,
                    tuple(marks) if marks else (), UNSET, self.iteration, UNSET, self.otel,
                )
            )  # fmt: skip
        del rec.open[self.id]
        return True


_FLOAT_MAX = 1.7976931348623157e308
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1
_MAX_NAME = 64


def record_number(rec: RecorderCore, name: object, value: object) -> bool:
    """Record a plain number as a point mark on the current scope; False: not this way."""
    scope: Any = get_current().get(SCOPE_KEY)
    if (
        rec.detour
        or scope is None
        or scope._state != OPEN  # noqa: SLF001 - a scope's own kind
        or scope._rec is not rec  # noqa: SLF001 - a scope's own kind
        or type(name) is not str
        or len(name) > _MAX_NAME
        or not (scope.iteration is UNSET or _is_number(scope.iteration))
    ):
        return False
    if type(value) is float:
        if not -_FLOAT_MAX <= value <= _FLOAT_MAX:
            return False
        value_type = "float"
    elif type(value) is int and _INT_MIN <= value <= _INT_MAX:
        value_type = "int"
    else:
        return False
    clock = rec.clock
    monotonic_ns = clock.monotonic_ns
    now = monotonic_ns() + clock.offset_ns
    shown = rec.shows_marks
    if shown:
        if now <= scope.last_ns:
            now = scope.last_ns + 1
        mark_id = f"{scope.id[:16]}{now:016x}"  # see Recorder.mark_id
    else:
        ids = rec.mark_ids
        mark_id = ids.pop() if ids else rec.next_mark_id()
    marks = scope.marks
    if marks is None:
        scope.marks = [mark_id]
    elif len(marks) < MAX_MARK_IDS:
        marks.append(mark_id)
    else:
        scope.more_marks += 1
    scope.last_ns = now
    record = MarkRecord(
        mark_id, scope.id, name, value_type, value, NO_ATTRS, now, "point", scope.iteration
    )
    append = rec.append_mark
    append(record)
    if shown:
        scope.show_number(record)
    return True


def make_mark(general: _F, namespace: dict[str, Any], signature: str) -> _F:  # noqa: ARG001
    """``general``; compiled, a function like it that takes the short way for plain numbers first.

    That one looks for the recorder in ``namespace`` under ``_current``. A compiled function has no
    signature of its own but the text that it is given.
    """
    return general
