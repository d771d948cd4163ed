# mypy: disable-error-code="no-untyped-call"
"""When snapshots are taken, of what, and what they leave of the training: nothing changed."""

from __future__ import annotations

import copy
import gc
import importlib.util
import pickle
import weakref
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci
from cirron_otel import recorder, semconv
from cirron_otel.batch import SnapshotRecord, SpanRecord
from cirron_otel.watching import watched
from cirron_otel.weights import policy
from frameworks.torch_programs import FORMS, Program, Wrap
from helpers import Rows, RunProgram, read_spool


@pytest.fixture(autouse=True)
def _nothing_watched() -> Iterable[None]:
    """Each test begins and ends without a watched model."""
    ci.watch(None)
    yield
    ci.watch(None)


def finished() -> Rows:
    """Shut down, check that nothing was lost or swallowed, and read the spool."""
    health = ci.health()
    assert (health["losses"], health["swallowed_errors"]) == ({}, {})
    assert ci.shutdown()
    return read_spool()


def of_span(rows: Rows, span: SpanRecord) -> list[SnapshotRecord]:
    """The rows of one snapshot."""
    return [row for row in rows.snapshots if row.span_id == span.id]


def taken(rows: Rows) -> list[tuple[str, int | None, list[str]]]:
    """Each snapshot: what made it, its epoch, and its tensors."""
    return [
        (
            span.attrs[semconv.SNAPSHOT_TRIGGER],
            span.attrs.get(semconv.EPOCH_INDEX),
            [row.tensor_name for row in of_span(rows, span)],
        )
        for span in rows.named(semconv.SNAPSHOT)
    ]


WEIGHTS = ["0.weight", "0.bias", "2.weight", "2.bias"]
GRADIENTS = [f"{name}.grad" for name in WEIGHTS]


@pytest.fixture(params=FORMS, ids=lambda name: name.replace(" ", "-"))
def form(request: pytest.FixtureRequest) -> tuple[Wrap, Wrap]:
    """Each way to write the two loops."""
    return FORMS[request.param]


def test_each_epoch_has_a_snapshot_of_its_weights(form: tuple[Wrap, Wrap]) -> None:
    """Weights as they are at the epoch's end, gradients before its last step, whatever the loop."""
    epochs, batches = form
    program = Program()
    ci.profile()
    ci.watch(program.model)
    norms = []
    for _ in epochs(range(2)):
        for batch in batches(program.loader):
            program.loss(batch).backward()
            program.optimizer.step()
            program.optimizer.zero_grad()
        program.validate(batches)
        norms.append(program.model[0].weight.detach().double().norm().item())
    rows = finished()
    assert taken(rows) == [
        ("last_step", 0, GRADIENTS),
        ("epoch_end", 0, WEIGHTS),
        ("last_step", 1, GRADIENTS),
        ("epoch_end", 1, WEIGHTS),
    ]
    parents = {span.id: span.name for span in rows.spans}
    above = [parents[span.parent_id or ""] for span in rows.named(semconv.SNAPSHOT)]
    assert above == ["step", "epoch", "step", "epoch"]
    seen = [row.stats["norm"] for row in rows.snapshots
            if row.tensor_name == "0.weight" and row.stats is not None]  # fmt: skip
    assert seen == pytest.approx(norms, rel=1e-12)
    assert [span.iteration for span in rows.named(semconv.SNAPSHOT)] == [2, 2, 5, 5]
    for row in rows.snapshots:
        assert row.mode == "stats"
        assert row.blob_uri is None
        assert row.dtype == "float32"
        assert row.stats is not None
        assert sum(row.stats["histogram"]["counts"]) == torch.Size(row.shape).numel()


def test_gradients_at_the_boundary_where_the_last_step_is_not_known() -> None:
    """Without a length the gradients that are there at the epoch's end are looked at."""
    program = Program()
    ci.profile()
    ci.watch(program.model)
    for _ in ci.epochs(range(1)):
        for batch in ci.batches(batch for batch in program.loader):
            program.train_step(batch)
    assert taken(finished()) == [("epoch_end", 0, WEIGHTS + GRADIENTS)]


def test_epochs_alone_are_enough() -> None:
    """Without any hook, ``ci.epochs`` has a watched model looked at."""
    model = nn.Linear(2, 1)
    ci.profile(frameworks=[])
    ci.watch(model)
    for _ in ci.epochs(range(2)):
        pass
    assert taken(finished()) == [("epoch_end", n, ["weight", "bias"]) for n in range(2)]


