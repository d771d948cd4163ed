"""Scopes and marks through a provider that the application already has.

Both sides use the same provider with the same batch processor and exporter (:mod:`peers`); ours
has the spool beside it and drains both within the time.
"""

from __future__ import annotations

import statistics
import time

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
from hot_path import WARM_UP, otel_scopes, timed

SCRIPT = "joined.py"


def ours_scopes(n: int) -> Result:
    """``n`` scopes of ours inside an open one, through the application's provider."""
    made, exporter = load("peers").provider(n)
    load("opentelemetry.trace").set_tracer_provider(made)
    ci = load("cirron_otel")
    ci.profile(frameworks=[])
    with ci.scope("step"):
        for _ in range(WARM_UP):
            with ci.scope("warm"):
                pass
        ci.flush()
        made.force_flush()
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(n):
            with ci.scope("x"):
                pass
        looped = time.perf_counter_ns()
        ci.flush()
        made.force_flush()
        result = timed(n, begin, looped, cpu)
    ci.shutdown()
    made.shutdown()
    return {**result, "exported": exporter.spans}


def marks_in_turn(n: int, pairs: int) -> Result:
    """``pairs`` blocks of ``n`` marks of ours and of ``n`` events of the SDK's, in turn.

    In one process and from one provider, because a difference of a microsecond is less than what
    two processes differ by on a machine that is not ours alone; and in CPU time, of all threads.
    Both sides put the same event, with the same attributes, on a span that keeps the last 128; what
    becomes of it when the span ends is the same for both and is not in here. What ours writes into
    the spool is: each of our blocks ends with a flush.
    """
    made, exporter = load("peers").provider(n)
    load("opentelemetry.trace").set_tracer_provider(made)
    ci = load("cirron_otel")
    ci.profile(frameworks=[], flush_interval=3600)
    span = made.get_tracer("bench").start_span("step")
    cpu: list[list[float]] = []
    wall: list[list[float]] = []
    with ci.scope("step"):
        for _ in range(WARM_UP):
            ci.mark("warm", 0.5)
            span.add_event("warm", {"value": 0.5})
        ci.flush()
        for pair in range(pairs):
            us = {True: (0.0, 0.0), False: (0.0, 0.0)}
            for ours in (True, False) if pair % 2 == 0 else (False, True):
                begin, used = time.perf_counter_ns(), time.process_time_ns()
                if ours:
                    for _ in range(n):
                        ci.mark("loss", 0.5)
                    ci.flush()
                else:
                    for _ in range(n):
                        span.add_event("loss", {"value": 0.5})
                used = time.process_time_ns() - used
                us[ours] = used / n / 1e3, (time.perf_counter_ns() - begin) / n / 1e3
            cpu.append([us[True][0], us[False][0]])
            wall.append([us[True][1], us[False][1]])
    span.end()
    ci.shutdown()
    made.shutdown()
    return {
        "n": n * pairs,
        "pairs": cpu,
        "wall_pairs": wall,
        "exported_events": exporter.events,
    }


SIDES = {
    "ours-scope": ours_scopes,
    "otel-scope": otel_scopes,
    "marks-in-turn": marks_in_turn,
}


def measure_scope(bench: Bench) -> list[Row]:
    """A scope against ``start_as_current_span`` of the same provider."""
    n = bench.pick(30_000, 6_000)
    done = bench.rounds(
        "joined-scope",
        SCRIPT,
        ["ours-scope", "otel-scope"],
        bench.pick(11, 2),
        {"n": n},
        lambda at: spool_rows(at) if (at / ".cirron").exists() else {},
    )
    expect_rows(done, "ours-scope", "spans", "x", n)
    expect_rows(done, "otel-scope", "spans", "x", n)
    return [
        Row(
            "scope, joined provider, drained",
            microseconds(median_of(done, "ours-scope")),
            f"start_as_current_span {microseconds(median_of(done, 'otel-scope'))}",
            median_ratio(done, "ours-scope", "otel-scope"),
            "x",
            1.25,
            1.1,
        )
    ]


def measure_mark(bench: Bench) -> list[Row]:
    """A mark against ``add_event("loss", {"value": 0.5})`` of the same provider."""
    n, pairs = bench.pick(20_000, 4_000), bench.pick(15, 5)
    done = bench.rounds(
        "joined-mark",
        SCRIPT,
        ["marks-in-turn"],
        bench.pick(5, 1),
        {"n": n, "pairs": pairs},
        lambda at: spool_rows(at) if (at / ".cirron").exists() else {},
    )
    expect_rows(done, "marks-in-turn", "marks", "loss", n * pairs)
    taken = [pair for one in done for pair in one["marks-in-turn"]["pairs"]]
    walls = [pair for one in done for pair in one["marks-in-turn"]["wall_pairs"]]
    by_clock = statistics.median(ours - theirs for ours, theirs in walls)
    return [
        Row(
            "mark, joined provider, over add_event",
            microseconds(statistics.median(ours for ours, _ in taken)),
            f"add_event {microseconds(statistics.median(theirs for _, theirs in taken))}",
            statistics.median(ours - theirs for ours, theirs in taken),
            "us",
            1.0,
            0.5,
            note=f"CPU time, the flush thread's included; by the clock {by_clock:+.2f} us",
        )
    ]


if __name__ == "__main__":
    child(SIDES)
