"""``gpu_ns``: the time between two CUDA events around a call, read by the flush thread.

Nobody waits: two events are put into the current stream, and the span's row is written once both
have passed. Events are kept for the next scope. While a CUDA graph is captured nothing is recorded
and nothing is asked: an event would become part of the graph, and even asking for one from another
thread may break the capture.
"""

from __future__ import annotations

import functools
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from cirron_otel.scope_base import Extra
from cirron_otel.values import CaptureGate, Deferred

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.scope_base import BaseScope

#: Events kept per device.
POOL_SIZE = 256


class Event(Protocol):
    """What is used of ``torch.cuda.Event``."""

    def record(self, stream: Any) -> None:  # noqa: ANN401 - torch.cuda.Stream
        """Put the event into a stream."""

    def query(self) -> bool:
        """Whether the stream has passed it."""

    def elapsed_time(self, end_event: Any) -> float:  # noqa: ANN401 - another event
        """Milliseconds from this event to another that has passed, too."""


class Cuda(Protocol):
    """What is used of the module ``torch.cuda``."""

    def is_initialized(self) -> bool:
        """Whether the program has used CUDA; we are not the one to begin."""

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""

    def current_device(self) -> int:
        """Number of the current device."""

    def current_stream(self, device: Any = None) -> Any:  # noqa: ANN401 - torch.cuda.Stream
        """The current stream of a device."""


class Begun(NamedTuple):
    """A measurement under way."""

    device: int
    event: Event


class DeviceTimer:
    """Measures on the device. ``begin`` and ``end`` on the caller's thread, never blocking."""

    def __init__(
        self, cuda: Cuda, make_event: Callable[[], Event], gate: CaptureGate | None = None
    ) -> None:
        self._cuda = cuda
        self._make_event = make_event
        self._pools: dict[int, deque[Event]] = {}
        self._gate = gate or CaptureGate()

    def begin(self) -> Begun | None:
        """Put the first event into the current stream; None where there is nothing to measure."""
        cuda = self._cuda
        if not cuda.is_initialized() or self._gate.captures or cuda.is_current_stream_capturing():
            return None
        device = cuda.current_device()
        event = self._take(device)
        event.record(cuda.current_stream(device))
        return Begun(device, event)

    def again(self, begun: Begun) -> Begun:
        """Have a measurement begin now, in place of when it began."""
        cuda = self._cuda
        if not (self._gate.captures or cuda.is_current_stream_capturing()):
            begun.event.record(cuda.current_stream(begun.device))
        return begun

    def end(self, scope: BaseScope, begun: Begun) -> None:
        """Put the second event into the stream and leave the difference to the flush thread."""
        cuda, device, first = self._cuda, begun.device, begun.event
        if self._gate.captures or cuda.is_current_stream_capturing():
            return
        last = self._take(device)
        last.record(cuda.current_stream(device))

        def ready() -> bool:
            return self._gate.asks(lambda: last.query() and first.query())

        def resolve() -> int:
            with self._gate.lock:
                elapsed = int(first.elapsed_time(last) * 1_000_000)
            pool = self._pools[device]
            pool.append(first)
            pool.append(last)
            return max(0, elapsed)

        extra = scope.extra = scope.extra or Extra()
        extra.device_time = Deferred(resolve, ready)

    def _take(self, device: int) -> Event:
        pool = self._pools.get(device)
        if pool is None:
            pool = self._pools.setdefault(device, deque(maxlen=POOL_SIZE))
        try:
            return pool.pop()
        except IndexError:
            return self._make_event()

    # --- graphs --------------------------------------------------------------------------------

    def patch(self, patches: Patches, graph_class: type) -> None:
        """Know when a graph is captured. The lock is held for the length of one event query."""
        begin, end = vars(graph_class)["capture_begin"], vars(graph_class)["capture_end"]

        @functools.wraps(begin)
        def capture_begin(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            with self._gate.lock:
                self._gate.captures += 1
            try:
                return begin(*args, **kwargs)
            except BaseException:
                self._gate.captures -= 1
                raise

        @functools.wraps(end)
        def capture_end(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            try:
                return end(*args, **kwargs)
            finally:
                self._gate.captures = max(0, self._gate.captures - 1)

        patches.replace(graph_class, "capture_begin", capture_begin)
        patches.replace(graph_class, "capture_end", capture_end)
