# mypy: disable-error-code="no-untyped-call"
"""What has to be so on a GPU: each function is a check, and raises AssertionError where it is not.

A check is given the place and an empty directory. What is about statistics is in ``described.py``.
"""

from __future__ import annotations

import gzip
import json
import time
from pathlib import Path

import torch
from place import Place, Stopwatch
from torch import distributed, nn

import cirron_otel as ci
from cirron_otel.batch import Batch, MarkRecord, SpanRecord, decode


def read(directory: str) -> tuple[list[SpanRecord], list[MarkRecord]]:
    """The spans and marks of a spool."""
    batches: list[Batch] = [
        decode(file.read_bytes()) for file in sorted(Path(directory).glob("spool/*.json"))
    ]
    return (
        [span for batch in batches for span in batch.spans],
        [mark for batch in batches for mark in batch.marks],
    )


def train(place: Place, steps: int, *, marks: bool = True) -> None:
    """Train a small network."""
    size = place.size(512, 8)
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, 10)).to(place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randn(64, size, device=place.device) for _ in range(4)]
    for number in ci.batches(range(steps)):
        loss = model(batches[number % 4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if marks:
            ci.mark("loss", loss)


def device_time_is_filled(place: Place, directory: str) -> None:
    """forward, backward and optimizer_step bear gpu_ns; other scopes do not."""
    steps = place.size(50, 3)
    ci.profile(path=directory)
    train(place, steps)
    place.synchronize()
    assert ci.shutdown()
    spans, marks = read(directory)
    for name in ("forward", "backward", "optimizer_step"):
        times = [span.gpu_ns for span in spans if span.name == name]
        assert len(times) == steps, f"{len(times)} spans are named {name}"
        timed = [isinstance(ns, int) and 0 < ns < 10**10 for ns in times]
        assert all(timed) if place.is_gpu else not any(timed), f"{name}: {times[:5]}"
    assert all(span.gpu_ns is None for span in spans if span.name in ("step", "data_load"))
    losses = [mark.value for mark in marks if mark.name == "loss"]
    assert len(losses) == steps
    assert all(isinstance(value, float) for value in losses)


def device_time_agrees_with_the_device(place: Place, directory: str) -> None:
    """gpu_ns of a forward is the time that events of the program's own measure around it."""
    size, times = place.size(4096, 64), place.size(20, 2)
    model = nn.Linear(size, size, bias=False).to(place.device)
    x = torch.randn(size, size, device=place.device)
    for _ in range(3):
        model(x)
    ci.profile(path=directory)
    watch = Stopwatch(place)
    watch.note()
    for _ in range(times):
        model(x)
    watch.note()
    place.synchronize()
    assert ci.shutdown()
    spans, _ = read(directory)
    found = [span.gpu_ns for span in spans if span.name == "forward"]
    assert len(found) == times
    ours, theirs = sum(ns or 0 for ns in found) / 1e6, watch.ms()
    if place.is_gpu:
        assert 0.5 * theirs <= ours <= 1.05 * theirs, f"{ours:.3f} ms, not {theirs:.3f} ms"


def nothing_waits_for_the_device(place: Place, directory: str) -> None:
    """Hooks and marks of device values never synchronise."""
    steps = place.size(20, 2)
    train(place, 3, marks=False)
    ci.profile(path=directory)
    place.synchronize()
    with place.no_waits():
        train(place, steps)
    assert ci.shutdown()
    _, marks = read(directory)
    assert sum(mark.name == "loss" for mark in marks) == steps
    assert ci.health()["swallowed_errors"] == {}


def marks_keep_the_value_of_their_moment(place: Place, directory: str) -> None:
    """A later in-place write does not change a mark; every type of scalar arrives."""
    ci.profile(path=directory)
    value = torch.zeros((), device=place.device)
    with ci.scope("count"):
        for _ in range(100):
            ci.mark("count", value)
            value.add_(1)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool):
            ci.mark(str(dtype), torch.ones(1, dtype=dtype, device=place.device))
    assert ci.shutdown()
    _, marks = read(directory)
    counts = sorted((mark.ts_ns, mark.value) for mark in marks if mark.name == "count")
    assert [value for _, value in counts] == [float(n) for n in range(100)]
    found = {mark.name: mark.value for mark in marks if mark.name.startswith("torch.")}
    assert found == {
        "torch.float16": 1.0,
        "torch.bfloat16": 1.0,
        "torch.float64": 1.0,
        "torch.int64": 1,
        "torch.bool": True,
    }


def a_graph_is_captured_undisturbed(place: Place, directory: str) -> None:
    """While a graph is captured marks of device values are counted drops, and the graph works.

    A short flush interval has the flush thread ask for older events all the while.
    """
    times = place.size(20, 2)
    model = nn.Linear(256, 256).to(place.device)
    static = torch.ones(64, 256, device=place.device)
    with place.stream():
        for _ in range(3):
            model(static)
    place.synchronize()
    ci.profile(path=directory, flush_interval=0.05)
    train(place, times)
    for _ in range(times):
        model(static)
        with place.graph() as graph:
            out = model(static)
            ci.mark("inside", out.sum())
            assert (ci.snapshot(model) is None) == place.is_gpu
            for _ in range(200):
                out = out + 1
    expected = model(static) + 200
    if graph is not None:
        graph.replay()
    place.synchronize()
    assert torch.allclose(out, expected)
    health = ci.health()
    lost = times if place.is_gpu else 0
    assert health["losses"].get("graph_capture", 0) == lost, health["losses"]
    assert health["snapshots"]["skipped"].get("graph_capture", 0) == lost, health["snapshots"]
    assert ci.shutdown()
    spans, marks = read(directory)
    assert any(mark.name == "inside" for mark in marks) != place.is_gpu
    without = [span for span in spans if span.name == "forward" and span.gpu_ns is None]
    assert not place.is_gpu or len(without) == times, f"{len(without)} forwards have no gpu_ns"


def streams_and_devices_of_the_program(place: Place, directory: str) -> None:
    """A forward on another stream or device is measured there."""
    ci.profile(path=directory)
    devices = range(torch.cuda.device_count()) if place.is_gpu else range(1)
    for number in devices:
        device = torch.device("cuda", number) if place.is_gpu else place.device
        with torch.cuda.device(number if place.is_gpu else -1):
            model = nn.Linear(128, 128).to(device)
            x = torch.ones(8, 128, device=device)
            with place.stream():
                model(x)
                model(x)
    place.synchronize()
    assert ci.shutdown()
    spans, _ = read(directory)
    forwards = [span for span in spans if span.name == "forward"]
    assert len(forwards) == 2 * len(devices)
    assert all(isinstance(span.gpu_ns, int) == place.is_gpu for span in forwards)


def the_session_names_the_device(place: Place, directory: str) -> None:
    """The session bears device and cuda_count."""
    ci.profile(path=directory)
    assert ci.shutdown()
    spans, _ = read(directory)
    (session,) = (span for span in spans if span.parent_id is None)
    assert session.attrs["device"] == place.device.type
    assert session.attrs.get("cuda_count", 0) == torch.cuda.device_count()


def memory_stands_on_steps(place: Place, directory: str) -> None:
    """Steps that come after the device is in use bear what the allocator says; no peak is reset."""
    held = torch.zeros(place.size(64 << 20, 64), dtype=torch.uint8, device=place.device)
    ci.profile(path=directory, flush_interval=0.05)
    peak = torch.cuda.max_memory_allocated()
    for _ in range(place.size(20, 1)):
        train(place, place.size(20, 2))
        time.sleep(place.size(20, 0) / 1e3)
    assert torch.cuda.max_memory_allocated() >= peak
    assert ci.shutdown()
    spans, marks = read(directory)
    steps = {span.id for span in spans if span.name == "step"}
    found = [mark for mark in marks if mark.name == "cirron.memory.allocated"]
    assert bool(found) == place.is_gpu
    assert {mark.span_id for mark in found} <= steps
    for mark in found:
        assert isinstance(mark.value, int)
        assert held.numel() <= mark.value <= torch.cuda.max_memory_allocated()
    names = {mark.name for mark in marks}
    expected = {"cirron.memory.reserved", "cirron.memory.peak", "process.memory.usage"}
    assert expected <= names or not place.is_gpu


def memory_that_runs_out_is_found(place: Place, directory: str) -> None:
    """The finding has the scope and the largest block by its name; the exception is torch's."""
    found: list[ci.Finding] = []
    ci.profile(path=directory, on_finding=found.append)
    size = place.size(8192, 64)
    model = ci.watch(nn.Linear(size, size, bias=False).to(place.device))
    raised: type[BaseException] | None = None
    try:
        with ci.scope("too_large", index=3):
            torch.empty(1 << 50, dtype=torch.uint8, device=place.device)
    except RuntimeError as error:
        raised = type(error)
    assert raised is (torch.cuda.OutOfMemoryError if place.is_gpu else RuntimeError)
    assert model.weight.device.type == place.device.type
    (finding,) = found
    assert finding.kind == "out_of_memory"
    assert finding.message.startswith("out of memory in too_large[3]; "), finding.message
    blocks = finding.attributes["cirron.memory.blocks"]
    own = [one for one in blocks if one.endswith(" Linear.weight")]
    assert own, blocks
    assert own == ["256.0 MiB Linear.weight"] or not place.is_gpu, own


def the_resource_names_the_device(place: Place, directory: str) -> None:
    """``hw.id`` is the UUID of the device that is in use."""
    ci.profile(path=directory, flush_interval=0.05)
    train(place, 3)
    time.sleep(place.size(500, 0) / 1e3)
    ci.mark("late", 1)
    assert ci.shutdown()
    newest = decode(max(Path(directory).glob("spool/*.json")).read_bytes())
    assert isinstance(newest.resource, dict)
    said = newest.resource.get("hw.id")
    if place.is_gpu:
        uuid = str(torch.cuda.get_device_properties(0).uuid)
        assert said in (uuid, f"GPU-{uuid}"), (said, uuid)
    else:
        assert said is None


def a_window_has_what_the_device_did(place: Place, directory: str) -> None:
    """Kernels are in the file of a window, and our scopes beside them."""
    ci.profile(path=directory)
    window = ci.profile_window(steps=2)
    train(place, place.size(6, 4))
    assert ci.shutdown()
    while not window.done and window.error is None:
        time.sleep(0.05)
    assert window.file is not None, window.error
    trace = json.loads(gzip.decompress(window.file.read_bytes()))
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    assert {"kernel" if place.is_gpu else "cpu_op", "user_annotation"} <= kinds, kinds


def a_wait_for_a_collective_has_the_device_s_time(place: Place, directory: str) -> None:
    """``collective_wait`` of NCCL bears gpu_ns: the program's thread does not wait there."""
    backend = "nccl" if place.is_gpu else "gloo"
    distributed.init_process_group(
        backend, init_method=f"file://{directory}/rendezvous", rank=0, world_size=1
    )
    try:
        ci.profile(path=directory)
        x = torch.ones(place.size(1 << 20, 8), device=place.device)
        for _ in ci.batches(range(3)):
            work = distributed.all_reduce(x, async_op=True)
            work.wait()
        place.synchronize()
        assert ci.shutdown()
    finally:
        distributed.destroy_process_group()
    spans, _ = read(directory)
    waits = [span for span in spans if span.name == "collective_wait"]
    assert all(isinstance(span.gpu_ns, int) == place.is_gpu for span in waits)
    assert len(waits) == 3 or not place.is_gpu, f"{len(waits)} waits"


CHECKS = (
    device_time_is_filled,
    device_time_agrees_with_the_device,
    nothing_waits_for_the_device,
    marks_keep_the_value_of_their_moment,
    a_graph_is_captured_undisturbed,
    streams_and_devices_of_the_program,
    the_session_names_the_device,
    memory_stands_on_steps,
    memory_that_runs_out_is_found,
    the_resource_names_the_device,
    a_window_has_what_the_device_did,
    a_wait_for_a_collective_has_the_device_s_time,
)
