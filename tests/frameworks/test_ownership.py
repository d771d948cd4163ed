"""Who owns epoch and step where loops meet: a framework's, the program's, several at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.driven import DrivenLoop
from frameworks.torch_programs import Program, finished_tree
from helpers import read_spool, tree_text

PHASES = """\
forward
backward
optimizer_step
"""


class Framework:
    """A loop that owns itself, as small as it can be: it tells of what it does, like a hook."""

    def __init__(self, program: Program) -> None:
        rec = recorder._current
        assert rec is not None
        self.loop = DrivenLoop(rec, "framework")
        self.program = program

    @contextmanager
    def fit(self) -> Iterator[None]:
        """Tell of the beginning and the end, however it comes."""
        self.loop.begin_fit()
        try:
            yield
        except BaseException as error:
            self.loop.end_fit(error)
            raise
        self.loop.end_fit()

    def train(self, epochs: int = 1, inside: Any = None, evaluate: bool = False) -> None:  # noqa: FBT001, FBT002
        """Train; ``inside`` is called in each step."""
        loop = self.loop
        with self.fit():
            for epoch in range(epochs):
                loop.begin_epoch(epoch, steps=len(self.program.loader))
                batches = iter(self.program.loader)
                while True:
                    loop.expect_step()
                    batch = next(batches, None)
                    if batch is None:
                        break
                    self.program.train_step(batch)
                    if inside is not None:
                        inside()
                    loop.end_step()
                if evaluate:
                    self.evaluate()
                loop.end_epoch()

    def evaluate(self, stage: str = "evaluation") -> None:
        """A pass over the validation data, as a framework makes it."""
        self.loop.begin_stage(stage)
        with torch.no_grad():
            self.loop.expect_step()
            for batch in self.program.validation:
                self.program.loss(batch)
                self.loop.end_step()
                self.loop.expect_step()
        self.loop.end_stage()


def indented(text: str, by: int) -> str:
    """Every line of ``text``, further right."""
    return "".join(" " * by + line + "\n" for line in text.splitlines())


def framework_steps(count: int, first: int = 0, by: int = 4) -> str:
    """The lines of steps as a driven loop over a data loader gives them."""
    body = indented("data_load\n" + PHASES, by + 2)
    return "".join(" " * by + f"step[{n}] {{loss}}\n{body}" for n in range(first, first + count))


def test_a_driven_loop_owns_epochs_and_steps() -> None:
    """The data loader below it gives data_load only: one epoch and one step, not two."""
    ci.profile(snapshots=None)
    Framework(Program()).train(2)
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n" + "".join(f"  epoch[{n}]\n" + framework_steps(3) for n in range(2))
    )


def test_the_order_of_installing_does_not_matter() -> None:
    """What owns a loop is who runs it: a plain loop before, a driven one, a plain one after."""
    ci.profile(snapshots=None)
    program = Program()
    for batch in program.loader:
        program.train_step(batch)
    Framework(program).train()
    for batch in program.loader:
        program.train_step(batch)
    tree = finished_tree(marks=True)
    assert tree + "\n" == (
        "cirron.session\n"
        "  epoch[0]\n" + framework_steps(3)
        + "  epoch[0]\n" + framework_steps(3)
        + "  epoch[1]\n" + framework_steps(3)
    )  # fmt: skip
    assert [step.iteration for step in read_spool().named("step")] == list(range(9))


def test_epochs_of_the_program_around_a_driven_loop() -> None:
    """``ci.epochs`` is outermost: the framework opens no epochs, its steps count on in them."""
    ci.profile(snapshots=None)
    framework = Framework(Program())
    for _ in ci.epochs(range(2)):
        framework.train(2)
    assert finished_tree(marks=True) + "\n" == (
        "cirron.session\n" + "".join(f"  epoch[{n}]\n" + framework_steps(6) for n in range(2))
    )


def test_a_driven_loop_inside_a_step_of_the_program() -> None:
    """A loop over a loader that trains by a framework keeps its steps; nothing is counted twice."""
    ci.profile(snapshots=None)
    program = Program(batches=2)
    framework = Framework(Program(batches=1))
    for _ in program.loader:
        ci.mark("outer", 1)
        framework.train()
    spans = read_spool()
    tree = finished_tree()
    spans = read_spool()
    assert [step.index for step in spans.named("step")] == [0, 1]
    assert len(spans.named("epoch")) == 1
    phases = indented("data_load\ndata_load\n" + PHASES, 6)
    assert tree + "\n" == (
        f"cirron.session\n  epoch[0]\n    step[0]\n{phases}    step[1]\n{phases}"
    )


def test_a_driven_loop_inside_another_opens_no_epoch_and_no_step() -> None:
    """Lightning over accelerate, a Trainer in a callback: the outer one counts."""
    ci.profile(snapshots=None)
    inner = Framework(Program(batches=1))
    Framework(Program(batches=2)).train(inside=inner.train)
    spans = read_spool()
    tree = finished_tree()
    spans = read_spool()
    assert [span.name for span in spans.spans if span.index is not None] == [
        "step", "step", "epoch",
    ]  # fmt: skip
    both = indented("data_load\n" + PHASES + "data_load\n" + PHASES, 6)
    assert tree + "\n" == f"cirron.session\n  epoch[0]\n    step[0]\n{both}    step[1]\n{both}"


def test_loops_of_the_program_inside_a_driven_loop() -> None:
    """``ci.epochs`` inside opens nothing, ``ci.batches`` micro-batches, in the step it is in."""
    ci.profile(snapshots=None)
    other = Program(batches=2)

    def inside() -> None:
        for _ in ci.epochs(range(1)):
            for _ in ci.batches(other.loader):
                ci.mark("inner", 1)

    Framework(Program(batches=1)).train(inside=inside)
    inner = "".join(f"micro_batch[{n}]\n  data_load\n" for n in range(2))
    assert finished_tree() + "\n" == (
        "cirron.session\n  epoch[0]\n    step[0]\n" + indented("data_load\n" + PHASES + inner, 6)
    )


def test_a_validation_by_hand_inside_a_driven_loop() -> None:
    """What a callback evaluates by hand is an evaluation, and no step of the training."""
    ci.profile(snapshots=None)
    program = Program(batches=2)
    framework = Framework(program)
    framework.train(inside=program.validate)
    spans = read_spool()
    tree = finished_tree(without=("forward", "backward", "optimizer_step", "data_load"))
    assert tree + "\n" == (
        "cirron.session\n  epoch[0]\n"
        + "".join(f"    step[{n}]\n      evaluation\n        step[0]\n" for n in range(2))
    )
    spans = read_spool()
    assert {step.iteration for step in spans.named("step")} == {0, 1}


def test_stages_of_a_driven_loop() -> None:
    """Evaluations are numbered and have steps without iterations; outside of a fit too."""
    ci.profile(snapshots=None)
    framework = Framework(Program(batches=2))
    framework.train(2, evaluate=True)
    framework.evaluate()
    framework.evaluate("prediction")
    tree = finished_tree(without=("forward", "backward", "optimizer_step", "data_load"))
    epochs = "".join(
        f"  epoch[{n}]\n    step[0]\n    step[1]\n    evaluation[{n}]\n      step[0]\n"
        for n in range(2)
    )
    assert tree + "\n" == (
        f"cirron.session\n{epochs}  evaluation[2]\n    step[0]\n  prediction[0]\n    step[0]\n"
    )


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_what_is_raised_in_a_fit_ends_all_of_it(kind: type[BaseException]) -> None:
    """The program's exception flies through; the scopes end with it, and plain loops own again."""
    ci.profile(snapshots=None)
    program = Program(batches=1)
    error = kind("enough")

    def inside() -> None:
        raise error

    with pytest.raises(kind) as raised:
        Framework(program).train(inside=inside)
    assert raised.value is error
    for batch in program.loader:
        program.train_step(batch)
    tree = finished_tree(attrs=("error",), without=("forward", "backward", "optimizer_step"))
    said = f'error="{kind.__name__}: enough"'
    assert tree + "\n" == (
        f"cirron.session\n  epoch[0] {said}\n    step[0] {said}\n      data_load\n"
        "  epoch[0]\n    step[0]\n      data_load\n"
    )


