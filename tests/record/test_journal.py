"""The journal: what it writes, what it refuses, and that it is never in the training's way."""

from __future__ import annotations

import itertools
import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirron_otel._guard import Guard
from cirron_otel.clock import Clock
from cirron_otel.errors import RecordBusyError, RecordError, RecordExistsError
from cirron_otel.training_record.line_text import body_text
from cirron_otel.training_record.writing.journal import Anchor, Journal
from helpers import RunProgram
from journal_records import ALARM, BEGIN, START, whole_diary, whole_record, whole_rows


def _journal(directory: Path, **more: Any) -> Journal:
    return Journal(directory, **{"run_start": START, "strict": False, **more})


# --- what it writes -------------------------------------------------------------------------------


def test_a_whole_run(tmp_path: Path) -> None:
    """Events and rows come back chained, digested and counted, under the four names' first two."""
    run = tmp_path / "deep" / "run"
    with _journal(run, run_id="run-7") as journal:
        journal.check(0, 2.5, {"conv1": 0.5}, {"conv1": [0, 0, 0, 0]})
        line = journal.append("alarm", **ALARM)
        journal.check(5, 2.25, {}, {"conv1": (1, 0, 0, 0)})
        journal.steps = 9
    lines, rows = whole_record(run)
    assert [one["event"] for one in lines] == ["run_start", "alarm", "run_end"]
    assert lines[1] == line
    assert lines[0]["run_id"] == lines[2]["run_id"] == "run-7"
    assert lines[0]["name"] == "run"
    assert lines[2]["steps"] == 9
    assert lines[2]["counts"]["checks_without_gradients"] == 1
    assert list(rows[0]) == ["step", "loss", "grad", "stuck", "digest"]
    assert rows[1]["stuck"] == {"conv1": [1, 0, 0, 0]}
    assert sorted(path.name for path in run.iterdir()) == ["diary.jsonl", "metrics.jsonl"]
    assert journal.run_end == lines[2]


def test_the_hashed_text_stands_in_the_line(tmp_path: Path) -> None:
    """A line is its canonical body with prev and hash behind: checked by hand without a parser."""
    with _journal(tmp_path / "run") as journal:
        journal.append("alarm", **ALARM)
    for raw in (tmp_path / "run" / "diary.jsonl").read_text().splitlines():
        line = json.loads(raw)
        body = {key: value for key, value in line.items() if key not in ("prev", "hash")}
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        assert raw.startswith(text[:-1] + ',"prev":')


def test_lines_say_how_far_the_metrics_were(tmp_path: Path) -> None:
    """Each line carries rows and digest of the metrics then, so an unfinished run has them."""
    run = tmp_path / "run"
    journal = _journal(run)
    for step in range(3):
        journal.append("alarm", **{**ALARM, "step": step})
        journal.check(step, 1.0, {}, {})
    lines, rows = whole_diary(run), whole_rows(run)
    assert [line["metrics_rows"] for line in lines] == [0, 0, 1, 2]
    assert [line["metrics_digest"] for line in lines[1:]] == [row["digest"] for row in rows]
    journal.close()


def test_rows_are_in_the_file_at_once(tmp_path: Path) -> None:
    """A row is there when check() returns, not when the file is closed (R-W5)."""
    journal = _journal(tmp_path / "run")
    journal.check(0, 1.0, {"a": 1.0}, {})
    assert len(whole_rows(tmp_path / "run")) == 1
    journal.close()


def test_numbers_that_are_not_finite(tmp_path: Path) -> None:
    """Neither file ever holds a bare NaN: null and ``nonfinite`` in rows, text in lines (R-W3)."""
    run = tmp_path / "run"
    with _journal(run) as journal:
        grad = {"a": math.inf, "b": -math.inf, "c": 1.0}
        journal.check(0, math.nan, grad, {}, note=math.inf)
        journal.append("nonfinite_loss", step=0, severity="critical", value=math.nan)
    lines, rows = whole_record(run)
    assert rows[0]["loss"] is None
    assert rows[0]["grad"] == {"a": None, "b": None, "c": 1.0}
    assert rows[0]["nonfinite"] == {"loss": "nan", "grad.a": "inf", "grad.b": "-inf"}
    assert rows[0]["note"] == "inf"
    assert lines[1]["value"] == "nan"


