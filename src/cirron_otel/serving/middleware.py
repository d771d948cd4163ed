"""``CirronMiddleware``: every request of an ASGI application is a ``request``, in one line.

Nothing of a framework is imported: it is a plain ASGI application around another one, so that it
works with FastAPI, Starlette, Litestar, Quart, Django and under any server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.context import attach_context, get_current
from cirron_otel.errors import ConfigurationError
from cirron_otel.serving import gen_ai, usage
from cirron_otel.serving.redaction import Content, Kept, Redact
from cirron_otel.serving.requests import open_request

if TYPE_CHECKING:
    from cirron_otel.serving.requests import JoinedRequest, RequestSpan
    from cirron_otel.serving.state import RequestState

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

#: Who a request is answered for: the name of a header, or a function of the server's request.
Tenant = str | Callable[[Any], str | None]

CLIENT_DISCONNECTED = "client_disconnected"
_NOT_FINISHED = "incomplete_response"
_SERVER_ERROR = 500
#: Bodies longer than this are not searched for what they say of tokens.
_MAX_BODY = 8 << 20
_MAX_TENANT = 256


class Options:
    """What both middlewares are told; see :class:`CirronMiddleware`."""

    def __init__(  # noqa: PLR0913 - each has its own name
        self,
        *,
        exclude: Iterable[str] = (),
        operation: str | None = None,
        provider: str | None = None,
        model: str | None = None,
        tenant: Tenant | None = None,
        token_counter: Callable[[Any], int] | None = None,
        record_content: bool = False,
        redact: Redact | None = None,
    ) -> None:
        if isinstance(exclude, str):
            raise ConfigurationError(f"exclude= must be a list of paths: exclude=[{exclude!r}]")
        if tenant is not None and not isinstance(tenant, str) and not callable(tenant):
            raise ConfigurationError("tenant= must be the name of a header, or a function")
        if token_counter is not None and not callable(token_counter):
            raise ConfigurationError("token_counter= must be a function of a part of the answer")
        paths = [str(path) for path in exclude]
        self._paths = frozenset(path for path in paths if not path.endswith("*"))
        self._prefixes = tuple(path[:-1] for path in paths if path.endswith("*"))
        self.attrs = gen_ai.start_attributes(model=model, operation=operation, provider=provider)
        self.tenant = tenant.lower() if isinstance(tenant, str) else tenant
        self.token_counter = token_counter
        self.content = Content(record=record_content, redact=redact)

    def leaves_out(self, path: str) -> bool:
        """Whether requests for a path are none of ours."""
        return path in self._paths or bool(self._prefixes and path.startswith(self._prefixes))


class CirronMiddleware:
    """Every HTTP request of an ASGI application as a ``request`` scope.

    ``app.add_middleware(ci.CirronMiddleware, exclude=["/health"])`` in FastAPI and Starlette,
    ``CirronMiddleware(app)`` around any other. The request is current while the application
    answers; it ends when the last part of the answer has been sent, and a client that leaves
    before, an exception or a status of 500 and more is its error. Tokens and the model are read
    from JSON answers and from server-sent events of the known shapes. A function with
    ``@ci.inference`` that is called inside takes this request for its own.

    ``exclude`` are paths, ``"/static/*"`` with all below it. ``operation``, ``provider`` and
    ``model`` are what ``gen_ai.*`` says of every request. ``tenant`` is the header, or a function
    of the ASGI scope, that says for whom it is answered. ``token_counter`` gets each part of a
    streamed answer (bytes) and says how many tokens it has, for streams that do not say it. With
    ``record_content`` the texts of request and answer, the first 64 KiB of each, become
    attributes, after ``redact("input" or "output", text)``.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for options that cannot be used; a call
    raises only what the application raises.
    """

    def __init__(self, app: _App, **options: Any) -> None:
        self.app = app
        self._options = Options(**options)

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request. Websockets and the lifespan are passed through as they are."""
        options = self._options
        if scope.get("type") != "http" or options.leaves_out(str(scope.get("path", ""))):
            await self.app(scope, receive, send)
            return
        before = get_current()
        request = open_request(
            headers=scope.get("headers") or (),
            attrs={**options.attrs, semconv.HTTP_METHOD: scope.get("method", "")},
            shared=True,
        )
        if request is None:
            await self.app(scope, receive, send)
            return
        mine = get_current()
        exchange = _Exchange(request, options, scope, receive, send)
        try:
            await self.app(scope, exchange.receive, exchange.send)
        except BaseException as error:
            exchange.over(error)
            raise
        else:
            exchange.over(None)
        finally:
            # The last part may have been sent, and the request ended, by another task.
            if get_current() is mine:
                attach_context(before)


