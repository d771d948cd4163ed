# mypy: disable-error-code="no-untyped-call"
"""Training loops as people write them, seen by the torch hook: the same tree each time."""

from __future__ import annotations

import contextvars
import threading
import time
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, TensorDataset

import cirron_otel as ci
from cirron_otel import recorder
from frameworks.torch_programs import FORMS, Program, Wrap, finished_tree, plain, steps
from helpers import read_spool, tree_text

EVALUATION = """\
    evaluation
      step[0]
        data_load
        forward
      step[1]
        data_load
        forward
"""


@pytest.fixture(params=FORMS, ids=lambda name: name.replace(" ", "-"))
def form(request: pytest.FixtureRequest) -> tuple[Wrap, Wrap]:
    """Each way to write the two loops."""
    return FORMS[request.param]


def test_a_training_loop_gives_the_canonical_tree(form: tuple[Wrap, Wrap]) -> None:
    """Session, epochs, steps and their phases, whichever helpers the program uses."""
    epochs, batches = form
    program = Program()
    ci.profile()
    for _ in epochs(range(2)):
        for batch in batches(program.loader):
            program.train_step(batch)
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n  epoch[0]\n" + steps(3) + "  epoch[1]\n" + steps(3)
    )
    spans = read_spool().named("step")
    assert [span.iteration for span in spans] == list(range(6))


def test_validation_after_each_epoch_is_no_epoch(form: tuple[Wrap, Wrap]) -> None:
    """A validation loop lies in an evaluation scope under the epoch it follows (C-W11)."""
    epochs, batches = form
    program = Program()
    ci.profile()
    for _ in epochs(range(2)):
        for batch in batches(program.loader):
            program.train_step(batch)
        program.validate(batches)
        ci.mark("accuracy", 0.5)
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n"
        + "".join(f"  epoch[{n}] {{accuracy}}\n" + steps(3) + EVALUATION for n in range(2))
    )


def test_validation_in_the_middle_of_an_epoch(form: tuple[Wrap, Wrap]) -> None:
    """A validation inside a training step lies inside that step, which goes on after it."""
    epochs, batches = form
    program = Program()
    ci.profile()
    for _ in epochs(range(1)):
        for number, batch in enumerate(batches(program.loader)):
            if number == 1:
                program.validate(batches)
            program.train_step(batch)
    inside = "      data_load\n" + "".join(
        "  " + line + "\n" for line in EVALUATION.splitlines()
    ) + "      forward\n      backward\n      optimizer_step\n"  # fmt: skip
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n  epoch[0]\n" + steps(1) + steps(1, 1, inside) + steps(1, 2)
    )


def test_model_train_inside_the_loop_is_training(form: tuple[Wrap, Wrap]) -> None:
    """A model put back into train mode in the loop's body makes no evaluation of the loop."""
    epochs, batches = form
    program = Program()
    ci.profile()
    for _ in epochs(range(2)):
        for batch in batches(program.loader):
            program.model.train()
            program.train_step(batch)
        program.model.eval()
        with torch.no_grad():
            for batch in batches(program.validation):
                program.loss(batch)
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n" + "".join(f"  epoch[{n}]\n" + steps(3) + EVALUATION for n in range(2))
    )


def test_a_frozen_teacher_makes_no_evaluation() -> None:
    """A module that stays in eval mode beside the one that learns does not decide the stage."""
    program = Program()
    teacher = torch.nn.Linear(4, 3).eval()
    ci.profile()
    for _ in range(2):
        for batch in program.loader:
            program.train_step(batch)
            with torch.no_grad():
                teacher(batch[0])
    rows = finished_tree()
    assert "evaluation" not in rows
    assert rows.count("  epoch[") == 2


def test_a_peek_opens_no_epoch(form: tuple[Wrap, Wrap]) -> None:
    """``next(iter(loader))`` before the loops, between them and inside changes nothing (C-W11)."""
    epochs, batches = form
    program = Program()
    ci.profile()
    x, _ = next(iter(program.loader))
    assert x.shape == (4, 4)
    for _ in epochs(range(2)):
        next(iter(program.validation))
        for batch in batches(program.loader):
            program.train_step(batch)
        next(iter(program.loader))
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n  epoch[0]\n" + steps(3) + "  epoch[1]\n" + steps(3)
    )