def test_findings_and_extras_go_into_the_row(tmp_path: Path) -> None:
    """What fits no event is an entry of ``findings`` in its check's row."""
    with _journal(tmp_path / "run") as journal:
        journal.check(0, None, {}, {}, findings=[{"kind": "plateau", "severity": "info"}], lr=0.1)
    (row,) = whole_rows(tmp_path / "run")
    assert row["loss"] is None
    assert row["findings"] == [{"kind": "plateau", "severity": "info"}]
    assert row["lr"] == 0.1


def test_where_the_training_was(tmp_path: Path) -> None:
    """Lines carry trace and span id; a function that fails costs only these (R-W16)."""
    answers: list[Any] = [("1" * 32, "2" * 16), None, ("3" * 32, "4" * 16)]

    def trace() -> tuple[str, str] | None:
        return answers.pop(0)

    journal = _journal(tmp_path / "run", trace=trace)
    journal.append("alarm", **ALARM)
    journal.append("alarm", **ALARM)
    journal.close()
    lines, _ = whole_record(tmp_path / "run")
    assert (lines[0]["trace_id"], lines[0]["span_id"]) == ("1" * 32, "2" * 16)
    assert "trace_id" not in lines[1]
    assert lines[2]["span_id"] == "4" * 16
    assert journal.guard.losses == {"record_trace_failed": 1}


def test_identity(tmp_path: Path) -> None:
    """Run id, and what the caller says of code, data and seed, stand in run_start (R-W16)."""
    identity = {"code": {"commit": "abc"}, "data": {"sha256": "d" * 64}, "seed": 17}
    with _journal(tmp_path / "run", run_start={**START, **identity}):
        pass
    first = whole_diary(tmp_path / "run")[0]
    assert {key: first[key] for key in identity} == identity
    assert len(first["run_id"]) == 32


def test_time_never_runs_backwards(tmp_path: Path) -> None:
    """A wall clock that is set back does not make a line older than the one before it."""
    wall = [2_000_000_000_000_000_000, 1_900_000_000_000_000_000]
    clock = Clock(lambda: wall[-1] if len(wall) == 1 else wall.pop(0), lambda: 0)
    journal = _journal(tmp_path / "run", clock=clock)
    journal.check(0, 1.0, {}, {})
    journal.append("alarm", **ALARM)
    journal.close()
    assert clock.now() == 1_900_000_000_000_000_000
    times = [line["time"] for line in whole_diary(tmp_path / "run")]
    assert times == sorted(times)


# --- values ---------------------------------------------------------------------------------------

_LEAVES = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers().map(lambda n: n**400)
    | st.floats()
    | st.text()
    | st.text(st.characters(categories=["Cs"]), max_size=3)
    | st.binary(max_size=3)
    | st.just(threading.Lock)
    | st.complex_numbers()
)
_KEYS = st.text(max_size=4) | st.integers(-3, 12) | st.booleans() | st.none() | st.floats()
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(_KEYS, inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(
            st.text(st.characters(categories=["Cs", "Lu"]), max_size=3), inner, max_size=4
        )
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), _VALUES, max_size=6))
def test_any_value_makes_a_line_that_reads_back(fields: dict[str, Any]) -> None:
    """Whatever a field is, the line parses strictly, hashes to the same, and says no key twice."""
    body, text = body_text({"seq": 1, **fields})

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        assert len(dict(pairs)) == len(pairs)
        return dict(pairs)

    read = json.loads(text, object_pairs_hook=once, parse_constant=pytest.fail)
    assert json.dumps(read, sort_keys=True, separators=(",", ":")) == text
    assert read == body


