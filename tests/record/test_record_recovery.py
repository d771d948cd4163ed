"""Recovering a record whose writer died: ended honestly, kept whole; refused if it was changed."""

from __future__ import annotations

import json
import shutil
import signal
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirron_otel.errors import RecordBusyError, RecordDamagedError, RecordError
from cirron_otel.training_record.recovering.recovery import recover
from cirron_otel.training_record.writing.journal import Journal
from helpers import RunProgram, StartProgram
from journal_records import ALARM, BEGIN, START, whole_diary, whole_record, whole_rows

KILLED = (
    BEGIN
    + f"""
ALARM = {ALARM!r}
journal = Journal("run", run_start=START, run_id="r")
for step in range(0, 50, 5):
    journal.append("alarm", **{{**ALARM, "step": step}})
    journal.check(step, 1.0, {{"a": 0.5}}, {{"a": [0, 0, 0, 0]}})
"""
)


@pytest.fixture
def killed(run_program: RunProgram, tmp_path: Path) -> Path:
    """The record of a process that was killed after ten checks."""
    run_program(KILLED + "os.kill(os.getpid(), signal.SIGKILL)", expect=-9, measured=False)
    return tmp_path / "run"


def _append(path: Path, data: bytes) -> None:
    with path.open("ab") as file:
        file.write(data)


def test_after_kill_9(killed: Path) -> None:
    """All rows and lines are there (R-W5), and the end says what it is (R-W8)."""
    report = recover(killed)
    lines, rows = whole_record(killed)
    assert len(rows) == 10
    end = lines[-1]
    assert (end["interrupted"], end["recovered"], end["ended_by"]) == (True, True, "recovery")
    assert (end["steps"], end["checks"], end["counts"]["alarms"]) == (46, 10, 10)
    assert end["run_id"] == "r"
    assert (report.changed, report.events, report.rows, report.steps) == (True, 12, 10, 46)
    assert report.head == end["hash"]
    assert report.damaged == []
    assert sorted(p.name for p in killed.iterdir()) == ["diary.jsonl", "metrics.jsonl"]


def test_what_was_acknowledged_is_there(tmp_path: Path, start_program: StartProgram) -> None:
    """Killed while it writes: every line and row that a call returned for is there."""
    for number in range(4):
        run = tmp_path / f"run{number}"
        process = start_program(
            BEGIN
            + f"""
ALARM = {ALARM!r}
journal = Journal({str(run)!r}, run_start=START)
for step in range(10**6):
    journal.append("alarm", **{{**ALARM, "step": step}})
    journal.check(step, 1.0, {{"a": 0.5}}, {{"a": [0, 0, 0, 0]}})
    sys.stdout.write(f"{{step}}\\n")
    sys.stdout.flush()
"""
        )
        assert process.stdout is not None
        for _ in range(50 + 37 * number):
            last = process.stdout.readline()
        process.kill()
        rest = process.stdout.read().split("\n")[:-1]
        process.wait()
        acknowledged = int([last, *rest][-1]) + 1
        recover(run)
        lines, rows = whole_record(run)
        assert len(rows) >= acknowledged
        assert len(lines) - 2 >= len(rows)


def test_again_changes_nothing(killed: Path) -> None:
    """A second recovery finds the first one's end."""
    _append(killed / "diary.jsonl", b'{"event":"al')
    first = recover(killed)
    before = {p.name: p.read_bytes() for p in killed.iterdir()}
    second = recover(killed)
    assert {p.name: p.read_bytes() for p in killed.iterdir()} == before
    assert not second.changed
    assert (second.head, second.events, second.damaged) == (
        first.head, first.events, first.damaged,
    )  # fmt: skip


def test_what_is_broken_off_is_kept(killed: Path) -> None:
    """The half-written ends stand beside the files and are named in the end (R-W9)."""
    _append(killed / "diary.jsonl", b'{"baseline":0.5,"diag')
    _append(killed / "metrics.jsonl", b'{"step":50,"lo')
    report = recover(killed)
    lines, rows = whole_record(killed)
    assert len(rows) == 10
    assert (killed / "diary.jsonl.damaged-1").read_bytes() == b'{"baseline":0.5,"diag'
    assert (killed / "metrics.jsonl.damaged-1").read_bytes() == b'{"step":50,"lo'
    assert lines[-1]["damaged"] == report.damaged
    assert [one["bytes"] for one in report.damaged] == [21, 14]
    for one in report.damaged:
        assert one["sha256"] == sha256((killed / one["file"]).read_bytes()).hexdigest()


