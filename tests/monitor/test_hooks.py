"""``profile(monitor=True)``: the torch hook makes monitors and calls them at the right place."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cirron_otel as ci
from cirron_otel.training_record.checking.verify import verify
from monitor.trainings import batch, cnn, diary, events, rows

RECORDS = Path(".cirron/records")


@pytest.fixture(autouse=True)
def _watch_nothing() -> Iterator[None]:
    """Models of one test are none of the next one's."""
    yield
    ci.watch(None)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    *,
    scaler: Any = None,
    micro_batches: int = 1,
    nan_at: int = -1,
) -> list[float]:
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        total = 0.0
        for part in range(micro_batches):
            x, y = batch(100 * step + part)
            loss = nn.functional.cross_entropy(model(x), y) / micro_batches
            (loss if scaler is None else scaler.scale(loss)).backward()
            total += loss.item()
        if step == nan_at:
            next(model.parameters()).grad.view(-1)[0] = float("nan")
        losses.append(total)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
    return losses


def _record() -> Path:
    (found,) = RECORDS.iterdir()
    return found


def test_watch_with_an_optimizer_monitors_from_the_first_step() -> None:
    """Every optimizer step counts; structure, losses and gradients are those of the training."""
    ci.profile(monitor={"check_every": 2})
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters())
    assert ci.watch(model, optimizer) is model
    losses = _train(model, optimizer, 7)
    ci.shutdown()
    found = rows(_record())
    assert [row["loss"] for row in found] == pytest.approx(losses[::2])
    assert all(list(row["grad"]) == ["0", "1", "3", "4", "8"] for row in found)
    first, structure, *_, last = diary(_record())
    assert first["optimizer"]["type"] == "AdamW"
    assert (structure["pairs"], structure["graph"]) == ({"0": "1", "3": "4"}, "loss")
    assert (last["event"], last["steps"]) == ("run_end", 7)
    assert verify(_record()).ok
    assert (_record() / "report.html").exists()


def test_nothing_but_profile_is_needed() -> None:
    """The model that learns is found; the step whose forward was not seen is not counted."""
    ci.profile(monitor=True)
    model = cnn()
    _train(model, torch.optim.SGD(model.parameters(), lr=0.1), 3)
    ci.shutdown()
    assert diary(_record())[1]["pairs"] == {"0": "1", "3": "4"}
    assert diary(_record())[-1]["steps"] == 2


def test_watch_alone_asks_for_a_monitor() -> None:
    """watch(monitor=...) works without profile(monitor=), and only for that model."""
    ci.profile()
    watched, other = cnn(), cnn(1)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (watched, other)]
    ci.watch(watched, optimizers[0], monitor={"check_every": 1, "out": "mine"})
    _train(other, optimizers[1], 2)
    losses = _train(watched, optimizers[0], 2)
    ci.shutdown()
    assert [row["loss"] for row in rows("mine")] == pytest.approx(losses)
    assert not RECORDS.exists()


def test_micro_batches_add_up() -> None:
    """With gradients accumulated over three, the loss of a step is their sum."""
    ci.profile(monitor={"check_every": 1})
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ci.watch(model, optimizer)
    losses = _train(model, optimizer, 3, micro_batches=3)
    ci.shutdown()
    assert [row["loss"] for row in rows(_record())] == pytest.approx(losses)


def test_a_gradient_scaler_is_found_and_its_skips_are_seen() -> None:
    """Losses and norms do not bear the scale, and a skipped step is a check like any other."""
    norms = []
    for scaled in (False, True):
        path = "scaled" if scaled else "plain"
        ci.profile(path=path, monitor={"check_every": 1, "out": f"{path}/record"})
        model = cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ci.watch(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**12) if scaled else None
        losses = _train(model, optimizer, 4, scaler=scaler, nan_at=3)
        ci.shutdown()
        found = rows(f"{path}/record")
        assert [row["loss"] for row in found] == pytest.approx(losses)
        norms.append([list(row["grad"].values()) for row in found[:3]])
    for plain, scaled_norms in zip(*norms, strict=True):
        assert scaled_norms == pytest.approx(plain, rel=1e-4)
    assert [e["scale"] for e in events("scaled/record", "skipped_step")] == [2.0**12]
    assert events("plain/record", "skipped_step") == []
    assert diary("scaled/record")[-1]["steps"] == 4


