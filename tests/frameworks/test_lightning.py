# mypy: disable-error-code="no-untyped-call"
"""Lightning's Trainer: the canonical tree comes out once, and Lightning is what it was."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import cirron_otel as ci
from cirron_otel import recorder
from conftest import SRC
from frameworks.lightning_programs import (
    BODY,
    finished_tree,
    loader,
    module,
    stage_steps,
    steps,
    trainer,
)
from helpers import read_spool

pytest.importorskip("lightning")
pytest.importorskip("pytorch_lightning")

# Lightning advises; what it advises on is not tested here.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),  # Lightning's use of torch
]

PACKAGES = ["lightning.pytorch", "pytorch_lightning"]


@pytest.mark.parametrize("package", PACKAGES)
def test_fit_gives_the_canonical_tree(package: str) -> None:
    """The sanity check outside of the epochs, steps, phases, validation in the epoch (110)."""
    ci.profile()
    trainer(package, max_epochs=2).fit(module(package), loader(), loader(3))
    assert finished_tree(marks=True) == (
        "cirron.session\n  sanity_check[0]\n"
        + stage_steps(4, 2, "")
        + "".join(
            f"  epoch[{n}]\n{steps(3)}    evaluation[{n}] {{val_loss}}\n"
            + stage_steps(6, 3, " {log/val_loss}")
            for n in range(2)
        )
    )
    rows = read_spool()
    trained = [span.iteration for span in rows.named("step") if isinstance(span.iteration, int)]
    assert trained == list(range(6))
    assert {span.attrs["framework"] for span in rows.named("epoch")} == {"lightning"}


@pytest.mark.parametrize("package", PACKAGES)
def test_validate_test_and_predict(package: str) -> None:
    """Each is a scope of the session with its own steps from 0, and its metrics (109)."""
    ci.profile()
    one, model = trainer(package), module(package)
    one.validate(model, loader(2), verbose=False)
    one.test(model, loader(2), verbose=False)
    predictions = one.predict(model, loader(2))
    assert len(predictions) == 2
    assert finished_tree(marks=True, attrs=["stage"]) == (
        'cirron.session\n  evaluation[0] stage="validate" {val_loss}\n'
        + stage_steps(4, 2, " {log/val_loss}")
        + '  evaluation[1] stage="test" {test_loss}\n'
        + stage_steps(4, 2, " {log/test_loss}")
        + "  prediction[0]\n"
        + stage_steps(4, 2, "")
    )


def test_values_are_those_of_the_program() -> None:
    """``loss`` is what ``training_step`` returned; an epoch's mean is a summary."""

    def training_step(self: Any, batch: Any, _index: int) -> Any:
        loss = self.loss(batch)
        self.returned.append(loss.item())
        self.log("mine", loss * 2, on_step=False, on_epoch=True)
        return {"loss": loss, "more": 1}

    model = module(training_step=training_step)
    ci.profile()
    trainer().fit(model, loader())
    finished_tree()
    rows = read_spool()
    found = [{m.name: m.value for m in rows.marks_of(step)} for step in rows.named("step")]
    assert [one["loss"] for one in found] == model.returned
    assert [one["log/mine"] for one in found] == [2 * value for value in model.returned]
    assert [one["learning_rate"] for one in found] == [0.1] * 3
    (summary,) = [m for m in rows.marks_of(rows.one("epoch")) if m.name == "mine"]
    assert summary.kind == "summary"
    assert summary.value == pytest.approx(2 * sum(model.returned) / 3)


def test_accumulation_is_one_step_for_each_update() -> None:
    """``accumulate_grad_batches``: micro batches and their losses, a step and their mean (102)."""
    model = module()
    one = trainer(accumulate_grad_batches=2)
    ci.profile()
    one.fit(model, loader(3))
    part = "      micro_batch[{}] {{log/train_loss, loss}}\n"
    short = "        data_load\n        forward\n        backward\n"
    step = "    step[{}] {{loss, learning_rate}}\n"
    whole = short + "        optimizer_step\n"
    assert finished_tree(marks=True) == (
        "cirron.session\n  epoch[0]\n" + step.format(0) + part.format(0) + short + part.format(1)
        + whole + step.format(1) + part.format(0) + whole
    )  # fmt: skip
    rows = read_spool()
    first, second = rows.named("step")
    losses = [m.value for s in (first, second) for m in rows.marks_of(s) if m.name == "loss"]
    assert losses == [pytest.approx(sum(model.returned[:2]) / 2), model.returned[2]]
    parts = [m.value for s in rows.named("micro_batch") for m in rows.marks_of(s)
             if m.name == "loss"]  # fmt: skip
    assert parts == model.returned
    assert [first.iteration, second.iteration] == [0, 1]
    assert one.global_step == 2


