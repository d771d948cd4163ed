"""What others do wrong reaches neither the service nor the recording, and is told as it was."""

from __future__ import annotations

import asyncio
import copy
import gc
import inspect
import logging
import pickle
import warnings
from collections.abc import Callable, Iterator
from types import CoroutineType
from typing import Any

import pytest
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.propagators.textmap import TextMapPropagator, default_getter
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags, set_span_in_context

import cirron_otel as ci
from asking import recorded, status_of
from cirron_otel import semconv
from cirron_otel.errors import ConfigurationError
from cirron_otel.serving.requests import open_request
from helpers import RunProgram, tree_text

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


# --- headers and ids ------------------------------------------------------------------------------


class NoText:
    """An object of a server's that cannot even be shown."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Gone:
    """Headers of a connection that has gone."""

    def items(self) -> Any:
        """As a mapping's."""
        raise OSError("gone")


ODD_HEADERS: list[Any] = [
    {"traceparent": "x" * 1_000_000, "x-request-id": "r" * 1_000_000},
    {b"traceparent": b"\xff\x00\xfe", b"x-request-id": b"\x00\x1b[31mred\x07\r\n"},
    [(b"X-Request-Id", "héllo".encode()), (b"traceparent", b"00-zz-zz-01")],
    [("x-request-id", 5), ("traceparent", None)], [("a",)], 5, "text", b"bytes", Gone(),
    [(NoText(), NoText())], {"x-request-id": "\ud800 alone"}, {"x-request-id": "  "},
    {"traceparent": CALLER, "tracestate": "a=b," * 300_000},
]  # fmt: skip


def test_headers_may_hold_anything(caplog: pytest.LogCaptureFixture) -> None:
    """No header, however long or broken, costs more than its own meaning; ids are bounded."""
    ci.profile(frameworks=[])
    caplog.set_level(logging.CRITICAL, "opentelemetry")
    for headers in ODD_HEADERS:
        with ci.request(headers=headers) as request:
            assert 0 < len(request.request_id) <= 256
        opened = open_request(headers=headers)
        assert opened is not None
        opened.finish()
    for given in (NoText(), b"bytes", 5, "x" * 1_000_000):
        with ci.request(request_id=given) as request:  # type: ignore[arg-type]
            assert 0 < len(request.request_id) <= 256
        for option in ("headers", "request_id"):
            assert ci.inference(**{option: lambda g=given: g})(lambda: 1)() == 1
    ids = {row.attrs["request_id"] for row in recorded().named("request")}
    assert {"héllo", "bytes", "5", "r" * 256} <= ids


def test_a_tracestate_in_several_headers_is_one() -> None:
    """As W3C Trace Context has it; and headers that can be read once are left to the service."""
    headers = [(b"traceparent", CALLER.encode()), (b"tracestate", b"a=1"), (b"tracestate", b"b=2")]
    seen = []

    async def app(scope: Any, _receive: Any, send: Any) -> None:
        seen.extend(scope["headers"])
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.zerocopysend", "file": 0})

    async def call() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": iter(headers)}

        async def nothing(*_: Any) -> Any:
            return {"type": "http.disconnect"}

        await ci.CirronMiddleware(app)(scope, nothing, nothing)

    ci.profile(frameworks=[])
    asyncio.run(call())
    assert seen == headers
    request = recorded().one("request")
    assert request.otel
    assert request.otel.trace_state == "a=1,b=2"
    assert status_of(request) == (None, None)  # a file that the server sends is a whole answer


class OwnNames(TextMapPropagator):
    """Writes its header in letters of its own, and reads a former one too, as those of B3 do."""

    fields = {"X-Trace-Here"}  # noqa: RUF012 - as a propagator's

    def extract(
        self, carrier: Any, context: Context | None = None, getter: Any = default_getter
    ) -> Context:
        """As a propagator's."""
        for name in ("X-Trace-Here", "X-Former-Trace"):
            for found in getter.get(carrier, name) or ():
                span = SpanContext(int(found, 16), 5, is_remote=True, trace_flags=TraceFlags(1))
                return set_span_in_context(NonRecordingSpan(span), context)
        return context or Context()

    def inject(self, carrier: Any, context: Any = None, setter: Any = None) -> None:
        """As a propagator's; nothing is sent here."""


class Raises(OwnNames):
    """One that cannot read anything."""

    def extract(self, *_: Any, **__: Any) -> Context:
        """As a propagator's."""
        raise ValueError("no")


