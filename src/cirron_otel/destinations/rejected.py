"""Batches that a receiver will never take, set aside with what it answered.

They lie in ``<output>/spool/rejected/`` (docs/formats/rejected.md), where no reader of the spool
looks and no forwarder sends from. What takes more than the cap leaves, oldest first.
"""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path

import msgspec

from cirron_otel.destinations.base import Destination, Parcel, Rejected, TooLarge
from cirron_otel.errors import SpoolError
from cirron_otel.spool import created_ns_of, disk_error

DIRECTORY = "rejected"
MAX_BYTES = 100_000_000
MAX_FILES = 1000

_ANSWER = ".answer.json"


class RejectedAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """What lies beside a batch that was set aside. Times are ns since the epoch."""

    destination: str
    description: str
    status: int | None
    answer: str
    rejected_ns: int
    batch_id: str
    #: The id of the file's batch, where this is a part of it.
    whole_batch_id: str
    part: tuple[int, ...] = ()


def set_aside(
    spool_directory: Path,
    parcel: Parcel,
    answer: Rejected | TooLarge,
    destination: Destination,
    *,
    now_ns: int | None = None,
) -> Path:
    """Keep ``parcel`` and the answer under ``<spool_directory>/rejected/``; returns its path.

    The batch file itself stays in the spool: other destinations still want it. Writing the same
    parcel again replaces it. Blocks as long as the disk does; raises
    :class:`~cirron_otel.errors.SpoolError` when it refuses.
    """
    directory = Path(spool_directory) / DIRECTORY
    name = f"{created_ns_of(parcel.path):020d}-{parcel.batch_id}"
    target = directory / f"{name}.{destination.name}.json"
    note = RejectedAnswer(
        destination=destination.name,
        description=destination.description,
        status=answer.status,
        answer=answer.answer,
        rejected_ns=time.time_ns() if now_ns is None else now_ns,
        batch_id=parcel.batch_id,
        whole_batch_id=parcel.whole_id,
        part=parcel.part,
    )
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # The answer first: where the batch lies, the reason does too.
        _write(directory / f"{name}.{destination.name}{_ANSWER}", msgspec.json.encode(note))
        _write(target, parcel.data)
    except OSError as exc:
        raise disk_error("set a rejected batch aside in", directory, exc) from exc
    _tidy(directory, keep=target)
    return target


def list_rejected(spool_directory: Path) -> list[tuple[Path, RejectedAnswer]]:
    """What was set aside, oldest batch first; a batch without a readable answer is passed over.

    Raises :class:`~cirron_otel.errors.SpoolError` when the directory cannot be listed.
    """
    found: list[tuple[Path, RejectedAnswer]] = []
    for path in _batches(Path(spool_directory) / DIRECTORY):
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            data = path.with_name(path.name.removesuffix(".json") + _ANSWER).read_bytes()
            found.append((path, msgspec.json.decode(data, type=RejectedAnswer)))
    return found


def _batches(directory: Path) -> list[Path]:
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208 - names are enough
    except FileNotFoundError:
        return []
    except OSError as exc:
        raise disk_error("list", directory, exc) from exc
    return [directory / n for n in names if n.endswith(".json") and not n.endswith(_ANSWER)]


def _write(target: Path, data: bytes) -> None:
    temporary = target.with_name(f"{target.name}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _tidy(directory: Path, keep: Path) -> None:
    """Remove the oldest past the cap; trouble here fails nothing."""
    with contextlib.suppress(OSError, SpoolError):
        sizes = [(path, path.stat().st_size) for path in _batches(directory)]
        total, count = sum(size for _, size in sizes), len(sizes)
        for path, size in sizes:
            if total <= MAX_BYTES and count <= MAX_FILES:
                return
            if path == keep:
                continue
            path.unlink(missing_ok=True)
            path.with_name(path.name.removesuffix(".json") + _ANSWER).unlink(missing_ok=True)
            total, count = total - size, count - 1
