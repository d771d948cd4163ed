# mypy: disable-error-code="no-untyped-call"
"""A model that a framework trains is looked at without being watched: its hook knows it."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import nn

import cirron_otel as ci
from cirron_otel import recorder, semconv
from helpers import Rows
from weights.snapshots_by_hand import finished, taken

pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),  # Lightning advises
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def names(model: nn.Module) -> list[str]:
    """Every parameter, a tied one under each name."""
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


def last_norms(rows: Rows) -> dict[str, float]:
    """The norm of each weight in the last snapshot of them."""
    return {
        row.tensor_name: row.stats["norm"]
        for row in rows.snapshots
        if row.stats is not None and not row.tensor_name.endswith(".grad")
    }


def test_the_model_of_a_trainer() -> None:
    """Weights and gradients at each epoch of transformers, as they are; by hand in a callback."""
    pytest.importorskip("transformers")
    from transformers import TrainerCallback  # noqa: PLC0415 - where it is installed

    from frameworks.trainer_programs import make_trainer  # noqa: PLC0415

    class Looks(TrainerCallback):
        def on_train_begin(self, *_args: Any, **_kwargs: Any) -> None:
            ci.snapshot(name="before")

        def on_step_end(self, args: Any, state: Any, control: Any, **_kwargs: Any) -> None:  # noqa: ARG002
            if state.global_step == 1:
                ci.snapshot(name="first step")

    ci.profile()
    trainer = make_trainer(num_train_epochs=2, callbacks=[Looks()])
    assert trainer.model is not None
    trainer.train()
    ci.snapshot(name="after")
    rows = finished()
    weights = names(trainer.model)
    found = taken(rows)
    assert [(trigger, epoch) for trigger, epoch, _ in found] == [
        ("call", None), ("call", 0), ("last_step", 0), ("epoch_end", 0),
        ("last_step", 1), ("epoch_end", 1), ("call", None),
    ]  # fmt: skip
    assert found[0][2] == found[3][2] == found[5][2] == found[6][2] == weights
    gradients = [f"{name}.grad" for name, _ in trainer.model.named_parameters()]
    assert found[2][2] == found[4][2] == gradients
    parents = {span.id: span.name for span in rows.spans}
    above = [parents[span.parent_id or ""] for span in rows.named(semconv.SNAPSHOT)]
    assert above == ["cirron.session", *["step"] * 2, "epoch", "step", "epoch", "cirron.session"]
    exact = {n: p.detach().double().norm().item() for n, p in trainer.model.named_parameters()}
    norms = last_norms(rows)
    assert all(math.isclose(norms[name], norm, rel_tol=1e-9) for name, norm in exact.items())


def test_the_module_of_a_lightning_trainer() -> None:
    """The same of Lightning, whose optimizer step holds forward and backward in a closure."""
    pytest.importorskip("lightning")
    from frameworks.lightning_programs import loader, module, trainer  # noqa: PLC0415

    ci.profile()
    model = module()
    trainer(max_epochs=2).fit(model, loader())
    rows = finished()
    weights = ["layer.weight", "layer.bias"]
    gradients = [f"{name}.grad" for name in weights]
    assert taken(rows) == [
        ("last_step", 0, gradients), ("epoch_end", 0, weights),
        ("last_step", 1, gradients), ("epoch_end", 1, weights),
    ]  # fmt: skip
    norm = model.layer.weight.detach().double().norm().item()
    assert last_norms(rows)["layer.weight"] == pytest.approx(norm, rel=1e-9)


def test_the_model_of_a_keras_fit() -> None:
    """The same of Keras on torch, by the paths of its variables, without running means.

    A model that was watched keeps its name, and is there once.
    """
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    from frameworks.keras_programs import X, Y, compiled, keras, layers  # noqa: PLC0415

    ci.profile()
    start, *rest = layers()
    model = compiled(keras.Sequential([start, keras.layers.BatchNormalization(), *rest]))
    model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
    ci.watch(model, name="mine")
    for _ in ci.epochs(range(1)):
        model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
    ci.watch(None)
    for _ in ci.epochs(range(1)):
        model.fit(X, Y, batch_size=4, epochs=1, verbose=0)
    found = taken(finished())
    plain = [one.path for one in model.trainable_weights]
    assert "batch_normalization" in plain[0]
    assert [names for trigger, _, names in found if trigger == "epoch_end"] == [
        plain, [f"mine.{name}" for name in plain], plain
    ]  # fmt: skip
    assert found[0] == ("last_step", 0, [f"{name}.grad" for name in plain])


def fit(model: nn.Module, *, epochs: int = 1) -> None:
    """A training as a hook tells of it: each epoch with one step."""
    rec = recorder._current
    assert rec is not None
    from cirron_otel.driven import DrivenLoop  # noqa: PLC0415 - as the hooks do

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loop = DrivenLoop(rec, "keras")
    loop.begin_fit()
    loop.trains(model)
    for index in range(epochs):
        loop.begin_epoch(index, steps=1)
        loop.begin_step()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        loop.end_step()
        loop.end_epoch()
    loop.end_fit()


def test_what_is_watched_decides_of_what_it_shares() -> None:
    """A watched part of the model stands for it; a model beside it is looked at with it."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    teacher = nn.Linear(2, 1, bias=False)
    ci.profile()
    ci.watch(model[1])
    fit(model)
    ci.watch(None)
    ci.watch(teacher)
    fit(model)
    found = [names for trigger, _, names in taken(finished()) if trigger == "epoch_end"]
    assert found[0] == ["weight", "bias"]
    assert found[1] == ["Linear.weight", *(f"Sequential.{name}" for name in names(model))]


def test_a_model_is_looked_at_while_it_is_trained() -> None:
    """Not in the epochs of what is trained after it; by hand it still is, and it can be freed."""
    first, second = nn.Linear(2, 1), nn.Linear(2, 1)
    ci.profile()
    rec = recorder._current
    assert rec is not None
    assert rec.before_optimizer_step == []
    fit(first)
    fit(second, epochs=2)
    for _ in ci.epochs(range(1)):
        pass
    ci.snapshot()
    del first
    ci.snapshot()
    del second
    assert ci.snapshot() is None
    ci.watch(None)
    assert rec.before_optimizer_step == []
    found = taken(finished())
    weights = ["weight", "bias"]
    assert [names for trigger, _, names in found if trigger == "epoch_end"] == [weights] * 3
    both = [f"{kind}.{name}" for kind in ("Linear", "Linear_2") for name in weights]
    calls = [names for trigger, _, names in found if trigger == "call"]
    assert [[name for name in one if "grad" not in name] for one in calls] == [both, weights]
