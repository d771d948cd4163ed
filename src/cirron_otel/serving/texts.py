"""What a decorated call was given and what it gave, as text: for whoever asked for the texts.

A text is itself; anything else is JSON. Bounded: what would not be kept is not looked at. Of
objects only those are opened whose fields are declared (dataclasses, msgspec, pydantic), without
the fields that are left out of their ``repr``; everything else is named by its type. Nothing here
asks a user's object for its ``repr``, waits for a device or reads an array. What keys call a
secret (``api_key``, ``authorization``, ``headers``) is masked.
"""

from __future__ import annotations

import codecs
import dataclasses
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from cirron_otel.serving.facts import field
from cirron_otel.serving.redaction import MAX_CONTENT, Kept
from cirron_otel.setting_rules import MASK, is_secret

_MAX_DEPTH = 16
_CUT = "..."
#: Words of language models as much as of secrets.
_NO_SECRETS = frozenset({"key", "token"})
_NUMBER_CHARS = 8
_MAX_INT = 2**63


def text_of(value: object) -> str:
    """A value as text, of which at most the first 64 KiB count; nothing for None."""
    if isinstance(value, str):
        return str(value[:MAX_CONTENT])
    if isinstance(value, (bytes, bytearray, memoryview)):
        return _decoded(value)
    if value is None:
        return ""
    return msgspec.json.encode(_Plain().of(value)).decode()


def _decoded(value: bytes | bytearray | memoryview) -> str:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        return decoder.decode(bytes(value[:MAX_CONTENT]), final=len(value) <= MAX_CONTENT)
    except UnicodeDecodeError:
        return _size_of(value)


def _size_of(value: bytes | bytearray | memoryview) -> str:
    return f"<{memoryview(value).nbytes} bytes>"


class Arguments:
    """The texts of a function's calls: of the only argument, or of all of them by name."""

    __slots__ = ("_signature", "_skips")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self._signature: inspect.Signature | None = None
        #: What the object is called that a method belongs to.
        self._skips: str | None = None
        try:
            self._signature = inspect.signature(fn)
        except (TypeError, ValueError):
            return  # of some functions in C nobody knows it
        first = next(iter(self._signature.parameters), "")
        self._skips = first if first in {"self", "cls"} else None

    def text(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """The text of one call; nothing for one that the function will refuse."""
        if self._signature is None:
            given: dict[str, Any] = {**{str(i): one for i, one in enumerate(args)}, **kwargs}
        else:
            try:
                given = dict(self._signature.bind(*args, **kwargs).arguments)
            except TypeError:
                return ""
            if self._skips is not None:
                given.pop(self._skips, None)
        return text_of(next(iter(given.values())) if len(given) == 1 else given or None)


class AnswerText:
    """The text of a streamed answer, as its chunks come. Not thread-safe, as the stream."""

    __slots__ = ("_kept", "_whole")

    def __init__(self) -> None:
        self._kept = Kept()
        self._whole = ""

    def add(self, chunk: object) -> None:
        """Take one chunk."""
        if self._kept.room <= 0:
            return
        whole = _vllm_text(chunk)
        if whole is not None:
            # All of the answer so far once more, or what is new in it.
            known = self._whole
            self._whole = (whole if whole.startswith(known) else known + whole)[:MAX_CONTENT]
            return
        said = _delta(chunk)
        if said is None:
            said = text_of(chunk)
        self._kept.add(said[:MAX_CONTENT].encode("utf-8", "replace"))

    def text(self) -> str:
        """What there was."""
        return self._whole + self._kept.text()


def _vllm_text(chunk: object) -> str | None:
    outputs = None if isinstance(chunk, (str, bytes)) else field(chunk, "outputs")
    if not isinstance(outputs, list) or not outputs:
        return None
    text = field(outputs[0], "text")
    return text if isinstance(text, str) else None


def _delta(chunk: object) -> str | None:
    """The new text of a chunk of OpenAI's or Anthropic's; None: it is none of these."""
    if isinstance(chunk, (str, bytes)):
        return None
    shape = field(chunk, "object")
    if shape in {"chat.completion.chunk", "text_completion"}:
        choices = field(chunk, "choices")
        first = choices[0] if isinstance(choices, list) and choices else None
        said = field(first, "text") or field(field(first, "delta"), "content")
        return said if isinstance(said, str) else ""
    kind = field(chunk, "type")
    if not isinstance(kind, str):
        return None
    if kind.startswith("response."):
        said = field(chunk, "delta") if kind == "response.output_text.delta" else ""
    elif kind == "content_block_delta":
        said = field(field(chunk, "delta"), "text")
    elif kind.startswith(("message_", "content_block_")) or kind == "ping":
        said = ""
    else:
        return None
    return said if isinstance(said, str) else ""


class _Plain:
    """Makes JSON types of a value, until there is enough text."""

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MAX_CONTENT

    def of(self, value: object, depth: int = 0) -> Any:  # noqa: ANN401 - JSON types
        if self._left <= 0 or depth > _MAX_DEPTH:
            return _CUT
        self._left -= _NUMBER_CHARS
        if isinstance(value, dict):
            # Its own items: a subclass may do anything.
            return self._mapping(iter(list(dict.items(value))), depth)
        if isinstance(value, (list, tuple, set, frozenset)):
            return self._items(value, depth)
        declared = _declared(value)
        return self._single(value) if declared is None else self._mapping(declared, depth)

    def _single(self, value: object) -> Any:  # noqa: ANN401 - JSON types
        if isinstance(value, str):
            text = str.__getitem__(value, slice(0, max(0, self._left)))
            self._left -= len(text)
            return text
        if type(value) is int and not -_MAX_INT <= value < _MAX_INT:
            return _CUT
        if value is None or type(value) in {bool, int, float}:
            return value
        if isinstance(value, (bytes, bytearray, memoryview)):
            return _size_of(value)
        return f"<{type(value).__name__}>"

    def _mapping(self, pairs: Iterator[tuple[Any, Any]], depth: int) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for key, value in pairs:
            if self._left <= 0:
                break
            name = str(self.of(key, depth + 1))
            hidden = value is not None and name not in _NO_SECRETS and is_secret(name)
            made[name] = MASK if hidden else self.of(value, depth + 1)
        return made

    def _items(self, values: Any, depth: int) -> list[Any]:  # noqa: ANN401 - several
        made = []
        for value in values:
            if self._left <= 0:
                break
            made.append(self.of(value, depth + 1))
        return made


def _declared(value: object) -> Iterator[tuple[str, Any]] | None:
    """The fields of an object that declares them; None: it does not."""
    kind: Any = type(value)
    if isinstance(value, msgspec.Struct):
        return ((name, getattr(value, name)) for name in kind.__struct_fields__)
    if dataclasses.is_dataclass(value):
        shown = [one.name for one in dataclasses.fields(value) if one.repr]
        return ((name, getattr(value, name, None)) for name in shown)
    known = getattr(kind, "__pydantic_fields__", None) or getattr(kind, "model_fields", None)
    held = getattr(value, "__dict__", None)
    if isinstance(known, dict) and isinstance(held, dict):
        shown = [name for name, one in known.items() if getattr(one, "repr", True)]
        return ((name, held[name]) for name in shown if name in held)
    return None
