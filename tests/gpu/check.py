# mypy: disable-error-code="no-untyped-call"
"""Checks that need a CUDA device; prints PASS or FAIL for each and exits with 1 if one failed.

Where there is no CUDA device it says so, checks nothing and exits with 2.

Run: ``make gpu-check``, or ``python tests/gpu/check.py`` where the package is installed.
"""

from __future__ import annotations

import gzip
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["CIRRON_OTEL_STRICT"] = "1"

import torch
from torch import nn

import cirron_otel as ci
from cirron_otel.batch import Batch, MarkRecord, SpanRecord, decode
from cirron_otel.weights.reductions import fused_way
from cirron_otel.weights.statistics import Skipped, TensorStats, tensor_stats


def _read(directory: str) -> tuple[list[SpanRecord], list[MarkRecord]]:
    batches: list[Batch] = [
        decode(file.read_bytes()) for file in sorted(Path(directory).glob("spool/*.json"))
    ]
    return (
        [span for batch in batches for span in batch.spans],
        [mark for batch in batches for mark in batch.marks],
    )


def _train(steps: int) -> None:
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    batches = [torch.randn(64, 512, device="cuda") for _ in range(4)]
    for number in ci.batches(range(steps)):
        loss = model(batches[number % 4]).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        ci.mark("loss", loss)


def device_time_is_filled(directory: str) -> None:
    """forward, backward and optimizer_step bear gpu_ns; other scopes do not."""
    ci.profile(path=directory)
    _train(50)
    torch.cuda.synchronize()
    assert ci.shutdown()
    spans, marks = _read(directory)
    for name in ("forward", "backward", "optimizer_step"):
        times = [span.gpu_ns for span in spans if span.name == name]
        assert len(times) == 50, f"{len(times)} spans are named {name}"
        assert all(isinstance(ns, int) and 0 < ns < 10**10 for ns in times), f"{name}: {times[:5]}"
    assert all(span.gpu_ns is None for span in spans if span.name in ("step", "data_load"))
    assert sum(mark.name == "loss" and isinstance(mark.value, float) for mark in marks) == 50


def device_time_agrees_with_the_device(directory: str) -> None:
    """gpu_ns of a forward is the time that events of the program's own measure around it."""
    size = 4096
    model = nn.Linear(size, size, bias=False).cuda()
    x = torch.randn(size, size, device="cuda")
    for _ in range(3):
        model(x)
    ci.profile(path=directory)
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(20):
        model(x)
    last.record()
    torch.cuda.synchronize()
    assert ci.shutdown()
    spans, _ = _read(directory)
    ours = sum(span.gpu_ns or 0 for span in spans if span.name == "forward") / 1e6
    theirs = first.elapsed_time(last)
    assert 0.5 * theirs <= ours <= 1.05 * theirs, f"{ours:.3f} ms, not {theirs:.3f} ms"


def nothing_waits_for_the_device(directory: str) -> None:
    """Hooks and marks of device values never synchronise."""
    _train(3)
    ci.profile(path=directory)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        _train(20)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert ci.shutdown()
    _, marks = _read(directory)
    assert sum(mark.name == "loss" for mark in marks) == 20
    assert ci.health()["swallowed_errors"] == {}


def marks_keep_the_value_of_their_moment(directory: str) -> None:
    """A later in-place write does not change a mark; every type of scalar arrives."""
    ci.profile(path=directory)
    value = torch.zeros((), device="cuda")
    with ci.scope("count"):
        for _ in range(100):
            ci.mark("count", value)
            value.add_(1)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.bool):
            ci.mark(str(dtype), torch.ones(1, dtype=dtype, device="cuda"))
    assert ci.shutdown()
    _, marks = _read(directory)
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


