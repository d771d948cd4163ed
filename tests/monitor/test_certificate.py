"""What is certified, and what must not be."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

import cirron_otel as ci
from cirron_otel.monitor.owners import family_of
from cirron_otel.training_record.checking.verify import verify
from monitor.lesions import Training, forget, kill
from monitor.trainings import batch, cnn, diary, events, rows, train


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_dead_channels_are_certified_and_stay_dead(optimizer: str) -> None:
    """Zero filters at rest are certified at once, and no step moves them in any way."""
    run = Training(optimizer)

    def lesion(step: int) -> None:
        if step == 5:
            kill(run.model)
            forget(run.optimizer, run.model)

    run.run(30, lesion)
    run.monitor.close()
    assert run.certified() == [(5, [0, 1, 2, 3], None)]
    assert run.violated() == []
    assert not run.model[3].weight[:4].any()
    assert rows("run")[-1]["stuck"]["3"] == [4, 0, 0, 0]
    assert verify(Path("run")).ok
    (event,) = events("run", "certificate")
    assert event["batchnorm"] == "4"
    assert len(event["assumes"]) == 8


def test_a_layer_without_batchnorm_is_certified() -> None:
    """A zero filter with a bias of at most zero puts out that bias for every input."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 8), nn.ReLU(), nn.Linear(8, 4))
    run = Training(model=model)

    def lesion(step: int) -> None:
        if step == 2:
            with torch.no_grad():
                model[1].weight[:2], model[1].bias[:2] = 0.0, -0.5
                model[1].weight.grad[:2], model[1].bias.grad[:2] = 0.0, 0.0

    run.run(10, lesion)
    run.monitor.close()
    assert run.certified() == [(2, [0, 1], None)]
    assert run.violated() == []


def test_more_dead_channels_are_a_further_certificate() -> None:
    """Those that die later are told with a rule (R-W23)."""
    run = Training()
    dying = {3: [0, 1], 6: [7]}
    run.run(12, lambda step: kill(run.model, dying[step]) if step in dying else None)
    run.monitor.close()
    assert run.certified() == [(3, [0, 1], None), (6, [7], "more_channels")]
    assert run.violated() == []


def test_momentum_refuses_a_certificate_until_it_is_gone() -> None:
    """The very step after a lesion would move the filters again."""
    run = Training("adamw")
    run.run(8, lambda step: kill(run.model) if step == 4 else None)
    run.monitor.close()
    assert run.certified() == []
    assert run.refused() == ["the optimizer still holds momentum for these channels"]
    assert bool(run.model[3].weight[:4].any())


# --- the two false certificates of the existing monitor -----------------------------------------


def _two_optimizers(other: torch.optim.Optimizer, model: nn.Sequential) -> list[dict[str, Any]]:
    first = torch.optim.SGD(model[:3].parameters(), lr=0.05, momentum=0.9)
    monitor = ci.Monitor(model, first, out="run", verbose=False, check_every=5)
    for step in range(20):
        x, y = batch(step)
        first.zero_grad()
        other.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 10:
            kill(model)
        monitor.step()
        other.step()
        first.step()
    monitor.close()
    assert verify(Path("run")).ok
    return diary("run")


def test_a_second_optimizer_with_momentum_refuses_the_certificate() -> None:
    """The layer belongs to one the monitor was not given: it is found, and asked (R-W21)."""
    model = cnn()
    other = torch.optim.Adam(model[3:].parameters(), lr=1e-2, weight_decay=1e-2)
    found = _two_optimizers(other, model)
    assert [event for event in found if event["event"] == "certificate"] == []
    refused = [e["reason"] for e in found if e["event"] == "certificate_refused"]
    assert any("Adam adds its weight decay to the gradient" in reason for reason in refused)


def test_a_second_optimizer_at_rest_is_as_good_as_the_first() -> None:
    """Nothing but what moves the layer decides."""
    model = cnn()
    found = _two_optimizers(torch.optim.SGD(model[3:].parameters(), lr=0.01), model)
    (event,) = [event for event in found if event["event"] == "certificate"]
    assert (event["step"], event["channels"]) == (10, [0, 1, 2, 3])
    assert not [event for event in found if event.get("rule") == "certificate_violated"]


def test_a_layer_in_no_optimizer_is_refused() -> None:
    """Who moves it, if anybody, is not known."""
    model = cnn()
    optimizer = torch.optim.SGD(model[:3].parameters(), lr=0.01)
    monitor = ci.Monitor(model, optimizer, out="run", verbose=False, check_every=1)
    train(monitor, model, optimizer, 4, lambda step: kill(model) if step == 2 else None)
    monitor.close()
    (refused,) = events("run", "certificate_refused")
    assert refused["reason"] == "'3.weight' is in no optimizer that was found"


def test_batchnorm_in_evaluation_mode_between_checks_refuses_the_certificate() -> None:
    """It is in training mode at each check, and at no other step (R-W22)."""
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    monitor = ci.Monitor(model, optimizer, out="run", verbose=False, check_every=5)
    for step in range(40):
        model[4].train(step % 5 == 0)
        train(monitor, model, optimizer, 1, lambda now: kill(model) if now == 20 else None)
    monitor.close()
    assert events("run", "certificate") == []
    (refused,) = events("run", "certificate_refused")
    assert "has normalised 1 batches in 5 steps" in refused["reason"]


