"""What hostile networks, disks and users have shown: each of these once went wrong."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel import forward_process
from cirron_otel._guard import Guard
from cirron_otel.batch import decode
from cirron_otel.cursors import Cursor
from cirron_otel.destinations import retrying
from cirron_otel.destinations.base import Accepted, Answer, Parcel, Rejected, RetryAfter
from cirron_otel.destinations.event_stream import EventStream
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_settings import otlp_targets
from cirron_otel.destinations.platform import Platform
from cirron_otel.forwarder import Forwarder
from delivery.otlp_server import OtlpServer, http_receiver
from delivery.platform_server import KEY, PlatformServer
from delivery.receivers import Receiver, record, until
from helpers import RunProgram

Start = Callable[..., Forwarder]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Start a forwarder from ``tmp_path`` with short pauses; stopped at the end."""
    monkeypatch.setattr(retrying, "_FIRST_PAUSE_S", 0.02)
    running: list[tuple[Forwarder, Receiver]] = []

    def begin(receiver: Receiver) -> Forwarder:
        forwarder = Forwarder((tmp_path,), (receiver,), poll_s=0.02)
        forwarder.start()
        running.append((forwarder, receiver))
        return forwarder

    yield begin
    for forwarder, receiver in running:
        receiver.hold.set()
        forwarder.stop(0.5)
    until(lambda: all(receiver.closed for _, receiver in running))


def spans_of(server: OtlpServer) -> list[Any]:
    """The spans of every request for traces, also of those that were refused."""
    return [
        span
        for request in server.requests
        for resource_spans in getattr(request.message, "resource_spans", ())
        for scope_spans in resource_spans.scope_spans
        for span in scope_spans.spans
    ]


# --- one batch that no answer comes to ----------------------------------------------------------


def test_a_batch_at_which_the_receiver_falls_over_holds_up_no_other(
    tmp_path: Path, start: Start
) -> None:
    """A batch whose request is reset every time waits; the others go, in order."""
    ids = record(tmp_path, 4)
    receiver = Receiver(
        judge=lambda parcel: RetryAfter(None, "reset") if parcel.batch_id == ids[0] else None
    )
    start(receiver)
    until(lambda: receiver.taken == ids[1:])
    assert receiver.tries.count(ids[0]) >= 4


def test_a_batch_that_is_alone_is_not_put_off(tmp_path: Path, start: Start) -> None:
    """While nothing else waits, no answer means only a pause: an outage ends at once."""
    (only,) = record(tmp_path, 1)
    receiver = Receiver(answers=[RetryAfter(None, "reset")] * 4)
    forwarder = start(receiver)
    assert forwarder.drain(20) == []
    assert receiver.tries == [only] * 5


def test_a_batch_of_which_parts_are_taken_is_not_put_off(tmp_path: Path, start: Start) -> None:
    """As long as each try gets a part through, the batch stays at the head of the queue."""
    ids = record(tmp_path, 2)
    receiver = Receiver(answers=[RetryAfter(None, "reset", moved=True)] * 5)
    forwarder = start(receiver)
    assert forwarder.drain(20) == []
    assert receiver.tries == [ids[0]] * 6 + [ids[1]]


def test_a_reset_in_the_middle_is_progress() -> None:
    """A batch of several requests that is cut off says that a part of it has arrived."""
    with http_receiver() as server:
        target = otlp_targets({"endpoint": server.url, "max_request_bytes": 64 * 1024})[0]
        destination = OtlpDestination(target, pending=False)
        root = Path.cwd()
        record(root, 1, rows=2000)
        (path,) = (root / "spool").glob("*.json")
        server.script = [200, 503]
        answer = destination.send(Parcel.read(path))
        assert isinstance(answer, RetryAfter)
        assert answer.moved
        server.script = [503]
        again = destination.send(Parcel.read(path))
        assert isinstance(again, RetryAfter)
        assert not again.moved
        assert isinstance(destination.send(Parcel.read(path)), Accepted)
        destination.close()


