"""The words of OpenTelemetry's convention for generative AI: attributes, names, kinds, metrics."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import anthropic.types
import openai.types.chat
import pytest
from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import cirron_otel as ci
from cirron_otel.batch import SpanOtel
from cirron_otel.destinations.base import Accepted, Parcel
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_signals import otlp_receivers
from delivery.otlp_server import OtlpServer, attributes, http_receiver
from helpers import Rows, RunProgram, read_spool
from spool_by_hand import Writer, mark, span

CHAT = {"gen_ai.operation.name": "chat", "gen_ai.provider.name": "openai"}


def recorded() -> Rows:
    """What was recorded, once it is all written."""
    ci.flush()
    return read_spool()


def completion(**usage: int) -> Any:
    """A real chat completion of openai's."""
    return openai.types.chat.ChatCompletion.model_validate({
        "id": "c1", "object": "chat.completion", "created": 1, "model": "m-2026",
        "choices": [{"index": 0, "finish_reason": "stop", "logprobs": None,
                     "message": {"role": "assistant", "content": "a secret"}}],
        "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0, **usage},
    })  # fmt: skip


def deliver(root: Path, server: OtlpServer) -> None:
    """Send what is in a spool to a test's receiver."""
    (target,) = otlp_receivers([{"endpoint": server.url, "timeout": 5}], environ={})
    destination = OtlpDestination(target, pending=False)
    for file in sorted(root.glob("spool/*.json")):
        assert destination.send(Parcel.read(file)) == Accepted()
    destination.close()


# --- attributes -----------------------------------------------------------------------------------


def test_operation_and_provider_are_always_there() -> None:
    """A request of which nothing is known says that; what the service says counts more."""
    ci.profile(frameworks=[])
    with ci.request():
        pass
    with ci.request(operation="rank", provider="us", model="m"):
        pass
    plain, said = (row.attrs for row in recorded().named("request"))
    assert (plain["gen_ai.operation.name"], plain["gen_ai.provider.name"]) == (
        "inference", "unknown",
    )  # fmt: skip
    assert "gen_ai.request.model" not in plain
    assert (said["gen_ai.operation.name"], said["gen_ai.provider.name"]) == ("rank", "us")
    assert said["gen_ai.request.model"] == "m"


def test_a_result_says_what_the_service_did_not() -> None:
    """Absent usage stays absent, the service's own words stay, and no text is recorded."""
    ci.profile(frameworks=[])

    @ci.inference(provider="mine", model="asked")
    def answer(result: Any) -> Any:
        return result

    assert answer(completion(prompt_tokens=3, completion_tokens=4, total_tokens=7)).id == "c1"
    answer({"object": "chat.completion", "choices": [], "usage": None})
    full, bare = (row.attrs for row in recorded().named("request"))
    said = {
        "gen_ai.operation.name": "chat", "gen_ai.provider.name": "mine",
        "gen_ai.request.model": "asked", "gen_ai.response.model": "m-2026",
        "gen_ai.response.id": "c1", "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4,
    }  # fmt: skip
    assert {key: full.get(key) for key in said} == said
    assert not [key for key in bare if key.startswith("gen_ai.usage")]
    assert "secret" not in str(full)


def test_a_stream_of_a_provider_passed_on() -> None:
    """Events of Anthropic's that an endpoint yields as they come say their tokens."""
    ci.profile(frameworks=[])
    start = anthropic.types.RawMessageStartEvent.model_validate({
        "type": "message_start",
        "message": {"id": "msg", "type": "message", "role": "assistant", "model": "claude-x",
                    "content": [], "stop_reason": None, "stop_sequence": None,
                    "usage": {"input_tokens": 9, "output_tokens": 1}},
    })  # fmt: skip
    delta = anthropic.types.RawMessageDeltaEvent.model_validate({
        "type": "message_delta", "delta": {"stop_reason": "end_turn", "stop_sequence": None},
        "usage": {"output_tokens": 6},
    })  # fmt: skip

    @ci.inference
    async def answer() -> AsyncIterator[Any]:
        yield start
        yield delta

    async def run() -> None:
        async for _ in answer():
            pass

    asyncio.run(run())
    attrs = recorded().one("request").attrs
    assert (attrs["gen_ai.usage.input_tokens"], attrs["gen_ai.usage.output_tokens"]) == (9, 6)
    assert (attrs["gen_ai.provider.name"], attrs["gen_ai.request.stream"]) == ("anthropic", True)
    assert 0 < attrs["gen_ai.response.time_to_first_chunk"] < 60


