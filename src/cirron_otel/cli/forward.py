"""``cirron-otel forward``: delivery by a process of its own."""

from __future__ import annotations

from pathlib import Path

import click

#: So long nothing may be delivered before a command gives up.
PATIENCE_S = 30.0

otlp_option = click.option(
    "--otlp",
    multiple=True,
    metavar="URL",
    help="Send to this OTLP receiver, in place of what the settings say. May be repeated.",
)


@click.command()
@click.argument("directories", nargs=-1, required=True, metavar="DIR...")
@click.option("--once", is_flag=True, help="Send what is there now, then end.")
@otlp_option
def forward(directories: tuple[str, ...], otlp: tuple[str, ...], *, once: bool) -> None:
    """Deliver what programs record in these directories, until told to stop.

    DIR is an output directory (.cirron) or a directory that has some in it, now or later. Where
    to comes from the same settings as for profile(): CIRRON_API_KEY, OTEL_EXPORTER_OTLP_*,
    cirron.yaml. The programs themselves run with CIRRON_FORWARD=off. Safe to run twice: one
    takes over when the other ends.
    """
    # Only here: it loads what talks to the network, which no other command should wait for.
    from cirron_otel.cli.delivery import forward_directories  # noqa: PLC0415

    given = [Path(name).expanduser().absolute() for name in directories]
    forward_directories(given, otlp, once=once, patience=PATIENCE_S)
