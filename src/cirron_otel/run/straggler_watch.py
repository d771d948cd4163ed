"""Finding the straggler while the run goes on: ranks that share a run directory compare notes.

Each rank writes what its newest steps took into a small file beside its state
(``run/<run>-rank<n>.steps``), once a flush. Rank 0, or the lowest of those that share the
directory, reads the others' and reports what :func:`cirron_otel.run.straggler.find` finds, once
for each rank and phase. All of it on the flush thread, from rows that were written; ranks wait
for nothing and send nothing. Where nodes share no directory each compares its own ranks.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from cirron_otel import identity
from cirron_otel.findings import Finding, report
from cirron_otel.run import straggler
from cirron_otel.run.straggler_times import StepTimes, Tally
from cirron_otel.run_state import read, replace, state_file

if TYPE_CHECKING:
    from cirron_otel.batching import Sealed
    from cirron_otel.recorder import Recorder

#: Steps a rank tells of, and how many more it tells of in one flush than there were before.
KEPT = 256
PER_FLUSH = 48
#: Files read in a second, at most: with many ranks the comparison is made less often.
FILES_PER_S = 100
SUFFIX = ".steps"


class Told(msgspec.Struct):
    """What one rank tells the others. Only every ``stride``-th step where they are many."""

    run_id: str
    rank: int
    attempt: int
    host: str
    #: The iteration at which the attempt began.
    first: int
    steps: list[StepTimes]


class StragglerWatch:
    """See the module; a :class:`~cirron_otel.spool_writer.BatchWatcher`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        state = rec.run_state
        self._directory: Path = rec.spool.run_directory
        self._path = state_file(self._directory, rec.run_id, rec.rank, SUFFIX)
        self._told = Told(
            rec.run_id, rec.rank, state.attempt, identity.host_name(),
            rec.settings.start_iteration, [],
        )  # fmt: skip
        #: What is still adding up; on the flush thread.
        self.tally = Tally()
        self._kept: deque[StepTimes] = deque(maxlen=KEPT)
        self._stride = 1
        self._named: set[tuple[int, str]] = set()
        self._due = 0.0
        self._judged = -1

    def written(self, batch: Sealed) -> None:
        """Nothing to do: the rows come by themselves."""

    def flushed(self) -> None:
        """Tell the others, and compare where that is this rank's to do."""
        steps = self.tally.settle()
        if self._rec.out.ending:
            steps += self.tally.settle()
        if steps:
            self._tell(steps)
        ending = self._rec.out.ending
        if steps or ending:
            now = time.monotonic()
            if now >= self._due or ending:
                self._due = now + self._rec.settings.world_size / FILES_PER_S
                self._compare()

    # --- telling ----------------------------------------------------------------------------------

    def _tell(self, steps: list[StepTimes]) -> None:
        # Powers of two: what ranks with different strides tell of still falls together.
        while sum(step.iteration % self._stride == 0 for step in steps) > PER_FLUSH:
            self._stride *= 2
        self._kept.extend(step for step in steps if step.iteration % self._stride == 0)
        self._told.steps = list(self._kept)
        replace(self._path, msgspec.json.encode(self._told))

    # --- comparing --------------------------------------------------------------------------------

    def _compare(self) -> None:
        told = self._read()
        if self._told.rank != min(told, default=-1) or len(told) < 2:  # noqa: PLR2004 - to compare
            return
        ranks = {rank: {s.iteration: s for s in one.steps} for rank, one in told.items()}
        first = max(one.first for one in told.values())
        iterations = straggler.common(ranks, first=first)
        if not iterations or iterations[-1] == self._judged:
            return
        self._judged = iterations[-1]
        for found in straggler.find(ranks, iterations):
            if (found.rank, found.phase) not in self._named:
                self._named.add((found.rank, found.phase))
                host = told[found.rank].host
                attributes: dict[str, Any] = straggler.attributes(found, host)
                text = straggler.message(found, host)
                report(
                    self._rec,
                    Finding("straggler", "warning", text, step=found.last, attributes=attributes),
                )

    def _read(self) -> dict[int, Told]:
        """What the ranks of this run and attempt have told, this one included."""
        found = {self._told.rank: self._told}
        for rank in range(self._rec.settings.world_size):
            if rank == self._told.rank:
                continue
            path = state_file(self._directory, self._told.run_id, rank, SUFFIX)
            one = read(path, Told, self._told.run_id)
            if one is not None and one.attempt == self._told.attempt:
                found[one.rank] = one
                if one.rank < self._told.rank:
                    break  # it is not this rank's to compare
        return found


def watch(rec: Recorder) -> None:
    """Look for stragglers, where this is one rank of several that write to disk."""
    if rec.settings.world_size > 1 and "spool" in rec.settings.output and rec.run is not None:
        stragglers = StragglerWatch(rec)
        # A scope of the program's passes on what was inside it: pieces without any other count.
        rec.run.feed.wants_all = True
        rec.run.feed.consumers.append(stragglers.tally.add)
        rec.out.watchers.append(stragglers)
