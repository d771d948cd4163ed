"""``cirron-otel tensorboard``: recorded marks as TensorBoard's event files."""

from __future__ import annotations

import time
from pathlib import Path

import click

from cirron_otel.cli.where import find_spool, spool_option_as
from cirron_otel.sinks.tensorboard import TensorBoardSink

_POLL_S = 1.0


@click.command()
@click.argument("log_dir", type=click.Path(file_okay=False, path_type=Path))
@spool_option_as("--path", "--spool", "--dir")
@click.option("--follow", is_flag=True, help="Go on with what is recorded, until Ctrl-C.")
def tensorboard(log_dir: Path, directory: str | None, *, follow: bool) -> None:
    """Write recorded marks below LOG_DIR, as event files of TensorBoard.

    Each run has a folder, with one for each rank of a distributed run. What an earlier call wrote
    there for the same runs is replaced.
    """

    def tell(file: Path, error: Exception) -> None:
        click.echo(f"warning: {file.name} is no batch: {error}", err=True)

    spool = find_spool(directory, "--path")
    with TensorBoardSink(log_dir, spool.root, on_error=tell) as sink:
        points = sink.update()
        click.echo(f"{points:,} points in {len(sink.folders)} folders below {log_dir}")
        while follow:
            time.sleep(_POLL_S)
            sink.update()
