"""``CirronWsgiMiddleware``: every request of a WSGI application is a ``request``, in one line."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import wrapt

from cirron_otel import semconv
from cirron_otel.serving.exchange import Exchange
from cirron_otel.serving.options import Options
from cirron_otel.serving.redaction import MAX_CONTENT, Kept
from cirron_otel.serving.requests import open_request

if TYPE_CHECKING:
    from cirron_otel.serving.requests import JoinedRequest, RequestSpan

_Start = Callable[..., Any]
_App = Callable[[Mapping[str, Any], _Start], Iterable[bytes]]


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
        exchange = _Exchange(request, options, environ, start_response)
        if options.tenant is not None:
            options.note_tenant(request, environ, headers)
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


class _Exchange(Exchange):
    """The environment of one request, and the answer it gets."""

    __slots__ = ("_start_response", "head")

    def __init__(
        self,
        request: RequestSpan | JoinedRequest,
        options: Options,
        environ: Mapping[str, Any],
        start_response: _Start,
    ) -> None:
        super().__init__(request, options, str(environ.get("CONTENT_TYPE") or ""))
        #: Of such an answer a server need not take any part.
        self.head = environ.get("REQUEST_METHOD") == "HEAD"
        self._start_response = start_response

    def start_response(self, status: str, headers: list[tuple[str, str]], *more: Any) -> Any:  # noqa: ANN401 - the server's
        """As the server's own."""
        try:
            self.begun(status[:3], {str(name).lower(): str(value) for name, value in headers})
        except Exception as error:  # noqa: BLE001 - see _guard
            self.swallow(error)
        return self._start_response(status, headers, *more)

    def whole(self, parts: list[bytes] | tuple[bytes, ...]) -> None:
        """The whole answer is made."""
        if (self.sent is not None or self._is_json) and all(type(one) is bytes for one in parts):
            self.note_body(parts[0] if len(parts) == 1 else b"".join(parts), in_parts=False)
        self.complete = True
        self.over()


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
            exchange.note_body(part, in_parts=True)
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
        exchange = self._self_exchange
        if left:
            exchange.gone = True
        elif error is None:
            exchange.complete = True
        exchange.over(error)
