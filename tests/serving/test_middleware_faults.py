"""What applications, servers and clients do wrong around a middleware is told as it was."""

from __future__ import annotations

import asyncio
import io
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, HTTPException
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotation

import cirron_otel as ci
from asking import ask, recorded, status_of
from cirron_otel import semconv
from cirron_otel.batch import SpanRecord


def events_of(row: SpanRecord) -> list[str]:
    """The types of the exceptions that stand on a span."""
    assert row.otel
    return [one["attrs"]["exception.type"] for one in row.otel.events or ()]


@ci.inference
def picky(wanted: str) -> str:
    """Has its own opinion."""
    if wanted == "none":
        raise HTTPException(404, "no such model")
    raise LookupError(wanted)


@ci.inference
def words() -> Iterator[str]:
    """Has more to say than anybody reads."""
    yield from ("a", "b", "c")


def test_what_a_service_handles_is_no_failure() -> None:
    """An exception of the decorated function fails the request only where it fails the answer."""
    app = FastAPI()
    app.add_middleware(ci.CirronMiddleware)

    @app.exception_handler(LookupError)
    async def handler(_request: Any, _error: Any) -> JSONResponse:
        return JSONResponse({}, status_code=503)

    @app.get("/first")
    def first() -> str:
        return next(words())

    @app.get("/crash")
    def crash() -> None:
        try:
            picky("some")
        except LookupError as error:
            raise ZeroDivisionError from error

    @app.get("/{wanted}")
    def get(wanted: str) -> str:
        return picky(wanted)

    ci.profile(frameworks=[])
    for path, status in (("/none", 404), ("/some", 503), ("/first", 200), ("/crash", 500)):
        assert ask(app, path).status_code == status
    missing, handled, unread, crashed = recorded().named("request")
    assert (status_of(missing), events_of(missing)) == (
        (None, None), ["fastapi.exceptions.HTTPException"],
    )  # fmt: skip
    assert (status_of(handled), events_of(handled)) == (("error", "LookupError"), ["LookupError"])
    assert (status_of(unread), unread.attrs[semconv.STREAM_END]) == ((None, None), "abandoned")
    assert events_of(crashed) == ["LookupError", "ZeroDivisionError"]
    assert status_of(crashed)[0] == "error"


def test_a_client_that_leaves_behind_another_middleware() -> None:
    """Starlette's own ends such an answer properly; the request says what happened."""
    app = FastAPI()

    async def passes(request: Any, following: Any) -> Any:
        return await following(request)

    app.add_middleware(BaseHTTPMiddleware, dispatch=passes)
    app.add_middleware(ci.CirronMiddleware)

    @app.get("/")
    async def endless() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            while True:
                yield "word "
                await asyncio.sleep(0.005)

        return StreamingResponse(parts())

    ci.profile(frameworks=[])
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="critical", lifespan="off"))
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([sock])))
        thread.start()
        with httpx.stream("GET", f"http://127.0.0.1:{sock.getsockname()[1]}/") as answer:
            next(answer.iter_bytes())
        deadline = time.monotonic() + 20
        while ci.health()["open_scopes"] > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        server.should_exit = True
        thread.join()
    request = recorded().one("request")
    assert status_of(request) == ("error", "client_disconnected")
    assert request.attrs[semconv.STREAM_END] == "closed"


def test_only_texts_are_texts() -> None:
    """Compressed answers and bodies that are no text are not recorded as if they were."""
    app = FastAPI()
    app.add_middleware(GZipMiddleware, minimum_size=1)
    app.add_middleware(ci.CirronMiddleware, record_content=True)

    @app.post("/")
    async def answer(request: Request) -> dict[str, str]:
        assert await request.body()
        return {"a": "b"}

    @app.post("/image")
    async def image(request: Request) -> Response:
        assert await request.body()
        return Response(b"\x89PNG", media_type="image/png")

    ci.profile(frameworks=[])
    plain_text = {"accept-encoding": "identity"}
    ask(app, "/", "POST", content=b"\xff\xfe")
    ask(app, "/", "POST", content="text", headers=plain_text)
    ask(app, "/image", "POST", content=b"x", headers={**plain_text, "content-type": "image/png"})
    found = [
        (row.attrs.get("cirron.request.content"), row.attrs.get("cirron.response.content"))
        for row in recorded().named("request")
    ]
    assert found == [(None, None), ("text", '{"a":"b"}'), (None, None)]


def test_an_asgi_application_may_send_anything() -> None:
    """Odd messages reach the server as they are; what it raises is the application's; all end."""

    async def odd(_scope: Any, _receive: Any, send: Any) -> None:
        async def begin() -> None:
            headers = [("a", "b"), (b"content-type", b"text/\xff")]
            await send({"type": "http.response.start", "status": "200", "headers": headers})
            await send({"type": "http.response.body", "body": None})

        await asyncio.create_task(begin())
        await send({"type": "http.response.body", "body": b"again"})

    async def begins(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start"})

    async def nothing() -> Any:
        return {"type": "http.request"}

    async def takes(message: Any) -> None:
        sent.append(message)

    async def refuses(_message: Any) -> None:
        raise ValueError("the server's")

    sent: list[Any] = []
    given = {"type": "http", "path": None, "headers": None, "method": None}
    ci.profile(frameworks=[])
    asyncio.run(ci.CirronMiddleware(odd, record_content=True)(given, nothing, takes))
    assert [one.get("body") for one in sent] == [None, None, b"again"]
    with pytest.raises(ValueError, match="the server's"):
        asyncio.run(ci.CirronMiddleware(begins)(given, nothing, refuses))
    first, second = recorded().named("request")
    assert (status_of(first), first.attrs["http.response.status_code"]) == ((None, None), 200)
    assert status_of(second) == ("error", "ValueError: the server's")


def _run_wsgi(app: Any, **more: Any) -> Any:
    environ = {"REQUEST_METHOD": "GET", "PATH_INFO": "/", "wsgi.input": io.BytesIO(), **more}
    return ci.CirronWsgiMiddleware(app, tenant="x-tenant")(environ, lambda *_: None)


def test_a_wsgi_application_may_do_anything() -> None:
    """Odd statuses, headers and answers reach the server as they are; each request ends."""

    def odd(_environ: Any, start: Any) -> list[bytes]:
        start("abc", [("Content-Type", None), (1, 2)])
        return [b"x"]

    def texts(_environ: Any, start: Any) -> list[Any]:
        start("200 OK", [("content-type", "application/json")])
        return ["no", "bytes"]

    class Answer:
        def __iter__(self) -> Iterator[bytes]:
            return iter([b"x"])

        def close(self) -> None:
            raise RuntimeError("close")

    ci.profile(frameworks=[])
    assert _run_wsgi(odd, HTTP_é="x") == [b"x"]
    assert _run_wsgi(texts, HTTP_TRACEPARENT="x" * 10**6) == ["no", "bytes"]
    answer = _run_wsgi(lambda *_: Answer())
    assert list(answer) == [b"x"]
    with pytest.raises(RuntimeError, match="close"):
        answer.close()
    assert len(recorded().named("request")) == 3
    assert not ci.health()["losses"]