def test_streams_without_usage_take_the_users_counter() -> None:
    """What a counter says is an estimate; without one there is no count."""
    ci.profile(frameworks=[])

    def words() -> Iterator[str]:
        yield "one two"
        yield "three"

    counted = ci.inference(words, token_counter=lambda part: len(part.split()))
    plain = ci.inference(words)
    assert list(counted()) == list(plain()) == ["one two", "three"]
    first, second = (row.attrs for row in recorded().named("request"))
    assert first["gen_ai.usage.output_tokens"] == 3
    assert first["cirron.usage.estimated"] is True
    assert "gen_ai.usage.output_tokens" not in second
    assert "cirron.usage.estimated" not in second


# --- names and kinds ------------------------------------------------------------------------------


def test_the_span_is_named_by_operation_and_model(tmp_path: Path) -> None:
    """The spool has ``request``; a receiver sees ``chat m``, of the kind SERVER."""
    ci.profile(frameworks=[])
    with ci.request(operation="chat", model="m"), ci.scope("inner"):
        pass
    ci.shutdown()
    assert read_spool().one("request").name == "request"
    with http_receiver() as server:
        deliver(tmp_path / ".cirron", server)
        spans = {one.name: one for one in server.spans.values()}
    assert set(spans) == {"cirron.session", "chat m", "inner"}
    assert spans["chat m"].kind == 2
    assert spans["inner"].kind == 1
    assert attributes(spans["chat m"].attributes)["gen_ai.provider.name"] == "unknown"


def test_an_application_that_exports_itself_sees_the_same_name(run_program: RunProgram) -> None:
    """With the application's own provider the span has the convention's name and kind, too."""
    run = run_program(
        """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import SimpleSpanProcessor
        from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
        exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(exporter))
        trace.set_tracer_provider(provider)
        import cirron_otel as ci

        ci.profile(frameworks=[])
        with ci.request(operation="rank", model="m"):
            pass
        with ci.request() as request:
            request.result({"object": "chat.completion", "choices": [], "model": "x"})
        for span in exporter.get_finished_spans():
            print(span.name, span.kind.name, span.attributes["gen_ai.operation.name"], sep="|")
        ci.shutdown()
        """
    )
    assert run.stdout.splitlines() == ["rank m|SERVER|rank", "chat|SERVER|chat"]
    assert [row.name for row in run.named("request")] == ["request", "request"]


def test_processors_on_our_own_provider_see_the_same_name() -> None:
    """A stock processor gets the span under the convention's name."""
    exporter = InMemorySpanExporter()
    profiler = ci.profile(frameworks=[])
    provider: Any = profiler.tracer_provider
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    with ci.request(operation="rank", model="m"):
        pass
    assert [one.name for one in exporter.get_finished_spans()] == ["rank m"]
    assert recorded().one("request").name == "request"


# --- batches and headers --------------------------------------------------------------------------


