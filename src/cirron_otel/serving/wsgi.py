"""``CirronWsgiMiddleware``: every request of a WSGI application is a ``request``, in one line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import wrapt

from cirron_otel import semconv
from cirron_otel.serving import usage
from cirron_otel.serving.middleware import CLIENT_DISCONNECTED, Options, note_end, note_tenant
from cirron_otel.serving.redaction import MAX_CONTENT, Kept
from cirron_otel.serving.requests import open_request

if TYPE_CHECKING:
    from cirron_otel.serving.requests import JoinedRequest, RequestSpan

_Start = Callable[..., Any]
_App = Callable[[Mapping[str, Any], _Start], Iterable[bytes]]

_SERVER_ERROR = 500
_MAX_BODY = 8 << 20


class CirronWsgiMiddleware:
    """Every request of a WSGI application as a ``request`` scope.

    ``app.wsgi_app = ci.CirronWsgiMiddleware(app.wsgi_app)`` in Flask, around ``application`` in
    Django. The request is current while the application makes its answer, each part of it
    included, and ends when the last part is made and the server has closed the answer. The options
    are those of :class:`~cirron_otel.serving.middleware.CirronMiddleware`; a function given as
    ``tenant`` gets the WSGI environment, and of the request's text the application's own reading
    is recorded, not one of ours.
    """

    def __init__(self, app: _App, **options: Any) -> None:
        self.app = app
        self._options = Options(**options)

    def __call__(self, environ: Mapping[str, Any], start_response: _Start) -> Iterable[bytes]:
        """Answer one request; the answer is the application's own, watched on its way."""
        options = self._options
        path = f"{environ.get('SCRIPT_NAME', '')}{environ.get('PATH_INFO', '')}"
        if options.leaves_out(path):
            return self.app(environ, start_response)
        headers = _headers(environ)
        request = open_request(
            headers=headers,
            attrs={**options.attrs, semconv.HTTP_METHOD: environ.get("REQUEST_METHOD", "")},
            shared=True,
        )
        if request is None:
            return self.app(environ, start_response)
        exchange = _Exchange(request, options, start_response)
        exchange.head = environ.get("REQUEST_METHOD") == "HEAD"
        if options.tenant is not None:
            pairs = [(name.encode("latin-1"), value) for name, value in headers]
            note_tenant(request, options.tenant, environ, pairs)
        if exchange.taken is not None and isinstance(environ, dict) and "wsgi.input" in environ:
            environ["wsgi.input"] = _Input(environ["wsgi.input"], exchange.taken)
        try:
            answer = self.app(environ, exchange.start_response)
        except BaseException as error:
            exchange.over(error)
            raise
        finally:
            request.release()
        if isinstance(answer, (list, tuple)):
            exchange.whole(answer)
            return answer
        return _Answer(answer, exchange)


def _headers(environ: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        (key[5:].replace("_", "-").lower(), str(value))
        for key, value in environ.items()
        if key.startswith("HTTP_")
    ]


class _Exchange:
    """One request and its answer, watched on their way. Never raises of its own."""

    __slots__ = (
        "_is_json", "_is_stream", "_options", "_start_response", "_status", "head", "request",
        "sent", "taken",
    )  # fmt: skip

    def __init__(
        self, request: RequestSpan | JoinedRequest, options: Options, start_response: _Start
    ) -> None:
        self.request = request
        #: Of such an answer a server need not take any part.
        self.head = False
        self._options = options
        self._start_response = start_response
        self._status = 0
        self._is_json = self._is_stream = False
        record = options.content.record
        self.taken = Kept() if record else None
        self.sent = Kept() if record else None

    def start_response(self, status: str, headers: list[tuple[str, str]], *more: Any) -> Any:  # noqa: ANN401 - the server's
        """As the server's own."""
        try:
            self._status = int(status[:3])
            known = {name.lower(): value for name, value in headers}
            self._is_json = "json" in known.get("content-type", "")
            self._is_stream = "content-length" not in known
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow(error)
        return self._start_response(status, headers, *more)

    def part(self, part: bytes) -> None:
        """One more part of an answer that is made while it is sent."""
        try:
            state = self.request.state
            if self.sent is not None:
                self.sent.add(part)
            if self._is_stream and not (state.joined and state.is_stream):
                state.is_stream = True
                if part:
                    state.count_tokens = self._options.token_counter
                    state.note_chunk(part)
            elif self._is_json and not state.joined:
                self._read(part)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow(error)

    def whole(self, parts: list[bytes] | tuple[bytes, ...]) -> None:
        """The whole answer is made."""
        try:
            for part in parts if self.sent is not None else ():
                self.sent.add(part)  # type: ignore[union-attr] # by the line above
            if self._is_json and not self.request.state.joined:
                self._read(parts[0] if len(parts) == 1 else b"".join(parts))
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow(error)
        self.over(None)

    def _read(self, body: bytes) -> None:
        state = self.request.state
        facts = state.facts or usage.Facts()
        if len(body) <= _MAX_BODY and usage.read_json(facts, body):
            state.facts = facts

    def over(self, error: BaseException | None, *, left: bool = False) -> None:
        """The answer is complete, or the application has given up; the first word counts."""
        request = self.request
        if not request.is_open:
            return
        try:
            if self._status:
                request.clean = None
                request.attrs = {**request.attrs, semconv.HTTP_STATUS: self._status}
            if self.taken is not None and self.sent is not None:
                self._options.content.say(request, "input", self.taken.text())
                self._options.content.say(request, "output", self.sent.text())
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._swallow(failure)
        state = request.state
        if error is not None:
            note_end(state, "error")
            request.finish(error)
        elif left:
            note_end(state, "closed")
            request.finish(
                error_type=CLIENT_DISCONNECTED, message="the client left before the answer ended"
            )
        elif self._status >= _SERVER_ERROR:
            request.finish(error_type=str(self._status))
        else:
            note_end(state, "complete")
            request.finish()

    def _swallow(self, error: Exception) -> None:
        self.request._rec.guard.swallow("middleware", error)  # noqa: SLF001 - a scope's own kind