def test_the_last_epoch_of_a_program_that_just_ends(run_program: RunProgram) -> None:
    """The snapshot is there though the model was gone before the process ended (C-W3)."""
    rows = run_program(
        """
        import torch
        from torch.utils.data import DataLoader, TensorDataset
        import cirron_otel as ci

        def main():
            ci.profile()
            model = ci.watch(torch.nn.Linear(2, 1))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                for (x,) in DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=2):
                    model(x).sum().backward()
                    optimizer.step()
                    optimizer.zero_grad()

        main()
        """
    )
    assert [kind for kind, _, _ in taken(rows)] == ["last_step", "epoch_end"] * 2


def test_two_optimizers_have_their_own_gradients() -> None:
    """Of two optimizers in one step each is asked for its own parameters, just before it steps."""
    one, two = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (one, two)]
    ci.profile()
    ci.watch(one, two)
    for (x,) in DataLoader(TensorDataset(torch.ones(2, 2)), batch_size=1):
        for model, optimizer in zip((one, two), optimizers, strict=True):
            optimizer.zero_grad()
            model(x).sum().backward()
            optimizer.step()
    names = taken(finished())
    assert names[:2] == [
        ("last_step", 0, ["Linear.weight.grad", "Linear.bias.grad"]),
        ("last_step", 0, ["Linear_2.weight.grad", "Linear_2.bias.grad"]),
    ]
    assert names[2:] == [
        ("epoch_end", 0, [f"{m}.{t}" for m in ("Linear", "Linear_2") for t in ("weight", "bias")])
    ]


def test_names_of_several_models() -> None:
    """With several models, or a name, every tensor says whose it is; buffers on demand."""
    ci.profile(frameworks=[])
    ci.watch(nn.Linear(1, 1))  # gone at once: it is not counted
    generator, critic = nn.Linear(1, 1), nn.BatchNorm1d(2)
    ci.watch(generator, name="generator")
    ci.watch(critic, name="critic", buffers=True)
    assert ci.snapshot() is not None
    ci.watch(None)
    ci.watch(generator, name="alone")
    ci.snapshot(generator)
    ci.snapshot(critic)
    assert [names for _, _, names in taken(finished())] == [
        ["generator.weight", "generator.bias", "critic.weight", "critic.bias",
         "critic.running_mean", "critic.running_var", "critic.num_batches_tracked"],
        ["alone.weight", "alone.bias"],
        ["weight", "bias"],
    ]  # fmt: skip


def test_off_is_off() -> None:
    """With ``snapshots=None`` nothing is taken, by hand neither, and nothing waits for a step."""
    program = Program()
    ci.profile(snapshots=None)
    ci.watch(program.model)
    for batch in program.loader:
        program.train_step(batch)
    assert ci.snapshot(program.model) is None
    rec = recorder._current
    assert rec is not None
    assert rec.before_optimizer_step == []
    assert ci.health()["snapshots"]["mode"] == "off"
    assert finished().snapshots == []


def test_nothing_waits_for_steps_while_nothing_is_watched() -> None:
    """The list that an optimizer step looks at is empty without a watched model, and at the end."""
    model = nn.Linear(1, 1)
    ci.profile()
    rec = recorder._current
    assert rec is not None
    assert rec.before_optimizer_step == []
    ci.watch(model)
    assert len(rec.before_optimizer_step) == 1
    ci.watch(None)
    assert rec.before_optimizer_step == []
    ci.watch(model)
    finished()
    assert rec.before_optimizer_step == rec.at_epoch_end == watched.listeners == []


def test_by_hand_at_any_place() -> None:
    """``ci.snapshot`` takes any model, watched or not, in a scope of its own under the current."""
    model = nn.Linear(3, 1, bias=False)
    model(torch.ones(3)).backward()
    assert ci.snapshot(model) is None  # nothing records yet
    ci.profile(frameworks=[])
    with ci.scope("warm up") as scope:
        found = ci.snapshot(model, name="before")
        ci.snapshot({"w": torch.ones(2), "n": 3}, mode="none of these")
    assert ci.snapshot("no model") is None
    health = ci.health()["snapshots"]
    assert (health["taken"], health["tensors"], health["skipped"]) == (2, 3, {"no_model": 1})
    rows = finished()
    span = rows.named(semconv.SNAPSHOT)[0]
    assert (span.id, span.parent_id) == (found, scope.id)
    assert span.attrs == {
        semconv.SNAPSHOT_TRIGGER: "call",
        semconv.SNAPSHOT_NAME: "before",
        semconv.SNAPSHOT_MODE: "stats",
        semconv.SNAPSHOT_TENSORS: 2,
    }
    assert taken(rows) == [("call", None, ["weight", "weight.grad"]), ("call", None, ["w"])]


