"""Writer locks, and the scopes that dead writers left open."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import UNSET

import cirron_otel.recovery as recovery_module
from cirron_otel.batch import Batch, SpanOtel, SpanRecord, encode
from cirron_otel.errors import SpoolError
from cirron_otel.recovery import (
    DIED,
    WriterLock,
    WriterTrail,
    close_in_memory,
    dead_writers,
    recover,
    writer_details,
    writer_state,
    writer_states,
)
from cirron_otel.spool import Spool

SOURCE = str(Path(recovery_module.__file__).parents[1])
START = 1_000
NAME = f"host-7-{START}"
RUN = {"service.name": "training"}

#: Takes the lock in argv[1], leaves a session and a step open in a batch, waits to be killed.
WRITER = """
import sys, time
from pathlib import Path
from cirron_otel.batch import Batch, SpanRecord, encode
from cirron_otel.recovery import WriterLock
from cirron_otel.spool import Spool
spool = Spool(Path(sys.argv[1]))
lock = WriterLock.acquire(spool.run_directory, host="host", pid=7, start_ns=1000)
rows = [SpanRecord("a" * 32, "cirron.session", None, None, 1000),
        SpanRecord("b" * 32, "epoch", "a" * 32, 0, 1001)]
batch = Batch(1, "9", "c" * 32, 1002, writer=lock.name, open=rows, resource={"rank": 0})
spool.write([encode(batch)], created_ns=1002, batch_id="c" * 32)
print(lock.name, flush=True)
time.sleep(60)
"""

RECOVERER = """
import sys
from pathlib import Path
from cirron_otel.recovery import recover
from cirron_otel.spool import Spool
print("ready", flush=True)
sys.stdin.readline()
for path in recover(Spool(Path(sys.argv[1])), sdk_version="9"):
    print(path.name)
"""


def program(source: str, *arguments: object) -> subprocess.Popen[str]:
    """A Python program running beside the test, once it has said its first line."""
    return subprocess.Popen(
        [sys.executable, "-c", source, *map(str, arguments)],
        env={**os.environ, "PYTHONPATH": SOURCE},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    """What the program says first."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def row(span_id: str, parent_id: str | None = None, start_ns: int = START) -> SpanRecord:
    """An open scope."""
    return SpanRecord(span_id, f"scope {span_id}", parent_id, None, start_ns, attrs={"k": 1})


def ended(span: SpanRecord, end_ns: int) -> SpanRecord:
    """The same scope, closed by its writer."""
    return msgspec.structs.replace(span, end_ns=end_ns)


def put(spool: Spool, created_ns: int, *, writer: str = NAME, **keys: object) -> Batch:
    """Write a batch of a writer."""
    batch_id = hashlib.sha256(f"{created_ns} {writer}".encode()).hexdigest()[:32]
    batch = Batch(1, "0.1", batch_id, created_ns, writer=writer, resource=RUN)
    batch = msgspec.structs.replace(batch, **keys)
    spool.write([encode(batch)], created_ns=created_ns, batch_id=batch_id)
    return batch


def lock(spool: Spool, pid: int = 7) -> WriterLock:
    """The lock of a living writer."""
    return WriterLock.acquire(spool.run_directory, host="host", pid=pid, start_ns=START)


def die(spool: Spool, pid: int = 7) -> str:
    """Leave the lock of a dead writer: what the kernel does when a process ends is close it."""
    dead = lock(spool, pid)
    dead.close_in_child()
    return dead.name


def recovered(spool: Spool) -> Batch:
    """The batch of the only recovery."""
    (path,) = recover(spool, sdk_version="0.2")
    return spool.read(path)


def test_a_lock_lives_and_is_released(tmp_path: Path) -> None:
    """A held lock is alive however often somebody asks; a released one leaves nothing."""
    run = tmp_path / "deep" / "run"
    held = WriterLock.acquire(
        run, host="a-b/../ü c", pid=12, start_ns=99, details={"flush_interval": 0.5}
    )
    assert held.name == "a-b_..___c-12-99"
    assert held.held
    assert [writer_state(run, held.name) for _ in range(3)] == ["alive"] * 3
    assert writer_states(run) == {held.name: "alive"}
    assert writer_details(run, held.name) == {
        "host": "a-b/../ü c", "pid": 12, "start_ns": 99, "flush_interval": 0.5,
    }  # fmt: skip
    assert [path.name for path in run.iterdir()] == [f"{held.name}.lock"]
    held.release()
    held.release()
    assert list(run.iterdir()) == []
    assert writer_state(run, held.name) == "unknown"
    assert writer_details(run, held.name) == {}


@pytest.mark.parametrize("host", ["", "...", ".hidden", "x" * 500])
def test_any_host_name_makes_a_lock(tmp_path: Path, host: str) -> None:
    """The name of the host never makes a hidden, empty or too long file name."""
    held = WriterLock.acquire(tmp_path, host=host, pid=1, start_ns=2)
    assert writer_states(tmp_path) == {held.name: "alive"}
    held.release()