def test_odd_values_in_a_record(tmp_path: Path) -> None:
    """Lone surrogates, huge integers, deep nesting and objects do not break the chain."""
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]

    class Odd:
        def __str__(self) -> str:
            raise ValueError("no text")

    odd = {"\ud83d\ude00": 1, "\uffff": 2, "\ud800": "\udfff"}
    with _journal(tmp_path / "run") as journal:
        for value in (odd, 10**5000, deep, Odd(), {1, 2}, {10: 1, 9: 2}, b"\xff", range(3)):
            assert journal.append("alarm", **ALARM, value=value) is not None
        journal.check(0, 1.0, {"\ud800": 1.0}, {}, odd=odd)
    whole_record(tmp_path / "run")


# --- what it refuses ------------------------------------------------------------------------------

BAD: list[tuple[str, dict[str, Any], str]] = [
    ("made_up", {"step": 1}, "no event type"),
    ("alarm", {"step": 1}, "layer is missing"),
    ("alarm", {**ALARM, "severity": "fatal"}, "severity"),
    ("alarm", {**ALARM, "step": True}, "step is not"),
    ("alarm", {**ALARM, "diagnosis": "odd"}, "diagnosis"),
    ("alarm", {**ALARM, "hash": "0" * 64}, "reserved"),
    ("alarm", {**ALARM, "seq": 7}, "reserved"),
    ("run_end", {}, "by the journal itself"),
    ("run_start", {}, "by the journal itself"),
]


@pytest.mark.parametrize(("event", "fields", "message"), BAD)
def test_an_event_that_is_none(
    tmp_path: Path, event: str, fields: dict[str, Any], message: str
) -> None:
    """It is refused and counted, told in the next line, and raised only in strict mode."""
    journal = _journal(tmp_path / "run")
    assert journal.append(event, **fields) is None
    assert journal.guard.losses == {"record_event_refused": 1}
    assert journal.append("alarm", **ALARM)["lost_before"] == 1  # type: ignore[index]
    assert "lost_before" not in journal.append("alarm", **ALARM)  # type: ignore[operator]
    end = journal.close()
    assert end is not None
    assert end["lost_events"] == 1
    whole_record(tmp_path / "run")
    strict = _journal(tmp_path / "strict", strict=True)
    with pytest.raises(RecordError, match=message):
        strict.append(event, **fields)
    strict.close()


@pytest.mark.parametrize(
    "row",
    [
        (-1, 1.0, {}, {}), (True, 1.0, {}, {}), ("3", 1.0, {}, {}), (7, "high", {}, {}),
        (7, 1.0, {"a": "b"}, {}), (7, 1.0, {}, {"a": [1.5, 0, 0, 0]}), (3, 1.0, {}, {}),
        (7, 1.0, None, {}),
    ],
)  # fmt: skip
def test_a_row_that_is_none(tmp_path: Path, row: tuple[Any, ...]) -> None:
    """It is refused and counted; the check stays in the count of checks."""
    journal = _journal(tmp_path / "run")
    journal.check(3, 1.0, {}, {})
    assert journal.check(*row) is None
    assert journal.check(8, 1.0, {}, {})["lost_before"] == 1  # type: ignore[index]
    journal.close()
    lines, rows = whole_record(tmp_path / "run")
    assert [one["step"] for one in rows] == [3, 8]
    assert (lines[-1]["checks"], lines[-1]["lost_rows"]) == (3, 1)


def test_nothing_is_written_after_run_end(tmp_path: Path) -> None:
    """Neither by a sink that fails on run_end nor by anybody else (R-W4); it is counted."""
    seen: list[Anchor] = []

    def on_anchor(anchor: Anchor) -> None:
        seen.append(anchor)
        if anchor.event == "run_end":
            assert journal.append("sink_error", sink="s", error="late") is None
            raise OSError("the sink is gone")

    journal = _journal(tmp_path / "run", on_anchor=on_anchor)
    end = journal.close()
    assert journal.close() == end
    journal.append("alarm", **ALARM)
    journal.check(9, 1.0, {}, {})
    lines, rows = whole_record(tmp_path / "run")
    assert (len(lines), rows) == (2, [])
    assert [anchor.event for anchor in seen] == ["run_start", "run_end"]
    assert journal.guard.losses == {
        "record_event_after_end": 2,
        "record_row_after_end": 1,
        "record_anchor_failed": 1,
    }


