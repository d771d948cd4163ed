"""The middlewares: every HTTP request is one ``request``, whatever becomes of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any
from wsgiref.util import FileWrapper
from wsgiref.validate import validator

import flask
import httpx
import pytest
import uvicorn
from fastapi import BackgroundTasks, FastAPI, HTTPException
from fastapi.responses import StreamingResponse
from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
from opentelemetry.instrumentation.flask import FlaskInstrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from starlette.requests import Request  # noqa: TC002 - FastAPI reads the annotation
from starlette.responses import FileResponse, JSONResponse

import asking
import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch import SpanRecord
from cirron_otel.errors import ConfigurationError
from helpers import Rows, RunProgram, read_spool, tree_text

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CALLER[:-1] + "0"
SSE = [
    {"object": "chat.completion.chunk", "id": "c1", "model": "m-1", "choices": [{"index": 0}]},
    {"object": "chat.completion.chunk", "id": "c1", "model": "m-1", "choices": [],
     "usage": {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}},
]  # fmt: skip


def recorded() -> Rows:
    """What was recorded, once it is all written."""
    ci.flush()
    return read_spool()


def status_of(row: SpanRecord) -> tuple[Any, Any]:
    """A span's status and its ``error.type``."""
    assert row.otel
    return row.otel.status or None, row.attrs.get(semconv.ERROR_TYPE)


def service(**options: Any) -> FastAPI:
    """A small service with each kind of answer."""
    app = FastAPI()
    app.add_middleware(ci.CirronMiddleware, **options)

    @app.get("/hello/{name}")
    def hello(name: str) -> dict[str, str]:
        with ci.scope("work"):
            ci.mark("letters", len(name))
        return {"hello": name}

    @app.get("/later")
    def later(tasks: BackgroundTasks) -> str:
        def work() -> None:
            with ci.scope("background"):
                pass

        tasks.add_task(work)
        return "done"

    @app.get("/broken")
    async def broken() -> None:
        raise RuntimeError("out of memory")

    @app.get("/busy")
    async def busy() -> None:
        raise HTTPException(503)

    @app.get("/slow")
    async def slow() -> None:
        async with asyncio.timeout(0.01):
            await asyncio.sleep(60)

    _add_answers(app)
    return app


def _add_answers(app: FastAPI) -> None:
    @app.post("/chat")
    async def chat(request: Request) -> Any:
        given = await request.json()
        if not given.get("stream"):
            return JSONResponse({
                "object": "chat.completion", "id": "c0", "model": "m-0",
                "choices": [{"finish_reason": "stop", "message": {"content": "secret"}}],
                "usage": {"prompt_tokens": 3, "completion_tokens": 5, "total_tokens": 8},
            })  # fmt: skip

        async def parts() -> AsyncIterator[str]:
            for one in SSE:
                await asyncio.sleep(0)
                ci.mark("part", 1)
                yield f"data: {json.dumps(one)}\n\n"
            yield "data: [DONE]\n\n"

        return StreamingResponse(parts(), media_type="text/event-stream")

    @app.get("/endless")
    async def endless() -> StreamingResponse:
        async def parts() -> AsyncIterator[str]:
            while True:
                yield "word "
                await asyncio.sleep(0.005)

        return StreamingResponse(parts(), media_type="text/plain")

    @app.get("/file")
    async def file() -> FileResponse:
        return FileResponse(__file__)


@pytest.fixture
def ask() -> Iterator[Callable[..., httpx.Response]]:
    """Asks a service in this process, which records."""
    ci.profile(frameworks=[])
    yield asking.ask
    ci.shutdown()


