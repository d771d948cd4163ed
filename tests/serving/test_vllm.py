"""The join with vLLM, with a stand-in of the interface that its ``AsyncLLM`` publishes."""

from __future__ import annotations

import asyncio
import inspect
import sys
import types
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from helpers import Rows, read_spool

CALLER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

#: ``vllm/v1/engine/async_llm.py`` as far as a caller sees it. What its engine knew of each request
#: is kept in ``asked``.
ENGINE = '''
import types


class AsyncLLM:
    def __init__(self):
        self.asked = []

    async def generate(self, prompt, sampling_params, request_id, *, prompt_text=None,
                       lora_request=None, tokenization_kwargs=None, trace_headers=None, priority=0,
                       data_parallel_rank=None):
        """Generate outputs for a request."""
        self.asked.append((request_id, trace_headers, priority))
        ids = [11, 12, 13, 14]
        delta = sampling_params.output_kind.name == "DELTA"
        for i in range(len(ids)):
            last = i == len(ids) - 1
            yield types.SimpleNamespace(
                request_id=request_id, prompt=prompt, prompt_token_ids=[1, 2, 3],
                outputs=[types.SimpleNamespace(
                    index=0, text="x", token_ids=ids[i:i + 1] if delta else ids[:i + 1],
                    finish_reason="stop" if last else None)],
                finished=last, num_cached_tokens=1,
                metrics=types.SimpleNamespace(
                    num_generation_tokens=i + 1, arrival_time=1_700_000_000.0, queued_ts=5.0,
                    scheduled_ts=5.25, first_token_ts=5.5, last_token_ts=5.5 + i,
                    first_token_latency=0.6))

    async def encode(self, prompt, pooling_params, request_id, lora_request=None,
                     trace_headers=None, priority=0, tokenization_kwargs=None):
        self.asked.append((request_id, trace_headers, priority))
        yield "vector"
'''


class OutputKind(Enum):
    """vLLM's ``RequestOutputKind``."""

    CUMULATIVE = 0
    DELTA = 1


class Params:
    """vLLM's ``SamplingParams`` as far as it is read."""

    def __init__(self, kind: OutputKind = OutputKind.CUMULATIVE) -> None:
        self.output_kind = kind


@pytest.fixture
def engine_class(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Any]]:
    """The stand-in, imported under vLLM's name."""
    folder = tmp_path / "engine" / "vllm" / "v1" / "engine"
    folder.mkdir(parents=True)
    for package in (folder, folder.parent, folder.parent.parent):
        (package / "__init__.py").write_text("")
    (folder / "async_llm.py").write_text(ENGINE)
    monkeypatch.syspath_prepend(str(tmp_path / "engine"))
    from vllm.v1.engine.async_llm import AsyncLLM  # type: ignore[import-not-found] # noqa: PLC0415

    yield AsyncLLM
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        del sys.modules[name]


def recorded() -> Rows:
    """What was recorded, once it is all written."""
    ci.flush()
    return read_spool()


@pytest.mark.parametrize("kind", list(OutputKind))
def test_the_engine_joins_the_callers_trace(engine_class: Any, kind: OutputKind) -> None:
    """Its span will be the request's child; tokens and times come back from its outputs."""
    ci.profile(frameworks=["vllm"])
    engine = engine_class()

    @ci.inference(headers=lambda headers, _ask: headers, model="m")
    async def answer(_headers: Mapping[str, str], ask: str) -> AsyncIterator[str]:
        async for output in engine.generate(ask, Params(kind), "r1", priority=3):
            yield output.outputs[0].text

    async def run() -> list[str]:
        return [part async for part in answer({"traceparent": CALLER}, "secret")]

    assert len(asyncio.run(run())) == 4
    request = recorded().one("request")
    ((request_id, headers, priority),) = engine.asked
    assert (request_id, priority) == ("r1", 3)
    assert headers["traceparent"] == f"00-{CALLER[3:35]}-{request.id[:16]}-01"
    said = {
        "gen_ai.provider.name": "vllm", "gen_ai.operation.name": "text_completion",
        "gen_ai.request.model": "m", "gen_ai.response.id": "r1",
        "gen_ai.usage.input_tokens": 3, "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 1, "gen_ai.response.finish_reasons": ["stop"],
        "gen_ai.latency.time_in_queue": 0.25, "gen_ai.latency.time_in_model_prefill": 0.25,
        "gen_ai.latency.time_in_model_decode": 3.0,
        "gen_ai.latency.time_in_model_inference": 3.25,
        "gen_ai.latency.time_to_first_token": 0.6,
    }  # fmt: skip
    assert {key: request.attrs.get(key) for key in said} == said
    assert "secret" not in str(request)


