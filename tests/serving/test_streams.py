"""A streamed answer: the request ends with its last chunk, however and wherever that comes."""

from __future__ import annotations

import asyncio
import collections.abc
import contextlib
import contextvars
import gc
import inspect
import logging
import math
import threading
import time
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context as otel_context
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import SpanKind
from opentelemetry.util._once import Once

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch import SpanRecord
from cirron_otel.serving.gaps import RELATIVE_ERROR, Gaps
from helpers import Rows, read_spool, tree_text


def recorded() -> Rows:
    """What was recorded, all of it."""
    assert ci.shutdown()
    return read_spool()


def marks_of(rows: Rows, row: SpanRecord) -> dict[str, Any]:
    """The last value of each mark."""
    return {mark.name: mark.value for mark in rows.marks_of(row)}


def ended(row: SpanRecord) -> tuple[object, object, object]:
    """How a stream ended: in words, as status, as error type."""
    assert row.otel
    error = row.attrs.get(semconv.ERROR_TYPE)
    if error is None and row.otel.events:
        error = row.otel.events[-1]["attrs"]["exception.type"]
    return row.attrs.get(semconv.STREAM_END), row.otel.status or None, error


@ci.inference
def tokens(count: int = 3) -> Iterator[str]:
    """A stream that marks and scopes inside its body."""
    try:
        for number in range(count):
            ci.mark("made", number)
            with ci.scope("decode", number):
                pass
            yield f"t{number}"
    finally:
        ci.mark("cleaned", 1)


@ci.inference
async def atokens(count: int = 3) -> AsyncIterator[str]:
    """The same, async."""
    try:
        for number in range(count):
            await asyncio.sleep(0)
            ci.mark("made", number)
            yield f"t{number}"
    finally:
        ci.mark("cleaned", 1)


def test_a_stream_read_to_its_end() -> None:
    """Chunks, times, rate and tokens are said; body marks and scopes are the request's."""
    ci.profile(frameworks=[])
    assert list(tokens()) == ["t0", "t1", "t2"]
    rows = recorded()
    assert tree_text(rows) == (
        "cirron.session\n  request\n    decode[0]\n    decode[1]\n    decode[2]"
    )
    row = rows.one("request")
    assert ended(row) == ("complete", None, None)
    found = marks_of(rows, row)
    assert (found["made"], found["cleaned"]) == (2, 1)
    assert (found["output_chunks"], found["output_tokens"]) == (3, 3)
    duration = found["request_duration_ms"]
    assert 0 < found["time_to_first_token_ms"] <= duration
    assert duration * 1e6 <= row.end_ns - row.start_ns
    assert found["tokens_per_second"] > 0
    assert 0 < found["inter_token_ms_p50"] <= found["inter_token_ms_p95"]
    assert found["inter_token_ms_p95"] <= found["inter_token_ms_max"]
    (estimate,) = [m for m in rows.marks_of(row) if m.name == "output_tokens"]
    assert estimate.attrs == {"estimated": True, "source": "chunks"}
    assert semconv.GEN_AI_OUTPUT_TOKENS not in row.attrs


def test_an_async_stream_read_to_its_end() -> None:
    """The same for an async generator, in a task."""
    ci.profile(frameworks=[])

    async def main() -> list[str]:
        return [item async for item in atokens()]

    assert asyncio.run(main()) == ["t0", "t1", "t2"]
    rows = recorded()
    row = rows.one("request")
    assert ended(row) == ("complete", None, None)
    assert marks_of(rows, row).items() >= {"made": 2, "cleaned": 1, "output_chunks": 3}.items()


def test_times_are_those_of_the_chunks() -> None:
    """First token, gaps and rate are what a slow generator takes."""

    @ci.inference
    def slow() -> Iterator[int]:
        time.sleep(0.05)
        for number in range(5):
            yield number
            time.sleep(0.01)

    ci.profile(frameworks=[])
    list(slow())
    rows = recorded()
    found = marks_of(rows, rows.one("request"))
    assert found["time_to_first_token_ms"] >= 50
    assert found["inter_token_ms_p50"] >= 10 * (1 - RELATIVE_ERROR)
    assert found["request_duration_ms"] >= 100
    assert found["tokens_per_second"] <= 100


