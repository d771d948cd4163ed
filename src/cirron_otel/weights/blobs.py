"""The files of snapshots: ``<output>/snapshots/<span id>/<kind>.safetensors``, and their cap.

What is over the cap leaves oldest first: files that a destination has before files that one still
lacks. Many processes share the directory, so it is looked at anew before each file, and what
vanishes meanwhile is taken for normal.
"""

from __future__ import annotations

import contextlib
import os
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from cirron_otel._guard import Guard
from cirron_otel.cursors import Delivered
from cirron_otel.spool import TMP_MAX_AGE_S, Spool, created_ns_of, disk_error
from cirron_otel.weights import containers

_FOLDER = re.compile(r"[0-9a-f]{32}")
_SUFFIX = ".safetensors"
#: What has to stay free on the disk beside a file: the rows, and everybody else's needs.
_RESERVE_BYTES = 64_000_000
#: The rows of a file are in a batch that is sealed at most so long after it.
_ROWS_FOLLOW_NS = 600_000_000_000
#: How often a file is begun anew without a tensor whose values cannot be had.
_TRIES = 4
#: From this size on a file is announced.
LARGE_BYTES = 100 * 1024 * 1024


class _Folder(NamedTuple):
    """The files of one snapshot."""

    rank: int
    modified_ns: int
    path: Path
    size: int


class Written(NamedTuple):
    """A file: where it is, the names of the tensors in it, and their bytes."""

    uri: str
    names: frozenset[str]
    size: int


class Blobs:
    """The files of one output directory, as one process writes them. Any thread; never raises."""

    def __init__(
        self,
        spool: Spool,
        guard: Guard,
        *,
        max_bytes: int,
        uploads_to: Iterable[str] = (),
        rows_wait_s: float = 0.0,
    ) -> None:
        """Touch no file.

        ``uploads_to`` names the destinations that take files, ``rows_wait_s`` says how long the
        rows of a file wait in memory, in seconds.
        """
        self.directory = spool.snapshots_directory
        self.max_bytes = max_bytes
        self._spool = Spool(spool.root)
        self._guard = guard
        self._uploads_to = list(uploads_to)
        self._rows_wait_ns = int(rows_wait_s * 2e9)  # twice as long, to be sure
        self._delivered: Delivered | None = None
        # Reentrant: a signal handler of the program's may take a snapshot inside one.
        self._lock = threading.RLock()
        self.files = 0
        self.bytes = 0
        self.evicted_files = 0

    def write(
        self, span_id: str, kind: str, parts: Sequence[containers.Part], metadata: Mapping[str, str]
    ) -> Written | None:
        """Write the file of one kind of a snapshot; None where it could not be.

        A tensor whose values cannot be had is left out. Blocks as long as the disk does.
        """
        path = self.directory / span_id / f"{kind}{_SUFFIX}"
        with self._lock:
            try:
                size = sum(part.size for part in parts)
                if not self._make_room(size):
                    return None
                kept = self._write(path, parts, metadata)
                self.files += 1
            except Exception as error:  # noqa: BLE001 - the statistics are there all the same
                # What fails is mostly the disk; else a device, or a tensor of an odd kind.
                self._guard.lost("snapshot_file_not_written")
                why = error if not isinstance(error, OSError) else disk_error("write", path, error)
                self._guard.repeat_warning(
                    "snapshot_file", f"{why}; the statistics are recorded without the tensors"
                )
                with contextlib.suppress(OSError):
                    path.parent.rmdir()
                return None
        size = sum(part.size for part in kept)
        return Written(uri_of(path), frozenset(part.name for part in kept), size)

    def _write(
        self, path: Path, parts: Sequence[containers.Part], metadata: Mapping[str, str]
    ) -> Sequence[containers.Part]:
        """Write what can be written of ``parts``; returns it."""
        for _ in range(_TRIES):
            try:
                self.bytes += containers.write(path, parts, metadata)
            except containers.UnreadablePartError as error:
                odd, why = error.part, error.__cause__
                self._guard.repeat_warning(
                    "snapshot_tensor", f"{odd.name} is left out of the file of a snapshot: {why!r}"
                )
                parts = [part for part in parts if part is not odd]
            else:
                return parts
        raise RuntimeError("the values of too many tensors cannot be had")

    def _make_room(self, size: int) -> bool:
        """Have the cap and the disk leave room for a file; False, and told, where they cannot."""
        if size > self.max_bytes:
            self._guard.lost("snapshot_file_over_cap")
            self._guard.repeat_warning(
                "snapshot_cap",
                f"a snapshot's file would have {size:,} bytes, and snapshot_max_bytes is "
                f"{self.max_bytes:,}: it is not written",
            )
            return False
        folders = self._scan()
        total = sum(folder.size for folder in folders)
        for folder in sorted(folders):
            if total + size <= self.max_bytes:
                break
            total -= self._remove(folder)
        # A disk that others fill is no reason to remove what may be the only copy.
        free = _free_bytes(self.directory)
        if free is not None and free < size + _RESERVE_BYTES:
            self._guard.lost("snapshot_file_disk_full")
            self._guard.repeat_warning(
                "snapshot_disk",
                f"a snapshot's file of {size:,} bytes is not written: {free:,} bytes are free on "
                f"the disk of {self.directory}, and {_RESERVE_BYTES:,} shall stay so",
            )
            return False
        return True

    # -- eviction --------------------------------------------------------------------------------

    def _scan(self) -> list[_Folder]:
        """The folders there are; what dead writers left half-written is swept on the way."""
        try:
            with os.scandir(self.directory) as entries:
                found = [Path(e.path) for e in entries if _FOLDER.fullmatch(e.name) and e.is_dir()]
        except OSError:
            return []
        unsettled = self._unsettled()
        unsealed = time.time_ns() - self._rows_wait_ns if self._uploads_to else None
        folders = (_folder(path, unsettled, unsealed) for path in found)
        return [folder for folder in folders if folder is not None]

    def _unsettled(self) -> list[int]:
        """The times, in order, of the batches that a destination which takes files still lacks."""
        if self._delivered is None:
            self._delivered = Delivered(self._spool.root, self._uploads_to)
        if not self._uploads_to:
            return []
        lacking = self._delivered
        try:
            return [created_ns_of(path) for path in self._spool.files() if lacking(path.name)]
        except Exception:  # noqa: BLE001 - then the oldest go first
            return []

    def _remove(self, folder: _Folder) -> int:
        """Remove the files of a snapshot; the bytes that this freed."""
        gone = 0
        with contextlib.suppress(OSError):
            for path in folder.path.iterdir():
                if path.name.endswith(_SUFFIX):
                    size = path.stat().st_size
                    path.unlink()
                    gone += size
                    self.evicted_files += 1
                    if folder.rank:
                        self._guard.lost("evicted_undelivered_blobs")
            folder.path.rmdir()
        return gone


