"""Repair: what is repaired, how, how much that was, and taking it back."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

import cirron_otel as ci
from cirron_otel.errors import ConfigurationError
from cirron_otel.monitor.repair import fresh_rows, seed_of
from cirron_otel.training_record.checking.verify import verify
from monitor.lesions import Training, forget, kill
from monitor.trainings import cnn, diary, events, rows

_VECTORS = json.loads(
    (Path(__file__).resolve().parent.parent / "formats/records/vectors.json").read_text()
)["repair_generator"]


def test_new_filters_are_those_of_the_existing_monitor() -> None:
    """The generator's seed and its numbers, on the existing monitor's vectors."""
    for case in _VECTORS:
        seed, step, layer = case["seed"], case["step"], case["layer"]
        assert seed_of(seed, step, layer) == case["torch_manual_seed"]
        found = fresh_rows(torch.zeros(3, 2, 1, 1), 2, seed, step, layer)
        assert found.flatten().tolist() == case["conv2d_2to3_1x1_rows_0_and_2"]


def _repaired(**more: object) -> Training:
    run = Training("adamw", patience=2, repair=True, **more)

    def lesion(step: int) -> None:
        if step == 5:
            kill(run.model)
            forget(run.optimizer, run.model)

    run.run(6, lesion)
    return run


def test_certified_channels_begin_anew_and_learn() -> None:
    """At the second check, measured, with clean optimizer state; the others are as they were."""
    run = _repaired()
    before = [run.model[3].weight.detach().clone(), run.model[4].running_var.clone()]
    random = torch.get_rng_state()
    run.run(1)
    assert torch.equal(torch.get_rng_state(), random)
    (event,) = events("run", "repair")
    assert (event["step"], event["channels"], event["count"]) == (6, [0, 1, 2, 3], 4)
    assert event["optimizer_slices_reset"] == 8
    after = run.model[3].weight.detach()
    # The step of the optimizer that follows is small beside the repair.
    measured = float(torch.linalg.vector_norm(after - before[0]))
    assert event["delta_norm"] == pytest.approx(measured, rel=0.02)
    assert event["relative_change"] == event["delta_norm"] / event["weight_norm_before"]
    assert bool(after[:4].flatten(1).any(1).all())
    run.run(10)
    assert rows("run")[-1]["stuck"]["3"] == [0, 0, 0, 0]
    assert run.model[4].weight[:4].detach().tolist() != [1.0] * 4
    run.monitor.close()
    assert run.violated() == []
    assert diary("run")[-1]["counts"]["channels_repaired"] == 4
    assert verify(Path("run")).ok
    assert "repaired" in {finding.kind for finding in run.told}


def test_a_repair_is_undone_on_request() -> None:
    """Everything of the repaired channels is as it was before, and the record says so."""
    run = _repaired()
    model = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.run(3)
    assert run.monitor.undo_repair("0") == 0
    assert run.monitor.undo_repair("3") == 1
    assert run.monitor.undo_repair() == 0
    for name in ("3.weight", "3.bias", "4.bias"):
        assert torch.equal(run.model.state_dict()[name][:4], model[name][:4])
    done = events("run", "repair")
    assert [event.get("rule") for event in done] == [None, "undone"]
    assert done[1]["undone_step"] == 6
    run.monitor.close()
    assert verify(Path("run")).ok
    with pytest.raises(RuntimeError, match="closed"):
        run.monitor.undo_repair()


def test_channels_that_were_pruned_on_purpose_stay_pruned() -> None:
    """Under a mask, and where they were zero from the start."""
    masked, zeroed = cnn(), cnn()
    prune.ln_structured(masked[3], "weight", 0.5, n=2, dim=0)
    with torch.no_grad():
        zeroed[3].weight[:4], zeroed[3].bias[:4], zeroed[4].bias[:4] = 0.0, 0.0, -1.0
    for number, model in enumerate((masked, zeroed)):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        monitor = ci.Monitor(
            model, optimizer, out=f"run{number}", repair=True, patience=2, check_every=1,
            verbose=False,
        )  # fmt: skip
        for _ in range(6):
            optimizer.zero_grad()
            model(torch.randn(8, 1, 10, 10)).sum().backward()
            monitor.step()
            optimizer.step()
        monitor.close()
        assert events(f"run{number}", "repair") == []
    assert not zeroed[3].weight[:4].any()


def test_all_repairs_what_was_zero_from_the_start_and_what_is_silent() -> None:
    """``repair="all"`` asks for that."""
    model = cnn()
    with torch.no_grad():
        model[3].weight[:2], model[3].bias[:2], model[4].bias[:2] = 0.0, 0.0, -1.0
        model[4].bias[5], model[4].weight[5] = -50.0, 0.1  # never fires
    run = Training(model=model, repair="all", patience=2)
    run.run(6)
    run.monitor.close()
    repaired = {channel for event in events("run", "repair") for channel in event["channels"]}
    assert {0, 1, 5} <= repaired
    assert model[4].bias[5].item() > -1


def test_layers_that_begin_as_zeros_and_learn_are_not_stuck() -> None:
    """A residual block whose last scale is zero at first, an adapter that is (R-W34)."""

    class Zero(nn.Module):
        """Adds what is zero at first."""

        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8)
            self.down, self.up = nn.Linear(4, 2), nn.Linear(2, 4, bias=False)
            nn.init.zeros_(self.norm.weight)
            nn.init.zeros_(self.up.weight)
            self.first, self.head = nn.Conv2d(1, 8, 3, padding=1), nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """A block and an adapter behind the head."""
            x = self.first(x)
            out = self.head(torch.relu(x + self.norm(self.conv(x))).mean((2, 3)))
            found: torch.Tensor = out + self.up(self.down(out))
            return found

    torch.manual_seed(0)
    model: nn.Module = Zero()
    run = Training(model=model, repair=True, patience=1)  # type: ignore[arg-type]
    run.run(4)
    run.monitor.close()
    assert events("run", "channels", "repair") == []
    assert all(sum(counts) == 0 for row in rows("run") for counts in row["stuck"].values())


def test_what_cannot_be_repaired_is_refused() -> None:
    """A repair needs an optimizer, and one of the three choices."""
    with pytest.raises(ConfigurationError, match="needs the torch optimizer"):
        ci.Monitor(cnn(), out="run", repair=True)
    model = cnn()
    with pytest.raises(ConfigurationError, match="'all'"):
        ci.Monitor(model, torch.optim.SGD(model.parameters(), lr=0.1), out="run", repair="some")
    assert not Path("run").exists()


def test_the_state_of_every_optimizer_is_reset() -> None:
    """Also that of one the monitor was not given."""
    model = cnn()
    first = torch.optim.SGD(model[:3].parameters(), lr=0.01)
    second = torch.optim.AdamW(model[3:].parameters(), lr=1e-3)
    monitor = ci.Monitor(
        model, first, out="run", repair=True, patience=2, check_every=1, verbose=False
    )
    for step in range(8):
        model.zero_grad()
        model(torch.randn(8, 1, 10, 10)).square().mean().backward()
        if step == 4:
            kill(model)
        if step in (4, 5):  # keep it dead: momentum would move it
            forget(second, model)
        monitor.step()
        first.step()
        second.step()
    monitor.close()
    (event,) = events("run", "repair")
    assert event["optimizer_slices_reset"] == 8
    assert math.isfinite(event["other_delta_norm"])
