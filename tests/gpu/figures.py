# mypy: disable-error-code="no-untyped-call"
"""What things cost on a GPU: rows as the benchmarks have them, with what was promised.

Sides of a comparison take turns in one process. *Blocked* is the time of the clock that a call
takes on the training thread while the device has nothing else to do; *device* is the time between
two events of the device's own queue. A group is given the place and a number of rounds.
"""

from __future__ import annotations

import importlib
import math
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import shapes
import torch
from harness import Row, SideError
from place import Place, Stopwatch
from torch import nn

import cirron_otel as ci
from cirron_otel.monitor.front import Monitor
from cirron_otel.weights import reductions
from cirron_otel.weights.devices import beside
from cirron_otel.weights.statistics import TensorStats, tensor_stats

#: The goal for statistics: as many times as long as reading all values once.
GOAL = 1.5
_MS = "ms"


def _in_turn(
    place: Place, sides: dict[str, Callable[[], object]], times: int
) -> tuple[dict[str, float], dict[str, float]]:
    """Milliseconds blocked and on the device, of each side: medians of calls that take turns."""
    blocked: dict[str, list[float]] = {name: [] for name in sides}
    device: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(times + 1):
        for name, call in sides.items():
            place.synchronize()
            watch = Stopwatch(place)
            watch.note()
            begin = time.perf_counter()
            call()
            took = (time.perf_counter() - begin) * 1e3
            watch.note()
            if number:  # the first one compiles
                blocked[name].append(took)
                device[name].append(watch.ms())
    return (
        {name: statistics.median(each) for name, each in blocked.items()},
        {name: statistics.median(each) for name, each in device.items()},
    )


# --- statistics -----------------------------------------------------------------------------------


class _Model:
    """A model whose values, and those of its gradients, lie in one piece, to be read as one too."""

    def __init__(self, place: Place, of: Sequence[tuple[int, ...]], dtype: torch.dtype) -> None:
        random = torch.Generator(place.device).manual_seed(0)
        size = sum(math.prod(shape) for shape in of)
        if place.is_gpu and torch.cuda.mem_get_info()[0] < 3 * size * 4:
            raise SideError("too little memory is free on the device")
        self.flat = torch.empty(size, dtype=dtype, device=place.device)
        self.flat.normal_(0, 0.05, generator=random)
        self.module = nn.Module()
        at = 0
        for number, shape in enumerate(of):
            end = at + math.prod(shape)
            self.module.register_parameter(
                f"p{number}", nn.Parameter(self.flat[at:end].view(shape))
            )
            at = end
        self.tensors = [one.detach() for one in self.module.parameters()]

    def add_gradients(self) -> None:
        """Each parameter gets one, of its own values: what matters is that it is read."""
        for one in self.module.parameters():
            one.grad = one.detach().clone()


def _launch(tensors: Sequence[torch.Tensor]) -> Callable[[], object] | None:
    """The device's work alone, on the current stream; None where nothing is fused."""
    device, dtype = tensors[0].device, tensors[0].dtype
    if device.type not in reductions.FUSED_DEVICES:
        return None
    with beside(device):
        way = reductions.fused_way(device, dtype)
    if way is None:
        raise SideError("there is no fused kernel: see the warning")
    return lambda: way(tensors, histogram=True)


def _statistics(
    place: Place,
    times: int,
    work: str,
    of: Sequence[tuple[int, ...]],
    *,
    dtype: torch.dtype = torch.float32,
    gradients: bool = False,
    must: float | None = None,
) -> list[Row]:
    model = _Model(place, of, dtype)
    if gradients:
        model.add_gradients()
    reads = 2 if gradients else 1
    launch = _launch(model.tensors)
    sides: dict[str, Callable[[], object]] = {
        "read": lambda: [model.flat.sum() for _ in range(reads)],
        "numbers": lambda: tensor_stats(model.tensors),
        "snapshot": lambda: ci.snapshot(model.module),
    }
    if launch is not None:
        sides["launch"] = launch
    with tempfile.TemporaryDirectory() as directory:
        ci.profile(path=directory, frameworks=[])
        blocked, device = _in_turn(place, sides, times)
        taken = ci.health()["snapshots"]["tensors"]
        ci.shutdown()
    assert taken == (times + 1) * len(of) * reads, f"{taken} tensors were described"
    for one in tensor_stats(model.tensors):
        assert isinstance(one, TensorStats), one
        assert one.histogram is not None
        assert sum(one.histogram.counts) == one.numel, "a histogram does not hold every value"
    read = device["read"]
    note = f"reading once takes {read:.3f} ms"
    rows = [
        Row(f"{work}: training thread blocked", "ci.snapshot", note, blocked["snapshot"], _MS, must,
            GOAL * read if must else None),
        Row(f"{work}: numbers alone, blocked", "tensor_stats", note, blocked["numbers"], _MS),
    ]  # fmt: skip
    if "launch" in device:
        own = device["launch"]
        rows.append(
            Row(f"{work}: numbers alone, device", f"{own / read:.2f} x reading", note, own, _MS)
        )
    return rows


