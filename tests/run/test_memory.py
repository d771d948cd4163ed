"""How much memory a training holds, and what is said when it runs out."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel import recorder, semconv
from cirron_otel.otlp.metrics import Totals
from cirron_otel.run.memory import HOST_EVERY_S, Memory
from cirron_otel.run.memory_errors import MemoryErrors, device_blocks, is_memory_error, largest
from cirron_otel.run.memory_reading import DeviceMemory, device_memory, text_of
from helpers import RunProgram, read_spool


def test_the_hosts_memory_is_marked_and_a_metric() -> None:
    """The resident set stands on the session and is a metric under OpenTelemetry's name."""
    ci.profile(frameworks=[])
    (memory,) = [one for one in recorder._current.out.watchers if isinstance(one, Memory)]
    ci.flush()
    memory._host_s -= HOST_EVERY_S  # five seconds later
    ci.flush()
    ci.shutdown()
    rows = read_spool()
    (mark,) = [mark for mark in rows.marks if mark.name == semconv.PROCESS_MEMORY]
    assert mark.span_id == rows.one("cirron.session").id
    assert 1 << 20 < mark.value < 1 << 40
    totals = Totals.begin(rows.batches[0])
    for batch in rows.batches:
        totals.add(batch)
    (metric,) = [m for m in totals.metrics() if m.instrument.name == semconv.PROCESS_MEMORY]
    assert (metric.instrument.unit, metric.points[0].value) == ("By", float(mark.value))
    assert metric.points[0].attrs == {}


# --- running out, for real ------------------------------------------------------------------------


def test_memory_that_runs_out_in_torch(run_program: RunProgram) -> None:
    """A finding names the scope and the largest tensors; the exception is torch's own."""
    run = run_program(
        """
        import torch
        import cirron_otel as ci

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.small, self.large = torch.nn.Linear(4, 4), torch.nn.Linear(512, 512)
            def forward(self, batch):
                return torch.empty(1 << 58) if batch.numel() == 4 else self.small(batch)

        found = []
        ci.profile(on_finding=found.append, frameworks=["torch"])
        model = ci.watch(Model())
        failed = 0
        for _ in ci.epochs(range(1)):
            for size in ci.batches((2, 1, 1)):
                if size == 2:
                    model(torch.ones(2, 4))
                    continue
                try:
                    model(torch.ones(size, 4))
                except RuntimeError as error:  # as a search for the largest batch does
                    failed += type(error) is RuntimeError and error.__cause__ is None
                    assert not hasattr(error, "__notes__")
        ci.shutdown()
        print(failed, len(found), found[0].kind, found[0].severity, found[0].step)
        print(found[0].message)
        print(found[0].attributes["cirron.memory.blocks"])
        print(found[1].message.split(";")[0])
        """
    )
    lines = run.stdout.splitlines()
    assert lines[0] == "2 2 out_of_memory critical 1"
    assert lines[1].startswith("out of memory in forward of step[1] of epoch[0]; the process holds")
    assert "1.0 MiB Model.large.weight" in lines[1]
    assert lines[2].startswith("['1.0 MiB Model.large.weight', '2.0 KiB Model.large.bias'")
    assert lines[3] == "out of memory in forward of step[2] of epoch[0]"
    rows = [row for batch in run.batches for row in (batch.logs or [])]
    told = [row for row in rows if row["event_name"] == "cirron.finding"]
    assert [row["attrs"]["cirron.finding.kind"] for row in told] == ["out_of_memory"] * 2


def test_pythons_own_error_is_found_once() -> None:
    """A ``MemoryError`` is one finding, however many scopes it flies through."""
    found: list[ci.Finding] = []
    ci.profile(frameworks=[], on_finding=found.append)
    with pytest.raises(MemoryError), ci.scope("outer"), ci.scope("inner", index=3):
        bytes(1 << 62)
    with pytest.raises(ValueError, match="other"), ci.scope("outer"):
        raise ValueError("other")
    assert [one.message.split(";")[0] for one in found] == ["out of memory in inner[3] of outer"]
    assert ci.health()["findings"]["by_kind"] == {"out_of_memory": 1}


