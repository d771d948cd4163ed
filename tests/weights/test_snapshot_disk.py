# mypy: disable-error-code="no-untyped-call"
"""The files of snapshots and the disk: whole or not there, bounded, never in the program's way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

import cirron_otel as ci
from cirron_otel._guard import Guard
from cirron_otel.cursors import Cursor
from cirron_otel.spool import Spool
from cirron_otel.weights.blobs import Blobs, uri_of
from helpers import RunProgram, read_spool
from weights.snapshots_by_hand import files, part

if TYPE_CHECKING:
    import pytest


def test_a_process_killed_while_it_writes_leaves_no_file(run_program: RunProgram) -> None:
    """After ``kill -9`` in the middle of a file there is no file of that name, and no row."""
    rows = run_program(
        """
        import os, signal
        import torch
        import cirron_otel as ci
        from cirron_otel.weights import containers

        ci.profile(snapshots="full", frameworks=[])
        ci.snapshot({"a": torch.ones(1000)})
        ci.flush()
        whole = containers.bytes_of
        def dies(tensor, size):
            if tensor[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(tensor, size)
        containers.bytes_of = dies
        ci.snapshot({"a": torch.ones(1000), "b": torch.full((1000,), 2.0)})
        """,
        expect=-signal.SIGKILL,
    )
    (row,) = rows.snapshots
    whole = [path for path in files() if path.suffix == ".safetensors"]
    assert [uri_of(path.absolute()) for path in whole] == [row.blob_uri]
    assert [path.name for path in files() if path not in whole] == ["weights.safetensors.tmp"]


def test_what_a_dead_writer_left_is_swept(tmp_path: Path) -> None:
    """A ``.tmp`` that nobody has touched for an hour goes with its folder; a young one stays."""
    blobs = Blobs(Spool(tmp_path), Guard(), max_bytes=10_000)
    for name, age in (("a" * 32, 7200), ("b" * 32, 10)):
        tmp = tmp_path / "snapshots" / name / "weights.safetensors.tmp"
        tmp.parent.mkdir(parents=True)
        tmp.touch()
        then = tmp.stat().st_mtime - age
        os.utime(tmp, (then, then))
    assert blobs.write("c" * 32, "weights", [part("x", torch.ones(3))], {})
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == [
        "a" * 32, "b" * 32, "c" * 32
    ]  # fmt: skip
    os.utime(tmp_path / "snapshots" / ("a" * 32), (0, 0))
    assert blobs.write("d" * 32, "weights", [part("x", torch.ones(3))], {})
    assert not (tmp_path / "snapshots" / ("a" * 32)).exists()


def test_a_disk_that_refuses_costs_the_file_alone(run_program: RunProgram) -> None:
    """A write that fails half way is counted; no part of it stays, and the numbers are there."""
    rows = run_program(
        """
        import resource
        import torch
        import cirron_otel as ci

        ci.profile(snapshots="full", frameworks=[])
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        ci.snapshot({"a": torch.ones(100_000), "b": torch.ones(10)})
        print(ci.health()["losses"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        ci.snapshot({"a": torch.ones(100_000)})
        """,
        measured=False,
    )
    assert rows.stdout == "{'snapshot_file_not_written': 1}\n"
    assert "ulimit -f" in rows.stderr
    assert [row.mode for row in rows.snapshots] == ["stats", "stats", "full"]
    assert all(row.stats is not None for row in rows.snapshots)
    assert len(files()) == 1


def test_a_directory_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """Where ``snapshots`` is no directory, the statistics are recorded and the reason is logged."""
    Path(".cirron").mkdir()
    Path(".cirron/snapshots").write_text("in the way")
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot(nn.Linear(2, 1))
    assert ci.health()["losses"] == {"snapshot_file_not_written": 1}
    ci.shutdown()
    assert len(read_spool().snapshots) == 2
    assert "the statistics are recorded without the tensors" in caplog.text


def folder(root: Path, letter: str, at_s: int, size: int = 1000) -> Path:
    """A snapshot's folder with one file, of a certain age."""
    path = root / "snapshots" / (letter * 32) / "weights.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size))
    os.utime(path, (at_s, at_s))
    return path.parent


def test_the_oldest_files_leave_first(tmp_path: Path) -> None:
    """Past the cap the oldest snapshots go, as many as needed; what is not ours stays."""
    guard = Guard()
    old, older, new = (folder(tmp_path, name, at) for name, at in (("b", 20), ("a", 10), ("c", 30)))
    (tmp_path / "snapshots" / "mine").mkdir()
    blobs = Blobs(Spool(tmp_path), guard, max_bytes=3000)
    assert blobs.write("d" * 32, "weights", [part("x", torch.ones(300))], {})
    assert [path.exists() for path in (older, old, new)] == [False, False, True]
    assert (tmp_path / "snapshots" / "mine").exists()
    assert blobs.evicted_files == 2
    assert blobs.write("e" * 32, "weights", [part("x", torch.ones(10_000))], {}) is None
    assert new.exists()
    assert guard.losses == {"snapshot_file_over_cap": 1}


def test_files_that_a_destination_lacks_leave_last(tmp_path: Path) -> None:
    """A file whose rows are not delivered yet stays as long as a delivered one can go."""
    guard = Guard()
    spool = Spool(tmp_path)
    second = 1_000_000_000
    for at, batch_id in ((11, "1" * 32), (2001, "2" * 32)):
        spool.write([b"{}"], created_ns=at * second, batch_id=batch_id)
    cursor = Cursor(tmp_path, "platform")
    assert cursor.take()
    cursor.settle(spool.files()[1].name, "sent")
    undelivered, delivered = folder(tmp_path, "a", 10), folder(tmp_path, "b", 2000)
    blobs = Blobs(spool, guard, max_bytes=2500, uploads_to=["platform"])
    assert blobs.write("d" * 32, "weights", [part("x", torch.ones(50))], {})
    assert (undelivered.exists(), delivered.exists()) == (True, True)
    assert blobs.write("e" * 32, "weights", [part("x", torch.ones(200))], {})
    assert (undelivered.exists(), delivered.exists()) == (True, False)
    assert guard.losses == {}
    assert blobs.write("f" * 32, "weights", [part("x", torch.ones(400))], {})
    assert not undelivered.exists()
    assert guard.losses == {"evicted_undelivered_blobs": 1}
    cursor.release()


def test_a_file_whose_rows_are_not_written_yet_is_undelivered(tmp_path: Path) -> None:
    """A young file leaves after those that the destination has, and is counted if it must."""
    guard = Guard()
    delivered = folder(tmp_path, "a", 10)
    blobs = Blobs(
        Spool(tmp_path), guard, max_bytes=2500, uploads_to=["platform"], rows_wait_s=1000.0
    )
    assert blobs.write("b" * 32, "weights", [part("x", torch.ones(200))], {})
    assert blobs.write("c" * 32, "weights", [part("x", torch.ones(200))], {})
    assert not delivered.exists()
    assert guard.losses == {}
    assert blobs.write("d" * 32, "weights", [part("x", torch.ones(200))], {})
    assert guard.losses == {"evicted_undelivered_blobs": 1}


def test_a_large_snapshot_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """Before the first file of a large model the log says how much each snapshot takes."""
    model = {"w": torch.zeros(30_000_000)}
    ci.profile(snapshots="full", frameworks=[], snapshot_max_bytes=300_000_000)
    ci.snapshot(model)
    ci.snapshot(model)
    ci.shutdown()
    told = [record.message for record in caplog.records if "120 MB" in record.message]
    assert len(told) == 1
    assert "the newest 2 of them are kept" in told[0]
    assert len(files()) == 2