def _few(place: Place, of: shapes.Shapes) -> shapes.Shapes:
    return of if place.is_gpu else [(3, 5), (700,)]


def resnet50(place: Place, times: int) -> list[Row]:
    """25.6 million parameters."""
    return _statistics(place, times, "25.6 M", _few(place, shapes.resnet50()), must=3)


def gradients(place: Place, times: int) -> list[Row]:
    """25.6 million parameters and their gradients."""
    of = _few(place, shapes.resnet50())
    return _statistics(place, times, "25.6 M with gradients", of, gradients=True)


def bfloat16(place: Place, times: int) -> list[Row]:
    """25.6 million parameters in bfloat16."""
    of = _few(place, shapes.resnet50())
    return _statistics(place, times, "25.6 M in bfloat16", of, dtype=torch.bfloat16)


def giga(place: Place, times: int) -> list[Row]:
    """1 G parameters, and the same in bfloat16."""
    of = _few(place, shapes.giga())
    rows = _statistics(place, times, "1 G", of, must=8)
    return rows + _statistics(place, times, "1 G in bfloat16", of, dtype=torch.bfloat16)


# --- training -------------------------------------------------------------------------------------


def _mlp(place: Place) -> tuple[nn.Module, torch.Tensor]:
    size = place.size(512, 8)
    model = nn.Sequential(nn.Linear(size, size), nn.ReLU(), nn.Linear(size, size), nn.ReLU(),
                          nn.Linear(size, 10))  # fmt: skip
    return model.to(place.device), torch.randn(64, size, device=place.device)


