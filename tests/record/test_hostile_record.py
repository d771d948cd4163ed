"""A record among kills, full disks, second Ctrl-Cs, hostile values, and readers that look on."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from cirron_otel.clock import Clock
from cirron_otel.errors import RecordError
from cirron_otel.training_record.checking.anchors import Anchor
from cirron_otel.training_record.checking.reader import as_of_now
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.recovering.recovery import recover
from cirron_otel.training_record.seal import seal
from cirron_otel.training_record.writing import journal as journals
from cirron_otel.training_record.writing.journal import Journal
from helpers import RunProgram
from journal_records import ALARM, BEGIN, START, whole_diary, whole_record
from record.tampering import read, rewrite
from record.writing import RUN_START, write

STUCK = {"a": [0, 0, 0, 0]}


def _journal(directory: Path, **more: Any) -> Journal:
    return Journal(directory, **{"run_start": START, "strict": False, **more})


def _failed(directory: Path, **more: Any) -> list[str]:
    return [check.name for check in verify(directory, **more).checks if check.status == "fail"]


# --- an end between an event and its row ----------------------------------------------------------


def test_a_kill_between_an_event_and_its_row(run_program: RunProgram, tmp_path: Path) -> None:
    """Events go before the row of their check; a record that ends in between can be sealed."""
    run_program(
        BEGIN
        + f"""
