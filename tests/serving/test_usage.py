"""What is read off results and chunks: the real classes of openai and anthropic, and their JSON."""

from __future__ import annotations

import io
import types
from typing import Any

import anthropic.types
import openai.types
import openai.types.chat
import openai.types.responses
import pytest

from cirron_otel.serving.usage import Facts, read, read_json

USAGE = {
    "prompt_tokens": 12,
    "completion_tokens": 30,
    "total_tokens": 42,
    "prompt_tokens_details": {"cached_tokens": 8},
    "completion_tokens_details": {"reasoning_tokens": 20},
}
COMPLETION = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": "gpt-4o-2024-08-06",
    "choices": [
        {
            "index": 0,
            "finish_reason": "stop",
            "logprobs": None,
            "message": {"role": "assistant", "content": "a secret", "refusal": None},
        }
    ],
    "usage": USAGE,
}
ANTHROPIC_USAGE = {
    "input_tokens": 5,
    "output_tokens": 7,
    "cache_read_input_tokens": 100,
    "cache_creation_input_tokens": 20,
}
MESSAGE = {
    "id": "msg_1",
    "type": "message",
    "role": "assistant",
    "model": "claude-x",
    "content": [{"type": "text", "text": "a secret"}],
    "stop_reason": "end_turn",
    "stop_sequence": None,
    "usage": ANTHROPIC_USAGE,
}


def chunk(finish: str | None = None, usage: Any = None, **delta: Any) -> dict[str, Any]:
    """A part of a chat completion."""
    return {
        "id": "chatcmpl-2",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "gpt-4o-mini",
        "choices": [] if usage else [{"index": 0, "delta": delta, "finish_reason": finish}],
        "usage": usage,
    }


def facts_of(*things: Any) -> Facts:
    """What these say together."""
    facts = Facts()
    for thing in things:
        read(facts, thing)
    return facts


@pytest.mark.parametrize("make", [dict, openai.types.chat.ChatCompletion.model_validate])
def test_a_chat_completion_says_its_tokens_and_its_end(make: Any) -> None:
    """An openai object and the same as a dict say tokens, model, id, and why it ended."""
    facts = facts_of(make(COMPLETION))
    assert (facts.provider, facts.operation) == ("openai", "chat")
    assert (facts.response_id, facts.response_model) == ("chatcmpl-1", "gpt-4o-2024-08-06")
    assert (facts.input_tokens, facts.output_tokens, facts.total_tokens) == (12, 30, 42)
    assert (facts.cache_read, facts.reasoning) == (8, 20)
    assert facts.finish_reasons == ["stop"]


@pytest.mark.parametrize("make", [dict, openai.types.chat.ChatCompletionChunk.model_validate])
def test_chunks_say_their_tokens_at_the_end(make: Any) -> None:
    """A stream with usage in its last chunk is counted; without it the counts stay absent."""
    parts = [chunk(content="a"), chunk(content="b"), chunk("length")]
    without = facts_of(*map(make, parts))
    assert without.output_tokens is without.input_tokens is without.total_tokens is None
    assert without.finish_reasons == ["length"]
    facts = facts_of(*map(make, [*parts, chunk(usage=USAGE)]))
    assert (facts.input_tokens, facts.output_tokens) == (12, 30)
    assert (facts.response_model, facts.finish_reasons) == ("gpt-4o-mini", ["length"])