def left_by(how: str) -> None:
    """Read two of three chunks and leave."""
    stream = tokens()
    next(stream), next(stream)
    if how == "close":
        stream.close()  # type: ignore[attr-defined]
        stream.close()  # type: ignore[attr-defined]
    elif how == "throw":
        with pytest.raises(KeyError):
            stream.throw(KeyError("x"))  # type: ignore[attr-defined]
    elif how == "drop":
        del stream
    elif how == "cycle":
        held: list[Any] = [stream]
        held.append(held)
        del held, stream
        gc.collect()


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("close", ("closed", "error", "GeneratorExit")),
        ("throw", ("error", "error", "KeyError")),
        ("drop", ("abandoned", "error", "abandoned")),
        ("cycle", ("abandoned", "error", "abandoned")),
    ],
)
def test_a_stream_that_is_left(how: str, expected: tuple[str, str, str]) -> None:
    """One span, with status, ``error.type`` and the tokens so far; its clean-up belongs to it."""
    ci.profile(frameworks=[])
    left_by(how)
    assert ci.health()["open_scopes"] == 1
    rows = recorded()
    row = rows.one("request")
    assert ended(row) == expected
    found = marks_of(rows, row)
    assert (found["output_chunks"], found["made"]) == (2, 1)
    # In a ring the collector may finish the generator before what follows it.
    assert found.get("cleaned") == (None if how == "cycle" else 1)


def test_an_async_stream_that_is_left() -> None:
    """Closed, cancelled while it waits, cancelled between chunks, dropped: each ends once."""
    started = asyncio.Event

    @ci.inference
    async def stuck(reached: asyncio.Event) -> AsyncIterator[int]:
        yield 1
        reached.set()
        await asyncio.sleep(60)
        yield 2

    async def consume(reached: asyncio.Event) -> None:
        async for _ in stuck(reached):
            pass

    async def main() -> None:
        first = atokens()
        await anext(first)
        await first.aclose()  # type: ignore[attr-defined]
        reached = started()
        task = asyncio.create_task(consume(reached))
        await reached.wait()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await consume(started())
        last = atokens()
        await anext(last)
        del last
        await asyncio.sleep(0)
        gc.collect()

    ci.profile(frameworks=[])
    asyncio.run(main())
    rows = recorded()
    cancelled = "asyncio.exceptions.CancelledError"
    assert [ended(row) for row in rows.named("request")] == [
        ("closed", "error", "GeneratorExit"),
        ("cancelled", "error", cancelled),
        ("cancelled", "error", cancelled),
        ("abandoned", "error", "abandoned"),
    ]
    assert {marks_of(rows, row)["output_chunks"] for row in rows.named("request")} == {1}


def test_a_stream_that_is_never_started() -> None:
    """It ends when nobody can start it any more, says so, and leaves nothing behind."""
    ci.profile(frameworks=[])
    for _ in range(100):
        tokens()

    async def never() -> None:
        atokens()
        closed = atokens()
        await closed.aclose()  # type: ignore[attr-defined]

    asyncio.run(never())
    assert ci.health()["open_scopes"] == 1
    rows = recorded()
    requests = rows.named("request")
    assert len(requests) == 102
    assert {ended(row) for row in requests} == {("not_started", None, None)}
    assert {marks_of(rows, row)["output_chunks"] for row in requests} == {0}
    assert not any("made" in marks_of(rows, row) for row in requests)


def test_an_exception_in_the_body() -> None:
    """It is recorded, with the chunks so far, and arrives as the same object."""
    error = ZeroDivisionError("x")

    @ci.inference
    def fails() -> Iterator[int]:
        yield 1
        raise error

    ci.profile(frameworks=[])
    stream = fails()
    assert next(stream) == 1
    with pytest.raises(ZeroDivisionError) as caught:
        next(stream)
    assert caught.value is error
    with pytest.raises(StopIteration):
        next(stream)
    rows = recorded()
    assert ended(rows.one("request")) == ("error", "error", "ZeroDivisionError")


