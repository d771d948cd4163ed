"""``cirron-otel spool``: the batch files on disk."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from cirron_otel import recovery
from cirron_otel.cli.forward import PATIENCE_S, otlp_option
from cirron_otel.cli.screen import Screen, print_json
from cirron_otel.cli.where import find_spool, spool_option_as
from cirron_otel.errors import SpoolError
from cirron_otel.reading.values import iso_time, local_time, plural, size
from cirron_otel.spool import Spool, created_ns_of

#: A terminal shows so many of the oldest and newest files.
_OLDEST, _NEWEST = 3, 17

_dir_option = spool_option_as("--dir", "--spool")


@click.group()
def spool() -> None:
    """Look at the batch files on disk, deliver or delete them."""


@spool.command()
@_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--all", "everything", is_flag=True, help="List every file on a terminal, too.")
def inspect(directory: str | None, *, as_json: bool, everything: bool) -> None:
    """List the batch files with their time and size, oldest first."""
    found = find_spool(directory, "--dir")
    entries = _entries(found)
    total = sum(count for _, count in entries)
    if as_json:
        print_json({
            "dir": str(found.directory),
            "files": len(entries),
            "totalBytes": total,
            "oldest": _moment(entries[0][0]) if entries else None,
            "newest": _moment(entries[-1][0]) if entries else None,
            "entries": [
                {"name": path.name, "size": count, **_time(path)} for path, count in entries
            ],
        })  # fmt: skip
        return
    screen = Screen()
    if not entries:
        screen.text(f"no batches in {found.directory}")
        return
    hidden = len(entries) - _OLDEST - _NEWEST
    shown = entries
    if screen.is_terminal and not everything and hidden > 1:
        shown = entries[:_OLDEST] + entries[-_NEWEST:]
    rows = [
        [
            (local_time(created_ns_of(path)), "plain"),
            (size(count), "plain"),
            (path.name, "name"),
        ]
        for path, count in shown
    ]
    if len(shown) < len(entries):
        rows.insert(_OLDEST, [(f"... {hidden:,} more (--all)", "dim"), ("", "dim"), ("", "dim")])
    # A name that is cut is of no use.
    screen.table(("TIME", "SIZE", "FILE"), rows, "lrl", cut=False)
    screen.text("")
    screen.text(f"{_files(len(entries))}, {size(total)} in {found.directory}")
    alive = _alive(found)
    if alive:
        screen.text(f"being written by {', '.join(alive)}", "open")


@spool.command()
@_dir_option
@click.option("--force", is_flag=True, help="Do not ask, and do not mind who is writing.")
def clear(directory: str | None, *, force: bool) -> None:
    """Delete the batch files."""
    found = find_spool(directory, "--dir")
    entries = _entries(found)
    alive = _alive(found)
    if alive and not force:
        raise SpoolError(
            f"{', '.join(alive)} {'is' if len(alive) == 1 else 'are'} writing to "
            f"{found.directory}: what is deleted now will be missing from that run. Wait for the "
            "end of the run, or use --force."
        )
    if entries and not force:
        total = sum(count for _, count in entries)
        question = f"Delete {_files(len(entries))} ({size(total)}) in {found.directory}? [y/N] "
        click.echo(question, nl=False, err=True)
        answer = sys.stdin.readline()
        if not answer:
            click.echo("", err=True)
            raise SpoolError("nobody answered, nothing was deleted: use --force in a script")
        if answer.strip().lower() not in {"y", "yes"}:
            click.echo("nothing was deleted", err=True)
            raise click.exceptions.Exit(1)
    files, count = found.clear()
    Screen().text(f"deleted {_files(files)}, {size(count)}")


@spool.command()
@_dir_option
@otlp_option
@click.option(
    "--timeout",
    type=click.FloatRange(min=0),
    metavar="S",
    help="End after so many seconds [no limit].",
)
@click.option(
    "--patience",
    type=click.FloatRange(min=0),
    metavar="S",
    default=PATIENCE_S,
    show_default=True,
    help="End when for so many seconds nothing could be delivered.",
)
def flush(
    directory: str | None, otlp: tuple[str, ...], timeout: float | None, patience: float
) -> None:
    """Send what was not delivered yet. Status 0 says that all of it was.

    Where to comes from the same settings as for profile(): CIRRON_API_KEY,
    OTEL_EXPORTER_OTLP_*, cirron.yaml; --otlp URL in place of the latter two.
    """
    # Only here: it loads what talks to the network, which no other command should wait for.
    from cirron_otel.cli.delivery import flush as deliver  # noqa: PLC0415

    deliver(find_spool(directory, "--dir").root, otlp, timeout, patience)


def _entries(found: Spool) -> list[tuple[Path, int]]:
    """The batch files with their sizes, oldest first; those that vanish meanwhile are left out."""
    entries = []
    for path in found.files():
        try:
            entries.append((path, path.stat().st_size))
        except FileNotFoundError:
            continue
    return entries


def _alive(found: Spool) -> list[str]:
    states = recovery.writer_states(found.run_directory)
    return [name for name, state in states.items() if state == "alive"]


def _time(path: Path) -> dict[str, Any]:
    created_ns = created_ns_of(path)
    return {"createdNs": str(created_ns), "iso": iso_time(created_ns)}


def _moment(path: Path) -> dict[str, Any]:
    return {"name": path.name, **_time(path)}


def _files(count: int) -> str:
    return f"{count:,} {plural('file', count)}"
