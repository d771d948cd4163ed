"""Small trainings to be monitored, and reading what the monitor wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cirron_otel.monitor.front import Monitor


def cnn(seed: int = 0) -> nn.Sequential:
    """Two Conv-BatchNorm-ReLU stages and a Linear layer, for inputs of 1 x 10 x 10."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(),
        nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16), nn.ReLU(),
        nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images that a model can learn to tell apart by their brightest quarter."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (16,), generator=generator)
    x = torch.randn(16, 1, 10, 10, generator=generator)
    for image, label in zip(x, y.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[:, row * 5 : row * 5 + 5, column * 5 : column * 5 + 5] += 2
    return x, y


def train(
    monitor: Monitor,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    change: Callable[[int], object] = lambda _step: None,
) -> None:
    """Train for some steps; ``change`` is called with the step after ``backward()``."""
    for _ in range(steps):
        step = monitor.step_count
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        change(step)
        monitor.step(loss)
        optimizer.step()


def diary(directory: Path | str) -> list[dict[str, Any]]:
    """The events of a record."""
    return _lines(Path(directory) / "diary.jsonl")


def rows(directory: Path | str) -> list[dict[str, Any]]:
    """The metrics rows of a record."""
    return _lines(Path(directory) / "metrics.jsonl")


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def events(directory: Path | str, *kinds: str) -> list[dict[str, Any]]:
    """The events of some kinds."""
    return [event for event in diary(directory) if event["event"] in kinds]
