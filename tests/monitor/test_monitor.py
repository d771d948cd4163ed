"""``Monitor``: what it is given, what it writes, and that the model is as before."""

from __future__ import annotations

import copy
import io
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import cirron_otel as ci
from cirron_otel.training_record.checking.verify import verify
from monitor.trainings import batch, cnn, diary, events, rows, train


def _hooks(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def _made(model: nn.Module, **arguments: Any) -> tuple[ci.Monitor, torch.optim.Optimizer]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    return ci.Monitor(model, optimizer, **{"out": "run", "verbose": False, **arguments}), optimizer


# --- what it is given -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"model": 3}, ValueError, "no torch.nn.Module"),
        ({"check_every": 0}, ValueError, "check_every"),
        ({"sigma": -1.0}, ValueError, "sigma"),
        ({"warmup": True}, ValueError, "warmup"),
        ({"config": {"sigma": 2}}, TypeError, "MonitorConfig"),
        ({"layers": []}, ValueError, "layers"),
        ({"layers": ["nothing*"]}, ValueError, "matches no layer"),
        ({"repair": "some"}, ValueError, "repair"),
        ({"optimizer": None, "scaler": torch.amp.GradScaler("cpu")}, ValueError, "optimizer"),
        ({"scaler": 1024.0}, TypeError, "GradScaler"),
        ({"on_finding": 3}, ValueError, "on_finding"),
        ({"model": nn.LazyLinear(3), "optimizer": None}, ValueError, "lazy"),
    ],
)
def test_what_cannot_be_used_is_refused(
    arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    """Each raises with a text that says what is wrong, and leaves nothing behind (R-W18)."""
    model = cnn()
    given = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **arguments}
    with pytest.raises(error, match=says):
        ci.Monitor(given.pop("model"), given.pop("optimizer"), out="run", **given)
    assert not Path("run").exists()
    assert _hooks(model) == 0


def test_a_record_that_is_there_stays() -> None:
    """A second monitor is refused; overwrite sets the first record aside; append goes on."""
    for number in range(2):
        model = cnn()
        monitor, optimizer = _made(model, append=number > 0)
        train(monitor, model, optimizer, 1)
        monitor.close()
    with pytest.raises(FileExistsError):
        _made(cnn())
    assert diary("run")[0]["segment"] == 2
    assert verify(Path("run/previous-1")).ok


def test_configurations_are_checked_and_frozen() -> None:
    """A changed copy is checked like the first one, and to_dict has every field in order."""
    config = ci.MonitorConfig(check_every=5, certify_optimizers=["Lion"])
    assert config.replace(sigma=3).to_dict()["sigma"] == 3
    assert list(config.to_dict())[:3] == ["check_every", "patience", "sigma"]
    assert config.to_dict()["certify_optimizers"] == ["Lion"]
    for wrong in ({"sigma": 0}, {"repair_seed": -1}, {"decayed_rel_tol": 1.0}, {"nothing": 1}):
        with pytest.raises(ci.ConfigurationError):
            config.replace(**wrong)
    with pytest.raises(ci.ConfigurationError, match="certify_optimizers"):
        ci.MonitorConfig(certify_optimizers="Lion")
    with pytest.raises(AttributeError):
        config.sigma = 1.0  # type: ignore[misc]


# --- what it writes -------------------------------------------------------------------------------


def test_a_whole_run_verifies_and_replays() -> None:
    """The record of a training with trouble is whole, and its events follow from its rows."""
    model = cnn()

    def trouble(step: int) -> None:
        if step == 40:
            with torch.no_grad():
                for module in (model[3], model[4]):
                    module.weight.zero_()
                    module.bias.fill_(-0.5 if module is model[4] else 0.0)
                    module.weight.grad = module.bias.grad = None

    with _made(model, check_every=2)[0] as monitor:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        train(monitor, model, optimizer, 80, trouble)
        assert monitor.pairs == {"0": "1", "3": "4"}
    verdict = verify(Path("run"))
    assert verdict.ok
    assert verdict.check("replay").status == "pass"
    first, structure, manifest, *_, last = diary("run")
    assert (first["event"], first["model"], first["layers"]) == ("run_start", "Sequential", 5)
    assert structure["relu_after"] == ["1", "4"]
    assert (structure["graph"], manifest["event"]) == ("loss", "manifest")
    assert (last["steps"], last["checks"]) == (80, 40)
    (channels,) = events("run", "channels")
    assert (channels["layer"], channels["level"], channels["n_flat"]) == ("3", "all", 16)
    alarms = {event["layer"]: event for event in events("run", "alarm")}
    assert set(alarms) == {"0", "1", "3", "4"}
    assert {event["diagnosis"] for event in alarms.values()} == {"no_gradient"}
    assert len(rows("run")) == 40
    assert (Path("run") / "report.html").stat().st_size > 1000