@pytest.fixture
def propagator(request: pytest.FixtureRequest) -> Iterator[None]:
    """A propagator of the application's own, for the time of a test."""
    known = propagate.get_global_textmap()
    propagate.set_global_textmap(request.param())
    yield
    ci.shutdown()
    propagate.set_global_textmap(known)


@pytest.mark.parametrize("propagator", [OwnNames], indirect=True)
@pytest.mark.usefixtures("propagator")
def test_the_caller_is_found_by_whatever_a_propagator_reads() -> None:
    """In any letters, and by a header that it reads and never writes; a middleware's, too."""
    ci.profile(frameworks=[])
    trace_id = CALLER.split("-")[1]
    headers: list[Any] = [
        {"x-trace-here": trace_id}, [(b"x-trace-here", trace_id.encode())],
        {"X-Former-Trace": trace_id}, [(b"x-former-trace", trace_id.encode())],
    ]  # fmt: skip
    for one in headers:
        with ci.request(headers=one):
            pass
        opened = open_request(headers=one)
        assert opened is not None
        opened.finish()
    rows = recorded().named("request")
    assert [row.otel and row.otel.parent_span_id for row in rows] == [f"{5:016x}"] * 8
    assert {row.otel and f"{row.otel.trace_id}{row.id[16:]}" for row in rows} == {trace_id}


@pytest.mark.parametrize("propagator", [Raises], indirect=True)
@pytest.mark.usefixtures("propagator")
def test_a_propagator_that_raises_costs_the_caller_only() -> None:
    """The service goes on; the request begins a trace of its own."""
    ci.profile(frameworks=[])
    with ci.request(headers={"x-trace-here": "1", "x-request-id": "a"}):
        pass
    opened = open_request(headers=[(b"x-trace-here", b"1")])
    assert opened is not None
    opened.finish()
    assert [row.otel and row.otel.kind for row in recorded().named("request")] == ["server"] * 2


# --- functions that the user gives ----------------------------------------------------------------


async def later(*_: Any) -> int:
    """What cannot be asked in passing."""
    return 1


def test_functions_that_would_have_to_be_awaited_are_refused() -> None:
    """Where they are given, for every option that is called; nothing is ever left unawaited."""
    for option in ("headers", "request_id", "token_counter"):
        with pytest.raises(ConfigurationError, match="plain function"):
            ci.inference(**{option: later})
    for kind in (ci.CirronMiddleware, ci.CirronWsgiMiddleware):
        for option in ("tenant", "token_counter"):
            with pytest.raises(ConfigurationError, match="plain function"):
                kind(later, **{option: later})


BAD_COUNTS: list[Callable[[Any], Any]] = [
    lambda _: "x", lambda _: float("inf"), lambda _: None, lambda _: -5, lambda _: 10**100,
]  # fmt: skip


def test_a_counter_may_answer_anything() -> None:
    """What is no number of tokens is not counted; the stream goes on."""
    ci.profile(frameworks=[])
    for count in BAD_COUNTS:
        stream = ci.inference(token_counter=count)(lambda: (one for one in "ab"))
        assert list(stream()) == ["a", "b"]
    assert len(recorded().named("request")) == len(BAD_COUNTS)


@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), MemoryError()]
)
def test_no_exception_is_ever_ours(error: BaseException) -> None:
    """Whatever leaves a function, a stream or a coroutine is what left it; each request ended."""

    @ci.inference
    def fails() -> None:
        raise error

    @ci.inference
    def streams() -> Iterator[int]:
        yield 1
        raise error

    @ci.inference
    async def awaits() -> None:
        raise error

    @ci.inference(record_content=True, redact=lambda *_: fails.__wrapped__())  # type: ignore[attr-defined]
    def redacts(text: str) -> str:
        return text

    ci.profile(frameworks=[])
    coroutine: Any = awaits()
    for call in (fails, lambda: list(streams()), lambda: coroutine.send(None)):
        with pytest.raises(type(error)) as caught:
            call()
        assert caught.value is error
    if isinstance(error, Exception):
        assert redacts("x") == "x"
    else:  # someone pressed a key meanwhile
        with pytest.raises(type(error)):
            redacts("x")
    rows = recorded().named("request")
    assert len(rows) == 4
    assert {status_of(row)[0] for row in rows[:3]} == {"error"}


