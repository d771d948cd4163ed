# mypy: disable-error-code="no-untyped-call"
"""Keras's own loops on the torch backend: the canonical tree comes out once, with true values."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import cirron_otel as ci
from conftest import SRC
from frameworks.keras_programs import EPOCH, X, Y, compiled, finished_tree, layers, small_model
from frameworks.keras_programs import steps as fit_steps
from helpers import read_spool, tree_text

keras: Any = pytest.importorskip("keras")
np: Any = pytest.importorskip("numpy")

# Keras's own, on its torch backend with numpy 2.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")

TEST_STEPS = "".join(f"{{0}}  step[{n}]\n{{0}}    data_load\n{{0}}    forward\n" for n in range(3))


class Recorder(keras.callbacks.Callback):
    """A user's callback that looks at batches and epochs."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002 - by name
        """An epoch begins."""
        self.seen.append(f"epoch {epoch}")

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """A batch is over."""
        assert isinstance(logs["loss"], float)
        self.seen.append(f"batch {batch}")


def test_fit_gives_the_canonical_tree() -> None:
    """Epochs, steps, phases; validation as an evaluation of the epoch; a metric is a summary."""
    ci.profile()
    small_model().fit(X, Y, batch_size=4, epochs=2, validation_data=(X, Y), verbose=0)
    assert finished_tree(marks=True) == "cirron.session\n" + "".join(
        f"  epoch[{n}] {{loss, accuracy, val_accuracy, val_loss, learning_rate}}\n"
        + fit_steps(3)
        + f"    evaluation[{n}] {{accuracy, loss}}\n"
        + TEST_STEPS.format("    ")
        for n in range(2)
    )
    rows = read_spool()
    trained = [span for span in rows.named("step") if isinstance(span.iteration, int)]
    assert [span.iteration for span in trained] == list(range(6))
    kinds = {mark.name: mark.kind for mark in rows.marks_of(rows.named("epoch")[0])}
    assert kinds["loss"] == kinds["val_loss"] == "summary"


@pytest.mark.parametrize("form", ["keyword", "position", "list", "none", "nested"])
def test_callbacks_may_be_given_in_any_form(form: str) -> None:
    """By keyword, by position, as a CallbackList or not at all: one tree, nothing is added."""
    model, user = small_model(), Recorder()
    given = [user]
    ci.profile()
    if form == "keyword":
        model.fit(X, Y, batch_size=4, callbacks=given, verbose=0)
    elif form == "position":
        model.fit(X, Y, 4, 1, 0, given)
    elif form == "none":
        model.fit(X, Y, 4, 1, 0, None)
    else:
        whole = keras.callbacks.CallbackList(
            given, add_history=True, model=model, epochs=1, steps=3
        )
        model.fit(X, Y, 4, 1, 0, whole if form == "list" else [whole])
        assert user in whole.callbacks
    assert given == [user]
    expected = ["epoch 0", "batch 0", "batch 1", "batch 2"]
    assert user.seen == ([] if form == "none" else expected)
    assert finished_tree(marks=True) == "cirron.session\n" + EPOCH.format(0) + fit_steps(3)


def test_the_loss_of_a_step_is_its_own() -> None:
    """``loss`` is what the batch gave, ``log/loss`` the mean since the epoch began."""
    truth: list[float] = []

    class Model(keras.Sequential):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            if kwargs.get("training", True) and loss.device.type != "meta":
                truth.append(loss.item())
            return loss

    model = compiled(Model(layers()))
    model.build((None, 4))
    ci.profile()
    model.fit(X, Y, batch_size=4, verbose=0, shuffle=False)
    finished_tree()
    rows = read_spool()
    steps = [{m.name: m.value for m in rows.marks_of(step)} for step in rows.named("step")]
    assert [step["loss"] for step in steps] == truth[-3:]
    means = [sum(truth[-3:][: n + 1]) / (n + 1) for n in range(3)]
    assert [step["log/loss"] for step in steps] == pytest.approx(means)
    assert [step["learning_rate"] for step in steps] == pytest.approx([0.1] * 3)
    epoch = {m.name: m.value for m in rows.marks_of(rows.one("epoch"))}
    assert epoch["loss"] == pytest.approx(means[-1])


