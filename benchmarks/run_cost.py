"""Measure what looking at the run as a whole costs a training: ``make bench-run``.

    benchmarks/run_cost.py                  everything
    benchmarks/run_cost.py --quick          few and short rounds, to see that it runs
    benchmarks/run_cost.py --only sum       some groups
    benchmarks/run_cost.py --check          ends with 1 when a "must" is missed

Scopes alone against scopes with everything that is on by default (time by category, progress,
watchdog, stalls, throughput), in blocks of about a second in turn, each with the flush that comes
once a second, all in one recording. Nobody can switch these off, so for the side without them they
are taken out by hand. What counts is the whole step, flush included, in CPU time of all threads: by
the median of the ratios of the pairs. Steps of torch themselves differ by some percent from block
to block, so there are many pairs, and the note says how far they lie apart. Nothing of it runs
where the training does, so what the flushes take more is shown beside it; that differs less.

``ddp`` is what a replicated model's hooks add (who waits for whom): a process group of one rank.
How well stragglers are found is ``benchmarks/stragglers.py``.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
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
    ci.profile(frameworks=["torch"], snapshots=None, terminal="none", flush_interval=3600)
    rec: Any = load("cirron_otel.recorder")._current  # noqa: SLF001 - see the module's text
    watch, seen, watchers = rec.run, rec.batcher.seen, list(rec.out.watchers)
    run(count)
    ci.flush()
    taken: dict[bool, list[dict[str, float]]] = {False: [], True: []}
    for pair in range(pairs):
        for everything in (False, True) if pair % 2 == 0 else (True, False):
            rec.run, rec.batcher.seen = (watch, seen) if everything else (None, None)
            rec.out.watchers = list(watchers) if everything else []
            before = watch.ledger.steps
            gc.collect()
            taken[everything].append(_block(run, count, ci.flush))
            if (watch.ledger.steps - before == count) != everything:
                raise SystemExit(f"the ledger has other steps than the {count} of a block")
    rec.run, rec.batcher.seen, rec.out.watchers = watch, seen, watchers
    ci.shutdown()
    return {"alone": taken[False], "both": taken[True]}


def _block(run: Callable[[int], None], count: int, flush: Callable[[], object]) -> dict[str, float]:
    """A block and its flush, us a step: by the clock, in CPU time, and the flush alone in that."""
    clock, cpu = block(run, count, lambda: None)
    flush_clock, flush_cpu = (took / count for took in block(lambda _: None, 1, flush))
    return {"clock": clock + flush_clock, "cpu": cpu + flush_cpu, "flush": flush_cpu}


def replicated(block_s: float, pairs: int) -> Result:
    """Blocks of steps of a replicated model without and with its hooks, CPU time, us a step."""
    torch, run, count, _ = prepared("replicated", block_s)
    ci = load("cirron_otel")
    ci.profile(frameworks=["torch"], snapshots=None, terminal="none", flush_interval=3600)
    rec: Any = load("cirron_otel.recorder")._current  # noqa: SLF001 - as above
    run(10)
    (look,) = [
        one for one in rec.torch_phases.newcomers
        if type(one.__self__).__name__ == "LastGradients"
    ]  # fmt: skip
    replicas = look.__self__._replicas  # noqa: SLF001 - as above
    (replica,) = replicas
    taken: dict[bool, list[float]] = {False: [], True: []}
    for pair in range(pairs):
        for hooked in (False, True) if pair % 2 == 0 else (True, False):
            replicas.clear()
            replica.remove()
            if hooked:
                replicas.append(replica)
                replica._ask_all()  # noqa: SLF001 - as above
            gc.collect()
            run(5)
            taken[hooked].append(block(run, count, lambda: None)[1])
            ci.flush()
    ci.shutdown()
    torch.distributed.destroy_process_group()
    return {"plain": taken[False], "hooked": taken[True]}


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


SIDES = {"compare": compare, "sum": add_up, "replicated": replicated}


def _step(bench: Bench, work: str, label: str, must: float, goal: float) -> list[Row]:
    done = bench.rounds(
        f"run-{work}",
        SCRIPT,
        ["compare"],
        bench.pick(3, 1),
        {"work": work, "block_s": bench.pick(10, 3) / 10, "pairs": bench.pick(15, 3)},
    )
    pairs = [
        pair
        for one in done
        for pair in zip(one["compare"]["alone"], one["compare"]["both"], strict=True)
    ]
    step = statistics.median(alone["cpu"] for alone, _ in pairs)
    added = statistics.median(both["flush"] - alone["flush"] for alone, both in pairs)
    cpu, clock = (
        [(both[name] / alone[name] - 1) * 100 for alone, both in pairs] for name in ("cpu", "clock")
    )
    middle = statistics.median(cpu)
    low, _, high = statistics.quantiles(cpu, n=4)
    told = f"all of the run on, {label} step"
    return [
        Row(
            told,
            f"{middle:+.2f} % of {step:.0f} us",
            "scopes alone",
            middle,
            "%",
            must,
            goal,
            note=f"CPU time of all threads, the flush included; half of the {len(pairs)} pairs lie "
            f"between {low:+.1f} and {high:+.1f} %; by the clock {statistics.median(clock):+.2f} %",
        ),
        Row(
            f"{told}: what flushing does more, CPU time",
            f"{added:+.2f} us of {step:.0f} us",
            "scopes alone",
            added / step * 100,
            "%",
        ),
    ]


def measure_mlp(bench: Bench) -> list[Row]:
    """A short step."""
    return _step(bench, "mlp", "3-layer MLP", 4, 1)


def measure_transformer(bench: Bench) -> list[Row]:
    """A longer step of many modules."""
    return _step(bench, "transformer", "4-layer transformer", 1, 0.3)


def measure_ddp(bench: Bench) -> list[Row]:
    """What telling a wait from a backward adds to a step of a replicated model."""
    done = bench.rounds(
        "run-ddp",
        SCRIPT,
        ["replicated"],
        bench.pick(3, 1),
        {"block_s": bench.pick(5, 1) / 10, "pairs": bench.pick(11, 3)},
    )
    plain = [one for taken in done for one in taken["replicated"]["plain"]]
    hooked = [one for taken in done for one in taken["replicated"]["hooked"]]
    added = statistics.median(b - a for a, b in zip(plain, hooked, strict=True))
    whole = statistics.median(plain)
    return [
        Row(
            "hooks on DDP's last gradients, 3-layer MLP step, CPU time",
            f"{added:+.1f} us of {whole:.0f} us",
            "scopes, without these hooks",
            added / whole * 100,
            "%",
        )
    ]


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


GROUPS = {
    "mlp": measure_mlp,
    "transformer": measure_transformer,
    "ddp": measure_ddp,
    "sum": measure_sum,
}

if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        child(SIDES)
    else:
        sys.exit(measure_groups(__doc__ or "", GROUPS))
