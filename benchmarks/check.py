"""Measure ``cirron-otel check`` of a 98 MiB ResNet-50, whole command: ``make bench-check``.

    benchmarks/check.py            twenty turns
    benchmarks/check.py --quick    three
    benchmarks/check.py --check    ends with 1 when the "must" is missed

The command takes turns with an interpreter that does nothing, and with one that only reads the
file.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from array import array
from pathlib import Path

from harness import Row
from snapshots import resnet50

from run import machine, table

MUST, GOAL = 0.6, 0.3


def write(path: Path) -> None:
    """A safetensors file of ResNet-50's size, with BatchNorms of four tensors each."""
    values = array("f", [0.05 * math.sin(i) for i in range(1, 1 << 16)]).tobytes()
    entries: dict[str, object] = {}
    data = 0
    conv = ""
    vectors = 0
    for number, shape in enumerate(resnet50()):
        # Vectors come in pairs behind their convolution, the scale first.
        if len(shape) > 1:
            conv, vectors = str(number), 0
        part = "weight" if len(shape) > 1 else ("weight", "bias")[vectors % 2]
        module = f"conv{conv}" if len(shape) > 1 else f"bn{conv}_{vectors // 2}"
        vectors += len(shape) == 1
        parts = (
            [part, "running_mean", "running_var"] if len(shape) == 1 and part == "bias" else [part]
        )
        for one in parts:
            size = 4 * math.prod(shape)
            entries[f"{module}.{one}"] = {
                "dtype": "F32", "shape": list(shape), "data_offsets": [data, data + size],
            }  # fmt: skip
            data += size
    text = json.dumps(entries).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for left in range(data, 0, -len(values)):
            file.write(values[: min(left, len(values))])


def took(command: list[str]) -> float:
    """Seconds from starting a process to its end."""
    begin = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - begin


def main() -> int:
    """Measure, print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
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
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for command in sides.values():  # into the caches
            took(command)
        for _ in range(3 if options.quick else 20):
            for name, command in sides.items():
                seconds[name].append(took(command))
        size = path.stat().st_size / (1 << 20)
    median = {name: statistics.median(found) for name, found in seconds.items()}
    row = Row(
        f"check of a {size:.0f} MiB safetensors ResNet-50, whole command",
        f"{median['ours']:.3f} s, best {min(seconds['ours']):.3f}",
        f"python -c pass {median['nothing']:.3f} s, reading the file {median['reading']:.3f} s",
        median["ours"], "s", MUST, GOAL,
    )  # fmt: skip
    about = machine()
    print(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}")
    print(table([row]))
    return int(options.check and row.verdict == "MISSED")


if __name__ == "__main__":
    sys.exit(main())