def test_after_a_power_failure(killed: Path) -> None:
    """Zeros at the end, and rows that never reached the disk, are losses and not crimes."""
    rows = (killed / "metrics.jsonl").read_bytes().splitlines(keepends=True)
    (killed / "metrics.jsonl").write_bytes(b"".join(rows[:7]))
    _append(killed / "diary.jsonl", b"\0" * 700)
    report = recover(killed)
    lines = whole_diary(killed)
    assert lines[-1]["rows_missing"] == report.rows_missing == 2, "the last line vouched for 9"
    assert (lines[-1]["checks"], lines[-1]["steps"]) == (7, 46)
    assert len(whole_rows(killed)) == 7
    assert (killed / "diary.jsonl.damaged-1").read_bytes() == b"\0" * 700


@pytest.mark.parametrize("name", ["diary.jsonl", "metrics.jsonl"])
def test_a_missing_line_end(killed: Path, name: str) -> None:
    """A line that lacks only its line end is whole."""
    path = killed / name
    path.write_bytes(path.read_bytes()[:-1])
    recover(killed)
    lines, rows = whole_record(killed)
    assert (len(lines), len(rows)) == (12, 10)
    assert list(killed.glob("*.damaged-*")) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=40)
@given(data=st.data())
def test_cut_anywhere(killed: Path, tmp_path: Path, data: st.DataObject) -> None:
    """Wherever a crash cut either file, the rest is ended and nothing that was there is gone."""
    run = tmp_path / "cut"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(killed, run)
    diary = (killed / "diary.jsonl").read_bytes()
    first = diary.index(b"\n") + 1
    cut = data.draw(st.integers(first, len(diary)))
    metrics = (killed / "metrics.jsonl").read_bytes()
    cut_metrics = data.draw(st.integers(0, len(metrics)))
    (run / "diary.jsonl").write_bytes(diary[:cut])
    (run / "metrics.jsonl").write_bytes(metrics[:cut_metrics])
    recover(run)
    whole_record(run)
    for name, was in (("diary.jsonl", diary[:cut]), ("metrics.jsonl", metrics[:cut_metrics])):
        kept = [path.read_bytes() for path in run.glob(f"{name}.damaged-*")]
        now = (run / name).read_bytes()
        assert now.startswith(was[: len(was) - len(kept[0])] if kept else was)
        assert not kept or was.endswith(kept[0])


def _edit(path: Path, change: Any) -> None:
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(change(lines)))


CRIMES: dict[str, tuple[str, Any]] = {
    "edited": ("diary.jsonl", lambda n: [n[0], n[1].replace(b"conv1", b"conv2"), *n[2:]]),
    "last line edited": ("diary.jsonl", lambda n: [*n[:-1], n[-1].replace(b"conv1", b"conv2")]),
    "removed": ("diary.jsonl", lambda n: [n[0], *n[2:]]),
    "swapped": ("diary.jsonl", lambda n: [n[0], n[2], n[1], *n[3:]]),
    "twice": ("diary.jsonl", lambda n: [*n, n[-1]]),
    "garbage in the middle": ("diary.jsonl", lambda n: [n[0], b"garbage\n", *n[1:]]),
    "a key twice": ("diary.jsonl", lambda n: [n[0], b'{"step":9,' + n[1][1:], *n[2:]]),
    "a key twice at the end": ("diary.jsonl", lambda n: [*n[:-1], b'{"step":9,' + n[-1][1:]]),
    "no run_start": ("diary.jsonl", lambda n: n[1:]),
    "row edited": ("metrics.jsonl", lambda n: [n[0], n[1].replace(b"0.5", b"0.6"), *n[2:]]),
    "row removed": ("metrics.jsonl", lambda n: [n[0], *n[2:]]),
    "vouched row edited": ("metrics.jsonl", lambda n: [*n[:8], n[8].replace(b"0.5", b"9")]),
    "garbage among rows": ("metrics.jsonl", lambda n: [n[0], b"\0\0\n", *n[1:]]),
}


@pytest.mark.parametrize("crime", CRIMES)
def test_a_changed_record_is_refused(killed: Path, crime: str) -> None:
    """What no crash does is no crash: refused, and left as it is."""
    name, change = CRIMES[crime]
    _edit(killed / name, change)
    before = {p.name: p.read_bytes() for p in killed.iterdir() if p.name != ".lock"}
    with pytest.raises(RecordDamagedError):
        recover(killed)
    assert {p.name: p.read_bytes() for p in killed.iterdir()} == before


def test_a_record_that_ended_is_refused(tmp_path: Path) -> None:
    """There is nothing to recover in it, nor where lines follow its end."""
    with Journal(tmp_path / "run", run_start=START):
        pass
    with pytest.raises(RecordError, match="ended in order"):
        recover(tmp_path / "run")
    _edit(tmp_path / "run" / "diary.jsonl", lambda lines: [*lines, lines[0]])
    with pytest.raises(RecordDamagedError, match="after the record's run_end"):
        recover(tmp_path / "run")


