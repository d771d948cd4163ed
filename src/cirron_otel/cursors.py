"""Which batches a destination has: one small log per destination beside the spool.

A batch file may appear late under an old name (recovery, a disk that refused for an hour, another
rank), so "everything up to this name" would lose it. The log therefore names each batch that is
settled, one line each, and forgets those whose files are gone; it is never larger than the list of
files. Whatever is wrong with it leads to sending a batch again, which its id makes harmless, never
to leaving one out. The format is in ``docs/formats/cursors.md``.

Whoever drains a destination from a directory holds a lock (flock) on the cursor for as long as it
does; the kernel lets go of it however the process ends, and the next one takes over.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import socket
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from cirron_otel.spool import disk_error

#: What became of a batch: the receiver has it, or (a part of) it lies in ``spool/rejected/``.
Outcome = Literal["sent", "rejected"]

_HEADER = b"cirron-otel cursor 1\n"
_LINE = re.compile(rb"([0-9]{20}-[0-9a-f]{32}) (sent|rejected)\n")
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_BATCH_SUFFIX = ".json"
#: A log is rewritten when so many lines came since, and as many again as it had then.
_LINES_BEFORE_COMPACTION = 1000
#: How old the knowledge may be by which eviction chooses.
_REFRESH_S = 1.0


def cursors_directory(root: Path) -> Path:
    """Where the cursors of an output directory lie."""
    return root / "cursors"


def _log_path(root: Path, name: str) -> Path:
    safe = _UNSAFE.sub("_", name)[:100].lstrip(".") or "destination"
    return cursors_directory(root) / f"{safe}.log"


class Cursor:
    """What one destination has of one spool, as its only drainer sees it.

    Used by one thread at a time. Before :meth:`take` has said yes nothing else may be called but
    :meth:`release` and :meth:`close_in_child`.
    """

    def __init__(self, root: Path, name: str) -> None:
        """Touch no file."""
        self.path = _log_path(root, name)
        self.lock_path = self.path.with_suffix(".lock")
        #: File names of batches that need not be sent again, with what became of them.
        self.settled: dict[str, Outcome] = {}
        #: Lines that the disk refused, to be written with the next.
        self._unsaved: list[bytes] = []
        self._lock_fd: int | None = None
        self._log_fd: int | None = None
        self._lines = 0
        self._lines_at_compaction = 0
        self._pid = os.getpid()

    @property
    def held(self) -> bool:
        """Whether this object drains: nobody else does, on a file system that has flock."""
        return self._lock_fd is not None

    def take(self) -> bool:
        """Become the one who drains, if nobody else is; then read the log. Never waits for anybody.

        Raises :class:`~cirron_otel.errors.SpoolError` when the directory cannot be used.
        """
        if self.held:
            return True
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            fd = os.open(self.lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            raise disk_error("make the cursor", self.lock_path, exc) from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return False
        except OSError:
            pass  # no flock here: two drainers would send twice, under the same ids
        self._lock_fd = fd
        try:
            self._sign(fd)
            self._open()
        except OSError as exc:
            self.release()
            raise disk_error("use the cursor", self.path, exc) from exc
        return True

    def holder(self) -> str:
        """Who drains, by what the lock file says, for people; empty where it says nothing."""
        try:
            said = msgspec.json.decode(self.lock_path.read_bytes(), type=dict[str, str | int])
            return f"process {said['pid']} on {said['host']}"
        except (OSError, msgspec.DecodeError, UnicodeDecodeError, KeyError):
            return ""

    @staticmethod
    def _sign(fd: int) -> None:
        """Say in the lock file who holds it, for people."""
        signature = msgspec.json.encode({"host": socket.gethostname(), "pid": os.getpid()})
        with contextlib.suppress(OSError):  # a full disk
            os.ftruncate(fd, 0)
            os.pwrite(fd, signature, 0)

    def _open(self) -> None:
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            data = b""
        self.settled, clean = _parse(data)
        self._lines = data.count(b"\n")
        self._lines_at_compaction = len(self.settled)
        if not clean:
            # A torn or foreign line would swallow the next one written.
            self._try_to_rewrite()
        else:
            self._log_fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)

    def settle(self, file_name: str, outcome: Outcome) -> bool:
        """Note that a batch need not be sent again; one write, no fsync.

        False where the disk refuses: it is remembered, and written with the next one.
        """
        self.settled[file_name] = outcome
        stem = file_name.removesuffix(_BATCH_SUFFIX)
        self._unsaved.append(f"{stem} {outcome}\n".encode())
        return self.save()

    def save(self) -> bool:
        """Write what the disk refused before; True when nothing is left to write."""
        if not self._unsaved or not self.held:
            return not self._unsaved
        if self._log_fd is None:  # the disk was full, or is
            self._try_to_rewrite()
            return not self._unsaved
        data = b"".join(self._unsaved)
        try:
            written = os.write(self._log_fd, data)
        except OSError:
            return False
        if written < len(data):  # a full disk: nothing may follow a torn line
            os.close(self._log_fd)
            self._log_fd = None
            self._try_to_rewrite()
            return not self._unsaved
        self._lines += len(self._unsaved)
        self._unsaved.clear()
        return True

    def forget(self, present: Collection[str]) -> None:
        """Drop the batches whose files are gone; rewrites the log now and then.

        ``present`` are the names of all files in the spool, listed after the last
        :meth:`settle`. A rewrite that fails changes nothing.
        """
        if len(self.settled) > len(present):
            self.settled = {name: how for name, how in self.settled.items() if name in present}
        grown = self._lines - self._lines_at_compaction
        if grown > max(_LINES_BEFORE_COMPACTION, self._lines_at_compaction):
            self.settled = {name: how for name, how in self.settled.items() if name in present}
            self._try_to_rewrite()

    def _try_to_rewrite(self) -> None:
        with contextlib.suppress(OSError):
            self._rewrite()

    def _rewrite(self) -> None:
        """The whole log anew, by a rename: a reader or a crash sees the old one or the new one."""
        tmp = self.path.with_suffix(".log.tmp")
        content = b"".join(
            f"{name.removesuffix(_BATCH_SUFFIX)} {how}\n".encode()
            for name, how in self.settled.items()
        )
        fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            _write_all(fd, _HEADER + content)
            tmp.replace(self.path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                tmp.unlink()
            raise
        before, self._log_fd = self._log_fd, fd
        if before is not None:
            os.close(before)
        self._unsaved.clear()
        self._lines = self._lines_at_compaction = len(self.settled)

    def release(self) -> None:
        """Let somebody else drain. Never raises; calling it twice is harmless."""
        if os.getpid() == self._pid:
            self.save()
        self.close_in_child()

    def close_in_child(self) -> None:
        """Close a lock inherited by fork: the parent keeps it. Never raises.

        A child that does not call this keeps its dead parent's place.
        """
        # Closing only: LOCK_UN would free the lock for the parent too, flocks are shared.
        for fd in (self._lock_fd, self._log_fd):
            if fd is not None:
                with contextlib.suppress(OSError):
                    os.close(fd)
        self._lock_fd = self._log_fd = None


class CursorReader:
    """The same for somebody who does not drain: follows the log as it grows. Never raises."""

    def __init__(self, root: Path, name: str) -> None:
        """Touch no file."""
        self.path = _log_path(root, name)
        self.settled: set[str] = set()
        self._inode = -1
        self._offset = 0

    def refresh(self) -> None:
        """Take in what was written since the last call."""
        try:
            with self.path.open("rb") as log:
                stat = os.fstat(log.fileno())
                if stat.st_ino != self._inode or stat.st_size < self._offset:
                    self._inode, self._offset, self.settled = stat.st_ino, 0, set()
                log.seek(self._offset)
                data = log.read()
        except OSError:
            self._inode, self._offset, self.settled = -1, 0, set()
            return
        if self._offset == 0 and not data.startswith(_HEADER):
            return
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        self.settled.update(_names(_LINE.finditer(whole)))

    @property
    def in_use(self) -> bool:
        """Whether somebody drains by this cursor now. Takes a shared lock for an instant."""
        try:
            fd = os.open(self.path.with_suffix(".lock"), os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return False
        try:
            fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        else:
            return False
        finally:
            os.close(fd)


class Delivered:
    """Ranks batch files for eviction: 0 for what every destination has, 1 for what one still lacks.

    Counted are the destinations named (those of this process) and every cursor of the directory
    that somebody drains by now, such as a sidecar's. Where there is none, everything is 0. Reads
    the cursors at most once a second; for one thread.
    """

    def __init__(self, root: Path, names: Iterable[str] = ()) -> None:
        """Touch no file. ``names`` are names of destinations."""
        self._root = root
        self._own = [CursorReader(root, name) for name in names]
        self._others: dict[Path, CursorReader] = {}
        self._readers: Sequence[CursorReader] = ()
        self._refreshed: float | None = None

    def __call__(self, file_name: str) -> int:
        """The rank of a batch file."""
        now = time.monotonic()
        if self._refreshed is None or now - self._refreshed >= _REFRESH_S:
            self._refresh()
            self._refreshed = time.monotonic()
        return int(any(file_name not in reader.settled for reader in self._readers))

    def _refresh(self) -> None:
        own = {reader.path for reader in self._own}
        try:
            logs = [p for p in cursors_directory(self._root).glob("*.log") if p not in own]
        except OSError:
            logs = []
        others = {p: self._others.get(p) or CursorReader(self._root, p.stem) for p in logs}
        self._others = {path: reader for path, reader in others.items() if reader.in_use}
        self._readers = [*self._own, *self._others.values()]
        for reader in self._readers:
            reader.refresh()


def _parse(data: bytes) -> tuple[dict[str, Outcome], bool]:
    """The settled batches of a log, and whether it holds nothing else and ends with a line."""
    if not data.startswith(_HEADER):
        return {}, False
    settled: dict[str, Outcome] = {}
    length = len(_HEADER)
    for match in _LINE.finditer(data, length):
        name = match[1].decode() + _BATCH_SUFFIX
        settled[name] = "sent" if match[2] == b"sent" else "rejected"
        length += len(match[0])
    return settled, length == len(data)


def _names(matches: Iterable[re.Match[bytes]]) -> Iterable[str]:
    return (match[1].decode() + _BATCH_SUFFIX for match in matches)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
