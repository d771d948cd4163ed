"""A record as lines for a terminal: one event each, aligned, in constant memory.

:func:`rows` gives the columns as plain strings with the event's severity, for whoever prints with
colour; :func:`lines` gives finished text without any. Every text of the record is made safe for a
terminal: no control characters come through.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import DIARY
from cirron_otel.training_record.report import words
from cirron_otel.training_record.report.event_lines import event_of
from cirron_otel.training_record.report.lines import Reading, objects, whole
from cirron_otel.training_record.report.model import Event

#: What the columns are called, in their order in :attr:`Row.cells`.
HEADS = ("seq", "time", "step", "severity", "event", "layer", "what")
#: Widths of all columns but the last; a longer text pushes its own line only.
WIDTHS = (6, 8, 9, 8, 19, 24)
_RIGHT = frozenset({0, 2})


class Row(NamedTuple):
    """One event in columns (see :data:`HEADS`), with the words that a style may hang on."""

    cells: tuple[str, ...]
    event: str
    severity: str


def rows(
    path: str | Path,
    *,
    events: Collection[str] = (),
    severities: Collection[str] = (),
    layer: str | None = None,
    since_step: int | None = None,
) -> Iterator[Row]:
    """The events of a record in order, as columns; only those asked for, where any are.

    ``events`` and ``severities`` are names of the format, ``layer`` is part of a layer's name,
    ``since_step`` leaves out what came at an earlier step. A line that is no event becomes a row
    that says so at the end. Raises :class:`~cirron_otel.errors.RecordError` where there is no diary
    that can be read, before the first row. Reads the disk as it goes.
    """
    given = Path(path)
    diary = given / DIARY if given.is_dir() else given
    if not diary.exists():
        raise RecordError(f"there is no training record in {given}: {diary} does not exist")
    return _rows(diary, frozenset(events), frozenset(severities), layer, since_step)


def _rows(
    diary: Path,
    events: frozenset[str],
    severities: frozenset[str],
    layer: str | None,
    since_step: int | None,
) -> Iterator[Row]:
    reading = Reading()
    start: float | None = None
    for line in objects(diary, reading):
        event = event_of(line)
        if start is None:
            start = event.time
        if asked_for(event, events, severities, layer, since_step):
            yield _row(event, start)
    if reading.bad:
        torn = "; the last one is half written, as a crash leaves it" if reading.torn else ""
        told = f"{words.plural(reading.bad, 'line')} could not be read{torn}"
        yield Row(("", "", "", "warning", "unreadable", "", told), "unreadable", "warning")


def asked_for(
    event: Event,
    events: Collection[str],
    severities: Collection[str],
    layer: str | None,
    since_step: int | None,
) -> bool:
    """Whether an event is one that :func:`rows` would give, asked with the same arguments."""
    return (
        (not events or event.name in events)
        and (not severities or event.severity in severities)
        and (layer is None or (event.layer is not None and layer in event.layer))
        and (since_step is None or (event.step is not None and event.step >= since_step))
    )


def _row(event: Event, start: float | None) -> Row:
    since = None if event.time is None or start is None else event.time - start
    cells = (
        words.count(event.seq),
        words.NOTHING if since is None else words.short_duration(since),
        words.count(event.step),
        event.severity,
        words.title(event.name),
        words.layer_name(event.layer) if event.layer is not None else "",
        words.describe(event),
    )
    return Row(cells, event.name, event.severity)


def lines(listed: Iterable[Row], *, heads: bool = True) -> Iterator[str]:
    """Rows as aligned text without colour, the heads first."""
    if heads:
        yield aligned(HEADS)
    for row in listed:
        yield aligned(row.cells)


def aligned(cells: tuple[str, ...]) -> str:
    """One line of columns."""
    return "".join(padded(cells)).rstrip()


def padded(cells: tuple[str, ...]) -> list[str]:
    """The cells filled up to their columns, a gap after each: for printing piece by piece."""
    filled = []
    for at, (cell, columns) in enumerate(zip(cells, WIDTHS, strict=False)):
        space = " " * max(columns - _width(cell), 0)
        filled.append((space + cell if at in _RIGHT else cell + space) + "  ")
    return [*filled, cells[-1]]


def heading(path: str | Path) -> list[tuple[str, str]]:
    """The first event's facts as names and values; empty where the first is no ``run_start``.

    Raises :class:`~cirron_otel.errors.RecordError` where the diary cannot be read.
    """
    given = Path(path)
    diary = given / DIARY if given.is_dir() else given
    line = next(objects(diary, Reading()), {})
    if line.get("event") != "run_start":
        return []
    size = words.count(whole(line.get("parameters")))
    return [
        ("run", words.scalar(line.get("name"))),
        ("model", f"{words.scalar(line.get('model'))}, {size} parameters"),
        ("written by", words.scalar(line.get("tool"))),
        ("started", words.moment(event_of(line).time)),
    ]


def _width(text: str) -> int:
    """Columns a text takes in a terminal."""
    return sum(
        0 if unicodedata.combining(char) else 2 if unicodedata.east_asian_width(char) in "WF" else 1
        for char in text
    )
