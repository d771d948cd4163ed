"""``cirron-otel runs``: the attempts of each run, how they ended and what the hours went into."""

from __future__ import annotations

import time
from collections.abc import Iterable
from itertools import groupby

import click
import msgspec

from cirron_otel.cli.screen import Screen, Warnings, json_option, no_color_option, print_json
from cirron_otel.cli.where import find_spool, spool_option
from cirron_otel.errors import CirronError
from cirron_otel.reading.notes import Segment
from cirron_otel.reading.values import clean, local_time, plural
from cirron_otel.run.attempts import Attempt, load
from cirron_otel.run.closing import clock, table
from cirron_otel.run.ledger import CATEGORIES

_STYLES = {"completed": "plain", "running": "open", "failed": "error"}


@click.command()
@click.argument("run", required=False)
@spool_option
@json_option
@no_color_option
def runs(run: str | None, directory: str | None, *, as_json: bool, no_color: bool) -> None:
    """Show the attempts of each run, and where the time went.

    RUN is a run's id, or the beginning of one; without it all runs are shown.
    """
    found = find_spool(directory, "--spool")
    warnings = Warnings()
    attempts = load(found, time.time_ns(), warnings)
    warnings.close()
    if run is not None:
        attempts = [one for one in attempts if one.run_id.startswith(run)]
        if not attempts:
            raise CirronError(f"no run begins with {run!r}; `cirron-otel runs` shows them all")
    if as_json:
        print_json({"dir": str(found.directory), "attempts": list(map(_as_json, attempts))})
        return
    screen = Screen(color=not no_color)
    if not attempts:
        screen.text(f"no runs in {found.directory} yet")
        return
    for position, (run_id, group) in enumerate(groupby(attempts, key=lambda one: one.run_id)):
        if position:
            screen.text("")
        _show(screen, run_id, list(group))


def _show(screen: Screen, run_id: str, attempts: list[Attempt]) -> None:
    head = ("ATTEMPT", "RANK", "STARTED", "OUTCOME", "ITERATIONS", "STEPS", "LOST", "WALL",
            "GOODPUT")  # fmt: skip
    screen.text(f"run {clean(run_id)}", "name")
    screen.table(head, [_row(one) for one in attempts], "rrllrrrrr")
    # Ranks take the same hours at the same time: they are counted once.
    rank = min(one.rank for one in attempts)
    mine = [one for one in attempts if one.rank == rank]
    lines = table(
        _sum(mine),
        outcome=mine[-1].outcome,
        steps=sum(one.steps - one.lost_steps for one in mine),
        title=f"{len(mine)} {plural('attempt', len(mine))}",
    )
    for line in lines:
        screen.text(line)


def _sum(attempts: Iterable[Attempt]) -> dict[str, float]:
    total = dict.fromkeys(CATEGORIES, 0.0)
    for one in attempts:
        for name, length in one.times.items():
            total[name] = total.get(name, 0.0) + length
    return total


def _row(one: Attempt) -> list[Segment]:
    why = one.signal or one.error_type
    outcome = one.outcome + (f" ({clean(why)})" if why else "")
    span = "" if one.first_iteration is None else f"{one.first_iteration}-{one.last_iteration}"
    return [
        (str(one.attempt), "plain"),
        (str(one.rank), "plain"),
        (local_time(one.started_ns), "plain"),
        (outcome, _STYLES.get(one.outcome, "lost")),
        (span, "plain"),
        (f"{one.steps:,}", "plain"),
        (f"{one.lost_steps:,}" if one.lost_steps else "", "lost"),
        (clock(one.wall), "plain"),
        (f"{one.goodput:.1%}", "plain"),
    ]


def _as_json(one: Attempt) -> dict[str, object]:
    shown: dict[str, object] = msgspec.structs.asdict(one)
    return {**shown, "wall": one.wall, "goodput": one.goodput}