def test_one_dead_layer_is_named_as_the_cause_of_all_below_it() -> None:
    """Alarms of layers that only starve say where it begins (R-W31)."""
    model = cnn()
    told: list[ci.Finding] = []
    monitor, optimizer = _made(model, check_every=1, warmup=3, on_finding=told.append)

    def kill(step: int) -> None:
        if step == 10:
            with torch.no_grad():
                model[4].weight.zero_()
                model[4].bias.fill_(-1.0)

    train(monitor, model, optimizer, 14, kill)
    monitor.close()
    causes = {event["layer"]: event.get("caused_by") for event in events("run", "alarm")}
    assert causes["4"] is None
    assert causes["0"] == causes["1"] == causes["3"] == "4"
    (warned,) = [f for f in told if f.kind == "no_gradient" and f.severity == "warning"]
    assert warned.layer == "4"


def test_only_checks_have_hooks_and_close_takes_all_away() -> None:
    """Between two checks the modules bear nothing; after close() nothing either."""
    model = cnn()
    monitor, optimizer = _made(model, check_every=4)
    assert _hooks(model) > 0
    seen = []
    train(monitor, model, optimizer, 9, lambda _step: seen.append(_hooks(model)))
    assert [number > 0 for number in seen] == [True] + [False, False, False, True] * 2
    monitor.close()
    assert _hooks(model) == 0
    with pytest.raises(RuntimeError, match="closed"):
        monitor.step()
    assert monitor.close() is None


