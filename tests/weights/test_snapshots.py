# mypy: disable-error-code="no-untyped-call"
"""When snapshots are taken, of what, and what they leave of the training: nothing changed."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci
from cirron_otel import recorder, semconv
from cirron_otel.watching import watched
from cirron_otel.weights import policy, reductions
from frameworks.torch_programs import FORMS, Program, Wrap
from helpers import RunProgram
from weights.snapshots_by_hand import finished, taken

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


def test_weights_and_gradients_are_described_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call for all tensors of a snapshot: a device is waited for once, threads start once."""
    calls: list[int] = []
    describe = reductions.reduce_all

    def counted(some: Any, *, histogram: bool) -> Any:
        calls.append(len(some))
        return describe(some, histogram=histogram)

    monkeypatch.setattr(reductions, "reduce_all", counted)
    model = nn.Linear(3, 2)
    model(torch.ones(1, 3)).sum().backward()
    ci.profile(frameworks=[])
    ci.snapshot(model)
    rows = finished().snapshots
    assert calls == [4]
    assert [row.tensor_name for row in rows] == ["weight", "bias", "weight.grad", "bias.grad"]
    assert [row.stats["max"] for row in rows[2:] if row.stats is not None] == [1.0, 1.0]


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


def test_nothing_of_a_recording_stays() -> None:
    """After ``shutdown`` whatever took its snapshots is gone, also where a model stays watched."""
    model = nn.Linear(1, 1)
    ci.watch(model)
    ci.profile(frameworks=[])
    ci.snapshot()
    rec = recorder._current
    assert rec is not None
    taker = weakref.ref(rec.snapshots)
    del rec
    finished()
    gc.collect()
    assert taker() is None


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
