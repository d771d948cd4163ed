"""Reading back a record that nobody ended: how far it is whole, and whether it was changed.

A process that dies leaves at most one half-written line at the end of each file. That is told
apart from a changed record: what is whole must be chained, and the digests that rows and lines
carry must fit the bytes before them. Both files are read once, side by side, in constant memory.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from cirron_otel.errors import RecordDamagedError, RecordError
from cirron_otel.training_record.chain import DIARY, GENESIS, METRICS, body_of, line_hash
from cirron_otel.training_record.counts import Counts

#: No line of a record is longer; a longer one is damage.
_MAX_LINE = 64 * 1024 * 1024
_PEEK = 1024 * 1024


class Part(msgspec.Struct):
    """How much of a file is whole, in bytes, and how much behind that is not."""

    size: int = 0
    tail: int = 0
    #: The last whole line lacks only its line end.
    unended: bool = False


class Scan(msgspec.Struct):
    """What the whole part of a record says."""

    first: dict[str, Any]
    last: dict[str, Any]
    diary: Part
    metrics: Part
    #: Of the whole part of the metrics file.
    metrics_sha256: str
    #: Rows that the diary vouches for and the file no longer has.
    rows_missing: int
    #: The latest ``time`` of any line, Unix seconds.
    latest: float
    counts: Counts

    @property
    def head(self) -> str:
        """The hash of the last whole line."""
        return str(self.last["hash"])

    @property
    def ended(self) -> bool:
        """Whether the record has its ``run_end``."""
        return self.last.get("event") == "run_end"


def scan(directory: Path) -> Scan | None:
    """Read the record in ``directory``; None where the diary holds no whole line.

    Raises :class:`~cirron_otel.errors.RecordDamagedError` when it was changed, and
    :class:`~cirron_otel.errors.RecordError` when its files cannot be read. Blocks for as long as
    reading both files takes.
    """
    for path in (directory / DIARY, directory / METRICS):
        if path.is_symlink() or not path.is_file():
            raise RecordError(f"{path} is no regular file: there is no whole record here")
    try:
        with (directory / DIARY).open("rb") as diary, (directory / METRICS).open("rb") as metrics:
            return _Reader(_Lines(diary, DIARY), _Rows(_Lines(metrics, METRICS))).read()
    except OSError as exc:
        raise RecordError(f"cannot read the record in {directory}: {exc.strerror}") from exc


def peek(directory: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The first and the last line of a diary, unchecked; empty where there is none to be read."""
    try:
        with (directory / DIARY).open("rb") as file:
            first = _object(file.readline(_PEEK)) or {}
            file.seek(max(0, file.seek(0, os.SEEK_END) - _PEEK))
            last = file.read().splitlines()[-1:]
            return first, (_object(last[0]) or {}) if last else {}
    except (OSError, RecordDamagedError):
        return {}, {}


class _Lines:
    """The whole lines of a file, each with its bytes; knows afterwards what was left over."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name
        self.part = Part()

    def next(self) -> tuple[bytes, dict[str, Any] | None] | None:
        """The next line, its object None where it is blank; None at the end of what is whole."""
        raw = self._file.readline(_MAX_LINE)
        if not raw:
            return None
        found = _object(raw)
        if found is None and not (raw.isspace() and raw.endswith(b"\n")):
            self._leave_over(len(raw))
            return None
        self.part.size += len(raw)
        self.part.unended = not raw.endswith(b"\n")
        return raw, found

    def _leave_over(self, count: int) -> None:
        """What is broken at the end was broken off; before whole lines it was changed."""
        while raw := self._file.readline(_MAX_LINE):
            count += len(raw)
            if _object(raw) is not None:
                raise RecordDamagedError(
                    f"{self._name}: what follows byte {self.part.size} is no JSON object, and "
                    "whole lines come after it; the file was changed, not broken off"
                )
        self.part.tail = count


class _Rows:
    """The metrics file, read as far as the diary's digests need it."""

    def __init__(self, lines: _Lines) -> None:
        self._lines = lines
        self._sha = sha256()
        self.count = 0
        self.counts = Counts()
        self.missing = 0

    @property
    def part(self) -> Part:
        return self._lines.part

    @property
    def digest(self) -> str:
        return self._sha.hexdigest()

    def check(self, line: Mapping[str, Any]) -> None:
        """Hold a diary line's ``metrics_rows`` and ``metrics_digest`` against the rows."""
        wanted, digest = line.get("metrics_rows"), line.get("metrics_digest")
        if type(wanted) is not int or not isinstance(digest, str):
            return
        while self.count < wanted and self._advance():
            pass
        if self.count < wanted:
            self.missing = wanted - self.count
        elif self.count == wanted and self.digest != digest:
            raise RecordDamagedError(
                f"{METRICS}: the first {wanted} rows are not those that event {line.get('seq')} "
                "vouches for; the file was changed"
            )

    def finish(self) -> None:
        """Read the rest."""
        while self._advance():
            pass

    def _advance(self) -> bool:
        found = self._lines.next()
        if found is None:
            return False
        raw, row = found
        if row is not None:
            digest = row.get("digest")
            if isinstance(digest, str) and digest != self.digest:
                raise RecordDamagedError(
                    f"{METRICS}: the digest of row {self.count} does not fit the bytes before it; "
                    "the file was changed"
                )
            self.counts = self.counts.with_row(row)
            self.count += 1
        self._sha.update(raw)
        if self.part.unended:
            self._sha.update(b"\n")  # as it will be when the record is ended
        return True


class _Reader:
    """Both files, the diary leading."""

    def __init__(self, lines: _Lines, rows: _Rows) -> None:
        self._lines = lines
        self._rows = rows

    def read(self) -> Scan | None:
        counts, latest = Counts(), 0.0
        first: dict[str, Any] = {}
        last: dict[str, Any] = {}
        while (found := self._lines.next()) is not None:
            line = found[1]
            if line is None:
                continue
            _check(line, counts.events, last)
            self._rows.check(line)
            counts = counts.with_event(line)
            first, last = first or line, line
            time = line.get("time")
            latest = max(latest, time) if isinstance(time, (int, float)) else latest
        if not first:
            return None
        self._rows.finish()
        return Scan(
            first, last, self._lines.part, self._rows.part, self._rows.digest,
            self._rows.missing, latest, counts.plus(self._rows.counts),
        )  # fmt: skip


def _check(line: Mapping[str, Any], number: int, last: Mapping[str, Any]) -> None:
    prev = last["hash"] if last else GENESIS
    if last.get("event") == "run_end":
        raise RecordDamagedError(f"{DIARY}: event {number} comes after the record's run_end")
    if type(line.get("seq")) is not int or line["seq"] != number or line.get("prev") != prev:
        raise RecordDamagedError(
            f"{DIARY}: event {number} does not follow from the one before it; lines were removed, "
            "inserted or put in another order"
        )
    if line.get("hash") != line_hash(prev, body_of(line)):
        raise RecordDamagedError(f"{DIARY}: event {number} was changed after it was written")
    if (number == 0) != (line.get("event") == "run_start"):
        raise RecordDamagedError(f"{DIARY}: event {number} is {line.get('event')!r}")


def _object(raw: bytes) -> dict[str, Any] | None:
    """The JSON object on a line, None if it is none."""
    try:
        found = json.loads(raw, object_pairs_hook=_once)
    except RecordDamagedError:
        raise
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise RecordDamagedError("a line says a key twice, which no writer does; it was changed")
    return found
