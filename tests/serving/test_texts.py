"""The texts of decorated calls: only where asked, through the hook, and never more than is kept."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import pickle
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import msgspec
import openai
import pytest
from fastapi import FastAPI
from pydantic import BaseModel, Field, SecretStr

import cirron_otel as ci
from cirron_otel.errors import ConfigurationError
from cirron_otel.serving.texts import AnswerText, text_of
from helpers import Rows, read_spool

INPUT, OUTPUT = "cirron.request.content", "cirron.response.content"


def recorded() -> Rows:
    """What was recorded, all of it."""
    assert ci.shutdown()
    return read_spool()


def texts(rows: Rows) -> list[tuple[Any, Any]]:
    """The two texts of each request."""
    return [(row.attrs.get(INPUT), row.attrs.get(OUTPUT)) for row in rows.named("request")]


def test_texts_are_recorded_only_when_asked() -> None:
    """Not by default; with `record_content` of every kind of function, as they were at the call."""

    def plain(messages: list[str], *, top: int = 1) -> dict[str, int]:
        messages.append("later")
        return {"top": top}

    async def awaited(prompt: str) -> str:
        return prompt.upper()

    def stream(prompt: str) -> Iterator[str]:
        yield from prompt

    async def astream(prompt: str) -> AsyncIterator[str]:
        for one in prompt:
            yield one

    class Model:
        @ci.inference(record_content=True)
        def ask(self, prompt: str) -> str:
            return prompt

        @ci.inference(record_content=True)
        @classmethod
        def names(cls, prompt: str) -> Iterator[str]:
            yield prompt

    async def collect(make: Any) -> None:
        assert [one async for one in make("ab")] == ["a", "b"]

    ci.profile(frameworks=[])
    for record in (False, True):
        decorate = ci.inference(record_content=record)
        assert decorate(plain)(["hi"], top=2) == {"top": 2}
        assert asyncio.run(decorate(awaited)("hi")) == "HI"
        assert list(decorate(stream)("ab")) == ["a", "b"]
        asyncio.run(collect(decorate(astream)))
    assert Model().ask("me") == "me"
    assert list(Model.names("all")) == ["all"]
    with pytest.raises(TypeError):
        ci.inference(record_content=True)(plain)()
    said = texts(recorded())
    assert said[:4] == [(None, None)] * 4
    assert said[4:] == [
        ('{"messages":["hi"],"top":2}', '{"top":2}'), ("hi", "HI"), ("ab", "ab"), ("ab", "ab"),
        ("me", "me"), ("all", "all"), (None, None),
    ]  # fmt: skip


def test_the_hook_has_the_last_word() -> None:
    """It may change a text or keep it out; one that raises keeps it out and is counted."""

    def redact(kind: str, text: str) -> str | None:
        if "boom" in text:
            raise ValueError(text)
        return None if kind == "output" else text.replace("secret", "***")

    @ci.inference(record_content=True, redact=redact)
    def ask(prompt: str) -> str:
        return prompt

    ci.profile(frameworks=[])
    ask("my secret")
    ask("boom")
    assert ci.health()["losses"]["redaction_failed"] == 2
    assert texts(recorded()) == [("my ***", None), (None, None)]
    again = pickle.loads(pickle.dumps(ci.inference(record_content=True)(_stream)))  # noqa: S301
    ci.profile(frameworks=[])
    list(again(2))
    assert texts(recorded())[-1] == ("2", "01")
    with pytest.raises(ConfigurationError, match="record_content"):
        ci.inference(redact=redact)


def _stream(count: int) -> Iterator[str]:
    yield from map(str, range(count))


def test_inside_a_middleware_the_decorated_calls_texts_stand() -> None:
    """What the function was told to say of its texts, redacted, is not said again unredacted."""
    app = FastAPI()
    app.add_middleware(ci.CirronMiddleware, record_content=True)

    @ci.inference(record_content=True, redact=lambda _, text: text.replace("secret", "***"))
    def ask(prompt: str) -> str:
        return f"not {prompt}"

    @ci.inference(record_content=True, redact=lambda *_: None)
    def keep_out(prompt: str) -> str:
        return prompt

    @app.get("/")
    def answer() -> str:
        return ask("secret")

    @app.get("/out")
    def out() -> str:
        return keep_out("secret")

    async def call() -> None:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            await client.get("/")
            await client.get("/out")

    ci.profile(frameworks=[])
    asyncio.run(call())
    assert texts(recorded()) == [("***", "not ***"), (None, None)]


@dataclasses.dataclass
class Asked:
    """A question with a key that is not shown."""

    text: str
    key: str = dataclasses.field(default="k", repr=False)


class Turn(msgspec.Struct):
    """One turn."""

    role: str
    pictures: bytes


class Body(BaseModel):
    """What a service is asked."""

    text: str
    token: SecretStr = SecretStr("hush")
    hidden: str = Field(default="hush", repr=False)


class Stranger:
    """Says nothing about itself."""

    def __repr__(self) -> str:
        raise AssertionError("nobody asked for it")

    __str__ = __repr__


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (Asked("hi"), {"text": "hi"}),
        ([Turn("user", b"123")], [{"role": "user", "pictures": "<3 bytes>"}]),
        (Body(text="hi"), {"text": "hi", "token": "<SecretStr>"}),
        ({"a": (1, 2.5, None, True), 3: Stranger()},
         {"a": [1, 2.5, None, True], "3": "<Stranger>"}),
        (2**70, "..."),
        ({"headers": {"a": "b"}, "api_key": "k", "Authorization": "x", "token": "t", "tokens": 3},
         {"headers": "***", "api_key": "***", "Authorization": "***", "token": "t", "tokens": 3}),
    ],
)  # fmt: skip
def test_what_is_opened_and_what_is_not(value: object, expected: object) -> None:
    """Declared fields are, but those that are hidden; other objects are named by their type."""
    assert json.loads(text_of(value)) == expected


def test_no_text_is_larger_than_what_is_kept() -> None:
    """However large, deep or circular: it is cut, and what is cut is not looked at."""
    ring: list[Any] = []
    ring.append(ring)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (ring, deep, {"k" * 10**6: ["v" * 10**7] * 50}, [0] * 10**6, "x" * 10**7):
        assert len(text_of(value)) <= 1.6 * 64 * 1024
    assert text_of(b"\xff" * 9) == "<9 bytes>"
    assert text_of("é".encode() * 2) == "éé"

    @ci.inference(record_content=True)
    def long() -> Iterator[str]:
        for _ in range(30_000):
            yield "€uro"

    ci.profile(frameworks=[])
    list(long())
    ((_, answer),) = texts(recorded())
    assert len(answer.encode()) <= 64 * 1024
    assert answer.startswith("€uro€uro")
    assert "\ufffd" not in answer


def _chunk(**delta: Any) -> openai.types.chat.ChatCompletionChunk:
    return openai.types.chat.ChatCompletionChunk.model_validate({
        "id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m",
        "choices": [{"index": 0, "delta": delta}],
    })  # fmt: skip


def test_chunks_of_language_models_give_their_texts() -> None:
    """Of OpenAI's, Anthropic's and vLLM's streams the new text counts, whole answers only once."""
    for chunks, expected in (
        ([_chunk(role="assistant"), _chunk(content="a"), _chunk(content="b")], "ab"),
        ([{"object": "text_completion", "choices": [{"text": "t"}]}], "t"),
        ([{"type": "response.created"}, {"type": "response.output_text.delta", "delta": "r"}], "r"),
        ([{"type": "message_start"}, {"type": "ping"},
          {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "c"}}], "c"),
        ([{"outputs": [{"text": "v"}]}, {"outputs": [{"text": "vl"}]}], "vl"),
        ([{"outputs": [{"text": "v"}]}, {"outputs": [{"text": "l"}]}], "vl"),
        ([{"mine": 1}, b"raw"], '{"mine":1}raw'),
    ):  # fmt: skip
        answer = AnswerText()
        for one in chunks:
            answer.add(one)
        assert answer.text() == expected
