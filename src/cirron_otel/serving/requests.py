"""The ``request`` scope: what a service was asked once.

It takes the place of ``epoch`` in the tree: under the session, or under the scope it is opened in.
In OpenTelemetry's terms it stands in its caller's trace (:mod:`cirron_otel.serving.places`). Every
call has a scope of its own, carried by the OTel context, so that threads, tasks and pools keep
them apart.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate

from cirron_otel import recorder, semconv
from cirron_otel.context import SCOPE_KEY, get_current
from cirron_otel.provider import OwnSpans
from cirron_otel.scope_base import BaseScope
from cirron_otel.scopes import _in_child
from cirron_otel.serving import gen_ai
from cirron_otel.serving.callers import (
    NOBODY,
    REQUEST_ID_HEADER,
    Caller,
    Callers,
    Headers,
    header_of,
    request_id_of,
)
from cirron_otel.serving.idle_request import IdleRequest
from cirron_otel.serving.places import Alone, continued
from cirron_otel.serving.request_calls import made_by
from cirron_otel.serving.request_scope import (
    JoinedRequest,
    RequestMethods,
    RequestScope,
    RequestSpan,
    Running,
)
from cirron_otel.serving.state import RequestState

if TYPE_CHECKING:
    from opentelemetry.trace import SpanContext

    from cirron_otel.batch import SpanOtel
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import Trace


class Requests:
    """How one recorder makes its requests."""

    def __init__(self, rec: Recorder) -> None:
        self.alone = Alone(rec)
        self._own = isinstance(rec.spans, OwnSpans)
        self.scope_class: type[Any] = RequestSpan if self._own else JoinedRequest
        settings = rec.settings
        known = {
            semconv.DEPLOYMENT_ID: settings.deployment_id,
            semconv.MODEL_ID: settings.model_id,
        }
        #: What every request bears.
        self.given = {key: value for key, value in known.items() if value is not None}
        self._rec = rec
        self._callers = Callers(rec)

    def caller(self, headers: Headers) -> Caller:
        """Who sent a request; raises only what the headers raise."""
        callers = self._callers
        if callers.propagator is not propagate.get_global_textmap():
            callers = self._callers = Callers(self._rec)
        return callers.read(headers)

    # --- the short way: nothing is current, or the session -----------------------------------

    def begin(self, name: str, attrs: dict[str, Any], *, attach: bool = True) -> RequestSpan | None:
        """A request as most are, open: nobody began a trace for it, and nothing is current.

        ``attrs`` lacks the request's id, which is that of its trace. None: it is not such a one,
        and nothing has happened.
        """
        rec = self._rec
        session = rec.session
        if rec.busy or session is None or not self._own:
            return None
        context = get_current()
        if context and context is not session.ctx:
            return None
        ids = rec.mark_ids
        trace_id = ids.pop() if ids else rec.next_mark_id()
        scope = RequestSpan(rec, name, None, {**attrs, semconv.REQUEST_ID: trace_id})
        scope.sent_by(None)
        trace = self.alone.trace(trace_id)
        return scope if scope.open_in(session, trace, self.alone.otel(trace), attach) else None

    def open_here(self, scope: RequestSpan, caller: SpanContext | None, *, attach: bool) -> bool:
        """Open a request that ``caller`` sent, the short way; says whether it was done."""
        rec = self._rec
        session = rec.session
        if rec.busy or session is None:
            return False
        context = get_current()
        if context and context is not session.ctx:
            return False
        if caller is None:
            trace = self.alone.trace(rec.next_mark_id())
            return scope.open_in(session, trace, self.alone.otel(trace), attach)
        found = self._continued(caller)
        return found is not None and scope.open_in(session, *found, attach)

    def _continued(self, caller: SpanContext) -> tuple[Trace, SpanOtel] | None:
        """The trace that a caller began; None: whether it is kept takes the sampler to say."""
        spans: Any = self._rec.spans
        if not (spans.parent_decides or spans.keeps_all):
            return None
        return continued(caller, sampled=caller.trace_flags.sampled or not spans.parent_decides)

    # --- any way -----------------------------------------------------------------------------

    def new(self, name: str, attrs: dict[str, Any], caller: Caller) -> RequestScope:
        """A request that ``caller`` sent, not opened; ``attrs`` lacks the request's id."""
        rec = self._rec
        identity = caller.request_id or rec.next_mark_id()
        scope: RequestScope = self.scope_class(
            rec, name, None, {**attrs, semconv.REQUEST_ID: identity}
        )
        scope.sent_by(caller.span)
        return scope


