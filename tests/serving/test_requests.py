"""A ``request`` is a scope of its own, in the trace its caller began."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_ON, ParentBased
from opentelemetry.trace import SpanContext, SpanKind, StatusCode, TraceFlags
from opentelemetry.util._once import Once

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch import SpanRecord
from cirron_otel.otlp.gathering import Gatherer
from cirron_otel.otlp.rows import OtlpSpan
from cirron_otel.serving.requests import current_request, open_request
from helpers import Rows, read_spool, tree_text

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"


def recorded() -> Rows:
    """What was recorded, all of it."""
    assert ci.shutdown()
    return read_spool()


def exported(rows: Rows) -> list[OtlpSpan]:
    """What an OTLP destination is sent of it."""
    gatherer = Gatherer()
    return [span for batch in rows.batches for span in gatherer.spans(batch)]


def trace_of(row: SpanRecord) -> str:
    """The whole trace id of a row."""
    assert row.otel
    return f"{row.otel.trace_id}{row.id[16:]}"


@pytest.fixture
def joined() -> Iterator[tuple[TracerProvider, InMemorySpanExporter]]:
    """An application with a tracer provider of its own, parent-based as most are."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=ParentBased(ALWAYS_ON))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    yield provider, exporter
    ci.shutdown()
    provider.shutdown()
    trace._TRACER_PROVIDER_SET_ONCE = Once()
    trace._TRACER_PROVIDER = None


def test_a_request_stands_under_the_session_in_a_trace_of_its_own() -> None:
    """Two requests without a caller: two traces, each linked to the session, children inside."""
    ci.profile(frameworks=[])
    for _ in range(2):
        with ci.request(), ci.scope("tokenize"):
            pass
    rows = recorded()
    assert tree_text(rows) == ("cirron.session\n  request\n    tokenize\n  request\n    tokenize")
    session = rows.one("cirron.session")
    first, second = rows.named("request")
    assert len({trace_of(row) for row in (session, first, second)}) == 3
    for row in (first, second):
        assert row.parent_id == session.id
        assert row.otel
        assert row.otel.kind == "server"
        assert row.otel.links == [
            {"trace_id": trace_of(session), "span_id": session.id[:16], "attrs": {}}
        ]
        (child,) = rows.children(row)
        assert trace_of(child) == trace_of(row)
        assert len(row.attrs["request_id"]) == 32
    sent = {span.span_id: span for span in exported(rows)}
    assert sent[first.id[:16]].parent_id == ""
    assert sent[first.id[:16]].attrs["cirron.parent.id"] == session.id
    assert sent[rows.children(first)[0].id[:16]].parent_id == first.id[:16]


def test_it_is_a_span_while_it_runs() -> None:
    """Kind, links, parent and ids of an open request are what its row says."""
    ci.profile(frameworks=[])
    with ci.request() as request:
        assert isinstance(request, trace.Span)
        assert request.kind is SpanKind.SERVER  # type: ignore[union-attr]
        (link,) = request.links  # type: ignore[union-attr]
        assert request.parent is None  # type: ignore[union-attr]
        request.add_link(SpanContext(5, 6, is_remote=True, trace_flags=TraceFlags(1)))
        made = request.get_span_context()
    row = recorded().one("request")
    assert trace_of(row) == f"{made.trace_id:032x}"
    assert row.otel
    assert row.otel.links
    assert row.otel.kind == "server"
    assert [found["span_id"] for found in row.otel.links] == [
        f"{link.context.span_id:016x}", f"{6:016x}"
    ]  # fmt: skip


@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": CALLER, "x-request-id": "me"},
        {"Traceparent": CALLER, "X-Request-ID": " me "},
        [(b"traceparent", CALLER.encode()), (b"x-request-id", b"me")],
    ],
)
def test_it_joins_the_trace_of_its_caller(headers: object) -> None:
    """The headers' ``traceparent`` is the OTel parent, ``x-request-id`` the id; kind SERVER."""
    ci.profile(frameworks=[])
    with ci.request(headers=headers), ci.scope("inside"):  # type: ignore[arg-type]
        pass
    rows = recorded()
    row = rows.one("request")
    assert row.otel
    assert trace_of(row) == trace_of(rows.one("inside")) == TRACE
    assert row.otel.parent_span_id == SPAN
    assert row.otel.kind == "server"
    assert row.parent_id == rows.one("cirron.session").id
    assert row.attrs["request_id"] == "me"
    (sent,) = [span for span in exported(rows) if span.attrs.get("request_id")]
    assert (sent.trace_id, sent.parent_id, sent.kind) == (TRACE, SPAN, 2)