def test_logs_that_cannot_be_read_are_not_the_programs_trouble(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What fails while logs are kept is counted; the loop goes on, and its scopes end."""

    class Unnamed:
        def __str__(self) -> str:
            raise RuntimeError("it has no text")

    monkeypatch.delenv("CIRRON_OTEL_STRICT")
    ci.profile()
    told = keras.callbacks.CallbackList([], model=small_model(), add_history=False)
    told.on_train_begin()
    told.on_epoch_begin(0)
    told.on_train_batch_begin(0)
    told.on_train_batch_end(0, {Unnamed(): 1.0})
    told.on_epoch_end(0, {Unnamed(): 1.0})
    told.on_train_end()
    assert ci.health()["swallowed_errors"] == {"keras.callbacks": 2}
    assert ci.shutdown()
    assert tree_text(read_spool()) == "cirron.session\n  epoch[0]\n    step[0]"


def test_epochs_keep_their_number() -> None:
    """``initial_epoch`` and a second fit: the numbers are Keras's, iterations go on."""
    model = small_model()
    ci.profile()
    model.fit(X, Y, batch_size=4, initial_epoch=3, epochs=4, verbose=0)
    model.fit(X, Y, batch_size=4, verbose=0)
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("epoch")] == [3, 0]
    assert [span.iteration for span in rows.named("step")] == list(range(6))


def test_evaluate_and_predict_stand_alone() -> None:
    """Outside of a fit they are an evaluation and a prediction of the session."""
    model = small_model()
    ci.profile()
    model.evaluate(X, Y, batch_size=4, verbose=0)
    model.predict(X, batch_size=4, verbose=0)
    model.evaluate(X, Y, batch_size=4, verbose=0)
    test = TEST_STEPS.format("  ")
    assert finished_tree(marks=True) == (
        "cirron.session\n"
        "  evaluation[0] {accuracy, loss}\n" + test + "  prediction[0]\n" + test
        + "  evaluation[1] {accuracy, loss}\n" + test
    )  # fmt: skip


def test_a_batch_trained_by_hand_is_a_step() -> None:
    """``train_on_batch`` is a step of its own, in the epoch that is open, with its loss."""
    model = small_model()
    ci.profile()
    results = []
    for _ in ci.epochs(range(1)):
        results += [model.train_on_batch(X[n : n + 4], Y[n : n + 4]) for n in (0, 4)]
    results.append(model.train_on_batch(X[:4], Y[:4], return_dict=True))
    body = "forward", "backward", "optimizer_step"
    lines = ["cirron.session", "  epoch[0]"]
    for depth, index, marks in ((4, 0, "loss"), (4, 1, "loss"), (2, 0, "accuracy, loss")):
        named = marks.replace("accuracy", "log/accuracy")
        lines += [f"{' ' * depth}step[{index}] {{{named}}}"]
        lines += [f"{' ' * (depth + 2)}{name}" for name in body]
    assert finished_tree(marks=True) == "\n".join(lines) + "\n"
    rows = read_spool()
    losses = [mark.value for mark in rows.marks if mark.name == "loss"]
    assert losses == [float(results[0][0]), float(results[1][0]), results[2]["loss"]]


def test_a_batch_inside_a_step_is_that_step() -> None:
    """``train_on_batch`` inside ``ci.batches`` opens no second step."""
    model = small_model()
    ci.profile()
    for x, y in ci.batches([(X[:4], Y[:4]), (X[4:8], Y[4:8])]):
        model.train_on_batch(x, y)
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("step")] == [0, 1]
    assert len(rows.named("optimizer_step")) == 2


def test_a_train_step_of_ones_own() -> None:
    """A subclass with its own ``train_step`` is recorded as any other; its logs are kept."""

    class Model(keras.Sequential):
        def train_step(self, data: Any) -> dict[str, Any]:
            x, y = data
            self.zero_grad()
            loss = keras.ops.mean(keras.losses.sparse_categorical_crossentropy(
                y, self(x, training=True), from_logits=True))  # fmt: skip
            loss.backward()
            weights = self.trainable_weights
            with torch.no_grad():
                self.optimizer.apply([one.value.grad for one in weights], weights)
            return {"mine": loss}

    model = compiled(Model(layers()))
    ci.profile()
    model.fit(X, Y, batch_size=4, verbose=0)
    body = "      data_load\n      forward\n      backward\n      optimizer_step\n"
    assert finished_tree(marks=True) == (
        "cirron.session\n  epoch[0] {mine, learning_rate}\n"
        + "".join(f"    step[{n}] {{log/mine, learning_rate}}\n{body}" for n in range(3))
    )


