"""Do flushes, or garbage collections of recorded objects, hold up a training loop?

The loop does a fixed amount of pure Python, about 1 ms, so that whatever takes the interpreter
away from it shows as a longer turn. The recorded loops open five scopes and make two marks a turn.
All have the heap of a program that has imported a framework: a collection of the oldest generation
takes as long as it does there. Garbage collection runs as Python sets it up.
"""

from __future__ import annotations

import gc
import time
from array import array
from collections.abc import Callable
from typing import Any

from harness import Bench, Result, Row, child, load, median_excess, median_of, run_side, spool_rows

SCRIPT = "stall.py"
HEAP_OBJECTS = 200_000
TARGET_NS = 1_000_000
WARM_UP = 200
PARTS = 5


def busy(count: int) -> None:
    """Pure Python that allocates nothing the collector sees."""
    at = 0
    while at < count:
        at += 1


def calibrate() -> Result:
    """How much of :func:`busy` is a fifth of a millisecond here."""
    busy(200_000)
    best = None
    for _ in range(20):
        begin = time.perf_counter_ns()
        busy(20_000)
        took = time.perf_counter_ns() - begin
        best = took if best is None else min(best, took)
    return {"work": int(20_000 * TARGET_NS / PARTS / (best or 1))}


def summary(turns: array[int], collections: int) -> Result:
    """Milliseconds: median, p99.9 and maximum of the turns."""
    ordered = sorted(turns)
    return {
        "p50_ms": ordered[len(ordered) // 2] / 1e6,
        "p999_ms": ordered[-max(1, len(ordered) // 1000)] / 1e6,
        "max_ms": ordered[-1] / 1e6,
        "collections_gen2": collections,
    }


def heap() -> list[list[int]]:
    """Objects that the collector has to visit, alive for the whole run."""
    return [[number] for number in range(HEAP_OBJECTS)]


def collections() -> int:
    """Collections of the oldest generation so far."""
    return int(gc.get_stats()[2]["collections"])


def plain(n: int, work: int) -> Result:
    """The loop by itself."""
    kept = heap()
    turns = array("q", bytes(8 * n))
    before = 0
    clock = time.perf_counter_ns
    begin = clock()
    for at in range(-WARM_UP, n):
        if at == 0:
            before = collections()
        for _ in range(PARTS):
            busy(work)
        end = clock()
        if at >= 0:
            turns[at] = end - begin
        begin = end
    return {**summary(turns, collections() - before), "kept": len(kept)}


def recorded(ci: Any, n: int, work: int) -> Result:  # noqa: ANN401 - ours or the peer's module
    """The loop with five scopes and two marks a turn."""
    kept = heap()
    turns = array("q", bytes(8 * n))
    before = 0
    clock = time.perf_counter_ns
    ci.profile(frameworks=[])
    with ci.scope("epoch"):
        begin = clock()
        for at in range(-WARM_UP, n):
            if at == 0:
                before = collections()
            with ci.scope("step", index=at):
                with ci.scope("data_load"):
                    busy(work)
                with ci.scope("forward"):
                    busy(work)
                    ci.mark("loss", 0.5)
                with ci.scope("backward"):
                    busy(work)
                    ci.mark("grad_norm", 1.5)
                with ci.scope("optimizer_step"):
                    busy(work)
                busy(work)
            end = clock()
            if at >= 0:
                turns[at] = end - begin
            begin = end
        during = collections() - before
    ci.shutdown()
    return {**summary(turns, during), "kept": len(kept)}


SIDES: dict[str, Callable[..., Result]] = {
    "calibrate": calibrate,
    "plain": plain,
    "ours": lambda n, work: recorded(load("cirron_otel"), n, work),
    "cirron-sdk": lambda n, work: recorded(load("cirron"), n, work),
}


def measure(bench: Bench) -> list[Row]:
    """The excess of the recorded loop's slowest turns over the plain loop's."""
    params = {"n": bench.pick(5_000, 2_000), **run_side(SCRIPT, "calibrate", {})}
    sides = ["plain", "ours", "cirron-sdk"]
    done = bench.rounds("stall", SCRIPT, sides, bench.pick(7, 2), params, spool_rows)
    rows = []
    for key, label, must, goal in (("p999_ms", "p99.9", 0.5, 0.2), ("max_ms", "maximum", 5, 1)):
        alone = median_of(done, "plain", key)
        ours, peer = (median_excess(done, side, "plain", key) for side in sides[1:])
        rows.append(
            Row(
                f"stall of a 1 ms loop, {label}, over plain",
                f"{ours:+.2f} ms on {alone:.2f} ms",
                f"cirron-sdk {peer:+.2f} ms",
                ours,
                "ms",
                must,
                goal,
            )
        )
    return rows


if __name__ == "__main__":
    child(SIDES)