def _transformer(place: Place) -> tuple[nn.Module, torch.Tensor]:
    size = place.size(512, 8)
    layer = nn.TransformerEncoderLayer(size, 4, 4 * size, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(place.device)
    return model, torch.randn(place.size(16, 1), place.size(256, 2), size, device=place.device)


def _block(
    place: Place, made: tuple[nn.Module, torch.Tensor], steps: int, *, marks: bool = False
) -> float:
    """Milliseconds of a step: of many in a row, to the end of the device's work."""
    model, x = made
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    begin = 0.0
    for number in ci.batches(range(steps + 3)):
        if number == 3:
            place.synchronize()
            begin = time.perf_counter()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if marks:
            ci.mark("loss", loss)
    place.synchronize()
    return (time.perf_counter() - begin) * 1e3 / steps


def _share(
    times: int, sides: tuple[Callable[[], float], Callable[[], float]]
) -> tuple[float, float, float]:
    """Medians of both sides, and of what the second adds to the first, in percent."""
    pairs = []
    for number in range(times):
        order = (0, 1) if number % 2 else (1, 0)
        found = {side: sides[side]() for side in order}
        pairs.append((found[0], found[1]))
    plain, ours = (statistics.median(pair[side] for pair in pairs) for side in (0, 1))
    return plain, ours, statistics.median((b / a - 1) * 100 for a, b in pairs)


def hooks(place: Place, times: int) -> list[Row]:
    """What the hooks of torch add to a step, with a mark of the loss: device times included."""
    rows = []
    for name, make, must, goal in (
        ("3-layer MLP", _mlp, 6, 3),
        ("4-layer transformer", _transformer, 1.5, 0.5),
    ):
        made, steps = make(place), place.size(60, 2)

        def recorded(made: tuple[nn.Module, torch.Tensor] = made, steps: int = steps) -> float:
            with tempfile.TemporaryDirectory() as directory:
                ci.profile(path=directory, snapshots=None)
                took = _block(place, made, steps, marks=True)
                ci.shutdown()
            return took

        def bare(made: tuple[nn.Module, torch.Tensor] = made, steps: int = steps) -> float:
            return _block(place, made, steps)

        plain, ours, percent = _share(times, (bare, recorded))
        rows.append(Row(f"hooks on the step of a {name}", f"{ours:.3f} ms",
                        f"bare {plain:.3f} ms", percent, "%", must, goal))  # fmt: skip
    return rows


def every_step(place: Place, times: int) -> list[Row]:
    """What a snapshot of weights and gradients in every step takes from a training."""
    made, steps = _transformer(place), place.size(40, 2)
    ci.watch(made[0])
    sizes = sum(one.numel() for one in made[0].parameters())

    def side(every: int | None) -> float:
        with tempfile.TemporaryDirectory() as directory:
            ci.profile(path=directory, snapshot_every=every)
            took = _block(place, made, steps)
            ci.shutdown()
        return took

    plain, ours, percent = _share(times, (lambda: side(None), lambda: side(1)))
    ci.watch(None)
    return [Row(f"snapshot_every=1, {sizes / 1e6:.1f} M with gradients: a step loses",
                f"{ours:.3f} ms", f"without {plain:.3f} ms, {percent:+.1f} %",
                ours - plain, _MS)]  # fmt: skip


def marks(place: Place, times: int) -> list[Row]:
    """A mark of a value that is on the device."""
    value, count = torch.ones((), device=place.device), place.size(2000, 20)
    took = []
    with tempfile.TemporaryDirectory() as directory:
        ci.profile(path=directory, frameworks=[])
        with ci.scope("marks"):
            for _ in range(times + 1):
                place.synchronize()
                begin = time.perf_counter()
                for _ in range(count):
                    ci.mark("value", value)
                took.append((time.perf_counter() - begin) * 1e6 / count)
        ci.shutdown()
    return [Row("a mark of a device's value", "ci.mark", "-", statistics.median(took[1:]), "us")]


def monitor(place: Place, times: int) -> list[Row]:
    """How often a check of the monitor waits for the device, and how long it takes."""
    model, x = _mlp(place)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    took, reads = [], []
    with tempfile.TemporaryDirectory() as directory:
        watching = Monitor(model, optimizer, out=f"{directory}/run", check_every=2, verbose=False)
        for number in range(2 * times + 4):
            loss = model(x).square().mean()
            optimizer.zero_grad()
            loss.backward()
            place.synchronize()
            with place.waits() as waits:
                begin = time.perf_counter()
                watching.step(loss)
                ended = time.perf_counter()
            if number % 2 == 0 and number >= 2:
                reads.append(len(waits))
                took.append((ended - begin) * 1e3)
            else:
                assert number == 0 or not waits, f"a step that is not checked waited: {waits}"
            optimizer.step()
        watching.close()
    found = max(reads) if place.is_gpu else None
    note = "-" if place.is_gpu else "no waits are counted here"
    return [
        Row("host reads of one check of the monitor", "Monitor.step", note, found, "reads", 1, 1),
        Row("one check of the monitor, 0.5 M, blocked", "Monitor.step", "-",
            statistics.median(took), _MS),
    ]  # fmt: skip


# --- choosing the kernels' shape ------------------------------------------------------------------


def tune(place: Place, times: int) -> list[Row]:
    """The device's time for other shapes of the fused kernels; only on demand."""
    model = _Model(place, _few(place, shapes.giga()), torch.float32)
    if _launch(model.tensors) is None:
        return []
    fused = importlib.import_module("cirron_otel.weights.reductions_triton")
    usual = fused._BLOCK, fused._WARPS
    rows = []
    try:
        for block in (256, 512, 1024, 2048) if place.is_gpu else (512,):
            for warps in (2, 4, 8) if place.is_gpu else (4,):
                fused._BLOCK, fused._WARPS = block, warps
                _, device = _in_turn(
                    place, {"launch": lambda: fused.launch(model.tensors, histogram=True)}, times
                )
                now = " (as it is)" * ((block, warps) == usual)
                rows.append(Row(f"1 G: blocks of {block}, {warps} warps{now}", "launch", "-",
                                device["launch"], _MS))  # fmt: skip
    finally:
        fused._BLOCK, fused._WARPS = usual
    return rows


GROUPS: dict[str, Callable[[Place, int], list[Row]]] = {
    "resnet50": resnet50,
    "gradients": gradients,
    "bfloat16": bfloat16,
    "giga": giga,
    "hooks": hooks,
    "every_step": every_step,
    "marks": marks,
    "monitor": monitor,
}
#: Only where they are asked for by name.
FURTHER: dict[str, Callable[[Place, int], list[Row]]] = {"tune": tune}
