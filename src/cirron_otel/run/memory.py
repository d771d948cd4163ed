"""How much memory a training holds: on its accelerator in each step, on the host every few seconds.

The accelerator is asked on the training's own thread just before an optimizer steps, when gradients
and optimizer state are there. The question goes to torch's allocator, never to the device, and is
asked so seldom that it takes no more than a five-hundredth of the time: in each step that is longer
than some ten milliseconds. Nothing is reset: a peak is the highest since the program began, or
since it reset torch's peaks itself.
"""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.marks import append_point
from cirron_otel.run.memory_errors import MemoryErrors
from cirron_otel.run.memory_reading import device_memory, in_use, resident_bytes
from cirron_otel.scope_base import current_scope
from cirron_otel.values import capture_gate

if TYPE_CHECKING:
    from cirron_otel.batching import Sealed
    from cirron_otel.recorder import Recorder

#: Seconds between two looks at the host's memory.
HOST_EVERY_S = 5.0
#: Looks at an accelerator are this many times as long apart as one takes.
SHARE = 500


class Memory:
    """The marks of one recording. ``flushed`` on the flush thread, ``stepping`` on a training's."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._host_s = time.monotonic()
        self._devices: list[tuple[str, int]] = []
        self._next_ns = 0
        self._is_asking = False

    def written(self, batch: Sealed) -> None:
        """Nothing to do."""

    def flushed(self) -> None:
        """Mark the host's memory; see whether the program has begun to use an accelerator."""
        rec = self._rec
        now = time.monotonic()
        is_time = now - self._host_s >= HOST_EVERY_S
        if not rec.active or not (is_time or not self._devices):
            return
        session = rec.session
        resident = resident_bytes() if is_time else None
        if resident is not None and session is not None:
            append_point(rec, session.id, semconv.PROCESS_MEMORY, resident)
        if is_time:
            self._host_s = now
        if capture_gate.captures:
            return
        devices = [(found.kind, found.device) for found in in_use()]
        if devices and not self._devices:
            rec.before_optimizer_step.append(self.stepping)
        self._devices = devices

    def stepping(self, _optimizer: object) -> None:
        """Mark the accelerators' memory on the step that is open, unless that was just done."""
        begun = time.perf_counter_ns()
        if begun < self._next_ns or capture_gate.captures:
            return
        rec = self._rec
        scope = current_scope(rec, get_current())
        while scope is not None and scope.name != semconv.STEP and scope.above is not None:
            scope = scope.above
        torch = sys.modules.get("torch")
        several = len(self._devices) > 1
        for kind, device in self._devices:
            found = device_memory(getattr(torch, kind), kind, device)
            if found is None or scope is None:
                continue
            attrs = {semconv.MEMORY_DEVICE: f"{kind}:{device}"} if several else {}
            iteration = scope.iteration if type(scope.iteration) is int else UNSET
            for name, value in (
                (semconv.MEMORY_ALLOCATED, found.allocated),
                (semconv.MEMORY_RESERVED, found.reserved),
                (semconv.MEMORY_PEAK, found.peak),
            ):
                append_point(rec, scope.id, name, value, attrs=attrs, iteration=iteration)
        done = time.perf_counter_ns()
        self._next_ns = done + SHARE * (done - begun)


def watch(rec: Recorder) -> None:
    """Have the memory of ``rec``'s process marked, and memory that runs out found."""
    rec.out.watchers.append(Memory(rec))
    rec.listening.at_error.append(MemoryErrors(rec))
