"""The work of ``cirron-otel forward`` and ``cirron-otel spool flush``; loaded by them alone."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Literal

import click

from cirron_otel import transport
from cirron_otel._guard import Guard
from cirron_otel.destinations.base import Destination
from cirron_otel.errors import ConfigurationError, SpoolError
from cirron_otel.forwarder import Forwarder, Left, Waiting, close_dead_writers
from cirron_otel.reading.values import clean, plural
from cirron_otel.settings import Settings, resolve

#: How often new directories are looked for, and dead writers.
_DISCOVER_S = 5.0
_RECOVER_S = 30.0
#: How often a line of progress is written where there is no terminal.
_LINE_S = 5.0
#: Sooner where it is another process that delivers: so long that may last unnoticed.
_ELSEWHERE_S = 1.0


def flush(root: Path, otlp: Sequence[str], timeout: float | None, patience: float) -> None:
    """Send what lies in one output directory, and show how far it is.

    Raises ``Exit`` with status 1 where something was not delivered or was refused for good.
    """
    guard = Guard()
    settings = settings_for(root, otlp)
    destinations = connect_all(settings, guard, scraped="no")
    close_dead_writers(root, guard)
    forwarder = Forwarder([root], destinations, guard=guard)
    forwarder.start()
    try:
        with _progress() as show:
            left = forwarder.drain(timeout, patience=patience, others=True, progress=show)
    except BaseException:
        forwarder.stop(0)
        raise
    states = forwarder.health()
    forwarder.stop(0)
    for state in states:
        count, aside = int(state["delivered"]), int(state["rejected"])
        line = f"{count:,} {plural('batch', count)} delivered to {state['description']}"
        click.echo(line + (f", {aside:,} refused and set aside in spool/rejected" if aside else ""))
    if left:
        say_left(left)
    if left or any(state["rejected"] for state in states):
        raise click.exceptions.Exit(1)


def forward_directories(
    given: Sequence[Path], otlp: Sequence[str], *, once: bool, patience: float
) -> None:
    """Deliver from these directories, and those in them, until a signal says to stop.

    With ``once`` only what is there now; raises ``Exit`` with status 1 where something is left.
    """
    settings = settings_for(Path(os.path.commonpath(given)), otlp)
    guard = Guard()
    destinations = connect_all(settings, guard, scraped="no" if once else "all")
    forwarder = Forwarder([], destinations, guard=guard)
    told = _Signals()
    watched: dict[Path, float] = {}
    if not once and not any(output_directories(one) for one in given):
        click.echo(f"no spool in {', '.join(map(str, given))} yet: waiting for one", err=True)
    forwarder.start()
    try:
        while True:
            _watch_new(forwarder, given, watched, guard)
            if once:
                if not watched:
                    raise SpoolError(f"no spool in {', '.join(map(str, given))}, nothing to send")
                left = forwarder.drain(None, patience=patience, others=True)
                if left:
                    say_left(left)
                    raise click.exceptions.Exit(1)
                return
            if told.wait(_DISCOVER_S):
                return
    finally:
        forwarder.stop(0 if once else settings.exit_budget)
        told.undo()


def settings_for(root: Path, otlp: Sequence[str]) -> Settings:
    """The settings of this environment for an output directory."""
    call: dict[str, object] = {"path": root, "output": "spool"}
    if otlp:
        call["otlp"] = list(otlp)
    settings = resolve(call=call)
    if not settings.enabled:
        raise ConfigurationError("CIRRON_ENABLED=false switches the delivery off, too: unset it")
    return settings


def connect_all(
    settings: Settings, guard: Guard, *, scraped: Literal["all", "no"]
) -> list[Destination]:
    """The destinations that the settings name, at least one. Raises ``ConfigurationError``.

    ``scraped``: whether a port for Prometheus is one.
    """
    try:
        specs = transport.resolve(settings, scraped=scraped)
    except ConfigurationError as error:  # here the argument is the option
        raise ConfigurationError(str(error).replace("profile(otlp=)", "--otlp")) from None
    if not specs:
        raise ConfigurationError(
            "there is nowhere to send to: set CIRRON_API_KEY or OTEL_EXPORTER_OTLP_ENDPOINT, or "
            "use --otlp URL"
        )
    return [transport.connect(spec, guard) for spec in specs]


def say_left(left: Iterable[Left]) -> None:
    """What was not delivered, on standard error."""
    for one in left:
        why = f": {clean(one.error)}" if one.error else ""
        waits = f"{one.batches:,} {plural('batch', one.batches)}"
        click.echo(f"not delivered: {waits} to {one.destination}{why}", err=True)


def output_directories(given: Path) -> list[Path]:
    """The output directories that a directory is, or has in it. Never raises."""
    if (given / "spool").is_dir():
        return [given]
    if given.name == "spool" and given.is_dir():
        return [given.parent]
    try:
        inside = [given / ".cirron", *sorted(path for path in given.iterdir() if path.is_dir())]
    except OSError:
        return []
    found = [one for path in inside for one in (path, path / ".cirron")]
    return list(dict.fromkeys(path for path in found if (path / "spool").is_dir()))


def _watch_new(
    forwarder: Forwarder, given: Sequence[Path], watched: dict[Path, float], guard: Guard
) -> None:
    """Take in directories that have come, and close what dead programs left open in each."""
    now = time.monotonic()
    for root in (root for one in given for root in output_directories(one)):
        if root not in watched:
            click.echo(f"forwarding {root}", err=True)
        if root not in watched or now - watched[root] >= _RECOVER_S:
            close_dead_writers(root, guard)
            watched[root] = now
            forwarder.watch(root)


class _Signals:
    """SIGTERM and SIGINT as an end in order."""

    def __init__(self) -> None:
        self._received = False
        self._before = {
            number: signal.signal(number, self._receive)
            for number in (signal.SIGTERM, signal.SIGINT)
        }

    def _receive(self, *_: object) -> None:
        self._received = True

    def wait(self, seconds: float) -> bool:
        """Whether a signal came, waiting at most so long for one."""
        until = time.monotonic() + seconds
        while not self._received and time.monotonic() < until:
            time.sleep(0.05)
        return self._received

    def undo(self) -> None:
        """Put the former handlers back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)


