"""Measure snapshots against cirron-sdk and the memory: ``make bench-snapshots``.

    benchmarks/snapshots.py                    everything
    benchmarks/snapshots.py --quick            few and short rounds, to see that it runs
    benchmarks/snapshots.py --only resnet50    some groups
    benchmarks/snapshots.py --check            ends with 1 when a "must" is missed

Within a group all sides are called in turn in one process, which is a new one for every round: a
snapshot is mostly reading memory, and only on the same pages are the sides comparable. Two threads,
as the machine the figures are promised for has. Of a GPU ``make gpu-check`` tells.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import shapes as known_shapes
from groups import measure_groups
from harness import Bench, Result, Row, SideError, child, load, median_of

SCRIPT = Path(__file__).name
THREADS = 2
_STD = 0.05
_MS = "ms"


# --- models ---------------------------------------------------------------------------------------


def _model(shapes: str, dtype: str, *, gradients: bool) -> Any:  # noqa: ANN401
    torch = load("torch")
    torch.set_num_threads(THREADS)
    random = torch.Generator().manual_seed(0)
    model = torch.nn.Module()

    def normal(shape: tuple[int, ...]) -> Any:  # noqa: ANN401 - torch is loaded here
        values = torch.randn(shape, generator=random) * _STD
        return values.to(getattr(torch, dtype))

    for number, shape in enumerate(getattr(known_shapes, shapes)()):
        parameter = torch.nn.Parameter(normal(shape))
        if gradients:
            parameter.grad = normal(shape)
        model.register_parameter(f"p{number}", parameter)
    return model


# --- sides ----------------------------------------------------------------------------------------


def _in_turn(sides: dict[str, Callable[[], object]], times: int) -> Result:
    """Milliseconds of each side: the median of the calls, which take turns."""
    for call in sides.values():
        call()
    took: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(times):
        for name, call in sides.items():
            begin = time.perf_counter_ns()
            call()
            took[name].append((time.perf_counter_ns() - begin) / 1e6)
    return {name: statistics.median(each) for name, each in took.items()}


def take(shapes: str, dtype: str, times: int, *, gradients: bool) -> Result:
    """The statistics of a model: by ``ci.snapshot``, by their kernel, by cirron-sdk; and sums."""
    model = _model(shapes, dtype, gradients=gradients)
    tensors = [one.detach() for one in model.parameters()]
    tensors += [one.grad for one in model.parameters() if one.grad is not None]
    statistics_of = load("cirron_otel.weights.statistics")
    peer = load("cirron.snapshots.stats")
    ci = load("cirron_otel")
    ci.profile(frameworks=[])

    def theirs() -> None:
        peer.capture_weight_stats(model, "0" * 32)
        if gradients:
            peer.capture_gradient_stats(model, "0" * 32)

    def read() -> None:
        sums = [one.sum() for one in tensors]
        sums[-1].item()

    sides: dict[str, Callable[[], object]] = {
        "snapshot": lambda: ci.snapshot(model),
        "numbers": lambda: statistics_of.tensor_stats(tensors),
        "read": read,
        "cirron": theirs,
    }
    result = _in_turn(sides, times)
    ci.shutdown()
    found = statistics_of.tensor_stats(tensors)
    right = all(sum(one.histogram.counts) == one.numel for one in found)
    compiled = load("cirron_otel.weights.reductions_kernel").COMPILED
    return {**result, "right": right, "compiled": compiled}


def full(times: int) -> Result:
    """100 MB of weights to a file: by ``ci.snapshot``, and by safetensors alone."""
    model = _model("resnet50", "float32", gradients=False)
    save_file = load("safetensors.torch").save_file
    ci = load("cirron_otel")
    ci.profile(frameworks=[], snapshots="full")
    with tempfile.TemporaryDirectory(dir=".") as name:
        tensors = {key: one.detach() for key, one in model.named_parameters()}
        result = _in_turn(
            {
                "snapshot": lambda: ci.snapshot(model),
                "save_file": lambda: save_file(tensors, f"{name}/all.safetensors"),
            },
            times,
        )
    ci.shutdown()
    return result


SIDES: dict[str, Callable[..., Result]] = {"take": take, "full": full}


# --- rows -----------------------------------------------------------------------------------------


def _ms(value: float) -> str:
    return f"{value:.2f} ms"


def _measure(  # noqa: PLR0913, PLR0917 - what a row is made of
    bench: Bench,
    name: str,
    work: str,
    shapes: str,
    must: float,
    goal: float | None,
    *,
    dtype: str = "float32",
    gradients: bool = False,
) -> list[Row]:
    params: Result = {
        "shapes": shapes, "dtype": dtype, "gradients": gradients,
        "times": bench.pick(15, 3),
    }  # fmt: skip
    rounds = bench.rounds(name, SCRIPT, ["take"], bench.pick(5, 1), params)
    if not all(one["take"]["right"] for one in rounds):
        raise SideError("a histogram does not hold every element")
    took, alone, read, peer = (
        median_of(rounds, "take", key) for key in ("snapshot", "numbers", "read", "cirron")
    )
    kernel = "" if rounds[0]["take"]["compiled"] else "without the kernel"
    return [
        Row(work, "ci.snapshot", f"cirron-sdk {_ms(peer)}", took, _MS, must, goal, kernel),
        Row(f"{name}: the numbers alone", "tensor_stats", f"sum of all {_ms(read)}", alone, _MS),
    ]


def measure_resnet50(bench: Bench) -> list[Row]:
    """25.6 million parameters."""
    return _measure(bench, "resnet50", "stats, 25.6 M parameters", "resnet50", 40, 15)


def measure_gradients(bench: Bench) -> list[Row]:
    """The same with their gradients."""
    return _measure(
        bench, "gradients", "stats, 25.6 M with gradients", "resnet50", 80, 30, gradients=True
    )


def measure_bert(bench: Bench) -> list[Row]:
    """109 million parameters."""
    return _measure(bench, "bert", "stats, 109 M parameters", "bert", 180, 60)


def measure_bfloat16(bench: Bench) -> list[Row]:
    """25.6 million parameters in half the bytes."""
    return _measure(
        bench, "bfloat16", "stats, 25.6 M in bfloat16", "resnet50", 60, 20, dtype="bfloat16"
    )


def measure_full(bench: Bench) -> list[Row]:
    """100 MB to disk."""
    rounds = bench.rounds("full", SCRIPT, ["full"], bench.pick(5, 1), {"times": bench.pick(9, 3)})
    ours, theirs = (median_of(rounds, "full", key) for key in ("snapshot", "save_file"))
    ratio = statistics.median(one["full"]["snapshot"] / one["full"]["save_file"] for one in rounds)
    return [
        Row("full, 102 MB to disk, with stats", f"ci.snapshot {_ms(ours)}",
            f"save_file {_ms(theirs)}", ratio, "x", 1 / 0.6, 1 / 0.9),
    ]  # fmt: skip


GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "resnet50": measure_resnet50,
    "gradients": measure_gradients,
    "bert": measure_bert,
    "bfloat16": measure_bfloat16,
    "full": measure_full,
}


def main() -> int:
    """Measure and print."""
    return measure_groups("Measure snapshots, sides in turn.", GROUPS)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        child(SIDES)
    else:
        sys.exit(main())
