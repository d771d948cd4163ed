"""What is posted to the platform, and what each of its answers means."""

from __future__ import annotations

import gzip
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirron_otel._guard import Guard
from cirron_otel.batch import decode
from cirron_otel.destinations import platform as platform_module
from cirron_otel.destinations import rejected as rejected_module
from cirron_otel.destinations.base import (
    Accepted,
    Parcel,
    Rejected,
    RetryAfter,
    TooLarge,
    part_id,
)
from cirron_otel.destinations.platform import Platform, compressed
from cirron_otel.destinations.rejected import list_rejected, set_aside
from cirron_otel.spool import Spool
from cirron_otel.transport import key_reader
from cirron_otel.version import VERSION
from delivery.platform_server import KEY, PlatformServer
from helpers import RunProgram

BATCH_ID = "ab" * 16


def _document(**parts: Any) -> dict[str, Any]:
    return {
        "schema_version": 1, "sdk_version": "0.3.0", "batch_id": BATCH_ID,
        "created_ns": 1_780_000_000_000_000_000, "spans": [], "marks": [], "snapshots": [], **parts,
    }  # fmt: skip


def _span(number: int, **fields: Any) -> dict[str, Any]:
    return {
        "id": f"{number:032x}", "name": f"step{number}", "parent_id": None, "index": number,
        "start_ns": 1, "end_ns": 2, "cpu_ns": None, "gpu_ns": None, "memory_peak_bytes": None,
        "thread_id": 1, "pid": 1, "rank": 0, "attrs": {}, "mark_ids": [], **fields,
    }  # fmt: skip


def _parcel(directory: Path, document: dict[str, Any]) -> Parcel:
    """The batch as a file of a spool, and that file as a parcel."""
    data = json.dumps(document, separators=(",", ":")).encode()
    spool = Spool(directory)
    spool.write([data], created_ns=document["created_ns"], batch_id=document["batch_id"])
    return Parcel.read(spool.files()[-1])


@pytest.fixture
def server() -> Iterator[PlatformServer]:
    """A platform on loopback."""
    with PlatformServer() as running:
        yield running


@pytest.fixture
def platform(server: PlatformServer, tmp_path: Path) -> Iterator[Platform]:
    """The destination that delivers to it."""
    made = Platform(server.url, "/v1/traces", lambda: KEY, output_dir=tmp_path, timeout=2.0)
    yield made
    made.close()


@pytest.fixture
def parcel(tmp_path: Path) -> Parcel:
    """A batch of three spans."""
    return _parcel(tmp_path, _document(spans=[_span(n) for n in range(3)], foreign={"kept": 1}))


def test_the_body_is_the_file_and_the_headers_say_what_it_is(
    server: PlatformServer, platform: Platform, parcel: Parcel
) -> None:
    """The batch arrives byte for byte, compressed however small, with key, version and id."""
    assert platform.send(parcel) == Accepted()
    (request,) = server.requests
    assert (request.method, request.path) == ("POST", "/v1/traces")
    assert gzip.decompress(request.body) == parcel.path.read_bytes()
    assert {
        name: request.headers[name]
        for name in (
            "authorization", "content-type", "content-encoding", "x-cirron-sdk-version",
            "x-cirron-batch-id", "user-agent",
        )
    } == {
        "authorization": "Bearer test-key",
        "content-type": "application/json",
        "content-encoding": "gzip",
        "x-cirron-sdk-version": VERSION,
        "x-cirron-batch-id": BATCH_ID,
        "user-agent": f"cirron-otel/{VERSION}",
    }  # fmt: skip
    assert server.committed == {BATCH_ID: parcel.data}


def test_another_path_may_be_set(tmp_path: Path, parcel: Parcel) -> None:
    """The route that is deployed, /api/traces, is reached by the setting."""
    with PlatformServer(path="/api/traces") as server:
        made = Platform(server.url, "/api/traces", lambda: KEY, output_dir=tmp_path)
        assert made.send(parcel) == Accepted()
        made.close()