def test_a_loop_of_ones_own() -> None:
    """A custom loop over a DataLoader is a torch loop with Keras's optimizer."""
    model = small_model()
    optimizer = keras.optimizers.Adam(0.01)
    data = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y))
    ci.profile()
    for _ in range(2):
        for x, y in torch.utils.data.DataLoader(data, batch_size=6):
            loss = torch.nn.functional.cross_entropy(model(x, training=True), y)
            model.zero_grad()
            loss.backward()
            weights = model.trainable_weights
            with torch.no_grad():
                optimizer.apply([one.value.grad for one in weights], weights)
    step = "    step[{}]\n      data_load\n      forward\n      backward\n      optimizer_step\n"
    assert finished_tree() == "cirron.session\n" + "".join(
        f"  epoch[{n}]\n" + step.format(0) + step.format(1) for n in range(2)
    )
    assert {span.attrs["optimizer"] for span in read_spool().named("optimizer_step")} == {"Adam"}


def test_building_a_model_records_nothing() -> None:
    """Layers that are called to find out shapes, in the Functional API and in fit, are silent."""
    ci.profile()
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(8)(inputs)
    model = compiled(keras.Model(inputs, keras.layers.Dense(3)(hidden)))
    assert read_spool().spans == []
    model.fit(X, Y, batch_size=4, verbose=0)
    assert finished_tree(marks=True) == "cirron.session\n" + EPOCH.format(0) + fit_steps(3)


@pytest.mark.parametrize("error", [ValueError("mine"), KeyboardInterrupt()], ids=repr)
def test_what_ends_a_fit_flies_through(error: BaseException) -> None:
    """An exception in a callback ends the scopes, inner first; the next fit works."""
    model = small_model()

    class Raises(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:  # noqa: ARG002
            if batch == 1:
                raise error

    ci.profile()
    with pytest.raises(type(error)) as caught:
        model.fit(X, Y, batch_size=4, verbose=0, callbacks=[Raises()])
    assert caught.value is error
    model.fit(X, Y, batch_size=4, verbose=0)
    finished_tree()
    rows = read_spool()
    failed = [(s.name, s.index) for s in rows.spans if "error" in s.attrs]
    assert failed == [("step", 1), ("epoch", 0)]
    assert [(s.name, s.index) for s in rows.named("epoch")] == [("epoch", 0)] * 2
    assert len(rows.named("step")) == 5


def test_a_fit_inside_a_fit() -> None:
    """A callback that trains another model: its work lies in the epoch of the outer one."""
    outer, inner = small_model(), small_model()

    class Trains(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:  # noqa: ARG002
            inner.fit(X, Y, batch_size=12, verbose=0)
            inner.evaluate(X, Y, batch_size=12, verbose=0)

    ci.profile()
    outer.fit(X, Y, batch_size=4, epochs=2, verbose=0, callbacks=[Trains()])
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("epoch")] == [0, 1]
    own = [
        s for s in rows.named("step") if s.iteration is not None and isinstance(s.iteration, int)
    ]
    assert [span.index for span in own] == [0, 1, 2, 0, 1, 2]
    assert [span.index for span in rows.named("evaluation")] == [0, 1]


def test_epochs_of_the_program_own_the_fits_inside() -> None:
    """``ci.epochs`` around ``fit``: one epoch each, with the steps of Keras."""
    model = small_model()
    ci.profile()
    for _ in ci.epochs(range(2)):
        model.fit(X, Y, batch_size=4, verbose=0)
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("epoch")] == [0, 1]
    assert [span.iteration for span in rows.named("step")] == list(range(6))
    assert {s.parent_id for s in rows.named("step")} == {s.id for s in rows.named("epoch")}


@pytest.mark.filterwarnings("ignore:Your input ran out of data:UserWarning")  # Keras's own
def test_data_of_unknown_length_gives_no_empty_step() -> None:
    """A generator: the fetch that finds its end is no step (116)."""

    def batches() -> Iterator[Any]:
        for start in (0, 4, 8):
            yield X[start : start + 4], Y[start : start + 4]

    ci.profile()
    small_model().fit(batches(), verbose=0, shuffle=False)
    tree = finished_tree(marks=True)
    assert tree == "cirron.session\n" + EPOCH.format(0) + fit_steps(3)


