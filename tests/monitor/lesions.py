"""Trainings in which channels die on purpose, and what to look for in their records."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

import cirron_otel as ci
from monitor.trainings import batch, cnn, events, train

#: The second stage of the small CNN.
CONV, NORM = "3", "4"


def kill(model: nn.Sequential, channels: Iterable[int] = range(4), stage: int = 3) -> None:
    """Zero the filters of some channels, and close their shift."""
    conv, norm = model[stage], model[stage + 1]
    some = list(channels)
    with torch.no_grad():
        conv.weight[some], conv.bias[some] = 0.0, 0.0
        norm.bias[some] = -0.1
        for parameter in (*conv.parameters(), *norm.parameters()):
            if parameter.grad is not None:
                parameter.grad[some] = 0.0


def forget(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Take the momentum away."""
    for parameter in model.parameters():
        for value in optimizer.state.get(parameter, {}).values():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape:
                value.zero_()


class Training:
    """The small CNN under a monitor that checks every ``every`` steps."""

    def __init__(
        self,
        optimizer: str = "sgd",
        every: int = 1,
        model: nn.Sequential | None = None,
        **more: Any,
    ) -> None:
        self.model = cnn() if model is None else model
        self.optimizer: torch.optim.Optimizer = {
            "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
            "adamw": lambda p: torch.optim.AdamW(p, lr=1e-3),
        }[optimizer](self.model.parameters())
        self.told: list[ci.Finding] = []
        self.monitor = ci.Monitor(
            self.model, self.optimizer, out="run", verbose=False, check_every=every,
            on_finding=self.told.append, **more,
        )  # fmt: skip

    def run(self, steps: int, change: Callable[[int], object] = lambda _step: None) -> None:
        """Train for some steps."""
        train(self.monitor, self.model, self.optimizer, steps, change)

    def step(self, seed: int = 0) -> None:
        """Forward, backward and a step of the optimizer that the monitor is not told of."""
        x, y = batch(seed)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()

    def certified(self) -> list[tuple[int, list[int], str | None]]:
        """Step, channels and rule of each certificate."""
        return [(e["step"], e["channels"], e.get("rule")) for e in events("run", "certificate")]

    def violated(self) -> list[dict[str, Any]]:
        """The events that end a certificate."""
        return [e for e in events("run", "channels") if e.get("rule") == "certificate_violated"]

    def refused(self) -> list[str]:
        """The reasons for which nothing was certified."""
        return [e["reason"] for e in events("run", "certificate_refused")]