def test_the_same_batch_again_is_the_same_request(
    server: PlatformServer, platform: Platform, parcel: Parcel
) -> None:
    """After an answer that got lost, id and bytes are repeated and the platform counts once."""
    server.say(["commit-reset", "commit-500", "ok"])
    answers = [platform.send(parcel) for _ in range(3)]
    assert [type(answer) for answer in answers] == [RetryAfter, RetryAfter, Accepted]
    assert len({request.body for request in server.requests}) == 1
    assert server.repeats == {BATCH_ID: 2}
    assert len(server.spans) == 3


@pytest.mark.parametrize("status", [400, 422])
def test_a_batch_that_is_wrong_is_rejected(
    server: PlatformServer, platform: Platform, parcel: Parcel, status: int
) -> None:
    """What the platform says of the batch comes back with the status."""
    server.say([str(status)])
    assert platform.send(parcel) == Rejected(status, f"told to answer {status}")


def test_a_batch_that_is_too_large_is_to_be_halved(
    server: PlatformServer, platform: Platform, parcel: Parcel
) -> None:
    """Halves of halves of a refused batch get through, and together they are the whole."""
    server.default = "413>500"
    waiting, delivered, whole = [parcel], 0, []
    while waiting:
        next_one = waiting.pop(0)
        answer = platform.send(next_one)
        if isinstance(answer, TooLarge):
            assert answer == TooLarge(None, 413, "told to answer 413")
            waiting = [*next_one.halves(), *waiting]
        else:
            assert answer == Accepted()
            delivered += 1
            whole.append(next_one)
    assert delivered == 3
    assert [span["name"] for span in server.spans] == ["step0", "step1", "step2"]
    assert sorted(server.committed) == sorted(one.batch_id for one in whole)


@pytest.mark.parametrize(
    ("behaviour", "seconds", "reason"),
    [
        ("500", None, "HTTP 500: told to answer 500"),
        ("503", None, "HTTP 503: told to answer 503"),
        ("404", None, "HTTP 404: is ingest_path right? told to answer 404"),
        ("409", None, "HTTP 409: told to answer 409"),
        ("408", None, "HTTP 408: told to answer 408"),
        ("429:7", 7.0, "HTTP 429: slower"),
        ("reset", None, "Connection reset by peer"),
        ("garbage", None, "the answer is no HTTP (BadStatusLine)"),
    ],
)
def test_everything_else_is_tried_again(
    server: PlatformServer,
    platform: Platform,
    parcel: Parcel,
    behaviour: str,
    seconds: float | None,
    reason: str,
) -> None:
    """An answer that does not speak of the batch leaves it in the queue, with the reason."""
    server.say([behaviour])
    answer = platform.send(parcel)
    assert isinstance(answer, RetryAfter)
    assert (answer.seconds, answer.reason) == (seconds, reason)
    assert not answer.told


def test_retry_after_may_be_a_date(
    server: PlatformServer, platform: Platform, parcel: Parcel
) -> None:
    """A date says how long to wait as well as a number does."""
    server.say(["429@60"])
    answer = platform.send(parcel)
    assert isinstance(answer, RetryAfter)
    assert answer.seconds is not None
    assert 58 <= answer.seconds <= 61


def test_a_web_page_is_no_platform(
    server: PlatformServer, platform: Platform, parcel: Parcel
) -> None:
    """A login page answers 200 to everything; the batch is not taken for delivered."""
    server.say(["html"])
    answer = platform.send(parcel)
    assert isinstance(answer, RetryAfter)
    assert "web page" in answer.reason


def test_a_redirect_elsewhere_is_told_and_not_followed(
    server: PlatformServer, platform: Platform, parcel: Parcel
) -> None:
    """The address is shown without what may be secret in it."""
    server.say(["found:https://elsewhere.example/login?token=secret"])
    answer = platform.send(parcel)
    assert isinstance(answer, RetryAfter)
    assert answer.reason == "redirected to https://elsewhere.example/login; set api_endpoint"