# --- functions that are decorated -----------------------------------------------------------------


async def _answers(seconds: float = 0.02) -> str:
    with ci.scope("work"):
        await asyncio.sleep(seconds)
    return "x"


@ci.inference
def plain(*given: float) -> Any:
    """As a decorator that knows nothing of `async` leaves a function."""
    return _answers(*given)


def test_a_plain_function_that_returns_a_coroutine() -> None:
    """As any decorator may make of an ``async def``: the request lasts until it is awaited."""

    async def main() -> None:
        made = plain()
        assert type(made) is CoroutineType
        assert made.__name__ == "_answers"
        assert await made == "x"
        task = asyncio.create_task(plain(60))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    ci.profile(frameworks=[])
    asyncio.run(main())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plain()
        gc.collect()
    assert [str(one.message) for one in said] == ["coroutine '_answers' was never awaited"]
    rows = recorded()
    assert tree_text(rows) == (
        "cirron.session\n  request\n    work\n  request\n    work\n  request"
    )
    first, second, third = rows.named("request")
    work = rows.named("work")[0]
    assert first.end_ns >= work.end_ns > work.start_ns
    assert status_of(second)[0] == "error"
    assert status_of(third) == (None, None)


class Model:
    """Has a stream that is a method."""

    def __init__(self, size: int = 2) -> None:
        self.size = size

    @ci.inference(token_counter=len)
    def stream(self) -> Iterator[str]:
        """A stream."""
        yield "x" * self.size

    def bare(self) -> Iterator[str]:
        """One that is not decorated."""
        yield "y" * self.size


def test_methods_that_are_streams_travel() -> None:
    """They are copied and pickled as methods are, also after the first call."""
    ci.profile(frameworks=[])
    model = Model(3)
    assert list(model.stream()) == ["xxx"]
    for again in (
        pickle.loads(pickle.dumps(model.stream)), copy.copy(model.stream),  # noqa: S301
        copy.deepcopy(model.stream), pickle.loads(pickle.dumps(Model.stream)).__get__(model),  # noqa: S301
    ):  # fmt: skip
        assert list(again()) == ["xxx"]
    assert list(copy.deepcopy(Model.stream)(model)) == ["xxx"]
    stream = model.stream()
    with pytest.raises(TypeError, match="cannot pickle 'generator'"):
        copy.copy(stream)
    stream.close()  # type: ignore[attr-defined]
    assert len(recorded().named("request")) == 7


def test_a_bound_method_is_decorated_and_left_as_it_was() -> None:
    """The method of an object, and a function that has no room for a mark of ours."""
    model = Model()
    made = ci.inference(model.bare)
    assert list(made()) == ["yy"]
    assert made._cirron_config == {}  # type: ignore[attr-defined]
    assert not hasattr(Model.bare, "_cirron_config")
    assert inspect.isgeneratorfunction(made)


def test_recordings_that_end_leave_nothing_behind() -> None:
    """Begun and ended with requests open, again and again: no object more, no context left."""

    def once(number: int) -> None:
        ci.profile(frameworks=[])
        stream = Model().stream()
        next(stream)
        held = ci.request("held").__enter__()
        ci.shutdown()
        list(stream) if number % 2 else stream.close()  # type: ignore[attr-defined]
        held.__exit__(None, None, None)

    for number in range(3):
        once(number)
    gc.collect()
    before = len(gc.get_objects())
    for number in range(8):
        once(number)
    gc.collect()
    assert len(gc.get_objects()) - before < 200


def test_a_fork_in_the_middle_of_a_request(run_program: RunProgram) -> None:
    """The child's work is below it, the parent ends it, and no row is there twice."""
    run = run_program(
        """
        import os
        import cirron_otel as ci
        @ci.inference
        def stream():
            yield from range(4)
        ci.profile(frameworks=[])
        answer = stream()
        next(answer)
        with ci.request("outer"):
            child = os.fork()
            with ci.scope("in_child" if child == 0 else "in_parent"):
                pass
            list(answer)
            if child == 0:
                raise SystemExit(0)
            os.waitpid(child, 0)
        ci.shutdown()
        """
    )
    assert len({row.id for row in run.spans}) == len(run.spans)
    outer = run.one("outer")
    assert {row.name for row in run.children(outer)} == {"in_child", "in_parent"}
    assert status_of(outer) == (None, None)
    assert run.one("request").attrs[semconv.STREAM_END] == "complete"