def test_checkpoints_are_scopes(tmp_path: Any) -> None:
    """What a callback saves while the model trains is a ``checkpoint`` with its path."""
    path = tmp_path / "model.keras"
    ci.profile()
    small_model().fit(
        X, Y, batch_size=4, verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(path)]
    )
    finished_tree()
    rows = read_spool()
    saved = rows.one("checkpoint")
    assert saved.attrs["path"] == str(path)
    assert saved.parent_id == rows.one("epoch").id
    assert path.exists()


def test_named_frameworks_limit() -> None:
    """Without the torch hook there are epochs, steps and values, and no phases."""
    ci.profile(frameworks=["keras"])
    small_model().fit(X, Y, batch_size=4, verbose=0)
    tree = finished_tree(marks=True)
    steps = "".join(
        f"    step[{n}] {{loss, log/loss, log/accuracy, learning_rate}}\n" for n in range(3)
    )
    assert tree == "cirron.session\n" + EPOCH.format(0) + steps


def _trained(profile: Callable[[], object] | None) -> tuple[Any, ...]:
    model = small_model()
    random.seed(5)
    if profile is not None:
        profile()
    history = model.fit(X, Y, batch_size=4, epochs=3, validation_split=0.25, verbose=0)
    model.evaluate(X, Y, verbose=0)
    ci.shutdown()
    return (
        history.history,
        [w.tobytes() for w in model.get_weights()],
        random.getstate(),
        np.random.get_state()[1].tobytes(),
        torch.get_rng_state().numpy().tobytes(),
    )


def test_training_is_exactly_what_it_was() -> None:
    """Same history, weights and global random streams with the hooks and without."""
    assert _trained(None) == _trained(ci.profile)


def test_uninstalling_restores_every_attribute() -> None:
    """After ``shutdown`` each class has the very objects it had before."""
    kinds = {
        *keras.Model.__mro__,
        *keras.callbacks.CallbackList.__mro__,
        *keras.optimizers.Optimizer.__mro__,
    } - {object}
    before = {kind: dict(vars(kind)) for kind in kinds}
    small_model().fit(X, Y, verbose=0)
    ci.profile()
    assert any(vars(kind).get("fit") is not before[kind].get("fit") for kind in kinds)
    small_model().fit(X, Y, verbose=0)
    ci.shutdown()
    for kind in kinds:
        now = vars(kind)
        changed = [n for n in {*now, *before[kind]} if now.get(n) is not before[kind].get(n)]
        assert [n for n in changed if not n.startswith("_abc")] == []


@pytest.mark.parametrize("backend", ["jax", "tensorflow"])
def test_compiled_backends(backend: str, run_program: Any) -> None:
    """Where a step is one compiled call, epochs, steps and evaluations come as on torch."""
    if importlib.util.find_spec(backend) is None:
        pytest.skip(f"{backend} is not installed")
    run = run_program(
        """
        import keras, numpy as np
        import cirron_otel as ci

        ci.profile()
        x = np.arange(48, dtype="float32").reshape(12, 4) / 48
        y = np.arange(12) % 3
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
        model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        model.fit(x, y, batch_size=4, epochs=2, verbose=0, validation_data=(x, y))

        def batches():
            for start in (0, 4, 8):
                yield x[start : start + 4], y[start : start + 4]

        model.fit(batches(), verbose=0, shuffle=False)
        model.steps_per_execution = 3
        model.make_train_function(force=True)
        model.fit(x, y, batch_size=2, verbose=0)
        health = ci.health()
        assert not health["losses"] and not health["swallowed_errors"], health
        """,
        env={"KERAS_BACKEND": backend, "TF_CPP_MIN_LOG_LEVEL": "3"},
        timeout=200,
    )
    steps = [span for span in run.named("step") if isinstance(span.iteration, int)]
    assert [span.index for span in run.named("epoch")] == [0, 1, 0, 0]
    # In the last fit a step is one call of the train function, for three batches.
    assert [span.index for span in steps] == [0, 1, 2] * 3 + [0, 1]
    assert [span.index for span in run.named("evaluation")] == [0, 1]
    names = {mark.name for mark in run.marks}
    assert {"loss", "val_loss", "log/loss"} <= names


@pytest.mark.slow
def test_the_example(run_program: Any) -> None:
    """``examples/keras_fit.py`` runs and shows its last epoch."""
    example = SRC.parent / "examples" / "keras_fit.py"
    rows = run_program(example.read_text(), timeout=200)
    assert "epoch[1]" in rows.stdout
    assert [len(rows.children(one)) for one in rows.named("epoch")] == [9, 9]  # 8 and a test
