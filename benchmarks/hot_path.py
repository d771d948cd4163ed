"""Scopes, marks and the batches loop, flat out, drained to disk within the time.

Time per operation = (loop + final flush) / n, the flush thread writing the real spool meanwhile.
"""

from __future__ import annotations

import time
from typing import Any

from harness import (
    Bench,
    Result,
    Row,
    child,
    expect_rows,
    load,
    median_of,
    median_ratio,
    microseconds,
    spool_rows,
)

SCRIPT = "hot_path.py"
WARM_UP = 2_000
WITH_SPOOL = ("ours", "cirron-sdk")


# --- sides ----------------------------------------------------------------------------------------


def library(side: str) -> Any:  # noqa: ANN401 - ours or the peer's module
    """The library of a side, recording, without hooks."""
    ci = load("cirron_otel" if side == "ours" else "cirron")
    ci.profile(frameworks=[])
    return ci


def timed(n: int, begin: int, looped: int, cpu: int) -> Result:
    """Microseconds per operation: all in all, of the loop alone, and of CPU in all threads."""
    end = time.perf_counter_ns()
    return {
        "us": (end - begin) / n / 1e3,
        "loop_us": (looped - begin) / n / 1e3,
        "cpu_us": (time.process_time_ns() - cpu) / n / 1e3,
    }


def scopes(ci: Any, n: int) -> Result:  # noqa: ANN401 - ours or the peer's module
    """``n`` scopes inside an open step."""
    with ci.scope("step"):
        for _ in range(WARM_UP):
            with ci.scope("warm"):
                pass
        ci.flush()
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(n):
            with ci.scope("x"):
                pass
        looped = time.perf_counter_ns()
        ci.flush()
        result = timed(n, begin, looped, cpu)
    ci.shutdown()
    return result


def marks(ci: Any, n: int) -> Result:  # noqa: ANN401 - ours or the peer's module
    """``n`` marks on an open step."""
    with ci.scope("step"):
        for _ in range(WARM_UP):
            ci.mark("warm", 0.5)
        ci.flush()
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(n):
            ci.mark("loss", 0.5)
        looped = time.perf_counter_ns()
        ci.flush()
        result = timed(n, begin, looped, cpu)
    ci.shutdown()
    return result


def batches(n: int) -> Result:
    """Ours: ``n`` turns of ``ci.batches``, each with its step and data_load."""
    ci = library("ours")
    for _ in ci.epochs(range(1)):
        for _ in ci.batches(range(WARM_UP), stage="evaluation"):
            pass
        ci.flush()
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in ci.batches(range(n)):
            pass
        looped = time.perf_counter_ns()
        ci.flush()
        result = timed(n, begin, looped, cpu)
    ci.shutdown()
    return result


def batches_and_scope(n: int) -> Result:
    """The peer: ``n`` turns of ``batches`` with one scope in each, for the data_load it lacks."""
    ci = library("cirron-sdk")
    for _ in ci.epochs(range(1)):
        for _ in ci.batches(range(WARM_UP)):
            with ci.scope("warm"):
                pass
        ci.flush()
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in ci.batches(range(n)):
            with ci.scope("x"):
                pass
        looped = time.perf_counter_ns()
        ci.flush()
        result = timed(n, begin, looped, cpu)
    ci.shutdown()
    return result


def otel_scopes(n: int) -> Result:
    """The OTel SDK: ``n`` spans inside an open span, the batch processor drained."""
    made, exporter = load("peers").provider(n)
    tracer = made.get_tracer("bench")
    with tracer.start_as_current_span("step"):
        for _ in range(WARM_UP):
            with tracer.start_as_current_span("warm"):
                pass
        made.force_flush()
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(n):
            with tracer.start_as_current_span("x"):
                pass
        looped = time.perf_counter_ns()
        made.force_flush()
        result = timed(n, begin, looped, cpu)
    made.shutdown()
    return {**result, "spans": {"x": exporter.spans - WARM_UP - 1}}


SIDES = {
    "ours-scope": lambda n: scopes(library("ours"), n),
    "cirron-sdk-scope": lambda n: scopes(library("cirron-sdk"), n),
    "otel-scope": otel_scopes,
    "ours-mark": lambda n: marks(library("ours"), n),
    "cirron-sdk-mark": lambda n: marks(library("cirron-sdk"), n),
    "ours-batches": batches,
    "cirron-sdk-batches": batches_and_scope,
}


# --- rows -----------------------------------------------------------------------------------------


def measure_scope(bench: Bench) -> list[Row]:
    """``with ci.scope("x")`` against cirron-sdk and against the OTel SDK."""
    n = bench.pick(50_000, 10_000)
    sides = ["ours-scope", "cirron-sdk-scope", "otel-scope"]
    done = bench.rounds("scope", SCRIPT, sides, bench.pick(11, 2), {"n": n}, _inspect)
    for side in sides:
        expect_rows(done, side, "spans", "x", n)
    ours = microseconds(median_of(done, "ours-scope"))
    rows = []
    for peer, must, goal in (("cirron-sdk", 0.75, 0.5), ("otel", 1 / 6, 1 / 10)):
        label = f"{peer} {microseconds(median_of(done, f'{peer}-scope'))}"
        ratio = median_ratio(done, "ours-scope", f"{peer}-scope")
        rows.append(Row("scope, drained", ours, label, ratio, "x", must, goal))
    return rows


def measure_mark(bench: Bench) -> list[Row]:
    """``ci.mark("loss", 0.5)`` against cirron-sdk."""
    n = bench.pick(50_000, 10_000)
    sides = ["ours-mark", "cirron-sdk-mark"]
    done = bench.rounds("mark", SCRIPT, sides, bench.pick(11, 2), {"n": n}, _inspect)
    for side in sides:
        expect_rows(done, side, "marks", "loss", n)
    return [
        Row(
            "mark, drained",
            microseconds(median_of(done, "ours-mark")),
            f"cirron-sdk {microseconds(median_of(done, 'cirron-sdk-mark'))}",
            median_ratio(done, "ours-mark", "cirron-sdk-mark"),
            "x",
            0.3,
            0.15,
        )
    ]


def measure_batches(bench: Bench) -> list[Row]:
    """``ci.batches`` per iteration against the peer's with one scope inside."""
    n = bench.pick(30_000, 6_000)
    sides = ["ours-batches", "cirron-sdk-batches"]
    done = bench.rounds("batches", SCRIPT, sides, bench.pick(11, 2), {"n": n}, _inspect)
    expect_rows(done, "ours-batches", "spans", "step", n + WARM_UP)
    expect_rows(done, "ours-batches", "spans", "data_load", n + WARM_UP)
    expect_rows(done, "cirron-sdk-batches", "spans", "batch", n + WARM_UP)
    expect_rows(done, "cirron-sdk-batches", "spans", "x", n)
    return [
        Row(
            "batches, per iteration, drained",
            microseconds(median_of(done, "ours-batches")),
            f"cirron-sdk and one scope {microseconds(median_of(done, 'cirron-sdk-batches'))}",
            median_ratio(done, "ours-batches", "cirron-sdk-batches"),
            "x",
            0.75,
            0.5,
        )
    ]


def _inspect(directory: Any) -> Result:  # noqa: ANN401 - a Path
    """What is in the spool; a side without one has counted for itself."""
    return spool_rows(directory) if (directory / ".cirron").exists() else {}


if __name__ == "__main__":
    child(SIDES)