def test_a_rejected_batch_that_cannot_be_set_aside_holds_up_no_other(
    tmp_path: Path, start: Start
) -> None:
    """With something in the way of spool/rejected/ the refused batch stays and the rest goes."""
    ids = record(tmp_path, 3)
    (tmp_path / "spool" / "rejected").write_text("in the way", encoding="utf-8")
    receiver = Receiver(
        judge=lambda parcel: Rejected(400, "no") if parcel.batch_id == ids[0] else None
    )
    forwarder = start(receiver)
    until(lambda: receiver.taken == ids[1:])
    assert [left.batches for left in forwarder.stop(0.1)] == [1]
    (tmp_path / "spool" / "rejected").unlink()
    assert start(Receiver()).drain(20) == []


# --- the queue and the disk ---------------------------------------------------------------------


def test_what_was_evicted_in_an_outage_is_no_longer_in_the_queue(
    tmp_path: Path, start: Start
) -> None:
    """Health says what still lies there, not what lay there once."""
    ids = record(tmp_path, 5)
    receiver = Receiver()
    receiver.hold.clear()
    forwarder = start(receiver)
    assert receiver.inside.wait(20)
    down = [True]
    receiver.judge = lambda _: RetryAfter(None, "down") if down else None
    files = sorted((tmp_path / "spool").glob("*.json"))
    size = sum(path.stat().st_size for path in (files[0], *files[3:]))
    for path in files[:3]:
        path.unlink()
    receiver.hold.set()
    until(lambda: forwarder.health()[0]["queue_batches"] == 3)
    assert forwarder.health()[0]["queue_bytes"] == size
    assert forwarder.health()[0]["gone_undelivered"] == 2
    assert receiver.taken == []
    down.clear()
    until(lambda: len(receiver.taken) >= 2)
    assert set(receiver.taken) <= {ids[0], *ids[3:]}
    assert forwarder.drain(20) == []
    assert (forwarder.health()[0]["queue_batches"], forwarder.health()[0]["queue_bytes"]) == (0, 0)


@pytest.mark.parametrize("before", ["nothing", "a torn log"])
def test_a_disk_that_is_full_from_the_beginning_stops_no_delivery(
    before: str, tmp_path: Path
) -> None:
    """Everything goes out, once, is told, and is noted as soon as the disk takes it."""
    record(tmp_path, 5)
    if before == "a torn log":
        cursor = Cursor(tmp_path, "receiver")
        assert cursor.take()
        cursor.release()
        with (tmp_path / "cursors" / "receiver.log").open("ab") as log:
            log.write(b"0123")
    receiver = Receiver()
    guard = Guard()
    forwarder = Forwarder((tmp_path,), (receiver,), guard=guard, poll_s=0.02)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        forwarder.start()
        left = forwarder.drain(20)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
    assert left == []
    assert len(receiver.taken) == 5
    assert "deliver cursor receiver" in guard._last_logged
    forwarder.stop(5)
    until(lambda: receiver.closed)
    again = Receiver()
    later = Forwarder((tmp_path,), (again,), poll_s=0.02)
    later.start()
    assert later.stop(5) == []
    assert again.taken == []


