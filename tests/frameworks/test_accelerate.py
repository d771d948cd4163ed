# mypy: disable-error-code="no-untyped-call"
"""Loops over what Accelerate has prepared: as plain loops, and a step is one optimizer update."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import cirron_otel as ci
from conftest import SRC
from frameworks.torch_programs import Program, finished_tree
from helpers import read_spool

accelerate: Any = pytest.importorskip("accelerate")

BODY = "{0}data_load\n{0}forward\n{0}backward\n{0}optimizer_step\n"


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Accelerate keeps the state of a process for itself; each test starts anew."""
    yield
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()


class Prepared:
    """The small program, prepared."""

    def __init__(self, batches: int = 4, **options: Any) -> None:
        program = Program(batches)
        self.accelerator = accelerate.Accelerator(cpu=True, **options)
        self.model, self.optimizer, self.loader, self.validation = self.accelerator.prepare(
            program.model, program.optimizer, program.loader, program.validation
        )

    def train(self) -> list[float]:
        """One epoch; the losses of its batches."""
        losses = []
        for x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = torch.nn.functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def test_a_prepared_loop_gives_the_canonical_tree() -> None:
    """The loader reads one batch ahead; a step has one ``data_load`` and all of its own work."""
    ci.profile()
    one = Prepared(3)
    one.train()
    one.model.eval()
    with torch.no_grad():
        for x, _ in one.validation:
            one.accelerator.gather(one.model(x))
    one.model.train()
    one.train()
    step = "    step[{}]\n" + BODY.format(" " * 6)
    steps = "".join(step.format(n) for n in range(3))
    test = "".join(f"      step[{n}]\n        data_load\n        forward\n" for n in range(2))
    assert finished_tree() + "\n" == (
        f"cirron.session\n  epoch[0]\n{steps}    evaluation\n{test}  epoch[1]\n{steps}"
    )
    trained = [s.iteration for s in read_spool().named("step") if isinstance(s.iteration, int)]
    assert trained == list(range(6))


def test_accumulation_is_one_step_for_each_update() -> None:
    """Inside ``accumulate`` a step is one update with a micro batch for each fetch (102)."""
    ci.profile()
    Prepared(5, gradient_accumulation_steps=2).train()
    part = "      data_load\n      micro_batch[{}]\n        forward\n        backward\n"
    step = "    step[{}]\n"
    update = "        optimizer_step\n"
    assert (
        finished_tree() + "\n"
        == "cirron.session\n  epoch[0]\n"
        + "".join(step.format(n) + part.format(0) + part.format(1) + update for n in range(2))
        + step.format(2)
        + part.format(0)
        + update
    )
    assert [span.iteration for span in read_spool().named("step")] == [0, 1, 2]


def test_accumulation_by_hand_is_the_programs_own() -> None:
    """Without ``accumulate`` each batch is a step, as in any other loop."""
    ci.profile()
    one = Prepared(4, gradient_accumulation_steps=2)
    for number, (x, y) in enumerate(one.loader):
        loss = torch.nn.functional.cross_entropy(one.model(x), y)
        one.accelerator.backward(loss)
        if number % 2:
            one.optimizer.step()
            one.optimizer.zero_grad()
    finished_tree()
    rows = read_spool()
    assert [span.index for span in rows.named("step")] == [0, 1, 2, 3]
    assert rows.named("micro_batch") == []


def test_what_the_program_owns_stays_its_own() -> None:
    """``ci.epochs`` and ``ci.batches`` around a prepared loader: one epoch, one step each."""
    ci.profile()
    one = Prepared(3)
    for _ in ci.epochs(range(2)):
        for x, y in ci.batches(one.loader):
            loss = torch.nn.functional.cross_entropy(one.model(x), y)
            one.accelerator.backward(loss)
            one.optimizer.step()
    step = "    step[{}]\n" + BODY.format(" " * 6)
    steps = "".join(step.format(n) for n in range(3))
    assert finished_tree() + "\n" == f"cirron.session\n  epoch[0]\n{steps}  epoch[1]\n{steps}"


def test_a_peek_and_a_loop_that_is_left_early() -> None:
    """A first batch taken by hand opens no epoch; a step that breaks off ends."""
    ci.profile()
    one = Prepared(4)
    next(iter(one.loader))
    assert read_spool().named("epoch") == []
    for x, y in one.loader:
        loss = torch.nn.functional.cross_entropy(one.model(x), y)
        one.accelerator.backward(loss)
        break
    ci.mark("after", 1)
    finished_tree()
    rows = read_spool()
    assert len(rows.named("epoch")) == 1
    (step,) = rows.named("step")
    (after,) = [mark for mark in rows.marks if mark.name == "after"]
    assert after.span_id != step.id


class Stream(torch.utils.data.IterableDataset[Any]):
    """Items that can only be read one after the other."""

    def __iter__(self) -> Iterator[Any]:
        yield from Program(4).loader.dataset  # type: ignore[misc]