def test_a_stream_read_in_other_threads() -> None:
    """Each chunk asked for by another thread (as web frameworks do): one request, all its own."""
    ci.profile(frameworks=[])
    stream = tokens(4)
    out: list[str] = []
    for _ in range(4):
        thread = threading.Thread(target=lambda: out.append(next(stream)))
        thread.start()
        thread.join()
    assert list(stream) == []
    rows = recorded()
    row = rows.one("request")
    assert out == ["t0", "t1", "t2", "t3"]
    assert ended(row) == ("complete", None, None)
    assert len(rows.children(row)) == 4
    assert not rows.open


def test_a_stream_read_in_other_tasks() -> None:
    """Each chunk awaited in a task with a context of its own: as above."""
    ci.profile(frameworks=[])

    async def main() -> int:
        stream, count = atokens(4), 0

        async def one() -> str:
            return await anext(stream)

        with contextlib.suppress(StopAsyncIteration):
            while True:
                await asyncio.create_task(one(), context=contextvars.Context())
                count += 1
        return count

    assert asyncio.run(main()) == 4
    rows = recorded()
    assert ended(rows.one("request")) == ("complete", None, None)
    assert marks_of(rows, rows.one("request"))["made"] == 3


def test_the_consumer_keeps_its_context(caplog: pytest.LogCaptureFixture) -> None:
    """Between two chunks the request is not current; a body's own spans stay in the body."""
    tracer = TracerProvider().get_tracer("x")
    seen = []

    @ci.inference
    def body() -> Iterator[int]:
        with tracer.start_as_current_span("across") as span:
            for number in range(3):
                seen.append(trace.get_current_span() is span)
                yield number

    ci.profile(frameworks=[])
    with ci.scope("consumer") as consumer, caplog.at_level(logging.ERROR):
        before = otel_context.get_current()
        for _ in body():
            assert otel_context.get_current() is before
            ci.mark("between", 1)
        stream = body()
        next(stream)
        thread = threading.Thread(target=stream.close)  # type: ignore[attr-defined]
        thread.start()
        thread.join()
        assert otel_context.get_current() is before
    assert seen == [True] * 4
    rows = recorded()
    assert rows.one("consumer").id == consumer.id
    assert len(rows.marks_of(rows.one("consumer"))) >= 3
    assert [ended(row)[0] for row in rows.named("request")] == ["complete", "closed"]


def test_send_throw_and_the_value_it_returns() -> None:
    """A generator's own protocol goes through: sent values, handled exceptions, return value."""

    @ci.inference
    def echo() -> Any:
        got = yield "ready"
        try:
            got = yield got
        except KeyError:
            got = yield "handled"
        return got

    def outer() -> Any:
        return (yield from echo())

    ci.profile(frameworks=[])
    stream = outer()
    assert next(stream) == "ready"
    assert stream.send(1) == 1
    assert stream.throw(KeyError()) == "handled"
    with pytest.raises(StopIteration) as stop:
        stream.send("last")
    assert stop.value.value == "last"
    rows = recorded()
    assert ended(rows.one("request")) == ("complete", None, None)


def test_asend_and_athrow() -> None:
    """The same for async generators."""

    @ci.inference
    async def echo() -> Any:
        got = yield "ready"
        try:
            got = yield got
        except KeyError:
            yield "handled"

    async def main() -> None:
        stream = echo()
        assert await anext(stream) == "ready"
        assert await stream.asend(1) == 1
        assert await stream.athrow(KeyError()) == "handled"
        with pytest.raises(StopAsyncIteration):
            await anext(stream)

    ci.profile(frameworks=[])
    asyncio.run(main())
    assert ended(recorded().one("request")) == ("complete", None, None)


def test_two_threads_at_once_do_not_end_it() -> None:
    """Python refuses the second; the request goes on."""
    inside, go = threading.Event(), threading.Event()

    @ci.inference
    def waits() -> Iterator[int]:
        inside.set()
        go.wait(10)
        yield 1

    ci.profile(frameworks=[])
    stream = waits()
    thread = threading.Thread(target=lambda: next(stream))
    thread.start()
    inside.wait(10)
    with pytest.raises(ValueError, match="already executing"):
        next(stream)
    go.set()
    thread.join()
    assert list(stream) == []
    rows = recorded()
    assert ended(rows.one("request")) == ("complete", None, None)