def uri_of(path: Path) -> str:
    """The address of a file as rows have it.

    Only what would end or change the path of a URI is escaped: most readers take ``file://`` off
    and open the rest.
    """
    text = str(path)
    for character in "%?#":
        text = text.replace(character, f"%{ord(character):02X}")
    return f"file://{text}"


def path_of(uri: str) -> Path | None:
    """The file of an address; None for an address elsewhere."""
    if not uri.startswith("file://"):
        return None
    raw = Path(uri.removeprefix("file://"))
    if raw.exists():
        return raw
    from urllib.parse import unquote  # noqa: PLC0415 - seldom

    return Path(unquote(str(raw)))


def _folder(path: Path, unsettled: Sequence[int], unsealed: int | None) -> _Folder | None:
    """A snapshot's folder; ``unsealed`` is the time since when rows may wait in memory."""
    size = modified = 0
    oldest_tmp = time.time() - TMP_MAX_AGE_S
    try:
        for file in path.iterdir():
            stat = file.stat()
            if file.name.endswith(_SUFFIX):
                size += stat.st_size
                modified = max(modified, stat.st_mtime_ns)
            elif file.name.endswith(f"{_SUFFIX}.tmp") and stat.st_mtime < oldest_tmp:
                file.unlink()
        if not modified:
            if path.stat().st_mtime < oldest_tmp:
                path.rmdir()
            return None
    except OSError:
        return None
    lacking = any(modified <= at <= modified + _ROWS_FOLLOW_NS for at in unsettled)
    lacking = lacking or (unsealed is not None and modified >= unsealed)
    return _Folder(int(lacking), modified, path, size)


def _free_bytes(directory: Path) -> int | None:
    """What this user may still write there; None where that cannot be told."""
    while not directory.exists() and directory != directory.parent:
        directory = directory.parent
    try:
        stat = os.statvfs(directory)
    except OSError:
        return None
    return stat.f_bavail * stat.f_frsize
