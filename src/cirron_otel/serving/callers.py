"""Who sent a request, as its headers say: the span it comes from, and its id.

They come as servers have them: a mapping of names to values, or pairs of them, text or bytes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from opentelemetry import propagate
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import Getter
from opentelemetry.trace import SpanContext, TraceFlags

if TYPE_CHECKING:
    from opentelemetry.propagators.textmap import TextMapPropagator

    from cirron_otel.recorder import Recorder

#: Mappings of names to values, or pairs of them, text or bytes: what servers have as headers.
Headers = Mapping[Any, Any] | Iterable[tuple[Any, Any]]

REQUEST_ID_HEADER = "x-request-id"
#: The same as text and as bytes.
REQUEST_ID_NAMES = frozenset({REQUEST_ID_HEADER, REQUEST_ID_HEADER.encode()})
MAX_REQUEST_ID = 256
#: Headers that may come in several, to be read as one (W3C Trace Context, Baggage).
_IN_PARTS = frozenset({"tracestate", "baggage"})
#: The first version of W3C Trace Context, which every caller writes.
_TRACEPARENT = re.compile("00-(?!0{32})([0-9a-f]{32})-(?!0{16})([0-9a-f]{16})-([0-9a-f]{2})")
_TRACEPARENT_NAMES = frozenset({"traceparent", b"traceparent"})
_BAGGAGE_NAMES = frozenset({"baggage", b"baggage"})
_PROBE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


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


class Callers:
    """Reads who sent a request, as the propagator that the application has set reads it.

    Most requests bear none of the headers that it looks for, or a ``traceparent`` alone, which
    needs no propagator where that one reads it as W3C Trace Context says.
    """

    def __init__(self, rec: Recorder) -> None:
        """Learn what the propagator does now. Never raises."""
        #: Whose this knowledge is.
        self.propagator = propagate.get_global_textmap()
        asked = _Asked()
        self._reads_w3c = False
        try:
            asked.names.update(self.propagator.fields)
            self.propagator.extract({}, Context(), asked)
            self._reads_w3c = _reads_w3c(self.propagator)
        except Exception as error:  # noqa: BLE001 - a foreign propagator may raise anything
            rec.guard.repeat_warning("request.propagator", f"the propagator raised {error!r}")
        names = {name.lower() for name in asked.names}
        #: Names of headers that may tell of a trace, in small letters, as text and as bytes: what a
        #: propagator writes is not all that it reads, those of B3 read either of its forms.
        self._fields = frozenset({*names, *(name.encode("latin-1", "replace") for name in names)})

    def read(self, headers: Headers) -> Caller:
        """The caller of a request; whatever its headers hold, this raises only what they raise."""
        if not isinstance(headers, (Mapping, list, tuple)):
            headers = list(headers)  # what can be read once is read once
        try:
            return self._plain(headers) or read_caller(headers)
        except (AttributeError, TypeError):  # a name that is no text
            return read_caller(headers)

    def _plain(self, headers: Headers) -> Caller | None:
        """The caller, where no propagator is needed to tell; else None."""
        given: object = None
        parent: object = None
        fields = self._fields
        for name, value in headers.items() if isinstance(headers, Mapping) else headers:
            key = name.lower()
            if key in fields:
                if not self._reads_w3c:
                    return None
                if key in _TRACEPARENT_NAMES:
                    parent = value if parent is None else parent
                elif key not in _BAGGAGE_NAMES:
                    return None
            elif given is None and key in REQUEST_ID_NAMES:
                given = value
        identity = request_id_of(given)
        if parent is None:
            return NOBODY if identity is None else Caller(identity)
        found = _TRACEPARENT.fullmatch(text_of_header(parent))
        if found is None:
            return None
        trace_id, span_id, flags = found.groups()
        return Caller(
            identity,
            SpanContext(
                int(trace_id, 16), int(span_id, 16), is_remote=True,
                trace_flags=TraceFlags(int(flags, 16)),
            ),
        )  # fmt: skip


def _reads_w3c(propagator: TextMapPropagator) -> bool:
    """Whether a propagator takes ``traceparent`` for what it says, and ``baggage`` for no trace."""

    def told(**headers: str) -> SpanContext:
        context = propagator.extract(headers, Context(), _BY_NAME)
        return otel_trace.get_current_span(context).get_span_context()

    _, trace_id, span_id, _ = _PROBE.split("-")
    return not told(baggage="key=value").is_valid and all(
        (found.trace_id, found.span_id) == (int(trace_id, 16), int(span_id, 16))
        for found in (told(traceparent=_PROBE), told(traceparent=_PROBE, baggage="key=value"))
    )


def read_caller(headers: Headers) -> Caller:
    """The caller of a request; whatever its headers hold, this raises only what they raise."""
    known: dict[str, object] = {}
    for name, value in headers.items() if isinstance(headers, Mapping) else headers:
        key = text_of_header(name).lower()
        if key in _IN_PARTS and key in known:
            known[key] = f"{text_of_header(known[key])},{text_of_header(value)}"
        else:
            known.setdefault(key, value)
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
