"""Events on standard output: whole lines whatever else is printed, and every row once."""

from __future__ import annotations

import fcntl
import io
import json
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cirron_otel.batch import decode
from cirron_otel.destinations.base import Accepted, Parcel, Rejected, RetryAfter
from cirron_otel.destinations.event_stream import PIPE_BYTES, EventStream, events
from helpers import RunProgram

BATCH_ID = "ab" * 16


def _document(spans: int, **parts: Any) -> dict[str, Any]:
    return {
        "schema_version": 1, "sdk_version": "0.3.0", "batch_id": BATCH_ID,
        "created_ns": 1_780_000_000_000_000_000,
        "spans": [
            {"id": f"{n:032x}", "name": f"step é {n}", "parent_id": None, "index": n,
             "start_ns": 1, "end_ns": 2, "cpu_ns": None, "gpu_ns": None,
             "memory_peak_bytes": None, "thread_id": 1, "pid": 1, "rank": 0, "attrs": {},
             "mark_ids": []}
            for n in range(spans)
        ],
        "marks": [
            {"id": f"{n:032x}", "span_id": "root", "name": "m", "value_type": "int", "value": n,
             "attrs": {}, "ts_ns": n, "kind": "point"}
            for n in range(spans)
        ],
        "snapshots": [], "resource": {"cirron.run.id": "r"}, **parts,
    }  # fmt: skip


def _parcel(document: dict[str, Any], **how: Any) -> Parcel:
    return Parcel(document["batch_id"], Path("x"), json.dumps(document, **how).encode())


def _compact(document: dict[str, Any]) -> Parcel:
    return _parcel(document, separators=(",", ":"))


def _rows(found: list[dict[str, Any]], name: str) -> list[Any]:
    return [row for event in found for row in event["payload"].get(name, [])]


def _parse(text: str) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in text.splitlines() if line.startswith('{"__cirron_event__"')
    ]


def test_an_event_is_one_line_in_the_documented_form() -> None:
    """Without a limit a batch is one event that holds it whole, also one written for people."""
    document = _document(3)
    (message,) = events(_parcel(document, indent=2), 0)
    assert message.startswith(b"\n{")
    assert message.endswith(b"}\n")
    assert message.count(b"\n") == 2
    assert json.loads(message) == {
        "__cirron_event__": "trace_batch", "schema_version": 1, "sdk_version": "0.3.0",
        "payload": document,
    }  # fmt: skip


def test_messages_fit_a_pipe_and_together_are_the_batch() -> None:
    """Each message is a batch of its own and short enough to be written in one piece."""
    document = _document(500, windows=[], open=[{"id": "cd" * 16, "name": "x", "parent_id": None,
                                                 "index": None, "start_ns": 1}])  # fmt: skip
    messages = list(events(_compact(document), PIPE_BYTES))
    assert max(map(len, messages)) <= PIPE_BYTES
    assert sum(map(len, messages)) / len(messages) > 0.85 * PIPE_BYTES
    found = [json.loads(message) for message in messages]
    assert _rows(found, "spans") == document["spans"]
    assert _rows(found, "marks") == document["marks"]
    assert [event["payload"]["open"] for event in found if "open" in event["payload"]] == [
        document["open"]
    ]
    batches = [decode(json.dumps(event["payload"]).encode()) for event in found]
    ids = [batch.batch_id for batch in batches]
    assert len(set(ids)) == len(ids)
    assert {str(batch.resource) for batch in batches} == {"{'cirron.run.id': 'r'}"}
    assert list(events(_compact(document), PIPE_BYTES)) == messages


def test_a_row_that_is_longer_than_a_pipe_takes_goes_alone() -> None:
    """The long row makes a long message; those beside it stay short."""
    document = _document(20)
    document["spans"][10]["attrs"] = {"long": "x" * 10_000}
    messages = list(events(_compact(document), PIPE_BYTES))
    assert len([message for message in messages if len(message) > PIPE_BYTES]) == 1
    assert _rows([json.loads(message) for message in messages], "spans") == document["spans"]


