"""What the rules of the record do not see: single layers, episodes, trends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cirron_otel as ci
from cirron_otel.training_record.checking.verify import verify
from monitor.trainings import batch, cnn, events, rows, train


def _found(kind: str) -> list[tuple[int, dict[str, Any]]]:
    return [
        (row["step"], found)
        for row in rows("run")
        for found in row.get("findings", ())
        if found["kind"] == kind
    ]


def _monitor(model: nn.Module, **arguments: Any) -> ci.Monitor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return ci.Monitor(
        model, optimizer, out="run", verbose=False, check_every=1, **{"warmup": 3, **arguments}
    )


def test_a_single_layer_that_loses_its_gradient_is_named() -> None:
    """A gradient of None in one layer is an alarm with a rule, and so is its return (R-W24)."""
    model = cnn()
    monitor = _monitor(model)

    def detach(step: int) -> None:
        if 6 <= step < 10:
            model[3].weight.grad = model[3].bias.grad = None

    train(monitor, model, torch.optim.SGD(model.parameters(), lr=0.01), 12, detach)
    monitor.close()
    (alarm,) = [e for e in events("run", "alarm") if e.get("rule") == "gradient_lost"]
    assert (alarm["layer"], alarm["kind"], alarm["step"]) == ("3", "Conv2d", 7)
    (cleared,) = [e for e in events("run", "alarm_cleared") if e.get("rule")]
    assert (cleared["layer"], cleared["step"]) == ("3", 10)
    assert verify(Path("run")).ok


def test_a_layer_the_loss_does_not_depend_on_is_named_once() -> None:
    """A head that is never used has no gradient from the start."""
    model = cnn()
    model.add_module("unused", nn.Identity())
    model.unused.head = nn.Linear(3, 3)
    monitor = _monitor(model)
    train(monitor, model, torch.optim.SGD(model.parameters(), lr=0.01), 8)
    monitor.close()
    ((step, found),) = _found("never_trained")
    assert (step, found["layer"]) == (3, "unused.head")


def test_a_layer_that_is_unfrozen_is_watched_from_then_on() -> None:
    """Its norm stands in the rows, and a finding says when it began (R-W32)."""
    model = cnn()
    model[3].requires_grad_(requires_grad=False)
    monitor = _monitor(model)
    train(
        monitor,
        model,
        torch.optim.SGD(model.parameters(), lr=0.01),
        6,
        lambda step: model[3].requires_grad_() if step == 2 else None,
    )
    monitor.close()
    assert ["3" in row["grad"] for row in rows("run")] == [False] * 3 + [True] * 3
    assert list(rows("run")[-1]["grad"]) == ["0", "1", "3", "4", "8"]
    ((_, found),) = _found("layer_unfrozen")
    assert found["layer"] == "3"
    assert verify(Path("run")).ok


def test_non_finite_episodes_end_and_spread() -> None:
    """Who joins an episode is named, and its end is told (R-W25)."""
    model = cnn()
    monitor = _monitor(model)

    def spoil(step: int) -> None:
        for index in {3: [8], 4: [8, 0], 5: [0]}.get(step, []):
            model[index].weight.grad.view(-1)[0] = float("inf")

    x, y = batch(0)
    for step in range(8):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        spoil(step)
        monitor.step(loss * (float("nan") if step in (3, 4) else 1.0))
    monitor.close()
    assert [e["layers"] for e in events("run", "nonfinite_gradient")] == [["8"]]
    assert [(step, f["layers"]) for step, f in _found("nonfinite_gradient_spreads")] == [(4, ["0"])]
    assert [(step, f["checks"]) for step, f in _found("finite_gradients")] == [(6, 3)]
    assert [(step, f["checks"]) for step, f in _found("finite_loss")] == [(5, 2)]


def test_steps_that_are_skipped_for_good_are_critical() -> None:
    """Non-finite gradients at patience checks on end are more than skipped steps (R-W26)."""
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    told: list[ci.Finding] = []
    monitor = ci.Monitor(
        model, optimizer, out="run", scaler=scaler, check_every=1, verbose=False,
        on_finding=told.append,
    )  # fmt: skip
    for step in range(8):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        if step >= 2:
            model[0].weight.grad.view(-1)[0] = float("nan")
        monitor.step(loss)
        scaler.step(optimizer)
        scaler.update()
    monitor.close()
    assert [e["scale"] for e in events("run", "skipped_step")] == [1024 / 2**k for k in range(6)]
    ((step, found),) = _found("steps_skipped_for_good")
    assert (step, found["severity"]) == (5, "critical")
    assert "steps_skipped_for_good" in {finding.kind for finding in told}
    assert verify(Path("run")).ok


def test_more_dead_channels_within_a_level_are_told() -> None:
    """Each growth is an event with a rule; a shrinking number within the level is none (R-W23)."""
    model = cnn()
    monitor = _monitor(model)
    x, y = batch(0)
    for step in range(8):
        model.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            if step in (2, 4):
                model[3].weight[: step - 1] = 0.0
                model[3].bias[: step - 1] = 0.0
        monitor.step()
    monitor.close()
    found = [
        (e["step"], e["n_flat"] + e["n_certified"], e.get("rule"))
        for e in events("run", "channels")
    ]
    assert found == [(2, 1, None), (4, 3, "more_channels")]
    assert verify(Path("run")).ok


def test_a_loss_that_rises_for_good_is_told_once() -> None:
    """Divergence is found where each single step is no spike; a plateau is only info."""
    model = cnn()
    told: list[ci.Finding] = []
    monitor = _monitor(model, on_finding=told.append, sigma=1e9)
    nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]).backward()
    for step in range(60):
        monitor.step(2.0 - step * 0.05 if step < 20 else 1.0 + (step - 20) * 0.05)
    for _ in range(150):
        monitor.step(0.2)
    monitor.close()
    kinds = [finding.kind for finding in told if finding.kind.startswith("loss")]
    assert kinds == ["loss_diverging", "loss_plateau"]


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_training_is_silent(seed: int) -> None:
    """A run that learns has no finding above info."""
    model = cnn(seed)
    told: list[ci.Finding] = []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    monitor = ci.Monitor(
        model, optimizer, out="run", check_every=5, verbose=False, on_finding=told.append
    )
    train(monitor, model, optimizer, 150)
    monitor.close()
    assert [finding for finding in told if finding.severity != "info"] == []
    losses = [row["loss"] for row in rows("run")]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