@pytest.mark.parametrize("around", ["optimizer", "forward", "batch", "fetch"])
def test_user_scopes_stand_where_they_are(around: str) -> None:
    """A user's scope around a part of the loop holds that part and disturbs nothing (C-W2)."""
    program = Program()
    ci.profile()
    iterator = iter(program.loader)
    for _ in range(3):
        if around == "fetch":
            with ci.scope("mine"):
                batch = next(iterator)
            program.train_step(batch)
            continue
        batch = next(iterator)
        if around == "batch":
            with ci.scope("mine"):
                program.train_step(batch)
            continue
        if around == "forward":
            with ci.scope("mine"):
                loss = program.loss(batch)
        else:
            loss = program.loss(batch)
        loss.backward()
        if around == "optimizer":
            with ci.scope("mine"):
                program.optimizer.step()
        else:
            program.optimizer.step()
        ci.mark("loss", loss)
    one_loss = " {loss}"
    body = {
        "optimizer": "data_load|forward|backward|mine|  optimizer_step",
        "forward": "data_load|mine|  forward|backward|optimizer_step",
        "batch": "data_load|mine {loss}|  forward|  backward|  optimizer_step",
        "fetch": "data_load|forward|backward|optimizer_step",
    }[around]
    lines = "".join(f"      {line}\n" for line in body.split("|"))
    expected = "".join(
        f"    step[{n}]{'' if around == 'batch' else one_loss}\n{lines}" for n in range(3)
    )
    tree = finished_tree(marks=True, without=("mine",) if around == "fetch" else ())
    assert tree + "\n" == "cirron.session\n  epoch[0]\n" + expected
    assert len(read_spool().named("mine")) == 3


def test_a_user_scope_around_the_whole_loop(form: tuple[Wrap, Wrap]) -> None:
    """A scope around all epochs holds them."""
    epochs, batches = form
    program = Program()
    ci.profile()
    with ci.scope("training"):
        for _ in epochs(range(2)):
            for batch in batches(program.loader):
                program.train_step(batch)
    lines = finished_tree(marks=True).splitlines()
    assert lines[:2] == ["cirron.session", "  training"]
    assert "\n".join(line[2:] for line in lines[2:]) + "\n" == (
        "  epoch[0]\n" + steps(3) + "  epoch[1]\n" + steps(3)
    )


def test_400_iterations_with_a_scope_around_the_optimizer() -> None:
    """Nothing is lost and nothing deepens, however long the loop is (C-W1, C-W2)."""
    program = Program(batches=400)
    ci.profile()
    for _ in ci.epochs(range(1)):
        for batch in ci.batches(program.loader):
            loss = program.loss(batch)
            loss.backward()
            with ci.scope("update"):
                program.optimizer.step()
            ci.mark("loss", loss)
    assert ci.health()["losses"] == {}
    ci.shutdown()
    rows = read_spool()
    for name in ("step", "data_load", "forward", "backward", "update", "optimizer_step"):
        assert len(rows.named(name)) == 400
    assert [span.index for span in rows.named("step")] == list(range(400))
    assert sum(mark.name == "loss" for mark in rows.marks) == 400


def test_120_epochs_are_siblings() -> None:
    """More epochs than a stack is deep, each under the session, steps numbered anew (C-W1)."""
    program = Program(batches=2)
    ci.profile()
    for _ in range(120):
        for batch in program.loader:
            program.train_step(batch)
    ci.shutdown()
    rows = read_spool()
    session = rows.one("cirron.session")
    epochs = rows.named("epoch")
    assert [epoch.index for epoch in epochs] == list(range(120))
    assert {epoch.parent_id for epoch in epochs} == {session.id}
    assert [[s.index for s in rows.children(epoch)] for epoch in epochs] == [[0, 1]] * 120


def test_broken_off_loops(form: tuple[Wrap, Wrap]) -> None:
    """A loop left by ``break`` ends its step there: what follows belongs to the epoch."""
    epochs, batches = form
    program = Program(batches=5)
    ci.profile()
    for _ in epochs(range(2)):
        for number, batch in enumerate(batches(program.loader)):
            program.train_step(batch)
            if number == 1:
                break
        ci.mark("done", 1)
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n  epoch[0] {done}\n" + steps(2) + "  epoch[1] {done}\n" + steps(2)
    )


