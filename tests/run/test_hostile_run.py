"""What goes wrong around a run: clocks that are set, processes that stand, broken files."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cirron_otel as ci
from cirron_otel import recorder, semconv
from cirron_otel.run import heartbeat, operations
from cirron_otel.run.attempts import Attempt, _with_losses, load
from cirron_otel.run.straggler_times import StepTimes
from cirron_otel.run.straggler_watch import StragglerWatch, Told
from cirron_otel.run.watchdog import Watchdog, thresholds_of
from cirron_otel.run_state import state_file
from cirron_otel.spool import Spool
from helpers import read_spool

HOUR = 3600 * 10**9
SECOND = 10**9
MS = 10**6


def categories() -> dict[str, float]:
    """What the session says of where its time went, in s."""
    attrs = read_spool().one(semconv.SESSION).attrs
    prefix = f"{semconv.RUN_TIME}."
    return {name.removeprefix(prefix): at for name, at in attrs.items() if name.startswith(prefix)}


# --- clocks and processes that stand ------------------------------------------------------------


def test_a_clock_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """An hour forward before the first step, two back after it: no hang, and no hour in any sum."""
    monkeypatch.setattr(operations, "MARKS_EVERY_S", 0.0)
    found: list[ci.Finding] = []
    profiler = ci.profile(
        frameworks=[], otlp="none", flush_interval=60, on_finding=found.append, watchdog=30
    )
    clock = recorder._current.clock
    for hours in (1, -1):
        clock.wall_ns = lambda hours=hours: time.time_ns() + hours * HOUR
        ci.flush()
        for _ in ci.batches(range(5)):
            with ci.scope("forward"):
                time.sleep(0.002)
            ci.flush()
    ci.shutdown()
    assert found == []
    times = categories()
    session = read_spool().one(semconv.SESSION)
    assert isinstance(session.end_ns, int)
    before = session.attrs[semconv.RUN_BEFORE_PROFILE]
    wall = (session.end_ns - session.start_ns) / 1e9 + before
    assert sum(times.values()) == pytest.approx(wall, rel=0.01)
    assert times["startup"] < wall
    told: dict[str, float] = dict.fromkeys(times, 0.0)
    for mark in read_spool().marks:
        if mark.name == semconv.RUN_TIME:
            assert isinstance(mark.value, float)
            told[mark.attrs[semconv.CATEGORY]] += mark.value
    assert sum(told.values()) == pytest.approx(wall, rel=0.1)
    assert profiler.health()["run"]["outcome"] == "completed"


@pytest.mark.parametrize("hours", [-2, 0, 2])
def test_only_time_in_which_the_process_ran_is_silence(hours: int) -> None:
    """A process that stood still for an hour as a whole (SIGSTOP) has not hung; one that did has.

    Whatever the clock was set to meanwhile.
    """
    ci.profile(frameworks=[], otlp="none", flush_interval=60)
    rec = recorder._current
    dog = Watchdog(thresholds_of(True), interactive=False, interval_s=1.0)  # noqa: FBT003 - a setting

    def look(monotonic_ns: int) -> object:
        scopes = list(rec.open.values())
        now = wall + monotonic_ns + hours * HOUR * (monotonic_ns > 5 * SECOND)
        thread = rec.session.thread_id
        return dog.look(scopes, thread, now, steps=9, monotonic_ns=monotonic_ns)

    batches = iter(ci.batches(range(2)))
    next(batches)
    next(batches)  # the first one may take long
    wall = time.time_ns() - SECOND
    now = SECOND
    for _ in range(20):
        now += SECOND
        assert look(now) is None
    now += HOUR
    assert look(now) is None
    for _ in range(100):
        now += SECOND
        assert look(now) is None
    silences = []
    for _ in range(300):
        now += SECOND
        silences.append(look(now))
    (silence,) = [one for one in silences if one is not None]
    assert silence.phase == "step"  # type: ignore[attr-defined]
    ci.shutdown()


def test_words_of_ranks_are_as_old_as_their_files(tmp_path: Path) -> None:
    """A node whose clock is an hour off is not taken for one that is gone (D.126)."""
    for rank, off in ((0, 0), (1, -HOUR), (2, HOUR)):
        beat = heartbeat.Beat("r", rank, 1, f"h{rank}", 1, 7, time.time_ns() + off, 0, "step", True)  # noqa: FBT003
        heartbeat.write(tmp_path, beat)
    beats = heartbeat.read(tmp_path, "r", 3)
    said = heartbeat.described(beats, 3, beats[0].time_ns)
    assert said == "all ranks stand where they wait for each other"


# --- ranks ---------------------------------------------------------------------------------------


def steps_of(rank: int, *, slow: bool = False, attempt: int = 1) -> Told:
    """What a rank tells of 60 steps."""
    data = 12 * MS if slow else 2 * MS
    steps = [StepTimes(n, 0, 40 * MS, (data, 10 * MS, 10 * MS, 4 * MS, MS), 0) for n in range(60)]
    return Told("r", rank, attempt, f"h{rank}", 0, steps)


@pytest.mark.parametrize("left", [None, b'{"run_id":"r","ra', "earlier attempt", "another run"])
def test_three_ranks_of_which_one_is_missing(
    monkeypatch: pytest.MonkeyPatch, left: bytes | str | None
) -> None:
    """The two that are there are compared, whatever the third has left in the directory.

    Nothing, half a file, what it was in an attempt before, or a file of another run's rank.
    """
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("RANK", "0")
    ci.profile(frameworks=[], otlp="none", run_id="r", flush_interval=60)
    rec = recorder._current
    directory = Path(rec.spool.run_directory)
    state_file(directory, "r", 2, ".steps").write_bytes(msgspec.json.encode(steps_of(2, slow=True)))
    third = state_file(directory, "r", 1, ".steps")
    if isinstance(left, bytes):
        third.write_bytes(left)
    elif left is not None:
        told = steps_of(1, slow=True, attempt=0 if left == "earlier attempt" else 1)
        if left == "another run":
            told.run_id = "other"
        third.write_bytes(msgspec.json.encode(told))
    (watch,) = [one for one in rec.out.watchers if isinstance(one, StragglerWatch)]
    steps = steps_of(0).steps
    watch._tell(steps[:30])
    watch._tell(steps[30:])
    watch._compare()
    found = [one for one in ci.health()["findings"]["recent"] if one["kind"] == "straggler"]
    assert [one["attributes"][semconv.STRAGGLER_RANK] for one in found] == [2]


# --- attempts ------------------------------------------------------------------------------------


def attempt(number: int, **more: Any) -> Attempt:
    """An attempt of ten steps, each a second long."""
    facts: dict[str, Any] = {
        "outcome": "lost", "started_ns": number * HOUR, "first_iteration": 0, "last_iteration": 9,
        "times": {"compute": 10.0}, **more,
    }  # fmt: skip
    return Attempt("r", number, 0, f"s{number}", **facts)


def losses(*attempts: Attempt) -> list[int]:
    """The steps that were lost of each, by number of the attempt."""
    lengths = {one.session_id: dict.fromkeys(range(10), SECOND) for one in attempts}
    found = sorted(_with_losses(attempts, lengths), key=lambda one: one.attempt)
    assert all(one.times.get("lost", 0.0) == one.lost_steps for one in found)
    return [one.lost_steps for one in found]


def test_a_clock_that_is_set_between_attempts() -> None:
    """The later attempt is the one with the higher number, whatever its node's clock says."""
    second = attempt(2, started_ns=0, first_iteration=5)
    assert losses(attempt(1), second) == [5, 0]
    assert losses(attempt(1), second, attempt(3, started_ns=1, first_iteration=3)) == [7, 7, 0]