# --- layers of which nothing can be proven -----------------------------------------------------


class _Block(nn.Module):
    """A stage whose parts can be used in ways that break a premise."""

    def __init__(self, after: Callable[[_Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.conv, self.norm, self.relu = nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.head = nn.Linear(8, 4)
        self.after = after

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The stage, and a head on its means."""
        out: torch.Tensor = self.head(self.after(self, self.norm(self.conv(x))).mean((2, 3)))
        return out


@pytest.mark.parametrize(
    ("after", "why"),
    [
        (lambda m, x: m.relu(x) + x, "is used 2 times"),
        (lambda _, x: torch.relu(x + 1), "no ReLU"),
        (lambda _, x: nn.functional.gelu(x), "no ReLU"),
        (lambda m, x: m.relu(x) + m.conv.weight.sum(), "'conv.weight' is used 2 times"),
        (lambda m, x: m.relu(x) + m.norm.bias.square().sum(), "'norm.bias' is used 2 times"),
    ],
)
def test_a_layer_that_something_else_uses_is_never_certified(
    after: Callable[[_Block, torch.Tensor], torch.Tensor], why: str
) -> None:
    """The manifest says so from the start, and why."""
    torch.manual_seed(0)
    model = _Block(after)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = ci.Monitor(model, optimizer, out="run", verbose=False, check_every=1)
    train(monitor, model, optimizer, 2)
    monitor.close()
    (manifest,) = events("run", "manifest")
    producer = next(one for one in manifest["producers"] if one["layer"] == "conv")
    assert producer["certificate"] is False
    assert why in producer["reason"]


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda m: nn.utils.weight_norm(m[3]), "computed from others"),
        (lambda m: prune.ln_structured(m[3], "weight", 0.5, n=2, dim=0), "computed from others"),
        (lambda m: parametrizations.weight_norm(m[3]), "computed from others"),
        (lambda m: setattr(m[0], "bias", m[1].bias), "is used 2 times"),
        (lambda m: setattr(m[7], "twin", m[3].weight), "another module has the same"),
    ],
)
@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm`")
def test_a_weight_that_is_no_plain_parameter_is_never_certified(
    spoil: Callable[[nn.Sequential], object], why: str
) -> None:
    """Weight norm, masks and tied weights move a weight in other ways."""
    model = cnn()
    spoil(model)
    run = Training(model=model)
    run.run(2)
    run.monitor.close()
    (manifest,) = events("run", "manifest")
    reasons = {one["layer"]: one["reason"] for one in manifest["producers"]}
    assert any(reason is not None and why in reason for reason in reasons.values())


@pytest.mark.parametrize("relu", [torch.relu, nn.functional.relu_, nn.functional.relu])
def test_a_functional_relu_is_as_good_as_a_module(
    relu: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """The graph of autograd knows it (R-W33)."""
    torch.manual_seed(0)
    model = _Block(lambda _, x: relu(x))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = ci.Monitor(model, optimizer, out="run", verbose=False, check_every=1)

    def lesion(step: int) -> None:
        if step == 2:
            kill(nn.Sequential(model.conv, model.norm), range(2), stage=0)

    train(monitor, model, optimizer, 6, lesion)
    monitor.close()
    (event,) = events("run", "certificate")
    assert (event["layer"], event["channels"]) == ("conv", [0, 1])
    assert not [e for e in events("run", "channels") if e.get("rule")]


def test_which_optimizers_are_covered() -> None:
    """By exact type, as a subclass may do anything; and by name on request."""

    class Mine(torch.optim.SGD):
        """Perhaps it adds noise."""

    parameters = [nn.Parameter(torch.zeros(1))]
    for kind in ("Adam", "AdamW", "NAdam", "RAdam", "Adamax"):
        assert family_of(getattr(torch.optim, kind)(parameters)) == "adam"
    assert family_of(torch.optim.SGD(parameters)) == "sgd"
    assert family_of(torch.optim.RMSprop(parameters)) is None
    mine = Mine(parameters)
    assert family_of(mine) is None
    assert family_of(mine, ["Mine"]) == family_of(mine, [f"{__name__}.{Mine.__qualname__}"])
    assert family_of(mine, ["Mine"]) == "opt-in"


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_autocast_and_checkpointing_keep_certificates(dtype: torch.dtype | None) -> None:
    """Casts are seen through, and a forward pass that is made again counts for nothing (R-W36)."""
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitor = ci.Monitor(model, optimizer, out="run", verbose=False, check_every=1)
    for step in range(6):
        x, y = batch(step)
        optimizer.zero_grad()
        if dtype is None:
            out = _checkpointed(model, x)
        else:
            with torch.autocast("cpu", dtype=dtype):
                out = model(x)
        loss = nn.functional.cross_entropy(out.float(), y)
        loss.backward()
        if step == 2:
            kill(model)
        monitor.step(loss)
        optimizer.step()
    monitor.close()
    (event,) = events("run", "certificate")
    assert (event["step"], event["channels"]) == (2, [0, 1, 2, 3])
    assert not [e for e in events("run", "channels") if e.get("rule") == "certificate_violated"]


def _checkpointed(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
    """A forward pass that keeps little: two stages are made again in the backward pass."""
    x = checkpoint(model[:3], x, use_reentrant=False)
    x = checkpoint(model[3:6], x, use_reentrant=False)
    out: torch.Tensor = model[6:](x)
    return out
