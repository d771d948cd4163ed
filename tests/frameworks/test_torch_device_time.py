"""The device timer, with events that a test moves on by hand in place of a GPU's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.hooks.patches import Patches
from cirron_otel.hooks.torch.cuda import POOL_SIZE, DeviceTimer
from cirron_otel.scope_base import BaseScope
from helpers import read_spool


class Device:
    """What there is of ``torch.cuda`` here: a clock in ms, and how far its stream has got."""

    def __init__(self) -> None:
        self.initialized = True
        self.capturing = False
        self.number = 0
        self.queued = 0.0
        self.passed = 0.0
        self.made = 0
        self.queries = 0

    def is_initialized(self) -> bool:
        """Whether the program has used it."""
        return self.initialized

    def is_current_stream_capturing(self) -> bool:
        """Whether a graph is being captured."""
        return self.capturing

    def current_device(self) -> int:
        """The number a test has set."""
        return self.number

    def current_stream(self, device: Any = None) -> int:
        """A stream, which is the number of its device."""
        return self.number if device is None else int(device)

    def make(self) -> Event:
        """A new event, counted."""
        self.made += 1
        return Event(self)


class Event:
    """An event: remembers when it was put into the stream, and on which device."""

    def __init__(self, device: Device) -> None:
        self.device = device
        self.at = -1.0
        self.stream: int | None = None

    def record(self, stream: Any) -> None:
        """Note when it was put into the stream."""
        assert self.stream in (None, stream), "an event belongs to the device it was used on first"
        self.stream = stream
        self.at = self.device.queued

    def query(self) -> bool:
        """Whether the device has got that far."""
        assert not self.device.capturing, "asking while a graph is captured breaks the capture"
        self.device.queries += 1
        return self.at <= self.device.passed

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between two events that have passed."""
        assert self.query()
        assert end_event.query()
        return float(end_event.at - self.at)


@pytest.fixture
def device() -> Device:
    """A device that a program has begun to use."""
    return Device()


@pytest.fixture
def timer(device: Device) -> DeviceTimer:
    """A timer on it."""
    return DeviceTimer(device, device.make)


def _measured(timer: DeviceTimer, device: Device, ms: float) -> BaseScope:
    rec = recorder._current
    assert rec is not None
    with rec.make_scope("forward", None, {}) as scope:
        begun = timer.begin()
        device.queued += ms
        if begun is not None:
            timer.end(scope, begun)
    return scope


def test_rows_wait_for_the_device_and_bear_its_time(timer: DeviceTimer, device: Device) -> None:
    """A span's row is written when its events have passed, with the time between them."""
    ci.profile(frameworks=[])
    _measured(timer, device, 2.5)
    ci.flush()
    assert read_spool().spans == []
    assert ci.health()["pending_device_values"] == 1
    device.passed = device.queued
    ci.flush()
    assert [span.gpu_ns for span in read_spool().spans] == [2_500_000]
    assert ci.health()["pending_device_values"] == 0


def test_events_are_used_again_each_on_its_device(timer: DeviceTimer, device: Device) -> None:
    """Two events serve any number of scopes in turn; another device has its own."""
    ci.profile(frameworks=[])
    for number in (0, 0, 0, 1, 1, 0):
        device.number = number
        _measured(timer, device, 1.0)
        device.passed = device.queued
        ci.flush()
    assert device.made == 4
    assert [span.gpu_ns for span in read_spool().named("forward")] == [1_000_000] * 6


def test_a_measurement_that_begins_again(timer: DeviceTimer, device: Device) -> None:
    """The last gradient counts: its event is the first one's, put into the stream once more."""
    rec = ci.profile(frameworks=[])._rec
    assert rec is not None
    with rec.make_scope("collective_wait", None, {}) as scope:
        begun = timer.begin()
        assert begun is not None
        device.queued += 7
        assert timer.again(begun) is begun
        device.queued += 2
        device.capturing = True
        timer.again(begun)  # not into a graph
        device.capturing = False
        device.queued += 1
        timer.end(scope, begun)
    device.passed = device.queued
    ci.flush()
    assert device.made == 2
    assert read_spool().one("collective_wait").gpu_ns == 3_000_000


def test_the_pool_is_bounded(timer: DeviceTimer, device: Device) -> None:
    """After a burst at most so many events are kept."""
    ci.profile(frameworks=[])
    for _ in range(POOL_SIZE):
        _measured(timer, device, 1.0)
    device.passed = device.queued
    ci.flush()
    assert device.made == 2 * POOL_SIZE
    assert len(timer._pools[0]) == POOL_SIZE


def test_a_change_of_device_inside_a_scope(timer: DeviceTimer, device: Device) -> None:
    """Both events are put on the device where the scope began."""
    ci.profile(frameworks=[])
    rec = recorder._current
    assert rec is not None
    with rec.make_scope("forward", None, {}) as scope:
        begun = timer.begin()
        device.number = 1
        device.queued = device.passed = 4.0
        assert begun is not None
        timer.end(scope, begun)
    ci.shutdown()
    assert read_spool().one("forward").gpu_ns == 4_000_000


def test_nothing_is_measured_before_the_program_uses_the_device(
    timer: DeviceTimer, device: Device
) -> None:
    """We never initialise CUDA ourselves."""
    device.initialized = False
    ci.profile(frameworks=[])
    _measured(timer, device, 1.0)
    ci.shutdown()
    assert device.made == 0
    assert read_spool().one("forward").gpu_ns is None


def test_a_captured_graph_is_left_alone(timer: DeviceTimer, device: Device) -> None:
    """While a graph is captured no event is recorded and none is asked, by no thread."""

    class Graph:
        """What there is of ``torch.cuda.CUDAGraph`` here."""

        def capture_begin(self) -> None:
            if device.capturing:
                raise RuntimeError("already")
            device.capturing = True

        def capture_end(self) -> None:
            device.capturing = False

    begin = vars(Graph)["capture_begin"]
    patches = Patches()
    timer.patch(patches, Graph)
    ci.profile(frameworks=[])
    _measured(timer, device, 1.0)
    graph = Graph()
    graph.capture_begin()
    with pytest.raises(RuntimeError, match="already"):
        graph.capture_begin()
    _measured(timer, device, 1.0)
    device.passed = device.queued
    ci.flush()
    assert device.queries == 0
    assert [span.gpu_ns for span in read_spool().named("forward")] == [None]
    graph.capture_end()
    ci.flush()
    assert sorted(str(span.gpu_ns) for span in read_spool().named("forward")) == ["1000000", "None"]
    patches.undo()
    assert vars(Graph)["capture_begin"] is begin


def test_a_device_that_never_answers_costs_the_number_only(
    timer: DeviceTimer, device: Device
) -> None:
    """At shutdown the row of a scope whose events have not passed is written without gpu_ns."""
    ci.profile(frameworks=[])
    _measured(timer, device, 1.0)
    ci.shutdown()
    assert read_spool().one("forward").gpu_ns is None
    assert len(read_spool().named("cirron.session")) == 1


def test_without_a_device_there_is_no_timer() -> None:
    """On a machine without CUDA the hook measures nothing and says so nowhere."""
    if torch.cuda.device_count():
        pytest.skip("this machine has one")
    ci.profile()
    torch.nn.Linear(1, 1)(torch.ones(1))
    ci.shutdown()
    assert read_spool().one("forward").gpu_ns is None