class _Exchange:
    """One request and its answer, watched on their way. Never raises of its own."""

    __slots__ = (
        "_complete", "_gone", "_is_json", "_is_stream", "_options", "_receive", "_request",
        "_scope", "_send", "_sent", "_status", "_taken",
    )  # fmt: skip

    def __init__(
        self,
        request: RequestSpan | JoinedRequest,
        options: Options,
        scope: _Message,
        receive: _Receive,
        send: _Send,
    ) -> None:
        self._request = request
        self._options = options
        self._scope = scope
        self._receive = receive
        self._send = send
        self._status = 0
        self._is_stream = self._is_json = False
        self._complete = self._gone = False
        record = options.content.record
        self._taken = Kept() if record else None
        self._sent = Kept() if record else None
        tenant = options.tenant
        if tenant is not None:
            note_tenant(request, tenant, scope, scope.get("headers") or ())

    async def receive(self) -> _Message:
        """The next message from the client."""
        message = await self._receive()
        kind = message.get("type")
        if kind == "http.disconnect":
            self._gone = True
        elif self._taken is not None and kind == "http.request":
            self._taken.add(message.get("body") or b"")
        return message

    async def send(self, message: _Message) -> None:
        """One message to the client."""
        kind = message.get("type")
        if kind == "http.response.start":
            self._begun(message)
        elif kind == "http.response.body":
            self._note_body(message)
        try:
            await self._send(message)
        except OSError:
            self._gone = True  # what servers raise where the client has left
            raise
        last = kind == "http.response.body" and not message.get("more_body", False)
        if last or kind == "http.response.pathsend":
            self._complete = True
            self.over(None)

    def _begun(self, message: _Message) -> None:
        try:
            self._status = int(message.get("status") or 0)
            headers = {
                bytes(name).lower(): bytes(value) for name, value in message.get("headers") or ()
            }
            kind = headers.get(b"content-type", b"")
            self._is_json = b"json" in kind
            # Where the length is known beforehand, it is a file that is sent in parts.
            self._is_stream = b"content-length" not in headers
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow(error)

    def _note_body(self, message: _Message) -> None:
        try:
            body = message.get("body") or b""
            state = self._request.state
            if self._sent is not None:
                self._sent.add(body)
            if self._is_stream and (message.get("more_body", False) or state.is_stream):
                if not (state.joined and state.is_stream):
                    state.is_stream = True
                    if body:
                        state.count_tokens = self._options.token_counter
                        state.note_chunk(body)
            elif self._is_json and len(body) <= _MAX_BODY and not state.joined:
                facts = state.facts or usage.Facts()
                if usage.read_json(facts, bytes(body)):
                    state.facts = facts
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow(error)

    def over(self, error: BaseException | None) -> None:
        """The answer is complete, or the application has given up; the first word counts."""
        request = self._request
        if not request.is_open:
            return
        try:
            self._say()
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._swallow(failure)
        if self._gone and not self._complete:
            note_end(request.state, "closed")
            request.finish(
                error_type=CLIENT_DISCONNECTED, message="the client left before the answer ended"
            )
        elif error is not None:
            note_end(request.state, "error")
            request.finish(error)
        elif self._status >= _SERVER_ERROR:
            request.finish(error_type=str(self._status))
        elif not self._complete:
            request.finish(
                error_type=_NOT_FINISHED, message="the application returned without a whole answer"
            )
        else:
            note_end(request.state, "complete")
            request.finish()

    def _say(self) -> None:
        request = self._request
        attrs = dict(request.attrs)
        if self._status:
            attrs[semconv.HTTP_STATUS] = self._status
        route = getattr(self._scope.get("route"), "path", None)
        if isinstance(route, str):
            attrs[semconv.HTTP_ROUTE] = route
        request.clean = None
        request.attrs = attrs
        content = self._options.content
        if self._taken is not None and self._sent is not None:
            content.say(request, "input", self._taken.text())
            content.say(request, "output", self._sent.text())

    def _swallow(self, error: Exception) -> None:
        self._request._rec.guard.swallow("middleware", error)  # noqa: SLF001 - a scope's own kind


def note_end(state: RequestState, end: str) -> None:
    """Say how a stream ended, where that is not said yet."""
    if state.is_stream and state.stream_end is None:
        state.stream_end = end


def note_tenant(
    request: RequestSpan | JoinedRequest,
    tenant: Tenant,
    asked: object,
    headers: Iterable[tuple[Any, Any]],
) -> None:
    """Say on a request for whom it is answered. Never raises."""
    found: object = None
    try:
        if isinstance(tenant, str):
            wanted = tenant.encode("latin-1", "replace")
            found = next((value for name, value in headers if bytes(name).lower() == wanted), None)
        else:
            found = tenant(asked)
        if isinstance(found, bytes):
            found = found.decode("latin-1")
        if found is not None and found != "":
            request.clean = None
            request.attrs = {**request.attrs, semconv.TENANT: str(found)[:_MAX_TENANT]}
    except Exception as error:  # noqa: BLE001 - the function is the user's
        guard = request._rec.guard  # noqa: SLF001 - a scope's own kind
        guard.repeat_warning("tenant", f"tenant= raised {error!r}; the request has no tenant")
