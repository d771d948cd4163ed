"""Reading a file of JSON lines that anybody may have written, in constant memory.

What comes out is what ``json.loads`` makes of each line, with what is wrong with the line beside
it. Almost every line of a real record is written as ``json.dumps`` writes it, and such lines are
read by the block: decoded at once, written again at once, and compared. Equal text proves that no
key stands there twice and that every token is spelled canonically, so the canonical form is the
fast encoder's. A block where that does not hold is read line by line, slowly.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

import msgspec

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import MAX_LINE

_BLOCK = 128 * 1024
_TRIES = 100

#: Sorted and compact: the canonical form of what :func:`read_lines` gives without flaws.
fast_canonical = msgspec.json.Encoder(order="sorted").encode
_in_order = msgspec.json.Encoder()
_plain_lines = msgspec.json.Decoder().decode_lines
_FLOATS = msgspec.json.Decoder(list[float])


class Flaws(NamedTuple):
    """What a line that was read the slow way has wrong with it; all empty for none of it."""

    #: Why the line is no JSON object.
    error: str | None = None
    #: A key that stands in one object twice.
    duplicate: str | None = None
    #: What no writer of this format does, or what readers other than Python's stumble over.
    spelling: str | None = None
    portable: str | None = None
    #: The last line of the file, without a line end.
    unended: bool = False


class Line(NamedTuple):
    """One line. Where ``flaws`` is None, floats are ``msgspec.Raw``: ``float(value)`` reads one."""

    number: int
    raw: bytes
    value: dict[str, Any]
    flaws: Flaws | None


class NotRegularError(RecordError):
    """The file is a link, a directory, a device or a pipe; the message says which."""


def open_regular(path: Path, *, follow: bool = False) -> BinaryIO:
    """Open a regular file for reading, without waiting for a pipe and without following a link.

    Raises :class:`NotRegularError` where it is something else, ``OSError`` where it cannot be
    opened.
    """
    if not follow and path.is_symlink():
        raise NotRegularError("is a symbolic link")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        fd = os.open(path, flags)
    except OSError:
        # A socket cannot be opened at all.
        if path.exists() and not path.is_file():
            raise NotRegularError("is not a regular file") from None
        raise
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise NotRegularError("is not a regular file")
    return os.fdopen(fd, "rb", buffering=0)


class Readable(Protocol):
    """What lines are read from."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; none at the end."""


