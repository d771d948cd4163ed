"""The scope of one request: what it has beside what every scope has.

Made and opened by :mod:`cirron_otel.serving.requests`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec import UNSET, UnsetType
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceState

from cirron_otel import semconv
from cirron_otel.batch import SpanOtel, SpanRecord
from cirron_otel.context import attach_context, get_current
from cirron_otel.core import ScopeCore
from cirron_otel.scope_base import BaseScope, Extra
from cirron_otel.scope_core import MAX_DEPTH, OPEN
from cirron_otel.scopes import Joined, Scope
from cirron_otel.serving import gen_ai
from cirron_otel.serving.following import Following
from cirron_otel.serving.places import Place, outlived, place_of
from cirron_otel.serving.request_calls import each_call
from cirron_otel.serving.state import InnerError, RequestState
from cirron_otel.values import cut_text

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType
    from typing import TypeVar

    from opentelemetry.context import Context
    from opentelemetry.trace import Span

    _F = TypeVar("_F", bound=Callable[..., Any])

_MAX_ERROR = 1024


class RequestMethods(BaseScope):
    """What a request has beside what every scope has. Never raises, never blocks."""

    __slots__ = ()

    is_request = True
    # Slots of the classes below, which their maker fills: a `__dict__` of its own would make each
    # open request half as large again.
    #: Who sent it, from its headers.
    _caller: SpanContext | None
    #: The server's span it is a child of, where that is a span of this process.
    _server: Span | None
    _known: Following | None

    def sent_by(self, caller: SpanContext | None) -> None:
        """Say who sent it. Its maker has to, before anything else is done with it."""
        self._caller = caller
        self._server = self._known = None

    @property
    def request_id(self) -> str:
        """The caller's ``x-request-id``, or a new one."""
        return str(self.attrs.get(semconv.REQUEST_ID, ""))

    @property
    def state(self) -> Following:
        """Its chunks, tokens and times; made when first asked for."""
        known = self._known
        if known is None:
            known = self._known = Following(self)
        return known

    @property
    def known_state(self) -> RequestState | None:
        """The same, where somebody asked for it before."""
        return self._known

    # --- what the user may say of it ---------------------------------------------------------

    def mark(self, name: str, value: object, /, *, kind: str = "point", **attrs: Any) -> None:
        """As ``ci.mark``, on the request whatever scope is current: a stream's consumer may too."""
        self.state.record(name, value, kind, attrs)

    def chunk(self, value: object = None) -> None:
        """One chunk of the output has been made: its time counts, and what it says of tokens."""
        state = self.state
        state.is_stream = True
        state.note_chunk(value)

    def result(self, value: object) -> None:
        """Take what a result says of its tokens and its model."""
        self.state.note_result(value)

    def fail(self, error_type: str, message: str = "") -> None:
        """The request failed, and no exception says so: status, ``error.type`` and ``error``."""
        if self._state != OPEN:
            return
        extra = self.extra = self.extra or Extra()
        extra.error_type = error_type
        short = cut_text(f"{error_type}: {message}" if message else error_type, _MAX_ERROR)
        if extra.status is not StatusCode.OK:
            extra.status = StatusCode.ERROR
            extra.status_message = short
        self.attrs = {**self.attrs, semconv.ERROR: short, semconv.ERROR_TYPE: error_type}

    def note_inner(self, error: BaseException) -> None:
        """An exception left a part of the request, and may be handled yet: an event, no failure."""
        if self._state != OPEN:
            return
        try:
            self.record_exception(error)  # type: ignore[attr-defined] # every request is a span
            said = {} if self.extra is None else self.extra.events[-1][2]
            self.state.inner = InnerError(
                id(error),
                str(said.get(semconv.EXCEPTION_TYPE, type(error).__qualname__)),
                str(said.get(semconv.EXCEPTION_MESSAGE, "")),
            )
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("request.inner", failure)

    def finish(
        self,
        error: BaseException | None = None,
        *,
        error_type: str | None = None,
        message: str = "",
    ) -> None:
        """End the request, once; from any thread.

        ``error`` is recorded as an exception; ``error_type`` alone is a failure without one.
        """
        try:
            if self._state == OPEN:
                if error_type is not None:
                    self.fail(error_type, message)
                elif error is None and isinstance(self, RequestSpan):
                    self.__exit__(None, None, None)
                    return
                self.close(exc=error, restore=self.ctx is not None)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("request.finish", failure)

    # --- where it is current -----------------------------------------------------------------

    def running(self) -> Running:
        """Makes the request current for one piece of work: ``with request.running(): ...``.

        For a request that is held open across pieces that may run anywhere.
        """
        return Running(self)

    def release(self) -> None:
        """Current no longer, but open still: it ends when its stream does."""
        try:
            if self.ctx is not None and self._state == OPEN:
                self._end_inner(get_current(), self._rec.clock.monotonic_ns() + self._offset)
                self._restore()
                self.ctx = None
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("request.release", error)

    # --- as a scope --------------------------------------------------------------------------

    def __call__(self, fn: _F) -> _F:
        """Each call of ``fn`` is a request of its own; ``ci.inference`` knows streams, too."""
        return each_call(fn, self)

    def _place(self, parent: BaseScope, context: Context) -> Context:
        place = place_of(self._rec, context, self._caller)
        extra = self.extra = self.extra or Extra()
        extra.kind = place.kind
        if place.alone:
            return self._begin_trace(extra, place)
        if place.span is None:
            return super()._place(parent, place.context)
        if self._caller is None or not place.span.get_span_context().is_remote:
            self._server = place.span
        return self._under_foreign(place.span, place.span.get_span_context(), place.context)

    def _begin_trace(self, extra: Extra, place: Place) -> Context:
        alone = self._rec.requests.alone
        trace = self.trace = alone.trace(self._rec.next_mark_id())
        trace.count += 1
        self.otel = SpanOtel(trace.id[:16], "", sampled=trace.otel.sampled)
        extra.links = [*alone.links, *extra.links]
        return place.context

    def _otel(self, extra: Extra) -> SpanOtel:
        said, base = super()._otel(extra), self.otel
        # Opened the short way, what is said of the trace stands there and nowhere else.
        if base.kind is not UNSET:
            said.kind = base.kind
        if base.trace_state is not UNSET:
            said.trace_state = base.trace_state
        parent = extra.otel_parent
        if parent is not None and parent.trace_state:
            said.trace_state = parent.trace_state.to_header()
        if base.links is not UNSET:
            said.links = [*base.links, *(() if said.links is UNSET else said.links)]
        return said

    def close(
        self,
        *,
        end_ns: int | None = None,
        exc: BaseException | None = None,
        truncated: bool = False,
        restore: bool = True,
    ) -> None:
        """End the request with everything that is known of it."""
        if self._state == OPEN:
            if isinstance(exc, GeneratorExit):
                self.fail("GeneratorExit", "the client left before the end")
            self._complete()
        super().close(end_ns=end_ns, exc=exc, truncated=truncated, restore=restore)

    def _complete(self) -> None:
        """Say what is known beside the scope; before it closes."""
        if self._known is not None:
            self._known.finish()
        if self._server is not None and outlived(self._server):
            self.attrs = {**self.attrs, semconv.OUTLIVED_PARENT: True}


