"""``cirron-otel check``: what is broken, dead or new in a file of weights."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

import click

from cirron_otel.checkpoints.checking import GATES, Result
from cirron_otel.checkpoints.checking import check as look_into
from cirron_otel.checkpoints.rules import SEVERITIES, Finding
from cirron_otel.cli.judging import Judging
from cirron_otel.cli.paper import Paper, run_path
from cirron_otel.errors import CirronError
from cirron_otel.reading.values import clean, counted, size

if TYPE_CHECKING:
    from cirron_otel.checkpoints.comparing import Difference

_LISTED = 8
_STYLES = {"critical": "bad", "warning": "note", "info": "act"}
_MOST_CHANGES = 10
_KIND_WIDTH = 10


@click.command(cls=Judging)
@click.argument("path", metavar="FILE|FOLDER")
@click.option("--against", metavar="BASE", help="Compare with another checkpoint.")
@click.option(
    "--fail-on",
    type=click.Choice(GATES),
    default="critical",
    show_default=True,
    help="End with status 1 where there is a finding of this severity or a graver one.",
)
@click.option(
    "--relu-after",
    multiple=True,
    metavar="PATTERN",
    help="BatchNorms that a ReLU directly follows, as in 'layer*.bn1'; can be given repeatedly.",
)
@click.option("--out", metavar="HTML", help="Write a report as one HTML page, too.")
@click.option("--all", "list_all", is_flag=True, help="List every finding.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def check(  # noqa: PLR0913, PLR0917 - one an option
    ctx: click.Context, path: str, against: str | None, fail_on: str,
    relu_after: tuple[str, ...], out: str | None, *, list_all: bool, as_json: bool,
) -> None:  # fmt: skip
    """Look into a checkpoint: NaN, dead channels, zeroed weights, missing shards.

    Reads safetensors, torch files (weights only, nothing in them is run), and folders of Hugging
    Face with their shards. torch is imported for torch files only.

    Exit status: 0 no finding at or above --fail-on, 1 there is one, 2 a file that cannot be read or
    trusted.
    """
    base = None if against is None else run_path(against)
    found = look_into(run_path(path), against=base, relu_after=relu_after)
    fails = found.fails(fail_on)
    if out is not None:
        _write_page(found, run_path(out))
    with Paper() as paper:
        if as_json:
            paper.json({**found.to_dict(), "fail_on": fail_on, "failed": fails})
        else:
            _print(paper, found, list_all=list_all)
            if fails:
                paper.line((f"FAILED: --fail-on {fail_on}", "bad"))
    ctx.exit(1 if fails else 0)


def _write_page(found: Result, path: Path) -> None:
    # Only who asks for a page waits for it.
    from cirron_otel.checkpoints.page import page  # noqa: PLC0415

    text = page(found)
    try:
        path.write_bytes(text.encode("utf-8", "replace"))
    except OSError as exc:
        raise CirronError(f"cannot write {path}: {exc.strerror or exc}") from exc


def _print(paper: Paper, found: Result, *, list_all: bool) -> None:
    one = found.checkpoint
    files = "" if len(one.files) == 1 else f" in {counted(len(one.files), 'file')}"
    paper.line((clean(str(one.path)), "bold"), f": {one.format}, {size(found.bytes)}{files}")
    kinds = ", ".join(clean(name) for name, _ in found.dtypes.most_common(4))
    facts = [
        counted(len(one.tensors), "tensor"),
        counted(found.parameters, "parameter") + f" ({kinds})",
    ]
    if found.layers:
        facts.append(counted(len(found.layers), "BatchNorm"))
    if found.norms:
        facts.append(counted(found.norms, "other norm"))
    if one.wrapper:
        facts.append(f"under {clean(one.wrapper)}")
    paper.line((", ".join(facts), "dim"))
    for note in one.notes:
        paper.line((f"note: {clean(note)}", "dim"))
    for (severity, kind), group in groupby(found.findings, key=lambda f: (f.severity, f.kind)):
        _print_kind(paper, severity, kind, list(group), list_all=list_all)
    if found.diff is not None:
        _print_changes(paper, found.diff, str(found.against), list_all=list_all)
    paper.line("")
    counts = found.counts()
    told = ", ".join(f"{counts[name]:,} {name}" for name in SEVERITIES if counts[name])
    style = "bad" if counts["critical"] else "note" if counts["warning"] else "good"
    paper.paragraph(found.verdict() + (f" ({told})" if told else ""), style)


def _print_kind(
    paper: Paper, severity: str, kind: str, group: Sequence[Finding], *, list_all: bool
) -> None:
    paper.line("")
    paper.line((f"{severity:<{_KIND_WIDTH}}", _STYLES[severity]), (kind, "bold"))
    shown = group if list_all else group[:_LISTED]
    for each in shown:
        name = "" if each.layer is None else f"{clean(each.layer)}: "
        paper.hanging("  ", "", f"{name}{clean(each.message)}", indent=2)
    if len(group) > len(shown):
        paper.line((f"  and {len(group) - len(shown):,} more (--all)", "dim"))


def _print_changes(paper: Paper, diff: Difference, against: str, *, list_all: bool) -> None:
    paper.line("")
    paper.line(("against ", "dim"), (clean(against), "bold"))
    told = [f"{len(diff.changed):,} changed", f"{len(diff.unchanged):,} unchanged"]
    for count, word in (
        (len(diff.added), "added"), (len(diff.removed), "removed"),
        (len(diff.reshaped), "of another shape"), (len(diff.dtype_changed), "of another type"),
    ):  # fmt: skip
        if count:
            told.append(f"{count:,} {word}")
    paper.line("  " + ", ".join(told))
    shown = diff.changed if list_all else diff.changed[:_MOST_CHANGES]
    width = max((len(clean(one.tensor)) for one in shown), default=0)
    for one in shown:
        share = "?" if one.change is None else f"{one.change:.3%}"
        paper.line(f"  {clean(one.tensor):<{width}}  {share:>10}")
    if len(diff.changed) > len(shown):
        paper.line((f"  and {len(diff.changed) - len(shown):,} less changed ones (--all)", "dim"))
    if shown:
        paper.line(("  length of the change, as a share of the tensor's norm before", "dim"))
