"""``cirron-otel record``: training records. The group; each command has a module of its own."""

from __future__ import annotations

import click

from cirron_otel.cli.judging import Judging
from cirron_otel.cli.lazy import Lazy, LazyGroup


class _RecordGroup(Judging, LazyGroup):
    """The statuses of what judges, and commands that are loaded when they are run."""


@click.group(cls=_RecordGroup)
def record() -> None:
    """Verify, sign, compare and show training records.

    RUN is a run directory, or its diary.jsonl for the commands that only read. Exit status: 0
    good, 1 a finding (the record does not verify, a gate of diff fails), 2 wrong usage or a command
    that could not do its work.
    """


record.lazy = {
    name: Lazy(f"cirron_otel.cli.record_{module}", function, short_help)
    for name, module, function, short_help in (
        ("verify", "verify", "verify", "Check that a record is whole and unchanged."),
        ("sign", "keys", "sign", "Seal a finished record and sign the seal."),
        ("seal", "keys", "seal", "Seal a finished record without a signature."),
        ("keygen", "keys", "keygen", "Make a pair of keys for signing: Ed25519, in PEM form."),
        (
            "recover",
            "recover",
            "recover",
            "End a record whose writer died, so that it can be sealed and signed.",
        ),
        ("diff", "diff", "diff", "Compare record B with record A: settings, events, layers, loss."),
        ("report", "report", "report", "Make a report of a record, from the record alone."),
        (
            "show",
            "show",
            "show",
            "Print the events of a record in order, also of one that is being written.",
        ),
    )
}