def test_a_stream_is_what_it_was() -> None:
    """Type checks and attributes of the generator hold."""
    ci.profile(frameworks=[])
    stream: Any = tokens()
    assert isinstance(stream, types.GeneratorType)
    assert isinstance(stream, collections.abc.Generator)
    assert inspect.isgenerator(stream)
    assert inspect.getgeneratorstate(stream) == "GEN_CREATED"
    assert stream.__name__ == "tokens"
    assert stream.gi_code.co_name == "tokens"
    assert iter(stream) is stream
    with pytest.raises(AttributeError):
        _ = stream.aclose
    stream.close()
    other: Any = atokens()
    assert isinstance(other, types.AsyncGeneratorType)
    assert isinstance(other, collections.abc.AsyncGenerator)
    assert inspect.isasyncgen(other)
    assert other.__aiter__() is other
    with pytest.raises(AttributeError):
        _ = other.send
    asyncio.run(other.aclose())
    recorded()


def test_functions_that_return_streams() -> None:
    """A generator that the function made is followed; one that it was given is not."""
    given_one = iter_of = (number for number in range(3))

    @ci.inference
    def makes() -> Iterator[int]:
        ci.mark("before", 1)
        return (number for number in range(3))

    @ci.inference
    async def amakes() -> AsyncIterator[str]:
        return atokens.__wrapped__(2)  # type: ignore[attr-defined,no-any-return]

    @ci.inference
    def passes(stream: Iterator[int]) -> Iterator[int]:
        return stream

    async def main() -> list[str]:
        return [item async for item in await amakes()]

    ci.profile(frameworks=[])
    with ci.scope("consumer"):
        stream = makes()
        ci.mark("after", 1)
        assert list(stream) == [0, 1, 2]
    assert asyncio.run(main()) == ["t0", "t1"]
    assert passes(given_one) is iter_of
    rows = recorded()
    first, second, third = rows.named("request")
    assert marks_of(rows, first).items() >= {"before": 1, "output_chunks": 3}.items()
    assert [m.name for m in rows.marks_of(rows.one("consumer"))] == ["after"]
    assert ended(second)[0] == "complete"
    assert ended(third)[0] is None


def sse(chunks: list[str]) -> httpx.Response:
    """A streamed answer as a server of the chat API gives it."""
    body = "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"])
    return httpx.Response(
        200, content=body.encode(), headers={"content-type": "text/event-stream"},
        request=httpx.Request("POST", "http://localhost/"),
    )  # fmt: skip


CHUNK = '{"id":"c","object":"chat.completion.chunk","created":1,"model":"m","choices":[]%s}'
USAGE = ',"usage":{"prompt_tokens":5,"completion_tokens":7,"total_tokens":12}'


def openai_stream() -> Any:
    """A real ``openai.Stream`` over an answer in memory."""
    chunk = openai.types.chat.ChatCompletionChunk
    client = openai.OpenAI(api_key="none", base_url="http://localhost")
    response = sse([CHUNK % "", CHUNK % "", CHUNK % USAGE])
    return openai.Stream(cast_to=chunk, response=response, client=client)


def test_a_stream_of_a_client_library() -> None:
    """An ``openai.Stream`` stays one, with every attribute; its usage is read, not estimated."""

    @ci.inference
    def chat() -> Any:
        return openai_stream()

    ci.profile(frameworks=[])
    stream = chat()
    assert isinstance(stream, openai.Stream)
    assert stream.response.status_code == 200
    with stream as entered:
        assert entered is stream
        assert len(list(stream)) == 3
    left = chat()
    next(left)
    left.close()
    with chat() as opened:
        next(opened)
    rows = recorded()
    whole, closed, exited = rows.named("request")
    found = marks_of(rows, whole)
    assert (found["input_tokens"], found["output_tokens"], found["total_tokens"]) == (5, 7, 12)
    assert found["output_chunks"] == 3
    assert whole.attrs["gen_ai.usage.output_tokens"] == 7
    assert [ended(row)[0] for row in (whole, closed, exited)] == ["complete", "closed", "closed"]


