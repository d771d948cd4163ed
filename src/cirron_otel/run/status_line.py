"""One line at the bottom of a terminal, out of the way of what the program prints.

The terminal is told to scroll the rows above it only (DECSTBM, as VT100 has it, and every terminal
since), so neither writes into the other, and nothing of the program's output is looked at. Each
change is a single write. Where the program is killed the bottom row stays as it was: ``reset``.
"""

from __future__ import annotations

import os
from typing import IO

_SAVE, _RESTORE = "\x1b7", "\x1b8"
_ERASE = "\x1b[2K"
#: Down scrolls where there is nothing below, up does not; both stay in their column.
_DOWN, _UP = "\x1bD", "\x1b[A"
#: Rows below which a line would be in the way.
_LEAST_ROWS = 4


class StatusLine:
    """The line on a stream that is a terminal; on any other nothing at all. One thread.

    May block where the terminal does, and raises ``OSError`` where it is gone.
    """

    def __init__(self, stream: IO[str] | None) -> None:
        self._fd = _terminal_of(stream)
        #: The rows and columns for which the bottom row is set apart.
        self._size: os.terminal_size | None = None
        self._shown = ""

    def show(self, text: str) -> None:
        """Put ``text`` where the last one was, cut to the width of the terminal."""
        fd = self._fd
        if fd is None or not _is_in_foreground(fd):
            return
        size = os.get_terminal_size(fd)
        if size.lines < _LEAST_ROWS:
            self.clear()
            return
        text = text[: size.columns]
        if text == self._shown and size == self._size:
            return
        before = ""
        if size != self._size:
            # Down and up again: outside of what scrolls the cursor would stay on the bottom row.
            before = f"{_DOWN}{_SAVE}\x1b[1;{size.lines - 1}r{_RESTORE}{_UP}"
        self._size, self._shown = size, text
        _write(fd, f"{before}{_SAVE}\x1b[{size.lines};1H{_ERASE}{text}{_RESTORE}")

    def clear(self) -> None:
        """Give the bottom row back, empty."""
        size, self._size, self._shown = self._size, None, ""
        if self._fd is not None and size is not None:
            _write(self._fd, f"{_SAVE}\x1b[r\x1b[{size.lines};1H{_ERASE}{_RESTORE}")


def _write(fd: int, text: str) -> None:
    data = text.encode("utf-8", "replace")
    while data:
        data = data[os.write(fd, data) :]


def _terminal_of(stream: IO[str] | None) -> int | None:
    """The file descriptor of a stream that is a terminal which can move its cursor."""
    if os.environ.get("TERM", "dumb") == "dumb":
        return None
    try:
        if stream is not None and stream.isatty():
            return stream.fileno()
    except Exception:  # noqa: BLE001 - closed, or something of the program's
        return None
    return None


def _is_in_foreground(fd: int) -> bool:
    """Whether the terminal is this job's to write to; where it says nothing, it is."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except (OSError, AttributeError):
        return True
