"""Certified layers between checks: what breaks a premise is told the moment it is seen."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

import cirron_otel as ci
from cirron_otel.training_record.checking.verify import verify
from monitor.lesions import Training, kill
from monitor.trainings import batch, diary

EVERY = 10


def _certified_run() -> Training:
    """Trained up to a check at step 10 that certifies four channels, and on to step 11."""
    run = Training(every=EVERY)
    run.run(EVERY + 2, lambda step: kill(run.model) if step == EVERY else None)
    return run


def _is_told_at_once(run: Training, why: str, step: int = EVERY + 2) -> None:
    """One event with the reason, a finding, and the count in ``run_end``."""
    (event,) = run.violated()
    assert why in event["reason"]
    assert (event["layer"], event["seen_at"]) == ("3", step)
    (finding,) = [one for one in run.told if one.kind == "certificate_violated"]
    assert finding.step == step
    assert finding.severity == "warning"
    run.monitor.close()
    assert diary("run")[-1]["certificates_violated"] == 1
    assert verify(Path("run")).ok


def test_nothing_is_told_while_all_premises_hold() -> None:
    """Ten more steps with validations in between, and the hooks are gone at the end."""
    before = len(torch_optimizer._global_optimizer_pre_hooks)
    run = _certified_run()
    for step in range(20):
        run.run(1)
        if step % 4 == 0:
            run.model.eval()
            with torch.no_grad():
                run.model(batch(step)[0])
            run.model(batch(step)[0])  # one that forgot no_grad
            run.model.train()
    run.monitor.close()
    assert run.violated() == []
    assert "certificates_violated" not in diary("run")[-1]
    assert len(torch_optimizer._global_optimizer_pre_hooks) == before
    assert not any(module._forward_hooks for module in run.model.modules())


def _evaluation(run: Training) -> None:
    run.model[4].eval()
    run.run(1)


def _write_alive(run: Training) -> None:
    with torch.no_grad():
        run.model[3].weight[0].fill_(0.5)
    run.run(1)


def _twice(run: Training) -> None:
    x, y = batch(0)
    run.optimizer.zero_grad()
    loss = nn.functional.cross_entropy(run.model(x), y)
    (loss + run.model[3](run.model[:3](x)).mean()).backward()
    run.monitor.step(loss)
    run.optimizer.step()


def _other_optimizer(run: Training) -> None:
    other = torch.optim.RMSprop(run.model.parameters(), lr=0.01)
    run.monitor.step()
    other.step()


def _momentum_from_elsewhere(run: Training) -> None:
    other = torch.optim.Adam(run.model[3].parameters(), lr=0.01)
    for parameter in run.model[3].parameters():
        other.state[parameter] = {
            "step": torch.tensor(1.0),
            "exp_avg": torch.ones_like(parameter),
            "exp_avg_sq": torch.ones_like(parameter),
        }
    run.monitor.step()
    other.step()


def _strong_decay(run: Training) -> None:
    run.optimizer.param_groups[0].update(weight_decay=200.0)
    run.run(1)


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (_evaluation, "a gradient went through '4' in evaluation mode"),
        (_write_alive, "something else than an optimizer wrote"),
        (_twice, "exactly once"),
        (_other_optimizer, "not known that RMSprop leaves weights"),
        (_momentum_from_elsewhere, "an optimizer brings momentum"),
        (_strong_decay, "weight decay 200"),
    ],
)
def test_a_broken_premise_is_told_before_the_step(
    act: Callable[[Training], object], why: str
) -> None:
    """Between two checks, the moment it is seen."""
    run = _certified_run()
    act(run)
    _is_told_at_once(run, why)


def test_a_write_that_leaves_the_channels_dead_is_none() -> None:
    """Averaged weights that are swapped in and out, say."""
    run = _certified_run()
    kept = {name: value.clone() for name, value in run.model.state_dict().items()}
    run.run(3)
    run.model.load_state_dict(kept)
    run.run(EVERY)
    run.monitor.close()
    assert run.violated() == []


def test_a_write_past_the_version_counter_is_found_at_the_next_check() -> None:
    """``.data`` is invisible in between; the certificate says so."""
    run = _certified_run()
    run.model[3].weight.data[1].fill_(0.3)
    run.run(EVERY)
    (event,) = run.violated()
    assert event["violated"] == [1]
    assert event["step"] == 2 * EVERY
    assert "seen_at" not in event
    run.monitor.close()
    assert verify(Path("run")).ok


def test_another_use_of_the_output_is_found_at_the_next_check() -> None:
    """A second branch that is there only later: what follows the layer is looked at again."""

    class Branching(nn.Sequential):
        """Adds a branch off the BatchNorm from some time on."""

        branch = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self[:5]:
                x = layer(x)
            extra = x.mean() if self.branch else 0.0
            for layer in self[5:]:
                x = layer(x)
            return x + extra

    torch.manual_seed(0)
    model = Branching(
        nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16),
        nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 4),
    )  # fmt: skip
    run = Training(every=EVERY, model=model)
    run.run(EVERY + 2, lambda step: kill(model) if step == EVERY else None)
    assert run.certified() == [(EVERY, [0, 1, 2, 3], None)]
    model.branch = True
    run.run(EVERY)
    (event,) = run.violated()
    assert "is used 2 times" in event["reason"]
    run.monitor.close()
    assert verify(Path("run")).ok


def test_a_monitor_that_is_closed_inside_a_step_disturbs_nobody() -> None:
    """A function that is told may close the monitor while torch goes through its hooks."""
    run = _certified_run()
    run.told.clear()
    monitor = run.monitor

    class Closer(list[ci.Finding]):
        """Closes the monitor at the first finding."""

        def append(self, finding: ci.Finding) -> None:
            if finding.kind == "certificate_violated":
                monitor.close()

    monitor._pipeline.teller._callbacks = (Closer().append,)
    run.model[4].eval()
    run.step()
    run.step()
    assert diary("run")[-1]["certificates_violated"] == 1
