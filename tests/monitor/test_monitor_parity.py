"""The same training under this monitor and under the existing one: the same record.

``make interop`` installs the existing one and runs this; ``CIRRON_OTEL_TEST_PEER`` names its
Python.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cirron_otel.training_record.checking.verify import verify
from monitor.scenarios import TRAIN

PEER = os.environ["CIRRON_OTEL_TEST_PEER"]
STEPS = 120
#: What is compared of an event: all but its place in the chain and what is an addition of ours.
_OWN = frozenset(
    {
        "seq", "time", "prev", "hash", "metrics_digest", "metrics_rows", "trace_id", "span_id",
        "caused_by", "message", "statement", "assumes", "reason", "method", "rng",
        "other_delta_norm",
    }
)  # fmt: skip
_NOT_COMPARED = frozenset({"run_start", "run_end", "manifest"})
#: Of a repair, what the order of a sum decides.
_SUMS = ("delta_norm", "weight_norm_before", "weight_norm_after", "relative_change")


def _run(python: str, package: str, directory: Path, seed: int) -> None:
    done = subprocess.run(
        [python, "-c", TRAIN, package, str(directory), str(seed), str(STEPS)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _rows(directory: Path) -> list[tuple[object, ...]]:
    found = []
    for row in _lines(directory / "metrics.jsonl"):
        nonfinite = row.get("nonfinite", {})
        loss = nonfinite.get("loss", row["loss"])
        grad = {n: nonfinite.get(f"grad.{n}", value) for n, value in row["grad"].items()}
        grad = {name: _named(value) for name, value in grad.items()}
        found.append((row["step"], _named(loss), grad, row["stuck"]))
    return found


def _named(value: object) -> object:
    """A number that is not finite, by the name that both can have for it."""
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _events(directory: Path) -> list[dict[str, Any]]:
    found = []
    for event in _lines(directory / "diary.jsonl"):
        if event["event"] in _NOT_COMPARED or "rule" in event:
            continue
        shown = {key: value for key, value in event.items() if key not in _OWN}
        for name in _SUMS:
            if isinstance(shown.get(name), float):
                shown[name] = float(f"{shown[name]:.5g}")
        found.append(shown)
    return found


@pytest.mark.timeout(600)
# Seed 2 overflows float32 in the existing monitor, which then sees skipped steps (R-W37).
@pytest.mark.parametrize("seed", [seed for seed in range(12) if seed != 2])
def test_the_same_training_gives_the_same_record(tmp_path: Path, seed: int) -> None:
    """Rows, alarms, baselines and stuck counts are equal to the last bit, in the same order."""
    _run(PEER, "ormas_monitor", tmp_path / "theirs", seed)
    _run(sys.executable, "cirron_otel", tmp_path / "ours", seed)
    assert _rows(tmp_path / "ours") == _rows(tmp_path / "theirs")
    assert _events(tmp_path / "ours") == _events(tmp_path / "theirs")
    assert verify(tmp_path / "ours").ok
    start = [_lines(tmp_path / name / "diary.jsonl")[0] for name in ("ours", "theirs")]
    for field in ("model", "parameters", "layers", "architecture_sha256", "optimizer", "config"):
        assert start[0][field] == start[1][field], field
