"""Measure ``cirron-otel check`` of a 98 MiB ResNet-50, whole command: ``make bench-check``.

    benchmarks/check.py            twenty turns
    benchmarks/check.py --quick    three
    benchmarks/check.py --check    ends with 1 when the "must" is missed

The command takes turns with an interpreter that does nothing, and with one that only reads the
file.
"""

from __future__ import annotations

import math
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

from groups import measure_groups
from harness import Bench, Row, SideError, median_of
from shapes import resnet50

from cirron_otel.weights import containers
from cirron_otel.weights.containers import Part

MUST, GOAL = 0.6, 0.3


def write(path: Path) -> None:
    """A safetensors file of ResNet-50's size, with BatchNorms of four tensors each."""
    values = array("f", [0.05 * math.sin(i) for i in range(1, 1 << 16)]).tobytes()
    parts: list[Part] = []

    def add(name: str, shape: tuple[int, ...]) -> None:
        size = 4 * math.prod(shape)
        # Going on where the last one ended, so that no two are alike.
        at = sum(part.size for part in parts) % len(values)
        data = (values * (size // len(values) + 2))[at : at + size]
        parts.append(Part(name, "F32", shape, size, lambda: (memoryview(data), data)))

    conv = ""
    vectors = 0
    for number, shape in enumerate(resnet50()):
        if len(shape) > 1:
            conv, vectors = str(number), 0
            add(f"conv{conv}.weight", shape)
            continue
        # Vectors come in pairs behind their convolution, the scale first.
        bn = f"bn{conv}_{vectors // 2}"
        for one in (("weight",), ("bias", "running_mean", "running_var"))[vectors % 2]:
            add(f"{bn}.{one}", shape)
        vectors += 1
    containers.write(path, parts, {})


def took(command: list[str]) -> float:
    """Seconds from starting a process to its end."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - begin
    if done.returncode != 0:
        raise SideError(f"{command} failed: {done.stderr.strip().splitlines()[-1:]}")
    return seconds


def measure(bench: Bench) -> list[Row]:
    """The whole command, beside what starts and what reads."""
    rounds = bench.pick(20, 3)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.safetensors"
        write(path)
        read = f"open({str(path)!r}, 'rb').read()"
        sides = {
            "ours": [sys.executable, "-m", "cirron_otel.cli.main", "check", str(path), "--fail-on",
                     "never"],
            "nothing": [sys.executable, "-c", "pass"],
            "reading": [sys.executable, "-c", read],
        }  # fmt: skip
        for command in sides.values():  # into the caches
            took(command)
        done = [
            {name: {"s": took(command)} for name, command in sides.items()} for _ in range(rounds)
        ]
        size = path.stat().st_size / (1 << 20)
    bench.say(f"  check: {rounds} rounds")
    bench.raw["check"] = done
    ours, nothing, reading = (median_of(done, name, "s") for name in sides)
    best = min(one["ours"]["s"] for one in done)
    return [
        Row(
            f"check of a {size:.0f} MiB safetensors ResNet-50, whole command",
            f"{ours:.3f} s, best {best:.3f}",
            f"python -c pass {nothing:.3f} s, reading the file {reading:.3f} s",
            ours, "s", MUST, GOAL,
        )
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(measure_groups(__doc__.partition("\n")[0], {"check": measure}))