class _progress:  # noqa: N801 - used as a function
    """Shows how many batches wait: a bar on a terminal, now and then a line elsewhere."""

    def __init__(self) -> None:
        self._close: Callable[[], object] = lambda: None
        self._most = 0
        self._line_at = time.monotonic() + _LINE_S
        self._elsewhere_at = time.monotonic() + _ELSEWHERE_S

    def __enter__(self) -> Callable[[Waiting], object]:
        if not sys.stderr.isatty():
            return self._line
        # Only here: a pipe should not wait for it.
        from rich.console import Console  # noqa: PLC0415
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn  # noqa: PLC0415

        bar = Progress(
            TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
            TextColumn("batches"), console=Console(stderr=True), transient=True,
        )  # fmt: skip
        task = bar.add_task("sending", total=None)
        bar.start()
        self._close = bar.stop

        def show(waiting: Waiting) -> None:
            left = waiting.here + waiting.elsewhere
            self._most = max(self._most, left)
            what = "sending" if waiting.here or not waiting.elsewhere else _waits_for(waiting)
            bar.update(task, total=self._most, completed=self._most - left, description=what)

        return show

    def __exit__(self, *_: object) -> None:
        self._close()

    def _line(self, waiting: Waiting) -> None:
        now = time.monotonic()
        only_others = waiting.elsewhere and not waiting.here
        if now < (self._elsewhere_at if only_others else self._line_at):
            return
        self._line_at = self._elsewhere_at = now + _LINE_S
        left = waiting.here + waiting.elsewhere
        line = f"{left:,} {plural('batch', left)} to send"
        click.echo(f"{line}: {_waits_for(waiting)}" if only_others else line, err=True)


def _waits_for(waiting: Waiting) -> str:
    """Whom a flush waits for, where others deliver in that directory."""
    who = clean(", ".join(waiting.holders)) or "another process"
    return f"waiting for {who}, which {'deliver' if len(waiting.holders) > 1 else 'delivers'} there"