@contextlib.contextmanager
def served(app: Any) -> Iterator[int]:
    """A real uvicorn on the loopback; its port."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            deadline = time.monotonic() + 30
            while not server.started:
                assert time.monotonic() < deadline
                time.sleep(0.005)
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join(30)


def until(condition: Callable[[], Any]) -> None:
    """Wait for what must come."""
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


# --- ASGI -----------------------------------------------------------------------------------------


def test_a_request_is_a_scope_in_its_callers_trace(ask: Any) -> None:
    """Without instrumentation the caller's trace goes on; what the endpoint does is inside."""
    app = service(model="tiny", operation="greet", provider="us", tenant="x-tenant")
    headers = {"traceparent": CALLER, "x-request-id": "abc", "x-tenant": "acme"}
    assert ask(app, "/hello/bob", headers=headers).json() == {"hello": "bob"}
    rows = recorded()
    assert tree_text(rows, marks=True) == ("cirron.session (open)\n  request\n    work {letters}")
    request = rows.one("request")
    assert request.otel
    assert request.otel.trace_id == CALLER[3:19]
    assert request.id[16:] == CALLER[19:35]
    assert request.otel.parent_span_id == CALLER[36:52]
    assert (request.otel.kind, *status_of(request)) == ("server", None, None)
    said = {
        "request_id": "abc", "http.request.method": "GET", "http.route": "/hello/{name}",
        "http.response.status_code": 200, "cirron.tenant": "acme", "gen_ai.request.model": "tiny",
        "gen_ai.operation.name": "greet", "gen_ai.provider.name": "us",
    }  # fmt: skip
    assert {key: request.attrs.get(key) for key in said} == said


def test_an_unsampled_caller_is_recorded_here_and_not_exported(ask: Any) -> None:
    """The spool has the request; its row says that it does not leave."""
    ask(service(), "/hello/bob", headers={"traceparent": UNSAMPLED})
    rows = recorded()
    for name in ("request", "work"):
        otel = rows.one(name).otel
        assert otel
        assert otel.sampled is False


def test_requests_without_a_caller_have_traces_of_their_own(ask: Any) -> None:
    """Two requests are two traces, each linked to the session."""
    app = service()
    for _ in range(2):
        ask(app, "/hello/bob")
    rows = recorded()
    first, second = rows.named("request")
    assert first.id[16:] != second.id[16:]
    session = next(row for row in rows.open if row.name == "cirron.session")
    for row in (first, second):
        assert row.otel
        assert [link["span_id"] for link in row.otel.links or ()] == [session.id[:16]]
        assert row.parent_id == session.id


@pytest.mark.parametrize(
    ("path", "code", "why"),
    [
        ("/broken", 500, "RuntimeError"),
        ("/slow", 500, "TimeoutError"),
        ("/busy", 503, "503"),
        ("/nowhere", 404, None),
    ],
)
def test_errors_have_their_status(ask: Any, path: str, code: int, why: str | None) -> None:
    """An exception, a timeout and a status of 500 or more are errors with a type; 404 is none."""
    assert ask(service(), path).status_code == code
    request = recorded().one("request")
    assert request.otel
    exceptions = [event["attrs"]["exception.type"] for event in request.otel.events or ()]
    if why is None:
        assert status_of(request) == (None, None)
    elif why == "503":
        assert (status_of(request), exceptions) == (("error", "503"), [])
    else:
        assert (request.otel.status, exceptions) == ("error", [why])


def test_a_background_task_is_not_part_of_the_answer(ask: Any) -> None:
    """The request ends with the last part of its answer; what runs after it stands outside."""
    ask(service(), "/later")
    rows = recorded()
    request, task = rows.one("request"), rows.one("background")
    assert request.end_ns <= task.start_ns
    assert task.parent_id != request.id


def test_tokens_of_a_json_answer_are_read(ask: Any) -> None:
    """One line of middleware is enough for tokens, model, operation; texts are not recorded."""
    ask(service(), "/chat", "POST", json={"messages": ["secret"]})
    rows = recorded()
    request = rows.one("request")
    said = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai",
        "gen_ai.response.model": "m-0", "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 5, "gen_ai.response.finish_reasons": ["stop"],
    }  # fmt: skip
    assert {key: request.attrs.get(key) for key in said} == said
    marks = {mark.name: mark.value for mark in rows.marks_of(request)}
    assert (marks["input_tokens"], marks["output_tokens"], marks["total_tokens"]) == (3, 5, 8)
    assert "secret" not in str(request)


