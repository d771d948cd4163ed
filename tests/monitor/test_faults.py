"""Seeded faults: one is put into a training, and the finding names the right layer in time.

``MONITOR_FAULTS=all`` trains every healthy model under ten seeds, where else one is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import cirron_otel as ci
from monitor.lesions import Training
from monitor.trainings import batch, cnn

SEEDS = range(10 if os.environ.get("MONITOR_FAULTS") == "all" else 1)
#: The fault comes at this step; each step is checked.
AT = 24
#: Checks after which it has to be told.
WITHIN = 9


class Block(nn.Module):
    """A transformer block: norm first, attention, an MLP."""

    def __init__(self, width: int, activation: nn.Module, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm1, self.norm2 = norm(width), norm(width)
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True)
        self.up, self.act, self.down = nn.Linear(width, 32), activation, nn.Linear(32, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What comes in, and what the two branches add."""
        normed = self.norm1(x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        out: torch.Tensor = x + self.down(self.act(self.up(self.norm2(x))))
        return out


class Transformer(nn.Module):
    """Rows of an image as tokens."""

    def __init__(self, activation: type[nn.Module], norm: type[nn.Module]) -> None:
        super().__init__()
        self.embed = nn.Linear(10, 16)
        self.blocks = nn.Sequential(*(Block(16, activation(), norm) for _ in range(2)))
        self.norm, self.head = norm(16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify by the mean of the tokens."""
        out: torch.Tensor = self.head(self.norm(self.blocks(self.embed(x[:, 0]))).mean(1))
        return out


def _transformer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Transformer(nn.GELU, nn.LayerNorm)


def _relu_transformer(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return Transformer(nn.ReLU, nn.RMSNorm)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "cnn": cnn, "gelu": _transformer, "relu": _relu_transformer,
}  # fmt: skip


def _watch(
    model: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[ci.Monitor, list[ci.Finding]]:
    """A monitor that checks each step, and where its findings go."""
    told: list[ci.Finding] = []
    monitor = ci.Monitor(
        model, optimizer, out="run", verbose=False, on_finding=told.append, check_every=1
    )
    return monitor, told


def _train(
    model: nn.Module, seed: int, steps: int, spoil: Callable[[nn.Module, int], object] | None = None
) -> list[ci.Finding]:
    """Train, and give what was found. ``spoil`` is called after ``backward()``."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor, told = _watch(model, optimizer)
    for step in range(steps):
        x, y = batch(1000 * seed + step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if spoil is not None and step >= AT:
            spoil(model, step)
        monitor.step(loss)
        optimizer.step()
    monitor.close()
    return told


class Fault(NamedTuple):
    """What is done to which model, and what has to be found in which layer."""

    model: str
    layer: str | None
    kinds: set[str]
    spoil: Callable[[nn.Module, int], object]


def _gradient(layer: str, act: Callable[[torch.Tensor], object]) -> Any:
    def spoil(model: nn.Module, _step: int) -> None:
        for parameter in model.get_submodule(layer).parameters(recurse=False):
            if parameter.grad is not None:
                act(parameter.grad)

    return spoil


def _once(act: Callable[[nn.Module], object]) -> Any:
    def spoil(model: nn.Module, step: int) -> None:
        if step == AT:
            with torch.no_grad():
                act(model)

    return spoil


def _no_gradient(layer: str) -> Any:
    def spoil(model: nn.Module, _step: int) -> None:
        for parameter in model.get_submodule(layer).parameters(recurse=False):
            parameter.grad = None

    return spoil


def _close(layer: str, shift: float) -> Any:
    def act(model: nn.Module) -> None:
        module: Any = model.get_submodule(layer)
        module.weight[:8], module.bias[:8] = 0.01, shift

    return _once(act)


def _alternate(layer: str) -> Any:
    def spoil(model: nn.Module, step: int) -> None:
        if step % 2:
            for parameter in model.get_submodule(layer).parameters(recurse=False):
                parameter.grad *= 1e4

    return spoil


FAULTS = {
    "vanishing": Fault(
        "cnn", "3", {"vanishing_gradient"}, _gradient("3", lambda g: g.mul_(1e-5))
    ),
    "exploding": Fault(
        "gelu", "blocks.0.down", {"exploding_gradient"},
        _gradient("blocks.0.down", lambda g: g.mul_(1e5)),
    ),
    "zero": Fault("relu", "blocks.1.up", {"no_gradient"},
                  _gradient("blocks.1.up", lambda g: g.zero_())),
    "lost": Fault("gelu", "blocks.1.norm2", {"no_gradient"}, _no_gradient("blocks.1.norm2")),
    "nan": Fault("cnn", "3", {"nonfinite_gradient"},
                 _gradient("3", lambda g: g.view(-1)[0].fill_(float("nan")))),
    "alternating": Fault("cnn", "0", {"unsteady_gradient"}, _alternate("0")),
    "dead filters": Fault(
        "cnn", "3", {"stuck_channels"},
        _once(lambda m: [m.get_submodule("3").weight[:5].zero_(),  # type: ignore[union-attr, operator, index]
                         m.get_submodule("4").bias[:5].fill_(-1.0)]),  # type: ignore[union-attr, operator, index]
    ),
    "dead MLP, ReLU": Fault("relu", "blocks.0.up", {"stuck_channels"},
                            _close("blocks.0.up", -9.0)),
    "dead MLP, GELU": Fault("gelu", "blocks.0.up", {"silent_units"}, _close("blocks.0.up", -30.0)),
    "residual": Fault(
        "gelu", "blocks.1", {"residual_exploding"},
        _once(lambda m: m.get_submodule("blocks.1.down").weight.mul_(300)),  # type: ignore[union-attr, operator]
    ),
    "a lesion": Fault(
        "gelu", None, {"loss_spike", "loss_diverging"},
        _once(lambda m: [p.mul_(30) for p in m.get_submodule("head").parameters()]),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named_in_time(name: str) -> None:
    """The right kind in the right layer, within a few checks."""
    fault = FAULTS[name]
    model = MODELS[fault.model](0)
    told = _train(model, 0, AT + 1 + WITHIN, fault.spoil)
    before = [one for one in told if one.severity != "info" and (one.step or 0) < AT]
    assert before == []
    found = [one for one in told if one.kind in fault.kinds and one.layer == fault.layer]
    assert found, [(one.kind, one.layer, one.step) for one in told]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", MODELS)
def test_a_healthy_training_says_nothing(name: str, seed: int) -> None:
    """No finding above info, whatever the architecture."""
    told = _train(MODELS[name](seed), seed, 60)
    assert [one for one in told if one.severity != "info"] == []


def test_a_layer_that_is_dead_from_the_start_is_told() -> None:
    """There is no baseline that it could have left (R-W29)."""
    run = Training()
    dead = _gradient("0", lambda g: g.zero_())
    run.run(12, lambda step: dead(run.model, step))
    run.monitor.close()
    assert [(one.layer, one.step) for one in run.told if one.kind == "zero_gradient"] == [("0", 7)]


def test_a_shift_for_good_is_told_as_one() -> None:
    """The alarm stays open, and it is said that the new level stays (R-W28)."""
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    monitor, told = _watch(model, optimizer)
    x, y = batch(0)
    for step in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y) * (1 if step < 12 else 100)
        loss.backward()
        monitor.step()
    monitor.close()
    settled = [one for one in told if one.kind == "gradient_settled"]
    assert {one.layer for one in settled} == {"0", "1", "3", "4", "8"}
    assert {one.severity for one in settled} == {"info"}


def _steps(optimizer: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype) -> set[str]:
    model = cnn().to(dtype)
    made = optimizer(model)
    monitor, told = _watch(model, made)
    for step in range(8):
        x, y = batch(step)
        made.zero_grad()
        nn.functional.cross_entropy(model(x.to(dtype)).float(), y).backward()
        monitor.step()
        made.step()
    monitor.close()
    return {f"{one.kind} {one.layer}" for one in told if one.layer in {"0", "3", "8"}}


@pytest.mark.parametrize(
    ("optimizer", "dtype", "expected"),
    [
        (
            lambda m: torch.optim.SGD(m.parameters(), lr=1e-7),
            torch.bfloat16,
            "weights_do_not_move 3",
        ),
        (lambda m: torch.optim.Adam(m.parameters(), lr=3.0), torch.float32, "update_too_large 0"),
        (
            lambda m: torch.optim.SGD(m[:4].parameters(), lr=1e-3),
            torch.float32,
            "not_in_optimizer 8",
        ),
    ],
)
def test_how_far_steps_move_the_weights_is_looked_at(
    optimizer: Callable[[nn.Module], torch.optim.Optimizer], dtype: torch.dtype, expected: str
) -> None:
    """Steps lost in rounding, steps as large as the weights, weights that nobody steps."""
    assert expected in _steps(optimizer, dtype)
