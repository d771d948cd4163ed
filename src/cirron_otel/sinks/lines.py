"""Closed spans as lines of text: ``profile(output="log")`` and ``output="stdout"``.

One line per span, ``[cirron] name[index]  duration  attributes``, in the order in which spans
closed, written by the flush thread beside (or, without ``"spool"``, instead of) the spool files.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Collection, Iterable

from cirron_otel.batch import SpanRecord
from cirron_otel.reading.values import duration, text

logger = logging.getLogger("cirron_otel.trace")

Sink = Callable[[Iterable[SpanRecord]], None]


def sinks(outputs: Collection[str]) -> list[Sink]:
    """The line sinks among ``outputs``."""
    known: dict[str, Sink] = {"log": _log, "stdout": _print}
    return [known[name] for name in outputs if name in known]


def line(row: SpanRecord) -> str:
    """One closed span as a line."""
    label = row.name if row.index is None else f"{row.name}[{row.index}]"
    length = duration(row.end_ns - row.start_ns) if isinstance(row.end_ns, int) else "open"
    attrs = "".join(f"  {name}={text(value)}" for name, value in row.attrs.items())
    return f"[cirron] {text(label)}  {length}{attrs}"


def _log(rows: Iterable[SpanRecord]) -> None:
    for row in rows:
        logger.info("%s", line(row))


def _print(rows: Iterable[SpanRecord]) -> None:
    sys.stdout.write("".join(f"{line(row)}\n" for row in rows))
    sys.stdout.flush()
