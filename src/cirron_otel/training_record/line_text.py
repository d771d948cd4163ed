"""The text of a diary line and of a metrics row, as our writers make it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from hashlib import sha256
from typing import Any

from cirron_otel.training_record.canonical import MAX_DEPTH, canonical, json_value
from cirron_otel.training_record.compiled import compiled
from cirron_otel.version import VERSION

#: ``tool`` of the records and seals made here.
TOOL = f"cirron-otel {VERSION}"

_SCALARS = frozenset({str, bool, type(None)})
_QUICK = frozenset({str, bool, type(None), int, float}).__contains__
_INT_LIMIT = 1 << 64


def _quick_encoder() -> Callable[[object], str]:
    """``canonical`` for plain data: the encoder of the standard library, made once.

    ``JSONEncoder.encode`` makes one for every call, which takes as long as encoding a line.
    """
    make = getattr(json.encoder, "c_make_encoder", None)
    if make is None:
        return canonical
    # The arguments are those of JSONEncoder.iterencode. No markers: plain data has no circles.
    encode = make(
        None, None, json.encoder.encode_basestring_ascii, None, ":", ",",
        True, False, True,  # noqa: FBT003 - sort_keys, skipkeys, allow_nan
    )  # fmt: skip
    return lambda value: "".join(encode(value, 0))


_encode_plain = _quick_encoder()


def made_line(prev: str, body: dict[str, object]) -> tuple[dict[str, object], str, bytes]:
    """A line's body as plain JSON data, its hash, and the line.

    Never raises, unless memory runs out.
    """
    if compiled is not None:
        made: tuple[str, bytes] | None = compiled.diary_line(prev, body)
        if made is not None:
            return body, *made
    plain, text = body_text(body)
    return plain, *diary_line(prev, text)


def diary_line(prev: str, text: str) -> tuple[str, bytes]:
    """The hash of a line and the line, made of its canonical body.

    ``prev`` and ``hash`` stand behind the body's own text, so that whoever checks the line by hand
    finds the hashed text in it. Raises ``UnicodeEncodeError`` where ``text`` is not canonical.
    """
    digest = sha256((prev + text).encode("ascii")).hexdigest()
    return digest, f'{text[:-1]},"prev":"{prev}","hash":"{digest}"}}\n'.encode("ascii")


def body_text(body: dict[str, object]) -> tuple[dict[str, object], str]:
    """A line's body as plain JSON data, and its canonical text.

    Reading the text gives the data back and the same text again, whatever the caller put in: see
    :func:`~cirron_otel.training_record.canonical.json_value`. Never raises, unless memory runs out.
    """
    if compiled is not None:
        quick: str | None = compiled.encode(body)
        if quick is not None:
            return body, quick
    if all(map(_QUICK, map(type, body.values()))) or is_plain(body):
        try:
            text = _encode_plain(body)
        except ValueError:  # an integer too long to print
            text = "NaN"
    else:
        text = "NaN"
    # Looked for in the text, because asking every number takes longer.
    if "NaN" in text or "Infinity" in text:
        body = {key: json_value(value) for key, value in body.items()}
        text = canonical(body)
    if "\\ud" in text:
        # Two surrogates that stand apart in the program are one character when they are read, and
        # sort and compare differently.
        body = json.loads(text)
        text = canonical(body)
    return body, text


def is_plain(value: Any, depth: int = MAX_DEPTH + 1) -> bool:  # noqa: ANN401 - any value at all
    """Whether the value comes back from JSON as it is: exact types, finite numbers, text keys."""
    kind = type(value)
    if kind in _SCALARS:
        return True
    if isinstance(value, float):
        return kind is float and math.isfinite(value)
    if isinstance(value, int):
        return kind is int and -_INT_LIMIT < value < _INT_LIMIT
    if not depth:
        return False
    if isinstance(value, dict):
        return kind is dict and all(
            type(key) is str and is_plain(item, depth - 1) for key, item in value.items()
        )
    return kind is list and all(is_plain(item, depth - 1) for item in value)
