"""The slow rank of a distributed training: local times, who is named, and what a person sees."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest
from click.testing import CliRunner

from cirron_otel import semconv
from cirron_otel.cli.app import cli
from cirron_otel.run import straggler
from cirron_otel.run.rows import Row
from cirron_otel.run.straggler_times import PHASES, StepTimes, Tally, rows_of
from helpers import Rows, RunProgram, on_two_ranks

MS = 1_000_000

# --- what a rank did in a step --------------------------------------------------------------------


def tallied(rows: Sequence[Row]) -> list[StepTimes]:
    """The steps in these rows."""
    tally = Tally()
    tally.add(rows)
    assert tally.settle() == []  # rows that wait for a device may still come
    return tally.settle()


def row(name: str, length: int, inside: str = "", **more: int) -> Row:
    """A closed row of step 7, ``length`` in ms; its id is its name."""
    gpu_ns = more.get("gpu")
    return Row(name, name.rstrip("0123456789"), 0, length * MS, inside or None, iteration=7,
               gpu_ns=None if gpu_ns is None else gpu_ns * MS)  # fmt: skip


def test_waiting_is_no_local_time() -> None:
    """What a backward and a forward waited for others is taken off them, and told apart (D.120)."""
    step, = tallied([
        row("data_load", 1, "step"),
        row("collective_wait", 3, "forward"),
        row("forward", 5, "step"),
        row("collective_wait1", 30, "backward"),
        row("backward", 37, "step"),
        row("optimizer_step", 4, "step"),
        row("collective_wait2", 10, "step"),
        row("step", 60),
    ])  # fmt: skip
    assert step.iteration == 7
    assert dict(zip(PHASES, step.phases, strict=True)) == {
        "data": 1 * MS, "forward": 2 * MS, "backward": 7 * MS, "optimizer": 4 * MS, "other": 3 * MS,
    }  # fmt: skip
    assert (step.total, step.wait, step.local) == (60 * MS, 43 * MS, 17 * MS)


def test_phases_inside_other_scopes_count_once() -> None:
    """Scopes of the user's, micro batches and closures of optimizers hide and double nothing."""
    step, = tallied([
        row("forward", 2, "mine"),
        row("mine", 3, "micro_batch"),
        row("backward", 4, "micro_batch"),
        row("micro_batch", 8, "step"),
        row("forward1", 5, "optimizer_step"),
        row("backward1", 6, "optimizer_step"),
        row("optimizer_step", 12, "step"),
        row("step", 21),
    ])  # fmt: skip
    assert [length // MS for length in step.phases] == [0, 7, 10, 1, 3]
    assert step.local == 21 * MS


def test_on_a_device_its_own_time_counts() -> None:
    """Where the device was timed, the program's waiting for it is no work of this rank's."""
    step, = tallied([
        row("data_load", 1, "step"),
        row("forward", 1, "step", gpu=20),
        row("step", 60),  # the rows below waited for the device
        row("collective_wait", 0, "backward", gpu=15),
        row("backward", 2, "step", gpu=40),
    ])  # fmt: skip
    assert [length // MS for length in step.phases] == [1, 20, 25, 0, 0]
    assert step.wait == 15 * MS


def test_rows_without_a_step_are_nobodys() -> None:
    """Rows outside of training steps, open ones and bytes that are no batch count for nothing."""
    tally = Tally()
    tally.add([Row("a", "forward", 0, 5), Row("b", "forward", 0, None, iteration=3)])
    tally.settle()
    assert tally.settle() == []
    assert rows_of(b"no batch") == rows_of(b"[1]") == ()
    assert [one.id for one in rows_of(b'{"spans":[{"id":"x","name":"y","start_ns":1}]}')] == ["x"]


# --- who is slow ----------------------------------------------------------------------------------


def ranks(*changes: tuple[int, str, int], world: int = 4, count: int = 60) -> straggler.Ranks:
    """Steps of 40 ms on every rank; ``changes`` add ms to a phase of a rank."""
    found = {}
    for rank in range(world):
        phases = [4 * MS, 10 * MS, 20 * MS, 4 * MS, 2 * MS]
        for slow, phase, more in changes:
            phases[PHASES.index(phase)] += more * MS * (slow == rank)
        # A little unrest that is the same in every run: no rank is always the fastest.
        steps = {}
        for number in range(count):
            unrest = (number * 7 + rank * 5) % 11 * MS // 10
            told = (phases[0] + unrest, *phases[1:])
            steps[number] = StepTimes(number, 0, 45 * MS, told, 0)  # type: ignore[arg-type]
        found[rank] = steps
    return found


def named(side: straggler.Ranks) -> list[tuple[int, str]]:
    """Who is named, and for what."""
    return [(one.rank, one.phase) for one in straggler.find(side, straggler.common(side))]


@pytest.mark.parametrize("phase", PHASES)
def test_a_slow_rank_is_named_with_its_phase(phase: str) -> None:
    """A rank that takes a fifth of a step longer is named, in each phase, and nobody else."""
    assert named(ranks((2, phase, 9))) == [(2, phase)]
    assert named(ranks((0, phase, 9), world=2)) == [(0, phase)]


def test_even_ranks_name_nobody() -> None:
    """Unrest is no straggler, neither is work that is shared out otherwise but takes as long."""
    assert named(ranks()) == []
    assert named(ranks((1, "data", 9), (1, "forward", -9))) == []


@pytest.mark.parametrize(
    ("more", "every", "told"),
    [(4, 10, True), (4, 6, False), (2, 100, False), (9, 6, True), (9, 4, False)],
)
def test_less_is_enough_where_it_is_steady(more: int, every: int, told: bool) -> None:  # noqa: FBT001
    """A rank that is a little slower in nearly all of its steps is one, too; of 45 ms 2 are not."""
    side = ranks((1, "data", more))
    even = ranks()[1]
    steps = {number: even[number] if number % every == 0 else side[1][number] for number in side[1]}
    fast = {
        number: msgspec.structs.replace(step, phases=(0, *step.phases[1:]))
        if number % every == 0
        else step
        for number, step in steps.items()
    }
    assert named({**side, 1: fast}) == ([(1, "data")] if told else [])


def test_several_slow_ranks_are_named_the_slowest_first() -> None:
    """Two slow ranks of four are both named: neither hides the other."""
    assert named(ranks((1, "data", 9), (3, "optimizer", 15))) == [(3, "optimizer"), (1, "data")]


def test_a_hiccup_names_nobody() -> None:
    """A rank that was slow in a third of its steps (it saves, say) is no straggler."""
    side = ranks()
    steps = dict(side[1])
    for number in range(0, 60, 3):
        told = steps[number]
        longer = (*told.phases[:4], told.phases[4] + 500 * MS)
        steps[number] = msgspec.structs.replace(told, phases=longer)
    assert named({**side, 1: steps}) == []


def test_too_little_is_no_evidence() -> None:
    """One rank alone, few steps, and steps that not every rank has, say nothing."""
    assert named(ranks((0, "data", 9), world=1)) == []
    assert named(ranks((0, "data", 9), count=straggler.WARMUP + straggler.FEWEST - 1)) == []
    assert named({}) == []
    side = ranks((0, "data", 9))
    odd = {number: step for number, step in side[1].items() if number % 2}
    assert len(straggler.common({**side, 1: odd})) == 28
    assert straggler.common({0: {}, 1: {}}) == []


def test_the_sentence_stands_by_itself() -> None:
    """It names rank, host, phase, by how much, and how often."""
    side = ranks((2, "backward", 9))
    (found,) = straggler.find(side, straggler.common(side))
    assert straggler.message(found, "node7") == (
        "rank 2 (host node7) is slow in its backward: it takes 8.9 ms longer than the other ranks, "
        "20% of a step of 45.0 ms, and they wait for it (50 of the last 50 steps looked at)"
    )
    told = straggler.attributes(found, "node7")
    assert told["cirron.straggler.rank"] == 2
    assert told["cirron.straggler.host"] == "node7"
    assert told["cirron.straggler.excess"] == pytest.approx(0.0089)


# --- two real ranks -------------------------------------------------------------------------------

PROGRAM = """
    import copy
    import io
    import json
    import time

    def train():
        import torch
        import torch.distributed as dist
        from torch import nn
        from torch.distributed.fsdp import fully_shard
        from torch.nn.parallel import DistributedDataParallel
        import cirron_otel as ci

        dist.init_process_group("gloo")
        torch.set_num_threads(1)
        rank = dist.get_rank()
        slow = [0.0]

        class Slow(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x.clone()

            @staticmethod
            def backward(ctx, gradient):
                time.sleep(slow[0])
                return gradient

        class Layer(nn.Module):
            def __init__(self, size=8):
                super().__init__()
                self.linear = nn.Linear(size, size)

            def forward(self, x):
                return Slow.apply(self.linear(x)).relu()

        def steps(model, count):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
            for x in ci.batches(torch.ones(count, 2, 8)):
                model(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

        def patched():
            return (torch.autograd.backward, vars(dist.Work)["wait"],
                    vars(dist)["_broadcast_coalesced"])

        before = patched()
        replica = DistributedDataParallel(nn.Sequential(Layer(), Layer(), Layer(), nn.Linear(8, 4),
                                                        nn.Linear(4, 2), nn.Linear(2, 1)))
        ci.profile(run_id="ddp", snapshots=None, flush_interval=0.2, watchdog=False)
        slow[0] = 0.012 if rank == 1 else 0.0
        steps(replica, 45)
        copy.deepcopy(replica.module)
        torch.save(replica.module.state_dict(), io.BytesIO())
        with replica.no_sync():
            replica(torch.ones(2, 8)).sum().backward()
        said = {"replica_hooks": sum(
            len(p._post_accumulate_grad_hooks or ()) for p in replica.parameters())}
        ci.flush()
        dist.barrier()
        ci.flush()
        said["ddp"] = ci.health()["findings"]["recent"]
        ci.shutdown()
        said["left_hooks"] = sum(
            len(p._post_accumulate_grad_hooks or ()) for p in replica.parameters())

        ci.profile(run_id="fsdp", snapshots=None, watchdog=False)
        model = nn.Sequential(Layer(), Layer())
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
        steps(model, 12)
        said["swallowed"] = ci.health()["swallowed_errors"]
        ci.shutdown()
        said["restored"] = [one is other for one, other in zip(before, patched())]
        if rank == 0:
            with open("said.json", "w") as file:
                json.dump(said, file)
        dist.destroy_process_group()
"""


def waits(rows: Rows, inside: str) -> list[tuple[int, int]]:
    """Rank and ms of each wait that lies directly in scopes of this name."""
    places = {span.id for span in rows.spans if span.name == inside}
    return [
        (span.rank, (span.end_ns - span.start_ns) // MS)  # type: ignore[operator]
        for span in rows.named(semconv.COLLECTIVE_WAIT)
        if span.parent_id in places
    ]


@pytest.mark.slow
def test_two_real_ranks(run_program: RunProgram) -> None:
    """The rank that is slow in its backward is named, once, while it runs and afterwards (D.120).

    Its victim's wait is told apart, with DDP and with FSDP2; copying and saving the model work,
    accumulated gradients wait for nobody, and uninstalling leaves no hook and no patch.
    """
    rows = run_program(on_two_ranks(PROGRAM), timeout=120)
    directory = rows.output_dir
    said = msgspec.json.decode((directory.parent / "said.json").read_bytes())
    assert said["swallowed"] == {}
    assert said["restored"] == [True, True, True]
    assert 0 < said["replica_hooks"] <= 4  # of twelve parameters
    assert said["left_hooks"] == 0
    found = [one for one in said["ddp"] if one["kind"] == "straggler"]
    assert [one["attributes"]["cirron.straggler.rank"] for one in found] == [1]
    assert [one["attributes"]["cirron.straggler.phase"] for one in found] == ["backward"]
    assert found[0]["severity"] == "warning"

    in_backward = waits(rows, semconv.BACKWARD)
    victim = sorted(length for rank, length in in_backward if rank == 0)
    culprit = sorted(length for rank, length in in_backward if rank == 1)
    assert victim[len(victim) // 2] > 20
    assert culprit[len(culprit) // 2] < victim[len(victim) // 2] / 2
    assert {rank for rank, length in waits(rows, semconv.FORWARD)} <= {0, 1}

    def view(session: str, *more: str) -> str:
        asked = ["traces", "view", session, "--ranks", "--spool", str(directory), *more]
        result = CliRunner().invoke(cli, asked)
        assert result.exit_code == 0, result.output
        return result.output

    session = next(
        span for span in rows.spans if span.parent_id is None
        and span.attrs["cirron.run_id"] == "ddp"
    )  # fmt: skip
    shown = view(session.id)
    assert "run ddp, attempt 1" in shown
    assert "rank 1 (host" in shown
    assert "is slow in its backward" in shown
    told = msgspec.json.decode(view(session.id, "--json").encode())
    assert [one["rank"] for one in told["ranks"]] == [0, 1]
    assert [(one["rank"], one["phase"]) for one in told["stragglers"]] == [(1, "backward")]
    sharded = next(
        span for span in rows.spans if span.parent_id is None
        and span.attrs["cirron.run_id"] == "fsdp"
    )  # fmt: skip
    assert "too few steps to tell who is slow" in view(sharded.id)
    told = msgspec.json.decode(view(sharded.id, "--json").encode())
    first, second = told["ranks"]
    assert first["backward_ns"] < second["backward_ns"]
    assert first["wait_ns"] > 20 * MS
