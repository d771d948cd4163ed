"""Scalars on their way to a tracker, as marks on the current scope."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.driven import active_loop
from cirron_otel.hooks.recording import is_number
from cirron_otel.otlp.instruments import KNOWN_MARKS

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Values of one call that are copied; trackers themselves advise against so many.
MOST_VALUES = 1000
_MAX_DEPTH = 8


class _Here(threading.local):
    def __init__(self) -> None:
        #: Wrapped calls that this thread is in: one tracker may hand on to another.
        self.depth = 0


here = _Here()


class Copier:
    """Makes marks of what is given to one library. Any thread; never raises, never waits."""

    def __init__(self, rec: Recorder, library: str) -> None:
        self._rec = rec
        self._library = library
        self.copied = 0

    def copy(self, values: Iterable[tuple[str, object]], step: object = None) -> None:
        """Mark each value that is a number, with the step it was given for."""
        rec = self._rec
        if not rec.active:
            return
        attrs: dict[str, Any] = {semconv.TEE: self._library}
        if (number := _whole(step)) is not None:
            attrs[semconv.LOG_STEP] = number
        # A framework that runs the loop has marked what it trains on; this is what it reports.
        driven = active_loop(rec) is not None
        for count, (name, value) in enumerate(values):
            if count >= MOST_VALUES:
                rec.guard.lost("tee_values", 1)
                continue
            if is_number(value):
                told = f"{semconv.LOG_PREFIX}{name}" if driven and name in KNOWN_MARKS else name
                rec.mark(told, value, "point", attrs)
                self.copied += 1


def flat(values: object, prefix: str = "", depth: int = 0) -> Iterator[tuple[str, object]]:
    """Names and values of a mapping; those of a mapping inside it are called ``outer.inner``."""
    if not isinstance(values, Mapping) or depth > _MAX_DEPTH:
        return
    for key, value in list(values.items()):
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            yield from flat(value, f"{name}.", depth + 1)
        else:
            yield name, value


def _whole(step: object) -> int | None:
    try:
        return None if step is None else int(step)  # type: ignore[call-overload]
    except Exception:  # noqa: BLE001 - whatever the program gave
        return None
