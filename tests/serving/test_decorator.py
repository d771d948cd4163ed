"""``@ci.inference`` makes each call a request and changes nothing that anybody can see of it."""

from __future__ import annotations

import asyncio
import functools
import inspect
import io
import itertools
import pickle
import threading
import typing
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from fastapi.responses import StreamingResponse
from fastapi.testclient import TestClient

import cirron_otel as ci
from cirron_otel.errors import ConfigurationError
from cirron_otel.serving.requests import current_request, open_request
from helpers import Rows, RunProgram, read_spool, tree_text

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def recorded() -> Rows:
    """What was recorded, all of it."""
    assert ci.shutdown()
    return read_spool()


def plain(x: int, *, y: str = "a") -> str:
    """A function."""
    return y * x


async def coroutine(x: int, *, y: str = "a") -> str:
    """A coroutine function."""
    return y * x


def generator(x: int, *, y: str = "a") -> Iterator[str]:
    """A generator."""
    yield from itertools.repeat(y, x)


async def agenerator(x: int, *, y: str = "a") -> AsyncIterator[str]:
    """An async generator."""
    for _ in range(x):
        yield y


KINDS = [plain, coroutine, generator, agenerator]
global_stream = ci.inference(generator)
# As a decorator does it: pickle finds the decorated function under the function's own name.
global_stream.__qualname__ = "global_stream"


def drive(result: Any) -> Any:
    """What the call gives in the end, whatever kind of function it was."""
    if inspect.iscoroutine(result):
        return asyncio.run(result)
    if inspect.isgenerator(result):
        return list(result)
    if inspect.isasyncgen(result):

        async def all_of() -> list[Any]:
            return [item async for item in result]

        return asyncio.run(all_of())
    return result


@pytest.mark.parametrize("fn", KINDS)
@pytest.mark.parametrize("how", [ci.inference, ci.inference(), ci.inference(config={})])
def test_a_decorated_function_looks_like_itself(
    fn: Callable[..., Any], how: Callable[[Any], Any]
) -> None:
    """Signature, names, annotations and kind are the function's own."""
    made = how(fn)
    assert inspect.signature(made) == inspect.signature(fn)
    assert typing.get_type_hints(made) == typing.get_type_hints(fn)
    for what in ("__name__", "__qualname__", "__doc__", "__module__"):
        assert getattr(made, what) == getattr(fn, what)
    for check in (
        inspect.isfunction, inspect.iscoroutinefunction, inspect.isgeneratorfunction,
        inspect.isasyncgenfunction, inspect.isroutine, callable,
    ):  # fmt: skip
        assert check(made) == check(fn), check.__name__
    assert made._cirron_config == {}


@pytest.mark.parametrize("fn", KINDS)
def test_a_call_gives_what_the_function_gives(fn: Callable[..., Any]) -> None:
    """Result and its kind are the same with a recording and without; each call is a request."""
    made = ci.inference(fn)
    assert drive(made(2, y="b")) == drive(fn(2, y="b"))
    ci.profile(frameworks=[])
    result = made(2, y="b")
    for check in (inspect.iscoroutine, inspect.isgenerator, inspect.isasyncgen):
        other = fn(2)
        assert check(result) == check(other)
        getattr(other, "close", bool)()
    assert drive(result) == drive(fn(2, y="b"))
    with pytest.raises(TypeError):
        drive(made())
    rows = recorded()
    assert tree_text(rows) in ("cirron.session\n  request\n  request", "cirron.session\n  request")
    assert not rows.open


def test_methods_of_every_kind() -> None:
    """On methods, static and class methods, above and below; ``self`` and ``cls`` arrive."""

    class Model:
        @ci.inference
        def predict(self, x: int) -> tuple[object, int]:
            return self, x

        @ci.inference(model="m")
        async def apredict(self, x: int) -> tuple[object, int]:
            return self, x

        @ci.inference
        def stream(self, x: int) -> Iterator[tuple[object, int]]:
            yield self, x

        @ci.inference
        @staticmethod
        def static(x: int) -> int:
            return x

        @classmethod
        @ci.inference
        def named(cls, x: int) -> tuple[type, int]:
            return cls, x

        @ci.inference
        @classmethod
        def named_too(cls, x: int) -> Iterator[tuple[type, int]]:
            yield cls, x

    ci.profile(frameworks=[])
    model = Model()
    assert model.predict(1) == (model, 1)
    assert asyncio.run(model.apredict(2)) == (model, 2)
    assert list(model.stream(3)) == [(model, 3)]
    assert list(Model.stream(model, 3)) == [(model, 3)]
    assert (Model.static(4), model.static(4)) == (4, 4)
    assert Model.named(5) == (Model, 5)
    assert list(model.named_too(6)) == [(Model, 6)]
    assert inspect.isgeneratorfunction(Model.stream)
    assert inspect.ismethod(model.predict)
    assert len(recorded().named("request")) == 8


