"""What fan-out takes out of a training step: two OTLP receivers, by thread or by helper process.

As in ``torch_hook.py`` everything that is compared runs in one process, block by block in turn:
the spool alone, then with each way to deliver. A block is long enough for the forwarder to be at
work in most of it, and ends with a flush; what then still waits is delivered after it.

Of a run's first 20,000 spans every one goes, at the default export budget; after these, for hours,
200 a second. The promise is about the hours, so they are measured with the burst used up before the
block, and the burst by itself for information.
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


def compare(work: str, block_s: float, blocks: int, url: str, burst: int) -> Result:
    """Microseconds per step of each block, by way; ``burst`` is that of the export budget."""
    _, run, count, _ = prepared(work, block_s)
    ci = load("cirron_otel")
    taken: dict[str, list[float]] = {way: [] for way in WAYS}
    waiting = 0
    orders = itertools.cycle(itertools.permutations(WAYS))
    for _ in range(blocks):
        for way in next(orders):
            gc.collect()
            # A directory for each block: what another one left is nothing for this one to send.
            profiler = _start(ci, way, url, burst)
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


def _start(ci: Any, way: str, url: str, burst: int) -> Any:  # noqa: ANN401 - module, profiler
    if way == "spool":
        return ci.profile(path=DIRECTORY, frameworks=["torch"])
    return ci.profile(
        path=DIRECTORY,
        frameworks=["torch"],
        forward=way,
        otlp=[f"{url}/a", f"{url}/b"],
        export_burst=burst,
        exit_budget=120,
    )


SIDES = {"ours": compare}


def _rows(  # noqa: PLR0913, PLR0917 - a row's parts
    bench: Bench, work: str, label: str, burst: int, musts: dict[str, float | None], more: str
) -> list[Row]:
    with taking() as url:
        done = bench.rounds(
            f"step-{work}-{burst}",
            SCRIPT,
            ["ours"],
            1,
            {
                "work": work,
                "block_s": bench.pick(4, 1),
                "blocks": bench.pick(7, 1),
                "url": url,
                "burst": burst,
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


MUSTS: dict[str, float | None] = {"thread": 2.0, "process": 0.5}
NONE: dict[str, float | None] = {"thread": None, "process": None}
#: So little is used up in the warm-up; and the default.
USED_UP, BURST = 100, 20_000


def measure_mlp(bench: Bench) -> list[Row]:
    """A short step; after the burst, and in it."""
    return [
        *_rows(bench, "mlp", "3-layer MLP", USED_UP, MUSTS, ""),
        *_rows(bench, "mlp", "3-layer MLP", BURST, NONE, " in the first seconds"),
    ]


def measure_transformer(bench: Bench) -> list[Row]:
    """A longer step."""
    return _rows(bench, "transformer", "4-layer transformer", USED_UP, MUSTS, "")


if __name__ == "__main__":
    child(SIDES)
