"""Which run this process belongs to, and which attempt of it this is.

The run directory (``<output>/run/``) holds, per run and rank, a small file with the attempt and the
last iteration. A later process of the same run takes the next attempt from it; the iteration goes
on from where its caller says it resumed (``profile(start_iteration=)``), because only the training
program knows which checkpoint it loaded.

Ranks agree on the attempt without a word to each other, and without what a launcher counts (its
counts differ between the workers of one restart): an attempt is one more than that of any rank that
is gone before its end, and not less than that of any rank that is there or has completed it. So a
rank that never got as far as ``profile()`` in one attempt, or was not there at all, does not fall
behind.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

import msgspec

from cirron_otel.recovery import writer_state

if TYPE_CHECKING:
    from collections.abc import Callable

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
#: Other ranks that are looked at: of thousands a few are enough to agree with.
_PEERS = 16
#: A rank that holds no lock (its file system has none, or it is just starting) is taken to be there
#: for so long after its last word.
_PRESENT_S = 30.0
#: The outcome of a rank that has nothing more to do in its attempt.
_COMPLETED = "completed"


class OfRun(Protocol):
    """A file of a rank says of which run it is: names of files may coincide."""

    run_id: str


_OfRun = TypeVar("_OfRun", bound=OfRun)


class _Saved(msgspec.Struct):
    run_id: str
    rank: int
    attempt: int
    iteration: int
    #: The name of its lock, where it holds one.
    writer: str = ""
    #: How it ended, in a word; empty while it has not, or where nobody was left to say so.
    outcome: str = ""


class RunState(msgspec.Struct):
    """The attempt this process is, and where that is written. Flush thread only, after begin."""

    attempt: int
    path: Path | None
    run_id: str = ""
    rank: int = 0
    saved_iteration: int = -1
    writer: str = ""
    outcome: str = ""

    @classmethod
    def none(cls, attempt: int = 1) -> RunState:
        """The state of a process that keeps none (a worker, a child)."""
        return cls(attempt, None)

    def save(self, iteration: int, outcome: str = "") -> None:
        """Note the last iteration, and how the process ends if it does.

        Atomic, and silent where the directory cannot be written.
        """
        unchanged = iteration == self.saved_iteration and outcome == self.outcome
        if self.path is None or unchanged:
            return
        saved = _Saved(self.run_id, self.rank, self.attempt, iteration, self.writer, outcome)
        if replace(self.path, msgspec.json.encode(saved)):
            self.saved_iteration, self.outcome = iteration, outcome

    def holds(self, writer: str) -> None:
        """This process holds the lock of this name, by which others see that it lives."""
        iteration, self.saved_iteration = self.saved_iteration, -1
        self.writer = writer
        self.save(iteration)


def state_file(directory: Path, run: str, rank: int, suffix: str = ".state") -> Path:
    """Where a rank of a run keeps its state, or what else it tells of itself."""
    return directory / f"{_UNSAFE.sub('_', run)}-rank{rank}{suffix}"


def replace(path: Path, body: bytes) -> bool:
    """Put a small file in the place of what was there, at once; whether it could be written."""
    # Threads of a process may write different files of a rank at the same time.
    spare = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        spare.write_bytes(body)
        spare.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            spare.unlink(missing_ok=True)
        return False
    return True


def read(path: Path, kind: type[_OfRun], run: str) -> _OfRun | None:
    """What a rank of this run has written there; None where there is nothing that can be read."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError):
        return None
    return found if found.run_id == run else None


def begin(directory: Path, run: str, rank: int, iteration: int, *, world_size: int = 1) -> RunState:
    """The next attempt of ``run`` on this rank, written down at once."""
    path = state_file(directory, run, rank)
    own = read(path, _Saved, run)
    attempt = 1 if own is None else own.attempt + 1
    peers = [peer for peer in range(min(world_size, _PEERS + 1)) if peer != rank]
    for peer in peers:
        other_path = state_file(directory, run, peer)
        other = read(other_path, _Saved, run)
        if other is not None:
            is_same = other.outcome == _COMPLETED or _is_there(directory, other_path, other)
            attempt = max(attempt, other.attempt if is_same else other.attempt + 1)
    state = RunState(attempt, path, run, rank)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return RunState.none(attempt)
    state.save(iteration)
    return state


def _is_there(directory: Path, path: Path, saved: _Saved) -> bool:
    """Whether the process that saved this lives, as far as can be seen from here."""
    if saved.writer:
        return writer_state(directory, saved.writer) == "alive"
    try:
        return time.time() - path.stat().st_mtime < _PRESENT_S
    except OSError:
        return False


def on_process_exit(finalize: Callable[[], None]) -> None:
    """Have ``finalize`` called when a ``multiprocessing`` child ends (it skips ``atexit``)."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return
    util.Finalize(None, finalize, exitpriority=1000)
