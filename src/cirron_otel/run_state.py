"""Which run this process belongs to, and which attempt of it this is.

The run directory (``<output>/run/``) holds, per run and rank, a small file with the attempt and the
last iteration. A later process of the same run takes the next attempt from it; the iteration goes
on from where its caller says it resumed (``profile(start_iteration=)``), because only the training
program knows which checkpoint it loaded.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.settings import Settings

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]+")
#: Launchers' words for "no id was given".
_NO_ID = frozenset({"", "none", "None"})


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


def run_id(settings: Settings) -> str:
    """The run's id: given, the launcher's (torchrun, SLURM), else a new one."""
    environ = os.environ
    for given in (
        settings.run_id,
        environ.get("TORCHELASTIC_RUN_ID"),
        environ.get("SLURM_JOB_ID"),
    ):
        if given is not None and given not in _NO_ID:
            return given
    if settings.world_size > 1 and environ.get("MASTER_ADDR"):
        # Every rank must find the same one without talking: they share their rendezvous.
        return f"{environ['MASTER_ADDR']}-{environ.get('MASTER_PORT', '0')}-{os.getppid()}"
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}"


def host_name() -> str:
    """This host's name."""
    return socket.gethostname() or "localhost"


def program_name() -> str:
    """The running program's name: ``service.name`` unless OTel's own variables give one."""
    main = sys.argv[0] if sys.argv else ""
    stem = Path(main).stem
    if stem in ("", "-c", "-"):
        return "python"
    return Path(main).resolve().parent.name if stem == "__main__" else stem


def on_process_exit(finalize: Callable[[], None]) -> None:
    """Have ``finalize`` called when a ``multiprocessing`` child ends (it skips ``atexit``)."""
    util = sys.modules.get("multiprocessing.util")
    process = sys.modules.get("multiprocessing.process")
    if util is None or process is None or process.parent_process() is None:
        return
    util.Finalize(None, finalize, exitpriority=1000)