class RequestSpan(RequestMethods, Scope):
    """A request that is its own span."""

    __slots__ = ("_caller", "_known", "_server")

    __enter__ = BaseScope.__enter__

    def open(
        self,
        *,
        parent: BaseScope | None = None,
        start_ns: int | None = None,
        iteration: int | None = None,
        attach: bool = True,
        depth_limit: int = MAX_DEPTH,
    ) -> bool:
        """Open the request; says whether it was opened. Most are opened the short way."""
        if (
            parent is None
            and start_ns is None
            and iteration is None
            and self.extra is None
            and self._rec.requests.open_here(self, self._caller, attach=attach)
        ):
            return True
        return super().open(
            parent=parent, start_ns=start_ns, iteration=iteration, attach=attach,
            depth_limit=depth_limit,
        )  # fmt: skip

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the request; an exception is recorded and flies on."""
        if self._known is not None and exc is None and self._state == OPEN:
            self._known.finish()
        ScopeCore.exit(self, exc_type, exc, tb)

    #: The spool's name of it, where processors see the convention's.
    _mine: str | None = None

    def _finish(self, end_ns: int) -> None:
        """As for any scope; processors see the convention's name, the spool keeps ours."""
        if self._rec.processors:
            self._mine = self.name
            self.name = gen_ai.span_name(self.attrs, self.name)
        super()._finish(end_ns)

    def row(self, end_ns: int | UnsetType = UNSET) -> SpanRecord:
        """The request as the spool writes it."""
        made = super().row(end_ns)
        if self._mine is not None:
            made.name = self._mine
        return made

    @property
    def kind(self) -> SpanKind:
        """SERVER where it begins or continues a trace, INTERNAL under a span of this process."""
        if self._state and self.otel.kind == "server":
            return SpanKind.SERVER
        return SpanKind.INTERNAL if self.extra is None else self.extra.kind

    @property
    def parent(self) -> SpanContext | None:
        """The caller's span, or the server's; None for the root of a trace."""
        found = super().parent
        said = self.otel.parent_span_id if self._state else None
        if found is None and isinstance(said, str) and said:
            # Opened the short way: the row says it, and nothing else needs to.
            state = self.otel.trace_state
            found = SpanContext(
                int(self.trace.id, 16), int(said, 16), is_remote=True,
                trace_flags=self.trace.flags,
                trace_state=TraceState.from_header([state]) if isinstance(state, str) else None,
            )  # fmt: skip
        return found

    @property
    def links(self) -> Any:  # noqa: ANN401 - as in ReadableSpan
        """The links that were added, and the one to the session."""
        if self._state and self.otel.links is not UNSET:
            return (*self._rec.requests.alone.links, *super().links)
        return super().links


