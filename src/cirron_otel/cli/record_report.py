"""``cirron-otel record report``."""

from __future__ import annotations

import json
import os
import secrets
import stat
from pathlib import Path

import click

from cirron_otel.cli.paper import Paper, run_path
from cirron_otel.errors import RecordError
from cirron_otel.reading.values import clean
from cirron_otel.training_record import report as reports
from cirron_otel.training_record.chain import DIARY, METRICS, SEAL, SIGNATURE

_FORMATS = ("html", "summary", "markdown", "summary-markdown", "json")
_OURS = frozenset({DIARY, METRICS, SEAL, SIGNATURE})


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "--format",
    "form",
    type=click.Choice(_FORMATS),
    default="html",
    show_default=True,
    help="html for engineers, summary as one HTML page for everybody else.",
)
@click.option("-o", "--output", metavar="FILE", help="Where to; without it, standard output.")
@click.option("--key", metavar="PUB", help="Public key (PEM) that the signature must be of.")
@click.option(
    "--gpu-hour-cost",
    type=click.FloatRange(min=0, max=1e6, min_open=True),
    metavar="PRICE",
    help="Price of a GPU for an hour: estimates what the time with stuck channels cost.",
)
@click.option(
    "--gpus", type=click.IntRange(1, 10**6), default=1, show_default=True, help="Number of GPUs."
)
def report(  # noqa: PLR0913, PLR0917 - one an option
    run: str, form: str, output: str | None, key: str | None, gpu_hour_cost: float | None,
    gpus: int,
) -> None:  # fmt: skip
    """Make a report of a record, from the record alone.

    The report says itself whether the record verifies; the status is 0 either way.
    """
    if gpu_hour_cost is not None and gpu_hour_cost != gpu_hour_cost:  # noqa: PLR0124 - NaN
        raise click.UsageError("--gpu-hour-cost is a price such as 2.50")
    paper = Paper()
    to_screen = output is None or output == "-"
    if to_screen and paper.is_terminal and form in {"html", "summary"}:
        name = "report" if form == "html" else form
        raise click.UsageError(f"say where the page goes, for example -o {name}.html")
    found = reports.load(run_path(run), key=key)
    if form == "json":
        facts = reports.to_dict(found, gpu_hour_cost=gpu_hour_cost, gpus=gpus)
        text = json.dumps(facts, indent=2, allow_nan=False) + "\n"
    elif form == "markdown":
        text = reports.markdown(found)
    else:
        pages = {
            "html": reports.html,
            "summary": reports.summary,
            "summary-markdown": reports.summary_markdown,
        }
        text = pages[form](found, gpu_hour_cost=gpu_hour_cost, gpus=gpus)
    data = text.encode("utf-8", "replace")
    with paper:
        if to_screen:
            paper.write_bytes(data)
        else:
            path = Path(str(output)).expanduser()
            _write(path, data)
            paper.line(f"wrote {clean(str(path))} ({len(data) / 1000:,.1f} kB)")


def _write(path: Path, data: bytes) -> None:
    """Put the report there in one step; into pipes and devices as they are."""
    if path.name in _OURS:
        raise RecordError(f"{path}: a report is never written over a record's own file")
    try:
        if path.exists() and not path.is_file():
            _into(path, data)
            return
        target = path.resolve()
        spare = target.with_name(f".{target.name[:100]}.{secrets.token_hex(8)}.tmp")
        try:
            with spare.open("xb") as file:
                file.write(data)
            spare.rename(target)
        finally:
            spare.unlink(missing_ok=True)
    except (OSError, ValueError, RuntimeError) as exc:
        why = getattr(exc, "strerror", None) or exc
        raise RecordError(f"cannot write {path}: {why}") from exc


def _into(path: Path, data: bytes) -> None:
    # Not waiting: a pipe may have nobody at its other end.
    descriptor = os.open(path, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    with os.fdopen(descriptor, "wb") as file:
        if not stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.set_blocking(descriptor, True)
        file.write(data)