# --- what torch's allocator says ------------------------------------------------------------------


def allocator(**numbers: int) -> Any:
    """What torch's module of a kind of device offers, as far as it is asked, with these numbers."""
    stats = {
        "allocated_bytes": {"all": {"current": numbers["allocated"], "peak": numbers["peak"]}},
        "reserved_bytes": {"all": {"current": numbers["reserved"], "peak": numbers["reserved"]}},
    }
    segments = [
        {"device": 1, "address": 0, "blocks": [{"size": 999, "state": "active_allocated"}]},
        {
            "device": 0,
            "address": 4096,
            "blocks": [
                {"size": 1024, "state": "inactive"},
                {"size": 512, "state": "active_allocated", "frames": [
                    {"filename": "/x/site-packages/torch/nn/linear.py", "line": 1},
                    {"filename": "/home/train.py", "line": 17},
                ]},
                {"size": 2048, "state": "active_allocated"},
            ],
        },
    ]  # fmt: skip
    asked: list[int] = []

    def memory_stats_as_nested_dict(device: int) -> dict[str, Any]:
        asked.append(device)
        time.sleep(numbers.get("takes_ms", 0) / 1000)
        return stats if numbers["reserved"] else {}

    return SimpleNamespace(
        memory=SimpleNamespace(memory_stats_as_nested_dict=memory_stats_as_nested_dict),
        memory_snapshot=lambda: segments,
        asked=asked,
        is_initialized=lambda: False,
    )


def test_numbers_of_a_device() -> None:
    """Allocated, reserved and peak are the allocator's; a device that holds nothing is none."""
    cuda = allocator(allocated=10, reserved=20, peak=15)
    assert device_memory(cuda, "cuda", 0) == DeviceMemory("cuda", 0, 10, 20, 15)
    assert device_memory(allocator(allocated=0, reserved=0, peak=0), "cuda", 0) is None


def test_live_blocks_of_a_device() -> None:
    """Blocks in use are listed by size, with the line that made them where torch recorded it."""
    ci.profile(frameworks=[])
    found = largest(device_blocks(recorder._current, allocator(allocated=1, reserved=1, peak=1), 0))
    assert [str(block) for block in found] == ["2.0 KiB", "512 B made in /home/train.py:17"]
    assert text_of(3 << 30) == "3.0 GiB"


def test_each_step_has_its_marks_and_seldom_asking_is_cheap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Marks stand on the open step; the next look is 500 times as far away as one took."""
    cuda = allocator(allocated=10, reserved=20, peak=15, takes_ms=2)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    ci.profile(frameworks=[])
    memory = Memory(recorder._current)
    memory._devices = [("cuda", 0)]
    for _ in ci.batches(range(3)):
        with ci.scope("forward"):
            memory.stepping(None)
    assert cuda.asked == [0]
    memory._next_ns = 0
    memory._devices = [("cuda", 0), ("cuda", 1)]
    memory.stepping(None)
    ci.shutdown()
    rows = read_spool()
    marks = [mark for mark in rows.marks if mark.name.startswith("cirron.memory.")]
    assert [(m.name, m.value) for m in marks[:3]] == [
        ("cirron.memory.allocated", 10), ("cirron.memory.reserved", 20), ("cirron.memory.peak", 15),
    ]  # fmt: skip
    assert {mark.span_id for mark in marks[:3]} == {rows.named("step")[0].id}
    assert {mark.iteration for mark in marks[:3]} == {0}
    assert [m.attrs.get(semconv.MEMORY_DEVICE) for m in marks[3::3]] == ["cuda:0", "cuda:1"]


def test_other_exceptions_are_no_memory_errors() -> None:
    """What merely mentions memory is not taken for memory that ran out."""
    assert not is_memory_error(RuntimeError("pinned memory requires CUDA"))
    assert not is_memory_error(ValueError("out of memory"))
    assert is_memory_error(
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
    )
    ci.profile(frameworks=[])
    assert MemoryErrors(recorder._current)(recorder._current.session, KeyError("x")) is None
