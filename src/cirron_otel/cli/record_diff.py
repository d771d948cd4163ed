"""``cirron-otel record diff``: two records side by side, and whether that passes a gate."""

from __future__ import annotations

import click

from cirron_otel.cli.paper import Paper, run_path
from cirron_otel.training_record.comparing.diff import LOSS_TOLERANCE
from cirron_otel.training_record.comparing.diff import diff as compare

_STYLES = {"better": "good", "regression": "bad", "unverified": "bad"}


@click.command()
@click.argument("first", metavar="A")
@click.argument("second", metavar="B")
@click.option(
    "--fail-on",
    type=click.Choice(["never", "regression", "difference"]),
    default="never",
    show_default=True,
    help="End with status 1 where B is worse than A, or where it differs at all.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(min=0),
    default=LOSS_TOLERANCE,
    show_default=True,
    metavar="SHARE",
    help="By which share of itself the loss of B may be higher.",
)
@click.option("--key", metavar="PUB", help="Public key (PEM) that both signatures must be of.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def diff(  # noqa: PLR0913, PLR0917 - one an option
    ctx: click.Context, first: str, second: str, fail_on: str, tolerance: float,
    key: str | None, *, as_json: bool,
) -> None:  # fmt: skip
    """Compare record B with record A: settings, events, layers, loss.

    A is what to compare with, such as the record of the main branch; B is the one in question.
    A record that does not verify is a regression.
    """
    if tolerance == float("inf") or tolerance != tolerance:  # noqa: PLR0124 - NaN
        raise click.UsageError("--tolerance is a share such as 0.05")
    found = compare(run_path(first), run_path(second), loss_tolerance=tolerance, key=key)
    fails = found.fails(fail_on)
    with Paper() as paper:
        if as_json:
            paper.json({**found.to_dict(), "fail_on": fail_on, "failed": fails})
        else:
            for number, line in enumerate(found.text()):
                if not number:
                    paper.line((line, _STYLES.get(found.verdict, "bold")))
                elif line and not line.startswith(" "):
                    paper.line((line, "bold"))
                else:
                    paper.line(line)
            if fails:
                paper.line("")
                paper.line((f"FAILED: --fail-on {fail_on}", "bad"))
    ctx.exit(1 if fails else 0)