def test_anchors(tmp_path: Path) -> None:
    """Start, each check and the end give the head and the metrics digest of that moment."""
    seen: list[Anchor] = []
    with _journal(tmp_path / "run", on_anchor=seen.append, run_id="r") as journal:
        journal.append("alarm", **ALARM)
        journal.check(5, 1.0, {}, {})
    lines, _ = whole_record(tmp_path / "run")
    assert [(a.event, a.seq, a.step, a.metrics_rows) for a in seen] == [
        ("run_start", 0, None, 0),
        ("check", 1, 5, 1),
        ("run_end", 2, None, 1),
    ]
    assert [a.hash for a in seen] == [line["hash"] for line in lines]
    assert seen[1].metrics_digest == lines[-1]["metrics_sha256"]
    assert {a.run_id for a in seen} == {"r"}


# --- exceptions -----------------------------------------------------------------------------------


def test_an_exception_ends_the_record(tmp_path: Path) -> None:
    """Its type always, its message only when asked for (R-W17); it goes on to the caller."""
    for messages, text in ((False, "ValueError"), (True, "ValueError: bad row in /data/x.csv")):
        run = tmp_path / f"run-{messages}"
        with (
            pytest.raises(ValueError, match="bad row"),
            _journal(run, record_error_messages=messages),
        ):
            raise ValueError("bad row in /data/x.csv")
        end = whole_record(run)[0][-1]
        assert end["error"] == text
        assert end["ended_by"] == "exception"
        assert "interrupted" not in end


def test_ctrl_c_is_an_interruption(tmp_path: Path) -> None:
    """KeyboardInterrupt ends the record as interrupted."""
    with pytest.raises(KeyboardInterrupt), _journal(tmp_path / "run"):
        raise KeyboardInterrupt
    end = whole_record(tmp_path / "run")[0][-1]
    assert (end["error"], end["interrupted"]) == ("KeyboardInterrupt", True)


def test_an_exception_in_the_middle_of_a_line(tmp_path: Path) -> None:
    """What a signal handler raises at whatever point leaves a chain without a break."""

    class Interrupt:
        def __init__(self) -> None:
            self.armed = True

        def __str__(self) -> str:
            if self.armed:
                raise KeyboardInterrupt
            return "later"

    journal = _journal(tmp_path / "run")
    value = Interrupt()
    with pytest.raises(KeyboardInterrupt):
        journal.append("alarm", **ALARM, value=value)
    value.armed = False
    assert journal.append("alarm", **ALARM, value=value) is not None
    # As if the exception had come after the write and before it was noted.
    fd = os.open(tmp_path / "run" / "diary.jsonl", os.O_WRONLY | os.O_APPEND)
    os.write(fd, b'{"half a li')
    os.close(fd)
    assert journal.append("alarm", **ALARM) is not None
    journal.close()
    assert len(whole_record(tmp_path / "run")[0]) == 4


def test_a_value_that_writes_itself(tmp_path: Path) -> None:
    """A call from inside another one (a value's text, a signal handler) is counted, not written."""

    class Reentrant:
        def __str__(self) -> str:
            journal.append("alarm", **ALARM)
            journal.close()
            return "text"

    journal = _journal(tmp_path / "run")
    line = journal.append("alarm", **ALARM, value=Reentrant())
    assert line is not None
    assert journal.guard.losses == {"record_event_inside_another": 1}
    assert journal.run_end is not None, "close() from inside is done right after the line"
    assert [one["event"] for one in whole_record(tmp_path / "run")[0]] == [
        "run_start", "alarm", "run_end",
    ]  # fmt: skip


