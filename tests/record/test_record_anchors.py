"""Anchors under a recording: in the spool, on the scope, and what ends with the process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import cirron_otel as ci
from cirron_otel import batching, recorder
from cirron_otel._guard import Guard
from cirron_otel.batch import Batch, LogRecord, decode, encode_rows, json_schema
from cirron_otel.batching import Batcher, envelope
from cirron_otel.clock import Clock
from cirron_otel.record_anchors import anchor, current_ids, open_journal
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.writing.journal import Anchor
from helpers import RunProgram, read_spool
from journal_records import ALARM, BEGIN, START, whole_record


def _logs() -> list[dict[str, Any]]:
    return [row for batch in read_spool().batches for row in (batch.logs or [])]


def _anchors() -> list[tuple[Any, ...]]:
    keys = ("event", "seq", "hash", "metrics_rows", "metrics_digest")
    return [tuple(row["attrs"][f"cirron.record.{key}"] for key in keys) for row in _logs()]


def test_an_anchor_for_each_moment() -> None:
    """Start, checks and end are log records of the scope they were made in, and true."""
    ci.profile(frameworks=[])
    journal = open_journal("run", run_start=START, run_id="r-1", name="digits")
    with ci.scope("step") as step:
        journal.append("alarm", **ALARM)
        journal.check(5, 1.0, {"a": 1.0}, {})
    journal.close()
    ci.shutdown()
    lines, _ = whole_record(Path("run"))
    digest = lines[-1]["metrics_digest"]
    assert _anchors() == [
        ("run_start", 0, lines[0]["hash"], 0, lines[0]["metrics_digest"]),
        ("check", 1, lines[1]["hash"], 1, digest),
        ("run_end", 2, lines[2]["hash"], 1, digest),
    ]
    check = _logs()[1]
    assert check["event_name"] == "cirron.record.anchor"
    assert (check["severity_number"], check["severity_text"]) == (9, "INFO")
    assert lines[1]["hash"] in check["body"]
    assert check["attrs"]["cirron.record.run_id"] == "r-1"
    assert check["attrs"]["cirron.record.name"] == "digits"
    assert check["attrs"]["cirron.record.step"] == 5
    assert check["span_id"] + check["trace_id"][16:] == step.id
    assert "cirron.record.step" not in _logs()[0]["attrs"]
    (row,) = read_spool().named("step")
    assert row.attrs == {
        "cirron.record.run_id": "r-1",
        "cirron.record.seq": 1,
        "cirron.record.hash": lines[1]["hash"],
    }


def test_a_record_says_what_the_run_was_made_from(run_program: RunProgram, tmp_path: Path) -> None:
    """The commit around the program and torch's seed, unless the caller says otherwise."""
    git = tmp_path / ".git"
    git.mkdir()
    (git / "HEAD").write_text("a" * 40)
    run_program(
        f"""
import torch
from cirron_otel.record_anchors import open_journal
torch.manual_seed(7)
before = torch.get_rng_state()
open_journal("run", run_start={START!r}).close()
open_journal("own", run_start={{**{START!r}, "seed": 1, "code": "mine"}}).close()
assert torch.equal(before, torch.get_rng_state())
""",
        measured=False,
    )
    first = [whole_record(tmp_path / name)[0][0] for name in ("run", "own")]
    assert [line["seed"] for line in first] == [7, 1]
    assert [line["code"] for line in first] == [{"commit": "a" * 40}, "mine"]


def test_lines_name_their_scope() -> None:
    """A line's trace and span id are those of the scope it was written in (R-W16)."""
    ci.profile(frameworks=[])
    journal = open_journal("run", run_start=START)
    with ci.scope("step") as step:
        assert current_ids() == (step.trace.id, step.id[:16])
        line = journal.append("alarm", **ALARM)
    journal.close()
    ci.shutdown()
    assert line is not None
    assert line["span_id"] + line["trace_id"][16:] == read_spool().one("step").id
    assert current_ids() is None