def test_other_answers_of_openai() -> None:
    """Completions, embeddings and responses, with the events of the latter."""
    old = openai.types.Completion.model_validate({
        "id": "c", "object": "text_completion", "created": 1, "model": "m",
        "choices": [{"index": 0, "text": "x", "finish_reason": "stop", "logprobs": None}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3},
    })  # fmt: skip
    facts = facts_of(old)
    assert (facts.operation, facts.output_tokens) == ("text_completion", 2)
    vectors = openai.types.CreateEmbeddingResponse.model_validate({
        "object": "list", "model": "e", "data": [],
        "usage": {"prompt_tokens": 9, "total_tokens": 9},
    })  # fmt: skip
    facts = facts_of(vectors)
    assert (facts.operation, facts.input_tokens, facts.output_tokens) == ("embeddings", 9, None)
    response = {
        "id": "resp_1", "object": "response", "model": "gpt-x", "status": "completed",
        "usage": {
            "input_tokens": 3, "output_tokens": 4, "total_tokens": 7,
            "input_tokens_details": {"cached_tokens": 1},
            "output_tokens_details": {"reasoning_tokens": 2},
        },
    }  # fmt: skip
    made = openai.types.responses.Response.model_construct(**response)
    for thing in (response, made, {"type": "response.completed", "response": response}):
        facts = facts_of(thing)
        assert (facts.provider, facts.operation, facts.response_id) == ("openai", "chat", "resp_1")
        assert (facts.input_tokens, facts.output_tokens, facts.reasoning) == (3, 4, 2)
        assert facts.finish_reasons == ["completed"]


@pytest.mark.parametrize("make", [dict, anthropic.types.Message.model_validate])
def test_a_message_of_anthropic_counts_cached_input_too(make: Any) -> None:
    """The input is all of it, as the convention has it, and the cache's part is said beside it."""
    facts = facts_of(make(MESSAGE))
    assert (facts.provider, facts.operation) == ("anthropic", "chat")
    assert (facts.input_tokens, facts.output_tokens) == (125, 7)
    assert (facts.cache_read, facts.cache_write) == (100, 20)
    assert (facts.response_model, facts.finish_reasons) == ("claude-x", ["end_turn"])


def test_events_of_anthropic_replace_one_another() -> None:
    """Each later count is of the whole message, so that none is added twice."""
    start = anthropic.types.RawMessageStartEvent.model_validate({
        "type": "message_start",
        "message": {
            **MESSAGE, "stop_reason": None, "usage": {**ANTHROPIC_USAGE, "output_tokens": 1},
        },
    })  # fmt: skip
    deltas = [
        anthropic.types.RawMessageDeltaEvent.model_validate({
            "type": "message_delta",
            "delta": {"stop_reason": reason, "stop_sequence": None},
            "usage": {"output_tokens": count},
        })
        for reason, count in ((None, 4), ("max_tokens", 9))
    ]  # fmt: skip
    facts = facts_of(start, *deltas)
    assert (facts.input_tokens, facts.output_tokens) == (125, 9)
    assert facts.finish_reasons == ["max_tokens"]


def test_server_sent_events_and_json_bodies_are_read() -> None:
    """A service that passes on a provider's text says the same as one that parses it."""
    usage = (
        b'data: {"object":"chat.completion.chunk","model":"m","usage":{"prompt_tokens":3,'
        b'"completion_tokens":2,"total_tokens":5}}\n\n'
    )
    lines = (
        'data: {"object":"chat.completion.chunk","id":"x","model":"m","choices":[]}\n\n',
        usage,
        "data: [DONE]\n\n",
    )
    facts = facts_of(*lines)
    assert (facts.response_model, facts.input_tokens, facts.output_tokens) == ("m", 3, 2)
    event = (
        'event: message_delta\ndata: {"type":"message_delta","delta":{"stop_reason":"end_turn"},'
        '"usage":{"output_tokens":15}}\n\n'
    )
    facts = facts_of(event)
    assert (facts.output_tokens, facts.finish_reasons) == (15, ["end_turn"])
    facts = Facts()
    assert read_json(facts, openai.types.chat.ChatCompletion(**COMPLETION).to_json().encode())  # type: ignore[arg-type]
    assert (facts.output_tokens, facts.finish_reasons) == (30, ["stop"])
    assert not read_json(Facts(), b"no json")
    assert not read_json(Facts(), b"[1, 2]")


class _Output:
    """A ``CompletionOutput`` of vLLM as far as it is read."""

    def __init__(self, ids: list[int], reason: str | None = None, index: int = 0) -> None:
        self.index, self.token_ids, self.finish_reason, self.text = index, ids, reason, "secret"