def test_batches_that_are_skipped_on_resume_have_a_scope() -> None:
    """``skip_first_batches``: the time is ``resume_skip``, not a wait of the first step (118)."""
    ci.profile()
    one = Prepared(4)
    loader = one.accelerator.prepare(DataLoader(Stream(), batch_size=4))
    one.loader = one.accelerator.skip_first_batches(loader, 2)
    one.train()
    finished_tree()
    rows = read_spool()
    skip = rows.one("resume_skip")
    assert skip.attrs["batches"] == 2
    first, second = rows.named("step")
    assert first.start_ns >= (skip.end_ns or 0)
    assert len(rows.children(first)) == len(rows.children(second)) == 4


def test_an_error_in_the_data_flies_through() -> None:
    """What a data set raises reaches the program, and stands on its ``data_load``."""

    class Bad(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            if index == 6:
                raise ValueError("bad item")
            return torch.zeros(4), 0

    ci.profile()
    one = Prepared()
    loader = one.accelerator.prepare(DataLoader(Bad(), batch_size=1))
    seen: list[Any] = []
    with pytest.raises(ValueError, match="bad item"):
        seen.extend(one.model(x) for x, _ in loader)
    assert len(seen) == 5  # one ahead
    finished_tree()
    failed = [span.name for span in read_spool().spans if "error" in span.attrs]
    assert failed == ["data_load"]


def test_the_loader_gives_generators_as_ever() -> None:
    """``iter(loader)`` is a generator that can be closed; nothing is left of it."""
    ci.profile()
    one = Prepared()
    batches = iter(one.loader)
    assert type(batches).__name__ == "generator"
    next(batches)
    batches.close()
    with pytest.raises(StopIteration):
        next(batches)
    finished_tree()


def _trained(profile: Callable[[], object] | None) -> tuple[Any, ...]:
    random.seed(5)
    torch.manual_seed(5)
    if profile is not None:
        profile()
    one = Prepared(5, gradient_accumulation_steps=2)
    losses = [one.train() for _ in range(3)]
    ci.shutdown()
    states = random.getstate(), torch.get_rng_state().numpy().tobytes()
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return losses, states


def test_training_is_exactly_what_it_was() -> None:
    """Same losses and random streams with the hooks and without."""
    assert _trained(None) == _trained(ci.profile)


def test_uninstalling_restores_every_attribute() -> None:
    """After ``shutdown`` each class has the very objects it had before."""
    kinds = [
        accelerate.Accelerator,
        *(v for v in vars(accelerate.data_loader).values() if isinstance(v, type)),
    ]
    before = [dict(vars(kind)) for kind in kinds]
    ci.profile()
    assert vars(accelerate.Accelerator)["accumulate"] is not before[0]["accumulate"]
    Prepared().train()
    ci.shutdown()
    for kind, old in zip(kinds, before, strict=True):
        changed = [n for n in {*vars(kind), *old} if vars(kind).get(n) is not old.get(n)]
        assert [n for n in changed if not n.startswith("_abc")] == []


@pytest.mark.slow
def test_two_processes(tmp_path: Path) -> None:
    """Torchrun with two processes: each rank has its own steps, with the batches it trained on."""
    program = tmp_path / "program.py"
    program.write_text(
        """
import torch, accelerate
from torch.utils.data import DataLoader, TensorDataset
import cirron_otel as ci

ci.profile()
accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
model = torch.nn.Linear(4, 3)
data = TensorDataset(torch.randn(32, 4), torch.randint(0, 3, (32,)))
model, optimizer, loader = accelerator.prepare(
    model, torch.optim.SGD(model.parameters(), 0.1), DataLoader(data, batch_size=4)
)
for _ in range(2):
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        accelerator.gather(loss.detach())
assert ci.health()["swallowed_errors"] == {}
ci.shutdown()
torch.distributed.destroy_process_group()
"""
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    done = subprocess.run(
        [*command, str(program)],
        env={**os.environ, "PYTHONPATH": str(SRC), "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = read_spool(tmp_path / ".cirron")
    for rank in (0, 1):
        steps = [span for span in rows.named("step") if span.rank == rank]
        assert [span.iteration for span in steps] == [0, 1, 2, 3]
        for step in steps:
            inside = [s.name for s in rows.children(step) if s.name != "collective_wait"]
            assert inside == ["data_load", "micro_batch"] * 2
    assert len(rows.named("optimizer_step")) == 8


@pytest.mark.slow
def test_the_example(run_program: Any) -> None:
    """``examples/accelerate_loop.py`` runs and shows its last steps."""
    example = SRC.parent / "examples" / "accelerate_loop.py"
    rows = run_program(example.read_text(), timeout=200)
    assert rows.stdout.count("micro_batch[1]") == 2
    assert len(rows.named("micro_batch")) == 2 * len(rows.named("optimizer_step")) == 16
