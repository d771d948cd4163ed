"""``CirronMiddleware``: every request of an ASGI application is a ``request``, in one line.

Nothing of a framework is imported: it is a plain ASGI application around another one, so that it
works with FastAPI, Starlette, Litestar, Quart, Django and under any server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.context import attach_context, get_current
from cirron_otel.serving.callers import header_of, text_of_header
from cirron_otel.serving.exchange import Exchange
from cirron_otel.serving.options import Options
from cirron_otel.serving.requests import open_request

if TYPE_CHECKING:
    from cirron_otel.serving.requests import JoinedRequest, RequestSpan

_Message = MutableMapping[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]
_App = Callable[[_Message, _Receive, _Send], Awaitable[None]]

#: Messages that hold a part of the answer, or name a file that is one (extensions of ASGI).
_PARTS = frozenset({"http.response.body", "http.response.zerocopysend"})
_WHOLE = "http.response.pathsend"


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
        headers = scope.get("headers") or ()
        if not isinstance(headers, (list, tuple)):
            # Any iterable will do for a server: one that can be read once is read once.
            headers = list(headers)
            scope = {**scope, "headers": headers}
        before = get_current()
        request = open_request(
            headers=headers,
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


class _Exchange(Exchange):
    """The messages of one request and its answer."""

    __slots__ = ("_receive", "_scope", "_send")

    def __init__(
        self,
        request: RequestSpan | JoinedRequest,
        options: Options,
        scope: _Message,
        receive: _Receive,
        send: _Send,
    ) -> None:
        super().__init__(request, options, _content_type(scope) if options.content.record else "")
        self._scope = scope
        self._receive = receive
        self._send = send
        if options.tenant is not None:
            options.note_tenant(request, scope, scope.get("headers") or ())

    async def receive(self) -> _Message:
        """The next message from the client."""
        message = await self._receive()
        kind = message.get("type")
        if kind == "http.disconnect":
            self.gone = True
        elif self.taken is not None and kind == "http.request":
            self.taken.add(message.get("body") or b"")
        return message

    async def send(self, message: _Message) -> None:
        """One message to the client."""
        kind = message.get("type")
        if kind == "http.response.start":
            self._note_start(message)
        elif kind == "http.response.body":
            more = bool(message.get("more_body", False))
            state = self.request.known_state
            in_parts = more or (state is not None and state.is_stream)
            self.note_body(message.get("body") or b"", in_parts=in_parts)
        try:
            await self._send(message)
        except OSError:
            self.gone = True  # what servers raise where the client has left
            raise
        if kind == _WHOLE or (kind in _PARTS and not message.get("more_body", False)):
            # A middleware may end an answer properly that nobody reads any more.
            self.complete = not self.gone
            self.over()

    def _note_start(self, message: _Message) -> None:
        try:
            headers = {
                text_of_header(name).lower(): text_of_header(value)
                for name, value in message.get("headers") or ()
            }
            self.begun(message.get("status"), headers)
        except Exception as error:  # noqa: BLE001 - see _guard
            self.swallow(error)

    def say(self) -> None:
        """The route, too, which the framework has found meanwhile."""
        route = getattr(self._scope.get("route"), "path", None)
        if isinstance(route, str):
            self.request.clean = None
            self.request.attrs = {**self.request.attrs, semconv.HTTP_ROUTE: route}
        super().say()


def _content_type(scope: _Message) -> str:
    return text_of_header(header_of(scope.get("headers") or (), "content-type") or "")
