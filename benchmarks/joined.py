"""Scopes and marks through a provider that the application already has.

Both sides use the same provider with the same batch processor and exporter (:mod:`peers`); ours
has the spool beside it and drains both within the time.
"""

from __future__ import annotations

import time

from harness import (
    Bench,
    Result,
    Row,
    child,
    expect_rows,
    load,
    median_excess,
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


def ours_marks(n: int) -> Result:
    """``n`` marks of ours on an open scope, through the application's provider."""
    made, exporter = load("peers").provider(n)
    load("opentelemetry.trace").set_tracer_provider(made)
    ci = load("cirron_otel")
    ci.profile(frameworks=[])
    with ci.scope("step"):
        for _ in range(WARM_UP):
            ci.mark("warm", 0.5)
        ci.flush()
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(n):
            ci.mark("loss", 0.5)
        looped = time.perf_counter_ns()
        ci.flush()
        made.force_flush()
        result = timed(n, begin, looped, cpu)
    ci.shutdown()
    made.shutdown()
    return {**result, "exported_events": exporter.events}


def otel_events(n: int) -> Result:
    """The OTel SDK: ``n`` events on an open span."""
    made, exporter = load("peers").provider(n)
    tracer = made.get_tracer("bench")
    with tracer.start_as_current_span("step") as span:
        for _ in range(WARM_UP):
            span.add_event("warm", {"value": 0.5})
        cpu, begin = time.process_time_ns(), time.perf_counter_ns()
        for _ in range(n):
            span.add_event("loss", {"value": 0.5})
        looped = time.perf_counter_ns()
        made.force_flush()
        result = timed(n, begin, looped, cpu)
    made.shutdown()
    return {**result, "exported_events": exporter.events}


SIDES = {
    "ours-scope": ours_scopes,
    "otel-scope": otel_scopes,
    "ours-mark": ours_marks,
    "otel-event": otel_events,
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
    n = bench.pick(30_000, 6_000)
    done = bench.rounds(
        "joined-mark",
        SCRIPT,
        ["ours-mark", "otel-event"],
        bench.pick(11, 2),
        {"n": n},
        lambda at: spool_rows(at) if (at / ".cirron").exists() else {},
    )
    expect_rows(done, "ours-mark", "marks", "loss", n)
    return [
        Row(
            "mark, joined provider, over add_event",
            microseconds(median_of(done, "ours-mark")),
            f"add_event {microseconds(median_of(done, 'otel-event'))}",
            median_excess(done, "ours-mark", "otel-event"),
            "us",
            1.0,
            0.5,
        )
    ]


if __name__ == "__main__":
    child(SIDES)
