"""The command group, and what becomes of errors: one line that says what to do, and a status."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from cirron_otel.cli.lazy import Lazy, LazyGroup
from cirron_otel.errors import CirronError

_FAILED = 1
_INTERRUPTED = 130


def _print_version(ctx: click.Context, _: click.Parameter, asked: object) -> None:
    if not asked or ctx.resilient_parsing:
        return
    # Only here: it searches the installed packages, which no other command should wait for.
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415

    try:
        found = version("cirron-otel")
    except PackageNotFoundError:
        found = "0.0.0"
    click.echo(f"cirron-otel, version {found}")
    ctx.exit()


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def cli() -> None:
    """Look at what a program recorded with cirron_otel, and deliver it."""


cli.lazy = {
    name: Lazy(f"cirron_otel.cli.{name}", name, short_help)
    for name, short_help in {
        "check": "Look into a checkpoint: NaN, dead channels, zeroed weights, missing shards.",
        "doctor": "Check how a service is set up, and say what to mend.",
        "forward": "Deliver what programs record in these directories, until told to stop.",
        "record": "Verify, sign, compare and show training records.",
        "runs": "Show the attempts of each run, and where the time went.",
        "spool": "Look at the batch files on disk, deliver or delete them.",
        "tensorboard": "Write recorded marks below LOG_DIR, as event files of TensorBoard.",
        "traces": "Look at recorded sessions, also while they are still running.",
    }.items()
}


def run(arguments: Sequence[str] | None = None) -> int:
    """Run the command with these arguments (default: those of the process)."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = Path(os.devnull).open("w", encoding="utf-8")  # noqa: SIM115 - for good
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
    except OSError as exc:
        # A directory that may not be read, a disk that is full: nobody is helped by our stack.
        if exc.filename is None:
            raise
        click.echo(f"error: {exc.filename}: {exc.strerror or exc}", err=True)
        return _FAILED
    return status if isinstance(status, int) else 0