# --- trouble with the disk ------------------------------------------------------------------------

_LIMITED = (
    BEGIN
    + """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
journal = Journal("run", run_start=START, strict=False)
size = os.path.getsize("run/diary.jsonl")
"""
)


def test_a_full_disk_never_reaches_the_training(run_program: RunProgram, tmp_path: Path) -> None:
    """What does not fit is counted and told; the chain goes on when there is room (R-W19)."""
    done = run_program(
        _LIMITED
        + f"""
ALARM = {ALARM!r}
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, hard))   # room for a part of a line
for _ in range(5):
    assert journal.append("alarm", **ALARM) is None
assert os.path.getsize("run/diary.jsonl") == size, "half a line was left"
resource.setrlimit(resource.RLIMIT_FSIZE, (50, hard))
assert journal.check(0, 1.0, {{}}, {{}}) is None
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert journal.append("alarm", **ALARM)["lost_before"] == 5
assert journal.check(1, 1.0, {{}}, {{}})["lost_before"] == 1
journal.close()
print(dict(journal.guard.losses))
""",
        measured=False,
    )
    assert done.stdout.strip() == str({"record_event_not_written": 5, "record_row_not_written": 1})
    assert done.stderr.count("lacks a line") == 2, "one warning each"
    lines, _ = whole_record(tmp_path / "run")
    assert (lines[-1]["lost_events"], lines[-1]["lost_rows"]) == (5, 1)


def test_a_disk_too_full_for_the_end(run_program: RunProgram, tmp_path: Path) -> None:
    """close() returns None, the program goes on, and what is there can be recovered."""
    run_program(
        _LIMITED
        + """
resource.setrlimit(resource.RLIMIT_FSIZE, (size + 100, -1))
assert journal.close() is None
assert journal.guard.losses["record_run_end_not_written"] == 1
assert not os.path.exists("run/.lock")
""",
        measured=False,
    )
    assert [line["event"] for line in whole_diary(tmp_path / "run")] == ["run_start"]


def test_a_removed_directory(tmp_path: Path) -> None:
    """The training goes on when somebody deletes the run directory under it."""
    run = tmp_path / "run"
    journal = _journal(run)
    for path in run.iterdir():
        path.unlink()
    run.rmdir()
    journal.append("alarm", **ALARM)
    journal.check(1, 1.0, {}, {})
    journal.close()
    assert not run.exists()
    assert journal.guard.losses["record_fsync_failed"] > 0, "somebody is told"


def test_a_closed_file(tmp_path: Path) -> None:
    """A descriptor that somebody closed is counted like a full disk."""
    journal = _journal(tmp_path / "run")
    os.close(journal._files.diary)
    assert journal.append("alarm", **ALARM) is None
    assert journal.guard.losses == {"record_event_not_written": 1}
    assert journal.close() is None


def test_fsync_is_made_by_another_thread(tmp_path: Path) -> None:
    """At the interval, once there is something to bring to the disk; the thread ends with close."""
    journal = _journal(tmp_path / "run", fsync_interval_s=0.05)
    journal.append("alarm", **ALARM)
    deadline = time.monotonic() + 20
    while journal._syncer._dirty and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not journal._syncer._dirty
    journal.close()
    assert "cirron-otel-record-sync" not in {thread.name for thread in threading.enumerate()}
    for bad in (0, -1, math.nan):
        with pytest.raises(RecordError, match="fsync_interval_s"):
            _journal(tmp_path / "other", fsync_interval_s=bad)
    with _journal(tmp_path / "other", fsync_interval_s=None):
        pass


# --- beginning ------------------------------------------------------------------------------------


