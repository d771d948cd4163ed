"""Whole lines at the end of a file, or nothing: what the diary and the metrics are written with.

The caller keeps the size the file should have and changes it only when a line is in. Before each
line the file is cut back to that size where it is longer: so a write that stopped in the middle
(a full disk, an exception that a signal handler raised) leaves nothing behind, whenever it stopped.
"""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path


def create(path: Path) -> int:
    """Make a new file for appending and return its descriptor; never opens one that is there.

    Raises ``OSError``.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, 0o666)


def append(fd: int, size: int, data: bytes) -> int:
    """Append ``data`` to a file that should be ``size`` bytes long; returns its new size.

    All or nothing: raises ``OSError`` when not all of it could be written, and cuts off again what
    was. Blocks as long as the kernel makes a writer wait, which for a few hundred bytes into the
    page cache is microseconds.
    """
    trim(fd, size)
    wanted = len(data)
    try:
        done = os.write(fd, data)
        while done < wanted:
            # A short write means that the disk is full; the second one says so.
            done += os.write(fd, data[done:]) or _full()
    except OSError:
        with contextlib.suppress(OSError):  # else the next append does it
            os.ftruncate(fd, size)
        raise
    return size + wanted


def _full() -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def trim(fd: int, size: int) -> None:
    """Cut off what an append that was broken off has left. Raises ``OSError``."""
    # Where appending files are written does not matter to O_APPEND; this is quicker than fstat.
    if os.lseek(fd, 0, os.SEEK_END) > size:
        os.ftruncate(fd, size)
