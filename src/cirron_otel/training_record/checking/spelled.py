"""Lines as json writes them, read by the block, where the compiled reader was not built.

A block is decoded at once, written again at once, and compared. Equal text proves that no key
stands there twice and that every token is spelled canonically.
"""

from __future__ import annotations

from typing import Any

import msgspec

_LINKS = frozenset({"prev", "hash"})
_sorted = msgspec.json.Encoder(order="sorted").encode
_in_order = msgspec.json.Encoder()
_plain_lines = msgspec.json.Decoder().decode_lines
_FLOATS = msgspec.json.Decoder(list[float])


class Spelled:
    """Decodes a block of lines that are spelled as ``json.dumps`` spells them, else gives None.

    ``floats`` is for lines of many floats, of which nobody needs the canonical form.
    """

    def __init__(self, *, floats: bool) -> None:
        tokens: list[str] = []
        keep, raw = tokens.append, msgspec.Raw

        def as_written(token: str) -> msgspec.Raw:
            keep(token)
            return raw(token)

        self._tokens = tokens
        self._floats = floats
        # Where there are many floats, decoding three times is cheaper than a call for each.
        self._decode = msgspec.json.Decoder(float_hook=raw if floats else as_written).decode_lines
        self._collect = msgspec.json.Decoder(float_hook=keep).decode_lines

    def __call__(self, block: bytes) -> list[Any] | None:
        """The objects, one a line; without ``floats`` each with its body."""
        # Escapes are left to the slow way: this decoder and Python's differ in some of them.
        if not block.isascii() or b"\\" in block or b"\x7f" in block:
            return None
        self._tokens.clear()
        try:
            values = self._decode(block)
            text = _in_order.encode_lines(values)
            if self._floats:
                values = _plain_lines(block)
                self._collect(block)
        except (ValueError, RecursionError, OverflowError):
            return None
        if len(values) != block.count(b"\n") or not (text == block or _is_spaced(text, block)):
            return None
        if not all(type(value) is dict for value in values) or not canonical_floats(self._tokens):
            return None
        try:
            return values if self._floats else [_line(value) for value in values]
        except RecursionError:
            return None


def _is_spaced(text: bytes, block: bytes) -> bool:
    """Whether a block is the compact lines ``text`` with a space after each comma and colon."""
    try:
        one = msgspec.json.format(b"[%b]" % text[:-1].replace(b"\n", b","), indent=0)
    except (ValueError, RecursionError):
        return False
    return one[1:-1] == block[:-1].replace(b"\n", b", ")


def canonical_floats(tokens: list[str]) -> bool:
    """Whether every number is spelled as Python's ``repr`` spells it."""
    odd = [token for token in tokens if "e" in token or "E" in token or "0.0000" in token]
    if odd:
        if any(repr(float(token)) != token for token in odd):
            return False
        known = set(odd)
        tokens = [token for token in tokens if token not in known]
    # Between 1e-4 and 1e16 both print the shortest digits that read back as the same number.
    text = f"[{','.join(tokens)}]".encode()
    return msgspec.json.encode(_FLOATS.decode(text)) == text


def _line(value: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """A line with its floats read, and the canonical form of it without ``prev`` and ``hash``."""
    body = _sorted({name: item for name, item in value.items() if name not in _LINKS})
    return _read(value), body


def _read(value: dict[str, Any]) -> dict[str, Any]:
    """An object with its floats read; changes it in place."""
    for name, item in value.items():
        kind = type(item)
        if kind is msgspec.Raw:
            value[name] = float(item)
        elif kind is dict:
            _read(item)
        elif kind is list and item:
            value[name] = [_read({"": one})[""] for one in item]
    return value
