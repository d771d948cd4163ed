"""``cirron-otel record verify``: one line a check, then a sentence."""

from __future__ import annotations

import click

from cirron_otel.cli.paper import Paper, run_path
from cirron_otel.reading.values import clean
from cirron_otel.training_record.checking import verify as verifying
from cirron_otel.training_record.checking.findings import Check

_MARKS = {
    "pass": ("✓", "good"),
    "fail": ("✗", "bad"),
    "note": ("!", "note"),
    "unchecked": ("?", "note"),
    "absent": ("\N{EN DASH}", "dim"),
    "skipped": ("\N{EN DASH}", "dim"),
}
_NINE = frozenset(verifying.FORMAT_CHECKS)
#: What an unfinished record fails, without having been changed.
_CRASH = frozenset({"parse", "chain", "bookends"})


@click.command()
@click.argument("run", metavar="RUN")
@click.option("--key", metavar="PUB", help="Public key (PEM) that the signature must be of.")
@click.option("--strict", is_flag=True, help="Fail where the record is not sealed and signed.")
@click.option(
    "--anchors",
    metavar="SOURCE",
    help="Hold the record against anchors: an OTLP JSON file, a spool directory, or a URL.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def verify(  # noqa: PLR0913 - one an option
    ctx: click.Context, run: str, key: str | None, anchors: str | None, *, strict: bool,
    as_json: bool,
) -> None:  # fmt: skip
    """Check that a record is whole and unchanged.

    The first nine checks are those of the format; those after them hold its files against one
    another. With --strict all nine must pass, which needs a signature and its --key.

    Exit status: 0 verified, 1 not verified, 2 no record, key or anchors that can be used.
    """
    found = verifying.verify(run_path(run), key=key, strict=strict, anchors=anchors)
    sentence = verdict(found, anchored=anchors is not None)
    with Paper() as paper:
        if as_json:
            paper.json({**found.to_dict(), "verdict": sentence})
        else:
            _print(paper, found, sentence)
    ctx.exit(0 if found.passed else 1)


def _print(paper: Paper, found: verifying.Verdict, sentence: str) -> None:
    events = f"{found.events:,} event{'' if found.events == 1 else 's'}"
    named = f", run {clean(found.run_id[:80])}" if found.run_id else ""
    paper.line((clean(found.path), "bold"), f": {events}{named}", cut=True)
    column = max(len(check.label) for check in found.checks) + 6
    for title, ours in (("Checks of the format", False), ("Further checks", True)):
        listed = [check for check in found.checks if (check.name not in _NINE) is ours]
        if listed:
            paper.line("")
            paper.line((title, "dim"))
        for check in listed:
            mark, style = _MARKS[check.status]
            head = f"  {mark} {check.label}"
            paper.hanging(f"{head:<{column}}", style, _said(check), indent=column)
    paper.line("")
    paper.paragraph(sentence, "good" if found.passed else "bad")


def _said(check: Check) -> str:
    """What a check saw; its status where the mark alone may not tell."""
    return f"{check.status.upper()}: {check.message}" if check.status == "fail" else check.message


def verdict(found: verifying.Verdict, *, anchored: bool) -> str:
    """The verdict in a plain sentence: what was shown, and what was not."""
    statuses = {check.name: check.status for check in found.checks}
    failed = [check for check in found.checks if check.status == "fail"]
    if found.passed:
        fits = " It fits its anchors." if anchored else ""
        return f"VERIFIED. {_shown(statuses)}{fits}"
    if not failed:
        short = [c.label for c in found.checks if c.name in _NINE and c.status != "pass"]
        return (
            "NOT VERIFIED. Nothing is wrong, but --strict wants all nine checks of the format to "
            f"pass, and these did not: {', '.join(short)}."
        )
    names = {check.name for check in failed}
    no_end = found.check("bookends").message.startswith("no run_end")
    if no_end and names <= _CRASH and (found.half_written or names == {"bookends"}):
        return (
            f"NOT VERIFIED: the record has no end. Its {found.events:,} events are whole, as a "
            "crash leaves them, but lines cut from the end would look the same. "
            "`cirron-otel record recover` ends a record after a crash."
        )
    many = f"{len(failed)} check{'s' if len(failed) > 1 else ''} failed"
    return f"NOT VERIFIED: {many} ({', '.join(check.label for check in failed)})."


def _shown(statuses: dict[str, str]) -> str:
    if statuses["signature"] == "pass":
        return (
            "The record is whole, and nothing in it was changed since the owner of this key "
            "signed it."
        )
    if statuses["signature"] == "unchecked":
        return (
            "The record is whole and as it was sealed. It is signed, but by whom was not checked: "
            "give the signer's public key with --key."
        )
    if statuses["seal"] == "pass":
        return (
            "The record is whole and as it was sealed. It is not signed: whoever can write these "
            "files could have made all of them anew."
        )
    return (
        "The record is whole and fits together. It is neither sealed nor signed: whoever can write "
        "these files could have made all of them anew."
    )
