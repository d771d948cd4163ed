"""The command group, and what becomes of errors: one line that says what to do, and a status."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import click

from cirron_otel.cli.spool import spool
from cirron_otel.cli.traces import traces
from cirron_otel.errors import CirronError

_FAILED = 1
_INTERRUPTED = 130


def _version() -> str:
    try:
        return version("cirron-otel")
    except PackageNotFoundError:
        return "0.0.0"


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(_version(), prog_name="cirron-otel")
def cli() -> None:
    """Look at what a program recorded with cirron_otel.

    Reads the local spool only; needs no network and no account.
    """


cli.add_command(spool)
cli.add_command(traces)


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process)."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A name in a spool may have characters that this terminal has not.
            stream.reconfigure(errors="backslashreplace")
    try:
        status = cli.main(
            None if arguments is None else list(arguments),
            prog_name="cirron-otel",
            standalone_mode=False,
        )
        sys.stdout.flush()
    except click.ClickException as exc:
        exc.show()
        return exc.exit_code
    except CirronError as exc:
        click.echo(f"error: {exc}", err=True)
        return _FAILED
    except (click.Abort, KeyboardInterrupt):
        return _INTERRUPTED
    except BrokenPipeError:
        # Nobody reads on (`| head`); click answers with 1 where it notices first. The interpreter
        # flushes once more at exit: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILED
    return status if isinstance(status, int) else 0
