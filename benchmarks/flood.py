"""A million scopes with a mark each, as fast as the program can, all of them to disk.

The parent samples the memory of the side from outside; what arrived is counted on disk afterwards,
by id.
"""

from __future__ import annotations

import statistics
import time

from harness import Bench, Result, Row, child, load, median_of, microseconds, ready, spool_rows

SCRIPT = "flood.py"
WARM_UP = 2_000
MEGABYTE = 1_000_000


def flood(library: str, n: int) -> Result:
    """``n`` pairs, to the end of ``shutdown()``."""
    ci = load(library)
    ci.profile(frameworks=[])
    for _ in range(WARM_UP):
        with ci.scope("warm"):
            ci.mark("warm", 0.5)
    ci.flush()
    ready()
    begin = time.perf_counter_ns()
    with ci.scope("step"):
        for _ in range(n):
            with ci.scope("x"):
                ci.mark("loss", 0.5)
    looped = time.perf_counter_ns()
    assists = ci.health().get("producer_assists")
    if library == "cirron_otel":
        # As long as it takes: what is asked here is whether everything arrives, and when.
        ci.shutdown(timeout=300)
    else:
        ci.shutdown()
    end = time.perf_counter_ns()
    return {
        "us": (end - begin) / n / 1e3,
        "loop_us": (looped - begin) / n / 1e3,
        "shutdown_ms": (end - looped) / 1e6,
        "producer_assists": assists,
    }


SIDES = {
    "ours": lambda n: flood("cirron_otel", n),
    "cirron-sdk": lambda n: flood("cirron", n),
}


def lost(result: Result, n: int) -> int:
    """Rows that are not on disk; a mark without its span counts as one too."""
    found = int(result["spans"].get("x", 0)) + int(result["marks"].get("loss", 0))
    warm = int(result["spans"].get("warm", 0)) + int(result["marks"].get("warm", 0))
    others = sum(result["spans"].values()) + sum(result["marks"].values()) - found - warm
    twice = found + warm + others - int(result["ids"])
    return int(2 * n - (found - twice) + result["strays"])


def measure(bench: Bench) -> list[Row]:
    """What is lost, what it takes in memory, what a pair costs."""
    n = bench.pick(1_000_000, 100_000)
    done = bench.rounds(
        "flood",
        SCRIPT,
        ["ours", "cirron-sdk"],
        bench.pick(3, 1),
        {"n": n},
        spool_rows,
        watch_memory=True,
    )
    ours = [lost(one["ours"], n) for one in done]
    peer = statistics.median(lost(one["cirron-sdk"], n) for one in done)
    work = f"{n:,} scopes with a mark"
    growth = max(one["ours"]["growth_bytes"] for one in done) / MEGABYTE
    peer_growth = max(one["cirron-sdk"]["growth_bytes"] for one in done) / MEGABYTE
    return [
        Row(
            f"{work}: rows lost",
            f"{max(ours)}",
            f"cirron-sdk {peer / (2 * n):.0%}",
            float(max(ours)),
            "rows",
            0,
            0,
        ),
        Row(
            f"{work}: memory growth",
            f"{growth:.0f} MB",
            f"cirron-sdk {peer_growth:.0f} MB",
            growth,
            "MB",
            100,
        ),
        Row(
            f"{work}: per pair, to the end of shutdown()",
            microseconds(median_of(done, "ours")),
            f"cirron-sdk {microseconds(median_of(done, 'cirron-sdk'))}",
            median_of(done, "ours"),
            "us",
            12,
            7,
        ),
    ]


if __name__ == "__main__":
    child(SIDES)
