"""``cirron-otel record show``: the events of a record, in constant memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click

from cirron_otel.cli.paper import Paper, run_path
from cirron_otel.training_record.canonical import json_value
from cirron_otel.training_record.chain import DIARY
from cirron_otel.training_record.events import EVENTS, SEVERITIES
from cirron_otel.training_record.report import show as showing
from cirron_otel.training_record.report.event_lines import event_of
from cirron_otel.training_record.report.lines import Reading, objects

_STYLES = {"warning": "note", "critical": "bad", "proof": "proof", "action": "act"}
#: Below so many columns only the step, the event and what it says are shown.
_WIDE = 110


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--events", metavar="KIND,..", default="", help="Only these kinds, such as alarm,repair."
)
@click.option("--severity", metavar="NAME,..", default="", help="Only these, such as critical.")
@click.option("--layer", metavar="TEXT", help="Only events of layers with this in their name.")
@click.option("--since-step", type=int, metavar="N", help="Only from this step on.")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line.")
def show(  # noqa: PLR0913 - one an option
    run: str, events: str, severity: str, layer: str | None, since_step: int | None, *,
    as_json: bool,
) -> None:  # fmt: skip
    """Print the events of a record in order, also of one that is being written.

    What is printed is what stands there: whether to believe it, verify says.
    """
    place = run_path(run)
    kinds = _names(events, EVENTS.keys(), "--events")
    severities = _names(severity, SEVERITIES, "--severity")
    with Paper() as paper:
        if as_json:
            for line in _lines(place, kinds, severities, layer, since_step):
                paper.write(json.dumps(json_value(line), allow_nan=False) + "\n")
            return
        found = showing.rows(
            place, events=kinds, severities=severities, layer=layer, since_step=since_step
        )
        for name, value in showing.heading(place):
            paper.line((f"{name:<12}", "dim"), value, cut=True)
        first = next(found, None)
        if first is None:
            narrowed = kinds or severities or layer or since_step is not None
            paper.line("no event is like that" if narrowed else "no events")
            return
        wide = paper.columns is None or paper.columns >= _WIDE
        paper.line("")
        paper.line((showing.aligned(showing.HEADS) if wide else _narrow(showing.HEADS), "dim"),
                   cut=True)  # fmt: skip
        for row in chain([first], found):
            text = showing.aligned(row.cells) if wide else _narrow(row.cells)
            paper.line((text, _STYLES.get(row.severity, "")), cut=True)


def _narrow(cells: tuple[str, ...]) -> str:
    _, _, step, _, event, layer, what = cells
    where = f"{layer}: " if layer and layer != "layer" else ""
    return f"{step:>7}  {event:<16}  {where}{what}"


def _lines(
    place: Path, kinds: list[str], severities: list[str], layer: str | None, since_step: int | None
) -> Iterator[dict[str, object]]:
    diary = place / DIARY if place.is_dir() else place
    for line in objects(diary, Reading()):
        if showing.asked_for(event_of(line), kinds, severities, layer, since_step):
            yield line


def _names(given: str, known: object, option: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    listed = sorted(known)  # type: ignore[call-overload]
    wrong = [name for name in names if name not in listed]
    if wrong:
        raise click.UsageError(f"{option}: {wrong[0]} is none of {', '.join(listed)}")
    return names
