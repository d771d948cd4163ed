"""A training that keeps a record: written while it runs, then signed, verified and reported on.

    python examples/record_a_run.py [DIRECTORY]

A small network learns to tell two rings of points apart, in plain Python. Half-way its learning
rate is set far too high, so the record has something to tell. Needs ``cryptography`` for signing.
"""

from __future__ import annotations

import hashlib
import math
import random
import subprocess
import sys
from pathlib import Path

from cirron_otel.record_anchors import open_journal
from cirron_otel.training_record.rules import Decisions, Expected, Rules

STEPS, CHECK_EVERY, HIDDEN = 600, 5, 12
#: What decides when a value is unusual; see docs/formats/training-record-v1.md.
CONFIG = {
    "check_every": CHECK_EVERY,
    "sigma": 2.5,
    "warmup": 8,
    "baseline_rate_floor": 0.1,
    "alarm_min_decades": 1.0,
    "alarm_confirmations": 2,
    "loss_spike_factor": 1.5,
    "layer_list_limit": 32,
}


class Network:
    """Two inputs, a hidden layer with tanh, one output with a sigmoid."""

    def __init__(self, numbers: random.Random) -> None:
        self.hidden = [[numbers.gauss(0, 1) for _ in range(3)] for _ in range(HIDDEN)]
        self.output = [numbers.gauss(0, 0.5) for _ in range(HIDDEN + 1)]

    def step(
        self, points: list[tuple[float, float, int]], rate: float
    ) -> tuple[float, float, float]:
        """One step of gradient descent: the loss, and the gradient's norm in each layer."""
        loss = 0.0
        down_hidden = [[0.0] * 3 for _ in self.hidden]
        down_output = [0.0] * len(self.output)
        for x, y, label in points:
            middle = [math.tanh(a * x + b * y + c) for a, b, c in self.hidden]
            score = self.output[-1] + sum(w * h for w, h in zip(self.output, middle, strict=False))
            guess = 1 / (1 + math.exp(-max(-30.0, min(30.0, score))))
            loss -= math.log(guess if label else 1 - guess) / len(points)
            error = (guess - label) / len(points)
            down_output[-1] += error
            for i, h in enumerate(middle):
                down_output[i] += error * h
                slope = error * self.output[i] * (1 - h * h)
                for place, value in enumerate((x, y, 1.0)):
                    down_hidden[i][place] += slope * value
        for row, down in zip(self.hidden, down_hidden, strict=True):
            row[:] = [w - rate * d for w, d in zip(row, down, strict=True)]
        self.output = [w - rate * d for w, d in zip(self.output, down_output, strict=True)]
        return loss, math.hypot(*(d for row in down_hidden for d in row)), math.hypot(*down_output)


def rings(numbers: random.Random, count: int) -> list[tuple[float, float, int]]:
    """Points of two rings around the origin, with noise, and which ring each is of."""
    points = []
    for _ in range(count):
        label, angle = numbers.randrange(2), numbers.uniform(0, math.tau)
        radius = 1 + label + numbers.gauss(0, 0.1)
        points.append((radius * math.cos(angle), radius * math.sin(angle), label))
    return points


def event_fields(found: Expected) -> dict[str, object]:
    """A decision as the fields of an event."""
    fields = {"step": found.step, **dict(found.exact), **dict(found.floats)}
    if found.event in {"alarm", "loss_spike"}:
        fields["severity"] = "warning"
    return fields | ({"kind": "Dense"} if found.event == "alarm" else {})


def train(directory: Path) -> None:
    """Train, and write the record as it goes."""
    numbers = random.Random(7)  # noqa: S311 - weights and points, no secret
    network = Network(numbers)
    shapes = f"hidden:({HIDDEN}, 3)|output:({HIDDEN + 1},)"
    start = {
        "model": "Network",
        "parameters": 4 * HIDDEN + 1,
        "layers": 2,
        "architecture_sha256": hashlib.sha256(shapes.encode()).hexdigest(),
        "optimizer": {"type": "gradient descent", "lr": 0.5},
        "torch": "none",
        "config": CONFIG,
        "seed": 7,
    }
    decisions = Decisions(Rules.of(CONFIG))
    with open_journal(directory, run_start=start, overwrite=True) as journal:
        for step in range(STEPS):
            rate = 60.0 if STEPS // 2 <= step < STEPS // 2 + 20 else 0.5
            loss, *norms = network.step(rings(numbers, 32), rate)
            journal.steps = step + 1
            if step % CHECK_EVERY:
                continue
            gradients = dict(zip(("hidden", "output"), norms, strict=True))
            for found in decisions.check(step, loss, gradients):
                journal.append(found.event, **event_fields(found))
            journal.check(step, loss, gradients, {})


def main(words: list[str]) -> int:
    """Train, then use the commands on what is there."""
    directory = Path(words[0] if words else "recorded_run")
    train(directory)
    private, public = directory / "signing.pem", directory / "signing.pub.pem"
    commands = [
        ["sign", directory, "--key", private],
        ["verify", directory, "--key", public, "--strict"],
        ["show", directory],
        ["report", directory, "--key", public, "-o", directory / "report.html"],
    ]
    if not private.exists():  # a real key lies elsewhere
        commands.insert(0, ["keygen", private, public])
    for command in commands:
        print(f"\n$ cirron-otel record {' '.join(map(str, command))}\n", flush=True)
        done = subprocess.run(
            [sys.executable, "-m", "cirron_otel.cli.main", "record", *map(str, command)],
            check=False,
        )
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
