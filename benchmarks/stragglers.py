"""Is the right rank named, and the right phase? Real ranks over gloo, one of them 20 % slower.

    python benchmarks/stragglers.py [--quick] [--ranks 2 4] [--seeds 20] [--check]

Each trial is a training of its own, recorded by each rank into one directory: the model and its
collectives are real, and each phase also sleeps for a time that varies by 5 % from step to step,
as kernels do on a device. In a trial a fifth of a step is added to one phase of one rank, drawn
by the seed. It counts as right if the recording of rank 0 ends with a finding that names this rank
and this phase, and no other. Even runs must end without any.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

PHASES = ("data", "forward", "backward", "optimizer")
#: Seconds that each phase of a step sleeps, and what is added to one of them: 20 % of a step.
LENGTHS = {"data": 0.002, "forward": 0.004, "backward": 0.008, "optimizer": 0.002}
EXTRA = 0.2 * 1.25 * sum(LENGTHS.values())
STEPS = 60
EVEN = "even"


def trial(seed: int, phase: str, world: int) -> tuple[int, dict[str, float], random.Random]:
    """The slow rank, what is added to each phase of this rank, and this rank's jitter."""
    rank = int(os.environ["RANK"])
    slow = random.Random(f"{seed}-{phase}-{world}").randrange(world)  # noqa: S311 - no secret
    added = {phase: EXTRA} if rank == slow and phase != EVEN else {}
    return slow, added, random.Random(f"{seed}-{phase}-{rank}")  # noqa: S311


def work(phase: str, added: dict[str, float], jitter: random.Random) -> None:
    """What a phase takes."""
    length = LENGTHS[phase] + added.get(phase, 0.0)
    time.sleep(max(0.0, length * jitter.gauss(1.0, 0.05)))


def rank_main(trials: list[tuple[int, str]], directory: str) -> None:  # noqa: C901 - a program
    """One rank: every trial in turn; rank 0 prints what was found in each."""
    import torch  # noqa: PLC0415 - only ranks need it
    import torch.distributed as dist  # noqa: PLC0415
    from torch import nn  # noqa: PLC0415
    from torch.nn.parallel import DistributedDataParallel  # noqa: PLC0415

    import cirron_otel as ci  # noqa: PLC0415

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()
    now: dict[str, Callable[[], None]] = {}

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(_ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(_ctx: object, gradient: torch.Tensor) -> torch.Tensor:
            now["backward"]()
            return gradient

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            now["forward"]()
            return self.second(Backward.apply(self.first(x).relu()))

    def batches() -> object:
        for _ in range(STEPS):
            now["data"]()
            yield torch.ones(8, 16)

    for number, (seed, phase) in enumerate(trials):
        slow, added, jitter = trial(seed, phase, world)
        for name in PHASES:
            now[name] = lambda name=name, added=added, jitter=jitter: work(name, added, jitter)
        dist.barrier()
        ci.profile(
            path=directory, run_id=f"trial-{number}", snapshots=None, flush_interval=0.25,
            frameworks=["torch"],
        )  # fmt: skip
        model = DistributedDataParallel(Model())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        optimizer.register_step_pre_hook(lambda *_: now["optimizer"]())
        for x in ci.batches(batches()):
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        if rank:
            ci.flush()
        dist.barrier()
        ci.flush()
        found = [
            (
                one["attributes"]["cirron.straggler.rank"],
                one["attributes"]["cirron.straggler.phase"],
            )
            for one in ci.health()["findings"]["recent"]
            if one["kind"] == "straggler"
        ]
        ci.shutdown()
        if rank == 0:
            print(json.dumps({"phase": phase, "slow": slow, "found": found}), flush=True)
    dist.destroy_process_group()


def run(world: int, seeds: int, even: int) -> list[dict[str, object]]:
    """All trials with so many ranks."""
    trials = [(seed, phase) for phase in PHASES for seed in range(seeds)]
    trials += [(seed, EVEN) for seed in range(even)]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as directory:
        spec = Path(directory) / "trials.json"
        spec.write_text(json.dumps(trials))
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank-of", str(spec)],
                env={
                    **os.environ,
                    "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world),
                    "LOCAL_WORLD_SIZE": str(world),
                    "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
                },
                stdout=subprocess.PIPE if rank == 0 else subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for rank in range(world)
        ]  # fmt: skip
        said, _ = ranks[0].communicate()
        if any(rank.wait() for rank in ranks):
            raise SystemExit(f"a rank of {world} failed")
    return [json.loads(line) for line in said.splitlines()]


def main() -> int:
    """Run the trials and print a table; 1 with ``--check`` where a must is missed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds of each")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--check", action="store_true", help="end with 1 if a must is missed")
    parser.add_argument("--rank-of", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank_of:
        spec = Path(options.rank_of)
        rank_main(json.loads(spec.read_text()), str(spec.parent))
        return 0
    seeds = 2 if options.quick else options.seeds
    missed = False
    print(f"{'ranks':>5}  {'slow in':10}  {'right':>7}  {'other findings':>14}")
    for world in options.ranks:
        results = run(world, seeds, seeds)
        right_of_all = []
        for phase in (*PHASES, EVEN):
            mine = [one for one in results if one["phase"] == phase]
            expected = [[] if phase == EVEN else [[one["slow"], phase]] for one in mine]
            right = [one["found"] == want for one, want in zip(mine, expected, strict=True)]
            false = sum(one["found"] not in ([], want)
                        for one, want in zip(mine, expected, strict=True))  # fmt: skip
            for one, good in zip(mine, right, strict=True):
                if not good:
                    print(f"not right: {one}", file=sys.stderr)
            print(f"{world:5}  {phase:10}  {sum(right):3}/{len(right):3}  {false:14}", flush=True)
            if phase == EVEN:
                missed |= not all(right)
            else:
                right_of_all += right
        missed |= sum(right_of_all) < 0.95 * len(right_of_all)
    print("must: 95 % right, none in even runs:", "MISSED" if missed else "met")
    return int(missed and options.check)


if __name__ == "__main__":
    sys.exit(main())
