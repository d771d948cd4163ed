"""Where the span of a request stands: in the trace its caller began.

A server span that is active in the context is the parent; else the caller's ``traceparent``, as the
application's propagator reads it; else the request begins a trace of its own, linked to the
session, so that no trace grows with the age of a service. The canonical parent is the same in each
case: the scope it was opened in, or the session.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, TraceFlags

from cirron_otel.batch import SpanOtel
from cirron_otel.context import SCOPE_KEY
from cirron_otel.scope_base import BaseScope, Trace
from cirron_otel.scope_core import OPEN

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from cirron_otel.recorder import Recorder

_new_trace = Trace.__new__
_SAMPLED, _DROPPED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_NOWHERE = Context()
#: A trace of somebody else's grows as it likes.
_NO_LIMIT = float("inf")


class Place(NamedTuple):
    """Where a request's span goes."""

    #: The foreign span it is a child of: a server's here, or the caller's far away.
    span: Span | None
    kind: SpanKind
    #: It begins a trace of its own.
    alone: bool = False
    #: The context to open it in.
    context: Context = Context()


def place_of(rec: Recorder, context: Context, caller: SpanContext | None) -> Place:
    """Where a request goes that is opened in ``context`` and was sent by ``caller``."""
    current = otel_trace.get_current_span(context)
    active = current.get_span_context()
    if active.is_valid and getattr(current, "end_time", None) is None:
        scope = context.get(SCOPE_KEY)
        if isinstance(scope, BaseScope) and scope._span() is current:  # noqa: SLF001 - its own kind
            if scope is not rec.session and scope._state == OPEN:  # noqa: SLF001
                nested = is_request(scope)
                # A scope around the whole service is nobody's caller.
                if nested or caller is None:
                    kind = SpanKind.INTERNAL if nested else SpanKind.SERVER
                    return Place(None, kind, context=context)
        elif (
            caller is None
            or caller.trace_id == active.trace_id
            or getattr(current, "kind", None) is SpanKind.SERVER
        ):
            return Place(current, SpanKind.INTERNAL, context=context)
    if caller is not None:
        remote = NonRecordingSpan(caller)
        return Place(
            remote, SpanKind.SERVER, context=otel_trace.set_span_in_context(remote, context)
        )
    return Place(
        None, SpanKind.SERVER, alone=True,
        context=otel_trace.set_span_in_context(otel_trace.INVALID_SPAN, context),
    )  # fmt: skip


def is_request(scope: BaseScope) -> bool:
    """Whether a scope is a request, or stands in one."""
    above: BaseScope | None = scope
    while above is not None:
        if getattr(above, "is_request", False):
            return above._state == OPEN  # noqa: SLF001 - a scope's own kind
        above = above.above
    return False


class Alone:
    """Makes the traces of requests that nobody began one for."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._keeps_all = rec.spans.keeps_all
        self._limit = rec.settings.trace_max_spans
        session = rec.session
        made = None if session is None else session.get_span_context()
        linked = made is not None and made.is_valid
        self.links = [Link(made)] if linked and made is not None else []
        self._rows: Any = (
            [{"trace_id": f"{made.trace_id:032x}", "span_id": f"{made.span_id:016x}", "attrs": {}}]
            if linked and made is not None
            else UNSET
        )

    def trace(self, trace_id: str) -> Trace:
        """A new trace of that id (32 hex), with the sampler's decision."""
        return _trace(
            trace_id,
            sampled=self._keeps_all or self._rec.spans.sampled(trace_id),
            limit=self._limit,
        )

    def otel(self, trace: Trace) -> SpanOtel:
        """What the row of such a trace's request says of it."""
        said = trace.otel
        return SpanOtel(said.trace_id, "", "server", UNSET, UNSET, UNSET, said.sampled, self._rows)


def continued(caller: SpanContext, *, sampled: bool) -> tuple[Trace, SpanOtel]:
    """The trace that a caller began, as far as it is here, and what a request's row says of it."""
    trace = _trace(f"{caller.trace_id:032x}", sampled=sampled, limit=_NO_LIMIT)
    said, state = trace.otel, caller.trace_state
    return trace, SpanOtel(
        said.trace_id, f"{caller.span_id:016x}", "server", UNSET, UNSET,
        state.to_header() if state else UNSET, said.sampled,
    )  # fmt: skip


def _trace(trace_id: str, *, sampled: bool, limit: float) -> Trace:
    """As ``Trace()`` does, in a third of the time: every request makes one."""
    trace = _new_trace(Trace)
    trace.id = trace_id
    trace.flags = _SAMPLED if sampled else _DROPPED
    trace.root = None
    trace.fill(
        trace_id[16:],
        SpanOtel(trace_id[:16]) if sampled else SpanOtel(trace_id[:16], sampled=False),
        limit,
        _NOWHERE,
    )
    return trace


def outlived(span: Span | None) -> bool:
    """Whether a request's parent, a span of this process, has ended."""
    return getattr(span, "end_time", None) is not None
