"""The ends of a process that writes a record: exit, SIGTERM, fork.

Kept once per process, for all journals that are open: one ``atexit`` function, one handler, one
fork hook. The handler is there only where SIGTERM would end the process at once; a program (or a
recording) that handles it itself decides when it ends.
"""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
from types import FrameType
from typing import Protocol


class OpenJournal(Protocol):
    """What is told of the end."""

    def end(self, *, signal_name: str | None, timeout_s: float) -> bool:
        """End the record now; False where this very thread is in the middle of a line."""

    def after_fork(self) -> None:
        """This is a forked child: the record is the parent's."""


#: How long the end of the process waits for a journal that another thread is writing to.
WAIT_S = 1.0


class _Process:
    """The journals open in this process, and what is to be done for them."""

    def __init__(self) -> None:
        self.journals: dict[int, OpenJournal] = {}
        self.hooked = False
        #: A signal that waits for the end of a line.
        self.postponed: int | None = None


state = _Process()


def opened(journal: OpenJournal, *, signals: bool) -> None:
    """End ``journal`` when the process ends. Signals only from the main thread."""
    if not state.hooked:
        state.hooked = True
        os.register_at_fork(after_in_child=_after_fork)
        atexit.register(_at_exit)
        util, process = (sys.modules.get(f"multiprocessing.{n}") for n in ("util", "process"))
        if util is not None and process is not None and process.parent_process() is not None:
            util.Finalize(None, _at_exit, exitpriority=1000)  # such a child skips atexit
    state.journals[id(journal)] = journal
    if (
        signals
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    ):
        signal.signal(signal.SIGTERM, _on_signal)


def closed(journal: OpenJournal) -> None:
    """``journal`` has ended. Puts SIGTERM back when it was the last. Any thread."""
    state.journals.pop(id(journal), None)
    if not state.journals and threading.current_thread() is threading.main_thread():
        _put_back()


def resume() -> None:
    """After a line: take up the signal that came in the middle of it, if one did."""
    number, state.postponed = state.postponed, None
    if number is not None:
        os.kill(os.getpid(), number)


def _on_signal(number: int, _: FrameType | None) -> None:
    """End the records, then die of the signal as the process would have."""
    name = signal.Signals(number).name
    for journal in list(state.journals.values()):
        if not journal.end(signal_name=name, timeout_s=WAIT_S):
            state.postponed = number
            return
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


#: Told to whoever puts a handler in front of this one (see lifecycle.py).
_on_signal.ends_process = True  # type: ignore[attr-defined]


def _at_exit() -> None:
    for journal in list(state.journals.values()):
        journal.end(signal_name=None, timeout_s=WAIT_S)


def _after_fork() -> None:
    state.postponed = None
    for journal in list(state.journals.values()):
        journal.after_fork()
    state.journals.clear()
    _put_back()  # the child dies of SIGTERM as it would without us


def _put_back() -> None:
    if signal.getsignal(signal.SIGTERM) is _on_signal:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
