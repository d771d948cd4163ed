"""Which writers live, and closing what dead ones left open.

A process that writes holds an flock on ``<root>/run/<host>-<pid>-<start>.lock`` for as long as it
lives; the kernel lets go of it however the process ends. The same name stands as ``writer`` in its
batches. So a lock file that nobody holds belongs to a dead writer, and the scopes it still had
open (batch key ``open``) will never be closed by it: :func:`recover` closes them, in one more
batch under the dead writer's name.

**When did they end?** Nobody knows; they were open when the writer's last batch was made. A batch
without the key ``open`` says that the set has not changed, so the last batch of the writer, with
the key or without, names every scope of the last set that no span row closed. Its ``created_ns``
is their end, and since all get the same one, no scope outlives its parent.

Two recoverers make the same file with the same bytes, and each holds the dead writer's lock while
it works, so only one of them works at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import UNSET

from cirron_otel.batch import SCHEMA_VERSION, Batch, SpanOtel, SpanRecord, decode, encode
from cirron_otel.errors import SpoolError, SpoolFormatError
from cirron_otel.spool import TMP_MAX_AGE_S, Spool, created_ns_of, disk_error

WriterState = Literal["alive", "dead", "unknown"]

#: The status message of a scope whose process died while it was open.
DIED = "the process died"

_SUFFIX = ".lock"
_TMP_SUFFIX = ".lock.tmp"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_WRITER = re.compile(r"(?!\.)[A-Za-z0-9._-]{1,180}-[0-9]+-(?P<start>[0-9]+)")
#: Somebody who asks for the state of a lock holds it for microseconds; a claim tries again.
_CLAIM_ATTEMPTS = 5
_CLAIM_PAUSE_S = 0.002


def safe_host(host: str) -> str:
    """A host's name as it stands in the names of its writers."""
    return _UNSAFE.sub("_", host)[:120].lstrip(".") or "host"


def host_of(writer: str) -> str:
    """The host in a writer's name, ``<host>-<pid>-<start_ns>``; hosts may have hyphens."""
    return writer.rsplit("-", 2)[0]