def test_an_unsampled_caller_is_recorded_here_and_not_exported() -> None:
    """The spool has request and child; an OTLP destination gets neither."""
    ci.profile(frameworks=[])
    with ci.request(headers={"traceparent": UNSAMPLED}), ci.scope("inside"):
        pass
    rows = recorded()
    assert trace_of(rows.one("request")) == TRACE
    assert [row.otel and row.otel.sampled for row in rows.named("request")] == [False]
    assert {span.name for span in exported(rows)} == {"cirron.session"}


def test_headers_that_say_nothing_begin_a_trace() -> None:
    """A broken ``traceparent``, or headers that cannot be read, cost the request nothing."""
    ci.profile(frameworks=[])
    with ci.request(headers={"traceparent": "nonsense"}):
        pass
    with ci.request(headers=[1, 2]):  # type: ignore[list-item]
        pass
    rows = recorded()
    assert [row.otel and row.otel.kind for row in rows.named("request")] == ["server"] * 2
    assert len({trace_of(row) for row in rows.spans}) == 3


def test_an_active_server_span_is_the_parent(
    joined: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    """Under a server span of the application's provider: its child, kind INTERNAL, our tree."""
    provider, exporter = joined
    ci.profile(frameworks=[])
    tracer = provider.get_tracer("server")
    with (
        tracer.start_as_current_span("GET /x", trace.set_span_in_context(trace.INVALID_SPAN),
                                     SpanKind.SERVER) as server,
        ci.request(headers={"traceparent": CALLER}),
    ):  # fmt: skip
        pass
    with ci.request(headers={"traceparent": CALLER}, model="m", operation="chat"):
        pass
    with ci.request(), ci.scope("part"):
        pass
    rows = recorded()
    within, called, alone = rows.named("request")
    assert within.otel
    assert trace_of(within) == f"{server.get_span_context().trace_id:032x}"
    assert within.otel.parent_span_id == f"{server.get_span_context().span_id:016x}"
    assert within.otel.kind in (None, "internal") or not within.otel.kind
    assert trace_of(called) == TRACE
    assert {row.parent_id for row in (within, called, alone)} == {rows.one("cirron.session").id}
    assert trace_of(rows.one("part")) == trace_of(alone)
    assert len({trace_of(row) for row in (within, called, alone, rows.one("cirron.session"))}) == 4
    spans: dict[str, ReadableSpan] = {
        f"{span.context.span_id:016x}": span
        for span in exporter.get_finished_spans()
        if span.context
    }
    assert spans[within.id[:16]].kind is SpanKind.INTERNAL
    chat = spans[called.id[:16]]
    assert (chat.name, chat.kind) == ("chat m", SpanKind.SERVER)
    assert chat.parent
    assert f"{chat.parent.span_id:016x}" == SPAN
    first = spans[alone.id[:16]]
    assert (first.parent, len(first.links)) == (None, 1)


def test_an_unsampled_caller_of_a_joined_application(
    joined: tuple[TracerProvider, InMemorySpanExporter],
) -> None:
    """The application's sampler drops the span; the spool has it."""
    _, exporter = joined
    ci.profile(frameworks=[])
    with ci.request(headers={"traceparent": UNSAMPLED}):
        pass
    rows = recorded()
    assert trace_of(rows.one("request")) == TRACE
    assert [span.name for span in exporter.get_finished_spans()] == ["cirron.session"]


def test_a_scope_around_the_service_is_nobodys_caller() -> None:
    """Inside a scope of ours the caller's trace still counts; without one, the scope's trace."""
    ci.profile(frameworks=[])
    with ci.scope("serve"):
        with ci.request(headers={"traceparent": CALLER}):
            pass
        with ci.request(), ci.request(headers={"traceparent": CALLER}):
            pass
    rows = recorded()
    assert tree_text(rows) == ("cirron.session\n  serve\n    request\n    request\n      request")
    serve = trace_of(rows.one("serve"))
    assert [trace_of(row) for row in rows.named("request")] == [TRACE, serve, serve]


def test_threads_tasks_and_pools_keep_requests_apart() -> None:
    """What is marked inside a request is its own, whoever else runs at the same time (C-W16)."""
    ci.profile(frameworks=[])
    barrier = threading.Barrier(4)

    def in_thread(number: int) -> None:
        with ci.request(request_id=f"t{number}"):
            barrier.wait(10)
            ci.mark("who", number)
            barrier.wait(10)

    async def in_task(number: int) -> None:
        async with ci.request(request_id=f"a{number}"):
            await asyncio.sleep(0.001)
            await asyncio.to_thread(ci.mark, "who", number)

    async def tasks() -> None:
        await asyncio.gather(*map(in_task, range(4, 12)))

    threads = [threading.Thread(target=in_thread, args=(n,)) for n in range(2)]
    for one in threads:
        one.start()
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(in_thread, (2, 3)))
    for one in threads:
        one.join()
    asyncio.run(tasks())
    rows = recorded()
    said = {row.attrs["request_id"]: [m.value for m in rows.marks_of(row) if m.name == "who"]
            for row in rows.named("request")}  # fmt: skip
    assert said == {
        **{f"t{n}": [n] for n in range(4)},
        **{f"a{n}": [n] for n in range(4, 12)},
    }
    assert {row.parent_id for row in rows.named("request")} == {rows.one("cirron.session").id}
    assert not rows.open


