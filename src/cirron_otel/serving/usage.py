"""What results and chunks of language models say of their request: tokens, model, why it ended.

Read by shape, from dicts and objects alike: OpenAI's chat completions, completions, responses and
embeddings with their chunks and events, Anthropic's messages and events, vLLM's request outputs,
and server-sent events that carry one of these as JSON. No library is imported, nothing of the
texts is kept, and an object's ``__getattr__`` is never asked. What nobody said stays None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from cirron_otel.serving.facts import Facts, count_of, field, text_of
from cirron_otel.serving.vllm_outputs import read_output

__all__ = ["Facts", "read", "read_json"]

#: What is not looked into.
_PLAIN = frozenset({type(None), bool, int, float, complex, bytearray, memoryview, range, set})
_MAX_REASONS = 64
#: Elements of a list that are looked at.
_MAX_LISTED = 10_000
#: Texts longer than this are not searched for events of a stream.
_MAX_EVENT = 1 << 20


def read(facts: Facts, thing: object) -> bool:
    """Take what a result, or a chunk of a stream, says; whether it said anything.

    Never raises. Costs about a microsecond for what it does not know.
    """
    kind = type(thing)
    if kind in _PLAIN:
        return False
    try:
        if kind is str or kind is bytes:
            return _read_events(facts, thing)
        if kind is list or kind is tuple:
            return _read_list(facts, thing)  # type: ignore[arg-type] # by its type
        return _read_one(facts, thing)
    except Exception:  # noqa: BLE001 - whatever the user's object does when it is read
        return False


def read_json(facts: Facts, body: bytes | bytearray) -> bool:
    """Take what a JSON body says; whether it said anything. Never raises."""
    if b'"usage"' not in body and b'"object"' not in body:
        return False
    try:
        return _read_one(facts, _decode(body))
    except Exception:  # noqa: BLE001 - it is no JSON, or says other things under these names
        return False


# --- shapes ---------------------------------------------------------------------------------------


class _Choice(msgspec.Struct):
    finish_reason: Any = None


class _Delta(msgspec.Struct):
    stop_reason: Any = None


class _Message(msgspec.Struct):
    """What is looked at in JSON; everything else is skipped, texts included."""

    object: Any = None
    type: Any = None
    id: Any = None
    model: Any = None
    usage: Any = None
    status: Any = None
    stop_reason: Any = None


class _Body(_Message):
    """A whole body, whose inner objects are read no further than needed."""

    choices: list[_Choice] | None = None
    message: _Message | str | None = None
    response: _Message | str | None = None
    delta: _Delta | str | None = None


_decode: Callable[[Any], object] = msgspec.json.Decoder(_Body).decode


def _of(thing: object) -> str | None:
    """The provider whose library made the object."""
    module = type(thing).__module__.partition(".")[0]
    return module if module in {"openai", "anthropic", "vllm"} else None


def _read_one(facts: Facts, thing: object) -> bool:
    shape = field(thing, "object")
    if isinstance(shape, str) and shape in _OPENAI:
        return _OPENAI[shape](facts, thing)
    kind = field(thing, "type")
    if isinstance(kind, str):
        if kind in _ANTHROPIC:
            return _ANTHROPIC[kind](facts, thing)
        if kind.startswith("response."):
            return _openai_response(facts, field(thing, "response"))
    if isinstance(field(thing, "outputs"), list) and field(thing, "finished") in {True, False}:
        return read_output(facts, thing)
    return _usage(facts, field(thing, "usage"))


def _read_list(facts: Facts, things: list[object] | tuple[object, ...]) -> bool:
    """Several results at once: what ``vllm.LLM.generate`` returns."""
    if not things or type(things[0]) in _PLAIN or type(things[0]) in {str, bytes, list, tuple}:
        return False
    if not isinstance(field(things[0], "outputs"), list):
        return False
    inputs = outputs = 0
    for thing in things[:_MAX_LISTED]:
        one = Facts()
        if not read_output(one, thing) or one.output_tokens is None:
            return False
        inputs += one.input_tokens or 0
        outputs += one.output_tokens
        facts.finish_reasons += one.finish_reasons[: _MAX_REASONS - len(facts.finish_reasons)]
        facts.provider, facts.operation = one.provider, one.operation
    facts.input_tokens, facts.output_tokens = inputs, outputs
    return True


def _read_events(facts: Facts, text: Any) -> bool:  # noqa: ANN401 - str or bytes
    """Server-sent events: each ``data:`` line that says something of usage or of an end."""
    raw = text.encode("utf-8", "replace") if isinstance(text, str) else text
    if len(raw) > _MAX_EVENT or not raw.startswith((b"data:", b"event:", b"id:", b":")):
        return False
    said = False
    for line in raw.splitlines():
        if line.startswith(b"data:") and (b'"model"' in line or b'"usage"' in line):
            said = read_json(facts, line[5:]) or said
    return said


# --- OpenAI ---------------------------------------------------------------------------------------


def _named(facts: Facts, thing: object, operation: str, provider: str = "openai") -> None:
    facts.operation = operation
    facts.provider = _of(thing) or facts.provider or provider
    facts.response_id = text_of(field(thing, "id")) or facts.response_id
    facts.response_model = text_of(field(thing, "model")) or facts.response_model


def _openai_choices(operation: str) -> Callable[[Facts, object], bool]:
    def completion(facts: Facts, thing: object) -> bool:
        _named(facts, thing, operation)
        choices = field(thing, "choices")
        for choice in choices if isinstance(choices, list) else ():
            _ended(facts, field(choice, "finish_reason"))
        _usage(facts, field(thing, "usage"))
        return True

    return completion


def _openai_response(facts: Facts, thing: object) -> bool:
    if thing is None or isinstance(thing, str):
        return False
    _named(facts, thing, "chat")
    status = text_of(field(thing, "status"))
    if status in {"completed", "incomplete", "failed", "cancelled"}:
        facts.finish_reasons = [status]
    _usage(facts, field(thing, "usage"))
    return True


def _openai_list(facts: Facts, thing: object) -> bool:
    usage = field(thing, "usage")
    if usage is None:
        return False  # a list of files, say
    _named(facts, thing, "embeddings")
    return _usage(facts, usage)


def _ended(facts: Facts, reason: object) -> None:
    text = text_of(reason)
    if text is not None and len(facts.finish_reasons) < _MAX_REASONS:
        facts.finish_reasons.append(text)


def _usage(facts: Facts, usage: object) -> bool:
    """Counts under OpenAI's names or, for other servers, under the newer ones."""
    if usage is None or type(usage) in _PLAIN or isinstance(usage, str):
        return False
    found = False
    for name, keys in _COUNTS.items():
        value = next((v for key in keys if (v := count_of(field(usage, key))) is not None), None)
        if value is not None:
            setattr(facts, name, value)
            found = True
    for part, key, name in _DETAILS:
        details = field(usage, part)
        value = None if details is None else count_of(field(details, key))
        if value is not None:
            setattr(facts, name, value)
    return found