def test_a_record_that_is_there_is_kept(tmp_path: Path) -> None:
    """It is refused by default, and overwriting moves it aside whole, seal and all (R-W7)."""
    run = tmp_path / "run"
    with _journal(run) as first:
        pass
    (run / "record.json").write_text("{}")
    (run / "record.sig").write_bytes(b"x" * 64)
    (run / "report.html").write_text("<p>")
    (run / "notes.txt").write_text("mine")
    with pytest.raises(RecordExistsError, match=r"overwrite=True.*append=True"):
        _journal(run)
    with _journal(run, overwrite=True):
        pass
    names = sorted(path.name for path in (run / "previous-1").iterdir())
    assert names == ["diary.jsonl", "metrics.jsonl", "record.json", "record.sig", "report.html"]
    assert sorted(path.name for path in run.iterdir()) == [
        "diary.jsonl", "metrics.jsonl", "notes.txt", "previous-1",
    ]  # fmt: skip
    lines, _ = whole_record(run)
    assert lines[0]["previous_head"] == whole_record(run / "previous-1")[0][-1]["hash"]
    assert lines[0]["previous_run_id"] == first.run_id
    assert lines[0]["previous_directory"] == "previous-1"
    assert "segment" not in lines[0]


def test_resuming_chains_segments(tmp_path: Path) -> None:
    """append=True goes on in a new segment that names the head of the one before."""
    run = tmp_path / "run"
    for number in range(1, 4):
        with _journal(run, append=True, run_id="same") as journal:
            journal.check(number, 1.0, {}, {})
    places = [run / "previous-1", run / "previous-2", run]
    records = [whole_record(place)[0] for place in places]
    assert [lines[0].get("segment") for lines in records] == [None, 2, 3]
    for before, after in itertools.pairwise(records):
        assert after[0]["previous_head"] == before[-1]["hash"]
        assert after[0]["previous_run_id"] == "same"


def test_resuming_after_a_kill(run_program: RunProgram, tmp_path: Path) -> None:
    """A segment that nobody ended is ended as recovered, then set aside."""
    run_program(
        BEGIN
        + """
journal = Journal("run", run_start=START, append=True)
journal.check(4, 1.0, {}, {})
os.write(journal._files.diary, b'{"half')
os.kill(os.getpid(), signal.SIGKILL)
""",
        expect=-9,
        measured=False,
    )
    with _journal(tmp_path / "run", append=True):
        pass
    old, _ = whole_record(tmp_path / "run" / "previous-1")
    assert (old[-1]["recovered"], old[-1]["steps"]) == (True, 5)
    assert (tmp_path / "run" / "previous-1" / "diary.jsonl.damaged-1").read_bytes() == b'{"half'
    assert whole_record(tmp_path / "run")[0][0]["previous_head"] == old[-1]["hash"]


def test_a_changed_record_is_not_gone_on_with(tmp_path: Path) -> None:
    """append=True refuses what was tampered with, and leaves it as it is."""
    run = tmp_path / "run"
    with _journal(run):
        pass
    diary = run / "diary.jsonl"
    diary.write_bytes(diary.read_bytes().replace(b'"parameters":1466', b'"parameters":1467'))
    before = diary.read_bytes()
    with pytest.raises(RecordError, match="was changed"):
        _journal(run, append=True)
    assert diary.read_bytes() == before
    assert sorted(path.name for path in run.iterdir()) == ["diary.jsonl", "metrics.jsonl"]


def test_a_half_moved_record_is_moved_to_its_end(tmp_path: Path) -> None:
    """A process that died while it set a record aside leaves no record in two places."""
    run = tmp_path / "run"
    with _journal(run):
        pass
    (run / "previous-1.partial").mkdir()
    (run / "metrics.jsonl").rename(run / "previous-1.partial" / "metrics.jsonl")
    with _journal(run):
        pass
    whole_record(run / "previous-1")
    lines, _ = whole_record(run)
    assert lines[0]["previous_directory"] == "previous-1"
    assert not (run / "previous-1.partial").exists()


