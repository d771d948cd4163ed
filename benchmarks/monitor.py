"""Measure the monitor against ormas-monitor and the memory: ``make bench-monitor``.

    benchmarks/monitor.py                   everything
    benchmarks/monitor.py --quick           few and short rounds, to see that it runs
    benchmarks/monitor.py --only resnet18   some groups
    benchmarks/monitor.py --check           ends with 1 when a "must" is missed

Both monitors follow one model in one process and are called in turn, in a new process each round: a
check is mostly reading memory, and only on the same pages are the sides comparable. Two threads, as
the machine the figures are promised for has.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groups import measure_groups
from harness import Bench, Result, Row, child, load, median_of

SCRIPT = Path(__file__).name
THREADS = 2
_NEVER = 10**9
_CALLS = 20_000


# --- models ---------------------------------------------------------------------------------------


def _resnet18(nn: Any) -> Any:  # noqa: ANN401 - torch is loaded late
    """ResNet-18 for small images: 11.2 million parameters."""

    class Block(nn.Module):  # type: ignore[misc]
        def __init__(self, inside: int, outside: int, stride: int) -> None:
            super().__init__()
            self.conv1 = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outside)
            self.relu = nn.ReLU(inplace=True)
            self.conv2 = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outside)
            self.shortcut = nn.Identity()
            if stride != 1 or inside != outside:
                conv = nn.Conv2d(inside, outside, 1, stride, bias=False)
                self.shortcut = nn.Sequential(conv, nn.BatchNorm2d(outside))

        def forward(self, x: Any) -> Any:  # noqa: ANN401
            y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
            return self.relu(y + self.shortcut(x))

    layers = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
    inside = 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def _linears(nn: Any) -> Any:  # noqa: ANN401
    """A stack of Linear and GELU: 67 million parameters."""
    layers: list[Any] = []
    for _ in range(4):
        layers += [nn.Linear(2048, 4096), nn.GELU(), nn.Linear(4096, 2048), nn.GELU()]
    return nn.Sequential(*layers)


_MODELS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "resnet18": (_resnet18, (8, 3, 32, 32)),
    "linears": (_linears, (2, 2048)),
}


# --- sides ----------------------------------------------------------------------------------------


def _read(torch: Any, net: Any) -> float:  # noqa: ANN401
    """Milliseconds of what no monitor can do without: weights and gradients read once."""
    begin = time.perf_counter_ns()
    for parameter in net.parameters():
        parameter.detach().sum()
    torch._foreach_norm([parameter.grad for parameter in net.parameters()])  # noqa: SLF001
    return (time.perf_counter_ns() - begin) / 1e6


def check(model: str, times: int) -> Result:
    """Milliseconds of a check and of a plain step, microseconds of an unsampled ``step()``."""
    torch = load("torch")
    torch.set_num_threads(THREADS)
    torch.manual_seed(0)
    make, shape = _MODELS[model]
    net = make(torch.nn)
    optimizer = torch.optim.AdamW(net.parameters())
    homes = {"ours": load("cirron_otel"), "peer": load("ormas_monitor")}
    took: dict[str, list[float]] = {name: [] for name in (*homes, "plain", "memory")}
    with tempfile.TemporaryDirectory() as directory:

        def monitor(name: str, every: int) -> Any:  # noqa: ANN401
            return homes[name].Monitor(
                net, optimizer, out=f"{directory}/{name}{every}", check_every=every, verbose=False
            )

        def step() -> Any:  # noqa: ANN401
            optimizer.zero_grad()
            loss = net(torch.randn(shape)).square().mean()
            loss.backward()
            return loss

        for _ in range(times):  # the plain step has no hook on it
            begin = time.perf_counter_ns()
            step()
            optimizer.step()
            took["plain"].append((time.perf_counter_ns() - begin) / 1e6)
        sides = {name: monitor(name, 1) for name in homes}
        for number in range(times + 2):
            loss = step()
            took["memory"].append(_read(torch, net))
            for name, side in sides.items():
                begin = time.perf_counter_ns()
                side.step(loss)
                if number > 1:
                    took[name].append((time.perf_counter_ns() - begin) / 1e6)
            optimizer.step()
        for side in sides.values():
            side.close(report=False)
        unsampled = {f"{name}_unsampled_us": _unsampled(monitor(name, _NEVER)) for name in homes}
    return {**{name: statistics.median(each) for name, each in took.items()}, **unsampled}


def _unsampled(side: Any) -> float:  # noqa: ANN401
    """Microseconds of a ``step()`` that checks nothing."""
    side.step(1.0)
    begin = time.perf_counter_ns()
    for _ in range(_CALLS):
        side.step(1.0)
    took = (time.perf_counter_ns() - begin) / 1e3 / _CALLS
    side.close(report=False)
    return took


SIDES: dict[str, Callable[..., Result]] = {"check": check}


# --- rows -----------------------------------------------------------------------------------------


def _measure(bench: Bench, model: str, work: str, must: float, goal: float) -> list[Row]:
    params: Result = {"model": model, "times": bench.pick(25, 4)}
    rounds = bench.rounds(model, SCRIPT, ["check"], bench.pick(5, 1), params)
    names = ("ours", "peer", "plain", "memory", "ours_unsampled_us", "peer_unsampled_us")
    ours, peer, plain, memory, quick, peer_quick = (median_of(rounds, "check", n) for n in names)
    share = 100 * (ours / 50 + quick / 1e3) / plain
    peer_share = 100 * (peer / 50 + peer_quick / 1e3) / plain
    note = f"one sum of the weights and one norm of the gradients: {memory:.2f} ms"
    return [
        Row(f"one check, {work}", "Monitor.step", f"{peer:.2f} ms", ours, "ms", must, goal, note),
        Row(f"unsampled step(), {work}", "Monitor.step", f"{peer_quick:.2f} us", quick, "us", 5, 2),
        Row(
            f"(check / 50 + unsampled) / plain step, {work}", "Monitor.step",
            f"{peer_share:.3f} %", share, "%", 0.2, 0.1, f"plain step {plain:.0f} ms",
        ),
    ]  # fmt: skip


def measure_resnet18(bench: Bench) -> list[Row]:
    """11.2 million parameters of a CNN."""
    return _measure(bench, "resnet18", "11.2 M of ResNet-18", 11, 8)


def measure_linears(bench: Bench) -> list[Row]:
    """67 million parameters of Linear layers."""
    return _measure(bench, "linears", "67 M of Linear", 60, 40)


GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "resnet18": measure_resnet18,
    "linears": measure_linears,
}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        child(SIDES)
    else:
        sys.exit(measure_groups("Measure the monitor, sides in turn.", GROUPS))
