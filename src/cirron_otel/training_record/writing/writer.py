"""The chain and the digests of a record that is being written: from fields to bytes in the files.

Knows nothing of threads, signals or losses: ``journal.py`` does. What raises here has written
nothing and changed nothing.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from hashlib import sha256
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel.clock import Clock
from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import GENESIS, MAX_LINE
from cirron_otel.training_record.counts import Counts
from cirron_otel.training_record.events import QUICK, field_problems, is_in_order
from cirron_otel.training_record.line_text import made_line
from cirron_otel.training_record.writing.appending import append, trim
from cirron_otel.training_record.writing.row_text import row_line

if TYPE_CHECKING:
    from cirron_otel.training_record.writing.opening import RecordFiles

#: Keys of a line that are never an event's own.
RESERVED = frozenset({"seq", "time", "event", "prev", "hash"})


class State(NamedTuple):
    """How far both files are. Replaced in one step when a line is in.

    So an exception that a signal handler raises at any point leaves it true: what was written and
    is not in here is cut off before the next line.
    """

    counts: Counts
    #: Of all bytes of the metrics file; never updated, only copied.
    sha: hashlib._Hash
    digest: str
    seq: int = 0
    head: str = GENESIS
    diary_size: int = 0
    time: float = 0.0
    events_told: int = 0
    rows: int = 0
    metrics_size: int = 0
    step: int = -1
    rows_told: int = 0
    run_end: dict[str, Any] | None = None


class Writer:
    """Appends lines and rows. One thread at a time. ``files`` is set once they are open.

    ``add_where`` may add fields that say where the training is.
    """

    files: RecordFiles

    def __init__(self, clock: Clock, add_where: Callable[[dict[str, object]], None] | None) -> None:
        self._clock = clock
        self._add_where = add_where
        empty = sha256()
        self.state = State(Counts(), empty, empty.hexdigest())

    def event(self, event: str, fields: Mapping[str, object], lost: int) -> dict[str, Any]:
        """Append a line and return it. ``lost`` is how many events were lost so far.

        Raises ``OSError`` or :class:`~cirron_otel.errors.RecordError`.
        """
        state = self.state
        if state.run_end is not None:
            raise RecordError("the record has ended: nothing is written after run_end")
        form = QUICK.get(event)
        if form is None:
            raise RecordError(
                f"there is no event type {event!r}: put new data into further fields of a known one"
            )
        # The wall clock may be set back; a record's time never runs backwards.
        time = max(state.time, round(self._clock.now() / 1e9, 3))
        given: dict[str, object] = {"seq": state.seq, "time": time, "event": event, **fields}
        given["metrics_digest"], given["metrics_rows"] = state.digest, state.rows
        if self._add_where is not None:
            self._add_where(given)
        if lost > state.events_told:
            given["lost_before"] = lost - state.events_told
        body, head, data = made_line(state.head, given)
        if not is_in_order(body, form) or not RESERVED.isdisjoint(fields):
            wrong = "; ".join(field_problems(body)) or "a field has a reserved name"
            raise RecordError(f"{event}: {wrong}")
        _fits(data, event)
        size = append(self.files.diary, state.diary_size, data)
        counts = state.counts.with_event(body)
        line = {**body, "prev": state.head, "hash": head}
        self.state = State(
            counts, state.sha, state.digest, state.seq + 1, head, size, time, lost,
            state.rows, state.metrics_size, state.step, state.rows_told,
            line if event == "run_end" else None,
        )  # fmt: skip
        return line

    def row(self, row: dict[str, Any], lost: int) -> dict[str, Any]:
        """Append a metrics row (without its digest) and return it. Raises as :meth:`event` does."""
        state = self.state
        if state.run_end is not None:
            raise RecordError("the record has ended: nothing is written after run_end")
        if row["step"] <= state.step:
            raise RecordError(f"a check at step {row['step']} comes after one at {state.step}")
        if lost > state.rows_told:
            row["lost_before"] = lost - state.rows_told
        row["digest"] = state.digest
        row, data = row_line(row)
        _fits(data, "row")
        size = append(self.files.metrics, state.metrics_size, data)
        counts, sha = state.counts.with_row(row), state.sha.copy()
        sha.update(data)
        self.state = State(
            counts, sha, sha.hexdigest(), state.seq, state.head, state.diary_size, state.time,
            state.events_told, state.rows + 1, size, row["step"], lost,
        )  # fmt: skip
        self._clock.resync()
        return row

    def end(
        self, fields: Mapping[str, object], *, steps: int, lost_events: int, lost_rows: int
    ) -> dict[str, Any]:
        """Append ``run_end`` and return it. Raises as :meth:`event` does."""
        state = self.state
        with contextlib.suppress(OSError):
            trim(self.files.metrics, state.metrics_size)
        losses = {"lost_events": lost_events, "lost_rows": lost_rows}
        return self.event(
            "run_end",
            {
                "steps": max(steps, state.counts.steps),
                "checks": state.rows + lost_rows,
                "counts": state.counts.to_dict(),
                "metrics_sha256": state.digest,
                **fields,
                **{key: count for key, count in losses.items() if count},
            },
            lost_events,
        )


def _fits(line: bytes, what: str) -> None:
    if len(line) > MAX_LINE:
        raise RecordError(
            f"{what}: its line is longer than {MAX_LINE >> 20} MiB, which no reader takes"
        )