def test_one_computation_for_several_requests_is_linked_to_each() -> None:
    """A batch has links to its requests, and each of them one back; nobody is its parent."""
    ci.profile(frameworks=[])
    far = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    first, second = ci.request(), ci.request()
    for one in (first, second):
        one.open(attach=False)  # type: ignore[union-attr]
    with ci.request_batch([first.state, second, far, "nobody"], model="m"):  # type: ignore[union-attr]
        ci.mark("size", 4)
    first.finish()
    second.finish()
    rows = recorded()
    batch, (one, two) = rows.one("batch"), rows.named("request")
    assert batch.otel
    assert batch.otel.links
    linked = [(link["trace_id"][16:], link["span_id"]) for link in batch.otel.links]
    assert linked == [
        (one.id[16:], one.id[:16]), (two.id[16:], two.id[:16]),
        (far["traceparent"][19:35], far["traceparent"][36:52]),
    ]  # fmt: skip
    assert batch.attrs["dl.batch_size"] == 4
    assert [m.name for m in rows.marks_of(batch)] == ["size"]
    for row in (one, two):
        assert row.otel
        assert batch.id[:16] in [link["span_id"] for link in row.otel.links or ()]


def test_a_batch_is_a_plain_scope_otherwise() -> None:
    """Async too, with an error recorded as any scope does; and nothing without a recording."""
    ci.profile(frameworks=[])

    async def run() -> None:
        async with ci.request_batch([]) as batch:
            assert batch.id is not None
            raise KeyError("gone")

    with pytest.raises(KeyError):
        asyncio.run(run())
    assert recorded().one("batch").attrs["error"] == "KeyError: 'gone'"
    ci.shutdown()
    with ci.request_batch([None, 1]) as idle:
        assert idle.id is None


def test_headers_for_whoever_is_asked_next() -> None:
    """They carry the innermost span; outside of a recording there are none."""
    assert ci.trace_headers() == {}
    ci.profile(frameworks=[])
    with ci.request() as request, ci.scope("call"):
        span = otel_trace.get_current_span().get_span_context()
        headers = ci.trace_headers()
    assert headers["traceparent"] == f"00-{span.trace_id:032x}-{span.span_id:016x}-01"
    assert request.id[16:] == f"{span.trace_id:032x}"[16:]


# --- metrics --------------------------------------------------------------------------------------


def requests() -> list[Any]:
    """Rows of three requests that ended well, badly and without a stream."""
    streamed = {
        **CHAT, "gen_ai.request.model": "m", "gen_ai.response.model": "m-1",
        "gen_ai.usage.output_tokens": 11, "gen_ai.response.time_to_first_chunk": 0.2,
    }  # fmt: skip
    return [
        span("a/1", "request", "s/0", 0, 1200, attrs=streamed, otel=SpanOtel("1" * 16)),
        span("b/1", "request", "s/0", 0, 300, otel=SpanOtel(status="error"),
             attrs={**streamed, "error.type": "client_disconnected", "error": "x"}),
        span("c/1", "request", "s/0", 0, 30, attrs={**CHAT, "gen_ai.usage.output_tokens": 1}),
        span("d/1", "request", "s/0", 0, 30),  # somebody's own scope of that name
    ]  # fmt: skip


def test_requests_become_the_conventions_metrics(tmp_path: Path) -> None:
    """Seconds, the convention's boundaries and attributes; failures only in the duration."""
    rows = requests()
    marks = [mark("a/1", "output_tokens", 11, 1200, kind="summary"), mark("a/1", "mine", 5, 10)]
    Writer(tmp_path, session="session", writer="host-1-1").batch(2000, rows, marks)
    with http_receiver() as server:
        deliver(tmp_path, server)
        durations = server.points("gen_ai.server.request.duration")
        first = server.points("gen_ai.server.time_to_first_token")
        each = server.points("gen_ai.server.time_per_output_token")
        names = [attrs["name"] for attrs, _ in server.points("cirron.mark")]
    model = {"gen_ai.request.model": "m", "gen_ai.response.model": "m-1"}
    assert [attrs for attrs, _ in durations] == [
        {**CHAT, **model}, {**CHAT, **model, "error.type": "client_disconnected"}, CHAT,
    ]  # fmt: skip
    assert [point.sum for _, point in durations] == pytest.approx([1.2, 0.3, 0.03])
    assert tuple(durations[0][1].explicit_bounds) == (
        0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
    )  # fmt: skip
    assert list(durations[0][1].bucket_counts).index(1) == 7
    assert len(durations[0][1].exemplars) == 1
    ((attrs, point),) = first
    assert (attrs, point.count, point.sum) == ({**CHAT, **model}, 1, pytest.approx(0.2))
    assert tuple(point.explicit_bounds) == (
        0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    )  # fmt: skip
    assert [one.as_double for one in point.exemplars] == pytest.approx([0.2])
    ((attrs, point),) = each
    assert (point.count, point.sum) == (1, pytest.approx(0.1))
    assert tuple(point.explicit_bounds) == (
        0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
    )  # fmt: skip
    assert names == ["mine"]


