"""What the hours went into: categories against the scopes themselves, and against the wall time."""

from __future__ import annotations

import itertools

import pytest

from cirron_otel import semconv
from cirron_otel.batch import SpanRecord
from cirron_otel.run.ledger import CATEGORIES, CHARGED, Ledger
from cirron_otel.run.rows import Row
from helpers import Rows, RunProgram

#: Two epochs with everything that is told apart, more than one flush long.
TRAINING = """
import threading, time
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=0.03, otlp="none", terminal="summary")
time.sleep(0.03)
with ci.scope("checkpoint"):
    time.sleep(0.01)

def aside():
    with ci.scope("checkpoint"):
        time.sleep(0.2)

def data(n):
    for i in range(n):
        time.sleep(0.004)
        yield i

for epoch in ci.epochs(range(2)):
    threading.Thread(target=aside).start()
    for i in ci.batches(data(10)):
        with ci.scope("forward"):
            time.sleep(0.002)
            if i == 3:
                with ci.scope("compile"):
                    time.sleep(0.02)
        with ci.scope("mine"), ci.scope("backward"):
            time.sleep(0.002)
            with ci.scope("collective_wait"):
                time.sleep(0.003)
        if i == 5:
            with ci.scope("evaluation"):
                for _ in ci.batches(data(2), stage="evaluation"):
                    with ci.scope("checkpoint"):
                        time.sleep(0.005)
    time.sleep(0.03)
    for i in ci.batches(data(3), stage="evaluation"):
        time.sleep(0.002)
    with ci.scope("checkpoint"):
        time.sleep(0.02)
time.sleep(0.03)
print(ci.health()["run"]["outcome"])
ci.shutdown()
"""

_OF_NAME = {
    "data_load": "data", "step": "compute", "compile": "compile",
    "collective_wait": "collective_wait", "checkpoint": "checkpoint", "evaluation": "evaluation",
}  # fmt: skip


def expected(rows: Rows) -> dict[str, float]:
    """The categories, told by asking of every millisecond what the innermost scope is, in s."""
    session = rows.one(semconv.SESSION)
    by_id = {row.id: row for row in rows.spans}
    mine = [row for row in rows.spans if row.thread_id == session.thread_id]
    edges = sorted({edge for row in mine for edge in (row.start_ns, _end(row))})
    steps = [row for row in mine if row.name == "step" and isinstance(row.iteration, int)]
    first = min(row.start_ns for row in steps)
    found = dict.fromkeys(CATEGORIES, 0.0)
    for begin, end in itertools.pairwise(edges):
        over = [row for row in mine if row.start_ns <= begin and _end(row) >= end]
        path = _path(max(over, key=lambda row: _depth(row, by_id)), by_id)
        names = [row.name for row in path]
        kind = "startup" if begin < first else "other"
        for name in reversed(names):
            kind = _OF_NAME.get(name, kind)
            if name in {"checkpoint", "evaluation"}:
                break
        found[kind] += (end - begin) / 1e9
    return found


def _end(row: SpanRecord) -> int:
    assert isinstance(row.end_ns, int)
    return row.end_ns


def _path(row: SpanRecord, by_id: dict[str, SpanRecord]) -> list[SpanRecord]:
    """The scopes around a row, itself first."""
    found = [row]
    while found[-1].parent_id is not None:
        found.append(by_id[found[-1].parent_id])
    return found


def _depth(row: SpanRecord, by_id: dict[str, SpanRecord]) -> int:
    return len(_path(row, by_id))


def times_of(rows: Rows) -> dict[str, float]:
    """The categories as the session says them, in s."""
    attrs = rows.one(semconv.SESSION).attrs
    return {name: attrs.get(f"{semconv.RUN_TIME}.{name}", 0.0) for name in CATEGORIES}