class _UpTo:
    """The bytes that a file has by now, however it grows."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self._file = file
        self._left = size

    def read(self, size: int, /) -> bytes:
        data = self._file.read(min(size, self._left))
        self._left -= len(data)
        return data


def as_of_now(diary: BinaryIO, metrics: BinaryIO) -> tuple[Readable, Readable]:
    """Both files as they are at one moment, although somebody may be writing them.

    Read one after the other, a line could vouch for a row that was not there yet when the rows were
    read, and a row could call for an event that was not there.
    """
    for _ in range(_TRIES):
        before, rows, after = (os.fstat(file.fileno()).st_size for file in (diary, metrics, diary))
        if before == after:
            break
    return _UpTo(diary, after), _UpTo(metrics, rows)


def read_lines(
    file: Readable, seen: Callable[[bytes], object] | None = None, *, floats: bool = False
) -> Iterator[Line]:
    """Every line, in order, blank ones too (:func:`is_blank`); blocks on the disk.

    ``seen`` gets all bytes of the file, in pieces, before the lines they hold come out. With
    ``floats`` numbers come as floats, and nobody needs a canonical form. Raises ``OSError`` only.
    """
    decode = _Fast(floats=floats)
    number = 1
    for block in _blocks(file, seen):
        if block is None:
            yield Line(number, b"", {}, Flaws(error=f"longer than {MAX_LINE >> 20} MiB"))
            number += 1
            continue
        values = decode(block)
        raws = block.split(b"\n")
        if values is not None:
            for raw, value in zip(raws, values, strict=False):
                yield Line(number, raw, value, None)
                number += 1
            continue
        unended = raws.pop()
        for raw in raws:
            yield from _one(decode, number, raw)
            number += 1
        if unended.strip():
            value, flaws = slow(unended)
            yield Line(number, unended, value, flaws._replace(unended=True))


def _one(decode: _Fast, number: int, raw: bytes) -> Iterator[Line]:
    values = decode(raw + b"\n")
    if values is not None:
        yield Line(number, raw, values[0], None)
    elif raw.strip():
        yield Line(number, raw, *slow(raw))
    elif raw.strip(b"\r"):
        yield Line(number, raw, {}, Flaws(spelling="white space"))
    else:
        yield Line(number, raw, {}, Flaws(spelling="a blank line"))


def is_blank(line: Line) -> bool:
    """Whether there is nothing on the line: readers pass it over."""
    return line.flaws is not None and line.flaws.error is None and not line.raw.strip()


def _blocks(file: Readable, seen: Callable[[bytes], object] | None) -> Iterator[bytes | None]:
    """Whole lines, many at a time; None for a line that is too long; last what has no line end."""
    rest = b""
    skipping = False
    while chunk := file.read(_BLOCK):
        if seen is not None:
            seen(chunk)
        if skipping:
            end = chunk.find(b"\n")
            if end < 0:
                continue
            skipping, chunk = False, chunk[end + 1 :]
            yield None
        rest += chunk
        cut = rest.rfind(b"\n") + 1
        if cut:
            yield rest[:cut]
            rest = rest[cut:]
        if len(rest) > MAX_LINE:
            skipping, rest = True, b""
    if skipping:
        yield None
    elif rest:
        yield rest


class _Fast:
    """Decodes a block of lines that are spelled as ``json.dumps`` spells them, else gives None."""

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

    def __call__(self, block: bytes) -> list[dict[str, Any]] | None:
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
        if len(values) != block.count(b"\n"):
            return None
        if text != block and not _is_spaced(text, block):
            return None
        if not all(type(value) is dict for value in values) or not canonical_floats(self._tokens):
            return None
        return cast("list[dict[str, Any]]", values)


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


class _Pairs:
    """Makes objects of their members as ``json.loads`` does and remembers a repeated key."""

    def __init__(self) -> None:
        self.duplicate: str | None = None

    def __call__(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs) and self.duplicate is None:
            seen: set[str] = set()
            self.duplicate = next(
                key
                for key, _ in pairs
                if key in seen or seen.add(key)  # type: ignore[func-returns-value]
            )
        return made


def slow(raw: bytes) -> tuple[dict[str, Any], Flaws]:
    """What ``json.loads`` makes of one line, and everything that is wrong with it. Never raises."""
    text = raw.decode("utf-8", "replace")
    pairs = _Pairs()
    bare: list[str] = []

    def constant(token: str) -> float:
        bare.append(token)
        return float(token)

    try:
        value = json.loads(text, object_pairs_hook=pairs, parse_constant=constant)
        if not isinstance(value, dict):
            return {}, Flaws(error=f"holds {_name(value)} where an object must be")
        styles = {json.dumps(value), json.dumps(value, separators=(",", ":"))}
    except RecursionError:
        return {}, Flaws(error="is nested too deep")
    except ValueError as exc:
        return {}, Flaws(error=_reason(exc))
    spelling = None
    if pairs.duplicate is None and text.rstrip("\r") not in styles:
        spelling = "bytes that are no UTF-8" if "\ufffd" in text else "unusual spelling"
    return value, Flaws(
        duplicate=pairs.duplicate,
        spelling=spelling,
        portable=bare[0] if bare else None,
    )


def _reason(exc: ValueError) -> str:
    if isinstance(exc, json.JSONDecodeError):
        return f"is no JSON ({exc.msg} at character {exc.pos + 1})"
    return "holds an integer that is too long"


def _name(value: object) -> str:
    names = {list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")