def output(*outputs: _Output, finished: bool = False, metrics: Any = None) -> Any:
    """A ``RequestOutput`` of vLLM as far as it is read."""
    return types.SimpleNamespace(
        request_id="r1", prompt="secret", prompt_token_ids=[1, 2, 3], outputs=list(outputs),
        finished=finished, metrics=metrics, num_cached_tokens=2,
    )  # fmt: skip


def test_outputs_of_vllm_are_counted_whole_or_in_parts() -> None:
    """A stream of ever longer answers and a stream of their parts have the same tokens."""
    ids = [7, 8, 7, 9, 7]
    whole = [output(_Output(ids[: i + 1])) for i in range(5)]
    parts = [output(_Output([one])) for one in ids]
    for stream in (whole, parts):
        facts = facts_of(*stream, output(_Output(ids if stream is whole else [], "stop")))
        assert (facts.provider, facts.input_tokens, facts.output_tokens) == ("vllm", 3, 5)
        assert (facts.finish_reasons, facts.cache_read) == (["stop"], 2)
    several = facts_of(output(_Output([1, 2]), _Output([3], "stop", 1), finished=True))
    assert (several.output_tokens, several.finish_reasons) == (3, ["stop"])


def test_a_list_of_vllm_outputs_is_the_sum() -> None:
    """What ``LLM.generate`` returns for several prompts counts every one of them."""
    facts = facts_of([output(_Output([1, 2], "stop")), output(_Output([4, 5, 6], "length"))])
    assert (facts.input_tokens, facts.output_tokens) == (6, 5)
    assert facts.finish_reasons == ["stop", "length"]


def test_times_of_either_engine_of_vllm() -> None:
    """Waiting, prefill and decoding in seconds, from both kinds of metrics; 0 is not yet."""
    new = types.SimpleNamespace(
        arrival_time=1_700_000_000.0, queued_ts=10.0, scheduled_ts=10.5, first_token_ts=11.5,
        last_token_ts=14.5, first_token_latency=1.6, num_generation_tokens=5,
    )  # fmt: skip
    old = types.SimpleNamespace(
        arrival_time=100.0, first_scheduled_time=100.5, first_token_time=101.5,
        last_token_time=104.5, time_in_queue=0.5, finished_time=104.6,
    )  # fmt: skip
    for metrics in (new, old):
        engine = facts_of(output(_Output([1, 2, 3, 4, 5]), metrics=metrics)).engine
        assert engine["gen_ai.latency.time_in_queue"] == pytest.approx(0.5)
        assert engine["gen_ai.latency.time_in_model_prefill"] == pytest.approx(1.0)
        assert engine["gen_ai.latency.time_in_model_decode"] == pytest.approx(3.0)
        assert engine["gen_ai.latency.time_in_model_inference"] == pytest.approx(4.0)
    new.first_token_ts = new.last_token_ts = new.first_token_latency = 0.0
    engine = facts_of(output(_Output([]), metrics=new)).engine
    assert list(engine) == ["gen_ai.latency.time_in_queue"]


class _Asked:
    """An object that must not be asked for what it does not have."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            pytest.fail(f"asked for {name}")
        raise AttributeError(name)


@pytest.mark.parametrize(
    "thing",
    [None, 1, True, "text", b"bytes", [], [1], ["a"], {}, {"usage": 5}, {"usage": {"x": 1}},
     {"usage": {"prompt_tokens": True}}, io.BytesIO(b"data: x"), _Asked(), object(),
     {"object": "list", "data": []}, {"type": "message"}, {"outputs": [1], "finished": None}],
)  # fmt: skip
def test_what_says_nothing_is_left_alone(thing: Any) -> None:
    """Other results, however odd, say nothing, raise nothing, and are not asked for more."""
    facts = Facts()
    assert not read(facts, thing)
    assert not facts.said_usage