def test_iterators_made_anew_when_exhausted() -> None:
    """``while True: next(it)`` with a new iterator at each end gives an epoch per pass."""
    program = Program(batches=2)
    ci.profile()
    iterator = iter(program.loader)
    for _ in range(6):
        try:
            batch = next(iterator)
        except StopIteration:
            iterator = iter(program.loader)
            batch = next(iterator)
        program.train_step(batch)
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n" + "".join(f"  epoch[{n}]\n" + steps(2) for n in range(3))
    )


def test_an_iterator_kept_across_phases() -> None:
    """An iterator used in two phases goes on, with validation between them."""
    program = Program(batches=4)
    ci.profile()
    iterator = iter(program.loader)
    for _ in range(2):
        program.train_step(next(iterator))
    program.validate()
    for _ in range(2):
        program.train_step(next(iterator))
    tree = finished_tree(marks=True, without=("evaluation",))
    assert tree + "\n" == "cirron.session\n  epoch[0]\n" + steps(4)
    assert len(read_spool().named("evaluation")) == 1


def test_two_loaders_in_step() -> None:
    """``zip`` of two loaders is one loop: the second only adds its data_load to the step."""
    program = Program()
    ci.profile()
    for first, _ in zip(program.loader, Program().loader, strict=False):
        program.train_step(first)
    body = "      data_load\n      data_load\n      forward\n      backward\n      optimizer_step\n"
    assert finished_tree(marks=True) + "\n" == "cirron.session\n  epoch[0]\n" + steps(3, 0, body)


def test_an_inner_loop_of_batches_makes_micro_batches() -> None:
    """A loop of ``ci.batches`` inside a step of another is its micro batches (meta-learning)."""
    program = Program(batches=2)
    ci.profile()
    for _task in ci.batches(range(2)):
        for batch in ci.batches(program.loader):
            program.train_step(batch)
    inner = "".join(
        f"      micro_batch[{n}] {{loss}}\n"
        + "".join(
            f"        {name}\n" for name in ("data_load", "forward", "backward", "optimizer_step")
        )
        for n in range(2)
    )
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n  epoch[0]\n"
        + "".join(f"    step[{n}]\n      data_load\n{inner}" for n in range(2))
    )


def test_an_inner_loop_of_the_hook_stays_in_the_step() -> None:
    """A plain loader loop inside a step of ``ci.batches`` adds to the step, and no epochs."""
    program = Program(batches=2)
    ci.profile()
    for _task in ci.batches(range(2)):
        for batch in program.loader:
            program.train_step(batch)
    phases = "      data_load\n      forward\n      backward\n      optimizer_step\n"
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n  epoch[0]\n"
        + "".join(f"    step[{n}] {{loss}}\n      data_load\n{phases * 2}" for n in range(2))
    )


def test_a_nested_loop_that_nobody_declared_settles() -> None:
    """Loader loops in one another, hook alone: from the second task on, tasks are the steps."""
    program = Program(batches=3)
    tasks: DataLoader[Any] = DataLoader(TensorDataset(torch.arange(4)))
    ci.profile()
    for _task in tasks:
        for batch in program.loader:
            program.train_step(batch)
    ci.shutdown()
    rows = read_spool()
    assert ci.health()["losses"] == {}
    assert len(rows.named("epoch")) == 1
    last = rows.named("step")[-3:]
    for step in last:
        names = [child.name for child in rows.children(step)]
        assert names.count("optimizer_step") == 3
        assert names.count("data_load") == 4


def test_gradient_accumulation() -> None:
    """Several backwards lead to one optimizer step; a step is one batch of the loop."""
    program = Program(batches=4)
    ci.profile()
    for number, batch in enumerate(program.loader):
        loss = program.loss(batch)
        loss.backward()
        ci.mark("loss", loss)
        if number % 2:
            program.optimizer.step()
            program.optimizer.zero_grad()
    short = "      data_load\n      forward\n      backward\n"
    expected = "".join(
        steps(1, n, short + ("      optimizer_step\n" if n % 2 else "")) for n in range(4)
    )
    assert finished_tree(marks=True) + "\n" == "cirron.session\n  epoch[0]\n" + expected


