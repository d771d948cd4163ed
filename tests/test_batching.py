"""From rows to files: slices, sizes, odd rows, disks that refuse, producers that help."""

from __future__ import annotations

import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET

import cirron_otel as ci
from cirron_otel import batching, fitting, recorder
from cirron_otel._guard import Guard
from cirron_otel.batch import Batch, MarkRecord, SpanOtel, SpanRecord, decode
from cirron_otel.batching import Batcher, envelope
from cirron_otel.clock import Clock
from cirron_otel.recorder import Recorder
from helpers import RunProgram, read_spool

LIMIT = 4_000_000


def span(number: int, name: str = "x", **more: Any) -> SpanRecord:
    """A small span row."""
    given = {"parent_id": None, "index": None, "start_ns": number, "end_ns": number + 1, **more}
    return SpanRecord(id=f"{number:032x}", name=name, **given)


def mark(number: int, value: Any = 0.5, kind: str = "point", name: str = "m") -> MarkRecord:
    """A small mark row."""
    return MarkRecord(f"{number:032x}", "root", name, "float", value, {}, number, kind)


@pytest.fixture
def guard() -> Guard:
    """The guard of a test."""
    return Guard()


@pytest.fixture
def batcher(guard: Guard) -> Batcher:
    """A batcher with an envelope like a real one."""
    return Batcher(Clock(), guard, envelope({"a": 1}, {"name": "n"}, "writer"), "0.1.0")


def encode_all(batcher: Batcher, open_rows: list[SpanRecord] | None = None) -> list[Batch]:
    """Encode and seal everything queued, and read back what was made of it."""
    step = batcher.slices()
    while step() is not None:
        pass
    batcher.seal(open_rows)
    made = []
    while batcher.sealed:
        sealed = batcher.sealed.popleft()
        data = b"".join(sealed.chunks)
        assert len(data) == sealed.size < LIMIT
        json.loads(data)
        made.append(decode(data))
        assert made[-1].batch_id == sealed.batch_id
        assert made[-1].created_ns == sealed.created_ns
        assert len(made[-1].spans) + len(made[-1].marks) == sealed.rows
    return made


def test_nothing_queued_makes_no_batch(batcher: Batcher) -> None:
    """No rows and no word on open scopes: no file."""
    assert encode_all(batcher) == []
    assert batcher.queued == 0


def test_rows_come_out_as_they_went_in(batcher: Batcher) -> None:
    """More rows than a slice has, in order, under the envelope."""
    batcher.spans.extend(span(number) for number in range(200))
    batcher.marks.extend(mark(number) for number in range(130))
    (batch,) = encode_all(batcher)
    assert [row.id for row in batch.spans] == [span(number).id for number in range(200)]
    assert [row.ts_ns for row in batch.marks] == list(range(130))
    assert (batch.writer, batch.resource) == ("writer", {"a": 1})
    assert batch.open is UNSET


def test_rows_of_a_kind_are_found_in_a_batch(batcher: Batcher) -> None:
    """The pieces of a kind hold its rows, all of them and no others, also where there are none."""
    batcher.marks.extend(mark(number) for number in range(130))
    step = batcher.slices()
    while step() is not None:
        pass
    batcher.seal([span(7)])
    (sealed,) = batcher.sealed
    pieces = sealed.pieces("marks")
    assert len(pieces) == 3
    rows = [row for piece in pieces for row in json.loads(b"[%b]" % piece)]
    assert [row["ts_ns"] for row in rows] == list(range(130))
    assert sealed.pieces("spans") == []


def test_a_slice_is_small(batcher: Batcher) -> None:
    """One call of the slicer takes at most 64 rows: a waiting thread is not held long."""
    batcher.spans.extend(span(number) for number in range(1000))
    step = batcher.slices()
    assert step()
    assert len(batcher.spans) == 1000 - batching.SLICE_ROWS


def test_rows_that_come_meanwhile_wait_for_the_next_flush(batcher: Batcher) -> None:
    """A flush ends, however fast rows arrive."""
    batcher.spans.extend(span(number) for number in range(200))
    step = batcher.slices()
    calls = 0
    while step() is not None:
        calls += 1
        batcher.spans.extend(span(1000 + number) for number in range(64))
        assert calls < 10
    assert 0 < batcher.queued <= 10 * 64