def test_two_models_with_optimizers_of_their_own_have_two_records() -> None:
    """As in a GAN: each record has the steps and the loss of its own model."""
    ci.profile(monitor={"check_every": 1})
    models = [cnn(seed) for seed in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    for model, optimizer in zip(models, optimizers, strict=True):
        ci.watch(model, optimizer)
    losses = [_train(m, o, 2 + i) for i, (m, o) in enumerate(zip(models, optimizers, strict=True))]
    ci.shutdown()
    records = sorted(RECORDS.iterdir(), key=lambda path: len(path.name))
    assert [[row["loss"] for row in rows(path)] for path in records] == [
        pytest.approx(one) for one in losses
    ]


def test_stop_on_leaves_the_optimizer_step_before_it_changes_a_weight() -> None:
    """StopTraining comes out of optimizer.step(), and the weights are finite."""
    ci.profile(monitor={"check_every": 1}, stop_on="critical")
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ci.watch(model, optimizer)
    with pytest.raises(ci.StopTraining, match="not finite"):
        _train(model, optimizer, 5, nan_at=2)
    ci.shutdown()
    assert all(p.isfinite().all() for p in model.parameters())
    assert [row["step"] for row in rows(_record())] == [0, 1, 2]


def test_shutdown_leaves_torch_and_the_model_as_they_were() -> None:
    """backward, GradScaler.step and the modules bear nothing of ours."""
    before = vars(torch.Tensor)["backward"], vars(torch.amp.GradScaler)["step"]
    ci.profile(monitor=True)
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ci.watch(model, optimizer)
    assert vars(torch.amp.GradScaler)["step"] is not before[1]
    _train(model, optimizer, 2)
    ci.shutdown()
    assert (vars(torch.Tensor)["backward"], vars(torch.amp.GradScaler)["step"]) == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_another_attempt_of_a_run_goes_on_with_its_record() -> None:
    """The second recording of one run id is the next segment."""
    for _ in range(2):
        ci.profile(monitor=True, run_id="night")
        model = cnn()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ci.watch(model, optimizer)
        _train(model, optimizer, 1)
        ci.shutdown()
    assert diary(RECORDS / "night")[0]["segment"] == 2


@pytest.mark.parametrize("option", [{"sigma": -1}, {"nothing": 1}])
def test_a_wrong_option_is_told_before_anything_happens(option: dict[str, object]) -> None:
    """profile() raises, and nothing is recorded."""
    with pytest.raises(ci.ConfigurationError, match=next(iter(option))):
        ci.profile(monitor=option)
    assert not ci.health()["enabled"]


@pytest.mark.slow
@pytest.mark.parametrize("compiled_first", [False, True])
def test_a_compiled_model_is_monitored_without_a_graph_break(compiled_first: bool) -> None:  # noqa: FBT001
    """Attached before or after compiling, no graph is broken; gradients and losses are seen."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = nn.Sequential(nn.Linear(100, 8), nn.ReLU(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = torch.compile(model, backend=backend)
    monitor = ci.Monitor(compiled if compiled_first else model, optimizer, out="run", check_every=1)
    for step in range(4):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(compiled(x.flatten(1)), y)
        loss.backward()
        monitor.step(loss)
        optimizer.step()
    monitor.close()
    # Hooks that are gone after the first check may cost one more compilation; breaks cost none.
    assert torch._dynamo.utils.counters["graph_break"] == {}
    assert len(graphs) <= 2
    assert [len(row["grad"]) for row in rows("run")] == [2] * 4
    notes = " ".join(events("run", "manifest")[0]["notes"])
    assert ("compiled" in notes) is compiled_first