def test_every_few_steps() -> None:
    """``snapshot_every`` looks at weights and gradients before the step, beside the epoch's end."""
    program = Program(batches=5)
    ci.profile(snapshot_every=2)
    ci.watch(program.model)
    for batch in program.loader:
        program.train_step(batch)
    assert taken(finished()) == [
        ("every", 0, WEIGHTS + GRADIENTS),
        ("every", 0, WEIGHTS + GRADIENTS),
        ("last_step", 0, GRADIENTS),
        ("epoch_end", 0, WEIGHTS),
    ]


def trained(**settings: Any) -> list[Any]:
    """The losses and random numbers of a training, with the weights it ends with."""
    program = Program()
    torch.manual_seed(3)
    if settings:
        ci.profile(**settings)
        ci.watch(program.model)
    found: list[Any] = []
    for _ in range(2):
        found += [program.train_step(batch).item() for batch in program.loader]
        found.append(torch.rand(()).item())
    found += [one.sum().item() for one in program.model.parameters()]
    if settings:
        assert ci.health()["snapshots"]["taken"] == 4
        finished()
    return found


@pytest.mark.parametrize("mode", ["stats", "sampled", "full"])
def test_the_training_is_untouched(mode: str) -> None:
    """Losses, weights and random numbers are the same to the bit with snapshots (C-W24)."""
    assert trained(snapshots=mode, sample_rate=0.5) == trained()


def test_the_same_moments_are_chosen_everywhere() -> None:
    """What ``sampled`` writes depends on run, epoch and step alone, and has the share asked for."""
    chosen = [policy.writes_tensors("sampled", 0.25, "run", n, 7) for n in range(2000)]
    assert chosen == [policy.writes_tensors("sampled", 0.25, "run", n, 7) for n in range(2000)]
    assert chosen != [policy.writes_tensors("sampled", 0.25, "other", n, 7) for n in range(2000)]
    assert 430 < sum(chosen) < 570
    assert not any(policy.writes_tensors("sampled", 0.0, n) for n in range(100))
    assert all(policy.writes_tensors("sampled", 1.0, n) for n in range(100))


def test_gradients_are_not_kept_alive() -> None:
    """A watched model's gradients are gone once ``zero_grad`` has dropped them (C-W25)."""
    program = Program()
    ci.profile()
    ci.watch(program.model)
    gone = []
    for batch in program.loader:
        program.loss(batch).backward()
        gone += [weakref.ref(one.grad) for one in program.model.parameters()]
        program.optimizer.step()
        program.optimizer.zero_grad()
    gc.collect()
    assert [reference() for reference in gone] == [None] * len(gone)
    assert len([row for row in finished().snapshots if row.tensor_name.endswith(".grad")]) == 4


def test_a_watched_model_is_an_ordinary_one() -> None:
    """Copies, pickles and state dicts of a watched model know nothing of us; it can be freed."""
    model = nn.Sequential(nn.Linear(2, 2))
    before = set(vars(model)), list(model.state_dict())
    ci.profile()
    ci.watch(model)
    for _ in ci.epochs(range(1)):
        pass
    assert (set(vars(model)), list(model.state_dict())) == before
    assert copy.deepcopy(model).state_dict().keys() == model.state_dict().keys()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    assert averaged.module is not model
    assert b"cirron" not in pickle.dumps(model)
    reference = weakref.ref(model)
    del model, averaged
    gc.collect()
    assert reference() is None
    assert len(finished().snapshots) == 2


def test_tied_and_odd_tensors_all_have_a_row() -> None:
    """A tied weight, a complex and a meta parameter: each a row, with numbers or the reason."""
    model = nn.Module()
    model.first = nn.Linear(3, 3, bias=False)
    model.second = nn.Linear(3, 3, bias=False)
    model.second.weight = model.first.weight
    model.wave = nn.Parameter(torch.ones(2, dtype=torch.complex64))
    model.ghost = nn.Parameter(torch.empty(2, device="meta"))
    model.none = nn.Parameter(torch.empty(0, 4))
    ci.profile(frameworks=[])
    ci.snapshot(model)
    assert ci.health()["snapshots"]["skipped"] == {"complex": 1, "meta": 1}
    rows = {row.tensor_name: row for row in finished().snapshots}
    assert list(rows) == ["wave", "ghost", "none", "first.weight", "second.weight"]
    assert rows["second.weight"].attrs == {semconv.TIED_TO: "first.weight"}
    assert rows["second.weight"].stats == rows["first.weight"].stats is not None
    assert (rows["wave"].stats, rows["wave"].attrs) == (None, {semconv.SKIPPED: "complex"})
    assert rows["ghost"].attrs == {semconv.SKIPPED: "meta"}
    assert rows["none"].stats is not None


