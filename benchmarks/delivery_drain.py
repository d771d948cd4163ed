"""The memory of a process that sends a large queue, left by a collector that was dead for long."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

from counting import counted, counting
from delivery_million import Peak, spans_of
from harness import Bench, Result, Row, SideError, child

SCRIPT = "delivery_drain.py"
MEGABYTE = 1_000_000

#: A long run: steps with phases, a mark on each.
PROGRAM = """
import sys
from pathlib import Path
import cirron_otel as ci
wanted = int(sys.argv[1])
ci.profile(frameworks=[], forward="off", config={"spool_max_bytes": 4 * wanted})
for _ in ci.epochs(range(10**6)):
    for _ in ci.batches(range(2000)):
        for name in ("forward", "backward", "optimizer_step"):
            with ci.scope(name, layer="encoder.0", tokens=4096):
                ci.mark("loss", 0.123456789)
    ci.flush()
    if sum(file.stat().st_size for file in Path(".cirron/spool").iterdir()) >= wanted:
        break
ci.shutdown(timeout=300)
"""


def drain(megabytes: int, url: str) -> Result:
    """Record that much, then send it with the command line, and watch that process."""
    wanted = megabytes * MEGABYTE
    subprocess.run([sys.executable, "-c", PROGRAM, str(wanted)], check=True)
    there = spans_of(Path())
    before = counted(url)["spans"]
    begin = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-m", "cirron_otel.cli.main", "spool", "flush", "--otlp", url],
        env={**os.environ, "CIRRON_EXPORT_RATE": "0"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    peak = Peak(process.pid)
    status = process.wait()
    took = time.perf_counter() - begin
    peak_bytes = peak.stop()
    if status != 0:
        raise SideError(f"`spool flush` ended with {status}")
    return {
        "queue_bytes": there["spool_bytes"],
        "peak_bytes": peak_bytes,
        "s": took,
        "spans": there["spans"],
        "missing": there["spans"] - (counted(url)["spans"] - before),
    }


SIDES = {"ours": drain}


def measure(bench: Bench) -> list[Row]:
    """The peak, Python and everything included, and whether all of it arrived."""
    megabytes = int(os.environ.get("BENCH_QUEUE_MB", "0")) or bench.pick(1000, 30)
    with counting() as url:
        done = bench.rounds(
            "drain", SCRIPT, ["ours"], bench.pick(2, 1), {"megabytes": megabytes, "url": url}
        )
    sides = [one["ours"] for one in done]
    peak = max(float(one["peak_bytes"]) for one in sides) / MEGABYTE
    queue = statistics.median(float(one["queue_bytes"]) for one in sides) / MEGABYTE
    took = statistics.median(float(one["s"]) for one in sides)
    missing = max(abs(int(one["missing"])) for one in sides)
    spans = max(int(one["spans"]) for one in sides)
    return [
        Row(
            f"memory while a queue of {queue:,.0f} MB is sent",
            f"{peak:.0f} MB",
            "-",
            peak,
            "MB",
            150,
            80,
            note=f"the whole process; {took:.0f} s, {queue / took:.0f} MB/s of the queue, to a "
            "receiver that reads every span",
        ),
        Row(
            f"of {spans:,} spans in that queue, missing at the receiver",
            f"{missing:,}",
            "-",
            float(missing),
            "spans",
            0,
        ),
    ]


if __name__ == "__main__":
    child(SIDES)