def test_a_monitored_model_is_copied_and_saved(tmp_path: Path) -> None:
    """deepcopy, an averaged model and torch.save work while hooks are there (R-W20)."""
    model = cnn()
    monitor, optimizer = _made(model, check_every=1)
    train(monitor, model, optimizer, 2)
    assert _hooks(model) > 0
    copied = copy.deepcopy(model)
    averaged = torch.optim.swa_utils.AveragedModel(model)
    averaged.update_parameters(model)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    x, _ = batch(0)
    runs = monitor._pipeline._channels._activity.runs.total()  # type: ignore[union-attr]
    for one in (copied, averaged, loaded):
        one(x)
    assert monitor._pipeline._channels._activity.runs.total() == runs  # type: ignore[union-attr]
    torch.save(model, tmp_path / "model.pt")
    program = (
        "import sys, torch; sys.modules['cirron_otel'] = None;"
        f"torch.load({str(tmp_path / 'model.pt')!r}, weights_only=False)(torch.zeros(1, 1, 10, 10))"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
    monitor.close()


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:`torch.jit")
def test_a_monitored_model_is_traced() -> None:
    """torch.jit.trace while hooks are there: nothing of them is in the graph (report 122)."""
    model = cnn()
    monitor, optimizer = _made(model, check_every=1)
    x, _ = batch(0)
    for steps in (0, 2):
        train(monitor, model, optimizer, steps)
        assert _hooks(model) > 0
        graph = str(torch.jit.trace(model, x).inlined_graph)
        assert "aten::relu" in graph
        assert "aten::amax" not in graph
    monitor.close()


def test_training_is_the_same_with_and_without() -> None:
    """Weights after some steps are equal to the last bit, and so is the random stream."""
    ends = []
    for monitored in (False, True):
        model = cnn()
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        monitor = ci.Monitor(model, optimizer, out="run", check_every=2) if monitored else None
        for step in range(9):
            x, y = batch(step)
            x = nn.functional.dropout(x, 0.2)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            if monitor is not None:
                monitor.step(loss)
            optimizer.step()
        if monitor is not None:
            monitor.close(report=False)
        ends.append([p.detach().clone() for p in model.parameters()] + [torch.get_rng_state()])
    assert all(torch.equal(*pair) for pair in zip(*ends, strict=True))


def test_the_loss_may_be_anything_usual() -> None:
    """A number, a vector (its mean, told once), nothing, or one noted before."""
    model = cnn()
    monitor, optimizer = _made(model, check_every=1)
    model(batch(0)[0]).sum().backward()
    for loss in (1.5, torch.tensor([1.0, 2.0, 6.0]), torch.tensor([]), None, "no number"):
        monitor.step(loss)
    monitor.note_loss(torch.tensor(4.0, requires_grad=True))
    monitor.step()
    monitor.step()
    monitor.close(report=False)
    assert [row["loss"] for row in rows("run")] == [1.5, 3.0, None, None, None, 4.0, None]
    assert [event["elements"] for event in events("run", "loss_reduced")] == [3]
    assert optimizer is not None


def test_sinks_get_every_line_and_a_failing_one_is_told_of() -> None:
    """Events and rows go to every sink; one that raises is left out, and the record says so."""
    seen: list[tuple[str, Any]] = []

    def fails(kind: str, _payload: dict[str, Any]) -> None:
        if kind == "metrics":
            raise OSError("full")

    model = cnn()
    monitor, optimizer = _made(
        model, check_every=1, sinks=[fails, lambda kind, payload: seen.append((kind, payload))]
    )
    train(monitor, model, optimizer, 2)
    monitor.close(report=False)
    assert [event["error"] for event in events("run", "sink_error")] == ["OSError"]
    assert [payload for kind, payload in seen if kind == "metrics"] == rows("run")
    assert [payload["event"] for kind, payload in seen if kind == "event"] == [
        "structure", "manifest", "sink_error",
    ]  # fmt: skip
    assert verify(Path("run")).ok


def test_the_end_says_what_ended_it() -> None:
    """An exception in the with block is named in run_end and flies on."""
    with pytest.raises(KeyError), _made(cnn())[0]:
        raise KeyError("secret")
    last = diary("run")[-1]
    assert (last["event"], last["error"]) == ("run_end", "KeyError")


def test_stop_on_ends_the_training_once_the_check_is_written() -> None:
    """step() raises StopTraining at the finding asked for; the record has the event and the row."""
    model = cnn()
    monitor, optimizer = _made(model, check_every=1, stop_on="critical")
    train(monitor, model, optimizer, 3)
    with pytest.raises(ci.StopTraining, match="the loss is nan"):
        monitor.step(float("nan"))
    monitor.close()
    assert [event["step"] for event in events("run", "nonfinite_loss")] == [3]
    assert len(rows("run")) == 4


def test_a_callback_may_stop_the_training() -> None:
    """What an on_finding function raises as StopTraining leaves step()."""

    def stop(finding: ci.Finding) -> None:
        raise ci.StopTraining(f"because of {finding.kind}")

    monitor, _ = _made(cnn(), check_every=1, on_finding=stop)
    with pytest.raises(ci.StopTraining, match="because of no_gradients"):
        monitor.step(1.0)
    monitor.close()


def test_a_callback_that_ends_the_program_leaves_a_whole_record() -> None:
    """What leaves through step(), SystemExit say, does so once the check is written."""

    def leave(_finding: ci.Finding) -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit), _made(cnn(), check_every=1, on_finding=leave)[0] as monitor:
        monitor.step(float("nan"))
    assert [row["step"] for row in rows("run")] == [0]
    assert verify(Path("run")).ok


def test_layers_without_numbers_and_of_odd_kinds_are_looked_at() -> None:
    """No inputs, no outputs, one number, complex ones: a check sees the others."""

    class Odd(nn.Module):
        """A little of everything."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.empty, self.none = nn.Linear(100, 4), nn.Linear(0, 3), nn.Linear(5, 0)
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.phase = nn.Parameter(torch.randn(3, dtype=torch.complex64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            """Use all of it."""
            more = self.empty(x.new_zeros(len(x), 0)).sum() + self.none(x.new_zeros(1, 5)).sum()
            out: torch.Tensor = self.body(x.flatten(1)) * self.scale
            return out + self.phase.abs().sum() + more

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = Odd()
    monitor, optimizer = _made(model, check_every=1)
    train(monitor, model, optimizer, 3)
    monitor.close()
    assert [set(row["grad"]) for row in rows("run")] == [{"", "body", "empty", "none"}] * 3


def test_findings_of_a_monitor_reach_the_recording() -> None:
    """With profile() the same finding is a mark, a log record and a line of health()."""
    ci.profile(frameworks=[])
    with ci.scope("train"):
        monitor, _ = _made(cnn(), out=None, check_every=1)
        monitor.step(1.0)
    assert ci.health()["findings"]["by_kind"] == {"no_gradients": 1}
    assert monitor.out == Path(".cirron/records").absolute() / str(ci.health()["run_id"])
    monitor.close()
    assert json.loads((monitor.out / "diary.jsonl").read_text().splitlines()[1])["span_id"]


def test_layers_can_be_chosen() -> None:
    """Only those that match are in rows and manifest; pairs are found all the same."""
    model = cnn()
    monitor, optimizer = _made(model, check_every=1, layers=["3", "[78]"])
    train(monitor, model, optimizer, 1)
    monitor.close(report=False)
    assert list(rows("run")[0]["grad"]) == ["3", "8"]
    assert monitor.pairs == {"3": "4"}
    (manifest,) = events("run", "manifest")
    assert manifest["layers"] == {"monitored": 2, "total": 5, "filter": ["3", "[78]"]}
