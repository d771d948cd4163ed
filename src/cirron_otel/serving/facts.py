"""What is known of one request's answer, and how it is read off objects of any library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from cirron_otel.values import Deferred

_MOST = 2**63
_MAX_TEXT = 256


class Facts:
    """What was said of one request so far. Counts are tokens of the whole request.

    Not thread-safe: it belongs to whoever consumes the result.
    """

    __slots__ = (
        "_pending", "cache_read", "cache_write", "engine", "finish_reasons", "in_parts",
        "input_tokens", "operation", "output_tokens", "provider", "reasoning", "response_id",
        "response_model", "sequences", "total_tokens",
    )  # fmt: skip

    def __init__(self) -> None:
        self.provider: str | None = None
        self.operation: str | None = None
        self.response_id: str | None = None
        self.response_model: str | None = None
        self.finish_reasons: list[str] = []
        self.input_tokens: int | None = None
        self.output_tokens: int | None = None
        self.total_tokens: int | None = None
        #: Of the input, what came from a cache of the provider's, and what was written to it.
        self.cache_read: int | None = None
        self.cache_write: int | None = None
        #: Of the output, what the model thought.
        self.reasoning: int | None = None
        #: What an engine measured, in seconds, by the attribute's name.
        self.engine: dict[str, float] = {}
        #: Of a vLLM stream: whether each output holds what is new in it, not all; None: not known.
        self.in_parts: bool | None = None
        #: And for each output its length, its first ids, and whether it grew when last seen.
        self.sequences: dict[int, tuple[int, list[Any], bool]] = {}
        #: Counts that a device still has to tell, and whether each is of the input.
        self._pending: list[tuple[Deferred, bool]] = []

    def add(self, count: int | Deferred, *, is_input: bool) -> None:
        """Add the tokens of one of several calls that made the answer."""
        if isinstance(count, Deferred):
            self._pending.append((count, is_input))
        elif is_input:
            self.input_tokens = (self.input_tokens or 0) + count
        else:
            self.output_tokens = (self.output_tokens or 0) + count

    def settle(self) -> int:
        """Take the counts that have arrived from their device; how many have not. Never waits.

        Once, at the request's end. A sum that lacks one of its parts is not said.
        """
        pending, self._pending = self._pending, []
        late = [0, 0]
        for count, is_input in pending:
            if count.ready():
                self.add(int(count.resolve()), is_input=is_input)  # type: ignore[call-overload]
            else:
                late[is_input] += 1
        if late[True]:
            self.input_tokens = None
        if late[False]:
            self.output_tokens = None
        return sum(late)

    @property
    def said_usage(self) -> bool:
        """Whether any count of tokens is known."""
        return self.output_tokens is not None or self.input_tokens is not None


def field(thing: object, name: str) -> Any:  # noqa: ANN401 - whatever it holds
    """An entry of a dict or an attribute that an object really has."""
    if thing is None:
        return None
    if isinstance(thing, dict):
        return thing.get(name)
    if isinstance(thing, msgspec.Struct):
        return getattr(thing, name, None)
    held = getattr(thing, "__dict__", None)
    if isinstance(held, Mapping) and name in held:
        return held[name]
    if any(name in vars(base) for base in type(thing).__mro__):
        return getattr(thing, name)  # a slot or a property
    return None


def count_of(value: object) -> int | None:
    """A number of tokens, where it can be one."""
    return value if type(value) is int and 0 <= value < _MOST else None


def text_of(value: object) -> str | None:
    """A short text, where it is one and not empty."""
    return value[:_MAX_TEXT] if isinstance(value, str) and value else None