def test_batches_are_sealed_by_rows(batcher: Batcher) -> None:
    """No batch has many more than 20,000 rows."""
    batcher.marks.extend(mark(number) for number in range(45_000))
    batches = encode_all(batcher)
    assert [len(batch.marks) for batch in batches] == [20_032, 20_032, 4_936]
    assert len({batch.batch_id for batch in batches}) == 3


def test_batches_are_sealed_by_bytes(batcher: Batcher) -> None:
    """Large rows make more files, each under 4 MB (C-W18)."""
    batcher.spans.extend(span(number, attrs={"t": "y" * 20_000}) for number in range(800))
    batches = encode_all(batcher)
    assert len(batches) >= 5
    assert [row.id for batch in batches for row in batch.spans] == [span(n).id for n in range(800)]


def test_batch_times_rise_even_when_the_clock_does_not(guard: Guard) -> None:
    """File names sort in the order of writing, also after a clock step."""
    walls = iter([10_000, 9_000, 8_000, 7_000])
    batcher = Batcher(Clock(lambda: next(walls), lambda: 0), guard, {}, "0")
    times = []
    for number in range(3):
        batcher._clock.resync()
        batcher._clock.offset_ns = 10_000 - 1000 * number
        batcher.spans.append(span(number))
        times += [batch.created_ns for batch in encode_all(batcher)]
    assert times == sorted(set(times))


@pytest.mark.parametrize(
    "odd",
    [
        span(5, "bad \ud800 name"),
        span(5, "nul \0"),
        span(5, attrs={"k": "\udfff"}),
        span(5, attrs={"obj": object()}),
        mark(5, "\ud800"),
        mark(5, name="\ud83d\ude00"),
    ],
    ids=range(6),
)
def test_an_odd_row_is_cleaned_and_spoils_no_other(
    batcher: Batcher, guard: Guard, odd: SpanRecord | MarkRecord
) -> None:
    """Text that JSON or a database refuses is cleaned; the slice around it is whole."""
    for number in (1, 2, 3):
        batcher.spans.append(span(number))
        batcher.marks.append(mark(number))
    queue: Any = batcher.spans if isinstance(odd, SpanRecord) else batcher.marks
    queue.insert(1, odd)
    (batch,) = encode_all(batcher)
    assert len(batch.spans) + len(batch.marks) == 7
    assert not guard.losses
    names = [row.name for row in (*batch.spans, *batch.marks)]
    assert all("\0" not in name for name in names)