@pytest.mark.parametrize("made", [True, False])
def test_a_failed_start_leaves_nothing_behind(tmp_path: Path, made: bool) -> None:  # noqa: FBT001
    """Neither an empty diary nor a directory blocks the next try (R-W18)."""
    run = tmp_path / "a" / "run"
    if made:
        run.mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RecordError, match="model is missing"):
        _journal(run, run_start={key: value for key, value in START.items() if key != "model"})
    assert sorted(tmp_path.rglob("*")) == before
    with _journal(run):
        pass


def test_a_start_on_a_full_disk_puts_everything_back(
    run_program: RunProgram, tmp_path: Path
) -> None:
    """The old record stands where it stood, and directories made for the new one are gone."""
    with _journal(tmp_path / "run"):
        pass
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    run_program(
        BEGIN
        + """
import resource
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (64, -1))
from cirron_otel.errors import RecordError
for path in ("run", "new/deep"):
    try:
        Journal(path, run_start=START, overwrite=True)
    except RecordError as error:
        print(error)
assert not os.path.exists("new")
""",
        measured=False,
    )
    assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


@pytest.mark.parametrize("more", [{"overwrite": True, "append": True}])
def test_contradicting_arguments(tmp_path: Path, more: dict[str, Any]) -> None:
    """Overwrite and append exclude each other."""
    with pytest.raises(RecordError, match="exclude each other"):
        _journal(tmp_path / "run", **more)


def test_a_place_that_is_none(tmp_path: Path) -> None:
    """A file where the directory should be, or a directory nobody may write, is a clear error."""
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(RecordError, match=str(place)):
            _journal(place)


def test_only_rank_0_writes(tmp_path: Path) -> None:
    """Other ranks get a journal that does nothing and makes no directory."""
    with _journal(tmp_path / "run", rank=1) as journal:
        assert not journal.active
        assert journal.append("alarm", **ALARM) is None
        assert journal.check(0, 1.0, {}, {}) is None
    assert not (tmp_path / "run").exists()
    assert journal.guard.losses == {}


def test_two_writers_of_one_directory(tmp_path: Path, run_program: RunProgram) -> None:
    """The second is refused, in this process and in another, whatever it asks for."""
    journal = _journal(tmp_path / "run")
    for more in ({}, {"overwrite": True}, {"append": True}):
        with pytest.raises(RecordBusyError, match="being written"):
            _journal(tmp_path / "run", **more)
    done = run_program(
        BEGIN
        + """
try:
    Journal("run", run_start=START, overwrite=True)
except Exception as error:
    print(type(error).__name__)
"""
    )
    assert done.stdout.strip() == "RecordBusyError"
    journal.close()
    whole_record(tmp_path / "run")


# --- threads, forks, ends -------------------------------------------------------------------------


def test_threads(tmp_path: Path) -> None:
    """Lines of many threads make one chain, and a close in between ends it once."""
    journal = _journal(tmp_path / "run", guard=Guard())

    def work() -> None:
        for _ in range(200):
            journal.append("alarm", **ALARM)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 20
    while journal.head[0] < 100 and time.monotonic() < deadline:
        time.sleep(0.001)
    closers = [threading.Thread(target=journal.close) for _ in range(3)]
    for thread in closers:
        thread.start()
    for thread in (*threads, *closers):
        thread.join()
    lines, _ = whole_record(tmp_path / "run")
    assert 100 < len(lines) <= 802


def test_a_forked_child_writes_nothing(run_program: RunProgram, tmp_path: Path) -> None:
    """It neither writes nor ends the parent's record, nor keeps its lock when the parent died."""
    run_program(
        BEGIN
        + f"""
ALARM = {ALARM!r}
journal = Journal("run", run_start=START)
pid = os.fork()
if pid == 0:
    assert journal.append("alarm", **ALARM) is None
    journal.close()
    sys.exit(0)          # with its atexit functions
assert os.waitpid(pid, 0)[1] == 0
journal.append("alarm", **ALARM)
if os.fork() == 0:
    os.close(1)          # nobody waits for its output
    os.close(2)
    time.sleep(30)       # a worker that outlives its parent
    os._exit(0)
print(os.getpid())
os.kill(os.getpid(), signal.SIGKILL)
""",
        expect=-9,
        measured=False,
    )
    assert [line["event"] for line in whole_diary(tmp_path / "run")] == ["run_start", "alarm"]
    with _journal(tmp_path / "run", append=True):
        pass


