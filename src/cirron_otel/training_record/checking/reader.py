"""Reading a file of JSON lines that anybody may have written, in constant memory.

What comes out is what ``json.loads`` makes of each line, with what is wrong with the line beside
it. Almost every line of a real record is written as ``json.dumps`` writes it, and is read quickly:
by the compiled reader, or as ``spelled.py`` does where that was not built. Any other line is read
slowly.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, Protocol, cast

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import MAX_LINE
from cirron_otel.training_record.compiled import compiled

_BLOCK = 128 * 1024
_TRIES = 100


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
    """One line: what stands on it, and what is wrong with it."""

    number: int
    raw: bytes
    value: dict[str, Any]
    flaws: Flaws | None
    #: The canonical form of ``value`` without ``prev`` and ``hash``, where it is known already.
    body: bytes | None = None


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

    ``seen`` gets all bytes of the file, in pieces, before the lines they hold come out. Many floats
    a line are read more quickly with ``floats``. Raises ``OSError`` only.
    """
    decode = _decoder(floats=floats)
    number = 1
    for block in blocks(file, seen):
        if block is None:
            yield too_long(number)
            number += 1
            continue
        raws = block.split(b"\n")
        unended = raws.pop()
        values = decode(block) or _each(decode, raws)
        for raw, value in zip(raws, values, strict=True):
            if value is None:
                yield careful_line(number, raw)
            elif type(value) is tuple:
                yield Line(number, raw, value[0], None, value[1])
            else:
                yield Line(number, raw, value, None)
            number += 1
        if unended.strip():
            yield unended_line(number, unended)


def _decoder(*, floats: bool) -> Callable[[bytes], Any]:
    """What gives the objects of whole lines, or the object and the body of each.

    None for a line, or for all, where it is not sure.
    """
    if compiled is not None:
        return cast("Callable[[bytes], Any]", compiled.Reader().values)
    # Only here: it needs msgspec, which takes as long to load as the rest of a verifier.
    from cirron_otel.training_record.checking.spelled import Spelled  # noqa: PLC0415

    return Spelled(floats=floats)


def _each(decode: Callable[[bytes], Any], raws: Sequence[bytes]) -> Iterator[Any]:
    """The same line by line, where a block holds one that cannot be decoded quickly."""
    for raw in raws:
        values = decode(raw + b"\n")
        yield values[0] if values else None


def too_long(number: int) -> Line:
    """What stands for a line that is longer than any may be."""
    return Line(number, b"", {}, Flaws(error=f"longer than {MAX_LINE >> 20} MiB"))


def unended_line(number: int, raw: bytes) -> Line:
    """The last line of a file, where it has no line end."""
    value, flaws = slow(raw)
    return Line(number, raw, value, flaws._replace(unended=True))


def careful_line(number: int, raw: bytes) -> Line:
    """A line that may be anything."""
    if raw.strip():
        return Line(number, raw, *slow(raw))
    return Line(
        number, raw, {}, Flaws(spelling="white space" if raw.strip(b"\r") else "a blank line")
    )


def is_blank(line: Line) -> bool:
    """Whether there is nothing on the line: readers pass it over."""
    return line.flaws is not None and line.flaws.error is None and not line.raw.strip()


def blocks(file: Readable, seen: Callable[[bytes], object] | None) -> Iterator[bytes | None]:
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