def test_metrics_are_of_every_request_whatever_is_sampled(
    run_program: RunProgram, tmp_path: Path
) -> None:
    """A sampler that keeps nothing leaves the metrics whole, those of failed requests included."""
    run_program(
        """
        import cirron_otel as ci
        ci.profile(frameworks=[])
        for i in range(5):
            try:
                with ci.request(operation="chat"):
                    if i == 4:
                        raise TimeoutError("late")
            except TimeoutError:
                pass
        ci.shutdown()
        """,
        env={"OTEL_TRACES_SAMPLER": "always_off"},
    )
    with http_receiver() as server:
        deliver(tmp_path / ".cirron", server)
        assert not server.spans
        found = {a.get("error.type"): p.count for a, p in server.points(
            "gen_ai.server.request.duration")}  # fmt: skip
    assert found == {None: 4, "TimeoutError": 1}


def test_a_request_of_another_name_is_a_request(run_program: RunProgram, tmp_path: Path) -> None:
    """Its metrics are a request's; its span keeps the name it was given, in OTLP as in process."""
    run = run_program(
        """
        import cirron_otel as ci
        from opentelemetry.sdk.trace import SpanProcessor
        class Names(SpanProcessor):
            def on_end(self, span):
                print(span.name)
        recording = ci.profile(frameworks=[])
        recording.tracer_provider.add_span_processor(Names())
        with ci.request("rank", operation="chat"):
            pass
        ci.inference(name="embed", operation="embeddings")(lambda: 1)()
        ci.shutdown()
        """
    )
    assert run.stdout.split() == ["rank", "embed", "cirron.session"]
    with http_receiver() as server:
        deliver(tmp_path / ".cirron", server)
        found = [attrs["gen_ai.operation.name"] for attrs, _ in server.points(
            "gen_ai.server.request.duration")]  # fmt: skip
        assert {"rank", "embed"} <= {one.name for one in server.spans.values()}
    assert sorted(found) == ["chat", "embeddings"]


def test_models_named_by_strangers_make_no_end_of_series(tmp_path: Path) -> None:
    """A model's name that comes from outside is cut and counted into one series past the cap."""
    rows = [
        span(f"r{i}/1", "request", None, 0, 5,
             attrs={**CHAT, "gen_ai.request.model": f"{i}\x1f" + "x" * 1000})
        for i in range(2100)
    ]  # fmt: skip
    Writer(tmp_path, session="session", writer="host-1-1").batch(10, rows)
    with http_receiver() as server:
        deliver(tmp_path, server)
        points = server.points("gen_ai.server.request.duration")
    assert len(points) == 2001
    assert sum(point.count for _, point in points) == 2100
    assert max(len(str(a.get("gen_ai.request.model", ""))) for a, _ in points) <= 256


def test_the_applications_provider_is_not_asked_for_metrics() -> None:
    """Metrics come from the spool: a provider of the application's is left as it was."""
    before = otel_trace.get_tracer_provider()
    ci.profile(frameworks=[])
    with ci.request():
        pass
    assert otel_trace.get_tracer_provider() is before
    assert not isinstance(before, TracerProvider)