def test_a_living_writer_is_left_alone(tmp_path: Path, start_program: StartProgram) -> None:
    """Neither this process's journal nor another's is ended under it."""
    journal = Journal(tmp_path / "run", run_start=START)
    with pytest.raises(RecordBusyError):
        recover(tmp_path / "run")
    journal.close()
    other = start_program(
        BEGIN + 'Journal("other", run_start=START)\nprint("ready", flush=True)\ntime.sleep(60)'
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "ready\n"
    with pytest.raises(RecordBusyError):
        recover(tmp_path / "other")
    other.send_signal(signal.SIGKILL)
    other.wait()
    assert recover(tmp_path / "other").changed


@pytest.mark.parametrize("content", [None, b"", b'{"half', b"\n\n"])
def test_nothing_to_go_by(tmp_path: Path, content: bytes | None) -> None:
    """No directory, no diary, or none with a whole line, is a clear error."""
    run = tmp_path / "run"
    if content is not None:
        run.mkdir()
        (run / "metrics.jsonl").touch()
        (run / "diary.jsonl").write_bytes(content)
    with pytest.raises(RecordError, match=r"no directory|no whole event"):
        recover(run)


def test_a_link_is_not_followed(killed: Path) -> None:
    """A diary that is a symbolic link is no regular file."""
    (killed / "diary.jsonl").rename(killed / "elsewhere")
    (killed / "diary.jsonl").symlink_to("elsewhere")
    with pytest.raises(RecordError, match="no regular file"):
        recover(killed)


def test_a_recovery_that_is_killed_itself(
    killed: Path, start_program: StartProgram, tmp_path: Path
) -> None:
    """At whatever moment: afterwards the record is as before or recovered, and can be recovered."""
    _append(killed / "diary.jsonl", b'{"half')
    _append(killed / "metrics.jsonl", b'{"step":50,"lo')
    whole = tmp_path / "whole"
    shutil.copytree(killed, whole)
    recover(whole)
    for delay in (0.0, 0.001, 0.002, 0.004, 0.006, 0.01):
        run = tmp_path / f"again-{delay}"
        shutil.copytree(killed, run)
        process = start_program(
            BEGIN
            + f"""
from cirron_otel.training_record.recovering.recovery import recover
print("ready", flush=True)
recover({str(run)!r})
print("done", flush=True)
time.sleep(60)
"""
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.wait()
        report = recover(run)
        lines, rows = whole_record(run)
        assert (len(lines), len(rows)) == (12, 10)
        assert [one["bytes"] for one in report.damaged] == [6, 14]
        assert sorted(p.name for p in run.iterdir()) == sorted(p.name for p in whole.iterdir())


def test_each_step_of_a_recovery_can_be_the_last(killed: Path, tmp_path: Path) -> None:
    """The states that a recovery passes through, made by hand, each lead to the same end."""
    _append(killed / "diary.jsonl", b'{"half')
    _append(killed / "metrics.jsonl", b'{"step":50,"lo')
    states = []
    for number in range(4):
        run = tmp_path / f"state-{number}"
        shutil.copytree(killed, run)
        (run / ".lock").touch()
        if number >= 1:
            (run / "metrics.jsonl.damaged-1").write_bytes(b'{"step":50,"lo')
            (run / ".diary.jsonl.damaged.77.tmp").write_bytes(b"{")
        if number >= 2:
            (run / "diary.jsonl.damaged-1").write_bytes(b'{"half')
            (run / ".metrics.jsonl.recovered.77.tmp").write_bytes(b"x")
        if number >= 3:
            metrics = run / "metrics.jsonl"
            metrics.write_bytes(metrics.read_bytes().removesuffix(b'{"step":50,"lo'))
        states.append(run)
    for run in states:
        recover(run)
        lines, _ = whole_record(run)
        assert [one["bytes"] for one in lines[-1]["damaged"]] == [6, 14]
        assert len(list(run.iterdir())) == 4


def test_a_record_of_the_other_monitor(tmp_path: Path) -> None:
    """A record without our extra fields, broken off, is ended just as well."""
    lines = whole_diary_of_another(tmp_path / "run")
    recover(tmp_path / "run")
    after = whole_diary(tmp_path / "run")
    assert after[:-1] == lines
    assert after[-1]["recovered_by"].startswith("cirron-otel")
    assert after[-1]["checks"] == 2


def whole_diary_of_another(run: Path) -> list[dict[str, Any]]:
    """Write an unfinished record the way ormas-monitor spells it; returns its lines."""
    run.mkdir()
    events = [
        {"event": "run_start", "name": "x", "record_version": 1, **START},
        {"event": "alarm", **ALARM},
    ]
    lines, prev = [], "0" * 64
    for seq, event in enumerate(events):
        body = {"seq": seq, "time": 1795983166.462 + seq, **event}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = sha256((prev + text).encode()).hexdigest()
        lines.append({**body, "prev": prev, "hash": digest})
        prev = digest
    (run / "diary.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (run / "metrics.jsonl").write_text(
        '{"step":0,"loss":NaN,"grad":{},"stuck":{}}\n{"step":5,"loss":1.0,"grad":{},"stuck":{}}\n'
    )
    return lines