def test_manual_optimization_with_two_optimizers() -> None:
    """One step for each batch, however many optimizers step in it; each has its rate."""

    def training_step(self: Any, batch: Any, _index: int) -> Any:
        for optimizer in self.optimizers():
            loss = self.loss(batch)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self: Any) -> Any:
        return [torch.optim.SGD([self.layer.weight], 0.1), torch.optim.Adam([self.layer.bias], 0.2)]

    model = module(training_step=training_step, configure_optimizers=configure_optimizers)
    model.automatic_optimization = False
    ci.profile()
    trainer().fit(model, loader(2))
    phases = "      forward\n      backward\n      optimizer_step\n"
    assert finished_tree(marks=True) == "cirron.session\n  epoch[0]\n" + "".join(
        f"    step[{n}] {{learning_rate, learning_rate/1}}\n      data_load\n{phases}{phases}"
        for n in range(2)
    )
    rows = read_spool()
    assert [span.iteration for span in rows.named("step")] == [0, 1]
    optimizers = [span.attrs["optimizer"] for span in rows.named("optimizer_step")]
    assert optimizers == ["SGD", "Adam"] * 2


def test_an_optimizer_that_evaluates_many_times() -> None:
    """LBFGS: the first evaluation is forward and backward of the step, the others are its own."""

    def configure_optimizers(self: Any) -> Any:
        return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=2)

    model = module(configure_optimizers=configure_optimizers)
    ci.profile()
    trainer().fit(model, loader(1))
    tree = finished_tree()
    assert tree.startswith(
        "cirron.session\n  epoch[0]\n    step[0]\n" + BODY.format(" " * 6)
        + "        forward\n        backward\n"
    )  # fmt: skip
    rows = read_spool()
    (loss,) = [m.value for m in rows.marks_of(rows.one("step")) if m.name == "loss"]
    assert loss == model.returned[0]


def test_checkpoints_are_scopes_and_hold_nothing_of_ours(tmp_path: Path) -> None:
    """A checkpoint is a scope with its path; callbacks in it and in the Trainer are Lightning's."""
    plain = trainer(enable_checkpointing=True, default_root_dir=tmp_path / "plain")
    plain.fit(module(), loader())
    ci.profile()
    one = trainer(enable_checkpointing=True, default_root_dir=tmp_path / "hooked")
    one.fit(module(), loader())
    finished_tree()
    path = one.checkpoint_callback.best_model_path
    scope = read_spool().one("checkpoint")
    assert scope.attrs["path"] == path
    assert [type(callback) for callback in one.callbacks] == [type(c) for c in plain.callbacks]
    ours = torch.load(path, weights_only=False)
    theirs = torch.load(plain.checkpoint_callback.best_model_path, weights_only=False)
    assert ours.keys() == theirs.keys()
    assert ours["callbacks"].keys() == theirs["callbacks"].keys()
    assert "cirron" not in repr(ours)


def test_a_resumed_fit_keeps_its_numbers(tmp_path: Path) -> None:
    """Epoch and iteration go on where the checkpoint was taken."""
    before = trainer(max_epochs=2, enable_checkpointing=True, default_root_dir=tmp_path)
    before.fit(module(), loader())
    ci.profile()
    path = before.checkpoint_callback.best_model_path
    trainer(max_epochs=3).fit(module(), loader(), ckpt_path=path, weights_only=False)
    tree = finished_tree(marks=True)
    # What it resumes from is loaded before its first epoch.
    assert tree == "cirron.session\n  checkpoint\n  epoch[2]\n" + steps(3)
    assert [span.iteration for span in read_spool().named("step")] == [6, 7, 8]


