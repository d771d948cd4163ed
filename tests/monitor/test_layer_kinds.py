"""Layers that are not plain Conv and Linear: subclasses, transposed ones, parametrized ones."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from cirron_otel.monitor.kinds import channels, channels_first
from monitor.lesions import Training, forget
from monitor.trainings import events, rows

CHANNELS = [1, 6]


class Named(nn.Conv2d):
    """Another name for the same."""


class Bounded(nn.Conv2d):
    """Computes with something else than its weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With weights between -1 and 1."""
        return nn.functional.conv2d(x, torch.tanh(self.weight), self.bias)


class SoftReLU(nn.ReLU):
    """Never closes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Softplus."""
        return nn.functional.softplus(x)


def _net(conv: nn.Module, relu: nn.Module | None = None) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), conv, nn.BatchNorm2d(8),
        relu or nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(32, 4),
    )  # fmt: skip


def _shut(model: nn.Sequential) -> None:
    """The filters of some channels become zeros, and their shift negative."""
    conv, norm = model[3], model[4]
    with torch.no_grad():
        if hasattr(conv, "parametrizations"):
            conv.parametrizations["weight"].original0[CHANNELS] = 0.0
        else:
            channels_first(conv, conv.weight)[CHANNELS] = 0.0
        conv.bias[CHANNELS], norm.bias[CHANNELS] = 0.0, -0.1
        for parameter in (*conv.parameters(), *norm.parameters()):
            rows_of = (
                channels_first(conv, parameter.grad) if parameter.dim() > 1 else parameter.grad
            )
            rows_of[CHANNELS] = 0.0


def _reason(layer: str = "3") -> str | None:
    (manifest,) = events("run", "manifest")
    found = next(one for one in manifest["producers"] if one["layer"] == layer)
    reason: str | None = found["reason"]
    return reason


@pytest.mark.parametrize(
    ("conv", "why"),
    [
        (lambda: Named(4, 8, 3), None),
        (lambda: nn.ConvTranspose2d(4, 8, 3), None),
        (lambda: parametrizations.weight_norm(nn.Conv2d(4, 8, 3)), "computed from others"),
    ],
)
def test_channels_of_other_layers_are_looked_at(
    conv: Callable[[], nn.Module], why: str | None
) -> None:
    """Filters of zeros are stuck, and proven dead where torch's own forward uses plain weights."""
    run = Training(model=_net(conv()))
    run.run(6, lambda step: _shut(run.model) if step == 2 else None)
    run.monitor.close()
    if why is None:
        assert run.certified() == [(2, CHANNELS, None)]
        assert run.violated() == []
        assert rows("run")[-1]["stuck"]["3"] == [2, 0, 0, 0]
    else:
        assert run.certified() == []
        assert why in (_reason() or "")
        assert rows("run")[2]["stuck"]["3"] == [0, 2, 0, 0]


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("relu", [nn.ReLU, nn.Identity])
def test_a_sparse_weight_hides_no_other_layer(relu: type[nn.Module]) -> None:
    """It is frozen, as torch's optimizers move none; its bias learns: the check has all rows."""
    model = nn.Sequential(nn.Flatten(), nn.Linear(100, 8), relu(), nn.Linear(8, 4))
    sparse = model[1].weight.detach().to_sparse_csr()
    model[1].weight = nn.Parameter(sparse, requires_grad=False)
    run = Training(model=model)
    run.run(3)
    run.monitor.close()
    assert run.monitor._journal.guard.swallowed == {}
    assert [set(row["grad"]) for row in rows("run")] == [{"1", "3"}] * 3


@pytest.mark.parametrize("groups", [1, 2])
def test_the_filters_of_a_transposed_layer(groups: int) -> None:
    """Row i is what channel i is computed with: its gradient is there, and nowhere else."""
    conv = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False)
    assert channels(conv) == 6
    for channel in range(6):
        conv.zero_grad()
        conv(torch.ones(1, 4, 5, 5))[0, channel].sum().backward()
        assert conv.weight.grad is not None
        touched = channels_first(conv, conv.weight.grad).flatten(1).any(1)
        assert touched.nonzero().flatten().tolist() == [channel]


