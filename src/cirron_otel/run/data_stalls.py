"""A training that waits for its data: told once, with the numbers, from rows that were written.

Nothing is added up where the training runs. The flush thread looks at the first rows of each
batch it has written, a hundred of them: a sample of the steps, and enough for a share.
"""

from __future__ import annotations

from collections import deque
from statistics import median
from typing import TYPE_CHECKING, Final, NamedTuple

from cirron_otel import semconv
from cirron_otel.findings import Finding, report
from cirron_otel.reading.values import duration
from cirron_otel.run.straggler_times import PHASES, StepTimes, Tally

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cirron_otel.batching import Sealed
    from cirron_otel.recorder import Recorder
    from cirron_otel.run.rows import Row

#: A stall: this share of the steps looked at was ``data_load``, ...
LEAST_SHARE: Final = 0.3
#: ... in at least so many of them, and so many seconds of it.
FEWEST: Final = 30
LEAST_S: Final = 1.0
#: The newest steps that are looked at together.
WINDOW: Final = 1000
#: Rows that are looked at in a batch, at most.
SAMPLE: Final = 100
_DATA = PHASES.index("data")


class Stall(NamedTuple):
    """What share of its steps a training waited for data; lengths in s."""

    share: float
    steps: int
    last: int
    #: Medians of ``data_load`` and of a whole step.
    data_load: float
    step: float


class DataStalls:
    """See the module; a :class:`~cirron_otel.spool_writer.BatchWatcher`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._steps: deque[StepTimes] = deque(maxlen=WINDOW)
        self._first: list[Row] = []
        self._told = False

    def rows(self, rows: Sequence[Row]) -> None:
        """Keep the first of those that came since the last batch."""
        room = SAMPLE - len(self._first)
        if room > 0 and not self._told:
            self._first += rows[:room]

    def written(self, _batch: Sealed) -> None:
        """Look at the first rows of the batch."""
        self._steps.extend(steps_of(self._first))
        self._first = []

    def flushed(self) -> None:
        """Say it, if there is something to say."""
        if self._told:
            return
        found = find(self._steps)
        if found is None:
            return
        self._told = True
        self._steps.clear()
        text = (
            f"the training waits for its data: data_load took {found.share:.0%} of the "
            f"{found.steps} steps looked at ({duration(found.data_load * 1e9)} of a step of "
            f"{duration(found.step * 1e9)}); more DataLoader workers, or less work for each item, "
            "would make it faster"
        )
        attributes = {
            semconv.DATA_STALL_SHARE: round(found.share, 4),
            semconv.DATA_STALL_STEPS: found.steps,
            semconv.DATA_STALL_DATA_LOAD: round(found.data_load, 6),
            semconv.DATA_STALL_STEP: round(found.step, 6),
        }
        report(
            self._rec,
            Finding("data_stall", "warning", text, step=found.last, attributes=attributes),
        )


def steps_of(rows: Sequence[Row]) -> list[StepTimes]:
    """The whole training steps in some rows.

    The first one may have begun in the batch before. The first of an epoch is left out too: there
    a loader starts its workers.
    """
    numbers = [row.iteration for row in rows if row.iteration is not None]
    left_out = {row.iteration for row in rows if row.name == semconv.STEP and row.index == 0}
    left_out.add(min(numbers, default=None))
    tally = Tally()
    tally.add(row for row in rows if row.name in {semconv.STEP, semconv.DATA_LOAD})
    tally.settle()
    return [step for step in tally.settle() if step.iteration not in left_out]


def find(steps: Iterable[StepTimes]) -> Stall | None:
    """The stall that these steps are in, if they are in one."""
    looked = list(steps)
    if len(looked) < FEWEST:
        return None
    data = sum(step.phases[_DATA] for step in looked)
    total = sum(step.total for step in looked)
    if total <= 0 or data < LEAST_S * 1e9 or data < LEAST_SHARE * total:
        return None
    return Stall(
        data / total,
        len(looked),
        max(step.iteration for step in looked),
        median(step.phases[_DATA] for step in looked) / 1e9,
        median(step.total for step in looked) / 1e9,
    )


def watch(rec: Recorder) -> None:
    """Look for stalls of the training of this process, where its rows are decoded."""
    if rec.run is not None:
        stalls = DataStalls(rec)
        rec.run.feed.consumers.append(stalls.rows)
        rec.out.watchers.append(stalls)
