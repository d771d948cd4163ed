"""A run of a million steps: recorded, delivered beside it, and every trace small enough to open.

Each step has its phases and a loss, in epochs of 2,000. A helper process delivers all spans, with
no export budget, to a receiver that counts them; nothing may be missing there, no trace may be
larger than ``trace_max_spans``, and neither process may grow with the run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from pathlib import Path
from typing import Any

from counting import counted, counting, digest
from harness import Bench, Result, Row, SideError, _resident_bytes, child, load

SCRIPT = "delivery_million.py"
EPOCH_STEPS = 2_000
#: Spans of a step: itself, data_load, and three phases.
STEP_SPANS = 5
MEGABYTE = 1_000_000
TRACE_MAX_SPANS = 2_000


def train(steps: int, url: str) -> Result:
    """Record so many steps while a helper sends them; how long that took, and the memory."""
    ci = load("cirron_otel")
    profiler = ci.profile(
        frameworks=[],
        terminal="none",
        forward="process",
        otlp={"endpoint": url, "signals": "traces"},
        export_rate=0,
        exit_budget=3600,
        trace_max_spans=TRACE_MAX_SPANS,
        config={"spool_max_bytes": 8_000_000_000},
    )
    phases = ("forward", "backward", "optimizer_step")
    begin = time.perf_counter()
    early = 0
    for epoch in ci.epochs(range(-(-steps // EPOCH_STEPS))):
        for _ in ci.batches(range(min(EPOCH_STEPS, steps - epoch * EPOCH_STEPS))):
            for phase in phases:
                with ci.scope(phase):
                    pass
            ci.mark("loss", 0.123456789)
        if epoch == 2:  # noqa: PLR2004 - everything is loaded and in use by then
            early = _resident_bytes(os.getpid())
    recorded = time.perf_counter() - begin
    grown = _resident_bytes(os.getpid()) - early
    peak = Peak(_helper())
    ci.shutdown(timeout=3600)
    helper_bytes = peak.stop()
    health = profiler.health()
    (state,) = health["destinations"]
    return {
        "recorded_s": recorded,
        "all_s": time.perf_counter() - begin,
        "grown_bytes": grown,
        "helper_bytes": helper_bytes,
        "waiting": state["queue_batches"] + state["rejected"] + state["gone_undelivered"],
        "lost": sum(health["losses"].values()),
    }


class Peak:
    """The most memory that another process had in use, looked at until it has gone."""

    def __init__(self, pid: int) -> None:
        self._pid, self._bytes = pid, 0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        with contextlib.suppress(OSError):
            while not self._over.is_set():
                self._bytes = max(self._bytes, _high_water(self._pid))
                self._over.wait(0.02)

    def stop(self) -> int:
        """Look no more; the bytes."""
        self._over.set()
        self._thread.join()
        return self._bytes


def _helper() -> int:
    """The helper's process id; any of our threads may have started it."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in children.read_text("ascii").split():
            if b"cirron-otel-forward" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return int(pid)
    raise SideError("there is no helper")


def _high_water(pid: int) -> int:
    """The most memory that a process had in use so far; 0 where it has ended."""
    for line in Path(f"/proc/{pid}/status").read_text("ascii").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return 0


def spans_of(directory: Path) -> Result:
    """The ids of all spans in the spool: those of the tree, and the roots of windows."""
    msgspec = load("msgspec")
    row = msgspec.defstruct("Row", [("id", str)], gc=False)
    many = (list[row], msgspec.field(default_factory=list))  # type: ignore[valid-type]
    batch = msgspec.defstruct("Batch", [("spans", *many), ("windows", *many)])
    decoder = msgspec.json.Decoder(batch)
    ids: set[int] = set()
    size = 0
    for file in directory.glob(".cirron/spool/*.json"):
        data = file.read_bytes()
        size += len(data)
        found: Any = decoder.decode(data)
        ids.update(int(one.id[:16], 16) for one in (*found.spans, *found.windows))
    return {"spool_bytes": size, **digest(ids)}


SIDES = {"ours": train}


def measure(bench: Bench) -> list[Row]:
    """What arrived, the largest trace, the memory."""
    steps = int(os.environ.get("BENCH_STEPS", "0")) or bench.pick(1_000_000, 20_000)
    with counting() as url:
        done = bench.rounds(
            "million", SCRIPT, ["ours"], 1, {"steps": steps, "url": url}, inspect=spans_of
        )
        there = counted(url)
    ours = done[0]["ours"]
    epochs = -(-steps // EPOCH_STEPS)
    expected = steps * STEP_SPANS + epochs + 1 + there["windows"]
    missing = abs(expected - there["spans"]) + abs(ours["spans"] - there["spans"])
    same = ours["mixed"] == there["mixed"] and not ours["waiting"] and not ours["lost"]
    unlinked = there["windows"] - there["linked_windows"]
    label = f"{steps:,} steps"
    return [
        Row(
            f"{label}: spans missing at the receiver",
            f"{there['spans']:,} of {expected:,} arrived",
            "-",
            float(missing) if same or missing else None,
            "spans",
            0,
            note=f"{ours['spool_bytes'] / MEGABYTE:,.0f} MB of spool, {there['requests']:,} "
            f"requests; recorded in {ours['recorded_s']:.0f} s, delivered {ours['all_s']:.0f} s "
            f"after the start; {there['received'] - there['spans']:,} sent twice",
        ),
        Row(
            f"{label}: spans of the largest trace",
            f"{there['largest']:,} in one of {there['traces']:,} traces",
            "-",
            float(there["largest"]),
            "spans",
            TRACE_MAX_SPANS,
            note=f"the session's own has {there['in_session']:,}, announcements included; it has "
            f"{there['names'].get('epoch', 0):,} epochs",
        ),
        Row(
            f"{label}: windows without a link to the session's trace",
            f"{unlinked:,} of {there['windows']:,}",
            "-",
            float(unlinked),
            "windows",
            0,
        ),
        Row(
            f"{label}: memory of the helper that delivers",
            f"{ours['helper_bytes'] / MEGABYTE:.0f} MB",
            "-",
            ours["helper_bytes"] / MEGABYTE,
            "MB",
            150,
            80,
            note="the most it had in use, the whole process",
        ),
        Row(
            f"{label}: growth of the program from the third epoch to the last",
            f"{ours['grown_bytes'] / MEGABYTE:.0f} MB",
            "-",
            ours["grown_bytes"] / MEGABYTE,
            "MB",
            100,
        ),
    ]


if __name__ == "__main__":
    child(SIDES)