def test_a_second_lock_of_the_same_name_survives_the_release_of_the_first(tmp_path: Path) -> None:
    """Release removes its own file only."""
    spool = Spool(tmp_path)
    first, second = lock(spool), lock(spool)
    first.release()
    assert writer_state(spool.run_directory, NAME) == "alive"
    second.release()
    assert writer_state(spool.run_directory, NAME) == "unknown"


def test_an_unusable_directory(tmp_path: Path) -> None:
    """A file where the directory should be is an error that names it."""
    (tmp_path / "run").write_text("")
    with pytest.raises(SpoolError, match=str(tmp_path / "run")):
        lock(Spool(tmp_path))
    assert writer_states(tmp_path / "run") == {}
    assert writer_state(tmp_path / "run", "x") == "unknown"


def test_without_flock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the file system has no locks, nothing is raised and no one is taken for dead."""
    spool = Spool(tmp_path)
    name = die(spool, pid=8)
    put(spool, 1_010, open=[row("a")])

    def refuse(*_: object) -> None:
        raise OSError(37, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)
    held = lock(spool)
    assert not held.held
    held.release()
    assert writer_states(spool.run_directory) == {name: "unknown"}
    assert recover(spool, sdk_version="1") == []
    (path,) = recover(spool, sdk_version="1", writers=[NAME])
    assert [span.id for span in spool.read(path).spans] == ["a"]
    path.rename(path.with_name(path.name + ".tmp"))  # as if another recoverer were at it
    assert recover(spool, sdk_version="1", writers=[NAME]) == []


def test_fork_and_locks(tmp_path: Path) -> None:
    """A forked child neither frees its parent's lock nor, once it let go, keeps it alive."""
    source = """
import os, signal, sys
from pathlib import Path
from cirron_otel.recovery import WriterLock, writer_state
run = Path(sys.argv[1])
lock = WriterLock.acquire(run, host="h", pid=1, start_ns=1)
for leave in (lock.close_in_child, lock.release):
    child = os.fork()
    if child == 0:
        leave()
        os._exit(0)
    os.waitpid(child, 0)
    print(writer_state(run, lock.name))
child = os.fork()
if child == 0:
    lock.close_in_child()
    signal.alarm(30)  # should the test fail, the child does not stay for good
    signal.pause()
print(child, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    with program(source, tmp_path) as parent:
        states = [first_line(parent), first_line(parent)]
        child = int(first_line(parent))
        assert parent.wait(30) == -signal.SIGKILL
        try:
            assert states == ["alive", "alive"]
            deadline = time.monotonic() + 10
            while writer_state(tmp_path, "h-1-1") == "alive" and time.monotonic() < deadline:
                time.sleep(0.01)
            assert writer_state(tmp_path, "h-1-1") == "dead"
            os.kill(child, 0)  # and the child still runs
        finally:
            os.kill(child, signal.SIGKILL)


def test_kill_9_and_two_recoverers(tmp_path: Path) -> None:
    """After kill -9, two recoverers at once leave one file, the same that one alone writes."""
    out = tmp_path / "out"
    writer = program(WRITER, out)
    name = first_line(writer)
    assert writer_state(out / "run", name) == "alive"
    assert recover(Spool(out), sdk_version="9") == []
    writer.kill()
    writer.communicate()
    assert dead_writers(out / "run") == [name]
    shutil.copytree(out, tmp_path / "copy")

    both = [program(RECOVERER, out) for _ in range(2)]
    assert [first_line(process) for process in both] == ["ready", "ready"]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    written = [line for process in both for line in process.communicate()[0].split()]
    assert [process.returncode for process in both] == [0, 0]
    assert len(written) == 1
    assert list((out / "run").iterdir()) == []

    (alone,) = recover(Spool(tmp_path / "copy"), sdk_version="9")
    assert alone.name == written[0]
    assert alone.read_bytes() == (out / "spool" / written[0]).read_bytes()
    assert len(Spool(out).files()) == 2


def test_many_recoverers_at_once(tmp_path: Path) -> None:
    """However the threads fall, each dead writer is recovered exactly once, with readers asking."""
    for round_ in range(10):
        spool = Spool(tmp_path / str(round_))
        names = [die(spool, pid) for pid in range(5)]
        for i, name in enumerate(names):
            put(spool, 1_010 + i, writer=name, open=[row(f"{i}")])
        barrier = threading.Barrier(4)
        written: list[Path] = []

        def run(
            root: Path = spool.root,
            barrier: threading.Barrier = barrier,
            written: list[Path] = written,
        ) -> None:
            barrier.wait()
            written.extend(recover(Spool(root), sdk_version="9"))

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        written.extend(recover(spool, sdk_version="9"))
        assert len(written) == len(set(written)) == 5
        assert spool.count() == 10
        assert list(spool.run_directory.iterdir()) == []


def test_what_a_recovery_says(tmp_path: Path) -> None:
    """Rows left open are closed at the last batch, children first, under the writer's name."""
    spool = Spool(tmp_path)
    die(spool)
    session, epoch, step = row("s"), row("e", "s", 1_001), row("t", "e", 1_002)
    failed = msgspec.structs.replace(row("f", "s"), otel=SpanOtel(status="error", trace_id="ab"))
    put(spool, 1_010, open=[session, epoch])
    put(spool, 1_020, open=[session, epoch, step, failed], spans=[ended(row("x", "s"), 1_015)])
    last = put(spool, 1_030, spans=[ended(step, 1_025)], scope={"name": "ours"})
    put(spool, 1_040, writer="host-8-1000", open=[row("other")])

    batch = recovered(spool)
    assert batch.batch_id == hashlib.sha256((last.batch_id + NAME).encode()).hexdigest()[:32]
    assert (batch.created_ns, batch.writer, batch.open) == (1_031, NAME, [])
    assert (batch.resource, batch.scope) == (RUN, {"name": "ours"})
    assert (batch.schema_version, batch.sdk_version) == (1, "0.2")
    assert [span.id for span in batch.spans] == ["f", "e", "s"]  # f started before e
    assert {span.end_ns for span in batch.spans} == {1_030}
    assert all(span.attrs == {"k": 1, "recovered": True} for span in batch.spans)
    by_id = {span.id: span for span in batch.spans}
    assert by_id["s"].otel == SpanOtel(status="error", status_message=DIED)
    assert by_id["f"].otel == SpanOtel(status="error", trace_id="ab")
    assert recover(spool, sdk_version="0.2") == []
    assert recover(spool, sdk_version="0.2", writers=[NAME]) == []
    assert spool.count() == 5


