"""fsync at an interval, on a thread of its own, so that a slow disk never stops the training."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

THREAD_NAME = "cirron-otel-record-sync"


class Syncer:
    """Brings what was written to the disk every ``interval_s`` seconds, and once more at the end.

    It works on duplicates of the descriptors, so that it may still be at work when the files have
    been closed. ``failed`` is told of an fsync that did not succeed, on this thread.
    """

    def __init__(
        self,
        directory: Path,
        fds: Sequence[int],
        interval_s: float | None,
        failed: Callable[[OSError], None],
    ) -> None:
        self._directory = directory
        self._fds = [os.dup(fd) for fd in fds]
        self._interval_s = interval_s
        self._failed = failed
        self._stop = threading.Event()
        self._dirty = True
        self._thread: threading.Thread | None = threading.Thread(
            target=self._run, name=THREAD_NAME, daemon=True
        )
        try:
            self._thread.start()
        except RuntimeError:  # no thread can be started any more
            self._thread = None

    def wrote(self) -> None:
        """Something was written since the last fsync. Never blocks."""
        self._dirty = True

    def finish(self, timeout_s: float) -> None:
        """One last fsync; waits for it at most ``timeout_s``, and it goes on if it takes longer."""
        if self._thread is None:
            self._sync()
            self._close()
            return
        self._stop.set()
        self._thread.join(timeout_s)

    def abandon(self) -> None:
        """In a forked child: there is no thread here; let go of the duplicates."""
        self._close()

    def _run(self) -> None:
        self._sync_directory()
        while not self._stop.wait(self._interval_s):
            self._sync()
        self._sync()
        self._close()

    def _sync(self) -> None:
        if not self._dirty:
            return
        self._dirty = False
        for fd in self._fds:
            try:
                os.fsync(fd)
                if not os.fstat(fd).st_nlink:
                    raise OSError(errno.ENOENT, "the file was removed")  # noqa: TRY301
            except OSError as error:
                self._failed(error)

    def _sync_directory(self) -> None:
        """So that the names of new files outlive a power failure, too."""
        with contextlib.suppress(OSError):
            sync_directory(self._directory)

    def _close(self) -> None:
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []


def sync_directory(directory: Path) -> None:
    """Bring the names in ``directory`` to the disk. Blocks; raises ``OSError``."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
