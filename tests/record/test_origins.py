"""What a run was made from: the commit and the data, as fields of a record."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

import pytest

from cirron_otel.errors import RecordError
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.origins import code_identity, data_identity
from cirron_otel.training_record.writing.journal import Journal


def _git(place: Path, *words: str) -> str:
    done = subprocess.run(
        ["git", "-C", str(place), "-c", "user.name=t", "-c", "user.email=t@localhost", *words],  # noqa: S607
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_commit_and_whether_anything_differs_from_it(tmp_path: Path) -> None:
    """The commit is git's own; an edited or a new file makes the code changed."""
    _git(tmp_path, "init", "-q")
    assert code_identity(tmp_path) == {}
    (tmp_path / "train.py").write_text("print(1)\n")
    _git(tmp_path, "add", ".")
    _git(tmp_path, "commit", "-q", "-m", "first")
    commit = _git(tmp_path, "rev-parse", "HEAD")
    assert code_identity(tmp_path) == {"commit": commit, "changed": False}
    (tmp_path / "other.py").write_text("")
    assert code_identity(tmp_path) == {"commit": commit, "changed": True}


def test_no_repository_is_no_error(tmp_path: Path) -> None:
    """Outside a repository, and where the folder is missing, there is nothing to say."""
    assert code_identity(tmp_path) == {}
    assert code_identity(tmp_path / "missing") == {}


def test_the_digest_of_data_is_that_of_sha256sum(tmp_path: Path) -> None:
    """Files and folders give the digest of what ``sha256sum`` prints for them."""
    (tmp_path / "images" / "a").mkdir(parents=True)
    (tmp_path / "images" / "a" / "1.bin").write_bytes(b"one")
    (tmp_path / "images" / "0.bin").write_bytes(b"")
    names = ("0.bin", "a/1.bin")
    printed = subprocess.run(
        ["sha256sum", *names],  # noqa: S607
        cwd=tmp_path / "images",
        capture_output=True,
        check=True,
    ).stdout
    expected = {"files": 2, "bytes": 3, "sha256": hashlib.sha256(printed).hexdigest()}
    assert data_identity(tmp_path / "images") == expected
    (tmp_path / "images" / "0.bin").write_bytes(b"x")
    assert data_identity(tmp_path / "images")["sha256"] != expected["sha256"]


def test_missing_data_is_an_error_that_names_it(tmp_path: Path) -> None:
    """What cannot be read is named: a record must not claim data that was not there."""
    with pytest.raises(RecordError, match=r"missing\.bin"):
        data_identity(tmp_path / "missing.bin")


def test_a_record_carries_both(tmp_path: Path) -> None:
    """They go into ``run_start`` as extra fields, and the record verifies."""
    data = tmp_path / "data.bin"
    data.write_bytes(b"1234")
    start = {
        "model": "m", "parameters": 1, "layers": 1, "architecture_sha256": "0" * 64,
        "optimizer": None, "torch": "none", "config": {}, "code": code_identity(tmp_path),
        "data": data_identity(data), "seed": 3,
    }  # fmt: skip
    with Journal(tmp_path / "run", run_start=start):
        pass
    assert verify(tmp_path / "run").ok
    assert '"sha256"' in (tmp_path / "run" / "diary.jsonl").read_text()
