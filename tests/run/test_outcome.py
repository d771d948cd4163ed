"""How a run ended: one process for each way, with the exit status that it would have had anyway."""

from __future__ import annotations

import signal

import pytest

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.run.outcome import Ending
from helpers import Rows, RunProgram, StartProgram, read_spool

TRAINS = """
import os, signal, sys, time
import cirron_otel as ci
profiler = ci.profile(frameworks=[], otlp="none")
for i in ci.batches(range(4)):
    pass
{end}
"""


def outcome_of(rows: Rows) -> tuple[str | None, str | None, str | None]:
    """Outcome, type of error and signal on the session."""
    attrs = rows.one(semconv.SESSION).attrs
    names = (semconv.RUN_OUTCOME, semconv.ERROR_TYPE, semconv.RUN_SIGNAL)
    found = [attrs.get(name) for name in names]
    return found[0], found[1], found[2]


@pytest.mark.parametrize(
    ("end", "status", "outcome"),
    [
        ("", 0, ("completed", None, None)),
        ("sys.exit(0)", 0, ("completed", None, None)),
        ("raise ValueError('no')", 1, ("failed", "ValueError", None)),
        ("sys.exit(3)", 3, ("failed", "SystemExit", None)),
        ("os._exit(4)", 4, ("failed", "SystemExit", None)),
        ("raise KeyboardInterrupt", -2, ("interrupted", None, "SIGINT")),
        ("sys.exit(143)", 143, ("preempted", None, "SIGTERM")),
        ("try: sys.exit(3)\nexcept SystemExit: pass\nlist(ci.batches(range(4)))", 0,
         ("completed", None, None)),
        ("try: 1 / 0\nfinally: ci.shutdown()", 1, ("failed", "ZeroDivisionError", None)),
        ("with profiler: raise OSError('gone')", 1, ("failed", "OSError", None)),
    ],
)  # fmt: skip
def test_an_end(
    run_program: RunProgram, end: str, status: int, outcome: tuple[str | None, ...]
) -> None:
    """Each end has its word, and the exit status stays what it was (D.126)."""
    rows = run_program(TRAINS.format(end=end), expect=status, measured=False)
    assert outcome_of(rows) == outcome


@pytest.mark.parametrize(
    ("handler", "number", "status", "outcome"),
    [
        ("", signal.SIGTERM, -15, ("preempted", None, "SIGTERM")),
        ("", signal.SIGINT, -2, ("interrupted", None, "SIGINT")),
        ("signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))", signal.SIGTERM, 143,
         ("preempted", None, "SIGTERM")),
    ],
)  # fmt: skip
def test_a_signal(
    start_program: StartProgram,
    handler: str,
    number: signal.Signals,
    status: int,
    outcome: tuple[str | None, ...],
) -> None:
    """A run that was told to go says so; 143 stays 143 (D.126)."""
    waits = "print('ready', flush=True)\ntime.sleep(60)"
    process = start_program(TRAINS.format(end=f"{handler}\n{waits}"))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == status
    assert outcome_of(read_spool()) == outcome


def test_health_says_it() -> None:
    """While it runs it is running; a profiler that was shut down knows how it ended."""
    assert ci.health()["run"]["outcome"] is None
    profiler = ci.profile(frameworks=[], otlp="none")
    assert ci.health()["run"]["outcome"] == "running"
    for _ in ci.batches(range(3)):
        pass
    ci.shutdown()
    run = profiler.health()["run"]
    assert (run["outcome"], run["steps"]) == ("completed", 3)
    assert ci.health()["run"].keys() == run.keys()


def test_a_training_that_goes_on_was_not_interrupted() -> None:
    """Ctrl-C that was caught, and trained on after, is no end; SIGTERM is, if it ends then."""
    ending = Ending()
    ending.signalled("SIGINT", 5)
    assert ending.outcome(None, 6).word == "interrupted"
    assert ending.outcome(None, 60).word == "completed"
    ending.signalled("SIGTERM", 5)
    assert ending.outcome(None, 60).word == "preempted"
    assert ending.outcome(OSError(), 60) == ("preempted", "OSError", "SIGTERM")