def test_nothing_left_open(tmp_path: Path) -> None:
    """A dead writer that had closed everything, or wrote nothing, loses its lock and no more."""
    spool = Spool(tmp_path)
    for pid in (7, 8, 9):
        die(spool, pid)
    put(spool, 1_010, open=[row("s")])
    put(spool, 1_020, open=[])
    put(spool, 1_010, writer="host-8-1000", open=[row("t")], spans=[ended(row("t"), 1_009)])
    assert recover(spool, sdk_version="1") == []
    assert spool.count() == 3
    assert writer_states(spool.run_directory) == {}


def test_both_halves_of_one_flush(tmp_path: Path) -> None:
    """A row that a batch of the same nanosecond closed is closed, whichever comes first."""
    spool = Spool(tmp_path)
    die(spool)
    for batch_id, keys in (("1" * 32, {"spans": [ended(row("t"), 1_009)]}), ("2" * 32, {})):
        batch = Batch(1, "0", batch_id, 1_010, writer=NAME, open=[row("t"), row("s")])
        if keys:
            batch = msgspec.structs.replace(batch, open=UNSET, **keys)
        spool.write([encode(batch)], created_ns=1_010, batch_id=batch_id)
    assert [span.id for span in recovered(spool).spans] == ["s"]


def test_windows_are_closed_where_they_belong(tmp_path: Path) -> None:
    """The open root of a window trace is closed among the windows, not in the canonical tree."""
    spool = Spool(tmp_path)
    die(spool)
    window = SpanOtel(unknown={"window": True})
    first, second = (msgspec.structs.replace(row(name), otel=window) for name in "vw")
    put(spool, 1_010, open=[row("s"), first, second])
    put(spool, 1_020, windows=[ended(first, 1_015)])
    batch = recovered(spool)
    assert [span.id for span in batch.spans] == ["s"]
    assert batch.windows is not UNSET
    assert [(span.id, span.end_ns) for span in batch.windows] == [("w", 1_020)]


def test_broken_and_older_files(tmp_path: Path) -> None:
    """A broken file costs itself alone; files from before the writer's start are not read."""
    spool = Spool(tmp_path)
    die(spool)
    put(spool, 990, open=[row("before")])
    assert recover(spool, sdk_version="1") == []
    die(spool)
    put(spool, 1_010, open=[row("s")])
    half = json.dumps({"schema_version": 1, "writer": NAME, "open": []})[:-3].encode()
    spool.write([half], created_ns=1_020, batch_id="b" * 32)
    batch = recovered(spool)
    assert batch.created_ns == 1_011
    assert [span.id for span in batch.spans] == ["s"]


