"""Room for server spans: the session is no parent of what a server begins.

OpenTelemetry's instrumentations of servers look whether a span is current before they read the
caller's ``traceparent``, and make a child of that span if there is one. The session is current on
the thread that called ``profile()``, and so in all that a server does from there: every request
would leave its caller's trace and join the session's. Where such an instrumentation is loaded, the
session therefore stays the current *scope* of its thread, but is no longer the current *span*:
scopes stand under it as before, and spans of others begin traces of their own.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from opentelemetry.context import Context

from cirron_otel import recorder
from cirron_otel.context import SPAN_KEY, attach_context, get_current
from cirron_otel.imports import when_imported
from cirron_otel.provider import OwnSpans

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: The instrumentations that make a child of whatever is current; those of FastAPI, Starlette,
#: Flask, Django, Falcon and Pyramid stand on the first two. Of gRPC's the parts for servers: they
#: do so for a caller that sends no trace.
_INSTRUMENTATIONS = tuple(
    f"opentelemetry.instrumentation.{name}"
    for name in ("asgi", "wsgi", "tornado", "grpc._server", "grpc._aio_server")
)


def make_room(rec: Recorder) -> None:
    """Step aside as soon as one of these is loaded. On the thread that called ``profile()``."""
    for name in _INSTRUMENTATIONS:
        if name in sys.modules:
            _step_aside(rec)
            return
    for name in _INSTRUMENTATIONS:
        when_imported(name, _loaded)


def _loaded(_module: object) -> None:
    rec = recorder._current  # noqa: SLF001 - the engine's
    if rec is None or not rec.active:
        return
    try:
        _step_aside(rec)
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("servers", error)


def _step_aside(rec: Recorder) -> None:
    session = rec.session
    context = get_current()
    if session is None or not session.is_open or context is not session.ctx:
        return  # it is current nowhere, or not on this thread, or something is open in it
    alone = Context({key: value for key, value in context.items() if key != SPAN_KEY})
    attach_context(alone)
    if isinstance(rec.spans, OwnSpans):
        # Scopes right under it take the short way again; with another provider they must not.
        session.ctx = alone