def requests_of(rec: Recorder) -> Requests:
    """The maker of a recorder's requests."""
    made: Requests | None = rec.requests
    if made is None:
        made = rec.requests = Requests(rec)
    return made


def request(  # noqa: PLR0913 - what a request is
    name: str = semconv.REQUEST,
    *,
    request_id: str | None = None,
    headers: Headers | None = None,
    model: str | None = None,
    operation: str | None = None,
    provider: str | None = None,
    **attrs: Any,
) -> RequestSpan | JoinedRequest | IdleRequest:
    """One request to a service: ``with ci.request(headers=request.headers) as r: ...``.

    A context manager, sync and async. ``headers`` (a mapping, or pairs of text or bytes) tell the
    caller's trace, where no server span is active already, and the ``x-request-id``; ``request_id``
    overrules that, and without either it is new (32 hex). ``model``, ``operation`` and ``provider``
    become the ``gen_ai.*`` attributes of those names; every other keyword is an attribute.

    Never raises, never blocks, any thread.
    """
    said = gen_ai.start_attributes(model=model, operation=operation, provider=provider)
    return _make(name, {**said, **attrs}, headers, request_id)


def _make(
    name: str,
    attrs: Mapping[str, Any],
    headers: Headers | None = None,
    request_id: object = None,
) -> RequestSpan | JoinedRequest | IdleRequest:
    """A request, not opened; an idle one where nothing is recorded."""
    rec = recorder._current or _in_child()  # noqa: SLF001
    if rec is None:
        identity = _id_alone(headers, request_id) or os.urandom(16).hex()
        return IdleRequest(name, None, {**attrs, semconv.REQUEST_ID: identity})
    return _new(rec, name, attrs, headers, request_id)


made_by(_make)


def _new(
    rec: Recorder,
    name: str,
    attrs: Mapping[str, Any],
    headers: Headers | None,
    request_id: object,
) -> RequestScope:
    """A request of a recorder's, not opened."""
    maker = requests_of(rec)
    return maker.new(name, {**maker.given, **attrs}, _caller(maker, rec, headers, request_id))


def _caller(maker: Requests, rec: Recorder, headers: Headers | None, request_id: object) -> Caller:
    """Who sent a request; ``request_id`` is the id where it is given. Never raises."""
    given: str | None = None
    caller = NOBODY
    try:
        given = request_id_of(request_id)
        if headers is not None:
            caller = maker.caller(headers)
    except Exception as error:  # noqa: BLE001 - whatever the server's object raises
        rec.guard.repeat_warning("request.headers", f"headers cannot be read: {error!r}")
    return caller if given is None else Caller(given, caller.span)


def _id_alone(headers: Headers | None, request_id: object) -> str | None:
    """The id that a request comes with; no propagator is asked for more. Never raises."""
    given: str | None = None
    with contextlib.suppress(Exception):  # whatever the server's object raises
        given = request_id_of(request_id)
        if given is None and headers is not None:
            pairs = headers.items() if isinstance(headers, Mapping) else headers
            given = request_id_of(header_of(pairs, REQUEST_ID_HEADER))
    return given


def open_request(  # noqa: PLR0913 - what a request is
    name: str = semconv.REQUEST,
    *,
    request_id: str | None = None,
    headers: Headers | None = None,
    attrs: Mapping[str, Any] | None = None,
    shared: bool = False,
    attach: bool = True,
    start_ns: int | None = None,
) -> RequestSpan | JoinedRequest | None:
    """A request that is open already; None where nothing is recorded. Never raises.

    ``shared`` is for a middleware: the first decorated call inside makes it its own. Without
    ``attach`` it is current only inside ``running()``.
    """
    rec = recorder._current or _in_child()  # noqa: SLF001
    if rec is None:
        return None
    try:
        scope = _new(rec, name, attrs or {}, headers, request_id)
        if not scope.open(attach=attach, start_ns=start_ns):
            return None
        if shared:
            scope.state.shared = True
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("request.open", error)
        return None
    return scope


def current_request() -> RequestState | None:
    """The innermost open request of the current context; None where there is none."""
    scope: Any = get_current().get(SCOPE_KEY)
    while isinstance(scope, BaseScope):
        if isinstance(scope, RequestMethods) and scope.is_open:
            return scope.state
        scope = scope.above
    return None


__all__ = [
    "IdleRequest", "JoinedRequest", "RequestMethods", "RequestScope", "RequestSpan", "Running",
    "current_request", "open_request", "request", "requests_of",
]  # fmt: skip
