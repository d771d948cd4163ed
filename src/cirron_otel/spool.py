"""The spool directory: whole batch files appear in it, are listed and read, and the oldest leave.

A batch lies in ``<root>/spool/<created_ns, 20 digits>-<batch_id>.json``; until it is whole it has
``.tmp`` behind its name and readers do not see it. Names sort by time. Many processes share one
directory (all ranks of a job, the workers of a loader), so any file may vanish at any moment:
every function here takes that for normal.

A :class:`Spool` holds no file descriptor and no lock, so it survives a fork. It is not
thread-safe: one thread per process writes (the flush thread); other threads make a ``Spool`` of
their own for reading.
"""

from __future__ import annotations

import contextlib
import errno
import heapq
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cirron_otel.batch import Batch, decode
from cirron_otel.errors import SpoolError, SpoolFormatError

_Candidate = tuple[int, str, int]
_scan_batches: Callable[[str, int, float], tuple[int, int, int, int, list[_Candidate]]] | None
_write_whole: Callable[[str, str, Sequence[bytes | memoryview]], int] | None
try:
    from cirron_otel._fast import scan_batches, write_whole
except ImportError:  # not built here
    _scan_batches = _write_whole = None
else:
    _scan_batches, _write_whole = scan_batches, write_whole

#: How many batch files a spool holds at most.
MAX_FILES = 100_000
#: A ``.tmp`` that nobody touched for this long belongs to a dead writer.
TMP_MAX_AGE_S = 3600

_NAME = re.compile(r"[0-9]{20}-[0-9a-f]{32}\.json")
_TMP_SUFFIX = ".json.tmp"
_CREATED_DIGITS = 20

#: POSIX promises 16, Linux and macOS take 1024 buffers a call.
_IOV_MAX = 1024
#: Other processes write too: this often the running total is replaced by what is really there.
_WRITES_PER_SCAN = 256
#: Files a scan remembers as next to leave, so that a full spool is not listed at every write.
_CANDIDATES = 1024
_FEW_CANDIDATES = 64
_ATTEMPTS = 3

_HINTS = {
    errno.ENOSPC: "the disk is full: free some space, or choose another output directory",
    errno.EDQUOT: "the disk quota is used up: free some space, or choose another output directory",
    errno.EFBIG: "the file size limit of this process is too small (see `ulimit -f`)",
    errno.EACCES: "this user may not write there: change the permissions or the output directory",
    errno.EPERM: "this user may not write there: change the permissions or the output directory",
    errno.EROFS: "the file system is read-only: choose another output directory",
    errno.ENOTDIR: "a part of the path is a file, not a directory: choose another output directory",
    errno.EMFILE: "this process has too many open files (see `ulimit -n`)",
    errno.ENFILE: "the system has too many open files",
}


def disk_error(what: str, path: str | Path, exc: OSError) -> SpoolError:
    """A :class:`SpoolError` that names the path, the system's reason, and what can be done."""
    reason = exc.strerror or str(exc)
    hint = _HINTS.get(exc.errno or 0, "")
    return SpoolError(f"cannot {what} {path}: {reason}" + (f" ({hint})" if hint else ""))


def is_batch_name(name: str) -> bool:
    """Whether a file of this name is a batch (and not a ``.tmp`` or something foreign)."""
    return _NAME.fullmatch(name) is not None


def created_ns_of(path: Path) -> int:
    """The time in the name of a batch file, in ns since the epoch."""
    return int(path.name[:_CREATED_DIGITS])