# -- the key -------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_is_told_once_and_not_hammered(
    server: PlatformServer,
    tmp_path: Path,
    parcel: Parcel,
    caplog: pytest.LogCaptureFixture,
    status: int,
) -> None:
    """One request, one line in the log without the key, and then the platform is left alone."""
    server.default = str(status)
    made = Platform(server.url, "/v1/traces", lambda: "wrong-key", output_dir=tmp_path)
    with caplog.at_level(logging.WARNING):
        answers = [made.send(parcel) for _ in range(5)]
    made.close()
    assert len(server.requests) == 1
    assert len(set(answers)) == 1
    assert isinstance(answers[0], RetryAfter)
    assert (answers[0].status, answers[0].told) == (status, True)
    assert len(caplog.records) == 1
    assert "refuses the API key" in caplog.text
    assert "wrong-key" not in caplog.text + repr(answers)


def test_a_refused_key_is_tried_again_after_a_while(
    server: PlatformServer,
    tmp_path: Path,
    parcel: Parcel,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The same key counts again when it was given its rights meanwhile; nothing is said twice."""
    monkeypatch.setattr(platform_module, "REFUSED_KEY_PAUSE_S", 0.0)
    made = Platform(server.url, "/v1/traces", lambda: KEY, output_dir=tmp_path)
    server.say(["403", "403", "ok"])
    assert [type(made.send(parcel)) for _ in range(3)] == [RetryAfter, RetryAfter, Accepted]
    made.close()
    assert len(caplog.records) == 1


def test_a_key_that_is_changed_in_its_file_counts_at_once(
    server: PlatformServer, tmp_path: Path, parcel: Parcel
) -> None:
    """The key is read again from the file it came from, and nothing needs a restart."""
    toml = tmp_path / "home" / ".cirron" / "config.toml"
    toml.parent.mkdir(parents=True)
    toml.write_text('[default]\napi_key = "old"\n', encoding="utf-8")
    made = Platform(server.url, "/v1/traces", key_reader("old", str(toml)), output_dir=tmp_path)
    assert isinstance(made.send(parcel), RetryAfter)
    toml.write_text("[default\n", encoding="utf-8")
    assert isinstance(made.send(parcel), RetryAfter)
    toml.write_text(f'[default]\napi_key = "{KEY}"\n', encoding="utf-8")
    assert made.send(parcel) == Accepted()
    made.close()
    assert [request.headers["authorization"] for request in server.requests] == [
        "Bearer old", f"Bearer {KEY}",
    ]  # fmt: skip


def test_where_a_key_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Environment and project file are asked, an argument stays, an empty one changes nothing."""
    project = tmp_path / "cirron.json"
    project.write_text('{"profiling": {"api_key": "from-project"}}', encoding="utf-8")
    assert key_reader("old", str(project))() == "from-project"
    monkeypatch.setenv("CIRRON_API_KEY", "from-environment")
    assert key_reader("old", "CIRRON_API_KEY")() == "from-environment"
    assert key_reader("old", "argument")() == "old"
    monkeypatch.setenv("CIRRON_API_KEY", "  ")
    assert key_reader("old", "CIRRON_API_KEY")() == "old"
    assert key_reader("old", str(tmp_path / "absent.toml"))() == "old"


# -- halves --------------------------------------------------------------------------------------

_ROWS = {
    "windows": lambda n: _span(1000 + n),
    "spans": _span,
    "marks": lambda n: {
        "id": f"{n:032x}", "span_id": "root", "name": "m", "value_type": "int", "value": n,
        "attrs": {}, "ts_ns": n, "kind": "point",
    },
    "logs": lambda n: {"body": n},
}  # fmt: skip


def _leaves(parcel: Parcel) -> list[Parcel]:
    halves = parcel.halves()
    return [parcel] if not halves else [leaf for half in halves for leaf in _leaves(half)]


@given(
    counts=st.fixed_dictionaries({name: st.integers(0, 5) for name in _ROWS}),
    has_open=st.booleans(),
)
def test_halves_are_batches_and_together_the_whole(
    counts: dict[str, int],
    has_open: bool,  # noqa: FBT001 - drawn by hypothesis
) -> None:
    """However far a batch is halved, no row is lost, doubled or reordered, and ids are stable."""
    rows = {name: [make(n) for n in range(counts[name])] for name, make in _ROWS.items()}
    document = _document(**rows, foreign={"kept": 1}, resource={"a": 1.0})
    if has_open:
        document["open"] = [{**_span(77), "end_ns": None}]
    data = json.dumps(document).encode()
    whole = Parcel(BATCH_ID, Path("x"), data)
    leaves = _leaves(whole)
    documents = [json.loads(leaf.data) for leaf in leaves]
    for name, made in rows.items():
        assert [row for found in documents for row in found.get(name, [])] == made
    assert [found["open"] for found in documents if "open" in found] == (
        [document["open"]] if has_open else []
    )
    if len(leaves) > 1:
        for leaf, found in zip(leaves, documents, strict=True):
            assert found["batch_id"] == leaf.batch_id == part_id(BATCH_ID, leaf.part)
            assert found["foreign"] == {"kept": 1}
            decode(leaf.data)
    assert len({leaf.batch_id for leaf in leaves}) == len(leaves)
    again = _leaves(Parcel(BATCH_ID, Path("x"), data))
    assert [leaf.data for leaf in again] == [leaf.data for leaf in leaves]


def test_what_is_no_batch_has_no_halves() -> None:
    """Bytes that cannot be read cannot be split either."""
    assert Parcel(BATCH_ID, Path("x"), b"{").halves() == []
    assert Parcel(BATCH_ID, Path("x"), b'{"spans": 3}').halves() == []


# -- set aside -----------------------------------------------------------------------------------


def test_a_rejected_batch_lies_beside_its_answer(
    platform: Platform, parcel: Parcel, tmp_path: Path
) -> None:
    """The batch is kept as it was sent, with destination, status and the server's words."""
    half = parcel.halves()[1]
    path = set_aside(tmp_path / "spool", half, Rejected(422, "wrong"), platform, now_ns=5)
    assert path.parent == tmp_path / "spool" / "rejected"
    assert path.read_bytes() == half.data
    ((found, note),) = list_rejected(tmp_path / "spool")
    assert found == path
    assert (note.destination, note.status, note.answer, note.rejected_ns) == (
        "platform", 422, "wrong", 5,
    )  # fmt: skip
    assert (note.batch_id, note.whole_batch_id, note.part) == (half.batch_id, BATCH_ID, (1,))
    set_aside(tmp_path / "spool", half, Rejected(422, "wrong"), platform)
    assert len(list_rejected(tmp_path / "spool")) == 1
    assert [file.name for file in Spool(tmp_path).files()] == [parcel.path.name]


def test_what_was_rejected_is_bounded(
    platform: Platform, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Past the cap the oldest batches leave with their answers, the newest stays."""
    monkeypatch.setattr(rejected_module, "MAX_FILES", 3)
    for number in range(6):
        document = _document(batch_id=f"{number:032x}", created_ns=1000 + number)
        set_aside(tmp_path / "spool", _parcel(tmp_path, document), Rejected(400, "no"), platform)
    kept = [note.batch_id[-1] for _, note in list_rejected(tmp_path / "spool")]
    assert kept == ["3", "4", "5"]
    assert len(list((tmp_path / "spool" / "rejected").iterdir())) == 6
    monkeypatch.setattr(rejected_module, "MAX_BYTES", 1)
    document = _document(batch_id="9" * 32, created_ns=2000)
    set_aside(tmp_path / "spool", _parcel(tmp_path, document), Rejected(400, "no"), platform)
    assert [note.batch_id[-1] for _, note in list_rejected(tmp_path / "spool")] == ["9"]


# -- files of snapshots --------------------------------------------------------------------------


def _snapshot(number: int, uri: str | None) -> dict[str, Any]:
    return {
        "id": f"{number:032x}", "span_id": "cd" * 16, "tensor_name": f"layer{number}",
        "shape": [2], "dtype": "float32", "mode": "full", "stats": None, "blob_uri": uri,
        "ts_ns": 1, "attrs": {},
    }  # fmt: skip


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """A file as a snapshot leaves it."""
    file = tmp_path / "snapshots" / ("cd" * 16) / "weights.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"tensor" * 100_000)
    return file


def test_a_snapshot_file_goes_up_before_the_rows_that_name_it(
    server: PlatformServer, platform: Platform, tmp_path: Path, blob: Path
) -> None:
    """The file is put under its key once, and the rows that arrive hold its new address."""
    uri = blob.as_uri()
    document = _document(
        spans=[_span(1)], snapshots=[_snapshot(1, uri), _snapshot(2, uri), _snapshot(3, None)]
    )
    parcel = _parcel(tmp_path, document)
    assert platform.send(parcel) == Accepted()
    put, post = server.requests
    key = f"snapshots/{'cd' * 16}/weights.safetensors"
    assert (put.method, put.path) == ("PUT", f"/v1/traces/blobs/{key}")
    assert put.body == blob.read_bytes()
    assert put.headers["x-cirron-blob-key"] == key
    assert put.headers["authorization"] == f"Bearer {KEY}"
    assert put.headers["content-type"] == "application/octet-stream"
    address = f"s3://bucket/v1/traces/blobs/{key}"
    assert [row["blob_uri"] for row in post.batch["snapshots"]] == [address, address, None]
    assert post.batch["spans"] == document["spans"]
    assert json.loads(parcel.path.read_bytes()) == document

    platform.send(parcel)
    assert [request.method for request in server.requests] == ["PUT", "POST", "POST"]
    assert server.requests[1].body == server.requests[2].body


def test_a_file_that_did_not_go_up_holds_the_rows_back(
    server: PlatformServer, platform: Platform, tmp_path: Path, blob: Path
) -> None:
    """While the platform cannot take the file the batch waits; both arrive later."""
    parcel = _parcel(tmp_path, _document(snapshots=[_snapshot(1, blob.as_uri())]))
    server.say(["503", "429:4"])
    assert platform.send(parcel) == RetryAfter(None, "HTTP 503: told to answer 503", 503)
    assert platform.send(parcel) == RetryAfter(4.0, "HTTP 429: slower", 429)
    assert server.committed == {}
    assert platform.send(parcel) == Accepted()
    assert len(server.blobs) == 1


def test_a_file_that_is_refused_or_gone_holds_nothing_back(
    server: PlatformServer, tmp_path: Path, blob: Path
) -> None:
    """The rows go with their local address, and the refusal is counted once."""
    guard = Guard()
    made = Platform(server.url, "/v1/traces", lambda: KEY, output_dir=tmp_path, guard=guard)
    gone = blob.with_name("gone.safetensors").as_uri()
    document = _document(snapshots=[_snapshot(1, blob.as_uri()), _snapshot(2, gone)])
    server.say(["413"])
    assert made.send(_parcel(tmp_path, document)) == Accepted()
    assert made.send(_parcel(tmp_path, document)) == Accepted()
    made.close()
    assert guard.losses == {"blob_refused": 1}
    assert [request.method for request in server.requests] == ["PUT", "POST", "POST"]
    assert [row["blob_uri"] for row in server.requests[1].batch["snapshots"]] == [
        blob.as_uri(), gone,
    ]  # fmt: skip


def test_no_other_file_is_ever_uploaded(
    server: PlatformServer, platform: Platform, tmp_path: Path, blob: Path
) -> None:
    """A row that names a file outside the snapshots, also by way of a link, uploads nothing."""
    secret = tmp_path / "secret.txt"
    secret.write_text("password", encoding="utf-8")
    link = blob.with_name("link.safetensors")
    link.symlink_to(secret)
    uris = [
        secret.as_uri(), link.as_uri(), f"{blob.parent.as_uri()}/../../secret.txt",
        "file://elsewhere.example/snapshots/a/b", "s3://there/already",
        (tmp_path / "snapshots").as_uri(),
    ]  # fmt: skip
    document = _document(snapshots=[_snapshot(n, uri) for n, uri in enumerate(uris)])
    assert platform.send(_parcel(tmp_path, document)) == Accepted()
    assert [request.method for request in server.requests] == ["POST"]
    assert [row["blob_uri"] for row in server.requests[0].batch["snapshots"]] == uris


def test_compression_is_the_same_every_time() -> None:
    """No time of day is in the compressed bytes."""
    data = b"abc" * 10_000
    first = compressed(data)
    time.sleep(1.1)
    assert compressed(data) == first
    assert gzip.decompress(first) == data


# -- a whole run ---------------------------------------------------------------------------------

RUN = """
import sys, time
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=0.05)
for epoch in ci.epochs(range(3)):
    for step in ci.batches(range(10)):
        ci.mark("loss", step / 10)
        time.sleep(0.005)
if sys.argv[1] == "shutdown":
    ci.shutdown(timeout=8)
"""
_NAMES = {"cirron.session": 1, "epoch": 3, "step": 30, "data_load": 30}


def _names(rows: list[dict[str, Any]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for name in {row["id"]: row["name"] for row in rows}.values():
        found[name] = found.get(name, 0) + 1
    return found


def _environment(server: PlatformServer) -> dict[str, str]:
    return {"CIRRON_API_KEY": KEY, "CIRRON_API_ENDPOINT": server.url, "CIRRON_EXIT_BUDGET": "5"}


@pytest.mark.parametrize("way", ["shutdown", "exit"])
def test_a_whole_run_arrives_with_its_tail(
    server: PlatformServer, run_program: RunProgram, way: str
) -> None:
    """The platform gets every span and mark, the session's own too, however the program ends."""
    server.say(["503", "429:0.1", "reset", "commit-500"])
    run = run_program(RUN, env=_environment(server), args=[way])
    assert _names(server.spans) == _NAMES
    assert len({mark["id"] for mark in server.marks if mark["name"] == "loss"}) == 30
    assert len(server.committed) == len(run.batches)
    (session,) = [row for row in server.spans if row["name"] == "cirron.session"]
    assert session["attrs"]["cirron.run_id"]


def test_times_arrive_to_the_nanosecond(server: PlatformServer, run_program: RunProgram) -> None:
    """What is posted holds the very integers of the spool, above 2**53 too."""
    run = run_program(RUN, env=_environment(server), args=["shutdown"])
    arrived = {row["id"]: (row["start_ns"], row["end_ns"]) for row in server.spans}
    assert arrived == {span.id: (span.start_ns, span.end_ns) for span in run.spans}
    assert all(isinstance(time, int) for times in arrived.values() for time in times)


def test_one_batch_that_is_refused_stops_no_other(
    server: PlatformServer, run_program: RunProgram
) -> None:
    """The refused batch is set aside with the answer, and all the others arrive."""
    server.say(["ok", "400"])
    run = run_program(RUN, env=_environment(server), args=["shutdown"])
    ((path, note),) = list_rejected(run.output_dir / "spool")
    assert (note.status, note.answer) == (400, "told to answer 400")
    rows = [*server.spans, *json.loads(path.read_bytes())["spans"]]
    assert _names(rows) == _NAMES


def test_the_next_run_sends_what_the_last_one_could_not(
    server: PlatformServer, run_program: RunProgram
) -> None:
    """A platform that hangs costs the end its budget and no more, and no row."""
    server.default = "hang"
    first = run_program(RUN, env={**_environment(server), "CIRRON_EXIT_BUDGET": "0.5"}, args=["x"])
    assert "not delivered yet" in first.stderr
    assert server.spans == []
    with PlatformServer() as later:
        run_program(RUN, env=_environment(later), args=["shutdown"])
        assert _names(later.spans) == {name: 2 * count for name, count in _NAMES.items()}


HANGING = """
import time
from pathlib import Path
import cirron_otel as ci
from cirron_otel.spool import Spool
profiler = ci.profile(frameworks=[], flush_interval=0.05)
spool = Spool(Path(".cirron"))
for turn in range(3):
    with ci.scope("work"):
        pass
    flushed = ci.flush()
    print(flushed, sum(span.name == "work" for _, batch in spool.batches() for span in batch.spans))
    time.sleep(0.3)
print(ci.health()["transport"], ci.health()["mark_drop_count"])
"""


def test_the_spool_keeps_pace_while_the_platform_hangs(
    server: PlatformServer, run_program: RunProgram
) -> None:
    """Each flush is on disk at once, though a request has been hanging since the first."""
    server.default = "hang"
    run = run_program(HANGING, env={**_environment(server), "CIRRON_EXIT_BUDGET": "0.2"})
    assert run.stdout.splitlines() == ["True 1", "True 2", "True 3", "http 0"]
    assert len(server.requests) == 1
