"""How fast spans get to a collector: ours by helper process, and the OTel SDK's own pipeline.

A program makes spans as fast as it can and then waits until all that is to come has arrived. The
collector is a real one that forgets what it took. The SDK's batch processor drops what its queue
of 2,048 has no room for: those are counted, and the rate is of what arrived.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from harness import Bench, Result, Row, child, load, median_ratio
from receivers import collector

SCRIPT = "delivery_collector.py"


def ours(n: int, url: str) -> Result:
    """Scopes with a mark, delivered by the helper, all of them (no export budget)."""
    ci = load("cirron_otel")
    profiler = ci.profile(
        frameworks=[],
        forward="process",
        otlp={"endpoint": url, "signals": "traces"},
        export_rate=0,
        exit_budget=600,
        config={"spool_max_bytes": 4_000_000_000},
    )
    begin = time.perf_counter()
    with ci.scope("step"):
        for _ in range(n):
            with ci.scope("x"):
                ci.mark("loss", 0.5)
    made = time.perf_counter() - begin
    ci.shutdown(timeout=600)
    took = time.perf_counter() - begin
    health = profiler.health()
    (state,) = health["destinations"]
    lost = state["queue_batches"] + state["rejected"] + state["gone_undelivered"]
    missing = state["refused_rows"] + state["left_out_spans"] + sum(health["losses"].values())
    return _result(n, made, took, n if lost else missing)


def sdk(n: int, url: str) -> Result:
    """The same with TracerProvider, BatchSpanProcessor and OTLPSpanExporter as they come."""
    trace = load("opentelemetry.sdk.trace")
    export = load("opentelemetry.sdk.trace.export")
    otlp = load("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    load("logging").disable()  # it says of each span that is dropped

    class Counting(otlp.OTLPSpanExporter):  # type: ignore[misc, name-defined] # comes by name
        taken = 0

        def export(self, spans: Any) -> Any:  # noqa: ANN401 - the SDK's
            answer = super().export(spans)
            if answer is export.SpanExportResult.SUCCESS:
                Counting.taken += len(spans)
            return answer

    provider = trace.TracerProvider()
    provider.add_span_processor(export.BatchSpanProcessor(Counting(endpoint=f"{url}/v1/traces")))
    tracer = provider.get_tracer("bench")
    begin = time.perf_counter()
    with tracer.start_as_current_span("step"):
        for _ in range(n):
            with tracer.start_as_current_span("x") as span:
                span.add_event("loss", {"value": 0.5})
    made = time.perf_counter() - begin
    provider.shutdown()
    return _result(n, made, time.perf_counter() - begin, n + 1 - Counting.taken)


def _result(n: int, made: float, took: float, dropped: int) -> Result:
    arrived = max(1, n - dropped)
    return {
        "us": took / arrived * 1e6,
        "per_s": arrived / took,
        "made_s": made,
        "took_s": took,
        "dropped": dropped,
    }


SIDES = {"ours": ours, "sdk": sdk}


def measure(bench: Bench) -> list[Row]:
    """The rates and what was dropped."""
    n = bench.pick(300_000, 20_000)
    with collector() as url:
        done = bench.rounds(
            "collector", SCRIPT, ["ours", "sdk"], bench.pick(5, 1), {"n": n, "url": url}
        )

    def median(side: str, key: str) -> float:
        return statistics.median(float(one[side][key]) for one in done)

    dropped = max(int(one["ours"]["dropped"]) for one in done)
    peer = median("sdk", "dropped")
    return [
        Row(
            "time per span that reached a collector, ours / OTel SDK",
            f"{median('ours', 'per_s'):,.0f} spans/s",
            f"OTel SDK {median('sdk', 'per_s'):,.0f} spans/s",
            median_ratio(done, "ours", "sdk"),
            "times",
            round(1 / 1.5, 3),
            round(1 / 3, 3),
            note=f"must and goal are 1.5 and 3 times as many spans per second; {n:,} spans",
        ),
        Row(
            f"of {n:,} spans, dropped on the way to a collector",
            f"{dropped:,}",
            f"OTel SDK {peer:,.0f} ({peer / n:.0%})",
            float(dropped),
            "spans",
            0,
            0,
        ),
    ]


if __name__ == "__main__":
    child(SIDES)