def test_a_streamed_answer_ends_its_request(ask: Any) -> None:
    """First token, chunks and tokens are those of the stream, and its marks are the request's."""
    ask(service(), "/chat", "POST", json={"stream": True})
    rows = recorded()
    request = rows.one("request")
    assert request.attrs["gen_ai.request.stream"] is True
    assert request.attrs["gen_ai.response.time_to_first_chunk"] > 0
    assert request.attrs["gen_ai.usage.output_tokens"] == 2
    assert request.attrs[semconv.STREAM_END] == "complete"
    marks = [mark.name for mark in rows.marks_of(request)]
    assert marks.count("part") == 2
    assert {"time_to_first_token_ms", "request_duration_ms", "output_tokens"} <= set(marks)


def test_a_file_is_no_stream(ask: Any) -> None:
    """What is sent in parts with a known length is one answer."""
    answer = ask(service(), "/file")
    assert len(answer.content) > 1000
    request = recorded().one("request")
    assert semconv.GEN_AI_REQUEST_STREAM not in request.attrs
    assert request.attrs["http.response.status_code"] == 200


def test_a_token_counter_is_named_an_estimate(ask: Any) -> None:
    """Tokens by the user's counter are marked as such; without one the count stays absent."""
    app = FastAPI()
    app.add_middleware(ci.CirronMiddleware, token_counter=lambda part: len(part.split()))

    @app.get("/")
    async def words() -> StreamingResponse:
        async def parts() -> AsyncIterator[bytes]:
            yield b"one two "
            yield b"three"

        return StreamingResponse(parts())

    ask(app, "/")
    request = recorded().one("request")
    assert request.attrs["gen_ai.usage.output_tokens"] == 3
    assert request.attrs["cirron.usage.estimated"] is True


def test_paths_that_are_left_out(ask: Any) -> None:
    """A health check makes no request, nor does anything below an excluded path."""
    app = service(exclude=["/later", "/hello/*"])
    for path in ("/later", "/hello/bob", "/file"):
        assert ask(app, path).status_code == 200
    assert recorded().one("request").attrs["http.route"] == "/file"


def test_content_is_recorded_only_when_asked_and_through_the_hook(ask: Any) -> None:
    """Both texts pass the hook; None and a hook that raises keep a text out."""

    def redact(kind: str, text: str) -> str | None:
        if "boom" in text:
            raise ValueError(text)
        return None if kind == "output" else text.replace("secret", "***")

    app = service(record_content=True, redact=redact)
    ask(app, "/chat", "POST", json={"ask": "secret"})
    ask(app, "/chat", "POST", json={"ask": "boom"})
    first, second = recorded().named("request")
    assert json.loads(first.attrs["cirron.request.content"]) == {"ask": "***"}
    assert "cirron.response.content" not in first.attrs
    assert "cirron.request.content" not in second.attrs
    assert ci.health()["losses"]["redaction_failed"] == 1
    plain = service(record_content=True)
    ask(plain, "/chat", "POST", json={"ask": "secret"})
    third = recorded().named("request")[2]
    assert "secret" in third.attrs["cirron.response.content"]


@pytest.mark.parametrize(
    "options",
    [{"redact": str}, {"redact": 5, "record_content": True}, {"exclude": "/health"},
     {"tenant": 5}, {"token_counter": "x"}],
)  # fmt: skip
def test_options_that_cannot_be_used_are_refused(options: dict[str, Any]) -> None:
    """A mistake in the options is said where the middleware is made."""
    for kind in (ci.CirronMiddleware, ci.CirronWsgiMiddleware):
        with pytest.raises(ConfigurationError):
            kind(service(), **options)