def test_anchors_show_what_was_cut_and_what_was_rewritten() -> None:
    """A tail that was cut, and a whole new record of the same run, do not fit the anchors."""
    ci.profile(frameworks=[])
    with open_journal("run", run_start=START, run_id="r") as journal:
        journal.check(0, 1.0, {}, {})
        journal.append("alarm", **{**ALARM, "step": 5, "rule": "made_up"})
        journal.check(5, 1.0, {}, {})
    ci.shutdown()
    assert verify("run", anchors=".cirron").ok
    diary = Path("run/diary.jsonl")
    whole = diary.read_bytes()
    diary.write_bytes(b"".join(whole.splitlines(keepends=True)[:-2]))
    assert not verify("run", anchors=".cirron").ok
    diary.unlink()
    Path("run/metrics.jsonl").unlink()
    with open_journal("run", run_start=START, run_id="r") as journal:
        journal.check(0, 1.0, {}, {})
        journal.check(5, 1.0, {}, {})
    assert verify("run").ok, "the forged record is in order in itself"
    assert not verify("run", anchors=".cirron").ok


def test_without_a_recording() -> None:
    """The journal is written all the same; a recording that begins later gets the anchors."""
    journal = open_journal("run", run_start=START)
    assert not anchor(Anchor("r", "n", "check", 0, "0" * 64, "0" * 64, 0, 1))
    line = journal.append("alarm", **ALARM)
    assert line is not None
    assert "trace_id" not in line
    ci.profile(frameworks=[])
    journal.check(0, 1.0, {}, {})
    ci.shutdown()
    journal.check(1, 1.0, {}, {})
    journal.close()
    whole_record(Path("run"))
    assert [one[0] for one in _anchors()] == ["check"]


def test_losses_are_in_health() -> None:
    """What the record lost, the recording's health says."""
    ci.profile(frameworks=[])
    journal = open_journal("run", run_start=START, strict=False)
    journal.append("nonsense")
    assert ci.health()["losses"] == {"record_event_refused": 1}
    journal.close()


def test_other_ranks_write_no_record(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank is the recording's."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ci.profile(frameworks=[])
    journal = open_journal("run", run_start=START)
    assert not journal.active
    ci.shutdown()
    assert not Path("run").exists()
    assert _logs() == []


RECORDED = (
    "import cirron_otel as ci\nfrom cirron_otel.record_anchors import open_journal\n"
    + BEGIN
    + """
ci.profile(frameworks=[])
journal = open_journal("run", run_start=START)
with ci.scope("step"):
    journal.check(0, 1.0, {}, {})
"""
)


@pytest.mark.parametrize(
    ("last", "status", "ended_by"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -15, "signal"),
        ("os._exit(3)", 3, "exit"),
        ("sys.exit(0)", 0, "exit"),
        ("raise ValueError('x')", 1, "exception"),
    ],
)
def test_the_end_of_the_process(
    run_program: RunProgram, tmp_path: Path, last: str, status: int, ended_by: str
) -> None:
    """The record ends before the recording's last flush, so its last anchor is in the spool."""
    run = run_program(RECORDED + last, expect=status, measured=False)
    lines, _ = whole_record(tmp_path / "run")
    assert lines[-1]["ended_by"] == ended_by
    assert lines[-1]["interrupted"] is True
    last_anchor = [row for batch in run.batches for row in (batch.logs or [])][-1]["attrs"]
    assert last_anchor["cirron.record.event"] == "run_end"
    assert last_anchor["cirron.record.hash"] == lines[-1]["hash"]


def test_a_recording_that_begins_after_the_record(run_program: RunProgram, tmp_path: Path) -> None:
    """At exit the record ends first here, too."""
    run = run_program(
        "import cirron_otel as ci\nfrom cirron_otel.record_anchors import open_journal\n"
        + BEGIN
        + """
journal = open_journal("run", run_start=START)
ci.profile(frameworks=[])
""",
        measured=False,
    )
    lines, _ = whole_record(tmp_path / "run")
    assert lines[-1]["ended_by"] == "exit"
    assert [span.name for span in run.spans] == ["cirron.session"]