@pytest.mark.parametrize("leave", [KeyError("x"), asyncio.CancelledError(), TimeoutError()])
def test_an_exception_is_recorded_and_flies_on(leave: BaseException) -> None:
    """Errors, timeouts and cancellations: status and ``error.type``; the same object arrives."""
    ci.profile(frameworks=[])
    with pytest.raises(type(leave)) as caught, ci.request():
        raise leave
    assert caught.value is leave
    rows = recorded()
    (sent,) = [span for span in exported(rows) if span.attrs.get("request_id")]
    kind = type(leave)
    module = "" if kind.__module__ == "builtins" else f"{kind.__module__}."
    assert (sent.status, sent.attrs["error.type"]) == (2, module + kind.__qualname__)


def test_a_failure_without_an_exception() -> None:
    """``fail()`` leaves status, ``error.type`` and text; a second end changes nothing."""
    ci.profile(frameworks=[])
    request = open_request(request_id="r", attach=False)
    assert request is not None
    with request.running():
        ci.mark("inside", 1)
    ci.mark("outside", 1)
    request.finish(error_type="client_disconnected", message="gone")
    request.finish(ValueError("late"))
    request.fail("later")
    rows = recorded()
    row = rows.one("request")
    assert row.otel
    assert (row.otel.status, row.otel.status_message) == (
        "error", "client_disconnected: gone"
    )  # fmt: skip
    assert row.attrs[semconv.ERROR_TYPE] == "client_disconnected"
    assert not row.otel.events
    assert [mark.name for mark in rows.marks_of(row)] == ["inside"]


def test_marks_of_a_request_are_marks_like_any_other() -> None:
    """Names are cut and clean, kinds are said, attributes may have any name; nothing raises."""
    ci.profile(frameworks=[])
    with ci.request() as request:
        request.mark("kind", 1, kind="summary")
        request.mark("lone \ud800", 2)
        request.mark(5, 3)  # type: ignore[arg-type]
        request.mark("long" * 1000, 4)
        request.mark("attributes", 5, name="n", value=6)
    marks = recorded().marks
    assert [(mark.name[:12], mark.value, mark.kind) for mark in marks] == [
        ("kind", 1, "summary"),
        ("lone \N{REPLACEMENT CHARACTER}", 2, "point"),
        ("5", 3, "point"),
        ("longlonglong", 4, "point"),
        ("attributes", 5, "point"),
    ]
    assert len(marks[3].name) == 1024
    assert marks[4].attrs == {"name": "n", "value": 6}


