"""What the journal's tests share: a start, an event, and a checker that is the seed's own text."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

#: The fields of ``run_start`` that the caller of a journal gives.
START: dict[str, Any] = {
    "model": "Sequential",
    "parameters": 1466,
    "layers": 5,
    "architecture_sha256": "a" * 64,
    "optimizer": None,
    "torch": "2.13.0",
    "config": {"check_every": 5, "sigma": 2.5},
}

#: The beginning of a program text that writes a record.
BEGIN = f"""
import os, signal, sys, time
from cirron_otel.training_record.writing.journal import Journal
START = {START!r}
"""

ALARM: dict[str, Any] = {
    "step": 3,
    "severity": "warning",
    "layer": "conv1",
    "kind": "Conv2d",
    "diagnosis": "vanishing",
    "grad_norm": 0.00123,
    "baseline": 0.5,
    "sigma": 2.5,
}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    assert len(dict(pairs)) == len(pairs), "a key stands twice"
    return dict(pairs)


def _strict(text: str) -> Any:
    def refuse(token: str) -> None:
        raise AssertionError(f"{token} is not JSON")

    return json.loads(text, object_pairs_hook=_once, parse_constant=refuse)


def whole_diary(directory: Path) -> list[dict[str, Any]]:
    """The lines of a diary; fails the test where one is no strict JSON or not chained."""
    data = (directory / "diary.jsonl").read_bytes()
    assert data.endswith(b"\n")
    lines = [_strict(line) for line in data.decode("ascii").splitlines()]
    prev = "0" * 64
    for number, line in enumerate(lines):
        body = {key: value for key, value in line.items() if key not in ("prev", "hash")}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        assert line["seq"] == number
        assert line["prev"] == prev
        prev = hashlib.sha256((prev + text).encode()).hexdigest()
        assert line["hash"] == prev, f"line {number} does not hash to its hash"
    assert lines[0]["event"] == "run_start"
    return lines


def whole_rows(directory: Path) -> list[dict[str, Any]]:
    """The metrics rows; fails the test where one is no strict JSON or its digest is wrong."""
    data = (directory / "metrics.jsonl").read_bytes()
    digest = hashlib.sha256()
    rows = []
    for raw in data.splitlines(keepends=True):
        assert raw.endswith(b"\n")
        row = _strict(raw.decode("ascii"))
        assert row["digest"] == digest.hexdigest()
        digest.update(raw)
        rows.append(row)
    return rows


def whole_record(directory: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Lines and rows of a record that has ended, its counts checked against both."""
    lines, rows = whole_diary(directory), whole_rows(directory)
    end = lines[-1]
    assert [line["event"] for line in lines].count("run_end") == 1
    assert end["event"] == "run_end"
    data = (directory / "metrics.jsonl").read_bytes()
    assert end["metrics_sha256"] == hashlib.sha256(data).hexdigest()
    assert end["checks"] == len(rows) + end.get("lost_rows", 0)
    assert end["counts"]["alarms"] == sum(line["event"] == "alarm" for line in lines)
    return lines, rows