def a_graph_is_captured_undisturbed(directory: str) -> None:
    """While a graph is captured marks of device values are counted drops, and the graph works.

    A short flush interval has the flush thread ask for older events all the while.
    """
    model = nn.Linear(256, 256).cuda()
    static = torch.ones(64, 256, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            model(static)
    torch.cuda.current_stream().wait_stream(side)
    ci.profile(path=directory, flush_interval=0.05)
    _train(20)
    for _ in range(20):
        model(static)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = model(static)
            ci.mark("inside", out.sum())
            for _ in range(200):
                out = out + 1
    expected = model(static) + 200
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(out, expected)
    losses = ci.health()["losses"]
    assert losses.get("graph_capture") == 20, losses
    assert ci.shutdown()
    spans, marks = _read(directory)
    assert all(mark.name != "inside" for mark in marks)
    without = [span for span in spans if span.name == "forward" and span.gpu_ns is None]
    assert len(without) == 20, f"{len(without)} forwards have no gpu_ns"


def streams_and_devices_of_the_program(directory: str) -> None:
    """A forward on another stream or device is measured there."""
    ci.profile(path=directory)
    for number in range(torch.cuda.device_count()):
        model = nn.Linear(128, 128).to(f"cuda:{number}")
        x = torch.ones(8, 128, device=f"cuda:{number}")
        with torch.cuda.device(number), torch.cuda.stream(torch.cuda.Stream(number)):
            model(x)
            model(x)
    torch.cuda.synchronize()
    assert ci.shutdown()
    spans, _ = _read(directory)
    forwards = [span for span in spans if span.name == "forward"]
    assert len(forwards) == 2 * torch.cuda.device_count()
    assert all(isinstance(span.gpu_ns, int) for span in forwards)


def the_session_names_the_device(directory: str) -> None:
    """The session bears device and cuda_count."""
    ci.profile(path=directory)
    assert ci.shutdown()
    spans, _ = _read(directory)
    (session,) = (span for span in spans if span.parent_id is None)
    assert session.attrs["device"] == "cuda"
    assert session.attrs["cuda_count"] == torch.cuda.device_count()


def statistics_are_made_on_the_device(_: str) -> None:
    """The fused kernels give the numbers of the host, for every dtype, in little memory."""
    random = torch.Generator().manual_seed(0)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.int8]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert fused_way(torch.device("cuda", 0), dtype) is not None, f"no fused kernel for {dtype}"
    host = [
        (torch.randn(size, generator=random) * 5 + 1).to(dtype)
        for dtype in dtypes
        for size in (1, 511, 70_000, 3_000_001)
    ]
    for one in host:
        if one.is_floating_point() and one.numel() > 100:
            one[7], one[99], one[-1] = torch.nan, torch.inf, -torch.inf
    host += [torch.randn(64, 3, 7, 7).contiguous(memory_format=torch.channels_last)]
    host += [torch.randn(40, 50)[:, 3:], torch.empty(0)]
    device = [one.cuda() for one in host]
    large = torch.randn(64 << 20, device="cuda")
    tensor_stats([*device, large])
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    found = tensor_stats([*device, large])
    used = torch.cuda.max_memory_allocated() - before
    assert used < 13 << 20, f"{used:,} bytes beside a tensor of {large.nbytes:,}"
    expected = tensor_stats(host)
    for mine, theirs in zip(found, expected, strict=False):
        assert isinstance(mine, TensorStats), mine
        assert isinstance(theirs, TensorStats), theirs
        ours, other = mine.finite or mine, theirs.finite or theirs
        assert mine.nonfinite_count == theirs.nonfinite_count
        assert ours.histogram == other.histogram, (mine, theirs)
        assert (ours.min, ours.max) == (other.min, other.max)
        for field in ("mean", "std", "norm"):
            mine_is, theirs_is = getattr(ours, field), getattr(other, field)
            assert abs(mine_is - theirs_is) <= 1e-9 * (abs(theirs_is) + ours.norm), field
    assert tensor_stats([large]) == tensor_stats([large]), "not the same bits twice"


def statistics_see_what_the_program_has_queued(_: str) -> None:
    """A snapshot waits for the writes before it, and later writes do not reach it."""
    x = torch.zeros(32 << 20, device="cuda")
    for _round in range(20):
        x.fill_(1.0)
        x.mul_(2.0)
        (found,) = tensor_stats([x])
        x.fill_(5.0)
        assert isinstance(found, TensorStats)
        assert (found.min, found.max, found.mean) == (2.0, 2.0, 2.0), found


