"""Where the span of a request stands: in the trace its caller began.

A server span that is active in the context is the parent; else the caller's ``traceparent``, as the
application's propagator reads it; else the request begins a trace of its own, linked to the
session, so that no trace grows with the age of a service. The canonical parent is the same in each
case: the scope it was opened in, or the session.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET
from opentelemetry import propagate
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import Link, NonRecordingSpan, SpanKind, TraceFlags

from cirron_otel.batch import SpanOtel
from cirron_otel.context import SCOPE_KEY
from cirron_otel.scope_base import BaseScope, Trace
from cirron_otel.scope_core import OPEN

if TYPE_CHECKING:
    from opentelemetry.trace import Span, SpanContext

    from cirron_otel.recorder import Recorder

#: Mappings of names to values, or pairs of them, text or bytes: what servers have as headers.
Headers = Mapping[Any, Any] | Iterable[tuple[Any, Any]]

_new_trace = Trace.__new__
_SAMPLED, _DROPPED = TraceFlags(TraceFlags.SAMPLED), TraceFlags(TraceFlags.DEFAULT)
_NOWHERE = Context()

REQUEST_ID_HEADER = "x-request-id"
#: The same as text and as bytes.
REQUEST_ID_NAMES = frozenset({REQUEST_ID_HEADER, REQUEST_ID_HEADER.encode()})
MAX_REQUEST_ID = 256
#: Headers that may come in several, to be read as one (W3C Trace Context, Baggage).
_IN_PARTS = frozenset({"tracestate", "baggage"})


class Caller(NamedTuple):
    """What a request's headers say of who sent it."""

    request_id: str | None = None
    span: SpanContext | None = None


NOBODY = Caller()


class _ByName(Getter[Mapping[str, object]]):
    """Finds a header by its name in small letters, in whatever letters a propagator writes it."""

    def get(self, carrier: Mapping[str, object], key: str) -> list[str] | None:
        """The text of one header."""
        found = carrier.get(key.lower())
        return None if found is None else [text_of_header(found)]

    def keys(self, carrier: Mapping[str, object]) -> list[str]:
        """The names of all headers."""
        return list(carrier)


_BY_NAME = _ByName()


class _Asked(Getter[Mapping[str, object]]):
    """Has no header, and keeps the names that a propagator asks it for."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def get(self, carrier: Mapping[str, object], key: str) -> None:  # noqa: ARG002 - as in Getter
        """Nothing."""
        self.names.add(key)

    def keys(self, carrier: Mapping[str, object]) -> list[str]:
        """The names of all headers."""
        return list(carrier)


def names_that_tell(rec: Recorder) -> frozenset[str | bytes]:
    """The headers by which the application's propagator may know a trace. Never raises.

    In small letters, as text and as bytes. What it writes is not all that it reads: those of B3
    read either of its forms.
    """
    asked = _Asked()
    try:
        propagator = propagate.get_global_textmap()
        asked.names.update(propagator.fields)
        propagator.extract({}, Context(), asked)
    except Exception as error:  # noqa: BLE001 - a foreign propagator may raise anything
        rec.guard.repeat_warning("request.propagator", f"the propagator raised {error!r}")
    names = {name.lower() for name in asked.names}
    return frozenset({*names, *(name.encode("latin-1", "replace") for name in names)})


def read_caller(headers: Headers) -> Caller:
    """The caller of a request; whatever its headers hold, this raises only what they raise."""
    known: dict[str, object] = {}
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        key = text_of_header(name).lower()
        if key in _IN_PARTS and key in known:
            known[key] = f"{text_of_header(known[key])},{text_of_header(value)}"
        else:
            known[key] = value
    context = propagate.extract(known, Context(), _BY_NAME)
    found = otel_trace.get_current_span(context).get_span_context()
    given = request_id_of(known.get(REQUEST_ID_HEADER))
    return Caller(given, found if found.is_valid else None)


def request_id_of(value: object) -> str | None:
    """A request's id as it is kept; None where there is none. Raises what the value's text does."""
    return None if value is None else text_of_header(value).strip()[:MAX_REQUEST_ID] or None


def header_of(headers: Iterable[tuple[Any, Any]], name: str) -> Any:  # noqa: ANN401 - text or bytes
    """The first header of a name in small letters, as the server has it; None: there is none."""
    return next((value for key, value in headers if text_of_header(key).lower() == name), None)


def text_of_header(value: object) -> str:
    """A header's name or value, which servers have as text or as bytes."""
    if not isinstance(value, bytes):
        return str(value)
    try:
        return value.decode()  # what is no ASCII is UTF-8 these days
    except UnicodeDecodeError:
        return value.decode("latin-1")


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
        sampled = self._keeps_all or self._rec.spans.sampled(trace_id)
        # As Trace() does, in a third of the time: every request makes one.
        trace = _new_trace(Trace)
        trace.id = trace_id
        trace.flags = _SAMPLED if sampled else _DROPPED
        trace.root = None
        trace.fill(
            trace_id[16:],
            SpanOtel(trace_id[:16]) if sampled else SpanOtel(trace_id[:16], sampled=False),
            self._limit,
            _NOWHERE,
        )
        return trace

    def otel(self, trace: Trace) -> SpanOtel:
        """What the row of such a trace's request says of it."""
        said = trace.otel
        return SpanOtel(said.trace_id, "", "server", UNSET, UNSET, UNSET, said.sampled, self._rows)


def outlived(span: Span | None) -> bool:
    """Whether a request's parent, a span of this process, has ended."""
    return getattr(span, "end_time", None) is not None