def test_a_recoverer_that_died(tmp_path: Path) -> None:
    """The half-written file of a recoverer that died does not keep the next one out."""
    spool = Spool(tmp_path)
    die(spool)
    put(spool, 1_010, open=[row("s")])
    (path,) = recover(spool, sdk_version="1")
    content = path.read_bytes()
    path.unlink()
    path.with_name(path.name + ".tmp").write_bytes(content[:10])
    die(spool)
    assert recover(spool, sdk_version="1") == [path]
    assert path.read_bytes() == content
    assert not path.with_name(path.name + ".tmp").exists()


def test_a_disk_that_refuses_keeps_the_lock(tmp_path: Path) -> None:
    """When the recovery cannot be written the error is told and the next one tries again."""
    spool = Spool(tmp_path)
    die(spool)
    put(spool, 1_010, open=[row("s")])
    (path,) = recover(spool, sdk_version="1")
    path.unlink()
    die(spool)
    path.with_name(path.name + ".tmp").mkdir()
    with pytest.raises(SpoolError):
        recover(spool, sdk_version="1")
    assert dead_writers(spool.run_directory) == [NAME]
    path.with_name(path.name + ".tmp").rmdir()
    assert recover(spool, sdk_version="1") == [path]


@pytest.mark.parametrize("name", ["../x-1-2", "x", "", "a/b-1-2", "x-1-y", ".x-1-2"])
def test_names_that_no_lock_has(tmp_path: Path, name: str) -> None:
    """A writer's name out of a foreign file never becomes a path."""
    spool = Spool(tmp_path / "out")
    assert recover(spool, sdk_version="1", writers=[name]) == []
    assert list(tmp_path.iterdir()) == []


def test_a_living_writer_is_passed_over(tmp_path: Path) -> None:
    """Naming a living writer does not close its scopes."""
    spool = Spool(tmp_path)
    held = lock(spool)
    put(spool, 1_010, open=[row("s")])
    assert recover(spool, sdk_version="1", writers=[NAME]) == []
    assert held.held
    assert writer_state(spool.run_directory, NAME) == "alive"
    held.release()


def test_half_made_locks_are_swept(tmp_path: Path) -> None:
    """What a process leaves that dies while making its lock goes after an hour."""
    old, young = (tmp_path / "run" / f"h-{pid}-1.lock.tmp" for pid in (1, 2))
    (tmp_path / "run").mkdir()
    old.write_text("")
    young.write_text("")
    os.utime(old, (1, 1))
    assert recover(Spool(tmp_path), sdk_version="1") == []
    assert not old.exists()
    assert young.exists()


IDS = st.integers(0, 12).map(str)
ROWS = st.lists(
    st.builds(row, IDS, st.none() | IDS, st.integers(0, 50)), max_size=12, unique_by=lambda r: r.id
)


@settings(max_examples=300, deadline=None)
@given(rows=ROWS, end_ns=st.integers(0, 50), ends=st.dictionaries(IDS, st.integers(0, 99)))
def test_no_scope_outlives_its_parent(
    rows: list[SpanRecord], end_ns: int, ends: dict[str, int]
) -> None:
    """In any forest each row is closed once, after it starts, before its parent; circles end."""
    before = msgspec.json.encode(rows)
    closed = close_in_memory(rows, end_ns, ends)
    assert msgspec.json.encode(rows) == before
    assert sorted(span.id for span in closed) == sorted(span.id for span in rows)
    at = {span.id: i for i, span in enumerate(closed)}
    parents = {span.id: span.parent_id for span in rows}
    for span in closed:
        assert isinstance(span.end_ns, int)
        assert span.end_ns >= max(span.start_ns, end_ns, ends.get(span.id, 0))
        above, current = set[str](), span.parent_id
        while current in parents and current not in above:
            above.add(current)
            current = parents[current]
        if span.parent_id in at and current not in above:
            assert at[span.id] < at[span.parent_id]
            parent_end = closed[at[span.parent_id]].end_ns
            assert isinstance(parent_end, int)
            assert span.end_ns <= parent_end


@settings(max_examples=50, deadline=None)
@given(order=st.permutations(range(4)))
def test_a_trail_does_not_depend_on_the_order(order: list[int]) -> None:
    """Batches of a writer say the same in whatever order they are read."""
    batches = [
        Batch(1, "0", "a" * 32, 10, writer=NAME, open=[row("s", start_ns=1)]),
        Batch(1, "0", "b" * 32, 20, writer=NAME, open=[row("s", start_ns=1), row("e", "s", 15)]),
        Batch(1, "0", "c" * 32, 30, writer=NAME, spans=[ended(row("x", "e", 16), 77)]),
        Batch(1, "0", "d" * 32, 40, writer=NAME),
    ]
    trail = WriterTrail(NAME)
    assert trail.closed() == []
    for i in order:
        trail.feed(batches[i])
    assert [span.id for span in trail.left_open()] == ["s", "e"]
    assert [(span.id, span.end_ns) for span in trail.closed()] == [("e", 77), ("s", 77)]
