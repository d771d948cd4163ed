"""Measure what looking at the run as a whole costs a training: ``make bench-run``.

    benchmarks/run_cost.py                  everything
    benchmarks/run_cost.py --quick          few and short rounds, to see that it runs
    benchmarks/run_cost.py --only sum       some groups
    benchmarks/run_cost.py --check          ends with 1 when a "must" is missed

Scopes alone against scopes with everything that is on by default (time by category, progress,
watchdog, stragglers), block by block in turn in one process; a block ends with a flush. Nobody can
switch these off, so the side without them takes them out by hand. How well stragglers are found is
``benchmarks/stragglers.py``.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from groups import measure_groups
from harness import Bench, Result, Row, child, load
from torch_hook import block, prepared

SCRIPT = Path(__file__).name
#: Steps of the training whose categories are added up.
STEPS = 40


def compare(work: str, block_s: float, pairs: int) -> Result:
    """Blocks of steps with scopes alone, and with everything on: us a step, clock and CPU."""
    _, run, count, _ = prepared(work, block_s)
    ci = load("cirron_otel")
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(pairs):
        for everything in (False, True) if pair % 2 == 0 else (True, False):
            gc.collect()
            ci.profile(frameworks=["torch"], snapshots=None, terminal="none")
            if not everything:
                _alone()
            taken[everything].append(block(run, count, ci.flush))
            steps = ci.health()["run"]["steps"]
            ci.shutdown()
            if everything != bool(steps):
                raise SystemExit(f"the ledger has {steps} steps, everything on: {everything}")
    return {"pairs": [[alone, both] for alone, both in zip(taken[False], taken[True], strict=True)]}


def _alone() -> None:
    """Leave nothing but scopes."""
    recorder = load("cirron_otel.recorder")
    rec: Any = recorder._current  # noqa: SLF001 - see the module's text
    rec.run = None
    rec.batcher.seen = None
    rec.out.watchers.clear()


def add_up() -> Result:
    """A training with data, evaluation and checkpoints: its wall time, and the categories' sum."""
    ci = load("cirron_otel")
    profiler = ci.profile(frameworks=[], terminal="none", flush_interval=0.1)
    began = time.perf_counter()

    def data() -> Any:  # noqa: ANN401 - numbers
        for number in range(STEPS):
            time.sleep(0.005)
            yield number

    for _ in ci.epochs(range(2)):
        for _ in ci.batches(data()):
            with ci.scope("forward"):
                time.sleep(0.01)
        with ci.scope("evaluation"):
            time.sleep(0.2)
        with ci.scope("checkpoint"):
            time.sleep(0.1)
    wall = time.perf_counter() - began
    ci.shutdown()
    times = profiler.health()["run"]["time"]
    return {"wall": wall, "sum": sum(times.values()) - times["startup"], "times": times}


SIDES = {"compare": compare, "sum": add_up}


def _step(bench: Bench, work: str, label: str, must: float, goal: float) -> Row:
    done = bench.rounds(
        f"run-{work}",
        SCRIPT,
        ["compare"],
        bench.pick(3, 1),
        {"work": work, "block_s": bench.pick(10, 3) / 10, "pairs": bench.pick(7, 3)},
    )
    pairs = [pair for one in done for pair in one["compare"]["pairs"]]
    clock, cpu = (
        (statistics.median(both[i] / alone[i] for alone, both in pairs) - 1) * 100 for i in (0, 1)
    )
    alone = statistics.median(alone[0] for alone, _ in pairs)
    return Row(
        f"all of the run on, {label} step",
        f"{clock:+.2f} % of {alone:.0f} us",
        "scopes alone",
        clock,
        "%",
        must,
        goal,
        note=f"in CPU time of all threads: {cpu:+.2f} %",
    )


def measure_mlp(bench: Bench) -> list[Row]:
    """A short step."""
    return [_step(bench, "mlp", "3-layer MLP", 4, 1)]


def measure_transformer(bench: Bench) -> list[Row]:
    """A longer step of many modules."""
    return [_step(bench, "transformer", "4-layer transformer", 1, 0.3)]


def measure_sum(bench: Bench) -> list[Row]:
    """Whether the categories add up to the wall time."""
    done = bench.rounds("run-sum", SCRIPT, ["sum"], bench.pick(3, 1), {})
    worst = max(abs(one["sum"]["sum"] / one["sum"]["wall"] - 1) * 100 for one in done)
    return [
        Row(
            "categories against the wall time of the loops",
            f"{worst:.2f} % apart",
            "-",
            worst,
            "%",
            1,
            0.1,
        )
    ]


GROUPS = {"mlp": measure_mlp, "transformer": measure_transformer, "sum": measure_sum}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        child(SIDES)
    else:
        sys.exit(measure_groups(__doc__ or "", GROUPS))
