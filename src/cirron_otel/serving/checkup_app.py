"""What may be wrong with one application: where its requests and its server spans come from.

The application is loaded as a server would load it, but keeps and sends nothing; no request is
made. Its layers are looked at from the outside in: middlewares have the next one as ``app``.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from opentelemetry import trace as otel_trace

from cirron_otel import recorder
from cirron_otel.errors import ConfigurationError
from cirron_otel.provider import OwnSpans
from cirron_otel.serving.checkup import EXCLUDE_SPANS, Found, check_spool
from cirron_otel.serving.middleware import CirronMiddleware
from cirron_otel.serving.wsgi import CirronWsgiMiddleware

_MOST_LAYERS = 100
#: Middlewares that begin a server span.
_SERVER_SPANS = ("opentelemetry.instrumentation.asgi", "opentelemetry.instrumentation.wsgi")
_FASTAPI = "opentelemetry.instrumentation.fastapi"


def load(named: str, *, factory: bool = False) -> Any:  # noqa: ANN401 - any application
    """The application of ``module:name``; with ``factory`` what that function returns.

    Runs the module, with a recording that keeps nothing. Raises
    :class:`~cirron_otel.errors.ConfigurationError` that says why it cannot be loaded.
    """
    module_name, _, path = named.partition(":")
    if not module_name or not path:
        raise ConfigurationError(
            f"{named!r} names no application: say the module and the name in it, as for the "
            "server: service:app"
        )
    # An argument of the application's profile() is stronger; that is its own business.
    os.environ["CIRRON_OUTPUT"] = "none"
    os.environ["CIRRON_FORWARD"] = "off"
    sys.path.insert(0, os.getcwd())  # noqa: PTH109 - as text, as Python does
    try:
        found: Any = importlib.import_module(module_name)
        for part in path.split("."):
            found = getattr(found, part)
        return found() if factory else found
    except (Exception, SystemExit) as error:
        raise ConfigurationError(
            f"{named} cannot be loaded: {type(error).__name__}: {error}"
        ) from error


def check_app(app: Any, looked_at: Path | None) -> Iterator[Found]:  # noqa: ANN401 - as above
    """The recording that loading it began, its middlewares, its server spans.

    ``looked_at`` is the output directory that was looked at already.
    """
    rec = recorder._current  # noqa: SLF001 - the engine's
    if rec is None:
        yield Found(
            "note",
            "loading the application starts no recording",
            "call ci.profile() where the application is made, unless what starts the server does",
        )
    elif rec.settings.output_dir != looked_at:
        yield Found("ok", f"the application records in {rec.settings.output_dir}")
        yield from check_spool(rec.settings)
    layers = list(_layers(app))
    yield from _check_requests(layers)
    servers = [layer for layer in layers if type(layer).__module__.startswith(_SERVER_SPANS)]
    flask_too = bool(getattr(app, "_is_instrumented_by_opentelemetry", False))
    yield from _check_server_spans(app, servers, is_instrumented=bool(servers) or flask_too)
    if servers or flask_too:
        yield from _check_provider()


def _layers(app: Any) -> Iterator[Any]:  # noqa: ANN401 - as above
    """The application and what it wraps, from the outside in."""
    seen: set[int] = set()
    while app is not None and id(app) not in seen and len(seen) < _MOST_LAYERS:
        seen.add(id(app))
        yield app
        held = vars(app) if hasattr(app, "__dict__") else {}
        if callable(getattr(type(app), "build_middleware_stack", None)):
            # Starlette and FastAPI make it at the first request.
            app = held.get("middleware_stack") or app.build_middleware_stack()
        else:
            app = held.get("app", held.get("wsgi_app"))


def _check_requests(layers: list[Any]) -> Iterator[Found]:
    ours = [
        at for at, layer in enumerate(layers)
        if isinstance(layer, (CirronMiddleware, CirronWsgiMiddleware))
    ]  # fmt: skip
    if not ours:
        yield Found(
            "note",
            "there is no CirronMiddleware: requests are where @ci.inference or ci.request() stand",
        )
        return
    if len(ours) > 1:
        yield Found(
            "warning",
            f"there are {len(ours)} CirronMiddlewares around one another: each call is so many "
            "requests",
            "keep one",
        )
    if any(type(one).__module__.startswith(_SERVER_SPANS) for one in layers[ours[0] :]):
        yield Found(
            "warning",
            "CirronMiddleware is outside of OpenTelemetry's: the server span would be below the "
            "request",
            "add it to the application: app.add_middleware(ci.CirronMiddleware)",
        )
    elif len(ours) == 1:
        yield Found("ok", "CirronMiddleware makes every call a request")


def _check_server_spans(
    app: Any,  # noqa: ANN401 - as above
    servers: list[Any],
    *,
    is_instrumented: bool,
) -> Iterator[Found]:
    if not is_instrumented:
        yield Found(
            "note",
            "no instrumentation of OpenTelemetry gives the server a span: requests read the "
            "caller's traceparent themselves",
        )
        return
    chatty = [
        layer for layer in servers
        if getattr(layer, "exclude_send_span", True) is False
        or getattr(layer, "exclude_receive_span", True) is False
    ]  # fmt: skip
    if chatty:
        todo = EXCLUDE_SPANS
        if type(app).__module__.startswith(_FASTAPI):
            todo += (
                "\nbegun with opentelemetry-instrument: set "
                "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=fastapi, and instrument the application "
                "with the line above"
            )
        yield Found(
            "warning",
            "a streamed answer has one span more for each of its parts (`http send`, "
            "`http receive`)",
            todo,
        )
    else:
        yield Found("ok", "each call has one server span")


def _check_provider() -> Iterator[Found]:
    """Whether the server spans and ours go the same way."""
    rec = recorder._current  # noqa: SLF001 - the engine's
    provider = otel_trace.get_tracer_provider()
    goes_nowhere = isinstance(provider, otel_trace.ProxyTracerProvider)
    if rec is None:
        return
    if not isinstance(rec.spans, OwnSpans):
        yield Found("ok", "spans go through the application's TracerProvider")
    elif goes_nowhere:
        yield Found(
            "warning",
            "there is no TracerProvider: server spans are not recorded, and their children name "
            "parents that nobody has",
            'ci.profile(set_global=True, spans="all"), or set the application\'s TracerProvider '
            "before profile()",
        )
    elif provider is not rec.spans.provider:
        yield Found(
            "warning",
            "the application's TracerProvider was set after profile(): its spans and ours go "
            "different ways",
            "call ci.profile() after trace.set_tracer_provider()",
        )
    else:
        yield Found("ok", "server spans come from the recording's own TracerProvider")
