"""Every destination hangs: does a call in the program get slower, and how long does its end take?

Three destinations, the platform and two OTLP receivers, take connections and requests and never
answer.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from array import array
from typing import Any

from harness import Bench, Result, Row, child, load
from receivers import hanging

SCRIPT = "delivery_hang.py"
WARM_UP = 1_000
BUDGET_S = 3.0
#: Pure Python between two calls, as a program has: about a fifth of a millisecond.
WORK = 4_000
WAYS = ("thread", "process")

#: Says when it was done with its own work; what then passes is the end of the interpreter.
PROGRAM = """
import sys, time
import cirron_otel as ci
way, url, budget = sys.argv[1], sys.argv[2], float(sys.argv[3])
ci.profile(
    frameworks=[], forward=way, exit_budget=budget, otlp=[f"{url}/a", f"{url}/b"],
    config={"api_key": "key", "api_endpoint": url},
)
for k in range(100):
    with ci.scope("x"):
        ci.mark("loss", 0.5)
ci.flush()
time.sleep(1)
print(time.monotonic(), flush=True)
"""


def profile(way: str, url: str) -> Any:  # noqa: ANN401 - the module
    """Ours, recording, with destinations that hang or with none."""
    ci = load("cirron_otel")
    if way == "none":
        ci.profile(frameworks=[])
    else:
        ci.profile(
            frameworks=[],
            forward=way,
            exit_budget=0,
            otlp=[f"{url}/a", f"{url}/b"],
            config={"api_key": "key", "api_endpoint": url},
        )
    return ci


def calls(way: str, url: str, seconds: float) -> Result:
    """The length of each single scope and mark of a loop, in microseconds."""
    ci = profile(way, url)
    took, clock = array("q"), time.perf_counter_ns
    end = 0.0
    turn = -WARM_UP
    while turn <= 0 or time.perf_counter() < end:
        if turn == 0:
            end = time.perf_counter() + seconds
        at = 0
        while at < WORK:
            at += 1
        begin = clock()
        with ci.scope("x"):
            pass
        scoped = clock()
        ci.mark("loss", 0.5)
        marked = clock()
        if turn > 0:
            took.append(scoped - begin)
            took.append(marked - scoped)
        turn += 1
    destinations = ci.health()["destinations"]
    ci.shutdown()
    ordered = sorted(took)
    return {
        "calls": len(ordered),
        "p50_us": ordered[len(ordered) // 2] / 1e3,
        "p9999_us": ordered[-max(1, len(ordered) // 10_000)] / 1e3,
        "max_us": ordered[-1] / 1e3,
        "destinations": len(destinations),
        "delivered": sum(one["delivered"] for one in destinations),
    }


def leave(way: str, url: str) -> Result:
    """Seconds from the last line of a program to its end, above the exit budget."""
    command = [sys.executable, "-c", PROGRAM, way, url, str(BUDGET_S)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    took = time.monotonic() - float(done.stdout)
    return {"s": took, "over_s": took - BUDGET_S, "told": "not delivered yet" in done.stderr}


SIDES = {
    **{f"calls-{way}": lambda way=way, **params: calls(way, **params) for way in ("none", *WAYS)},
    **{f"leave-{way}": lambda way=way, **params: leave(way, **params) for way in WAYS},
}


def measure_calls(bench: Bench) -> list[Row]:
    """The slowest calls beside destinations that hang, against those beside none."""
    with hanging() as url:
        done = bench.rounds(
            "calls",
            SCRIPT,
            ["calls-none", *(f"calls-{way}" for way in WAYS)],
            bench.pick(5, 1),
            {"url": url, "seconds": bench.pick(60, 2)},
        )

    def median(way: str, key: str) -> float:
        return statistics.median(float(one[f"calls-{way}"][key]) for one in done)

    rows = []
    for way in WAYS:
        states = [one[f"calls-{way}"] for one in done]
        hung = all(one["destinations"] == 3 and not one["delivered"] for one in states)  # noqa: PLR2004
        ratio = median(way, "p9999_us") / median("none", "p9999_us")
        rows.append(
            Row(
                f"slowest scope or mark (p99.99), all destinations hang, {way}",
                f"{median(way, 'p9999_us'):.1f} us, at most {median(way, 'max_us'):.0f}",
                f"none: {median('none', 'p9999_us'):.1f} us, "
                f"at most {median('none', 'max_us'):.0f}",
                ratio if hung else None,
                "times",
                1.5,
                1.0,
                note="" if hung else "the destinations did not hang",
            )
        )
    return rows


def measure_exit(bench: Bench) -> list[Row]:
    """How far past its budget a program ends."""
    with hanging() as url:
        done = bench.rounds(
            "exit", SCRIPT, [f"leave-{way}" for way in WAYS], bench.pick(5, 1), {"url": url}
        )
    rows = []
    for way in WAYS:
        sides = [one[f"leave-{way}"] for one in done]
        worst = max(float(one["over_s"]) for one in sides)
        told = all(one["told"] for one in sides)
        rows.append(
            Row(
                f"exit past its budget of {BUDGET_S:.0f} s, all destinations hang, {way}",
                f"{max(float(one['s']) for one in sides):.2f} s",
                "-",
                worst if told else None,
                "s",
                0.5,
                note="" if told else "it did not say what is left",
            )
        )
    return rows


if __name__ == "__main__":
    child(SIDES)
