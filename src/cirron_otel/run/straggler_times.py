"""What one rank did in each of its steps: from rows of the spool to a few lengths a step.

All ranks of a distributed training end a step together, so the length of a step says nothing of
who was slow. What does is the *local* time: what a rank did itself in data loading, forward,
backward, optimizer step and between them, without what it waited for the others
(``collective_wait`` scopes). Pure: no I/O, and OpenTelemetry is not needed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from cirron_otel import semconv
from cirron_otel.run.rows import Row

#: The parts of a step, as they are told to people; the last is what lies outside of the others.
PHASES: Final = ("data", "forward", "backward", "optimizer", "other")
_PHASE_OF: Final = {
    semconv.DATA_LOAD: 0,
    semconv.FORWARD: 1,
    semconv.BACKWARD: 2,
    semconv.OPTIMIZER_STEP: 3,
}
_OTHER = 4
#: Steps that may be under way at a time: of those behind a crash no end ever comes.
_MAX_OPEN = 4096


class StepTimes(msgspec.Struct, gc=False, array_like=True, frozen=True):
    """One step of one rank, in ns.

    ``phases`` are in the order of :data:`PHASES`, without waits; where the device was timed
    they are the device's, but for data loading, and there is no ``other``. ``wait`` is what the
    rank waited for others, ``total`` the length of the step as its process saw it.
    """

    iteration: int
    start_ns: int
    total: int
    phases: tuple[int, int, int, int, int]
    wait: int

    @property
    def local(self) -> int:
        """What the rank itself took."""
        return sum(self.phases)


class _Open:
    """A step whose rows are still coming in."""

    __slots__ = ("covered", "device", "on_device", "phases", "start_ns", "total", "wait")

    def __init__(self) -> None:
        self.phases = [0, 0, 0, 0, 0]
        self.wait = 0
        self.start_ns = self.total = -1
        #: What lies in scopes that have not ended yet and was counted already, by their ids: on
        #: the host's clock, and on the device's.
        self.covered: dict[str | None, int] = {}
        self.device: dict[str | None, int] = {}
        self.on_device = False


class Tally:
    """Adds up rows of one process, children before parents as they come, to :class:`StepTimes`."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self._ended: list[int] = []

    def add(self, rows: Iterable[Row]) -> None:
        """Take in rows that were closed."""
        for row in rows:
            if row.iteration is not None and row.end_ns is not None:
                self._add(row, row.iteration, row.end_ns - row.start_ns)

    def settle(self) -> list[StepTimes]:
        """The steps that had ended when this was called last.

        One call later than they ended: rows that wait for a device come after their parents.
        """
        ended, self._ended = (
            self._ended,
            [number for number, one in self._open.items() if one.total >= 0],
        )
        done = []
        for number in ended:
            one = self._open.pop(number, None)
            if one is not None:
                done.append(_finished(number, one))
        self._ended = [number for number in self._ended if number in self._open]
        done.sort(key=lambda step: step.iteration)
        return done

    def _add(self, row: Row, iteration: int, length: int) -> None:
        one = self._open.get(iteration)
        if one is None:
            if len(self._open) >= _MAX_OPEN:
                del self._open[next(iter(self._open))]
            one = self._open[iteration] = _Open()
        inside = one.covered.pop(row.id, 0)
        device_inside = one.device.pop(row.id, 0)
        phase = _PHASE_OF.get(row.name)
        device = row.gpu_ns
        if phase is not None:
            if device is None:
                one.phases[phase] += max(0, length - inside)
                device = device_inside
            else:
                one.on_device = True
                one.phases[phase] += max(0, device - device_inside)
            inside = length
        elif row.name == semconv.COLLECTIVE_WAIT:
            one.wait += max(0, length - inside) if device is None else device
            device = device or 0
            inside = length
        else:
            if row.name == semconv.STEP:
                one.start_ns, one.total = row.start_ns, length
                one.phases[_OTHER] = max(0, length - inside)
            device = device_inside
        one.covered[row.parent_id] = one.covered.get(row.parent_id, 0) + inside
        if device:
            one.device[row.parent_id] = one.device.get(row.parent_id, 0) + device


def _finished(iteration: int, one: _Open) -> StepTimes:
    data, forward, backward, optimizer, other = one.phases
    # Where the device is timed the program only hands it work, and waits somewhere for it to end.
    other = 0 if one.on_device else other
    phases = (data, forward, backward, optimizer, other)
    return StepTimes(iteration, one.start_ns, one.total, phases, one.wait)


class _Spans(msgspec.Struct, gc=False):
    spans: list[Row] = []


_batch_decoder = msgspec.json.Decoder(_Spans)


def rows_of(data: bytes) -> Sequence[Row]:
    """The spans of a batch file; none where it is not one."""
    try:
        return _batch_decoder.decode(data).spans
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()