def test_facts_chunks_and_marks_by_hand() -> None:
    """Whoever streams by hand says so; usage is read from what is handed over."""
    ci.profile(frameworks=[])
    with ci.request() as request:
        state = current_request()
        for text in ("a", "b", "c"):
            request.chunk(text)
        request.result({"usage": {"prompt_tokens": 4, "completion_tokens": 3}})
        request.mark("mine", 1.5, unit="x")
        request.mark("odd", object())
    assert state is not None
    assert (state.chunks, state.facts and state.facts.output_tokens) == (3, 3)
    assert ci.health()["losses"] == {"unsupported_mark_value": 1}
    rows = recorded()
    marks = {mark.name: mark.value for mark in rows.marks_of(rows.one("request"))}
    assert (marks["input_tokens"], marks["output_tokens"], marks["total_tokens"]) == (4, 3, 7)
    assert (marks["output_chunks"], marks["mine"]) == (3, 1.5)
    assert {"time_to_first_token_ms", "request_duration_ms", "inter_token_ms_max"} <= set(marks)


def test_an_open_request_is_ended_by_the_end_of_the_session() -> None:
    """At ``shutdown()`` it is closed, truncated, with what was known of it; once."""
    ci.profile(frameworks=[])
    request = open_request(attach=False)
    assert request is not None
    request.chunk("a")
    rows = recorded()
    request.finish()
    row = rows.one("request")
    assert row.attrs[semconv.TRUNCATED] is True
    assert "time_to_first_token_ms" in {mark.name for mark in rows.marks_of(row)}
    assert read_spool() == rows


def test_without_a_recording_it_has_its_id_and_does_nothing() -> None:
    """Every method is there; the request id is the caller's, or new."""
    with ci.request(headers={"x-request-id": "me"}) as request:
        request.chunk("a")
        request.result({})
        request.mark("a", 1)
        request.fail("x")
        with request.running():
            pass
        request.release()
        request.finish()
        assert request.request_id == "me"
        assert current_request() is None
    assert len(ci.request().request_id) == 32
    assert open_request() is None
    assert not read_spool().batches


def test_it_decorates_too() -> None:
    """``@ci.request("name")`` gives each call a request of its own."""

    @ci.request("rank", kind="x")
    def rank() -> int:
        return 3

    ci.profile(frameworks=[])
    assert (rank(), rank()) == (3, 3)
    rows = recorded()
    assert tree_text(rows, attrs=["kind"]) == ('cirron.session\n  rank kind="x"\n  rank kind="x"')
    assert len({row.attrs["request_id"] for row in rows.named("rank")}) == 2


def test_ids_of_deployment_and_model_stand_on_every_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What the settings know of the deployment is an attribute of the span, for filters."""
    monkeypatch.setenv("CIRRON_DEPLOYMENT_ID", "d-1")
    monkeypatch.setenv("CIRRON_MODEL_ID", "m-1")
    ci.profile(frameworks=[])
    with ci.request():
        pass
    attrs = recorded().one("request").attrs
    assert (attrs["cirron.deployment.id"], attrs["cirron.model.id"]) == ("d-1", "m-1")


def test_foreign_processors_see_the_request() -> None:
    """A processor on our own provider gets kind, links and trace of a request."""
    exporter = InMemorySpanExporter()
    profiler = ci.profile(frameworks=[])
    profiler.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))  # type: ignore[union-attr]
    with pytest.raises(ValueError, match="x"), ci.request():
        raise ValueError("x")
    rows = recorded()
    span = next(span for span in exporter.get_finished_spans() if span.name != "cirron.session")
    row = rows.one("request")
    assert span.context
    assert (span.kind, span.parent, len(span.links)) == (SpanKind.SERVER, None, 1)
    assert f"{span.context.trace_id:032x}" == trace_of(row)
    assert span.status.status_code is StatusCode.ERROR


def test_a_service_grows_no_trace() -> None:
    """Thousands of requests: the session's trace holds the session, and no window is opened."""
    ci.profile(frameworks=[], trace_max_spans=20)
    for _ in range(300):
        with ci.request():
            pass
    with ci.request():
        for _ in range(50):
            with ci.scope("part"):
                pass
    rows = recorded()
    sizes: dict[str, int] = {}
    for row in rows.spans:
        sizes[trace_of(row)] = sizes.get(trace_of(row), 0) + 1
    assert max(sizes.values()) <= 20
    assert sizes[trace_of(rows.one("cirron.session"))] == 1
    assert len(rows.named("request")) == 301
