"""A training that does not move: told once, with its phase, its ranks and every stack."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.errors import ConfigurationError
from cirron_otel.findings import Finding
from cirron_otel.run import heartbeat
from cirron_otel.run.heartbeat import Beat
from cirron_otel.run.watchdog import THRESHOLDS, thresholds_of
from helpers import StartProgram, read_spool


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does; at most 20 s."""
    deadline = time.monotonic() + 20
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert condition()


def hangs_of(found: list[Finding]) -> list[Finding]:
    """The findings of hangs."""
    return [finding for finding in found if finding.kind == "hang"]


def test_a_step_that_hangs_is_told_once() -> None:
    """One finding with scopes, iteration and stacks; after it the run goes on (D.121)."""
    found: list[Finding] = []
    ci.profile(
        frameworks=[], otlp="none", flush_interval=0.02, on_finding=found.append,
        watchdog={"step": 0.1, "data_load": 0.1, "first_step": 60, "evaluation": 60},
    )  # fmt: skip
    waited = []
    for _ in ci.epochs(range(1)):
        for i in ci.batches(range(6)):
            if i == 0:
                time.sleep(0.3)  # a first step may take long: it compiles
                continue
            if i == 1:
                until(lambda: ci.health()["run"]["steps"])
            if i == 3:
                with ci.scope("backward"):
                    until(lambda: hangs_of(found))
                    time.sleep(0.1)
                    waited.append(ci.health()["run"]["hanging"])
        with ci.scope("evaluation"):
            time.sleep(0.3)  # so may an evaluation
    ci.flush()
    ci.flush()
    assert not ci.health()["run"]["hanging"]
    (hang,) = hangs_of(found)
    assert waited == [True]
    assert hang.severity == "critical"
    assert hang.attributes["cirron.hang.scopes"] == "epoch 0 > step 3 > backward"
    assert hang.attributes["cirron.hang.iteration"] == 3
    assert "test_a_step_that_hangs_is_told_once" in hang.attributes["cirron.hang.stacks"]
    assert "cirron-otel-" not in hang.attributes["cirron.hang.stacks"]
    ci.shutdown()
    rows = read_spool()
    (mark,) = [mark for mark in rows.marks if mark.name == semconv.FINDING]
    assert mark.span_id == rows.one("backward").id
    (log,) = [log for batch in rows.batches for log in batch.logs or ()]
    assert log["attrs"]["cirron.hang.phase"] == "step"
    assert log["span_id"] == rows.one("backward").id[:16]
    attrs = rows.one(semconv.SESSION).attrs
    stalled = attrs[f"{semconv.RUN_TIME}.stalled"]
    backward = rows.one("backward")
    assert isinstance(backward.end_ns, int)
    assert stalled == pytest.approx((backward.end_ns - backward.start_ns) / 1e9, rel=0.05)


def test_a_fetch_that_hangs_is_seen() -> None:
    """Waiting for data no step is open yet; what the thread stands in tells."""
    found: list[Finding] = []
    ci.profile(
        frameworks=[], otlp="none", flush_interval=0.02, on_finding=found.append, watchdog=0.1
    )

    def data() -> object:
        for i in range(4):
            if i == 2:
                until(lambda: ci.health()["run"]["steps"])
                until(lambda: hangs_of(found))
            yield i

    for _ in ci.batches(data()):  # type: ignore[call-overload]
        pass
    # The loop is over, its epoch still open: whatever comes now is no training.
    time.sleep(0.3)
    ci.shutdown()
    assert [hang.attributes["cirron.hang.phase"] for hang in hangs_of(found)] == ["data_load"]


RANKS = """
import os, sys, time
import cirron_otel as ci
ci.profile(frameworks=[], otlp="none", run_id="r", flush_interval=0.05, watchdog=0.5)
open("ready" + os.environ["RANK"], "w").close()
while not (os.path.exists("ready0") and os.path.exists("ready1")):
    time.sleep(0.01)  # both begin together, however slowly one has started
for _ in ci.epochs(range(1)):
    for i in ci.batches(range(9)):
        time.sleep(0.05)
        if i == 5:
            with ci.scope("forward" if os.environ["RANK"] == "1" else "backward"):
                while not ci.health()["findings"]["count"]:
                    time.sleep(0.05)
                time.sleep(0.5)
                print([f["message"] for f in ci.health()["findings"]["recent"]][0], flush=True)
"""


def test_the_rank_that_does_not_move_is_named(start_program: StartProgram) -> None:
    """Of two ranks one waits in its backward for the other: the other is named, by both."""
    ranks = [start_program(RANKS, {"RANK": str(rank), "WORLD_SIZE": "2"}) for rank in range(2)]
    said = [process.communicate(timeout=60)[0] for process in ranks]
    for rank, message in enumerate(said):
        assert message.startswith(f"rank {rank} has not moved for"), message
        assert "; rank 1 on " in message
        assert "does not move, in epoch 0 > step 5 > forward; rank 0 waits for it" in message


def beat(rank: int, **more: object) -> Beat:
    """A beat of a rank that waits for the others at iteration 7, 1 s old."""
    facts: dict[str, object] = {
        "run_id": "r", "rank": rank, "attempt": 1, "host": f"h{rank}", "pid": 1, "iteration": 7,
        "time_ns": 99 * 10**9, "since_ns": 0, "where": "step 7 > backward", "waits": True, **more,
    }  # fmt: skip
    return Beat(**facts)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ({"iteration": 6}, "rank 2 on h2 does not move (at iteration 6), in step 7 > backward"),
        ({"waits": False}, "rank 2 on h2 does not move, in step 7 > backward"),
        ({"outcome": "failed"}, "rank 2 on h2 does not move (ended (failed))"),
        ({"time_ns": 9 * 10**9}, "rank 2 on h2 does not move (not heard of for 1:31), in step"),
    ],
)
def test_who_is_to_blame(odd: dict[str, object], said: str) -> None:
    """Ranks that ended or fell silent, then those behind, then those that do not wait."""
    beats = [beat(0), beat(1), beat(2, **odd)]
    text = heartbeat.described(beats, 3, 100 * 10**9)
    assert text.startswith(said)
    assert text.endswith("; ranks 0, 1 wait for it")


def test_nobody_to_blame() -> None:
    """Where all wait for each other it says that, and where nothing is known, nothing."""
    assert heartbeat.described([beat(0)], 2, 0) == ""
    assert "all ranks" in heartbeat.described([beat(0), beat(1)], 2, 100 * 10**9)


def test_thresholds() -> None:
    """Off, the defaults, one for steps, or by phase; all else is refused with what is right."""
    assert thresholds_of(False) == {}  # noqa: FBT003 - a setting's value
    assert thresholds_of(True) == THRESHOLDS  # noqa: FBT003 - as above
    assert thresholds_of(10_000)["evaluation"] == 10_000
    assert thresholds_of({"step": "30"})["step"] == 30
    for wrong in ({"stap": 1}, {"step": "x"}, {"step": 0}):
        with pytest.raises(ConfigurationError, match=r"watchdog = .*first_step"):
            ci.profile(watchdog=wrong)