_COUNTS: Mapping[str, tuple[str, ...]] = {
    "input_tokens": ("input_tokens", "prompt_tokens"),
    "output_tokens": ("output_tokens", "completion_tokens"),
    "total_tokens": ("total_tokens",),
}
_DETAILS = (
    ("prompt_tokens_details", "cached_tokens", "cache_read"),
    ("input_tokens_details", "cached_tokens", "cache_read"),
    ("completion_tokens_details", "reasoning_tokens", "reasoning"),
    ("output_tokens_details", "reasoning_tokens", "reasoning"),
)

_OPENAI: Mapping[str, Callable[[Facts, object], bool]] = {
    "chat.completion": _openai_choices("chat"),
    "chat.completion.chunk": _openai_choices("chat"),
    "text_completion": _openai_choices("text_completion"),
    "response": _openai_response,
    "list": _openai_list,
}


# --- Anthropic ------------------------------------------------------------------------------------


def _anthropic_message(facts: Facts, thing: object) -> bool:
    usage = field(thing, "usage")
    if usage is None:
        return False
    _named(facts, thing, "chat", "anthropic")
    _anthropic_end(facts, thing)
    return _anthropic_usage(facts, usage)


def _anthropic_start(facts: Facts, thing: object) -> bool:
    return _anthropic_message(facts, field(thing, "message"))


def _anthropic_delta(facts: Facts, thing: object) -> bool:
    _anthropic_end(facts, field(thing, "delta"))
    return _anthropic_usage(facts, field(thing, "usage"))


def _anthropic_end(facts: Facts, thing: object) -> None:
    reason = text_of(field(thing, "stop_reason"))
    if reason is not None:
        facts.finish_reasons = [reason]


def _anthropic_usage(facts: Facts, usage: object) -> bool:
    """Anthropic counts cached input apart; the convention wants all of it in ``input_tokens``.

    Counts of later events are of the whole message again, so each replaces the one before.
    """
    read_from = count_of(field(usage, "cache_read_input_tokens"))
    written = count_of(field(usage, "cache_creation_input_tokens"))
    fresh = count_of(field(usage, "input_tokens"))
    output = count_of(field(usage, "output_tokens"))
    facts.cache_read = facts.cache_read if read_from is None else read_from
    facts.cache_write = facts.cache_write if written is None else written
    if fresh is not None:
        facts.input_tokens = fresh + (facts.cache_read or 0) + (facts.cache_write or 0)
    if output is not None:
        facts.output_tokens = output
    return output is not None or fresh is not None


_ANTHROPIC: Mapping[str, Callable[[Facts, object], bool]] = {
    "message": _anthropic_message,
    "message_start": _anthropic_start,
    "message_delta": _anthropic_delta,
}
