"""How many spans leave: bills are bounded, and what is left out is a whole step or nothing.

A bucket of ``burst`` spans fills up by ``rate`` spans per second of the run (its own time, so that
a queue that waited chooses as one that did not). While there is enough in it every step goes. When
it is empty a step goes whenever enough has come in, which is every k-th, evenly; and one that is
slow, failed, or has a finding or a mark that is not finite goes anyway, on credit. Spans outside of
steps (sessions, epochs, windows, checkpoints) always go. The spool has everything, whatever is left
out.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Container
from typing import NamedTuple

from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch, SpanRecord

#: Steps whose decision is remembered: their spans may be in several batches.
_MAX_DECIDED = 20_000
#: Traces with something left out whose root has not come yet.
_MAX_TRACES = 10_000
#: The last steps that a step is compared with, and the fewest that say what is slow.
_STEPS, _FEWEST_STEPS = 1000, 100
_SLOW = 0.99

_Key = tuple[object, int]


class LeftOut(NamedTuple):
    """What is missing from one trace."""

    spans: int
    steps: int


class Budget:
    """Decides for the steps of batches that come in order. Not thread-safe, pure arithmetic.

    ``rate`` in spans per second and ``burst`` in spans; a rate of 0 leaves nothing out.
    """

    def __init__(self, rate: float, burst: int) -> None:
        self.rate = rate
        self.burst = burst
        #: Spans left out so far.
        self.left_out = 0
        self._tokens = float(burst)
        self._filled_ns = 0
        self._decided: dict[_Key, bool] = {}
        self._lengths: deque[int] = deque(maxlen=_STEPS)
        self._noted = 0
        self._slow_ns: int | None = None
        self._traces: dict[str, LeftOut] = {}

    def choose(self, batch: Batch, apart: Container[str] = ()) -> set[str]:
        """The ids of the rows of a batch that are left out; those ``apart`` are counted already."""
        if self.rate <= 0:
            return set()
        session = None if batch.resource is UNSET else batch.resource.get(semconv.SESSION_ID)
        groups: dict[int, list[SpanRecord]] = {}
        outside = 0
        for row in batch.spans:
            iteration = row.iteration
            if iteration is UNSET:
                outside += row.id not in apart
            elif (rows := groups.get(iteration)) is None:
                groups[iteration] = [row]
            else:
                rows.append(row)
        self._tokens -= outside
        alarmed = {
            mark.iteration for mark in batch.marks
            if (mark.value_nonfinite is not UNSET or mark.name == semconv.FINDING)
            and mark.iteration is not UNSET
        }  # fmt: skip
        out: list[SpanRecord] = []
        for iteration, rows in groups.items():
            if not self._goes((session, iteration), rows, alarmed=iteration in alarmed):
                out += rows
        self._count(out)
        self._tokens = max(self._tokens, float(-self.burst))
        return {row.id for row in out}

    def has_room(self, spans: int, at_ns: int) -> bool:
        """Whether the bucket has room for these at that time of the run."""
        if self.rate <= 0:
            return True
        self._fill(at_ns)
        return self._tokens >= spans

    def take(self, spans: int) -> None:
        """Count spans that go, with room for them or on credit."""
        self._tokens = max(self._tokens - spans, float(-self.burst))

    def missing_from(self, root: SpanRecord) -> LeftOut | None:
        """What was left out of the trace that this is the root of; asked once."""
        return self._traces.pop(root.id[16:], None)

    def _goes(self, key: _Key, rows: list[SpanRecord], *, alarmed: bool) -> bool:
        decided = self._decided.get(key)
        if decided is not None:
            return decided
        step = None
        for row in rows:
            if row.name == semconv.STEP:
                step = row
                break
        self._fill(rows[-1].start_ns if rows[-1].end_ns is UNSET else rows[-1].end_ns)
        if self._tokens >= len(rows):
            goes = True
        elif step is None:
            # It is not over: nobody knows yet how slow it will be.
            goes = self._tokens > -self.burst
        else:
            goes = alarmed or self._is_slow(step) or any(map(_failed, rows))
        if step is not None and step.end_ns is not UNSET:
            self._note_length(step.end_ns - step.start_ns)
        if goes:
            self._tokens -= len(rows)
        self._decided[key] = goes
        if len(self._decided) > _MAX_DECIDED:
            del self._decided[next(iter(self._decided))]
        return goes

    def _fill(self, now_ns: int) -> None:
        if not self._filled_ns:
            self._filled_ns = now_ns
        passed = now_ns - self._filled_ns
        if passed > 0:
            self._filled_ns = now_ns
            self._tokens = min(self.burst, self._tokens + self.rate * passed / 1e9)

    def _is_slow(self, step: SpanRecord) -> bool:
        if self._slow_ns is None or step.end_ns is UNSET:
            return False
        return step.end_ns - step.start_ns > self._slow_ns

    def _note_length(self, length_ns: int) -> None:
        self._lengths.append(length_ns)
        self._noted += 1
        # Sorting a thousand numbers for every step would cost more than the step's span.
        if self._noted % _FEWEST_STEPS == 0:
            self._slow_ns = sorted(self._lengths)[int(_SLOW * (len(self._lengths) - 1))]

    def _count(self, rows: list[SpanRecord]) -> None:
        """Note what is left out, by trace: the second half of an id is its trace's."""
        self.left_out += len(rows)
        steps = Counter(row.id[16:] for row in rows if row.name == semconv.STEP)
        for half, spans in Counter([row.id[16:] for row in rows]).items():
            known = self._traces.get(half, LeftOut(0, 0))
            self._traces[half] = LeftOut(known.spans + spans, known.steps + steps[half])
            if len(self._traces) > _MAX_TRACES:
                del self._traces[next(iter(self._traces))]


def _failed(row: SpanRecord) -> bool:
    return row.otel is not UNSET and row.otel.status == "error"