def test_sparse_gradients_do_not_disturb_the_others() -> None:
    """A sparse gradient is named with its reason; the dense ones have their numbers."""
    model = nn.Sequential(nn.Embedding(4, 2, sparse=True), nn.Linear(2, 1))
    model(torch.tensor([1, 2])).sum().backward()
    ci.profile(frameworks=[])
    ci.snapshot(model)
    rows = {row.tensor_name: row for row in finished().snapshots}
    assert rows["0.weight.grad"].attrs == {semconv.SKIPPED: "sparse"}
    assert rows["1.weight.grad"].stats is not None


def test_bfloat16_is_counted_right() -> None:
    """The counts of 100,000 bfloat16 weights are all there, the numbers right (C-W4)."""
    torch.manual_seed(0)
    weight = torch.randn(100_000).bfloat16()
    ci.profile(frameworks=[])
    ci.snapshot({"w": weight})
    row = finished().snapshots[0]
    assert (row.dtype, row.shape) == ("bfloat16", [100_000])
    assert row.stats is not None
    assert sum(row.stats["histogram"]["counts"]) == 100_000
    exact = weight.double()
    assert row.stats["std"] == pytest.approx(exact.std(correction=0).item(), rel=1e-9)
    assert row.stats["norm"] == pytest.approx(exact.norm().item(), rel=1e-9)


def test_values_that_are_not_finite() -> None:
    """NaN and infinities are counted, and the rest is described."""
    ci.profile(frameworks=[])
    ci.snapshot({"w": torch.tensor([1.0, float("nan"), 3.0, float("inf")])})
    stats = finished().snapshots[0].stats
    assert stats is not None
    assert (stats["mean"], stats["nonfinite"]["mean"]) == (None, "nan")
    assert (stats["nonfinite_count"], stats["finite"]["count"]) == (2, 2)
    assert stats["finite"]["mean"] == 2.0


def test_a_waiting_pass_is_not_woken_by_a_snapshot() -> None:
    """A second loader that was read and not used yet opens no step because an epoch has ended."""
    program = Program()
    ci.profile()
    ci.watch(program.model)
    ahead = iter(program.validation)
    for number, batch in enumerate(program.loader):
        program.train_step(batch)
        if number == 2:
            next(ahead)
    rows = finished()
    names = [span.name for span in rows.children(rows.one("epoch"))]
    assert names == ["step", "step", "step", "snapshot"]


def test_two_ranks_of_replicas_write_one_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model that is the same on every rank the first rank alone writes files."""

    class DistributedDataParallel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = nn.Linear(1, 1)

    monkeypatch.setenv("RANK", "1")
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot(DistributedDataParallel())
    ci.snapshot(nn.Linear(1, 1))
    assert [row.mode for row in finished().snapshots] == ["stats"] * 2 + ["full"] * 2


@pytest.mark.slow
def test_keras_models_by_the_names_of_their_variables(run_program: RunProgram) -> None:
    """A Keras model's weights go by their paths, its gradients too, at the end of each epoch."""
    if importlib.util.find_spec("keras") is None:
        pytest.skip("Keras is not installed")
    rows = run_program(
        """
        import os
        os.environ["KERAS_BACKEND"] = "torch"
        import keras
        import numpy
        import cirron_otel as ci

        ci.profile()
        layers = [keras.layers.Dense(3), keras.layers.BatchNormalization(), keras.layers.Dense(1)]
        model = ci.watch(keras.Sequential([keras.layers.Input((4,)), *layers], name="net"))
        model.compile("sgd", "mse")
        model.fit(numpy.ones((8, 4)), numpy.ones((8, 1)), epochs=2, batch_size=4, verbose=0)
        print(ci.health()["swallowed_errors"], ci.health()["snapshots"]["skipped"])
        """,
        timeout=200,
    )
    assert rows.stdout == "{} {}\n"
    names = [row.tensor_name for row in rows.snapshots]
    assert names.count("net/dense/kernel") == names.count("net/dense/kernel.grad") == 2
    assert "net/batch_normalization/gamma" in names
    assert "net/batch_normalization/moving_mean" not in names
