# mypy: disable-error-code="no-untyped-call"
"""torch at scale: sharded models, pipelines over processes, mixed precision, loaders with state."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

import cirron_otel as ci
from cirron_otel.run import data_stalls
from cirron_otel.run.rows import rows_of
from cirron_otel.run.straggler_times import StepTimes
from frameworks.torch_programs import Program, finished_tree, steps
from helpers import ProgramRun, RunProgram, on_two_ranks, read_spool, tree_text

RANKS = """
    def sharded(torch, ci):
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.utils.checkpoint import checkpoint
        from torch.utils.data import DataLoader, TensorDataset

        class Net(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

            def forward(self, x):
                return self.last(checkpoint(self.first, x, use_reentrant=False))

        model = Net()
        mesh = init_device_mesh("cpu", (2,))
        for part in (model.first, model.last, model):
            fully_shard(part, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        for (x,) in DataLoader(TensorDataset(torch.ones(4, 4)), batch_size=2):
            with torch.autocast("cpu", torch.bfloat16):
                loss = model(x).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            ci.mark("loss", loss)

    def pipelined(torch, ci):
        from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

        rank = torch.distributed.get_rank()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
        stage = PipelineStage(model, rank, 2, torch.device("cpu"))
        schedule = ScheduleGPipe(
            stage, n_microbatches=2, loss_fn=lambda out, target: (out - target).pow(2).mean()
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in ci.batches(range(2)):
            if rank == 0:
                schedule.step(torch.ones(4, 4))
            else:
                schedule.step(target=torch.zeros(4, 4), losses=[])
            optimizer.step()
            optimizer.zero_grad()

    def train():
        import torch
        import cirron_otel as ci

        torch.distributed.init_process_group("gloo")
        ci.profile()
        torch.manual_seed(0)
        with ci.scope("sharded"):
            sharded(torch, ci)
        with ci.scope("pipelined"):
            pipelined(torch, ci)
        health = ci.health()
        assert health["swallowed_errors"] == {} and health["losses"] == {}
        ci.shutdown()
        torch.distributed.destroy_process_group()
"""

STEP = """\
      step[{0}]{1}
        data_load
{2}        optimizer_step
"""
PHASES = "        forward\n        backward\n"


@pytest.mark.slow
def test_sharded_and_pipelined_on_two_ranks(run_program: RunProgram) -> None:
    """FSDP2 with autocast and checkpointing, then a pipeline: the canonical tree on each rank.

    A shard's gathering and a recomputed forward add no phase; a stage of a pipeline has a forward
    and a backward for each micro-batch, in the step that they are part of.
    """
    shared = {"CIRRON_RUN_ID": "shared"}
    run: ProgramRun = run_program(on_two_ranks(RANKS), shared, timeout=150, measured=False)
    sharded = "  sharded\n    epoch[0]\n" + "".join(
        STEP.format(number, " {loss}", PHASES) for number in range(2)
    )
    found = tree_text(run, marks=True, without=("collective_wait", "pipelined"))
    for one in found.split("cirron.session")[1:]:
        lines = [line for line in one.splitlines(keepends=True) if line.startswith("  ")]
        assert "".join(lines).rstrip() == sharded.rstrip()
    for place in run.named("pipelined"):
        (epoch,) = run.children(place)
        first, second = run.children(epoch)
        for step, extra in ((first, 1), (second, 0)):
            names = [child.name for child in run.children(step) if child.name != "collective_wait"]
            # Before its first micro-batch a stage is called once to find out shapes.
            assert 2 <= names.count("forward") <= 2 + extra
            assert names.count("backward") == 2
            assert [names[0], names[-1]] == ["data_load", "optimizer_step"]
    assert {span.rank for span in run.named("pipelined")} == {0, 1}


# --- mixed precision and recomputation, in one process -------------------------------------------


def test_autocast_with_a_gradient_scaler() -> None:
    """A scaler's backward and step are one backward and one optimizer step; values are the same."""

    def train() -> list[float]:
        program = Program()
        scaler = torch.amp.GradScaler("cpu", enabled=True)
        losses = []
        for batch in program.loader:
            program.optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = program.loss(batch)
            scaler.scale(loss).backward()
            scaler.step(program.optimizer)
            scaler.update()
            ci.mark("loss", loss)
            losses.append(loss.item())
        return losses

    plain = train()
    ci.profile()
    assert train() == plain
    tree = finished_tree(marks=True).partition("\n")[2]  # a slow session has marks of its own
    assert tree == "  epoch[0]\n" + steps(3).rstrip("\n")


# --- loaders -------------------------------------------------------------------------------------


class Stream(IterableDataset[torch.Tensor]):
    """A stream without a length, shared out among workers."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        for index in range(number, 4, count):
            with ci.scope("read", item=index):
                item = torch.full((2,), float(index))
            yield item


def _train_on(loader: Any, epochs: int) -> None:
    model = torch.nn.Linear(2, 1)
    for _ in ci.epochs(range(epochs)):
        for x in loader:
            model(x).sum().backward()


BODY = "      data_load\n      forward\n      backward\n"


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_without_a_length(workers: int) -> None:
    """An iterable dataset has a step for each batch and none for its end, also with workers."""
    ci.profile()
    _train_on(DataLoader(Stream(), batch_size=1, num_workers=workers), 2)
    tree = finished_tree(without=("read",)) + "\n"
    loop = "".join(f"    step[{n}]\n{BODY}" for n in range(4))
    assert tree == "cirron.session\n" + "".join(f"  epoch[{n}]\n{loop}" for n in range(2))
    reads = read_spool().named("read")
    assert sorted(span.attrs["item"] for span in reads) == sorted([0, 1, 2, 3] * 2)
    if workers:
        assert {span.attrs["worker_id"] for span in reads} == {0, 1}


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning")
@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, True)])
def test_a_loader_with_state(workers: int, persistent: bool) -> None:  # noqa: FBT001 - a column
    """A StatefulDataLoader's passes, parts of passes and resumed ones come once, in place."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    data: Any = [torch.full((2,), float(n)) for n in range(4)]
    loader = stateful.StatefulDataLoader(
        data, batch_size=1, num_workers=workers, persistent_workers=persistent
    )
    ci.profile()
    model = torch.nn.Linear(2, 1)
    for number in range(3):
        for position, x in enumerate(loader):
            model(x).sum().backward()
            if number == 1 and position == 1:
                break
    state = loader.state_dict()
    resumed = stateful.StatefulDataLoader(data, batch_size=1)
    resumed.load_state_dict(state)
    ci.shutdown()
    epochs = read_spool().named("epoch")
    counts = [sum(s.name == "step" for s in read_spool().children(one)) for one in epochs]
    assert counts == [4, 2, 4]
    loop = "".join(f"    step[{n}]\n{BODY}" for n in range(4))
    part = "".join(f"    step[{n}]\n{BODY}" for n in range(2))
    tree = tree_text(read_spool()) + "\n"
    assert tree == (f"cirron.session\n  epoch[0]\n{loop}  epoch[1]\n{part}  epoch[2]\n{loop}")
    kind = importlib.import_module("torchdata.stateful_dataloader").StatefulDataLoader
    assert vars(kind)["__iter__"].__module__.startswith("torchdata")


# --- data stalls ---------------------------------------------------------------------------------


class Slow(Dataset[torch.Tensor]):
    """Data that takes its time."""

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.025)
        return torch.ones(2)


def test_a_training_that_waits_for_data_is_told_of_once() -> None:
    """Where data loading is most of a step there is one finding, with the numbers in it."""
    found: list[ci.Finding] = []
    ci.profile(on_finding=found.append)
    _train_on(DataLoader(Slow()), 1)
    ci.flush()
    ci.shutdown()
    stalls = [one for one in found if one.kind == "data_stall"]
    assert len(stalls) == 1
    attributes = stalls[0].attributes
    assert 0.3 <= attributes["cirron.data_stall.share"] <= 1
    assert attributes["cirron.data_stall.steps"] >= data_stalls.FEWEST
    assert (
        0.025 <= attributes["cirron.data_stall.data_load"] <= attributes["cirron.data_stall.step"]
    )
    assert "the training waits for its data: data_load took" in stalls[0].message
    logs = [log for one in read_spool().batches for log in one.logs or ()]
    told = [one for one in logs if one["attrs"].get("cirron.finding.kind") == "data_stall"]
    assert [one["body"] for one in told] == [stalls[0].message]


def _steps(data_s: float, total_s: float, count: int) -> list[StepTimes]:
    data, total = int(data_s * 1e9), int(total_s * 1e9)
    return [StepTimes(n, 0, total, (data, 0, 0, 0, total - data), 0) for n in range(count)]


@pytest.mark.parametrize(
    ("made", "stalls"),
    [
        (lambda: _steps(0.04, 0.1, 40), True),
        (lambda: _steps(0.02, 0.1, 100), False),  # a fifth is no stall
        (lambda: _steps(0.09, 0.1, 29), False),  # too few steps
        (lambda: _steps(0.0004, 0.0006, 1000), False),  # less than a second in all
    ],
)
def test_what_a_stall_is(made: Callable[[], list[StepTimes]], stalls: bool) -> None:  # noqa: FBT001
    """A large share of enough steps, and enough time."""
    found = data_stalls.find(made())
    assert (found is not None) is stalls


def test_first_steps_and_parts_of_steps_say_nothing() -> None:
    """The first step of an epoch, of the piece, and a step whose end is not there are left out."""
    rows = []
    for number in range(4):
        ends = f'"start_ns":0,"end_ns":50,"iteration":{number}}}'
        rows.append(f'{{"id":"d{number}","name":"data_load","parent_id":"s{number}",{ends}')
        if number < 3:
            ends = f'"index":{number - 1},"start_ns":0,"end_ns":100,"iteration":{number}}}'
            rows.append(f'{{"id":"s{number}","name":"step",{ends}')
    found = data_stalls.steps_of(rows_of(",".join(rows).encode()))
    assert [(step.iteration, step.total, step.phases[0]) for step in found] == [(2, 100, 50)]
    assert data_stalls.steps_of(rows_of(b"{broken")) == []
