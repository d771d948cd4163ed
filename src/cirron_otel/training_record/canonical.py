"""Canonical JSON, the text a diary line's hash is taken over, and what a writer may put into it.

The canonical form is what ``json.dumps(value, sort_keys=True, separators=(",", ":"))`` prints: keys
sorted by code point, no white space, ASCII, floats as ``repr``, ``NaN`` and ``Infinity`` bare.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from json import JSONEncoder

#: Deeper values are written as their text: no reader of the format goes as deep as a writer could.
MAX_DEPTH = 64
#: Python refuses to read longer integers from text (``sys.int_info.default_max_str_digits``).
_INT_BITS = 4300 * 3
#: A value's text is cut here, so that one huge object does not become one huge line.
_MAX_TEXT = 4096

#: Raises ``TypeError`` for what JSON has no form for, ``ValueError`` for integers too long to print
#: and for circular values, ``RecursionError`` for values nested too deep. Thread-safe.
canonical = JSONEncoder(sort_keys=True, separators=(",", ":")).encode


def json_value(value: object, *, depth: int = MAX_DEPTH) -> object:
    """``value`` as plain JSON data: what cannot be said in JSON becomes its text.

    Called before hashing and writing, so that the line that is read back hashes to the same. A
    tuple or set becomes a list, a key its text, NaN and the infinities ``"nan"``, ``"inf"``,
    ``"-inf"``, an integer of more digits than readers take its hexadecimal text; anything else
    ``str(value)``, cut to 4,096 characters. Never raises and never blocks, unless the value's own
    ``__str__`` blocks.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return _scalar(value)
    if depth > 0:
        try:
            if isinstance(value, Mapping):
                return {_key(key): json_value(item, depth=depth - 1) for key, item in value.items()}
            if isinstance(value, (list, tuple, AbstractSet)):
                return [json_value(item, depth=depth - 1) for item in _ordered(value)]
        except Exception:  # noqa: BLE001 - a container of the user's may raise anything
            return _text(value)
    return _text(value)


def _scalar(value: bool | float | str | None) -> object:  # noqa: FBT001 - any scalar
    """A scalar of exactly one of JSON's types: an ``IntEnum`` or a numpy float comes out plain."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        whole = int.__int__(value)
        return whole if whole.bit_length() <= _INT_BITS else hex(whole)
    if isinstance(value, float):
        number = float.__float__(value)
        return number if math.isfinite(number) else str(number)
    return str.__str__(value)


def _ordered(value: Iterable[object]) -> Iterable[object]:
    """A set in an order that is the same every time, anything else as it is."""
    return sorted(value, key=_text) if isinstance(value, AbstractSet) else value


def _key(key: object) -> str:
    """A key's text, as ``json.dumps`` writes it: ``true``, ``null``, ``1``."""
    if isinstance(key, str):
        return str.__str__(key)
    if key is None:
        return "null"
    if isinstance(key, bool):
        return "true" if key else "false"
    return _text(json_value(key, depth=0))


def _text(value: object) -> str:
    try:
        text = str(value)
    except Exception:  # noqa: BLE001 - as above
        text = f"<{type(value).__name__} without text>"
    return text if len(text) <= _MAX_TEXT else text[:_MAX_TEXT] + "..."
