"""``cirron-otel record recover``."""

from __future__ import annotations

import click
import msgspec

from cirron_otel.cli.paper import Paper, run_path
from cirron_otel.reading.values import clean
from cirron_otel.training_record.recovering import recovery


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def recover(run: str, *, as_json: bool) -> None:
    """End a record whose writer died, so that it can be sealed and signed.

    The new last event, run_end, says that the run was interrupted and that the end was put there
    afterwards. Half-written lines are kept beside the files. A record that was changed, that
    ended in order or that is being written is left as it is (status 2); one that was recovered
    before, too (status 0).
    """
    found = recovery.recover(run_path(run))
    with Paper() as paper:
        if as_json:
            paper.json(msgspec.to_builtins(found))
            return
        shown = clean(run)
        if found.changed:
            paper.line((f"recovered {shown}", "bold"))
        else:
            paper.line((f"{shown} had been recovered before; nothing was changed", "bold"))
        paper.line(
            f"  {found.events:,} events, {found.rows:,} metrics rows, {found.steps:,} steps; the "
            "last event says that the run was interrupted"
        )
        for item in found.damaged:
            paper.line(f"  {item['bytes']:,} bytes of a half-written line: {clean(item['file'])}")
        if found.rows_missing:
            paper.line(
                (f"  {found.rows_missing:,} metrics rows did not reach the disk: lost", "note")
            )
        paper.line(f"  head {found.head}")
