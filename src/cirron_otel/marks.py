"""Marks, the long way: any value, any kind, with attributes, on any scope or on none.

:func:`cirron_otel.scopes.mark` records plain numbers itself and hands everything else here.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from msgspec import UNSET, UnsetType

from cirron_otel import semconv
from cirron_otel.batch import ROOT_SPAN_ID, MarkRecord
from cirron_otel.context import get_current
from cirron_otel.fitting import MAX_NAME_BYTES
from cirron_otel.scope_base import BaseScope, current_scope
from cirron_otel.scope_core import ESTIMATED, NO_ATTRS, OPEN
from cirron_otel.values import (
    Deferred,
    MarkValue,
    UnsupportedValueError,
    attribute_value,
    attributes,
    clean_text,
    cut_text,
    mark_value,
)

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

_MAX_EARLY = 10_000


class _Refused(NamedTuple):
    """Stands for a value that no mark may have. Without the error: that would hold the value."""

    reason: str


class _EarlyMark(NamedTuple):
    name: str
    made: MarkValue | Deferred | _Refused
    kind: object
    attrs: dict[str, Any]
    ts_ns: int


class EarlyMarks:
    """The last marks made while nothing records; ``profile()`` takes them over.

    What is kept is what would be written, never the user's objects: a program that does not come to
    call ``profile()`` must not hold on to its losses and their graphs.
    """

    def __init__(self) -> None:
        self._kept: deque[_EarlyMark] = deque(maxlen=_MAX_EARLY)
        self.wanted = True

    def keep(self, name: object, value: object, kind: object, attrs: dict[str, Any]) -> None:
        """Keep one mark, unless recording was switched off. Any thread; never raises or waits."""
        if not self.wanted:
            return
        ts_ns = time.time_ns()
        made: MarkValue | Deferred | _Refused
        try:
            made = mark_value(value)
        except UnsupportedValueError as error:
            made = _Refused(str(error))
        except Exception as error:  # noqa: BLE001 - a number of the user's own class
            made = _Refused(f"reading it raised {type(error).__name__}")
        shown = kind if type(kind) is str else attribute_value(kind)
        self._kept.append(
            _EarlyMark(_mark_name(name), made, shown, attributes(attrs)[0] if attrs else {}, ts_ns)
        )

    def hand_over(self, rec: Recorder) -> None:
        """Record what was kept, owned by nobody: the seed's ``"root"`` sentinel."""
        while self._kept:
            early = self._kept.popleft()
            if isinstance(early.made, _Refused):
                _refuse(rec, early.name, early.made.reason)
            else:
                _record(
                    rec, None, early.name, early.made, early.kind, early.attrs, ts_ns=early.ts_ns
                )


def record_mark(
    rec: Recorder, name: object, value: object, kind: object, attrs: dict[str, Any]
) -> None:
    """Record a mark on the current scope, whatever its value is."""
    if rec.pending:
        rec.loops.activity()
    record_mark_on(rec, current_scope(rec, get_current()), name, value, kind, attrs)


def record_mark_on(  # noqa: PLR0913, PLR0917 - what a mark is
    rec: Recorder,
    scope: BaseScope | None,
    name: object,
    value: object,
    kind: object,
    attrs: dict[str, Any],
) -> None:
    """The same on a scope, whichever is current; on none, the mark is nobody's."""
    name = name if type(name) is str else str(name)
    try:
        made = mark_value(value)
    except UnsupportedValueError as error:
        _refuse(rec, name, str(error))
        return
    _record(rec, scope, name, made, kind, attrs)


def _record(  # noqa: PLR0913, PLR0917 - what a mark is
    rec: Recorder,
    scope: BaseScope | None,
    name: str,
    made: MarkValue | Deferred,
    kind: object,
    attrs: dict[str, Any],
    *,
    ts_ns: int = 0,
) -> None:
    """``ts_ns``: when it was made, if that is not now."""
    if rec.is_child and (worker := rec.worker_id()) is not None:
        attrs = {**attrs, semconv.WORKER_ID: worker}
    ts_ns = ts_ns or rec.clock.now()
    if scope is not None and rec.shows_marks:
        ts_ns = max(ts_ns, scope.last_ns + 1)  # the time tells the mark from its neighbours
    plain = made if isinstance(made, MarkValue) else MarkValue("float", None)
    record = MarkRecord(
        rec.next_mark_id() if scope is None else rec.mark_id(scope, ts_ns),
        scope.id if scope is not None else ROOT_SPAN_ID,
        cut_text(clean_text(name), MAX_NAME_BYTES),
        plain.value_type,
        plain.value,
        attributes(attrs)[0] if attrs else NO_ATTRS,
        ts_ns,
        _checked_kind(rec, kind),
        # A user may have set something else.
        scope.iteration if scope is not None and type(scope.iteration) is int else UNSET,
        UNSET if plain.nonfinite is None else plain.nonfinite,
    )
    if scope is not None:
        if scope._state == OPEN:  # noqa: SLF001 - a scope's own kind
            scope.note_mark(record.id)
            scope.last_ns = max(scope.last_ns, ts_ns)
        scope.mark_event(record, deferred=isinstance(made, Deferred))
    if isinstance(made, Deferred):
        rec.ensure_started()
        rec.out.defer_mark(record, made)
    else:
        rec.append_mark(record)


def append_point(  # noqa: PLR0913 - the parts of a row
    rec: Recorder,
    span_id: str,
    name: str,
    value: float,
    *,
    attrs: dict[str, Any] | None = None,
    iteration: int | UnsetType = UNSET,
) -> None:
    """Write a number of ours down on a scope, now: as a row, not as an event of its span.

    Any thread; the scope is not touched.
    """
    kind = "int" if type(value) is int else "float"
    rec.append_mark(
        MarkRecord(
            rec.next_mark_id(), span_id, name, kind, value, attrs or {}, rec.clock.now(), "point",
            iteration,
        )
    )  # fmt: skip


def overhead_mark(rec: Recorder, scope: BaseScope, now: int) -> None:
    """Say on a scope with children what recording them took, by the sampled cost of one."""
    if not rec.overhead_ns:
        return
    mark_id = rec.next_mark_id()
    scope.note_mark(mark_id)
    cost = min(int(scope.ops * rec.overhead_ns), max(0, now - scope.start_ns))
    rec.append_mark(
        MarkRecord(
            mark_id, scope.id, semconv.OVERHEAD, "int", cost, ESTIMATED, now, "point",
            scope.iteration,
        )
    )  # fmt: skip


def _mark_name(name: object) -> str:
    text = name if type(name) is str else attribute_value(name)
    return cut_text(clean_text(text if type(text) is str else str(text)), MAX_NAME_BYTES)


def _refuse(rec: Recorder, name: str, reason: str) -> None:
    graph = reason == "graph_capture"
    rec.guard.lost(reason if graph else "unsupported_mark_value")
    why = "its stream is capturing a CUDA graph" if graph else reason
    rec.guard.warn(f"mark:{name}", f"mark {name!r} is not recorded: {why}")


def _checked_kind(rec: Recorder, kind: object) -> str:
    if kind in ("point", "summary"):
        return str(kind)
    rec.guard.warn(
        "mark_kind", f"mark kind {kind!r} is neither 'point' nor 'summary'; taken as 'point'"
    )
    return "point"