def test_results_that_are_no_streams_stay_what_they_are(tmp_path: Path) -> None:
    """Files, iterators and generators from elsewhere come back as the same object (C-W20)."""
    (tmp_path / "file").write_text("x")
    opened = (tmp_path / "file").open(encoding="utf-8")
    given = (number for number in range(3))
    others = [
        io.BytesIO(b"x"), opened, iter([1, 2]), zip([1], [2], strict=True), map(str, [1]), {"a": 1},
        [1], "text", b"bytes", itertools.count(), enumerate([1]), object(), {1}, None, 1.5,
    ]  # fmt: skip

    @ci.inference
    def same(value: object) -> object:
        return value

    ci.profile(frameworks=[])
    for other in (*others, given):
        assert same(other) is other
    opened.close()
    given.close()
    assert len(recorded().named("request")) == len(others) + 1


def test_an_exception_is_the_same_object() -> None:
    """It flies on, recorded; the traceback has the function's own frame."""
    error = KeyError("x")

    @ci.inference
    def fails() -> None:
        raise error

    @ci.inference
    async def afails() -> None:
        raise error

    ci.profile(frameworks=[])
    for call in (fails, lambda: asyncio.run(afails())):
        with pytest.raises(KeyError) as caught:
            call()
        assert caught.value is error
        assert caught.traceback[-1].name in {"fails", "afails"}
    rows = recorded()
    assert [row.attrs["error"] for row in rows.named("request")] == ["KeyError: 'x'"] * 2


