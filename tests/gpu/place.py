# mypy: disable-error-code="no-untyped-call"
"""Where the checks run: a CUDA device; or the CPU, on which the script itself can be tried.

Everything that exists on a GPU alone has a stand-in here, so that a check's code runs on both. What
a stand-in cannot tell a check does not ask of it: see :attr:`Place.is_gpu`.
"""

from __future__ import annotations

import contextlib
import time
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch


class Place:
    """A device, and what is done with it."""

    def __init__(self, name: str) -> None:
        self.device = torch.device(name)
        self.is_gpu = self.device.type == "cuda"
        if not self.is_gpu:
            torch.set_num_threads(1)  # nothing here is large enough for two

    def __str__(self) -> str:
        """What it is, for people."""
        if not self.is_gpu:
            return "cpu (nothing here is a figure of a GPU)"
        found = torch.cuda.get_device_properties(0)
        return f"{torch.cuda.device_count()} x {found.name}, {found.total_memory / 2**30:.0f} GiB"

    def size(self, on_gpu: int, on_cpu: int) -> int:
        """How large, or how often, something is to be."""
        return on_gpu if self.is_gpu else on_cpu

    def synchronize(self) -> None:
        """Wait until the device has done everything."""
        if self.is_gpu:
            torch.cuda.synchronize()

    def stream(self) -> AbstractContextManager[Any]:
        """Another stream of the program's own."""
        if not self.is_gpu:
            return contextlib.nullcontext()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(stream)

    @contextlib.contextmanager
    def no_waits(self) -> Iterator[None]:
        """Whatever waits for the device in here raises."""
        if not self.is_gpu:
            yield
            return
        torch.cuda.set_sync_debug_mode("error")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")

    @contextlib.contextmanager
    def waits(self) -> Iterator[list[str]]:
        """What waited for the device in here, as torch says it; complete once it is left."""
        found: list[str] = []
        if not self.is_gpu:
            yield found
            return
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                yield found
            finally:
                torch.cuda.set_sync_debug_mode("default")
        found += [str(one.message) for one in said if "synchronizing CUDA" in str(one.message)]

    def graph(self) -> AbstractContextManager[Any]:
        """The capture of a CUDA graph; gives the graph, on the CPU None."""
        if not self.is_gpu:
            return contextlib.nullcontext()

        @contextlib.contextmanager
        def captured() -> Iterator[Any]:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                yield graph

        return captured()


class Stopwatch:
    """The time between two moments of the device's queue; on the CPU, of the clock."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._marks: list[Any] = []

    def note(self) -> None:
        """Begin, and the second time end."""
        if not self._place.is_gpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._marks.append(event)

    def ms(self) -> float:
        """Milliseconds; waits for the end."""
        first, last = self._marks
        if not self._place.is_gpu:
            return float(last - first) * 1e3
        last.synchronize()
        return float(first.elapsed_time(last))