def test_a_transposed_layer_is_repaired() -> None:
    """Its filters are drawn anew by channel, and the momentum of those channels goes."""
    run = Training("adamw", model=_net(nn.ConvTranspose2d(4, 8, 3)), repair=True, patience=2)

    def lesion(step: int) -> None:
        if step == 2:
            _shut(run.model)
            forget(run.optimizer, run.model)

    run.run(4, lesion)
    (event,) = events("run", "repair")
    assert event["channels"] == CHANNELS
    assert event["optimizer_slices_reset"] == 8
    sizes = run.model[3].weight.detach().abs().amax((0, 2, 3))
    assert bool((sizes > 0.01).all())
    assert run.monitor.undo_repair("3") == 1
    assert not run.model[3].weight.detach()[:, CHANNELS].any()
    run.monitor.close()


@pytest.mark.parametrize(
    ("spoil", "why"),
    [
        (lambda m: m.__setitem__(3, Bounded(4, 8, 3)), "a forward of its own"),
        (lambda m: m.__setitem__(5, SoftReLU()), "no ReLU"),
        (lambda m: setattr(m[3], "forward", m[3].forward), "a forward of its own"),
        (lambda m: m[3].register_forward_hook(lambda *given: given[2] + 1), "forward hook"),
        (lambda m: m[4].register_forward_hook(lambda *given: given[2] * 2), "by '4' alone"),
    ],
)
def test_what_computes_something_else_is_never_certified(
    spoil: Callable[[nn.Sequential], object], why: str
) -> None:
    """A forward that is another one, a ReLU that is none, an output that a hook replaces."""
    model = _net(nn.Conv2d(4, 8, 3))
    spoil(model)
    run = Training(model=model)
    run.run(1)
    run.monitor.close()
    assert why in (_reason() or "")


def test_a_hook_that_only_looks_costs_no_certificate() -> None:
    """The graph says that the output is the layer's own."""
    model = _net(nn.Conv2d(4, 8, 3))
    model[3].register_forward_hook(lambda *_: None)
    run = Training(model=model)
    run.run(1)
    run.monitor.close()
    assert _reason() is None


def test_a_relu_that_is_replaced_later_refuses_the_certificate() -> None:
    """What follows is looked at again when a channel is to be certified."""
    run = Training(model=_net(nn.Conv2d(4, 8, 3)))
    run.run(2)
    run.model[5] = nn.GELU()
    run.run(3, lambda step: _shut(run.model) if step == 3 else None)
    run.monitor.close()
    assert run.certified() == []
    assert "something else than a ReLU now" in run.refused()[0]


def test_parameters_that_are_swapped_end_a_certificate() -> None:
    """The optimizer may hold others now: told before its next step."""
    run = Training(model=_net(nn.Conv2d(4, 8, 3)), every=10)
    run.run(12, lambda step: _shut(run.model) if step == 10 else None)
    assert run.certified() == [(10, CHANNELS, None)]
    run.model[3].weight = nn.Parameter(run.model[3].weight.detach().clone())
    run.run(1)
    (event,) = run.violated()
    assert (event["reason"], event["seen_at"]) == ("its parameters were replaced", 12)
    run.monitor.close()


@pytest.mark.parametrize("part", [5, 8])
def test_a_layer_that_has_decayed_as_a_whole_is_told(part: int) -> None:
    """More than half of its filters, or all, are small beside what they were (R-W37)."""
    run = Training(model=_net(nn.Conv2d(4, 8, 3)))

    def fade(step: int) -> None:
        if step == 3:
            with torch.no_grad():
                run.model[3].weight[:part] *= 1e-8
                for parameter in (*run.model[3].parameters(), *run.model[4].parameters()):
                    parameter.grad.zero_()

    run.run(5, fade)
    run.monitor.close()
    found = [(one.layer, one.step, one.attributes["count"]) for one in run.told
             if one.kind == "decayed_layer"]  # fmt: skip
    assert found == [("3", 3, part)]
    assert rows("run")[-1]["stuck"].get("3") == [0, 0, 0, 0]
