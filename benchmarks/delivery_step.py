"""What fan-out takes out of a training step: two OTLP receivers, by thread or by helper process.

As in ``torch_hook.py`` everything that is compared runs in one process, block by block in turn:
the spool alone, then with each way to deliver. A block is long enough for the forwarder to be at
work in most of it, and ends with a flush; what then still waits is delivered after it.
"""

from __future__ import annotations

import gc
import itertools
import shutil
import statistics
from typing import Any

from harness import Bench, Result, Row, SideError, child, load
from receivers import counts, taking
from torch_hook import block, prepared

SCRIPT = "delivery_step.py"
WAYS = ("spool", "thread", "process")
DIRECTORY = "block"


def compare(work: str, block_s: float, blocks: int, url: str, rate: float) -> Result:
    """Microseconds per step of each block, by way; ``rate`` is the export budget, 0 for none."""
    _, run, count, _ = prepared(work, block_s)
    ci = load("cirron_otel")
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    waiting = 0
    orders = itertools.cycle(itertools.permutations(WAYS))
    for _ in range(blocks):
        for way in next(orders):
            gc.collect()
            # A directory for each block: what another one left is nothing for this one to send.
            profiler = _start(ci, way, url, rate)
            run(max(1, count // 10))  # the helper starts, connections are made
            ci.flush()
            taken[way].append(block(run, count, ci.flush)[0])
            ci.shutdown()
            states = profiler.health()["destinations"]
            if len(states) != (0 if way == "spool" else 2):
                raise SideError(f"{len(states)} destinations with {way}")
            waiting += sum(one["queue_batches"] for one in states)
            shutil.rmtree(DIRECTORY)
    return {"count": count, "us": taken, "waiting": waiting}


def _start(ci: Any, way: str, url: str, rate: float) -> Any:  # noqa: ANN401 - module, profiler
    if way == "spool":
        return ci.profile(path=DIRECTORY, frameworks=["torch"])
    return ci.profile(
        path=DIRECTORY,
        frameworks=["torch"],
        forward=way,
        otlp=[f"{url}/a", f"{url}/b"],
        export_rate=rate,
        exit_budget=120,
    )


SIDES = {"ours": compare}


def _rows(  # noqa: PLR0913, PLR0917 - a row's parts
    bench: Bench, work: str, label: str, rate: float, musts: dict[str, float | None], more: str
) -> list[Row]:
    with taking() as url:
        done = bench.rounds(
            f"step-{work}-{rate:.0f}",
            SCRIPT,
            ["ours"],
            1,
            {
                "work": work,
                "block_s": bench.pick(4, 1),
                "blocks": bench.pick(7, 1),
                "url": url,
                "rate": rate,
            },
        )
        requests, size = counts(url)
    us: dict[str, list[float]] = done[0]["ours"]["us"]
    if not requests or done[0]["ours"]["waiting"]:
        raise SideError(f"{requests} requests, {done[0]['ours']['waiting']} batches left")
    plain = statistics.median(us["spool"])
    rows = []
    for way in WAYS[1:]:
        ratios = [one / alone for one, alone in zip(us[way], us["spool"], strict=True)]
        excess = (statistics.median(ratios) - 1) * 100
        rows.append(
            Row(
                f"{label} step with OTLP fan-out{more}, {way}",
                f"{excess:+.2f} % of {plain:.0f} us",
                "the spool alone",
                excess,
                "%",
                musts[way],
                None if musts[way] is None else 0.0,
                note=f"to two receivers; of both ways {requests} requests, {size / 1e6:.0f} MB",
            )
        )
    return rows


def measure_mlp(bench: Bench) -> list[Row]:
    """A short step; with the export budget's default, and, for information, without one."""
    musts: dict[str, float | None] = {"thread": 2.0, "process": 0.5}
    none: dict[str, float | None] = {"thread": None, "process": None}
    return [
        *_rows(bench, "mlp", "3-layer MLP", 200.0, musts, ""),
        *_rows(bench, "mlp", "3-layer MLP", 0.0, none, " of every span"),
    ]


def measure_transformer(bench: Bench) -> list[Row]:
    """A longer step."""
    musts: dict[str, float | None] = {"thread": 2.0, "process": 0.5}
    return _rows(bench, "transformer", "4-layer transformer", 200.0, musts, "")


if __name__ == "__main__":
    child(SIDES)