class WriterLock:
    """The lock of one living writer. Made by :meth:`acquire`; used by one thread at a time.

    ``name`` is what goes into ``Batch.writer``. ``held`` is false where the file system has no
    flock: there is then no lock file either, and readers go by the age of the last batch.
    """

    def __init__(self, path: Path, fd: int | None) -> None:
        """Take over an open, locked descriptor, or none."""
        self.path = path
        self.name = path.name.removesuffix(_SUFFIX)
        self._fd = fd
        self._pid = os.getpid()

    @property
    def held(self) -> bool:
        """Whether this object keeps the lock."""
        return self._fd is not None

    @classmethod
    def acquire(
        cls,
        run_directory: Path,
        *,
        host: str,
        pid: int,
        start_ns: int,
        details: Mapping[str, object] | None = None,
    ) -> WriterLock:
        """Make and hold ``<host>-<pid>-<start_ns>.lock``; never waits for anybody.

        The file holds a JSON object: host, pid, start_ns, and what ``details`` adds (such as
        ``flush_interval``, in seconds). It gets its name only when it is locked and written, so
        no one ever sees a living writer's lock free. Raises :class:`SpoolError` when the
        directory cannot be used.
        """
        path = run_directory / f"{safe_host(host)}-{pid}-{start_ns}{_SUFFIX}"
        tmp = path.with_name(path.name.removesuffix(_SUFFIX) + _TMP_SUFFIX)
        content = {"host": host, "pid": pid, "start_ns": start_ns, **(details or {})}
        try:
            run_directory.mkdir(parents=True, exist_ok=True)
            fd = os.open(tmp, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        except OSError as exc:
            raise disk_error("make the lock", path, exc) from exc
        try:
            if not _flock(fd, fcntl.LOCK_EX):
                tmp.unlink(missing_ok=True)
                os.close(fd)
                return cls(path, None)
            os.write(fd, msgspec.json.encode(content))
            tmp.replace(path)
        except OSError as exc:
            tmp.unlink(missing_ok=True)
            os.close(fd)
            raise disk_error("make the lock", path, exc) from exc
        return cls(path, fd)

    def release(self) -> None:
        """Say that this writer left nothing open: remove the lock file, then let go of it.

        In this order, so that the file is never seen free. In a forked child it does what
        :meth:`close_in_child` does. Never raises; calling it twice is harmless.
        """
        if os.getpid() != self._pid:
            self.close_in_child()
            return
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            if _is_same_file(fd, self.path):
                self.path.unlink()
        with contextlib.suppress(OSError):
            os.close(fd)

    def close_in_child(self) -> None:
        """Let go of a lock inherited by fork: the parent keeps it, its file stays.

        A child that does not call this keeps its dead parent looking alive. Never raises.
        """
        fd, self._fd = self._fd, None
        if fd is not None:
            # Closing only: LOCK_UN would free the lock for the parent too, flocks are shared.
            with contextlib.suppress(OSError):
                os.close(fd)


def writer_state(run_directory: Path, name: str) -> WriterState:
    """Whether the writer of this name lives; "unknown" when there is no lock to tell by.

    Never waits. Takes a shared lock for an instant when nobody holds it. Never raises.
    """
    path = run_directory / f"{name}{_SUFFIX}"
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except (OSError, ValueError):
        return "unknown"
    try:
        if not _flock(fd, fcntl.LOCK_SH):
            return "unknown"
        return "dead" if _is_same_file(fd, path) else "unknown"
    except BlockingIOError:
        return "alive"
    finally:
        os.close(fd)


def writer_states(run_directory: Path) -> dict[str, WriterState]:
    """Every writer that has a lock file, with its state, in the order of their names."""
    try:
        with os.scandir(run_directory) as entries:
            names = sorted(e.name for e in entries if e.name.endswith(_SUFFIX))
    except OSError:
        return {}
    writers = (name.removesuffix(_SUFFIX) for name in names)
    return {
        writer: writer_state(run_directory, writer)
        for writer in writers
        if _WRITER.fullmatch(writer)
    }


def dead_writers(run_directory: Path) -> list[str]:
    """The writers whose lock nobody holds any more."""
    return [name for name, state in writer_states(run_directory).items() if state == "dead"]


def writer_details(run_directory: Path, name: str) -> dict[str, object]:
    """What the writer's lock file says (host, pid, start_ns, ...); empty without one."""
    try:
        data = (run_directory / f"{name}{_SUFFIX}").read_bytes()
        return msgspec.json.decode(data, type=dict[str, object])
    except (OSError, ValueError, msgspec.DecodeError):
        return {}


class WriterTrail:
    """What is known of one writer from its batches, fed in any order.

    Holds the ids that were closed and the newest set of open scopes, not the batches.
    """

    def __init__(self, writer: str) -> None:
        """Begin with no batch."""
        self.writer = writer
        self.last: Batch | None = None
        #: ``created_ns`` of the newest batch that has the key ``open``.
        self.open_ns: int | None = None
        self._open: list[SpanRecord] = []
        self._open_key = (-1, "")
        self._closed: set[str] = set()
        self._child_ends: dict[str, int] = {}

    def feed(self, batch: Batch) -> None:
        """Take in one batch of this writer."""
        key = (batch.created_ns, batch.batch_id)
        if self.last is None or key > (self.last.created_ns, self.last.batch_id):
            # The header alone: the rows of a large batch need not stay in memory.
            self.last = msgspec.structs.replace(
                batch, spans=[], marks=[], snapshots=[], open=UNSET, windows=UNSET, logs=UNSET
            )
        for row in [*batch.spans, *([] if batch.windows is UNSET else batch.windows)]:
            if row.end_ns is UNSET:
                continue
            self._closed.add(row.id)
            if row.parent_id is not None:
                known = self._child_ends.get(row.parent_id, row.end_ns)
                self._child_ends[row.parent_id] = max(known, row.end_ns)
        if batch.open is not UNSET and key > self._open_key:
            self._open, self._open_key, self.open_ns = batch.open, key, batch.created_ns

    def left_open(self) -> list[SpanRecord]:
        """The rows of the newest set that no batch closed, as they were written."""
        return [row for row in self._open if row.id not in self._closed]

    def closed(self) -> list[SpanRecord]:
        """The same rows closed at the time of the writer's last batch, children first."""
        if self.last is None:
            return []
        return close_in_memory(self.left_open(), self.last.created_ns, self._child_ends)


def close_in_memory(
    rows: Iterable[SpanRecord], end_ns: int, child_ends: Mapping[str, int] | None = None
) -> list[SpanRecord]:
    """Copies of open rows, closed at ``end_ns``, children before their parents.

    No row ends before it starts, before one of its children here, or before ``child_ends`` (the
    latest end known of closed children, by the parent's id). Each copy has ``attrs.recovered``
    true and the status "error". The rows given are not changed.
    """
    by_id = {row.id: row for row in rows}
    depths = _depths(by_id)
    ordered = sorted(by_id.values(), key=lambda row: (-depths[row.id], row.start_ns, row.id))
    ends = dict(child_ends or {})
    closed: list[SpanRecord] = []
    for row in ordered:
        end = max(row.start_ns, end_ns, ends.get(row.id, 0))
        if row.parent_id is not None:
            ends[row.parent_id] = max(end, ends.get(row.parent_id, 0))
        otel = SpanOtel() if row.otel is UNSET else row.otel
        if otel.status != "error":
            otel = msgspec.structs.replace(otel, status="error", status_message=DIED)
        attrs = {**row.attrs, "recovered": True}
        closed.append(msgspec.structs.replace(row, end_ns=end, attrs=attrs, otel=otel))
    return closed


def _depths(by_id: Mapping[str, SpanRecord]) -> dict[str, int]:
    """How many of the given rows lie above each; a circle in broken data ends where it is met."""
    depths: dict[str, int] = {}
    for start in by_id:
        path: dict[str, None] = {}
        current: str | None = start
        while current is not None and current in by_id:
            if current in depths or current in path:
                break
            path[current] = None
            current = by_id[current].parent_id
        above = -1 if current is None else depths.get(current, -1)
        depths.update({span_id: above + i for i, span_id in enumerate(reversed(path), start=1)})
    return depths


def recover(spool: Spool, *, sdk_version: str, writers: Sequence[str] | None = None) -> list[Path]:
    """Close what dead writers left open; returns the batch files written, none if nothing was.

    Without ``writers``, all whose lock is free. Writers named that have no lock file are taken
    for dead: the caller has waited long enough. A living writer is passed over, and so is one
    that somebody else recovers right now. Afterwards the dead writer's lock file is gone.

    Reads the spool from the newest file back, no further than needed. Files that are broken or
    vanish are passed over. Blocks as long as the disk does; ``spool`` must not be in use by
    another thread meanwhile. Raises :class:`SpoolError` when the spool cannot be read or written;
    the locks then stay, for the next try.
    """
    run_directory = spool.run_directory
    names = dead_writers(run_directory) if writers is None else list(dict.fromkeys(writers))
    written: list[Path] = []
    with contextlib.ExitStack() as stack:
        claims: list[_Claim] = []
        for name in names:
            claim = _claim(run_directory, name)
            if claim is not None:
                stack.callback(os.close, claim.fd)
                claims.append(claim)
        trails = _follow(spool, claims) if claims else {}
        for claim in claims:
            path = _write_recovery(spool, trails[claim.name], claim, sdk_version)
            if path is not None:
                written.append(path)
            # While still held: whoever finds the file free from now on finds it gone.
            with contextlib.suppress(OSError):
                claim.path.unlink()
    _sweep(run_directory)
    return written


class _Claim:
    """A dead writer's lock, held by this process for the time of the recovery."""

    def __init__(self, path: Path, name: str, fd: int, *, exclusive: bool, start_ns: int) -> None:
        self.path = path
        self.name = name
        self.fd = fd
        self.exclusive = exclusive
        self.start_ns = start_ns


def _claim(run_directory: Path, name: str) -> _Claim | None:
    match = _WRITER.fullmatch(name)
    if match is None:  # not a name that acquire() makes; it might not even be a file name
        return None
    path = run_directory / f"{name}{_SUFFIX}"
    try:
        run_directory.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError:
        return None  # another user's, or a read-only directory: not ours to recover
    try:
        exclusive = _flock_soon(fd)
        # Unlinked between open and flock: the one who held it has done the work.
        if _is_same_file(fd, path):
            start_ns = int(match["start"])
            return _Claim(path, name, fd, exclusive=exclusive, start_ns=start_ns)
    except BlockingIOError:
        pass
    os.close(fd)
    return None


def _flock_soon(fd: int) -> bool:
    for _ in range(_CLAIM_ATTEMPTS - 1):
        try:
            return _flock(fd, fcntl.LOCK_EX)
        except BlockingIOError:
            time.sleep(_CLAIM_PAUSE_S)
    return _flock(fd, fcntl.LOCK_EX)


def _follow(spool: Spool, claims: Sequence[_Claim]) -> dict[str, WriterTrail]:
    """The end of each writer's trail: back to its newest ``open``, or to its start."""
    trails = {claim.name: WriterTrail(claim.name) for claim in claims}
    going = {claim.name: claim for claim in claims}
    for path in reversed(spool.files()):
        created_ns = created_ns_of(path)
        for name in list(going):
            open_ns = trails[name].open_ns
            # A batch of the same nanosecond may be the other half of the same flush.
            if created_ns < going[name].start_ns or (open_ns is not None and created_ns < open_ns):
                del going[name]
        if not going:
            break
        batch = _read_if_named(path, going)
        if batch is not None and batch.writer in going:
            trails[str(batch.writer)].feed(batch)
    return trails


def _read_if_named(path: Path, names: Iterable[str]) -> Batch | None:
    try:
        data = path.read_bytes()
    except OSError:
        return None
    # Searching the bytes is a hundred times faster than decoding them.
    if not any(name.encode() in data for name in names):
        return None
    try:
        return decode(data)
    except SpoolFormatError:
        return None


def _write_recovery(
    spool: Spool, trail: WriterTrail, claim: _Claim, sdk_version: str
) -> Path | None:
    rows = trail.closed()
    last = trail.last
    if not rows or last is None:
        return None
    batch_id = hashlib.sha256((last.batch_id + trail.writer).encode()).hexdigest()[:32]
    batch = Batch(
        schema_version=SCHEMA_VERSION,
        sdk_version=sdk_version,
        batch_id=batch_id,
        created_ns=last.created_ns + 1,
        spans=[row for row in rows if not _is_window(row)],
        windows=[row for row in rows if _is_window(row)] or UNSET,
        resource=last.resource,
        scope=last.scope,
        writer=trail.writer,
        open=[],
    )
    path = spool.directory / f"{batch.created_ns:020d}-{batch_id}.json"
    if path.exists():
        return None
    if claim.exclusive:
        # A recoverer died here before us; its .tmp would keep us out until it is swept.
        with contextlib.suppress(OSError):
            path.with_name(path.name + ".tmp").unlink()
    try:
        spool.write([encode(batch)], created_ns=batch.created_ns, batch_id=batch_id)
    except SpoolError as exc:
        if isinstance(exc.__cause__, FileExistsError) and not claim.exclusive:
            return None  # somebody else is at it
        raise
    return path


def _is_window(row: SpanRecord) -> bool:
    """Whether the row is the root of a window trace, which ``spans`` never holds."""
    return row.otel is not UNSET and row.otel.window is True


def _sweep(run_directory: Path) -> None:
    """Remove half-made locks of processes that died while making them."""
    oldest = time.time() - TMP_MAX_AGE_S
    with contextlib.suppress(OSError):
        for path in run_directory.glob(f"*{_TMP_SUFFIX}"):
            if path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def _flock(fd: int, operation: int) -> bool:
    """Whether the lock was taken; false where the file system has none.

    Raises ``BlockingIOError`` when somebody else holds it.
    """
    try:
        fcntl.flock(fd, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    return os.path.samestat(os.fstat(fd), there)