class _Input(wrapt.ObjectProxy):  # type: ignore[misc,type-arg,unused-ignore] # typed loosely
    """The request's body, of which the first bytes that the application reads are kept."""

    def __init__(self, wrapped: Any, kept: Kept) -> None:  # noqa: ANN401 - the server's
        super().__init__(wrapped)
        self._self_kept = kept

    def read(self, *size: int) -> Any:  # noqa: ANN401 - the server's
        """As the server's own."""
        return self._self_keep(self.__wrapped__.read(*size))

    def readline(self, *size: int) -> Any:  # noqa: ANN401 - the server's
        """As the server's own."""
        return self._self_keep(self.__wrapped__.readline(*size))

    def readinto(self, buffer: Any) -> Any:  # noqa: ANN401 - the server's
        """As the server's own."""
        size = self.__wrapped__.readinto(buffer)
        if size:
            self._self_keep(bytes(memoryview(buffer)[:size]))
        return size

    def readlines(self, *hint: int) -> Any:  # noqa: ANN401 - the server's
        """As the server's own."""
        return [self._self_keep(line) for line in self.__wrapped__.readlines(*hint)]

    def __iter__(self) -> Iterator[Any]:
        """As the server's own."""
        return map(self._self_keep, iter(self.__wrapped__))

    def _self_keep(self, part: Any) -> Any:  # noqa: ANN401 - the server's
        if isinstance(part, bytes):
            self._self_kept.add(part[:MAX_CONTENT])
        return part


class _Answer(wrapt.ObjectProxy):  # type: ignore[misc,type-arg,unused-ignore] # typed loosely
    """An answer in parts: what the application returned, for ``isinstance`` too."""

    def __init__(self, wrapped: Iterable[bytes], exchange: _Exchange) -> None:
        super().__init__(wrapped)
        self._self_exchange = exchange
        self._self_parts: Iterator[bytes] | None = None
        #: A server that neither iterates nor closes leaves the request to the collector.
        abandoned = weakref.finalize(
            self, exchange.request.finish, error_type="abandoned", message="nobody took the answer"
        )
        abandoned.atexit = False
        self._self_abandoned = abandoned

    def __iter__(self) -> Iterator[bytes]:
        """Its parts; a server may iterate only once, as over the application's own."""
        self._self_parts = iter(self.__wrapped__)
        return self._self_run(self._self_parts)

    def _self_run(self, parts: Iterator[bytes]) -> Iterator[bytes]:
        while True:
            part = self._self_next(parts)
            if part is None:
                return
            yield part

    def __next__(self) -> bytes:
        """The next part."""
        if self._self_parts is None:
            self._self_parts = iter(self.__wrapped__)
        part = self._self_next(self._self_parts)
        if part is None:
            raise StopIteration
        return part

    def _self_next(self, parts: Iterator[bytes]) -> bytes | None:
        exchange = self._self_exchange
        try:
            with exchange.request.running():
                part = next(parts, None)
        except BaseException as error:
            self._self_over(error)
            raise
        if part is None:
            self._self_over(None)
        else:
            exchange.part(part)
        return part

    def close(self) -> None:
        """The server wants no more of it."""
        close = getattr(self.__wrapped__, "close", None)
        try:
            if close is not None:
                with self._self_exchange.request.running():
                    close()
        finally:
            # A file that the server sends by itself is never iterated.
            left = self._self_parts is not None or not hasattr(self.__wrapped__, "filelike")
            self._self_over(None, left=left and not self._self_exchange.head)

    def _self_over(self, error: BaseException | None, *, left: bool = False) -> None:
        self._self_abandoned.detach()
        self._self_exchange.over(error, left=left)