def test_a_line_torn_by_a_full_disk_is_written_anew(tmp_path: Path) -> None:
    """What was settled while half a line fitted is known to the next process all the same."""
    program = f"""
import resource, signal
from pathlib import Path
from cirron_otel.cursors import Cursor
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
cursor = Cursor(Path({str(tmp_path)!r}), "platform")
assert cursor.take()
names = [f"{{i:020d}}-{{i:032x}}.json" for i in range(4)]
cursor.settle(names[0], "sent")
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (cursor.path.stat().st_size + 10, hard))
assert not cursor.settle(names[1], "sent")
assert not cursor.settle(names[2], "sent")
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
cursor.release()
again = Cursor(Path({str(tmp_path)!r}), "platform")
assert again.take()
assert set(again.settled) == set(names[:3]), again.settled
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_first_batch_does_not_wait_for_its_place(tmp_path: Path) -> None:
    """A directory that was empty a moment ago is not taken for one that another delivers."""
    receiver = Receiver()
    states: list[str] = []
    forwarder = Forwarder((tmp_path,), (receiver,), poll_s=0.01)
    forwarder.start()
    until(lambda: forwarder._listings[tmp_path].edition)
    record(tmp_path, 1)

    def taken() -> bool:
        states.append(forwarder.health()[0]["state"])
        return bool(receiver.taken)

    until(taken)
    assert "elsewhere" not in states
    assert forwarder.stop(5) == []


# --- rows that nobody should write --------------------------------------------------------------

DEEP = b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD_URI = (
    b'{"schema_version":1,"batch_id":"x","created_ns":1,"spans":[],"marks":[],'
    b'"snapshots":[{"blob_uri":"file://["}],"note":"file:///x"}'
)


def test_a_row_with_an_address_that_is_none_stops_nothing(tmp_path: Path) -> None:
    """The rows go to the platform and to the event stream, and no file is asked for."""
    parcel = Parcel("0" * 32, tmp_path / "x.json", BAD_URI)
    with PlatformServer(default="202") as server:
        platform = Platform(server.url, "/v1/traces", lambda: KEY, output_dir=tmp_path)
        assert platform.send(parcel) == Accepted()
        platform.close()
        assert [request.method for request in server.requests] == ["POST"]
    stream = io.StringIO()
    assert EventStream(stream).send(parcel) == Accepted()
    assert '"blob_uri":"file://["' in stream.getvalue()


def test_nesting_without_end_is_an_answer_and_no_bug(tmp_path: Path) -> None:
    """What is too deep to be read is refused or passed on, like anything that is no batch."""
    parcel = Parcel("0" * 32, tmp_path / "x.json", DEEP.replace(b'"a"', b'"file://"'))
    assert isinstance(EventStream(io.StringIO()).send(parcel), Rejected)
    assert parcel.halves() == []
    with PlatformServer(default="422") as server:
        platform = Platform(server.url, "/v1/traces", lambda: KEY, output_dir=tmp_path)
        assert isinstance(platform.send(parcel), Rejected)
        platform.close()


def test_the_same_id_in_two_files_is_two_batches(tmp_path: Path) -> None:
    """A copied file is not taken for the rest of the one it was copied from."""
    record(tmp_path, 1, rows=3)
    (path,) = (tmp_path / "spool").glob("*.json")
    other = path.with_name(f"{1:020d}-{path.stem.rpartition('-')[2]}.json")
    other.write_bytes(path.read_bytes().replace(b'"step"', b'"copy"'))
    with http_receiver() as server:
        destination = OtlpDestination(otlp_targets(server.url)[0], pending=False)
        server.script = [503]
        assert isinstance(destination.send(Parcel.read(path)), RetryAfter)
        assert isinstance(destination.send(Parcel.read(other)), Accepted)
        assert isinstance(destination.send(Parcel.read(path)), Accepted)
        destination.close()
        names = [span.name for span in spans_of(server)]
        assert names == [*["step"] * 3, *["copy"] * 3, *["step"] * 3]


# --- the helper ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("executable", "frozen"), [("/opt/train/train", False), ("", False), (sys.executable, True)]
)
def test_no_helper_is_made_of_a_program_that_is_no_interpreter(
    executable: str,
    frozen: bool,  # noqa: FBT001
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A frozen program would start itself again and again; a thread delivers instead, told."""
    with PlatformServer() as server:
        monkeypatch.setenv("CIRRON_API_KEY", server.key)
        monkeypatch.setenv("CIRRON_API_ENDPOINT", server.url)
        monkeypatch.setattr(sys, "executable", executable)
        if frozen:
            monkeypatch.setattr(sys, "frozen", True, raising=False)
        with caplog.at_level(logging.WARNING):
            profiler = ci.profile(frameworks=[], forward="process", exit_budget=20)
            with ci.scope("step"):
                pass
            assert any(t.name == "cirron-otel-to-platform" for t in threading.enumerate())
            profiler.shutdown()
        assert [row["name"] for row in server.spans].count("step") == 1
        assert "needs a Python interpreter" in caplog.text