def test_a_client_that_leaves_ends_its_request(ask: Any) -> None:  # noqa: ARG001 - it records
    """Through a real server: one span, an error of its own type, with the chunks so far."""
    with served(service()) as port:
        with httpx.stream("GET", f"http://127.0.0.1:{port}/endless", timeout=20) as answer:
            assert next(answer.iter_text())
        until(lambda: recorded().named("request"))
    rows = recorded()
    request = rows.one("request")
    assert status_of(request) == ("error", "client_disconnected")
    marks = {mark.name: mark.value for mark in rows.marks_of(request)}
    assert int(str(marks["output_chunks"])) >= 1
    assert request.attrs["gen_ai.response.time_to_first_chunk"] > 0


def test_many_requests_at_once_are_kept_apart(ask: Any) -> None:  # noqa: ARG001 - it records
    """Requests that a real server answers at the same time have nothing of one another."""
    with served(service()) as port:

        async def all_at_once() -> None:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}") as client:
                names = ["x" * n for n in range(1, 41)]
                await asyncio.gather(*(client.get(f"/hello/{name}") for name in names))

        asyncio.run(all_at_once())
    rows = recorded()
    requests = rows.named("request")
    assert len(requests) == 40
    found = []
    for request in requests:
        (work,) = rows.children(request)
        (mark,) = rows.marks_of(work)
        found.append(mark.value)
    assert sorted(found, key=int) == list(range(1, 41))


