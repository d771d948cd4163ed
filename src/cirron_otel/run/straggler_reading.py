"""The steps of all ranks of one run, read back from a spool, and who kept the others waiting.

For people who look at a run afterwards or beside it. Blocks while it reads files; OpenTelemetry
is not needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from cirron_otel.errors import SpoolError
from cirron_otel.reading.index import Index, SessionInfo
from cirron_otel.reading.rows import read
from cirron_otel.recovery import host_of
from cirron_otel.run import straggler
from cirron_otel.run.straggler import Straggler, Summary
from cirron_otel.run.straggler_times import StepTimes, Tally, rows_of


@dataclass(slots=True)
class Episode:
    """A straggler for as long as it was one."""

    worst: Straggler
    first: int
    last: int


@dataclass(slots=True)
class SideBySide:
    """The ranks of one attempt of a run. Lengths in ns."""

    run_id: str
    attempt: int
    #: By rank: its host and its steps by iteration.
    hosts: dict[int, str] = field(default_factory=dict)
    steps: dict[int, dict[int, StepTimes]] = field(default_factory=dict)
    #: The iterations that are compared: those that every rank has, without the first ones.
    compared: list[int] = field(default_factory=list)
    summaries: list[Summary] = field(default_factory=list)
    episodes: list[Episode] = field(default_factory=list)


def of_run(index: Index, chosen: SessionInfo) -> SideBySide:
    """The run that a session is of, in its latest attempt or, if it is older, in its own."""
    run = [info for info in index.sessions if info.run_id == chosen.run_id] or [chosen]
    attempt = chosen.attempt or 1
    sessions = {info.id: info for info in run if (info.attempt or 1) == attempt}
    found = SideBySide(chosen.run_id or "", attempt)
    tallies: dict[int, Tally] = {}
    for file in reversed(index.files):
        info = sessions.get(file.source.session_id)
        if info is None:
            continue
        rank = min(info.ranks, default=0)
        found.hosts.setdefault(rank, host_of(file.source.writer))
        try:
            data = read(file.path)
        except SpoolError as exc:
            index.report(file.path, exc)
            continue
        if data is not None:
            tallies.setdefault(rank, Tally()).add(rows_of(data))
    for rank, tally in sorted(tallies.items()):
        steps = [*tally.settle(), *tally.settle()]
        found.steps[rank] = {step.iteration: step for step in steps}
    found.compared = straggler.common(found.steps, window=0)
    found.summaries = straggler.summaries(found.steps, found.compared)
    found.episodes = _episodes(found)
    return found


def _episodes(found: SideBySide) -> list[Episode]:
    """Whoever was slow in any window of steps, the worst first."""
    episodes: dict[tuple[int, str], Episode] = {}
    for block in _blocks(found.compared):
        for one in straggler.find(found.steps, block):
            known = episodes.get((one.rank, one.phase))
            if known is None:
                episodes[one.rank, one.phase] = Episode(one, block[0], block[-1])
            else:
                known.last = block[-1]
                if one.share > known.worst.share:
                    known.worst = one
    return sorted(episodes.values(), key=lambda episode: -episode.worst.share)


def _blocks(iterations: Sequence[int]) -> list[Sequence[int]]:
    """Windows one after the other; the last takes the steps that make none of their own."""
    size = straggler.WINDOW
    starts = list(range(0, len(iterations), size))
    if len(starts) > 1 and len(iterations) - starts[-1] < straggler.FEWEST:
        starts.pop()
    ends = [*starts[1:], len(iterations)]
    return [iterations[start:end] for start, end in zip(starts, ends, strict=True)]