@pytest.mark.parametrize("place", ["training_step", "validation_step", "on_train_epoch_end"])
def test_what_ends_a_fit_flies_through(place: str) -> None:
    """An exception ends the scopes, inner first, with the error; the next fit works."""
    error = ValueError("mine")

    def raises(_self: Any, *_args: Any) -> Any:
        raise error

    ci.profile()
    with pytest.raises(ValueError, match="mine") as caught:
        trainer(num_sanity_val_steps=0).fit(module(**{place: raises}), loader(), loader())
    assert caught.value is error
    trainer().fit(module(), loader(1))
    finished_tree()
    rows = read_spool()
    failed = [span.name for span in rows.spans if "error" in span.attrs]
    inside = {
        "training_step": ["step"], "validation_step": ["step", "evaluation"],
        "on_train_epoch_end": [],
    }  # fmt: skip
    assert failed == [*inside[place], "epoch"]
    assert len(rows.named("epoch")) == 2


def test_an_interrupt_is_lightnings_to_handle() -> None:
    """Ctrl-C ends the scopes; Lightning shuts down gracefully and exits as it always does."""

    def training_step(_self: Any, _batch: Any, _index: int) -> Any:
        raise KeyboardInterrupt

    import signal  # noqa: PLC0415 - Lightning ignores the signal from then on

    handler = signal.getsignal(signal.SIGINT)
    ci.profile()
    try:
        with pytest.raises(SystemExit):
            trainer().fit(module(training_step=training_step), loader())
    finally:
        signal.signal(signal.SIGINT, handler)
    finished_tree()
    failed = [(s.name, s.attrs["error"]) for s in read_spool().spans if "error" in s.attrs]
    assert failed == [("step", "KeyboardInterrupt"), ("epoch", "KeyboardInterrupt")]


def test_an_epoch_that_is_broken_off() -> None:
    """``on_train_batch_start`` that returns -1 ends the epoch: no error, the next one comes."""

    def on_train_batch_start(_self: Any, _batch: Any, index: int) -> int | None:
        return -1 if index == 1 else None

    ci.profile()
    trainer(max_epochs=2).fit(module(on_train_batch_start=on_train_batch_start), loader())
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("epoch")] == [0, 1]
    assert [len(rows.children(span)) for span in rows.named("epoch")] == [2, 2]
    assert not [span for span in rows.spans if "error" in span.attrs]


class Stream(torch.utils.data.IterableDataset[Any]):
    """Items without a length."""

    def __iter__(self) -> Iterator[Any]:
        yield from loader(3).dataset  # type: ignore[misc]


def test_data_of_unknown_length_gives_no_empty_step() -> None:
    """Lightning reads one batch ahead: a fetch is in the step in which it ran (116)."""
    ci.profile()
    stream: Any = torch.utils.data.DataLoader(Stream(), batch_size=4)
    trainer(max_epochs=2, num_sanity_val_steps=0).fit(module(), stream, stream)
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("epoch")] == [0, 1]
    trained = [span for span in rows.named("step") if isinstance(span.iteration, int)]
    assert len(trained) == 6
    assert len(rows.named("optimizer_step")) == 6
    for place in rows.named("evaluation"):
        assert [c.name for c in rows.children(place) if c.name == "step"] == ["step"] * 3


def test_a_step_that_reads_the_loader_itself() -> None:
    """``training_step(dataloader_iter)``: its fetch opens its step, the end of the data none."""

    def training_step(self: Any, dataloader_iter: Any) -> Any:
        batch, _, _ = next(dataloader_iter)
        return self.loss(batch)

    ci.profile()
    trainer().fit(module(training_step=training_step), loader())
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("step")] == [0, 1, 2]
    assert len(rows.named("data_load")) == 3


class Batches:
    """Batches from something that is no DataLoader of torch."""

    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[Any]:
        yield from list(loader())


@pytest.mark.parametrize("several", [False, True])
def test_data_of_any_kind(several: bool) -> None:  # noqa: FBT001 - two of a kind
    """Any iterable, or several loaders at once: the same steps, one ``data_load`` each."""

    def training_step(self: Any, batch: Any, _index: int) -> Any:
        return self.loss(batch["a"] if several else batch)

    data: Any = {"a": loader(), "b": Batches()} if several else Batches()
    ci.profile()
    trainer().fit(module(training_step=training_step), data)
    assert finished_tree() == "cirron.session\n  epoch[0]\n" + "".join(
        f"    step[{n}]\n" + BODY.format(" " * 6) for n in range(3)
    )