def test_a_row_that_cannot_be_written_is_counted(
    batcher: Batcher, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What nothing helps is given up, alone, and counted."""
    monkeypatch.setenv("CIRRON_OTEL_STRICT", "0")
    broken = span(5)
    broken.start_ns = {1, object} and b"\xff"  # type: ignore[assignment]
    broken.otel = {"\ud800": 1}  # type: ignore[assignment]
    batcher.spans.extend([span(1), broken, span(2)])
    (batch,) = encode_all(batcher)
    assert [row.start_ns for row in batch.spans] == [1, 2]
    assert guard.losses == {"not_encodable": 1}


@pytest.mark.parametrize(
    "attrs",
    [
        {"list": list(range(600_000))},
        {f"key{n}": "z" * 60_000 for n in range(60)},
        {f"key{n}": n for n in range(200_000)},
        {"control": "\x01" * 65_536, "more": ["\x01" * 65_536] * 10},
        {"k" * 5_000_000: 1},
    ],
    ids=["list", "texts", "many", "control", "key"],
)
def test_a_huge_row_is_cut_to_fit(batcher: Batcher, guard: Guard, attrs: dict[str, Any]) -> None:
    """Attributes of any size leave the row, and every other, on disk in files under 4 MB."""
    batcher.spans.extend([span(1), span(2, attrs={**attrs, "lr": 0.1}), span(3)])
    batcher.marks.append(mark(1))
    batches = encode_all(batcher)
    rows = [row for batch in batches for row in batch.spans]
    assert sorted(row.start_ns for row in rows) == [1, 2, 3]
    row = next(row for row in rows if row.start_ns == 2)
    assert row.attrs_truncated is not UNSET or fitting.ATTRIBUTES_LEFT_OUT in row.attrs
    if len(attrs) < 100:
        assert row.attrs["lr"] == 0.1
    assert not guard.losses


def test_many_large_rows_in_one_slice(batcher: Batcher) -> None:
    """64 rows that are large together never make a batch that is too large."""
    batcher.spans.extend(
        span(number, attrs={"a": "x" * 65_000, "b": "y" * 65_000}) for number in range(64)
    )
    batches = encode_all(batcher)
    assert sum(len(batch.spans) for batch in batches) == 64
    assert all("a" in row.attrs for batch in batches for row in batch.spans)


def test_a_row_with_huge_events_keeps_the_newest(batcher: Batcher) -> None:
    """Span events that fill a file are dropped from the oldest on, and counted in the row."""
    events = [{"name": f"e{n}", "ts_ns": n, "attrs": {"t": "x" * 60_000}} for n in range(100)]
    batcher.spans.append(span(1, otel=SpanOtel(trace_id="1" * 16, events=events)))
    (batch,) = encode_all(batcher)
    kept = batch.spans[0].otel.events
    assert 0 < len(kept) < 100
    assert kept[-1]["name"] == "e99"
    assert batch.spans[0].otel.dropped == {"events": 100 - len(kept)}


def test_open_scopes_are_told_even_where_nothing_else_is(batcher: Batcher) -> None:
    """``open`` alone makes a batch; an empty one says that nothing is open any more."""
    (batch,) = encode_all(batcher, [span(1, end_ns=UNSET), span(2, "bad \ud800", end_ns=UNSET)])
    assert [row.name for row in batch.open] == ["x", "bad \ufffd"]
    assert all(row.end_ns is UNSET for row in batch.open)
    (batch,) = encode_all(batcher, [])
    assert batch.open == []


def test_open_scopes_get_a_file_of_their_own_where_there_is_no_room(batcher: Batcher) -> None:
    """Rows and open scopes that are too large together make two files."""
    batcher.spans.extend(span(number, attrs={"t": "y" * 29_000}) for number in range(100))
    rows = [span(number, end_ns=UNSET, attrs={"t": "z" * 14_000}) for number in range(200)]
    batches = encode_all(batcher, rows)
    assert sum(len(batch.spans) for batch in batches) == 100
    assert len(batches[-1].open) == 200
    assert [batch.open is UNSET for batch in batches] == [True] * (len(batches) - 1) + [False]


def test_forget_leaves_nothing(batcher: Batcher) -> None:
    """After a fork the child starts with empty queues and a lock of its own."""
    batcher.spans.extend(span(number) for number in range(100))
    step = batcher.slices()
    step()
    batcher._lock.acquire()
    batcher.forget()
    assert encode_all(batcher) == []
    assert not batcher._lock.locked()


# --- the recorder's side -------------------------------------------------------------------------


def _recorder() -> Recorder:
    rec = recorder._current
    assert rec is not None
    return rec


def _flood(count: int) -> None:
    for number in range(count):
        with ci.scope("x"):
            ci.mark("m", number)


def test_a_disk_that_refuses_for_a_while_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A file in place of the directory: rows wait, said once, and are written when it is gone."""
    monkeypatch.setenv("CIRRON_OTEL_STRICT", "0")
    ci.profile(frameworks=[], path=tmp_path / "out", flush_interval=0.05)
    _flood(50)
    assert ci.flush()
    shutil.rmtree(tmp_path / "out" / "spool")
    (tmp_path / "out" / "spool").write_text("in the way")
    _flood(200)
    assert not ci.flush()
    health = ci.health()
    assert health["disk_refuses"]
    assert health["swallowed_errors"]["spool_write"] >= 1
    _flood(200)
    (tmp_path / "out" / "spool").unlink()
    assert ci.flush()
    assert not ci.health()["disk_refuses"]
    assert ci.health()["losses"] == {}
    assert ci.shutdown()
    rows = read_spool(tmp_path / "out")
    assert len(rows.named("x")) == 400
    assert len([m for m in rows.marks if m.name == "m"]) == 400
    assert sum("kept in memory" in r.getMessage() for r in caplog.records) == 1


def test_shutdown_on_a_dead_disk_is_bounded_and_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What could not be written is counted, the thread ends, and it does not take long (B.15)."""
    monkeypatch.setenv("CIRRON_OTEL_STRICT", "0")
    before = threading.active_count()
    profiler = ci.profile(frameworks=[], path=tmp_path / "out", flush_interval=0.05)
    assert ci.flush()
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").write_text("in the way")
    _flood(100)
    began = time.monotonic()
    assert not ci.shutdown()
    assert time.monotonic() - began < 8
    assert profiler.health()["losses"]["not_written_at_shutdown"] >= 200
    assert threading.active_count() == before


def test_a_file_size_limit_is_a_refusing_disk(run_program: RunProgram) -> None:
    """``RLIMIT_FSIZE``: a write that fails half-way leaves no broken file and loses nothing."""
    run = run_program(
        """
        import resource, cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=60)
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
        for number in range(1000):
            with ci.scope("x", number): pass
        assert not ci.flush()
        assert ci.health()["disk_refuses"]
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert ci.shutdown()
        assert ci.health()["losses"] == {}
        """,
        env={"CIRRON_OTEL_STRICT": "0"},
        measured=False,
    )
    assert [one.index for one in run.named("x")] == list(range(1000))
    assert not list((run.output_dir / "spool").glob("*.tmp"))


def test_what_is_dropped_while_the_disk_refuses(
    batcher: Batcher, guard: Guard, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest point marks go first, summaries stay, then the oldest spans; all counted."""
    monkeypatch.setattr(batching, "ASSIST_ROWS", 1000)
    monkeypatch.setattr(batching, "MAX_ROWS", 1600)
    batcher.disk_refuses = True
    rang: list[int] = []
    batcher.wake = lambda: rang.append(1)
    kinds = ("summary", "point", "point", "point")
    batcher.marks.extend(mark(number, kind=kinds[number % 4]) for number in range(1600))
    batcher.relieve()
    assert batcher.queued == 1600, "nothing is dropped below the limit"
    batcher.marks.append(mark(1600))
    batcher.relieve()
    assert guard.losses["disk_full_marks"] == 300
    assert [m.ts_ns for m in batcher.marks][:100] == list(range(0, 400, 4))
    assert rang
    batcher.marks.clear()
    batcher.spans.extend(span(number) for number in range(1601))
    batcher.relieve()
    assert guard.losses["disk_full_spans"] == 100
    assert batcher.spans[0].start_ns == 100