class JoinedRequest(RequestMethods, Joined):
    """A request whose span the application's provider makes."""

    __slots__ = ("_caller", "_known", "_server")

    __enter__ = BaseScope.__enter__

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the request; an exception is recorded and flies on."""
        BaseScope.__exit__(self, exc_type, exc, tb)

    def _begin(self, context: Context, start_ns: int) -> None:
        super()._begin(context, start_ns)
        trace = self.trace
        if self.otel.parent_span_id == "":
            # It begins a trace: the application's provider chose its id.
            made = self.span.get_span_context()
            trace.id = f"{made.trace_id:032x}"
            trace.low = trace.id[16:]
            trace.flags = made.trace_flags
            sampled = UNSET if made.trace_flags.sampled else False
            trace.otel = SpanOtel(trace.id[:16], sampled=sampled)
            self.otel = SpanOtel(trace.id[:16], "", sampled=sampled)

    def _start_span(self, context: Context, given: dict[str, Any], start_ns: int) -> None:
        """As for any scope, under the convention's name; the spool keeps ours."""
        mine = self.name
        self.name = gen_ai.span_name(self.attrs, mine)
        try:
            super()._start_span(context, given, start_ns)
        finally:
            self.name = mine

    def _take_over(self, span: Any) -> None:  # noqa: ANN401 - an SDK span
        mine = self.name
        super()._take_over(span)
        self.name = mine


RequestScope = RequestSpan | JoinedRequest


class Running:
    """Attaches a held request around one piece of work, in whatever context that runs."""

    __slots__ = ("_before", "_mine", "_scope")

    def __init__(self, scope: BaseScope) -> None:
        self._scope = scope
        self._before: Context | None = None
        self._mine: Context | None = None

    def __enter__(self) -> None:
        scope = self._scope
        if scope._state == OPEN:  # noqa: SLF001 - a scope's own kind
            self._before = get_current()
            self._mine = scope.attached(self._before)
            attach_context(self._mine)

    def __exit__(self, *exc_info: object) -> None:
        if self._before is not None and get_current() is self._mine:
            attach_context(self._before)
        self._before = None