def test_the_categories_are_those_of_the_scopes(run_program: RunProgram) -> None:
    """Each category is what its scopes took but for what was charged inside; the sum is the wall.

    What goes to metrics and to the terminal says the same, and the first step alone is a warm-up.
    """
    training = run_program(TRAINING)
    session = training.one(semconv.SESSION)
    before = session.attrs[semconv.RUN_BEFORE_PROFILE]
    wall = (_end(session) - session.start_ns) / 1e9
    said = times_of(training)
    found = expected(training)
    found["startup"] += before
    for name, length in found.items():
        assert said[name] == pytest.approx(length, abs=0.01 * wall), name
    assert sum(said.values()) == pytest.approx(wall + before, rel=0.01)
    assert session.attrs[semconv.RUN_STEPS] == 20

    told = dict.fromkeys(CATEGORIES, 0.0)
    for mark in training.marks:
        if mark.name == semconv.RUN_TIME:
            assert isinstance(mark.value, float)
            told[mark.attrs[semconv.CATEGORY]] += mark.value
    assert told == pytest.approx(said, abs=1e-5)

    assert training.stdout == "running\n"
    lines = training.stderr.splitlines()
    assert "completed after" in lines[0]
    assert "20 training steps" in lines[0]
    shown = [line.split()[0] for line in lines[1:-1]]
    assert shown == [name for name in CATEGORIES if said[name] > 0]
    assert lines[-1].strip().startswith("goodput")

    tagged = [row.iteration for row in training.named("step") if semconv.WARMUP in row.attrs]
    assert tagged == [0]


def row(name: str, span: str, parent: str | None, start: int, end: int, **more: int) -> Row:
    """A row of thread 1."""
    return Row(span, name, start, end, parent, more.pop("thread_id", 1), **more)


def test_a_row_that_waits_for_the_device() -> None:
    """A wait that is told after its step was charged is taken out of the step."""
    ledger = Ledger(0, 1, "session")
    ledger.add([row("step", "s", "epoch", 0, 100, iteration=0)])
    ledger.settle(lambda scope: "gone" if scope == "b" else "outside")
    ledger.add([row("collective_wait", "w", "b", 50, 51, gpu_ns=30)])
    for _ in range(2):  # its backward may only be on its way
        ledger.settle(lambda scope: "gone" if scope == "b" else "outside")
    times = ledger.times(100)
    assert (times["compute"], times["collective_wait"]) == (70, 30)
    assert sum(times.values()) == 100


def test_steps_on_another_thread_than_the_session() -> None:
    """The thread that trains counts, and from its first step on no other."""
    ledger = Ledger(0, 1, "session")
    ledger.add([row("step", "s", "e", 10, 40, iteration=0, thread_id=2)])
    ledger.add([row("step", "t", "e", 10, 40, iteration=0, thread_id=3)])
    ledger.settle(lambda _: "outside")
    times = ledger.times(50)
    assert (times["startup"], times["compute"], times["other"]) == (10, 30, 10)


def test_a_silence_is_no_compute() -> None:
    """From the last movement to the end of the innermost scope around it the run was stalled."""
    ledger = Ledger(0, 1, "session")
    ledger.add([row("step", "a", "e", 0, 10, iteration=0)])
    ledger.stalled(30, 50)
    ledger.add([
        row("evaluation", "v", "s", 25, 90, iteration=1),
        row("step", "s", "e", 20, 100, iteration=1),
    ])  # fmt: skip
    ledger.settle(lambda _: "outside")
    times = ledger.times(100)
    assert times["stalled"] == 60
    assert times["evaluation"] == 5
    assert times["compute"] == 25
    assert sum(times.values()) == 100


def test_a_silence_in_a_wait_that_is_told_later() -> None:
    """A wait for other ranks is recorded when it is over; its silence counts once, as such."""
    ledger = Ledger(0, 1, "session")
    ledger.add([row("step", "a", "e", 0, 10, iteration=0)])
    ledger.stalled(30, 50)
    ledger.add([
        row("collective_wait", "w", "b", 32, 90, iteration=1),
        row("backward", "b", "s", 30, 91, iteration=1),
        row("step", "s", "e", 20, 100, iteration=1),
    ])  # fmt: skip
    ledger.settle(lambda _: "outside")
    times = ledger.times(100)
    assert (times["stalled"], times["collective_wait"]) == (58, 0)
    assert sum(times.values()) == 100


def test_charged_names_are_known() -> None:
    """Every scope that is charged has one of the names that are written."""
    words = {value for name, value in vars(semconv).items() if name.isupper()}
    assert words >= CHARGED
