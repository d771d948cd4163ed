"""``cirron-otel traces view --ranks``: the ranks of a run side by side, and who is slow."""

from __future__ import annotations

from cirron_otel.cli.screen import Screen, print_json
from cirron_otel.errors import CirronError
from cirron_otel.reading.index import Index, SessionInfo
from cirron_otel.reading.notes import Segment
from cirron_otel.reading.values import clean, duration, plural
from cirron_otel.run import straggler
from cirron_otel.run.straggler_reading import Episode, SideBySide, of_run
from cirron_otel.run.straggler_times import PHASES

_HEAD = ("RANK", "HOST", "STEPS", "STEP", *(phase.upper() for phase in PHASES), "LOCAL", "WAITS")


def show(screen: Screen, index: Index, chosen: SessionInfo, *, as_json: bool) -> None:
    """Print the run that a session is of; medians over the steps that all ranks have."""
    found = of_run(index, chosen)
    if not any(found.steps.values()):
        raise CirronError(
            f"no training step of run {clean(found.run_id)!r} is in {index.spool.directory} yet"
        )
    if as_json:
        print_json(_as_dict(found))
        return
    screen.text(f"run {clean(found.run_id)}, attempt {found.attempt}", "name")
    slow = {episode.worst.rank: episode for episode in reversed(found.episodes)}
    rows = []
    for one in found.summaries:
        episode = slow.get(one.rank)
        lengths: list[Segment] = [
            (duration(length), "error" if episode and episode.worst.phase == phase else "plain")
            for phase, length in zip(PHASES, one.phases, strict=True)
        ]
        rows.append(
            [
                (str(one.rank), "error" if episode else "name"),
                (clean(found.hosts.get(one.rank, "")), "plain"),
                (f"{len(found.steps[one.rank]):,}", "plain"),
                (duration(one.step), "plain"),
                *lengths,
                (duration(one.local), "error" if episode else "plain"),
                (duration(one.wait), "dim"),
            ]
        )
    screen.table(_HEAD, rows, "rl" + "r" * (len(_HEAD) - 2))
    for line in _verdict(found):
        screen.text(line)


def _verdict(found: SideBySide) -> list[str]:
    compared = len(found.compared)
    what = f"{compared:,} {plural('step', compared)}"
    if len(found.steps) < 2:  # noqa: PLR2004 - as it says
        return ["only one rank of this run is here: there is nothing to compare it with"]
    if compared < straggler.FEWEST:
        return [f"too few steps to tell who is slow: {what} that all ranks have"]
    if not found.episodes:
        return [f"no rank keeps the others waiting ({what} compared; medians above)"]
    return [_episode(found, episode) for episode in found.episodes]


def _episode(found: SideBySide, episode: Episode) -> str:
    worst = episode.worst
    text = straggler.message(worst, found.hosts.get(worst.rank, ""))
    return clean(f"{text}; seen in steps {episode.first:,} to {episode.last:,}")


def _as_dict(found: SideBySide) -> dict[str, object]:
    return {
        "run_id": found.run_id,
        "attempt": found.attempt,
        "compared_steps": len(found.compared),
        "ranks": [
            {
                "rank": one.rank,
                "host": found.hosts.get(one.rank, ""),
                "steps": len(found.steps[one.rank]),
                "step_ns": one.step,
                **{f"{phase}_ns": ns for phase, ns in zip(PHASES, one.phases, strict=True)},
                "local_ns": one.local,
                "wait_ns": one.wait,
            }
            for one in found.summaries
        ],
        "stragglers": [
            {
                **episode.worst._asdict(),
                "host": found.hosts.get(episode.worst.rank, ""),
                "first": episode.first,
                "last": episode.last,
            }
            for episode in found.episodes
        ],
    }