def test_driven_loops_in_two_threads_are_their_own() -> None:
    """Each has its epochs and steps under what its thread stands in."""
    ci.profile(snapshots=None)
    barrier = threading.Barrier(2)

    def work(name: str) -> None:
        with ci.scope(name):
            barrier.wait(20)
            Framework(Program(batches=2)).train(inside=lambda: barrier.wait(20))

    threads = [threading.Thread(target=work, args=(name,)) for name in ("first", "second")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    finished_tree()
    rows = read_spool()
    for name in ("first", "second"):
        (epoch,) = rows.children(rows.one(name))
        assert [(c.name, c.index) for c in rows.children(epoch)] == [("step", 0), ("step", 1)]
    assert sorted(step.iteration for step in rows.named("step")) == [0, 1, 2, 3]  # type: ignore[type-var]


def test_a_driven_loop_in_a_thread_of_a_step_is_its_own() -> None:
    """A thread that a training step starts may train by itself: it has steps of its own."""
    ci.profile(snapshots=None)
    inner = Framework(Program(batches=2))

    def inside() -> None:
        thread = threading.Thread(target=inner.train)
        thread.start()
        thread.join()

    Framework(Program(batches=1)).train(inside=inside)
    finished_tree()
    rows = read_spool()
    assert len(rows.named("step")) == 3


def test_a_scope_of_the_program_around_a_fit() -> None:
    """The epochs stand in the scope in which the fit was called, and it is current afterwards."""
    ci.profile(snapshots=None)
    with ci.scope("finetuning") as scope:
        Framework(Program(batches=1)).train()
        ci.mark("after", 1)
    finished_tree()
    rows = read_spool()
    assert rows.one("epoch").parent_id == scope.id
    assert [mark.span_id for mark in rows.marks if mark.name == "after"] == [scope.id]


def test_shutting_down_in_the_middle_of_a_fit() -> None:
    """A callback that ends the recording leaves the training alone."""
    ci.profile(snapshots=None)
    Framework(Program(batches=2)).train(inside=ci.shutdown)
    rows = read_spool()
    assert not rows.open
    assert tree_text(rows, without=("forward", "backward", "optimizer_step")) == (
        "cirron.session\n  epoch[0]\n    step[0]\n      data_load"
    )


def test_a_step_goes_on_after_the_evaluation_inside_it() -> None:
    """What comes after an evaluation in the middle of a step is in that step again."""
    ci.profile(snapshots=None)
    framework = Framework(Program(batches=1))

    def inside() -> None:
        framework.evaluate()
        ci.mark("late", 1)

    framework.train(inside=inside)
    finished_tree()
    rows = read_spool()
    (step,) = [s for s in rows.named("step") if rows.children(s)[-1].name == "evaluation"]
    assert [mark.span_id for mark in rows.marks if mark.name == "late"] == [step.id]