def test_a_snapshots_file_is_told_of_before_its_rows() -> None:
    """Each file that rows name is an event of its own, once, ahead of the batch."""
    row = {"id": "0" * 32, "span_id": "cd" * 16, "tensor_name": "w", "shape": [1],
           "dtype": "float32", "mode": "full", "stats": None, "ts_ns": 1, "attrs": {},
           "blob_uri": f"file:///data/a%20b/snapshots/{'cd' * 16}/weights.safetensors"}  # fmt: skip
    document = _document(0, snapshots=[row, row])
    blob, batch = [json.loads(message) for message in events(_compact(document), 0)]
    assert blob["__cirron_event__"] == "trace_blob"
    assert blob["payload"] == {
        "remote_key": f"snapshots/{'cd' * 16}/weights.safetensors",
        "local_path": f"/data/a b/snapshots/{'cd' * 16}/weights.safetensors",
    }
    assert batch["payload"] == document


def test_what_is_no_batch_is_rejected(tmp_path: Path) -> None:
    """Bytes that cannot be read write nothing."""
    with (tmp_path / "out").open("w+", encoding="utf-8") as file:
        stream = EventStream(file)
        answer = stream.send(Parcel(BATCH_ID, Path("x"), b"[1"))
        stream.close()
        assert isinstance(answer, Rejected)
        assert file.read() == ""


@pytest.fixture
def pipe() -> Iterator[tuple[int, io.TextIOWrapper]]:
    """The reading end of a pipe, and a stream on its writing end."""
    reading, writing = os.pipe()
    stream = os.fdopen(writing, "w", encoding="utf-8")
    yield reading, stream
    stream.close()
    os.close(reading)


class _Reader(threading.Thread):
    """Reads a pipe until all writers have closed it."""

    def __init__(self, fd: int) -> None:
        super().__init__(daemon=True)
        self.fd = fd
        self.data = b""

    def run(self) -> None:
        while chunk := os.read(self.fd, 3000):
            self.data += chunk


def test_lines_are_whole_while_a_thread_and_a_process_print(
    pipe: tuple[int, io.TextIOWrapper],
) -> None:
    """With others printing halves of lines into the same pipe, no event is torn or missing."""
    reading, stream = pipe
    reader = _Reader(reading)
    reader.start()
    stop = threading.Event()

    def print_halves() -> None:
        while not stop.is_set():
            stream.write("partial ")
            stream.flush()
            stream.write("and the rest\n" * 7)
            stream.flush()

    printer = threading.Thread(target=print_halves)
    printer.start()
    child = os.fork()
    if child == 0:
        until = time.monotonic() + 2
        while time.monotonic() < until:
            os.write(stream.fileno(), b"child " * 100)
        os._exit(0)
    document = _document(3000)
    sender = EventStream(stream)
    assert sender.send(_compact(document)) == Accepted()
    sender.close()
    stop.set()
    printer.join()
    os.waitpid(child, 0)
    stream.close()
    reader.join(10)
    found = _parse(reader.data.decode())
    assert _rows(found, "spans") == document["spans"]
    assert _rows(found, "marks") == document["marks"]


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "non-blocking"])
def test_a_reader_that_stops_holds_nothing_for_ever(
    pipe: tuple[int, io.TextIOWrapper],
    blocking: bool,  # noqa: FBT001 - a column
) -> None:
    """A full pipe is told after the stall time, and what is left goes on where it stopped."""
    reading, stream = pipe
    if not blocking:
        flags = fcntl.fcntl(stream.fileno(), fcntl.F_GETFL)
        fcntl.fcntl(stream.fileno(), fcntl.F_SETFL, flags | os.O_NONBLOCK)
    document = _document(1000)
    sender = EventStream(stream, stall=0.2)
    assert sender.send(_compact(document)) == RetryAfter(None, "standard output takes nothing more")
    reader = _Reader(reading)
    reader.start()
    assert sender.send(_compact(document)) == Accepted()
    sender.close()
    stream.close()
    reader.join(10)
    found = _parse(reader.data.decode())
    assert _rows(found, "spans") == document["spans"]