def test_an_exception_in_the_loop(form: tuple[Wrap, Wrap]) -> None:
    """An exception leaves the loop unchanged, and the next loop begins in order."""
    epochs, batches = form
    program = Program()
    ci.profile()

    def run(fail_at: int) -> None:
        for _ in epochs(range(1)):
            for number, batch in enumerate(batches(program.loader)):
                program.train_step(batch)
                if number == fail_at:
                    raise KeyError(number)

    with pytest.raises(KeyError):
        run(1)
    run(99)
    tree = finished_tree(marks=True) + "\n"
    assert tree.replace("epoch[1]", "epoch[0]") == (
        "cirron.session\n  epoch[0]\n" + steps(2) + "  epoch[0]\n" + steps(3)
    )


class Slow(Dataset[torch.Tensor]):
    """Items that take their time; the fourth cannot be read at all."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == 3:
            raise OSError("bad sector")
        time.sleep(0.02)
        return torch.tensor(0.0)


@pytest.mark.parametrize("batches", [plain, ci.batches], ids=["hook", "batches"])
def test_data_load_is_the_fetch(batches: Wrap) -> None:
    """data_load takes as long as the fetch, begins its step, and keeps a failure (C-W12)."""
    ci.profile()
    loader: DataLoader[Any] = DataLoader(Slow())

    def run() -> None:
        for item in batches(loader):
            with ci.scope("use"):
                assert item.shape == (1,)

    with pytest.raises(OSError, match="bad sector"):
        run()
    ci.shutdown()
    rows = read_spool()
    loads = rows.named("data_load")
    assert len(loads) == 4
    for step, load in zip(rows.named("step"), loads, strict=False):
        assert load.parent_id == step.id
        assert load.start_ns == step.start_ns
        assert isinstance(load.end_ns, int)
        assert load.end_ns - load.start_ns >= 19_000_000
        assert isinstance(step.end_ns, int)
        assert load.end_ns <= step.end_ns
    assert len(rows.named("step")) == 3
    assert loads[3].attrs == {"error": "OSError: bad sector"}
    assert loads[3].parent_id == rows.one("epoch").id


def test_loaders_stay_what_they_are() -> None:
    """Iterators keep their type and length; an unused one leaves no trace (C-W13)."""
    program = Program()
    before = type(iter(program.loader))
    ci.profile()
    iterator = iter(program.loader)
    assert type(iterator) is before
    assert len(iterator) == 3
    del iterator
    assert finished_tree() == "cirron.session"


def test_profile_in_the_middle_of_a_loop() -> None:
    """A loop that was running before ``profile()`` is recorded from its next fetch on."""
    program = Program()
    for number, batch in enumerate(program.loader):
        if number == 1:
            ci.profile()
        program.train_step(batch)
    tree = finished_tree()
    assert tree.startswith("cirron.session\n  forward\n  backward\n  optimizer_step\n  epoch[0]\n")
    assert tree.count("step[") == 1


def test_two_recordings_in_one_process() -> None:
    """After ``shutdown()`` and another ``profile()`` everything begins anew."""
    program = Program()
    for run in ("first", "second"):
        ci.profile(path=run)
        for batch in program.loader:
            program.train_step(batch)
        ci.shutdown()
        assert tree_text(read_spool(run), marks=True) + "\n" == (
            "cirron.session\n  epoch[0]\n" + steps(3)
        )


def test_an_iterator_that_another_thread_goes_on_with() -> None:
    """Each thread's fetches are told to its own loops, whoever's iterator it is."""
    program = Program()
    ci.profile()
    batches = iter(DataLoader([next(iter(program.loader))] * 8, batch_size=None))

    def some(count: int) -> None:
        for _ in range(count):
            program.train_step(next(batches))

    some(3)
    fetching: list[int] = []
    rec = recorder._current
    assert rec is not None

    def elsewhere() -> None:
        some(3)
        fetching.append(rec.loops.here.fetching)

    thread = threading.Thread(target=contextvars.copy_context().run, args=[elsewhere])
    thread.start()
    thread.join()
    some(2)
    ci.shutdown()
    spool = read_spool()
    assert fetching == [0]
    assert len(spool.named("data_load")) == len(spool.named("forward")) == 8
    assert sorted(span.iteration for span in spool.named("step")) == list(range(8))
