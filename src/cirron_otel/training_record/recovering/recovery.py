"""Ending a record whose writer died.

After ``kill -9`` or a power failure the diary has no ``run_end``, and either file may end in a
half-written line. :func:`recover` keeps what is broken off beside the files and ends the record
honestly, so that it can be sealed and signed.
"""

from __future__ import annotations

import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from cirron_otel.errors import RecordDamagedError, RecordError
from cirron_otel.training_record.canonical import canonical
from cirron_otel.training_record.chain import DIARY, METRICS
from cirron_otel.training_record.line_text import TOOL, diary_line
from cirron_otel.training_record.lock import RecordLock
from cirron_otel.training_record.recovering.scanning import Part, Scan, scan
from cirron_otel.training_record.syncing import sync_directory

_CHUNK = 1024 * 1024


class Recovered(msgspec.Struct):
    """What :func:`recover` found and did.

    ``changed`` is false where the record had been recovered before. ``damaged`` lists the files
    kept beside it: ``file``, ``bytes``, ``sha256``. ``rows_missing`` is how many rows of metrics
    the diary vouches for that the disk no longer had.
    """

    directory: str
    changed: bool
    events: int
    rows: int
    steps: int
    head: str
    damaged: list[dict[str, Any]]
    rows_missing: int


def recover(directory: str | Path) -> Recovered:
    """End the record in ``directory`` with a ``run_end`` that says it was interrupted.

    The half-written ends of both files are moved to ``diary.jsonl.damaged-<n>`` and
    ``metrics.jsonl.damaged-<n>``. The ``run_end`` carries ``interrupted``, ``recovered``, the
    counts of what is there, and the digest of the metrics. A process that dies while it recovers
    leaves a record that can be recovered as before. Called again it changes nothing.

    Raises :class:`~cirron_otel.errors.RecordBusyError` while the writer lives,
    :class:`~cirron_otel.errors.RecordDamagedError` when the record was changed, and
    :class:`~cirron_otel.errors.RecordError` when it ended in order, is not there or cannot be
    written. Blocks for as long as reading both files and an fsync take.
    """
    place = Path(directory)
    if not place.is_dir():
        raise RecordError(f"{place} is no directory")
    with RecordLock.acquire(place):
        try:
            return recover_locked(place)
        except OSError as exc:
            raise RecordError(f"cannot recover the record in {place}: {exc.strerror}") from exc


def recover_locked(place: Path) -> Recovered:
    """As :func:`recover`, for a caller that holds the lock of ``place``. Raises ``OSError`` too."""
    found = scan(place)
    if found is None:
        raise RecordDamagedError(
            f"{place / DIARY} holds no whole event: there is nothing to recover; a new record with "
            "overwrite=True sets the files aside"
        )
    _sweep(place)
    if found.ended:
        if found.last.get("recovered") is not True:
            raise RecordError(f"the record in {place} ended in order: there is nothing to recover")
        return _report(place, found, found.head, _damaged(place), changed=False)
    for name, part in ((METRICS, found.metrics), (DIARY, found.diary)):
        if part.tail:
            _keep_tail(place, name, part)
    # The metrics first: the diary's run_end vouches for them, and makes the recovery final.
    if found.metrics.tail or found.metrics.unended:
        _replace(place, METRICS, found.metrics, b"")
    damaged = _damaged(place)
    body, line = _run_end(found, damaged)
    _replace(place, DIARY, found.diary, line)
    found.counts = found.counts.with_event(body)
    return _report(place, found, body["hash"], damaged, changed=True)


def _run_end(found: Scan, damaged: list[dict[str, Any]]) -> tuple[dict[str, Any], bytes]:
    counts = found.counts
    body: dict[str, Any] = {
        "seq": counts.events,
        "time": max(round(time.time(), 3), found.latest),
        "event": "run_end",
        "steps": counts.steps,
        "checks": counts.checks,
        "counts": counts.to_dict(),
        "metrics_sha256": found.metrics_sha256,
        "metrics_digest": found.metrics_sha256,
        "metrics_rows": counts.checks,
        "interrupted": True,
        "ended_by": "recovery",
        "recovered": True,
        "recovered_by": TOOL,
    }
    if "run_id" in found.first:
        body["run_id"] = found.first["run_id"]
    if damaged:
        body["damaged"] = damaged
    if found.rows_missing:
        body["rows_missing"] = found.rows_missing
    digest, line = diary_line(found.head, canonical(body))
    return {**body, "hash": digest}, line


def _report(
    place: Path, found: Scan, head: str, damaged: list[dict[str, Any]], *, changed: bool
) -> Recovered:
    counts = found.counts
    return Recovered(
        str(place), changed, counts.events, counts.checks, counts.steps, head, damaged,
        found.rows_missing,
    )  # fmt: skip


# --- files ----------------------------------------------------------------------------------------


def _keep_tail(place: Path, name: str, part: Part) -> None:
    """Copy what was broken off to ``<name>.damaged-<n>``, unless it is kept there already."""
    with (place / name).open("rb") as file:
        file.seek(part.size)
        tail = file.read()
    number = 1
    while (kept := place / f"{name}.damaged-{number}").exists():
        if kept.read_bytes() == tail:  # a recovery that died had got this far
            return
        number += 1
    spare = place / f".{name}.damaged.{os.getpid()}.tmp"
    with spare.open("xb") as file:
        file.write(tail)
        file.flush()
        os.fsync(file.fileno())
    spare.rename(kept)


def _damaged(place: Path) -> list[dict[str, Any]]:
    kept = sorted(p for name in (DIARY, METRICS) for p in place.glob(f"{name}.damaged-*"))
    return [
        {"file": p.name, "bytes": p.stat().st_size, "sha256": sha256(p.read_bytes()).hexdigest()}
        for p in kept
    ]


def _replace(place: Path, name: str, part: Part, more: bytes) -> None:
    """Put the whole part of a file, and ``more``, in the file's place in one step."""
    spare = place / f".{name}.recovered.{os.getpid()}.tmp"
    with (place / name).open("rb") as old, spare.open("xb") as new:
        left = part.size
        while left and (chunk := old.read(min(left, _CHUNK))):
            new.write(chunk)
            left -= len(chunk)
        new.write(b"\n" + more if part.unended else more)
        new.flush()
        os.fsync(new.fileno())
    spare.rename(place / name)
    sync_directory(place)


def _sweep(place: Path) -> None:
    """Remove what recoveries that died were making; the lock says that none is at work."""
    for name in (DIARY, METRICS):
        for pattern in (f".{name}.damaged.*.tmp", f".{name}.recovered.*.tmp"):
            for spare in place.glob(pattern):
                spare.unlink(missing_ok=True)