def test_a_reader_that_has_gone_is_told(pipe: tuple[int, io.TextIOWrapper]) -> None:
    """A closed pipe raises nothing and leaves the batch in the queue."""
    reading, stream = pipe
    other = os.dup(stream.fileno())
    os.dup2(os.open(os.devnull, os.O_RDONLY), reading)
    sender = EventStream(stream)
    assert sender.send(_compact(_document(1))) == RetryAfter(None, "nobody reads standard output")
    sender.close()
    os.close(other)


def test_a_stand_in_for_standard_output_is_written_through() -> None:
    """Where a notebook or a test has put an object in its place, that object gets the lines."""

    class Notebook:
        text = ""

        def write(self, text: str) -> None:
            self.text += text

        def flush(self) -> None:
            pass

        def fileno(self) -> int:
            return 2

    stand_in: Any = Notebook()
    document = _document(100)
    sender = EventStream(stand_in)
    assert sender.send(_compact(document)) == Accepted()
    sender.close()
    assert [event["payload"] for event in _parse(stand_in.text)] == [document]
    assert isinstance(sender.send(_compact(document)), RetryAfter)


def test_a_stand_in_that_raises_is_told() -> None:
    """A closed stream object is an answer."""
    closed = io.StringIO()
    closed.close()
    sender = EventStream(closed)
    answer = sender.send(_compact(_document(1)))
    assert isinstance(answer, RetryAfter)
    assert "I/O operation on closed file" in answer.reason


def test_the_programs_descriptor_stays_its_own(pipe: tuple[int, io.TextIOWrapper]) -> None:
    """Closing the destination closes none of the program's files, and leaves none of ours."""
    _, stream = pipe
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    for _ in range(50):
        EventStream(stream).close()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - a count
    stream.write("still open")
    stream.flush()


PROGRAM = """
import sys
from pathlib import Path
from cirron_otel.destinations.base import Parcel
from cirron_otel.destinations.event_stream import EventStream
sys.stdout = open("out.txt", "w")
print("before", end="")
sender = EventStream()
sender.send(Parcel("ab" * 16, Path("x"), Path(sys.argv[1]).read_bytes()))
sender.close()
print(" after")
sys.stdout.close()
assert "opentelemetry" not in sys.modules and "urllib3" not in sys.modules
"""


def test_a_file_as_standard_output_gets_one_line_a_batch(
    tmp_path: Path, run_program: RunProgram
) -> None:
    """The program's own text is complete, and the event stands in a line of its own."""
    document = _document(100)
    batch = tmp_path / "batch.json"
    batch.write_text(json.dumps(document), encoding="utf-8")
    run_program(PROGRAM, args=[str(batch)])
    text = (tmp_path / "out.txt").read_text(encoding="utf-8")
    (event,) = _parse(text)
    assert event["payload"] == document
    assert "before after" in text


RUN = """
import sys, time
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=0.05)
for epoch in ci.epochs(range(3)):
    for step in ci.batches(range(10)):
        print("half of a line ", end="", flush=True)
        ci.mark("loss", step / 10)
        time.sleep(0.005)
    print()
"""


@pytest.mark.parametrize("forward", ["thread", "process"])
def test_a_whole_run_is_told_on_standard_output(run_program: RunProgram, forward: str) -> None:
    """Every row of the run is in an event, the session's too, and the program's text is there."""
    run = run_program(RUN, env={"CIRRON_RUN_ID": "r1", "CIRRON_FORWARD": forward})
    found = _parse(run.stdout)
    assert sorted(row["id"] for row in _rows(found, "spans")) == sorted(s.id for s in run.spans)
    assert sorted(row["id"] for row in _rows(found, "marks")) == sorted(m.id for m in run.marks)
    assert "cirron.session" in {row["name"] for row in _rows(found, "spans")}
    assert run.stdout.count("half of a line ") == 30
    assert {event["payload"]["resource"]["cirron.run.id"] for event in found} == {"r1"}
