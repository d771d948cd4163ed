"""Monitors that come, go and are forgotten: nothing of theirs stays, and no training fails."""

from __future__ import annotations

import gc
import os
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.jit import _recursive
from torch.optim import optimizer as torch_optimizer

import cirron_otel as ci
from cirron_otel.training_record.checking.verify import verify
from monitor.lesions import Training, kill
from monitor.trainings import batch, cnn, diary, events, rows


def _hooks(model: nn.Module) -> int:
    on_modules = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    return on_modules + _step_hooks()


def _step_hooks() -> int:
    before = torch_optimizer._global_optimizer_pre_hooks
    return len(before) + len(torch_optimizer._global_optimizer_post_hooks)


@pytest.mark.parametrize("steps", [0, 2, 12])
def test_a_monitor_that_is_dropped_goes_with_its_hooks(steps: int) -> None:
    """Before its first check, between two, and with a certificate; the model stays and trains."""
    before = _step_hooks()
    run = Training(every=5)
    run.run(steps, lambda step: kill(run.model) if step == 10 else None)
    assert bool(run.certified()) is (steps == 12)
    reference, model, optimizer = weakref.ref(run.monitor), run.model, run.optimizer
    journal = run.monitor._journal
    assert _step_hooks() > before
    run = None  # type: ignore[assignment]
    gc.collect()
    assert reference() is None
    assert _hooks(model) == before
    model(batch(0)[0]).sum().backward()
    optimizer.step()
    journal.close()  # the end of the process would


def test_a_dropped_monitor_may_be_in_its_own_callback() -> None:
    """A function of the user's that knows the monitor keeps it no longer than itself."""
    model = cnn()
    told: list[object] = []
    known: list[ci.Monitor] = []
    monitor = ci.Monitor(
        model, torch.optim.SGD(model.parameters(), lr=0.1), out="run", verbose=False,
        on_finding=lambda _: told.append(known[0].checks),
    )  # fmt: skip
    known.append(monitor)
    monitor.step(1.0)
    assert told
    reference, journal = weakref.ref(monitor), monitor._journal
    del monitor
    known = []
    gc.collect()
    assert reference() is None
    journal.close()


def test_hooks_that_come_and_go_inside_a_step_disturb_no_optimizer() -> None:
    """A scheduler that was made before profile() has us called from torch's own step hooks."""
    before = _step_hooks()
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    ci.profile(frameworks=["torch"], monitor={"check_every": 1, "out": "run"})
    ci.watch(model, optimizer)
    for step in range(6):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        if step == 2:
            kill(model)
        if step == 4:
            model[4].eval()
        optimizer.step()
        scheduler.step()
    ci.watch(None)
    ci.shutdown()
    assert diary("run")[-1]["steps"] == 6
    assert len(events("run", "certificate")) == 1
    assert [e["rule"] for e in events("run", "channels") if "rule" in e] == ["certificate_violated"]
    assert _hooks(model) == before


def test_two_monitors_on_one_model_write_the_same() -> None:
    """Certificates and numbers are equal, and closing one leaves the other at work."""
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    monitors = [
        ci.Monitor(model, optimizer, out=f"run{number}", verbose=False, check_every=1)
        for number in range(2)
    ]
    for step in range(6):
        x, y = batch(step)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if step == 3:
            kill(model)
        if step == 5:
            monitors[0].close(report=False)
        for monitor in monitors[step // 5 :]:
            monitor.step(loss)
        optimizer.step()
    monitors[1].close(report=False)
    assert rows("run0") == rows("run1")[:5]
    assert [[e["channels"] for e in events(f"run{n}", "certificate")] for n in range(2)] == [
        [[0, 1, 2, 3]],
        [[0, 1, 2, 3]],
    ]
    assert all(verify(Path(f"run{n}")).ok for n in range(2))


def test_a_forked_child_may_train_on() -> None:
    """Its steps write nothing, and the record stays the parent's."""
    run = Training()
    run.run(3)
    child = os.fork()
    if child == 0:
        run.run(2)
        run.monitor.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    run.run(1)
    run.monitor.close()
    assert [row["step"] for row in rows("run")] == [0, 1, 2, 3]
    assert verify(Path("run")).ok


@pytest.mark.filterwarnings("ignore:`torch.jit")
def test_a_monitored_model_is_scripted() -> None:
    """torch.jit.script while hooks are there, with a hook of the program's between them."""
    model = cnn()
    original = _recursive.create_script_module
    monitor = ci.Monitor(
        model, torch.optim.SGD(model.parameters(), lr=0.1), out="run", verbose=False
    )
    before = [list(m._forward_hooks.values()) for m in model.modules()]
    assert _recursive.create_script_module is not original
    x, _ = batch(0)
    scripted = torch.jit.script(model.eval())
    assert torch.allclose(scripted(x), model(x))
    assert "amax" not in str(scripted.inlined_graph)
    assert [list(m._forward_hooks.values()) for m in model.modules()] == before
    monitor.close()
    assert _recursive.create_script_module is original


def test_layers_that_are_put_in_place_of_others_are_watched() -> None:
    """A new head, and a parameter that is swapped: told, watched, and no alarm of a lost one."""
    run = Training(warmup=2)
    run.run(4)
    with torch.no_grad():
        run.model[0].weight = nn.Parameter(run.model[0].weight.clone())
    run.model[8] = nn.Linear(64, 4)
    run.optimizer.add_param_group({"params": [run.model[0].weight, *run.model[8].parameters()]})
    run.run(4)
    run.monitor.close()
    replaced = [(one.layer, one.step) for one in run.told if one.kind == "layer_replaced"]
    assert replaced == [("0", 4), ("8", 4)]
    assert [one.kind for one in run.told if one.severity != "info"] == []
    assert set(rows("run")[-1]["grad"]) == {"0", "1", "3", "4", "8"}