def test_a_counter_of_the_users() -> None:
    """Its sum is the number of tokens, named an estimate; when it raises, chunks are counted."""

    @ci.inference(token_counter=len)
    def counted() -> Iterator[str]:
        yield "abc"
        yield "de"

    @ci.inference(token_counter=lambda _: 1 // 0)
    def broken() -> Iterator[str]:
        yield "abc"
        yield "de"

    ci.profile(frameworks=[])
    list(counted())
    list(broken())
    rows = recorded()
    first, second = rows.named("request")
    (mark,) = [m for m in rows.marks_of(first) if m.name == "output_tokens"]
    assert (mark.value, mark.attrs) == (5, {"estimated": True, "source": "token_counter"})
    assert marks_of(rows, second)["output_tokens"] == 2


def test_each_chunk_leaves_a_mark_only_where_asked() -> None:
    """``stream_chunk_timing``: a point ``chunk_ms`` for each chunk after the first."""

    @ci.inference(config={"stream_chunk_timing": True})
    def timed() -> Iterator[int]:
        yield from range(3)

    ci.profile(frameworks=[])
    list(timed())
    list(tokens())
    rows = recorded()
    first, second = rows.named("request")
    chunks = [m for m in rows.marks_of(first) if m.name == "chunk_ms"]
    assert [(m.kind, m.attrs) for m in chunks] == [("point", {"index": 1}), ("point", {"index": 2})]
    assert "chunk_ms" not in marks_of(rows, second)


def test_a_stream_that_outlives_its_server_span_says_so() -> None:
    """The server's span has ended when the last chunk is read: an attribute tells."""
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    try:
        ci.profile(frameworks=[])
        with provider.get_tracer("x").start_as_current_span("GET", kind=SpanKind.SERVER):
            late, soon = tokens(), tokens()
            list(soon)
        list(late)
        rows = recorded()
    finally:
        provider.shutdown()
        trace._TRACER_PROVIDER_SET_ONCE = Once()
        trace._TRACER_PROVIDER = None
    said = [row.attrs.get(semconv.OUTLIVED_PARENT) for row in rows.named("request")]
    assert said == [True, None]


def test_a_stream_that_ends_after_the_recording() -> None:
    """It goes on as if nothing were there; its request was closed by ``shutdown()``."""
    ci.profile(frameworks=[])
    stream = tokens()
    assert next(stream) == "t0"
    rows = recorded()
    assert list(stream) == ["t1", "t2"]
    row = rows.one("request")
    assert row.attrs[semconv.TRUNCATED] is True
    assert marks_of(rows, row)["output_chunks"] == 1
    assert len(read_spool().spans) == len(rows.spans)


@given(st.lists(st.integers(1, 10**11), min_size=1, max_size=200), st.sampled_from([0.5, 0.95]))
def test_the_sketch_is_right_within_its_error(values: list[int], share: float) -> None:
    """Any quantile is within the stated error of an exact one, and its memory is bounded."""
    gaps = Gaps()
    for value in values:
        gaps.add(value)
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    found = gaps.quantile(share)
    assert found is not None
    assert abs(found - exact) <= (RELATIVE_ERROR + 1e-6) * exact + 1
    assert gaps.max_ns == max(values)
    assert len(gaps) <= 450


def test_the_sketch_does_not_grow() -> None:
    """A million gaps over six orders of magnitude take no more room than their range needs."""
    gaps = Gaps()
    for value in range(1, 1_000_000, 7):
        gaps.add(value * 1000)
    assert len(gaps) < 250


@pytest.mark.parametrize("read", [list, next, bool])
def test_a_recording_changes_nothing_for_the_reader(read: Callable[[Any], Any]) -> None:
    """What a reader gets is the same with a recording and without."""
    without = read(tokens())
    ci.profile(frameworks=[])
    assert read(tokens()) == without
    recorded()
