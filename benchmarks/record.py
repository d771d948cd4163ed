"""Measure the training record: ``make bench-record``.

    benchmarks/record.py                   everything
    benchmarks/record.py --quick           few and short rounds, to see that it runs
    benchmarks/record.py --only append     some groups
    benchmarks/record.py --check           ends with 1 when a "must" is missed

The sides of a group are processes that take turns; see benchmarks/harness.py.
"""

from __future__ import annotations

import hashlib
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from groups import measure_groups
from harness import (
    Bench,
    Result,
    Row,
    SideError,
    child,
    load,
    median_of,
    microseconds,
)
from record_verify import measure_memory, measure_start, measure_verify

SCRIPT = Path(__file__).name

#: An event as a monitor writes it, and what a record begins with.
ALARM: dict[str, Any] = {
    "step": 1200,
    "severity": "warning",
    "layer": "layer1.0.conv1",
    "kind": "Conv2d",
    "diagnosis": "vanishing",
    "grad_norm": 0.00012345678,
    "baseline": 0.51234567,
    "sigma": 2.5,
}
START: dict[str, Any] = {
    "model": "ResNet",
    "parameters": 11_173_962,
    "layers": 62,
    "architecture_sha256": "0" * 64,
    "optimizer": {"type": "SGD", "lr": 0.1},
    "torch": "2.13.0",
    "config": {"check_every": 50, "sigma": 2.5},
}
_BLOCK = 100


def _timed(append: Callable[[], object], blocks: int) -> Result:
    """Microseconds per call: the median of blocks of a hundred, and the quickest block."""
    took = []
    for _ in range(blocks):
        begin = time.perf_counter_ns()
        for _ in range(_BLOCK):
            append()
        took.append((time.perf_counter_ns() - begin) / _BLOCK / 1000)
    return {"us": statistics.median(took), "quickest_us": min(took)}


# --- append ---------------------------------------------------------------------------------------


def append_ours(blocks: int) -> Result:
    """A journal, flushed per line, with its checks and its fsync thread."""
    journal = load("cirron_otel.training_record.writing.journal").Journal("run", run_start=START)
    result = _timed(lambda: journal.append("alarm", **ALARM), blocks)
    journal.close()
    lines = Path("run/diary.jsonl").read_bytes().splitlines()
    if len(lines) != blocks * _BLOCK + 2:
        raise SideError(f"{len(lines)} lines instead of {blocks * _BLOCK + 2}")
    return result


def append_plain(blocks: int) -> Result:
    """The format as its text has it: two ``json.dumps``, a hash, a text file, a flush; no more."""
    state = {"seq": 0, "prev": "0" * 64}
    with Path("diary.jsonl").open("w", encoding="utf-8") as file:

        def append() -> None:
            body = {"seq": state["seq"], "time": round(time.time(), 3), "event": "alarm", **ALARM}
            text = json.dumps(body, sort_keys=True, separators=(",", ":"))
            digest = hashlib.sha256((str(state["prev"]) + text).encode()).hexdigest()
            file.write(json.dumps({**body, "prev": state["prev"], "hash": digest}) + "\n")
            file.flush()
            state.update(seq=int(state["seq"]) + 1, prev=digest)

        return _timed(append, blocks)


def measure_append(bench: Bench) -> list[Row]:
    """What an event costs the training's thread."""
    rounds = bench.rounds(
        "append", SCRIPT, ["ours", "plain"], bench.pick(9, 3), {"blocks": bench.pick(200, 20)}
    )
    ours = median_of(rounds, "ours")
    quickest = min(float(one["ours"]["quickest_us"]) for one in rounds)
    return [
        Row(
            "append one event, flushed",
            microseconds(ours),
            microseconds(median_of(rounds, "plain")),
            ours,
            "us",
            must=40,
            goal=15,
            note=f"peer: the plain text of the format; our quickest block {quickest:.1f} us",
        )
    ]


GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "append": measure_append,
    "verify": measure_verify,
    "start": measure_start,
    "memory": measure_memory,
}
SIDES: dict[str, Callable[..., Result]] = {
    "ours": append_ours,
    "plain": append_plain,
}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        child(SIDES)
    else:
        sys.exit(measure_groups("Measure the training record, sides in turn.", GROUPS))
