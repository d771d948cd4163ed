"""``cirron-otel doctor``: what is wrong with how a service is set up, and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cirron_otel.cli.screen import Screen, print_json
from cirron_otel.errors import ConfigurationError
from cirron_otel.reading.values import clean, plural

if TYPE_CHECKING:
    from cirron_otel.serving.checkup import Found

_CANNOT = 2
_STYLES = {"ok": "mark", "note": "dim", "warning": "lost", "error": "error"}
_WIDTH = max(map(len, _STYLES))


@click.command()
@click.argument("app", required=False, metavar="[MODULE:APP]")
@click.option("--factory", is_flag=True, help="APP is a function that makes the application.")
@click.option(
    "--dir",
    "directory",
    metavar="DIR",
    help="The output directory, in place of what the settings say.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def doctor(
    ctx: click.Context, app: str | None, directory: str | None, *, factory: bool, as_json: bool
) -> None:
    """Check how a service is set up, and say what to mend.

    Looks at versions, settings and the output directory; with MODULE:APP (as for uvicorn or
    gunicorn) also at the application: its middlewares, OpenTelemetry's instrumentations, the one
    span for each part of a streamed answer that FastAPI's makes. The module is run for that, with
    a recording that keeps nothing and sends nothing; no request is made.

    Exit status: 0 nothing to mend, 1 something is, 2 the application cannot be loaded.
    """
    # Only here: it loads OpenTelemetry, which no other command should wait for.
    from cirron_otel.serving import checkup, checkup_app  # noqa: PLC0415

    given = None if directory is None else Path(directory).expanduser().absolute()
    found = list(checkup.check_versions())
    settings, said = checkup.check_settings(given)
    found += said
    if settings is not None and settings.enabled:
        found += checkup.check_spool(settings)
    cannot = ""
    if app is not None:
        try:
            loaded = checkup_app.load(app, factory=factory)
            found += checkup_app.check_app(
                loaded, None if settings is None else settings.output_dir
            )
        except ConfigurationError as error:
            cannot = str(error)
            found.append(checkup.Found("error", cannot))
    bad = [one for one in found if one.state in {"warning", "error"}]
    if as_json:
        print_json([one._asdict() for one in found])
    else:
        _print(found, len(bad))
    ctx.exit(_CANNOT if cannot else bool(bad))


def _print(found: list[Found], bad: int) -> None:
    screen = Screen()
    for one in found:
        screen.line([(one.state.ljust(_WIDTH + 2), _STYLES[one.state]), (clean(one.what), "plain")],
                    cut=False)  # fmt: skip
        for step in one.todo.splitlines():
            screen.line([(" " * (_WIDTH + 2), "plain"), (f"-> {clean(step)}", "dim")], cut=False)
    screen.text("")
    screen.text(f"{bad} {plural('thing', bad)} to mend" if bad else "nothing to mend")