def test_calls_side_by_side_have_requests_of_their_own() -> None:
    """Threads and tasks: each call's marks and scopes are its own (C-W16, C-W17)."""

    @ci.inference
    def predict(number: int) -> int:
        with ci.scope("part"):
            ci.mark("who", number)
        return number

    @ci.inference
    async def apredict(number: int) -> int:
        with ci.scope("part"):
            await asyncio.sleep(0)
            ci.mark("who", number)
        return number

    async def many() -> list[int]:
        return await asyncio.gather(*map(apredict, range(50, 100)))

    ci.profile(frameworks=[])
    threads = [
        threading.Thread(target=lambda n=n: [predict(n * 10 + i) for i in range(10)])
        for n in range(5)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert asyncio.run(many()) == list(range(50, 100))
    rows = recorded()
    requests = rows.named("request")
    assert len(requests) == 100
    said = []
    for row in requests:
        (part,) = rows.children(row)
        said += [mark.value for mark in rows.marks_of(part) if mark.name == "who"]
        assert row.parent_id == rows.one("cirron.session").id
    assert sorted(said) == list(range(100))


def test_headers_and_ids_come_from_the_call() -> None:
    """``headers=`` and ``request_id=`` are asked with the call's arguments."""

    @ci.inference(headers=lambda request, **_: request)
    def predict(request: dict[str, str], *, x: int = 0) -> int:
        assert request
        return x

    class Service:
        @ci.inference(request_id=lambda _self, x: f"id-{x}")
        def stream(self, x: int) -> Iterator[int]:
            yield x

    @ci.inference(headers=lambda: 1 / 0)
    def broken() -> int:
        return 1

    ci.profile(frameworks=[])
    assert predict({"traceparent": CALLER, "x-request-id": "me"}, x=3) == 3
    assert list(Service().stream(4)) == [4]
    assert broken() == 1
    rows = recorded()
    first, second, third = rows.named("request")
    assert first.otel
    assert (first.otel.trace_id, first.id[16:]) == (CALLER[3:19], CALLER[19:35])
    assert (first.attrs["request_id"], second.attrs["request_id"]) == ("me", "id-4")
    assert len(third.attrs["request_id"]) == 32


def test_usage_of_a_result_is_read() -> None:
    """A result that says its tokens leaves the seed-era marks; one that does not leaves none."""

    @ci.inference(model="m", operation="chat", provider="p")
    def chat(usage: dict[str, int] | None) -> dict[str, Any]:
        return {"usage": usage}

    ci.profile(frameworks=[])
    chat({"prompt_tokens": 3, "completion_tokens": 4})
    chat(None)
    rows = recorded()
    with_usage, without = rows.named("request")
    assert {m.name: (m.value, m.kind) for m in rows.marks_of(with_usage)} == {
        "input_tokens": (3, "summary"),
        "output_tokens": (4, "summary"),
        "total_tokens": (7, "summary"),
    }
    assert rows.marks_of(without) == []
    assert with_usage.attrs["gen_ai.request.model"] == "m"
    assert with_usage.attrs["gen_ai.operation.name"] == "chat"


def test_the_first_call_inside_a_middleware_is_its_request() -> None:
    """It joins the open request, streams included; a second call has a request below."""

    @ci.inference
    def model() -> dict[str, Any]:
        return {"usage": {"prompt_tokens": 1, "completion_tokens": 2}}

    @ci.inference
    def stream() -> Iterator[str]:
        yield "a"
        yield "b"

    ci.profile(frameworks=[])
    for call in (model, lambda: list(stream())):
        request = open_request(shared=True)
        assert request is not None
        call()
        assert request.is_open
        model()
        request.finish()
    rows = recorded()
    assert tree_text(rows) == ("cirron.session\n  request\n    request\n  request\n    request")
    first, _, second, _ = rows.named("request")
    assert [m.value for m in rows.marks_of(first) if m.name == "output_tokens"] == [2]
    assert [m.value for m in rows.marks_of(second) if m.name == "output_chunks"] == [2]
    assert second.attrs["cirron.stream.end"] == "complete"


def test_a_streaming_response_is_followed() -> None:
    """The request of an endpoint ends with the last part of its body, not with its return."""
    app = FastAPI()

    @app.get("/sync")
    @ci.inference
    def sync() -> StreamingResponse:
        def body() -> Iterator[str]:
            for part in "abc":
                ci.mark("part", 1)
                yield part

        return StreamingResponse(body())

    @app.get("/async")
    @ci.inference
    async def asynchronous() -> StreamingResponse:
        async def body() -> AsyncIterator[str]:
            for part in "abcd":
                ci.mark("part", 1)
                yield part

        return StreamingResponse(body())

    ci.profile(frameworks=[])
    with TestClient(app) as client:
        assert (client.get("/sync").text, client.get("/async").text) == ("abc", "abcd")
    rows = recorded()
    for row, chunks in zip(rows.named("request"), (3, 4), strict=True):
        names = [mark.name for mark in rows.marks_of(row)]
        assert names.count("part") == chunks
        assert row.attrs["cirron.stream.end"] == "complete"
        assert {m.name: m.value for m in rows.marks_of(row)}["output_chunks"] == chunks


def test_a_decorated_stream_can_be_pickled() -> None:
    """By name, as any function: process pools find it (its parts where it has no name)."""
    assert pickle.loads(pickle.dumps(global_stream)) is global_stream  # noqa: S301 - our own


def test_what_cannot_be_decorated_says_so() -> None:
    """Classes, names and settings of the wrong type are refused where they are written."""
    with pytest.raises(ConfigurationError, match="not the class dict"):
        ci.inference(dict)
    with pytest.raises(ConfigurationError, match="options are given by name"):
        ci.inference("name")  # type: ignore[type-var]
    with pytest.raises(ConfigurationError, match="config"):
        ci.inference(config=3)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="token_counter"):
        ci.inference(token_counter=3)  # type: ignore[arg-type]


def test_callables_that_are_no_functions() -> None:
    """A partial and an object with ``__call__`` are called as before."""

    class Model:
        async def __call__(self, x: int) -> int:
            return x + 1

    ci.profile(frameworks=[])
    assert ci.inference(functools.partial(plain, y="b"))(2) == "bb"
    assert asyncio.run(ci.inference(Model())(2)) == 3
    assert len(recorded().named("request")) == 2


def test_decorating_imports_nothing(run_program: RunProgram) -> None:
    """No framework is loaded by ``import``, decorating, or a call (C-W20)."""
    run = run_program(
        """
        import sys
        import cirron_otel as ci

        @ci.inference
        def f():
            return 1

        ci.profile(frameworks=[])
        f()
        heavy = {"torch", "numpy", "transformers", "fastapi", "starlette", "openai", "anthropic"}
        print(sorted(heavy & set(sys.modules)))
        """,
        measured=False,
    )
    assert run.stdout == "[]\n"
    run.one("request")


def test_a_call_after_the_end_and_in_the_next_recording() -> None:
    """Between recordings a decorated function is the function; the next one has it again."""

    @ci.inference
    def f() -> object:
        return current_request()

    ci.profile(frameworks=[])
    assert f() is not None
    ci.shutdown()
    assert f() is None
    ci.profile(frameworks=[])
    assert f() is not None
    assert len(recorded().named("request")) == 2
