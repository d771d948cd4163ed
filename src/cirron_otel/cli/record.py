"""``cirron-otel record``: training records. The commands, and what becomes of their errors."""

from __future__ import annotations

from typing import Any

import click

from cirron_otel.cli.lazy import Lazy, LazyGroup
from cirron_otel.errors import CirronError

_CANNOT = 2


class _RecordGroup(LazyGroup):
    """Statuses of their own: 1 is a finding, 2 is everything that kept a command from its work."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as click has it
        try:
            return super().invoke(ctx)
        except CirronError as exc:
            said = str(exc)
        except OSError as exc:
            what = exc.strerror or type(exc).__name__
            said = f"{what}: {exc.filename}" if isinstance(exc.filename, str) else what
        # Only here: help should not wait for it.
        from cirron_otel.reading.values import clean  # noqa: PLC0415

        click.echo(f"error: {clean(said)}", err=True)
        return ctx.exit(_CANNOT)


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