def test_a_client_that_leaves_has_the_tokens_so_far(engine_class: Any) -> None:
    """Half an answer is half the tokens, and its waiting time is known already."""
    ci.profile(frameworks=["vllm"])
    engine = engine_class()

    @ci.inference
    async def answer() -> AsyncIterator[str]:
        async for output in engine.generate("x", Params(), "r1"):
            yield output.outputs[0].text

    async def run() -> None:
        parts = answer()
        await anext(parts)
        await anext(parts)
        await parts.aclose()

    asyncio.run(run())
    request = recorded().one("request")
    assert request.attrs["gen_ai.usage.output_tokens"] == 2
    assert request.attrs["gen_ai.latency.time_in_queue"] == 0.25
    assert request.otel
    assert request.otel.status == "error"


def test_two_answers_of_one_request_add_up(engine_class: Any) -> None:
    """A request that asks the engine twice at once has the tokens of both."""
    ci.profile(frameworks=["vllm"])
    engine = engine_class()

    async def one(name: str) -> None:
        async for _ in engine.generate("x", Params(), name):
            await asyncio.sleep(0)

    async def run() -> None:
        async with ci.request():
            await asyncio.gather(one("a"), one("b"))

    asyncio.run(run())
    attrs = recorded().one("request").attrs
    assert (attrs["gen_ai.usage.input_tokens"], attrs["gen_ai.usage.output_tokens"]) == (6, 8)


def test_headers_of_the_caller_win_and_nobody_gets_any_without_a_request(
    engine_class: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the caller passes stays; nothing comes outside of requests or from the environment."""
    monkeypatch.setenv("TRACEPARENT", CALLER)
    ci.profile(frameworks=["vllm"])
    engine = engine_class()

    async def run() -> None:
        async for _ in engine.generate("x", Params(), "outside"):
            pass
        async with ci.request():
            async for _ in engine.generate("x", Params(), "own", trace_headers={"a": "b"}):
                pass
            async for vector in engine.encode("x", None, "vector"):
                assert vector == "vector"

    asyncio.run(run())
    asked = {name: headers for name, headers, _ in engine.asked}
    assert (asked["outside"], asked["own"]) == (None, {"a": "b"})
    assert asked["vector"]["traceparent"].startswith("00-")
    assert CALLER[3:35] not in asked["vector"]["traceparent"]


def test_the_engines_generator_stays_one_and_is_put_back(engine_class: Any) -> None:
    """What comes back is an async generator still, its methods work, and shutdown undoes it all."""
    original = vars(engine_class)["generate"]
    before = inspect.signature(original)
    ci.profile(frameworks=["vllm"])
    assert inspect.isasyncgenfunction(engine_class.generate)
    assert inspect.signature(vars(engine_class)["generate"]) == before
    engine = engine_class()

    async def run() -> None:
        async with ci.request():
            outputs: AsyncGenerator[Any, None] = engine.generate("x", Params(), "r")
            assert isinstance(outputs, types.AsyncGeneratorType)
            assert isinstance(outputs, AsyncGenerator)
            assert (await outputs.asend(None)).request_id == "r"
            await outputs.aclose()
            assert [one async for one in outputs] == []

    asyncio.run(run())
    ci.shutdown()
    assert vars(engine_class)["generate"] is original
