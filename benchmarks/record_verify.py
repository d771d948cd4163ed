"""The groups of ``benchmarks/record.py`` that verify: whole commands, as a user starts them.

The plain side does what no verifier of the format can leave out, with nothing but the standard
library: parse, canonical form, hash. Where ormas-monitor is installed (``make interop`` puts it
into ``.venv-ormas``; ``ORMAS_MONITOR`` names another), its command takes its turn, too. The records
are made here, consistent in themselves, so that every event is recomputed from the rows, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import HERE, Bench, Result, Row, SideError, child, load, median_of, quantity

SCRIPT = Path(__file__).name
_PEER = os.environ.get("ORMAS_MONITOR", str(HERE.parent / ".venv-ormas" / "bin" / "ormas-monitor"))
_COMMAND = [sys.executable, "-m", "cirron_otel.cli.main", "record"]

#: Checks before the first alarm.
_CALM = 10
_LAYERS = [f"features.layer{index // 10}.block{index % 10}.conv{index % 3}" for index in range(100)]
_CONFIG = {
    "check_every": 5,
    "patience": 4,
    "sigma": 2.5,
    "warmup": 8,
    "baseline_rate_floor": 0.1,
    "alarm_min_decades": 1.0,
    "alarm_confirmations": 2,
    "loss_spike_factor": 1.5,
    "layer_list_limit": 32,
}
_OURS = """
import re, sys
from cirron_otel.training_record.checking.verify import verify
verify(sys.argv[1])
print(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])
"""
_PLAIN = """
import hashlib, json, sys
prev, count = "0" * 64, 0
for line in open(sys.argv[1] + "/diary.jsonl"):
    event = json.loads(line)
    body = {k: v for k, v in event.items() if k not in ("prev", "hash")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    assert event["hash"] == hashlib.sha256((prev + text).encode()).hexdigest()
    prev, count = event["hash"], count + 1
print(count)
"""


class _Record:
    """A record that is being written without the library under test, in the seed's own spelling."""

    def __init__(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._file = (directory / "diary.jsonl").open("w", encoding="utf-8")
        self._prev = "0" * 64
        self.count = 0

    def put(self, event: str, **fields: object) -> None:
        time_s = round(1_795_983_485 + self.count * 0.0137, 3)
        body = {"seq": self.count, "time": time_s, "event": event, **fields}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256((self._prev + text).encode()).hexdigest()
        self._file.write(json.dumps({**body, "prev": self._prev, "hash": digest}) + "\n")
        self._prev = digest
        self.count += 1

    def close(self) -> None:
        self._file.close()


def make_record(directory: Path, events: int) -> None:
    """About ``events`` alarms and their ends, following from the rows beside them."""
    rules = load("cirron_otel.training_record.rules")
    decisions = rules.Decisions(rules.Rules.of(_CONFIG))
    draw, record = random.Random(7), _Record(directory)  # noqa: S311 - numbers to measure with
    record.put(
        "run_start", name="bench", tool="bench 1", model="Net", parameters=1, layers=len(_LAYERS),
        architecture_sha256="0" * 64, optimizer=None, python="3.11", torch="2.13.0",
        platform=platform.platform(), record_version=1, config=_CONFIG,
    )  # fmt: skip
    alarms = checks = 0
    with (directory / "metrics.jsonl").open("w", encoding="utf-8") as rows:
        while record.count < events - 1:
            loss, step = 2.3 / (1 + checks / 1000), 5 * checks
            low = [(checks + index) % 5 <= 1 and checks >= _CALM for index in range(len(_LAYERS))]
            grad = {
                name: abs(draw.gauss(1, 0.05)) * (1e-6 if small else 1e-2)
                for name, small in zip(_LAYERS, low, strict=True)
            }
            for found in decisions.check(step, loss, grad):
                fields: dict[str, Any] = {"step": step, **dict(found.exact), **dict(found.floats)}
                if found.event == "alarm":
                    fields |= {"severity": "warning", "kind": "Conv2d"}
                    alarms += 1
                record.put(found.event, **fields)
            row = {"step": step, "loss": loss, "grad": grad, "stuck": {}}
            rows.write(json.dumps(row, separators=(",", ":")) + "\n")
            checks += 1
    digest = hashlib.sha256((directory / "metrics.jsonl").read_bytes()).hexdigest()
    record.put(
        "run_end", steps=5 * checks, checks=checks, counts={"alarms": alarms}, metrics_sha256=digest
    )
    record.close()


def _timed(command: list[str]) -> tuple[str, float]:
    """What a command prints, and how long it took, its start counted."""
    begin = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    took = time.perf_counter() - begin
    if done.returncode != 0:
        raise SideError((done.stderr.strip() or done.stdout.strip())[-300:])
    return done.stdout, took


def _verified(path: str, events: int) -> Result:
    said, took = _timed([*_COMMAND, "verify", path, "--json"])
    if json.loads(said)["events"] != events:
        raise SideError(f"not all of {events} events were verified")
    return {"s": took}


def verify_ours(path: str, events: int) -> Result:
    """The whole command, as a user gives it."""
    return _verified(path, events)


def verify_diary(path: str, events: int) -> Result:
    """The same of the diary alone: nothing to recompute."""
    return _verified(f"{path}/alone.jsonl", events)


def verify_plain(path: str, events: int) -> Result:
    """Parse, canonical form and hash in the standard library."""
    said, took = _timed([sys.executable, "-c", _PLAIN, path])
    if int(said) != events:
        raise SideError(f"{said.strip()} lines instead of {events}")
    return {"s": took}


def verify_peer(path: str, events: int) -> Result:
    """The command of ormas-monitor, which recomputes no events."""
    said, took = _timed([_PEER, "verify", path])
    if f"{events}" not in said.replace(",", ""):
        raise SideError(said[-300:])
    return {"s": took}


def measure_verify(bench: Bench) -> list[Row]:
    """A record of a hundred thousand events."""
    events = bench.pick(100_000, 5_000)
    with tempfile.TemporaryDirectory(prefix="bench-record-") as name:
        make_record(Path(name), events)
        data = (Path(name) / "diary.jsonl").read_bytes()
        (Path(name) / "alone.jsonl").write_bytes(data)
        sides = ["verify_ours", "verify_diary", "verify_plain"]
        if Path(_PEER).exists():
            sides.append("verify_peer")
        given = {"path": name, "events": data.count(b"\n")}
        rounds = bench.rounds("verify", SCRIPT, sides, bench.pick(7, 2), given)
    plain = median_of(rounds, "verify_plain", "s")
    size = f"{events:,} events ({len(data) / 1e6:.0f} MB)"
    rows = []
    for side, work in (
        ("verify_ours", f"verify {size}, every event recomputed"),
        ("verify_diary", f"verify {size}, the diary alone"),
    ):
        ours = median_of(rounds, side, "s")
        ratio = statistics.median(one[side]["s"] / one["verify_plain"]["s"] for one in rounds)
        text = f"{ratio:.2f} of parsing, canonical form and hash in the standard library alone"
        rows.append(Row(work, quantity(ours, "s"), quantity(plain, "s"), ours, "s", 2.0, 1.0, text))
    if "verify_peer" in sides:
        ours, peer = (median_of(rounds, side, "s") for side in ("verify_ours", "verify_peer"))
        work = f"{size}: ormas-monitor verify, recomputing nothing"
        rows.append(Row(work, quantity(ours, "s"), quantity(peer, "s"), peer, "s"))
    return rows


def start(times: int) -> Result:
    """A whole command on a record of a few dozen events: little but the start."""
    with tempfile.TemporaryDirectory(prefix="bench-record-") as name:
        make_record(Path(name), 3)
        return {
            key: statistics.median(_timed([*_COMMAND, *words, name])[1] for _ in range(times))
            for key, words in (("verify", ["verify"]), ("show", ["show"]))
        }


def start_nothing(times: int) -> Result:
    """The start of Python itself."""
    return {"s": statistics.median(_timed([sys.executable, "-c", ""])[1] for _ in range(times))}


def measure_start(bench: Bench) -> list[Row]:
    """What every command of a record pays."""
    rounds = bench.rounds(
        "start", SCRIPT, ["start", "start_nothing"], bench.pick(5, 1), {"times": 5}
    )
    nothing = quantity(median_of(rounds, "start_nothing", "s"), "s")
    rows = []
    for name in ("verify", "show"):
        ours = median_of(rounds, "start", name)
        work = f"record {name} of a small record, whole command"
        note = "peer: the start of Python alone"
        rows.append(Row(work, quantity(ours, "s"), nothing, ours, "s", 0.15, 0.08, note))
    return rows


def memory(megabytes: int) -> Result:
    """The peak of a verification of a large diary, MB."""
    record = _Record(Path("large"))
    for index in range(megabytes * 500):
        record.put("no_gradients", step=index, severity="warning", message="x" * 1750)
    record.close()
    # It has no run_end: made to be large, not to be good.
    said, _ = _timed([sys.executable, "-c", _OURS, "large/diary.jsonl"])
    return {"peak_mb": int(said) / 1024}


def measure_memory(bench: Bench) -> list[Row]:
    """Memory does not depend on how long a run was."""
    megabytes = bench.pick(1000, 20)
    rounds = bench.rounds("memory", SCRIPT, ["memory"], 1, {"megabytes": megabytes})
    ours = median_of(rounds, "memory", "peak_mb")
    work = f"memory while verifying {megabytes} MB"
    return [Row(work, quantity(ours, "MB"), "-", ours, "MB", 60, 30)]


SIDES = {
    "verify_ours": verify_ours,
    "verify_diary": verify_diary,
    "verify_plain": verify_plain,
    "verify_peer": verify_peer,
    "start": start,
    "start_nothing": start_nothing,
    "memory": memory,
}

if __name__ == "__main__":
    child(SIDES)