def test_validation_inside_an_epoch() -> None:
    """``val_check_interval``: the evaluation lies in the epoch, between two steps."""
    ci.profile()
    trainer(val_check_interval=2, num_sanity_val_steps=0).fit(module(), loader(4), loader(1))
    finished_tree()
    rows = read_spool()
    names = [span.name for span in rows.children(rows.one("epoch"))]
    assert names == ["step", "step", "evaluation", "step", "step", "evaluation"]


def test_a_step_that_returns_nothing() -> None:
    """``training_step`` that returns None is a step without a loss."""

    def training_step(self: Any, batch: Any, _index: int) -> Any:
        self.loss(batch)

    ci.profile()
    trainer().fit(module(training_step=training_step), loader(2))
    tree = finished_tree(marks=True)
    assert tree.count("step[") == 2
    assert "loss" not in tree


def test_epochs_of_the_program_own_the_fit_inside() -> None:
    """``ci.epochs`` around ``fit``: one epoch each, with the steps of Lightning."""
    model = module()
    ci.profile()
    for _ in ci.epochs(range(2)):
        trainer().fit(model, loader(2))
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("epoch")] == [0, 1]
    assert [span.iteration for span in rows.named("step")] == [0, 1, 2, 3]


def test_gradients_are_there_when_an_optimizer_is_about_to_step() -> None:
    """Who waits for that moment sees the gradients of this step, though Lightning zeroes inside."""
    model = module()
    seen: list[bool] = []
    ci.profile()
    rec = recorder._current
    assert rec is not None
    rec.before_optimizer_step.append(
        lambda _optimizer: seen.append(model.layer.weight.grad is not None)
    )
    trainer().fit(model, loader(2))
    finished_tree()
    assert seen == [True, True]


def _trained(profile: Callable[[], object] | None) -> tuple[Any, ...]:
    random.seed(5)
    torch.manual_seed(5)
    if profile is not None:
        profile()
    model = module()
    one = trainer(max_epochs=3)
    one.fit(model, loader(shuffle=True), loader())
    ci.shutdown()
    return (
        model.returned,
        {name: float(value) for name, value in one.callback_metrics.items()},
        model.layer.weight.detach().numpy().tobytes(),
        random.getstate(),
        torch.get_rng_state().numpy().tobytes(),
        one.global_step,
    )


def test_training_is_exactly_what_it_was() -> None:
    """Same losses, metrics, weights and random streams with the hooks and without."""
    assert _trained(None) == _trained(ci.profile)


@pytest.mark.parametrize("package", PACKAGES)
def test_uninstalling_restores_every_attribute(package: str) -> None:
    """After ``shutdown`` each class has the very objects it had before."""
    import sys  # noqa: PLC0415

    one = trainer(package)
    kinds = {
        value
        for name, part in list(sys.modules.items())
        if name.startswith(f"{package}.")
        for value in vars(part).values()
        if isinstance(value, type) and value.__module__.startswith(package)
    }
    before = {kind: dict(vars(kind)) for kind in kinds}
    ci.profile()
    assert vars(type(one))["save_checkpoint"] is not before[type(one)]["save_checkpoint"]
    one.fit(module(package), loader(1))
    ci.shutdown()
    changed = [
        (kind, name)
        for kind in kinds
        for name in {*vars(kind), *before[kind]}
        if vars(kind).get(name) is not before[kind].get(name) and not name.startswith("_abc")
    ]
    assert changed == []


@pytest.mark.slow
def test_the_example(run_program: Any) -> None:
    """``examples/lightning_fit.py`` runs and shows its last epoch."""
    example = SRC.parent / "examples" / "lightning_fit.py"
    rows = run_program(example.read_text(), timeout=200)
    assert "epoch[1]" in rows.stdout
    assert len(rows.named("micro_batch")) == 2 * len(rows.named("optimizer_step")) == 16
    assert len(rows.named("checkpoint")) == 2