def test_a_helper_that_gets_no_descriptors_leaves_none_behind(tmp_path: Path) -> None:
    """Where the second pipe cannot be made the first one is closed again."""
    helper = forward_process.ForwardProcess(tmp_path, [], guard=Guard())
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as opened:
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - counts itself, both times
        first = os.open("/dev/null", os.O_RDONLY)
        os.close(first)
        # Room for one pipe: two descriptors, and not a third.
        resource.setrlimit(resource.RLIMIT_NOFILE, (first + 3, hard))
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with pytest.raises(OSError, match="Too many open files"):
            helper._spawn()
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208 - as above


# --- the weaknesses of the old SDK that had no test of their own ---------------------------------

EVENTS = """
import sys
import cirron_otel as ci
profiler = ci.profile(frameworks=[])
for number in range(300):
    with ci.scope("step", n=number):
        sys.stdout.write("partial")
ci.flush()
profiler.shutdown()
"""


def test_the_event_stream_bypasses_no_spool(run_program: RunProgram) -> None:
    """C-W27: what was told on standard output lies in the spool too, and the other way round."""
    run = run_program(EVENTS, env={"CIRRON_RUN_ID": "run-1", "CIRRON_EXIT_BUDGET": "20"})
    told: Counter[str] = Counter()
    for line in run.stdout.splitlines():
        if line.startswith('{"__cirron_event__"'):
            told.update(row["id"] for row in json.loads(line)["payload"]["spans"])
    kept = Counter(row.id for batch in run.batches for row in batch.spans)
    assert told == kept
    assert len(kept) >= 301


def test_a_spool_that_was_delivered_is_not_posted_again(tmp_path: Path) -> None:
    """C-W8: a second flush of a directory whose files are kept sends nothing."""
    record(tmp_path, 3)
    with PlatformServer() as server:
        for expected in ([3], []):
            platform = Platform(server.url, "/v1/traces", lambda: KEY, output_dir=tmp_path)
            forwarder = Forwarder((tmp_path,), (platform,), poll_s=0.02)
            forwarder.start()
            assert forwarder.stop(20) == []
            assert [n for n in [forwarder.health()[0]["delivered"]] if n] == expected
        assert len(server.requests) == 3


def test_times_keep_every_nanosecond_by_otlp(tmp_path: Path) -> None:
    """C-W33: ns since the epoch, which no double can hold, arrive unrounded by OTLP's JSON too."""
    record(tmp_path, 1)
    (path,) = (tmp_path / "spool").glob("*.json")
    data = path.read_bytes()
    row = decode(data).spans[0]
    odd = 1_796_000_000_123_456_789
    assert int(float(odd)) != odd
    data = data.replace(str(row.start_ns).encode(), str(odd).encode())
    data = data.replace(str(row.end_ns).encode(), str(odd + 1).encode())
    data = data.replace(b'"gpu_ns":null', b'"gpu_ns":9007199254740993')
    for protocol in ("http/protobuf", "http/json"):
        with http_receiver() as server:
            options = {"endpoint": server.url, "protocol": protocol}
            destination = OtlpDestination(otlp_targets(options)[0], pending=False)
            answer: Answer = destination.send(Parcel("0" * 32, path, data))
            destination.close()
            assert answer == Accepted()
            (span,) = spans_of(server)
        assert (span.start_time_unix_nano, span.end_time_unix_nano) == (odd, odd + 1)
        gpu = {one.key: one.value.int_value for one in span.attributes}["cirron.gpu_ns"]
        assert gpu == 9_007_199_254_740_993


def test_the_workspace_of_a_project_file_reaches_the_platform(run_program: RunProgram) -> None:
    """C-W22: workspace_id of a cirron.yaml that has nothing but profiling: is in what is sent."""
    with PlatformServer() as server:
        yaml = f"profiling:\n  workspace_id: ws-7\n  api_endpoint: {server.url}\n"
        program = f"""
        from pathlib import Path
        Path("cirron.yaml").write_text({yaml!r})
        import cirron_otel as ci
        ci.profile(frameworks=[]).shutdown()
        """
        run_program(program, env={"CIRRON_API_KEY": server.key, "CIRRON_EXIT_BUDGET": "20"})
        (session,) = [row for row in server.spans if row["name"] == "cirron.session"]
        assert session["attrs"]["cirron.workspace_id"] == "ws-7"
        for request in server.requests:
            assert request.batch["resource"]["cirron.workspace.id"] == "ws-7"
