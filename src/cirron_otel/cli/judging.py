"""Commands that judge what they are given: status 1 is a finding, 2 all that kept them from it."""

from __future__ import annotations

from typing import Any

import click

from cirron_otel.errors import CirronError

_CANNOT = 2


class Judging(click.Command):
    """A command, or before another class in a list of bases a group, with statuses of its own."""

    def invoke(self, ctx: click.Context) -> Any:  # noqa: ANN401 - as click has it
        """Run it; an error that a user can mend is one line."""
        try:
            return super().invoke(ctx)
        except CirronError as exc:
            said = str(exc)
        except OSError as exc:
            what = exc.strerror or type(exc).__name__
            said = f"{what}: {exc.filename}" if isinstance(exc.filename, str) else what
        except MemoryError:
            said = "there is not enough memory for this file"
        # Only here: help should not wait for it.
        from cirron_otel.reading.values import clean  # noqa: PLC0415

        click.echo(f"error: {clean(said)}", err=True)
        return ctx.exit(_CANNOT)