def test_producers_help_a_flush_thread_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Past the limit the producing thread encodes slices itself; nothing is lost (decision 18)."""
    monkeypatch.setattr(batching, "ASSIST_ROWS", 1000)
    ci.profile(frameworks=[], flush_interval=3600)
    rec = _recorder()
    held, release = threading.Event(), threading.Event()
    flush = rec.flushes._flush

    def stopped() -> None:
        held.set()
        release.wait(20)
        flush()

    rec.flushes._flush = stopped
    rec.flushes.ring()
    assert held.wait(10)
    _flood(3000)
    health = ci.health()
    release.set()
    assert health["producer_assists"] > 0
    assert health["queued_rows"] < 2000
    assert ci.health()["losses"] == {}
    assert ci.shutdown()
    rows = read_spool()
    assert len({one.id for one in rows.named("x")}) == 3000
    assert len({m.id for m in rows.marks if m.name == "m"}) == 3000


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_flat_out_nothing_is_lost_and_memory_is_bounded(
    run_program: RunProgram, tmp_path: Path
) -> None:
    """300,000 scopes with a mark each, as fast as they go: all on disk, memory grows < 100 MB."""
    run = run_program(
        """
        import cirron_otel as ci
        def peak():
            with open("/proc/self/status") as status:
                return next(int(l.split()[1]) for l in status if l.startswith("VmHWM"))
        ci.profile(frameworks=[], path="flood")
        with ci.scope("warm"): ci.mark("m", 1)
        ci.flush()
        before = peak()
        with ci.scope("all"):
            for number in range(300_000):
                with ci.scope("x"):
                    ci.mark("m", number)
        done = ci.shutdown(timeout=30)
        print(done, ci.health()["losses"], (peak() - before) // 1024)
        """,
        measured=False,
        timeout=150,
    )
    done, losses, grown = run.stdout.split()
    assert (done, losses) == ("True", "{}")
    assert int(grown) < 100
    spans: set[str] = set()
    marks = 0
    for file in (tmp_path / "flood" / "spool").iterdir():
        data = file.read_bytes()
        assert len(data) < LIMIT
        batch = json.loads(data)  # without our types: there are many rows
        spans.update(row["id"] for row in batch["spans"])
        marks += sum(row["name"] == "m" for row in batch["marks"])
    assert len(spans) == 300_003
    assert marks == 300_001