class Spool:
    """One output directory, and the batches in it.

    ``max_bytes`` bounds the batch files and their ``.tmp`` together, ``max_files`` the batch
    files. What is over leaves oldest first; the counters ``evicted_files``, ``evicted_bytes`` and
    ``swept_tmp`` say what this object removed. Making a ``Spool`` touches no file.

    ``evict_order`` may rank file names: lower ranks leave first, within a rank the oldest. It is
    called on the writing thread, once per file and scan and once more when the file leaves, and
    must be quick. Files that leave with a rank above 0 are counted ``evicted_undelivered``.
    """

    def __init__(
        self,
        root: Path,
        *,
        max_bytes: int = 1_000_000_000,
        max_files: int = MAX_FILES,
        evict_order: Callable[[str], int] | None = None,
    ) -> None:
        """Remember where the spool is and how much it may hold."""
        self.root = Path(root)
        self.directory = self.root / "spool"
        self.snapshots_directory = self.root / "snapshots"
        self.run_directory = self.root / "run"
        self.max_bytes = max_bytes
        self.max_files = max_files
        self.evict_order = evict_order
        self.evicted_files = 0
        self.evicted_bytes = 0
        self.evicted_undelivered = 0
        self.swept_tmp = 0
        self._scanned = False
        self._unscanned_writes = 0
        self._file_bytes = 0
        self._file_count = 0
        self._tmp_bytes = 0
        #: Next to leave, the first of them last: (rank, name, bytes).
        self._candidates: list[_Candidate] = []

    # -- writing ---------------------------------------------------------------------------------

    def write(self, chunks: Sequence[bytes | memoryview], *, created_ns: int, batch_id: str) -> int:
        """Write one batch file whole or not at all; returns its size in bytes.

        The chunks go to the disk as they are, without being joined; while they do, the GIL is
        free. Makes the directory when it is missing, also when somebody deletes it meanwhile.
        Blocks as long as the disk does; does not wait for the platter (no fsync): after a power
        failure the last seconds may be missing, after the death of the process nothing is.

        Raises :class:`SpoolError` when the disk refuses (nothing of the batch is left then) and
        ``ValueError`` when time and id do not make a batch name.
        """
        name = f"{created_ns:0{_CREATED_DIGITS}d}-{batch_id}.json"
        if not is_batch_name(name):
            raise ValueError(f"not a batch: created_ns={created_ns!r}, batch_id={batch_id!r}")
        target = os.path.join(self.directory, name)  # noqa: PTH118 - a Path here costs 5 us
        size = 0
        for attempt in range(_ATTEMPTS):
            try:
                size = write_file(target, chunks)
                break
            except FileNotFoundError as exc:
                # Not made yet, or deleted under us (also the .tmp alone, by `spool clear`).
                if attempt == _ATTEMPTS - 1:
                    raise disk_error("write", target, exc) from exc
                self._scanned = False
                self._make_directory()
            except OSError as exc:
                raise disk_error("write", target, exc) from exc
        self._written(name, size)
        return size

    def _make_directory(self) -> None:
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
        except OSError as exc:
            raise disk_error("make the spool directory", self.directory, exc) from exc

    def _written(self, name: str, size: int) -> None:
        """Count a file and keep the spool under its cap; trouble here never fails the write."""
        self._file_bytes += size
        self._file_count += 1
        self._unscanned_writes += 1
        with contextlib.suppress(OSError):
            if not self._scanned or self._unscanned_writes >= _WRITES_PER_SCAN:
                self._scan(_CANDIDATES if self._is_over() else _FEW_CANDIDATES)
            if self._is_over():
                self._evict(keep=name)

    def _is_over(self) -> bool:
        if self._file_count > self.max_files:
            return True
        # What .tmp files take cannot be won back from batches.
        return self._tmp_bytes < self.max_bytes < self._file_bytes + self._tmp_bytes

    def _evict(self, *, keep: str) -> None:
        """Remove what is over the cap, the first in order first, never the file ``keep``.

        A listing costs microseconds per file, so a large spool is listed only after a number of
        writes in proportion to it; in between the candidates of the last listing leave. With n
        processes writing at once the cap is overrun by at most n/256 of the files.
        """
        wanted = _CANDIDATES
        listed = self._unscanned_writes == 0
        if self._unscanned_writes * _WRITES_PER_SCAN >= self._file_count:
            self._scan(wanted)
            listed = True
        while True:
            removed = False
            while self._candidates and self._is_over():
                _, name, size = self._candidates.pop()
                if name != keep:
                    removed |= self._evict_one(name, size)
            if not self._is_over():
                return
            if listed and not removed and wanted > self._file_count:
                return  # only the file just written is left, or what may not be unlinked
            if listed:
                wanted *= 8
            self._scan(wanted)
            listed = True

    def _evict_one(self, name: str, size: int) -> bool:
        """Whether the file is gone; counted only when it was this object that removed it."""
        try:
            os.unlink(os.path.join(self.directory, name))  # noqa: PTH108, PTH118 - hot when full
        except FileNotFoundError:
            pass
        except OSError:
            return False
        else:
            self.evicted_files += 1
            self.evicted_bytes += size
            if self.evict_order is not None and self.evict_order(name) > 0:
                self.evicted_undelivered += 1
        self._file_bytes -= size
        self._file_count -= 1
        return True

    def _scan(self, wanted: int) -> None:
        """Count what is there, sweep stale ``.tmp`` files, remember who leaves next.

        No list of 100,000 names is ever sorted at one go. The compiled module does most of it
        without the interpreter; else each entry's ``stat`` lets other threads run.
        """
        self._scanned = True
        self._unscanned_writes = 0
        if _scan_batches is not None:
            ranked = self.evict_order is not None
            self._file_bytes, self._file_count, self._tmp_bytes, swept, self._candidates = (
                _scan_batches(
                    str(self.directory), 0 if ranked else wanted, time.time() - TMP_MAX_AGE_S
                )
            )
            self.swept_tmp += swept
            self._candidates.reverse()
            if not (ranked and self._is_over()):
                return  # nobody has to be ranked as long as nobody has to leave
        self._file_bytes = self._file_count = self._tmp_bytes = 0
        first = heapq.nsmallest(wanted, self._count_entries())
        first.reverse()
        self._candidates = first

    def _count_entries(self) -> Iterator[tuple[int, str, int]]:
        rank = self.evict_order
        oldest_tmp = time.time() - TMP_MAX_AGE_S
        for name, path, stat in _entries(self.directory):
            if name.endswith(_TMP_SUFFIX):
                if stat.st_mtime < oldest_tmp and _unlinked(path):
                    self.swept_tmp += 1
                else:
                    self._tmp_bytes += stat.st_size
            else:
                self._file_bytes += stat.st_size
                self._file_count += 1
                yield (0 if rank is None else rank(name)), name, stat.st_size

    # -- reading ---------------------------------------------------------------------------------

    def files(self) -> list[Path]:
        """The batch files, oldest first; none when there is no directory.

        Raises :class:`SpoolError` when the directory cannot be listed.
        """
        try:
            with os.scandir(self.directory) as entries:
                names = [e.name for e in entries if is_batch_name(e.name) and e.is_file()]
        except FileNotFoundError:
            return []
        except OSError as exc:
            raise disk_error("list", self.directory, exc) from exc
        names.sort()
        directory = self.directory
        return [directory / name for name in names]

    def read(self, path: Path) -> Batch:
        """One batch.

        Raises ``FileNotFoundError`` when the file has vanished, :class:`SpoolFormatError` (with
        the file's name) when it is no batch, :class:`SpoolError` when it cannot be read.
        """
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise
        except OSError as exc:
            raise disk_error("read", path, exc) from exc
        try:
            return decode(data)
        except SpoolFormatError as exc:
            raise SpoolFormatError(f"{path.name}: {exc}") from exc

    def batches(
        self,
        newest_first: bool = False,  # noqa: FBT001, FBT002 - reads well as a keyword
        on_error: Callable[[Path, Exception], None] | None = None,
    ) -> Iterator[tuple[Path, Batch]]:
        """Each file with its batch, one in memory at a time.

        Files that vanish meanwhile are passed over. A file that cannot be read or is no batch is
        passed over too, after ``on_error`` has been told.
        """
        paths = self.files()
        for path in reversed(paths) if newest_first else paths:
            try:
                batch = self.read(path)
            except FileNotFoundError:
                continue
            except SpoolError as exc:
                if on_error is not None:
                    on_error(path, exc)
                continue
            yield path, batch

    def size(self) -> int:
        """Bytes of batch files and ``.tmp`` files together, counted now; 0 without a directory."""
        return sum(stat.st_size for _, _, stat in self._listing())

    def known_size(self) -> int:
        """The same as of the last time this process counted, and what it wrote since; no disk."""
        if not self._scanned:
            return self.size()
        return self._file_bytes + self._tmp_bytes

    def count(self) -> int:
        """The number of batch files, counted now."""
        return len(self.files())

    def clear(self) -> tuple[int, int]:
        """Remove every batch and ``.tmp`` file; returns how many and their bytes.

        Foreign files stay. A writer whose ``.tmp`` is removed writes it again. Raises
        :class:`SpoolError` when a file may not be removed.
        """
        files = size = 0
        for _, path, stat in self._listing():
            try:
                os.unlink(path)  # noqa: PTH108 - the entry has the path as text
            except FileNotFoundError:
                continue
            except OSError as exc:
                raise disk_error("remove", path, exc) from exc
            files += 1
            size += stat.st_size
        self._scanned = False
        return files, size

    def _listing(self) -> list[tuple[str, str, os.stat_result]]:
        try:
            return list(_entries(self.directory))
        except OSError as exc:
            raise disk_error("list", self.directory, exc) from exc