@pytest.mark.parametrize(
    ("last", "status", "expected"),
    [
        ("pass", 0, {"ended_by": "exit", "interrupted": True}),
        ("sys.exit(3)", 3, {"ended_by": "exit", "interrupted": True}),
        ("raise ValueError('secret')", 1, {"ended_by": "exception", "error": "ValueError"}),
        ("os.kill(os.getpid(), signal.SIGTERM)", -15, {"ended_by": "signal", "signal": "SIGTERM"}),
        ("os.kill(os.getpid(), signal.SIGINT)", -2, {"error": "KeyboardInterrupt"}),
    ],
)
def test_a_process_that_ends_without_close(
    run_program: RunProgram, tmp_path: Path, last: str, status: int, expected: dict[str, Any]
) -> None:
    """Exit, exceptions, SIGTERM and Ctrl-C end the record honestly; the status stays (R-W6)."""
    run_program(
        BEGIN
        + f"journal = Journal('run', run_start=START)\njournal.check(2, 1.0, {{}}, {{}})\n{last}",
        expect=status,
        measured=False,
    )
    lines, _ = whole_record(tmp_path / "run")
    assert {key: lines[-1].get(key) for key in expected} == expected
    assert lines[-1]["interrupted"] is True
    assert "secret" not in json.dumps(lines)


def test_a_signal_in_the_middle_of_a_line(run_program: RunProgram, tmp_path: Path) -> None:
    """The line is finished first, then the record ends, then the process dies of the signal."""
    run_program(
        BEGIN
        + f"""
class Late:
    def __str__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0)
        return "text"
journal = Journal("run", run_start=START)
journal.append("alarm", **{ALARM!r}, value=Late())
time.sleep(30)
""",
        expect=-15,
        measured=False,
    )
    lines, _ = whole_record(tmp_path / "run")
    assert [line["event"] for line in lines] == ["run_start", "alarm", "run_end"]
    assert lines[1]["value"] == "text"


def test_a_program_that_handles_sigterm_itself(run_program: RunProgram, tmp_path: Path) -> None:
    """It goes on and closes the record when it is done; we do not take the signal from it."""
    run_program(
        BEGIN
        + """
seen = []
signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
with Journal("run", run_start=START) as journal:
    os.kill(os.getpid(), signal.SIGTERM)
    while not seen:
        time.sleep(0.01)
    assert journal.check(5, 1.0, {}, {}) is not None
""",
        measured=False,
    )
    lines, _ = whole_record(tmp_path / "run")
    assert "interrupted" not in lines[-1]


def test_sigterm_is_put_back(run_program: RunProgram) -> None:
    """After the last journal the process's disposition is what it was."""
    run_program(
        BEGIN
        + """
one = Journal("one", run_start=START)
two = Journal("two", run_start=START)
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
one.close()
assert signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
two.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
three = Journal("three", run_start=START, signals=False)
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
""",
        measured=False,
    )


def test_a_multiprocessing_child_ends_its_record(run_program: RunProgram, tmp_path: Path) -> None:
    """Such a child skips atexit; its record is ended all the same."""
    run_program(
        BEGIN
        + """
import multiprocessing

def work():
    journal = Journal("run", run_start=START)
    journal.check(0, 1.0, {}, {})

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        child = multiprocessing.get_context(method).Process(target=work)
        child.start()
        child.join()
        assert child.exitcode == 0
        os.rename("run", method)
""",
        measured=False,
    )
    for method in ("fork", "spawn"):
        lines, _ = whole_record(tmp_path / method)
        assert lines[-1]["ended_by"] == "exit"