def no_statistics_while_a_graph_is_captured(_: str) -> None:
    """They have a named reason then, and the graph replays."""
    x = torch.ones(1000, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x * 2
        found = tensor_stats([x, y])
    graph.replay()
    torch.cuda.synchronize()
    assert [one.reason for one in found if isinstance(one, Skipped)] == ["capture", "capture"]
    assert y.sum().item() == 2000


def memory_stands_on_steps(directory: str) -> None:
    """Steps that come after the device is in use bear what the allocator says; no peak is reset."""
    held = torch.zeros(64 << 20, dtype=torch.uint8, device="cuda")
    ci.profile(path=directory, flush_interval=0.05)
    peak = torch.cuda.max_memory_allocated()
    for _ in range(20):
        _train(20)
        time.sleep(0.02)
    assert torch.cuda.max_memory_allocated() >= peak
    assert ci.shutdown()
    spans, marks = _read(directory)
    steps = {span.id for span in spans if span.name == "step"}
    found = [mark for mark in marks if mark.name == "cirron.memory.allocated"]
    assert found
    assert {mark.span_id for mark in found} <= steps
    for mark in found:
        assert isinstance(mark.value, int)
        assert held.numel() <= mark.value <= torch.cuda.max_memory_allocated()
    names = {mark.name for mark in marks}
    assert {"cirron.memory.reserved", "cirron.memory.peak", "process.memory.usage"} <= names


def memory_that_runs_out_is_found(directory: str) -> None:
    """The finding has the scope and the largest block by its name; the exception is torch's."""
    found: list[ci.Finding] = []
    ci.profile(path=directory, on_finding=found.append)
    model = ci.watch(nn.Linear(8192, 8192, bias=False).cuda())
    try:
        with ci.scope("too_large", index=3):
            torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    except torch.cuda.OutOfMemoryError:
        pass
    assert model.weight.is_cuda
    (finding,) = found
    assert finding.kind == "out_of_memory"
    assert finding.message.startswith("out of memory in too_large[3]; "), finding.message
    blocks = finding.attributes["cirron.memory.blocks"]
    assert "256.0 MiB Linear.weight" in blocks, blocks


def the_resource_names_the_device(directory: str) -> None:
    """``hw.id`` is the UUID of the device that is in use."""
    ci.profile(path=directory, flush_interval=0.05)
    _train(3)
    time.sleep(0.5)
    ci.mark("late", 1)
    assert ci.shutdown()
    newest = decode(max(Path(directory).glob("spool/*.json")).read_bytes())
    said = str(newest.resource["hw.id"])  # type: ignore[index]
    uuid = str(torch.cuda.get_device_properties(0).uuid)
    assert said in (uuid, f"GPU-{uuid}"), (said, uuid)


def a_window_has_what_the_device_did(directory: str) -> None:
    """Kernels are in the file of a window, and our scopes beside them."""
    ci.profile(path=directory)
    window = ci.profile_window(steps=2)
    _train(6)
    assert ci.shutdown()
    while not window.done and window.error is None:
        time.sleep(0.05)
    assert window.file is not None, window.error
    trace = json.loads(gzip.decompress(window.file.read_bytes()))
    kinds = {event.get("cat") for event in trace["traceEvents"]}
    assert {"kernel", "user_annotation"} <= kinds, kinds


CHECKS: tuple[Callable[[str], None], ...] = (
    device_time_is_filled,
    device_time_agrees_with_the_device,
    nothing_waits_for_the_device,
    marks_keep_the_value_of_their_moment,
    a_graph_is_captured_undisturbed,
    streams_and_devices_of_the_program,
    the_session_names_the_device,
    statistics_are_made_on_the_device,
    statistics_see_what_the_program_has_queued,
    no_statistics_while_a_graph_is_captured,
    memory_stands_on_steps,
    memory_that_runs_out_is_found,
    the_resource_names_the_device,
    a_window_has_what_the_device_did,
)


def main() -> int:
    """Run every check in a directory of its own."""
    if not torch.cuda.is_available():
        sys.stdout.write(f"no CUDA device here: nothing was checked (torch {torch.__version__})\n")
        return 2
    failed = 0
    for check in CHECKS:
        with tempfile.TemporaryDirectory() as directory:
            try:
                check(directory)
            except Exception as error:  # noqa: BLE001 - whatever it is, the others still run
                failed += 1
                result = f"FAIL {check.__name__}: {type(error).__name__}: {error}"
            else:
                result = f"PASS {check.__name__}"
            finally:
                ci.shutdown()
            sys.stdout.write(result + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
