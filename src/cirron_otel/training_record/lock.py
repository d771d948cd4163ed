"""Who writes a record: one process at a time, held by the kernel.

The file ``.lock`` beside the diary is flocked for as long as somebody writes, recovers or seals the
record. The kernel lets go of it however that process ends, so a lock file that nobody holds stands
for a writer that died. Where the file system has no flock nothing is held and nobody is refused.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import Self

from cirron_otel.errors import RecordBusyError, RecordError

LOCK = ".lock"
_ATTEMPTS = 5


class RecordLock:
    """The right to write into a run directory. Made by :meth:`acquire`; never waits."""

    def __init__(self, path: Path, fd: int) -> None:
        """Take over an open, locked descriptor."""
        self._path = path
        self._fd: int | None = fd
        self._pid = os.getpid()

    @classmethod
    def acquire(cls, directory: Path) -> RecordLock:
        """Take the lock of ``directory``, which must be there.

        Raises :class:`~cirron_otel.errors.RecordBusyError` when another process, or another lock of
        this one, holds it, and :class:`~cirron_otel.errors.RecordError` when it cannot be made.
        """
        path = directory / LOCK
        for _ in range(_ATTEMPTS):
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            except OSError as exc:
                raise RecordError(f"cannot write into {directory}: {exc.strerror}") from exc
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as exc:
                os.close(fd)
                raise RecordBusyError(
                    f"{directory} is being written by another process; wait until it has ended, "
                    "or use another directory"
                ) from exc
            except OSError:
                pass  # a file system without flock
            # Whoever held it before removes the file at the end: then this is another file's lock.
            if _is_same_file(fd, path):
                return cls(path, fd)
            os.close(fd)
        raise RecordBusyError(f"{directory} is being written by another process")

    def release(self) -> None:
        """Remove the lock file and let go. In a forked child only let go. Never raises."""
        fd, self._fd = self._fd, None
        if fd is None:
            return
        with contextlib.suppress(OSError):
            # Removed while still held, so that the file of a living writer is never seen free.
            if os.getpid() == self._pid and _is_same_file(fd, self._path):
                self._path.unlink()
        with contextlib.suppress(OSError):
            # Closing and not LOCK_UN: that would free the lock for the parent of a fork as well.
            os.close(fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _is_same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except OSError:
        return False
