"""Which run this process belongs to, and which attempt of it this is.

The run directory (``<output>/run/``) holds, per run and rank, a small file with the attempt and the
last iteration. A later process of the same run takes the next attempt from it; the iteration goes
on from where its caller says it resumed (``profile(start_iteration=)``), because only the training
program knows which checkpoint it loaded.
"""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")


class _Saved(msgspec.Struct):
    run_id: str
    rank: int
    attempt: int
    iteration: int


class RunState(msgspec.Struct):
    """The attempt this process is, and where that is written. Flush thread only, after begin."""

    attempt: int
    path: Path | None
    run_id: str = ""
    rank: int = 0
    saved_iteration: int = -1

    @classmethod
    def none(cls, attempt: int = 1) -> RunState:
        """The state of a process that keeps none (a worker, a child)."""
        return cls(attempt, None)

    def save(self, iteration: int) -> None:
        """Note the last iteration; atomic, and silent where the directory cannot be written."""
        if self.path is None or iteration == self.saved_iteration:
            return
        body = msgspec.json.encode(_Saved(self.run_id, self.rank, self.attempt, iteration))
        spare = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            spare.write_bytes(body)
            spare.replace(self.path)
            self.saved_iteration = iteration
        except OSError:
            spare.unlink(missing_ok=True)


def begin(directory: Path, run: str, rank: int, iteration: int) -> RunState:
    """The next attempt of ``run`` on this rank, written down at once."""
    path = directory / f"{_UNSAFE.sub('_', run)}-rank{rank}.state"
    attempt = 1
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
        if saved.run_id == run:
            attempt = saved.attempt + 1
    except (OSError, msgspec.MsgspecError):
        pass
    state = RunState(attempt, path, run, rank)
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return RunState.none(attempt)
    state.save(iteration)
    return state


def on_process_exit(finalize: Callable[[], None]) -> None:
    """Have ``finalize`` called when a ``multiprocessing`` child ends (it skips ``atexit``)."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return
    util.Finalize(None, finalize, exitpriority=1000)