def test_a_forked_child_makes_no_anchors(run_program: RunProgram, tmp_path: Path) -> None:
    """Neither does it end the parent's record through the recording."""
    run_program(
        RECORDED
        + """
pid = os.fork()
if pid == 0:
    with ci.scope("child"):
        journal.check(1, 1.0, {}, {})
    os._exit(0)
os.waitpid(pid, 0)
journal.check(2, 1.0, {}, {})
journal.close()
""",
        measured=False,
    )
    _, rows = whole_record(tmp_path / "run")
    assert [row["step"] for row in rows] == [0, 2]


# --- logs in batches ------------------------------------------------------------------------------


def _row(number: int, **more: Any) -> LogRecord:
    return LogRecord(
        **{"ts_ns": number, "severity_number": 9, "severity_text": "INFO", "event_name": "x",
           "body": "text", "attrs": {}, **more}
    )  # fmt: skip


@pytest.fixture
def batcher() -> Batcher:
    """A batcher with an envelope like a real one."""
    return Batcher(Clock(), Guard(), envelope({"a": 1}, {"name": "n"}, "writer"), "0.1.0")


def _sealed(batcher: Batcher) -> list[Batch]:
    step = batcher.slices()
    while step():
        pass
    batcher.seal(None)
    made = []
    while batcher.sealed:
        data = b"".join(batcher.sealed.popleft().chunks)
        assert len(data) < 4_000_000
        Draft202012Validator(dict(json_schema())).validate(json.loads(data))
        made.append(decode(data))
    return made


def test_logs_are_sealed_by_themselves(batcher: Batcher) -> None:
    """A batch of logs alone is one; a batch without logs does not have the key."""
    batcher.append_log(_row(1, trace_id="1" * 32, span_id="2" * 16, trace_flags=1))
    batcher.append_log(_row(2))
    assert batcher.queued == 2
    (batch,) = _sealed(batcher)
    assert isinstance(batch.logs, list)
    assert [row["ts_ns"] for row in batch.logs] == [1, 2]
    assert "trace_id" not in batch.logs[1]
    assert _sealed(batcher) == []


def test_many_and_large_logs_are_cut_into_batches(batcher: Batcher) -> None:
    """No file grows past the limit, none of the rows is lost, and their order stays."""
    for number in range(3000):
        batcher.append_log(_row(number, body="x" * 4000))
    batches = _sealed(batcher)
    assert len(batches) > 2
    rows = [row["ts_ns"] for batch in batches for row in (batch.logs or [])]
    assert rows == list(range(3000))


def test_odd_text_in_a_log(batcher: Batcher) -> None:
    """Lone surrogates, NUL, NaN and a huge attribute do not keep the row from the disk."""
    attrs = {"a": float("nan"), "b": "\ud800", "c": "y" * 900_000, "d": object}
    batcher.append_log(_row(1, body="\0\udfff", attrs=attrs))
    (batch,) = _sealed(batcher)
    assert isinstance(batch.logs, list)
    (row,) = batch.logs
    assert row["attrs"]["a"] == "nan"
    assert len(row["attrs"]["c"]) < 900_000
    assert "\0" not in row["body"]


def test_the_oldest_logs_go_while_the_disk_refuses(batcher: Batcher) -> None:
    """Memory is bounded, and what goes is counted."""
    for number in range(batching.MAX_LOGS + 5):
        batcher.append_log(_row(number))
    assert batcher._guard.losses == {"disk_full_logs": 5}
    assert batcher.logs[0].ts_ns == 5
    batcher.forget()
    assert batcher.queued == 0


def test_an_anchor_is_small() -> None:
    """What each check adds to the spool is well under a kilobyte."""
    ci.profile(frameworks=[])
    anchor(Anchor("r" * 32, "n", "check", 10**6, "0" * 64, "0" * 64, 10**5, 1, 10**6))
    rec = recorder._current
    assert rec is not None
    assert len(encode_rows(list(rec.batcher.logs))) < 800