def test_a_bare_application_that_gives_no_whole_answer(ask: Any) -> None:
    """Any ASGI application will do; one that stops halfway has its own error."""

    async def app(_scope: Any, _receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    with contextlib.suppress(AssertionError):
        ask(ci.CirronMiddleware(app), "/")
    assert status_of(recorded().one("request")) == ("error", "incomplete_response")


def test_without_a_recording_the_application_is_called_as_it_is() -> None:
    """Before profile() and after shutdown() the middleware is not there."""
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append((scope, receive, send))

    given = ({"type": "http", "path": "/", "headers": []}, object(), object())
    asyncio.run(ci.CirronMiddleware(app)(*given))  # type: ignore[arg-type]
    assert seen == [given]


def test_a_decorated_endpoint_takes_the_middlewares_request(ask: Any) -> None:
    """Both lines in one service make one request, not two."""
    app = FastAPI()
    app.add_middleware(ci.CirronMiddleware)

    @ci.inference(model="tiny", operation="chat", team="a")
    def answer(text: str) -> dict[str, Any]:
        with ci.scope("model"):
            return {"text": text, "usage": {"prompt_tokens": 1, "completion_tokens": 2}}

    @app.get("/")
    def endpoint() -> dict[str, Any]:
        return answer("x")

    ask(app, "/")
    rows = recorded()
    assert tree_text(rows) == "cirron.session (open)\n  request\n    model"
    attrs = rows.one("request").attrs
    assert (attrs["gen_ai.usage.output_tokens"], attrs["team"]) == (2, "a")
    assert (attrs["gen_ai.request.model"], attrs["gen_ai.operation.name"]) == ("tiny", "chat")


# --- with OpenTelemetry's instrumentations --------------------------------------------------------


@pytest.fixture
def exported() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    """The application's own provider, with what it exports."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter
    provider.shutdown()


def test_under_the_server_span_of_fastapi(
    ask: Any, exported: tuple[TracerProvider, InMemorySpanExporter]
) -> None:
    """The request is the child of the server span, in one trace, and there is no span per chunk."""
    provider, exporter = exported
    app = service()
    FastAPIInstrumentor.instrument_app(
        app, tracer_provider=provider, exclude_spans=["send", "receive"]
    )
    try:
        ask(app, "/chat", "POST", json={"stream": True}, headers={"traceparent": CALLER})
    finally:
        FastAPIInstrumentor.uninstrument_app(app)
    (server,) = exporter.get_finished_spans()
    request = recorded().one("request")
    assert request.otel
    assert server.context.trace_id == int(CALLER[3:35], 16)
    assert request.otel.parent_span_id == f"{server.context.span_id:016x}"
    assert request.id[16:] == CALLER[19:35]
    assert request.otel.kind != "server"
    assert request.otel.trace_id == CALLER[3:19]
    session = next(row for row in recorded().open if row.name == "cirron.session")
    assert request.parent_id == session.id


@pytest.mark.parametrize("joined", [False, True])
def test_the_session_takes_no_server_span_for_its_child(
    run_program: RunProgram, *, joined: bool
) -> None:
    """Also where profile() comes before the instrumentation, callers keep their traces."""
    run = run_program(
        f"""
        import asyncio, httpx
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        if {joined}:
            trace.set_tracer_provider(TracerProvider())
        import cirron_otel as ci
        ci.profile(frameworks=[])
        from fastapi import FastAPI
        from opentelemetry.instrumentation.fastapi import FastAPIInstrumentor
        app = FastAPI()
        app.add_middleware(ci.CirronMiddleware)
        @app.get("/")
        def root():
            with ci.scope("work"):
                return trace.get_current_span().get_span_context().trace_id.__format__("032x")
        FastAPIInstrumentor.instrument_app(app, exclude_spans=["send", "receive"])
        async def main():
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
                answer = await client.get("/", headers={{"traceparent": "{CALLER}"}})
                print(answer.json())
        with ci.scope("before"):
            pass
        asyncio.run(main())
        """
    )
    assert run.stdout.strip() == CALLER[3:35]
    assert tree_text(run) == "cirron.session\n  before\n  request\n    work"
    session, before, request = (run.one(n) for n in ("cirron.session", "before", "request"))
    assert before.id[16:] == session.id[16:]
    assert request.id[16:] == CALLER[19:35]


def test_under_the_server_span_of_flask(
    exported: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    """With Flask's instrumentation the request is the child of its span."""
    provider, exporter = exported
    app = flask.Flask("x")

    @app.get("/<name>")
    def hello(name: str) -> str:
        with ci.request(), ci.scope("work"):
            return name

    ci.profile(frameworks=[])
    FlaskInstrumentor().instrument_app(app, tracer_provider=provider)
    try:
        assert app.test_client().get("/bob").text == "bob"
    finally:
        FlaskInstrumentor().uninstrument_app(app)
    (server,) = exporter.get_finished_spans()
    request = recorded().one("request")
    assert request.otel
    assert request.otel.parent_span_id == f"{server.context.span_id:016x}"


# --- WSGI -----------------------------------------------------------------------------------------


def flask_service(**options: Any) -> Any:
    """A Flask application behind the middleware."""
    app = flask.Flask("x")
    app.wsgi_app = ci.CirronWsgiMiddleware(app.wsgi_app, **options)  # type: ignore[method-assign]

    @app.get("/hello/<name>")
    def hello(name: str) -> dict[str, str]:
        with ci.scope("work"):
            return {"hello": name}

    @app.post("/echo")
    def echo() -> str:
        return flask.request.get_data(as_text=True)

    @app.get("/broken")
    def broken() -> str:
        raise RuntimeError("no")

    @app.get("/stream")
    def stream() -> flask.Response:
        def parts() -> Iterator[str]:
            for one in SSE:
                ci.mark("part", 1)
                yield f"data: {json.dumps(one)}\n\n"

        return flask.Response(parts(), content_type="text/event-stream")

    return app


def test_a_flask_request_is_a_scope() -> None:
    """The caller's trace, the route's work and the status are there as for ASGI."""
    ci.profile(frameworks=[])
    client = flask_service(tenant="x-tenant").test_client()
    headers = {"traceparent": CALLER, "x-tenant": "acme"}
    assert client.get("/hello/bob", headers=headers).json == {"hello": "bob"}
    rows = recorded()
    request = rows.one("request")
    assert tree_text(rows) == "cirron.session (open)\n  request\n    work"
    assert request.id[16:] == CALLER[19:35]
    assert request.attrs["http.response.status_code"] == 200
    assert request.attrs["cirron.tenant"] == "acme"
    assert "Error" in client.get("/broken").text
    assert status_of(recorded().named("request")[1]) == ("error", "500")


def test_a_flask_stream_is_the_requests() -> None:
    """Parts are made inside the request, and it ends with the last of them."""
    ci.profile(frameworks=[])
    client = flask_service().test_client()
    assert client.get("/stream").text.startswith("data:")
    rows = recorded()
    request = rows.one("request")
    assert request.attrs["gen_ai.usage.output_tokens"] == 2
    assert [mark.name for mark in rows.marks_of(request)].count("part") == 2
    answer = client.get("/stream", buffered=False)
    next(answer.iter_encoded())
    answer.close()
    assert status_of(recorded().named("request")[1]) == ("error", "client_disconnected")


def test_the_text_of_a_wsgi_request_is_recorded_when_asked() -> None:
    """What the application read of it, and its answer, through the hook."""
    ci.profile(frameworks=[])
    client = flask_service(
        record_content=True, redact=lambda _kind, text: text.upper()
    ).test_client()
    assert client.post("/echo", data="hello").text == "hello"
    request = recorded().one("request")
    assert request.attrs["cirron.request.content"] == "HELLO"
    assert request.attrs["cirron.response.content"] == "HELLO"


def _run_wsgi(app: Any, method: str = "GET") -> Any:
    environ = {
        "REQUEST_METHOD": method, "SCRIPT_NAME": "", "PATH_INFO": "/", "QUERY_STRING": "",
        "SERVER_NAME": "here", "SERVER_PORT": "80", "SERVER_PROTOCOL": "HTTP/1.1",
        "wsgi.version": (1, 0), "wsgi.url_scheme": "http", "wsgi.input": io.BytesIO(),
        "wsgi.errors": io.StringIO(), "wsgi.multithread": True, "wsgi.multiprocess": False,
        "wsgi.run_once": False,
    }  # fmt: skip
    return app(environ, lambda *_args, **_kw: lambda _data: None)


def test_wsgi_answers_stay_what_they_are() -> None:
    """A list is the same list, a file is still a file for the server that sends it by itself."""
    ci.profile(frameworks=[])
    whole = [b"x"]

    def plain(_environ: Any, start: Any) -> list[bytes]:
        start("200 OK", [("content-type", "text/plain")])
        return whole

    def file(_environ: Any, start: Any) -> FileWrapper:
        start("200 OK", [("content-type", "text/plain")])
        return FileWrapper(io.BytesIO(b"abc"))

    assert _run_wsgi(ci.CirronWsgiMiddleware(plain)) is whole
    answer = _run_wsgi(ci.CirronWsgiMiddleware(file))
    assert isinstance(answer, FileWrapper)
    assert answer.filelike.read() == b"abc"
    answer.close()
    assert [status_of(row) for row in recorded().named("request")] == [(None, None)] * 2


def test_wsgi_rules_are_kept() -> None:
    """The standard library's validator has nothing to say against it, on either side."""
    ci.profile(frameworks=[])

    def parts(_environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [("content-type", "text/plain")])
        return iter([b"a", b"b"])

    app = validator(ci.CirronWsgiMiddleware(validator(parts)))
    answer = _run_wsgi(app)
    assert list(answer) == [b"a", b"b"]
    answer.close()
    assert status_of(recorded().one("request")) == (None, None)


def test_a_wsgi_answer_that_nobody_takes_ends_too() -> None:
    """A server that drops an answer leaves a request that says so."""
    ci.profile(frameworks=[])

    def parts(_environ: Any, start: Any) -> Iterator[bytes]:
        start("200 OK", [])
        return iter([b"a", b"b"])

    _run_wsgi(ci.CirronWsgiMiddleware(parts))
    assert status_of(recorded().one("request")) == ("error", "abandoned")