def test_two_programs_that_are_one_run_by_mistake() -> None:
    """One that still runs has lost nothing to another of the same run and rank."""
    assert losses(attempt(1, outcome="running"), attempt(2, outcome="running")) == [0, 0]
    assert losses(attempt(1, outcome="failed"), attempt(2, outcome="running")) == [10, 0]


def test_files_that_are_broken() -> None:
    """What a disk that was full has left of a rank's small files is no obstacle to the next."""
    directory = Path(".cirron/run")
    directory.mkdir(parents=True)
    for suffix in (".state", ".beat", ".steps"):
        for rank in range(2):
            state_file(directory, "r", rank, suffix).write_bytes(b'{"run_id":"r","rank":0')
    ci.profile(frameworks=[], otlp="none", run_id="r")
    assert ci.health()["attempt"] == 1
    assert list(ci.batches(range(3))) == [0, 1, 2]
    ci.shutdown()
    (found,) = load(Spool(Path(".cirron"), max_bytes=10**9), time.time_ns())
    assert (found.outcome, found.steps) == ("completed", 3)
    assert ci.health()["swallowed_errors"] == {}


def test_huge_numbers_of_steps() -> None:
    """A run that is far along counts on to where a number ends, and what reads it follows."""
    first = 2**63 - 6
    ci.profile(frameworks=[], otlp="none", start_iteration=first)
    assert sum(1 for _ in ci.batches(range(5))) == 5
    ci.shutdown()
    rows = read_spool()
    assert [row.iteration for row in rows.named("step")] == [first + n for n in range(5)]
    (found,) = load(Spool(Path(".cirron"), max_bytes=10**9), time.time_ns())
    assert (found.steps, found.last_iteration) == (5, first + 4)


def test_a_second_recording_of_a_process() -> None:
    """It is an account of its own: steps, outcome, progress and watchers begin anew."""
    asked: dict[str, Any] = {"frameworks": [], "otlp": "none", "run_id": "r"}

    def fails() -> None:
        with ci.profile(**asked):
            for number in ci.batches(range(5)):
                if number == 3:
                    raise ValueError("of the program")

    with pytest.raises(ValueError, match="of the program"):
        fails()
    assert recorder._current is None
    profiler = ci.profile(**asked)
    run = ci.health()["run"]
    assert (run["outcome"], run["steps"], run["progress"]) == ("running", 0, None)
    assert ci.health()["attempt"] == 2
    rec = recorder._current
    assert len({type(one) for one in rec.out.watchers}) == len(rec.out.watchers)
    for _ in ci.batches(range(2)):
        pass
    ci.shutdown()
    run = profiler.health()["run"]
    assert (run["outcome"], run["steps"]) == ("completed", 2)
    sessions = read_spool().named(semconv.SESSION)
    assert [row.attrs[semconv.RUN_OUTCOME] for row in sessions] == ["failed", "completed"]
    assert [row.attrs[semconv.RUN_STEPS] for row in sessions] == [4, 2]
