"""JSON lines read for show: one at a time, whatever is in them.

Verification is strict; reading is not. A line that is no JSON object is counted and passed over, a
last line without its end is told apart (a writer died there), and no line, however long or deep,
costs more than the bytes of the longest one that a record may have.
"""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import MAX_LINE
from cirron_otel.training_record.compiled import compiled


def _decoder() -> Callable[[bytes], object]:
    """What reads an object quickly; raises ``ValueError``, or gives None, for what it does not."""
    if compiled is not None:
        values = compiled.Reader().values
        return lambda raw: values(raw if raw.endswith(b"\n") else raw + b"\n")[0]
    # Only here: it takes longer to load than anything else that reads a record.
    import msgspec  # noqa: PLC0415

    return msgspec.json.Decoder().decode


_decode = _decoder()


@dataclass(slots=True)
class Reading:
    """What came of reading one file."""

    #: Lines that hold an object.
    lines: int = 0
    #: Lines that do not, and the number (from 1) of the first of them.
    bad: int = 0
    first_bad: int | None = None
    #: The last line has no end and is no object: its writer died while writing it.
    torn: bool = False


def objects(path: Path, reading: Reading, *, follow: bool = True) -> Iterator[dict[str, object]]:
    """The objects of a file's lines in order; ``reading`` is filled in meanwhile.

    Raises :class:`~cirron_otel.errors.RecordError` when the file cannot be opened or is no regular
    file (with ``follow=False`` also when it is a link). Reads the disk; never waits for a pipe.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | (0 if follow else os.O_NOFOLLOW)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise RecordError(f"cannot read {path}: {error.strerror or error}") from error
    with os.fdopen(descriptor, "rb") as file:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RecordError(f"cannot read {path}: it is not a regular file")
        number = 0
        while raw := file.readline(MAX_LINE):
            number += 1
            whole = raw.endswith(b"\n")
            if not whole and len(raw) == MAX_LINE:
                while (more := file.readline(MAX_LINE)) and not more.endswith(b"\n"):
                    pass
                found = None
            elif raw.isspace():
                continue
            else:
                found = parse(raw)
            if found is not None:
                reading.lines += 1
                yield found
                continue
            if not whole and len(raw) < MAX_LINE:
                reading.torn = True
            reading.bad += 1
            if reading.first_bad is None:
                reading.first_bad = number


def parse(raw: bytes) -> dict[str, object] | None:
    """One line's object, bare ``NaN`` and bytes that are no UTF-8 included; else None."""
    try:
        found = _decode(raw)
    except (ValueError, RecursionError):
        found = None
    if found is None:
        # Bare NaN and Infinity are in records of other writers; the standard library reads them.
        try:
            found = json.loads(raw.decode("utf-8-sig", "replace"))
        except (ValueError, RecursionError):
            return None
    return found if isinstance(found, dict) else None


def number(value: object) -> float | None:
    """A JSON number as a float, NaN and infinities included; None for anything else."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf


def whole(value: object) -> int | None:
    """A JSON integer of a size that can be counted to; None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) > 2**53:
        return None
    return value


def text(value: object, limit: int = 200) -> str | None:
    """A JSON string, cut to ``limit`` characters; None for anything else."""
    if not isinstance(value, str):
        return None
    return value if len(value) <= limit else value[: limit - 1] + "\N{HORIZONTAL ELLIPSIS}"


def strings(value: object, limit: int = 64) -> list[str]:
    """The strings of a list, the first ``limit`` of them."""
    if not isinstance(value, list):
        return []
    return [item for item in (text(entry) for entry in value[:limit]) if item is not None]
