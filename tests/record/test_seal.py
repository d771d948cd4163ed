"""Sealing: what a seal holds, and when none is made."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from cirron_otel.errors import RecordBusyError, RecordError
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.recovering.recovery import recover
from cirron_otel.training_record.seal import seal
from cirron_otel.training_record.writing.journal import Journal
from helpers import RunProgram
from journal_records import ALARM, BEGIN, START


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A finished record."""
    with Journal(tmp_path / "run", run_start=START) as journal:
        journal.append("alarm", **ALARM)
        journal.check(3, 1.0, {"conv1": 0.5}, {"conv1": [0, 0, 0, 0]})
    return tmp_path / "run"


def _files(run: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}


def test_the_seal_to_the_letter(run: Path) -> None:
    """Exactly the format's keys, canonical, without a line end, and true."""
    content = seal(run)
    raw = (run / "record.json").read_bytes()
    assert json.loads(raw) == content
    assert raw == json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    lines = (run / "diary.jsonl").read_bytes().splitlines()
    assert content["format"] == "ormas-monitor-record"
    assert content["record_version"] == 1
    assert re.fullmatch(r"cirron-otel \d+\.\d+\.\d+", content["tool"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", content["created"])
    assert content["files"] == {
        name: hashlib.sha256((run / name).read_bytes()).hexdigest()
        for name in ("diary.jsonl", "metrics.jsonl")
    }
    assert content["diary_head"] == json.loads(lines[-1])["hash"]
    assert content["events"] == len(lines) == 3
    assert content["signer"] is None
    assert len(content) == 8
    assert sorted(_files(run)) == ["diary.jsonl", "metrics.jsonl", "record.json"]
    assert verify(run).check("seal").status == "pass"


def test_again(run: Path) -> None:
    """A record that is as it was sealed may be sealed anew."""
    seal(run)
    assert seal(run)["events"] == 3


def _cut_end(run: Path) -> None:
    lines = (run / "diary.jsonl").read_bytes().splitlines(keepends=True)
    (run / "diary.jsonl").write_bytes(b"".join(lines[:-1]))


def _replace(name: str, old: bytes, new: bytes) -> Any:
    def crime(run: Path) -> None:
        data = (run / name).read_bytes()
        assert old in data
        (run / name).write_bytes(data.replace(old, new))

    return crime


def _link(name: str) -> Any:
    def crime(run: Path) -> None:
        (run / name).touch()
        (run / name).rename(run / "real")
        (run / name).symlink_to("real")

    return crime


REFUSED: dict[str, tuple[Any, str]] = {
    "unfinished": (_cut_end, "bookends.*record recover ends it"),
    "diary edited": (_replace("diary.jsonl", b"conv1", b"conv2"), "chain"),
    "metrics edited": (_replace("metrics.jsonl", b"0.5", b"0.6"), "metrics"),
    "metrics missing": (lambda run: (run / "metrics.jsonl").unlink(), "metrics.jsonl is missing"),
    "diary missing": (lambda run: (run / "diary.jsonl").unlink(), "diary.jsonl is missing"),
    "diary a link": (_link("diary.jsonl"), "no regular file"),
    "seal a link": (_link("record.json"), "no regular file"),
    "signature a fifo": (lambda run: os.mkfifo(run / "record.sig"), "no regular file"),
    "signed": (lambda run: (run / "record.sig").write_bytes(b"x" * 64), "is signed"),
    "a seal of something else": (lambda run: (run / "record.json").write_text("{}"), "seal"),
}


@pytest.mark.parametrize("crime", REFUSED)
def test_refused(run: Path, crime: str) -> None:
    """Nothing is written where the record is not what a seal would say."""
    commit, message = REFUSED[crime]
    commit(run)
    before = {path.name: path.lstat().st_mtime_ns for path in run.iterdir()}
    with pytest.raises(RecordError, match=message):
        seal(run)
    assert {path.name: path.lstat().st_mtime_ns for path in run.iterdir()} == before


def test_a_record_that_was_changed_after_its_seal(run: Path) -> None:
    """A stale seal is not replaced by one that fits: somebody has to look first."""
    seal(run)
    other = run.parent / "other"
    with Journal(other, run_start=START):
        pass
    for name in ("diary.jsonl", "metrics.jsonl"):
        shutil.copy(other / name, run / name)
    with pytest.raises(RecordError, match="seal"):
        seal(run)


def test_no_directory_and_a_living_writer(tmp_path: Path) -> None:
    """A path that is no directory, and a record that is being written, are refused."""
    with pytest.raises(RecordError, match="no run directory"):
        seal(tmp_path / "none")
    journal = Journal(tmp_path / "run", run_start=START)
    with pytest.raises(RecordBusyError):
        seal(tmp_path / "run")
    journal.close()
    seal(tmp_path / "run")


def test_an_interrupted_run_can_be_sealed(run_program: RunProgram, tmp_path: Path) -> None:
    """After kill -9 and recovery the record is sealed like any other (R-W8)."""
    run_program(
        BEGIN
        + """
journal = Journal("run", run_start=START)
journal.check(0, 1.0, {}, {})
os.kill(os.getpid(), 9)
""",
        expect=-9,
        measured=False,
    )
    with pytest.raises(RecordError, match="recover"):
        seal(tmp_path / "run")
    recover(tmp_path / "run")
    assert seal(tmp_path / "run")["events"] == 2
    assert verify(tmp_path / "run").ok


def test_a_full_disk_changes_nothing(run: Path, run_program: RunProgram) -> None:
    """The old seal stays, and no half-made file is left."""
    seal(run)
    before = _files(run)
    done = run_program(
        """
import resource, signal
from cirron_otel.errors import RecordError
from cirron_otel.training_record.seal import seal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100, -1))
try:
    seal("run")
except RecordError as error:
    print(error)
""",
        measured=False,
    )
    assert "cannot write into run: File too large" in done.stdout
    assert _files(run) == before