journal = Journal("run", run_start=START)
journal.check(0, 1.0, {{"a": 0.5}}, {{}})
journal.append("alarm", **{ALARM!r})
os.kill(os.getpid(), signal.SIGKILL)
""",
        expect=-9,
        measured=False,
    )
    recover(tmp_path / "run")
    assert verify(tmp_path / "run").check("rows").status == "note"
    seal(tmp_path / "run")
    assert verify(tmp_path / "run").ok


def test_an_exception_between_an_event_and_its_row(tmp_path: Path) -> None:
    """So can one that an exception ended there; one that came to its end may not lack the row."""
    for name, error, status in (("raised", ValueError("x"), "note"), ("whole", None, "fail")):
        journal = _journal(tmp_path / name)
        journal.check(0, 1.0, {"a": 0.5}, STUCK)
        journal.append("alarm", **ALARM)
        journal.close(error)
        assert verify(tmp_path / name).check("rows").status == status


def test_a_row_that_was_lost_after_its_events(tmp_path: Path) -> None:
    """As many steps may lack their row as the next row says were lost, and no more."""
    run = tmp_path / "run"
    journal = _journal(run)
    journal.check(0, 1.0, {"a": 0.5}, STUCK)
    journal.append("alarm", **{**ALARM, "step": 5})
    journal.append("alarm", **{**ALARM, "step": 5, "layer": "b"})
    assert journal.check(5, 1.0, {"a": "no number"}, STUCK) is None  # type: ignore[dict-item]
    journal.check(10, 1.0, {"a": 0.5}, STUCK)
    journal.close()
    assert verify(run).check("rows").status == "note"
    seal(run)
    (run / "record.json").unlink()
    events = read(run)
    events.insert(1, {**events[1], "step": 4})
    rewrite(run, events)
    assert "rows" in _failed(run)


def test_the_last_row_was_lost(tmp_path: Path) -> None:
    """run_end says so, then."""
    journal = _journal(tmp_path / "run")
    journal.check(0, 1.0, {"a": 0.5}, STUCK)
    journal.append("alarm", **ALARM)
    journal.check(3, 1.0, {"a": object()}, STUCK)  # type: ignore[dict-item]
    line = journal.close()
    assert line is not None
    assert line["lost_rows"] == 1
    assert verify(tmp_path / "run").ok


# --- a second Ctrl-C ------------------------------------------------------------------------------


class _InterruptedClock(Clock):
    """Raises once, as a signal handler does in the middle of anything."""

    armed = False

    def now(self) -> int:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt
        return super().now()


def test_ctrl_c_while_the_end_is_written(tmp_path: Path) -> None:
    """It gets through, and the record has its end all the same."""
    clock = _InterruptedClock()
    journal = _journal(tmp_path / "run", clock=clock)
    clock.armed = True
    with pytest.raises(KeyboardInterrupt):
        journal.close()
    assert whole_diary(tmp_path / "run")[-1]["event"] == "run_end"


def test_ctrl_c_while_the_record_is_closed(tmp_path: Path) -> None:
    """It gets through, and files and lock are let go: the next journal may go on here."""

    def interrupt(_: object) -> None:
        if journal.run_end is not None:
            raise KeyboardInterrupt

    run = tmp_path / "run"
    journal = _journal(run, fsync_interval_s=None)
    journal._on_anchor = interrupt
    with pytest.raises(KeyboardInterrupt):
        journal.close()
    assert not (run / ".lock").exists()
    _journal(run, append=True).close()
    assert verify(run).ok


class _Alarm(BaseException):
    """What the handler raises."""


def test_exceptions_of_a_signal_handler_anywhere(tmp_path: Path) -> None:
    """Lines that were acknowledged are there, once, in a whole chain, wherever it strikes."""

    def strike(_number: int, _frame: FrameType | None) -> None:
        raise _Alarm

    run, acknowledged, strikes = tmp_path / "run", set(), 0
    before = signal.signal(signal.SIGALRM, strike)
    try:
        journal = _journal(run)
        for step in range(300):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-6 * (7 + step))
                for number in range(10):
                    text = "x" * (1000 * (number % 3))
                    line = journal.append("alarm", **{**ALARM, "step": step, "text": text})
                    if line is not None:
                        acknowledged.add(line["hash"])
            except _Alarm:
                strikes += 1
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        journal.close()
    finally:
        signal.signal(signal.SIGALRM, before)
    lines = whole_diary(run)
    assert acknowledged <= {line["hash"] for line in lines}
    assert strikes > 0
    assert lines[-1]["event"] == "run_end"


# --- what a value may be --------------------------------------------------------------------------


def test_a_line_longer_than_readers_take(tmp_path: Path) -> None:
    """It is refused and counted: written, it would make the record one that does not verify."""
    run = tmp_path / "run"
    journal = _journal(run)
    assert journal.append("sink_error", sink="s", error="x" * (16 << 20)) is None
    assert journal.check(0, 1.0, {}, {}, note="x" * (16 << 20)) is None
    assert journal.append("sink_error", sink="s", error="x" * (15 << 20)) is not None
    assert journal.health()["losses"] == {"record_event_refused": 1, "record_row_refused": 1}
    journal.check(1, 1.0, {}, {})
    journal.close()
    assert _failed(run) == []


def test_a_negative_norm(tmp_path: Path) -> None:
    """None is written, and a reader that meets one names it and goes on."""
    run = tmp_path / "run"
    journal = write(run, 12, close=False, strict=False)
    assert journal.check(1000, 1.0, {"a": -0.5}, STUCK) is None
    assert journal.check(1000, 1.0, {"a": -float("inf")}, STUCK) is not None
    journal.close()
    path = run / "metrics.jsonl"
    rows = path.read_text().splitlines(keepends=True)
    row = json.loads(rows[3])
    row["grad"]["a"] = -0.5
    rows[3] = json.dumps(row) + "\n"
    path.write_text("".join(rows))
    assert "grad of a is negative" in verify(run).check("rows").message


@pytest.mark.parametrize("floor", [-0.1, 1.1, 1e308])
def test_a_rate_that_is_none(tmp_path: Path, floor: float) -> None:
    """A config with which nothing can be computed is named, whatever the numbers are."""
    config = {**RUN_START["config"], "baseline_rate_floor": floor}
    write(tmp_path / "run", run_start={**RUN_START, "config": config})
    check = verify(tmp_path / "run").check("replay")
    assert check.status == "skipped"
    assert "baseline_rate_floor is not between 0 and 1" in check.message


def test_a_seal_has_the_version_of_its_record(tmp_path: Path) -> None:
    """However long run_start is, and whatever stands before it."""
    run = tmp_path / "run"
    _journal(run, run_start={**START, "notes": "x" * (2 << 20)}).close()
    path = run / "diary.jsonl"
    path.write_bytes(b"\n" + path.read_bytes())
    assert seal(run)["record_version"] == 1
    assert _failed(run) == []


def test_a_path_that_is_none(tmp_path: Path) -> None:
    """It is a clear error like any other place where no record can be."""
    with pytest.raises(RecordError, match="null byte"):
        _journal(tmp_path / "a\0b")


# --- a start that died ----------------------------------------------------------------------------


@pytest.mark.parametrize("left", [("diary.jsonl", "metrics.jsonl"), ("diary.jsonl",), ()])
def test_a_start_that_was_killed_breaks_no_chain(tmp_path: Path, left: tuple[str, ...]) -> None:
    """It had set the record aside and written no line: the next start goes on with that record."""
    run = tmp_path / "run"
    _journal(run).close()
    before = read(run)
    _journal(run, append=True).close()
    for name in ("diary.jsonl", "metrics.jsonl"):
        (run / name).unlink()
    for name in left:
        (run / name).touch()
    if left == ("diary.jsonl",):  # nobody can say what its metrics were
        with pytest.raises(RecordError, match="regular file"):
            _journal(run, append=True)
        return
    _journal(run, append=True).close()
    start = read(run)[0]
    assert start["previous_head"] == before[-1]["hash"]
    assert start["segment"] == 2
    assert verify(run).check("previous").status == "pass"


# --- readers that look on -------------------------------------------------------------------------


def test_two_files_as_of_one_moment(tmp_path: Path) -> None:
    """What is written after the first look is not seen in either file."""
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        path.write_bytes(b"before")
    with paths[0].open("rb", buffering=0) as first, paths[1].open("rb", buffering=0) as second:
        now = as_of_now(first, second)
        for path in paths:
            path.write_bytes(b"before and after")
        assert [file.read(100) for file in now] == [b"before"] * 2
        assert [file.read(100) for file in now] == [b""] * 2


def test_a_record_that_is_being_written(tmp_path: Path) -> None:
    """Whoever verifies it meanwhile finds no more than that it has no end yet."""
    run, stop = tmp_path / "run", threading.Event()
    journal = _journal(run)
    journal.check(0, 1.0, {"a": 0.5}, STUCK)

    def train() -> None:
        step = 0
        while not stop.wait(0.0005):
            step += 1
            journal.append("sink_error", sink="s", error="x")
            journal.check(step, 1.0, {"a": 0.5}, STUCK)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        found = {name for _ in range(25) for name in _failed(run)}
    finally:
        stop.set()
        thread.join()
    journal.close()
    # A line may be seen half-written: a file's size grows by the page.
    assert "bookends" in found
    assert found <= {"bookends", "parse", "chain"}
    assert _failed(run) == []


# --- anchors --------------------------------------------------------------------------------------


def _without(lines: list[bytes], at: int) -> list[bytes]:
    return lines[:at] + lines[at + 1 :]


def _twice(lines: list[bytes], at: int) -> list[bytes]:
    return lines[: at + 1] + lines[at:]


def _swapped(lines: list[bytes], at: int) -> list[bytes]:
    other = (at + 1) % len(lines)
    swapped = list(lines)
    swapped[at], swapped[other] = lines[other], lines[at]
    return swapped


@pytest.mark.parametrize("name", ["diary.jsonl", "metrics.jsonl"])
@pytest.mark.parametrize(
    "surgery", [lambda lines, at: lines[:at], _without, _twice, _swapped],
    ids=["cut", "without", "twice", "swapped"],
)  # fmt: skip
def test_no_line_can_be_moved_under_anchors(
    tmp_path: Path, name: str, surgery: Callable[[list[bytes], int], list[bytes]]
) -> None:
    """An unsealed record with anchors: any line cut, taken out, doubled or swapped shows."""
    run = tmp_path / "run"
    made: list[journals.Anchor] = []
    write(run, 20, on_anchor=made.append)
    anchors = [Anchor(a.run_id, a.seq, a.hash, a.metrics_digest, "kept") for a in made]
    assert _failed(run, anchors=anchors) == []
    path = run / name
    lines = path.read_bytes().splitlines(keepends=True)
    for at in range(len(lines)):
        path.write_bytes(b"".join(surgery(lines, at)))
        assert "anchors" in _failed(run, anchors=anchors) or len(_failed(run)) > 0, at


def test_anchors_of_a_run_that_was_killed(run_program: RunProgram, tmp_path: Path) -> None:
    """Recovered it fits the anchors that were on the disk by then; cut before, it does not."""
    run_program(
        "import cirron_otel as ci\nfrom cirron_otel.record_anchors import open_journal\n"
        + BEGIN
        + f"""
ci.profile(frameworks=[])
journal = open_journal("run", run_start=START)
with ci.scope("train"):
    for step in range(10):
        journal.append("alarm", **{{**{ALARM!r}, "step": step}})
        journal.check(step, 1.0, {{"a": 0.5}}, {{}})
ci.flush()
os.kill(os.getpid(), signal.SIGKILL)
""",
        expect=-9,
        measured=False,
    )
    run = tmp_path / "run"
    spool = next(path for path in tmp_path.rglob("*.json") if path.parent.name == "spool").parent
    recover(run)
    lines, _ = whole_record(run)
    assert lines[-1]["recovered"] is True
    assert _failed(run, anchors=spool) == []
    rewrite(run, lines[:5] + lines[-1:])
    assert "anchors" in _failed(run, anchors=spool)
