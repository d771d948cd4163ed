"""Closed spans as lines of text: ``profile(output="log")`` and ``output="stdout"``.

One line per span, ``[cirron] name[index]  duration  attributes``, in the order in which spans
closed, written by the flush thread beside (or, without ``"spool"``, instead of) the spool files.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Collection, Iterable

from cirron_otel.batch import SpanRecord
from cirron_otel.imports import untraced
from cirron_otel.reading.values import duration, text

logger = logging.getLogger("cirron_otel.trace")

Sink = Callable[[Iterable[SpanRecord]], None]


def sinks(outputs: Collection[str], own_thread: str) -> list[Sink]:
    """The line sinks among ``outputs``; ``own_thread`` is the name of the flush thread."""
    known: dict[str, Sink] = {"log": _Log(own_thread), "stdout": _print}
    return [known[name] for name in outputs if name in known]


def line(row: SpanRecord) -> str:
    """One closed span as a line."""
    label = row.name if row.index is None else f"{row.name}[{row.index}]"
    length = duration(row.end_ns - row.start_ns) if isinstance(row.end_ns, int) else "open"
    attrs = "".join(f"  {name}={text(value)}" for name, value in row.attrs.items())
    return f"[cirron] {text(label)}  {length}{attrs}"


class _Log:
    """Writes to the log, whose handlers are the user's, and may record things themselves.

    On the flush thread there are only such scopes. They have no lines of their own, as each line
    would make another scope, for ever.
    """

    def __init__(self, own_thread: str) -> None:
        self._own_thread = own_thread

    def __call__(self, rows: Iterable[SpanRecord]) -> None:
        here = threading.current_thread()
        mine = here.ident if here.name == self._own_thread else None
        with untraced():
            for row in rows:
                if mine is None or row.thread_id != mine:
                    logger.info("%s", line(row))


def _print(rows: Iterable[SpanRecord]) -> None:
    sys.stdout.write("".join(f"{line(row)}\n" for row in rows))
    sys.stdout.flush()