def _entries(directory: Path) -> Iterator[tuple[str, str, os.stat_result]]:
    """Name, path and stat of each batch and ``.tmp`` file, in no order. Raises ``OSError``."""
    try:
        entries = os.scandir(directory)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            name = entry.name
            if not is_batch_name(name.removesuffix(".tmp")):
                continue
            try:
                if entry.is_file():
                    yield name, entry.path, entry.stat()
            except FileNotFoundError:
                continue


def _unlinked(path: str) -> bool:
    try:
        os.unlink(path)  # noqa: PTH108 - the entry has the path as text
    except OSError:
        return False
    return True


def write_file(target: str, chunks: Sequence[bytes | memoryview]) -> int:
    """Write ``<target>.tmp`` and rename it; whatever goes wrong, the ``.tmp`` does not stay.

    Where the compiled module is there, all of it happens without the interpreter in one go: each
    time a thread asks for it back, another has to stop.
    """
    tmp = target + ".tmp"
    if _write_whole is not None:
        return _write_whole(tmp, target, chunks)
    # O_EXCL: two writers of one batch (two recoverers) must never write into one file.
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    done = False
    try:
        try:
            size = _write_chunks(fd, chunks)
        finally:
            os.close(fd)
        os.replace(tmp, target)  # noqa: PTH105 - both are text
        done = True
    finally:
        if not done:
            _unlinked(tmp)
    return size


def _write_chunks(fd: int, chunks: Sequence[bytes | memoryview]) -> int:
    """Write all chunks, at most :data:`_IOV_MAX` a call; returns the number of bytes."""
    total = 0
    for first in range(0, len(chunks), _IOV_MAX):
        window = chunks[first : first + _IOV_MAX]
        # Mostly all are bytes, and then nothing of ours runs for each of them.
        length = len if set(map(type, window)) == {bytes} else _nbytes
        expected = sum(map(length, window))
        total += expected
        written = os.writev(fd, window)
        if written < expected:
            _write_rest(fd, window, written)
    return total


def _nbytes(chunk: bytes | memoryview) -> int:
    return chunk.nbytes if isinstance(chunk, memoryview) else len(chunk)


def _write_rest(fd: int, window: Sequence[bytes | memoryview], written: int) -> None:
    """Go on after a short write (a full disk, a signal, a file size limit).

    The next call either goes further or says why not.
    """
    for chunk in window:
        view = memoryview(chunk).cast("B")
        skipped = min(written, view.nbytes)
        written -= skipped
        view = view[skipped:]
        while view:
            count = os.write(fd, view)
            if count == 0:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            view = view[count:]
