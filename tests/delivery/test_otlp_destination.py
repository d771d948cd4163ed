"""Batches to a receiver of OTLP, over real sockets: what arrives, and what each answer leads to."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse

from cirron_otel.destinations import otlp
from cirron_otel.destinations.base import Accepted, Answer, Parcel, Rejected, RetryAfter
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_settings import OtlpTarget, otlp_targets
from delivery.otlp_server import OtlpServer, Received, grpc_receiver, http_receiver
from spool_by_hand import T0, Writer, mark, span, training


def to(server: OtlpServer, protocol: str = "http/protobuf", **more: Any) -> OtlpDestination:
    """A destination for a test's receiver, patient for half a second."""
    said = {"endpoint": server.url, "timeout": 0.5, **more}
    if not server.url.startswith("grpc"):
        said["protocol"] = protocol
    (target,) = otlp_targets([said], environ={})
    return OtlpDestination(target, pending=False)


def parcels(root: Path) -> list[Parcel]:
    """The batches of a spool in order."""
    return [Parcel.read(file) for file in sorted(root.glob("spool/*.json"))]


def deliver(
    destination: OtlpDestination, batches: Sequence[Parcel], tries: int = 20
) -> list[Answer]:
    """Send each until it is accepted; every answer."""
    answers: list[Answer] = []
    for parcel in batches:
        for _ in range(tries):
            answers.append(destination.send(parcel))
            if not isinstance(answers[-1], RetryAfter):
                break
    destination.close()
    return answers


def big(root: Path, spans: int, attribute: str = "x" * 1000) -> list[Parcel]:
    """One batch of many spans."""
    rows = [span(f"s/{i}", "row", None, i, i + 1, attrs={"text": attribute}) for i in range(spans)]
    Writer(root).batch(10, rows)
    return parcels(root)


# --- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", ["none", "gzip", "deflate"])
@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
def test_a_run_arrives(tmp_path: Path, protocol: str, compression: str) -> None:
    """All spans of a run arrive once, with marks, resource, scope and headers."""
    training(tmp_path, epochs=2, steps=5)
    receiver = grpc_receiver() if protocol == "grpc" else http_receiver()
    with receiver as server:
        answers = deliver(
            to(server, protocol, compression=compression, headers={"X-Tenant": "a b"}),
            parcels(tmp_path),
        )
        assert set(answers) == {Accepted()}
    assert len(server.spans) == 2 * 5 * 5 + 2 + 1
    assert server.copies == 0
    assert server.names()[:3] == ["backward"] * 3
    step = next(one for one in server.spans.values() if one.name == "step")
    keys = {one.key for one in step.attributes}
    assert {"cirron.mark.loss", "cirron.epoch", "cirron.index", "cirron.session.id"} <= keys
    assert [event.name for event in step.events] == ["loss"]
    assert step.start_time_unix_nano >= T0
    assert {one.key for one in server.resources[0].attributes} == {
        "cirron.session.id", "cirron.run.id",
    }  # fmt: skip
    request = server.requests[0]
    assert request.headers["x-tenant"] == "a b"
    assert request.headers["user-agent"].startswith("cirron-otel/")
    if protocol != "grpc":
        assert request.path == "/v1/traces"
        assert request.headers.get("content-encoding", "none") == compression
        kind = {"http/protobuf": "application/x-protobuf", "http/json": "application/json"}
        assert request.headers["content-type"] == kind[protocol]


def test_a_batch_without_spans_is_no_request(tmp_path: Path) -> None:
    """A batch that only says what is open, or only has marks, is accepted without the network."""
    write = Writer(tmp_path)
    write.batch(10, [], [mark("s/1", "loss", 1.0)])
    with http_receiver() as server:
        assert deliver(to(server), parcels(tmp_path)) == [Accepted()]
        assert server.requests == []


def test_own_scope_and_scope_of_others(tmp_path: Path) -> None:
    """Spans of other instrumentations arrive under their own scope."""
    from cirron_otel.batch import SpanOtel  # noqa: PLC0415

    theirs = SpanOtel(scope={"name": "third.party", "version": "1.2"}, kind="client")
    Writer(tmp_path).batch(
        10,
        [span("s/1", "ours", None, 0, 1), span("s/2", "theirs", "s/1", 0, 1, otel=theirs)],
        scope={"name": "cirron-otel", "version": "9"},
    )
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path))
    assert server.scopes == {("cirron-otel", "9"), ("third.party", "1.2")}


def test_a_row_otlp_cannot_say_costs_only_itself(tmp_path: Path) -> None:
    """A row whose ids are no hex is counted and told of; the others arrive."""
    bad = span("s/1", "bad", None, 0, 1)
    bad.id = "not hex at all, thirty-two chars"
    Writer(tmp_path).batch(10, [bad, span("s/2", "good", None, 0, 1)])
    with http_receiver() as server:
        destination = to(server)
        (answer,) = deliver(destination, parcels(tmp_path))
    assert answer == Accepted("1 spans cannot be said in OTLP", 1)
    assert server.names() == ["good"]
    assert destination.counts["not_encodable_spans"] == 1


def test_garbage_is_rejected() -> None:
    """A file that is no batch is set aside without a request."""
    destination = OtlpDestination(OtlpTarget("http://127.0.0.1:9/v1/traces"))
    answer = destination.send(Parcel("0" * 32, Path("none.json"), b"{}"))
    assert isinstance(answer, Rejected)
    destination.close()


# --- each answer ----------------------------------------------------------------------------------


def test_partial_success_is_told(tmp_path: Path) -> None:
    """Spans that the receiver threw away are counted, with what it said of them."""
    body = ExportTraceServiceResponse()
    body.partial_success.rejected_spans = 3
    body.partial_success.error_message = "too old"
    training(tmp_path, epochs=1, steps=1)
    with http_receiver() as server:
        server.script = [(200, {}, body.SerializeToString())]
        destination = to(server)
        first = destination.send(parcels(tmp_path)[0])
        assert first == Accepted("too old", 3)
        assert destination.counts["refused_spans"] == 3
        json_ = to(server, "http/json")
        said = b'{"partialSuccess":{"rejectedSpans":"2","errorMessage":"why"}}'
        server.script = [(200, {}, said)]
        assert json_.send(parcels(tmp_path)[0]) == Accepted("why", 2)
        json_.close()
        destination.close()
    with grpc_receiver() as server:
        server.script = [body]
        assert deliver(to(server), parcels(tmp_path)[:1]) == [Accepted("too old", 3)]


@pytest.mark.parametrize(
    ("status", "headers", "seconds"),
    [(429, {"Retry-After": "7"}, 7.0), (503, {}, None), (502, {}, None), (504, {}, None),
     (401, {}, None), (404, {}, None), (500, {}, None), (415, {}, None)],
)  # fmt: skip
def test_what_may_come_right_is_tried_again(
    tmp_path: Path, status: int, headers: dict[str, str], seconds: float | None
) -> None:
    """Every status but 400 and 413 says to try again, after what the receiver asks for."""
    training(tmp_path, epochs=1, steps=2)
    with http_receiver() as server:
        server.script = [(status, headers, Status(message="overloaded").SerializeToString())]
        destination = to(server)
        first, *rest = deliver(destination, parcels(tmp_path))
    assert first == RetryAfter(seconds, f"HTTP {status}: overloaded", status)
    assert set(rest) == {Accepted()}
    assert len(server.spans) == 12


def test_a_login_page_is_no_delivery(tmp_path: Path) -> None:
    """A web page with status 200, as a proxy's login answers, is tried again."""
    training(tmp_path, epochs=1, steps=1)
    with http_receiver() as server:
        server.script = [(200, {"Content-Type": "text/html; charset=utf-8"}, b"<html>log in")]
        answers = deliver(to(server), parcels(tmp_path)[:1])
    assert answers == [RetryAfter(None, "HTTP 200: a web page, no OTLP", 200), Accepted()]


def test_bad_request_is_set_aside_and_the_rest_goes_on(tmp_path: Path) -> None:
    """After a 400 the other requests of the batch are sent, then the batch is called rejected."""
    with http_receiver() as server:
        server.script = [(400, {}, Status(message="no").SerializeToString())]
        destination = to(server, max_request_bytes=10_000)
        (answer,) = deliver(destination, big(tmp_path, 20))
    assert answer == Rejected(400, "no")
    assert len(server.requests) > 2
    assert 0 < len(server.spans) < 20
    assert server.copies == 0


def test_too_large_is_halved_down_to_the_offender(tmp_path: Path) -> None:
    """What is refused for its size goes in halves; the one span that is too large is told of."""
    rows = [span(f"s/{i}", "row", None, i, i + 1, attrs={"text": "x" * 500}) for i in range(40)]
    rows[17].attrs = {"text": "x" * 60_000}
    Writer(tmp_path).batch(10, rows)
    with http_receiver() as server:

        def small(request: Received) -> Any:
            return (413, {}, b"too big") if request.size > 8000 else None

        server.script = [small] * 100
        destination = to(server)
        (answer,) = deliver(destination, parcels(tmp_path))
    assert isinstance(answer, Accepted)
    assert answer.refused_rows == 1
    assert "larger than the receiver takes" in answer.note
    assert len(server.spans) == 39
    assert server.copies == 0
    assert destination.counts["too_large_spans"] == 1


def test_requests_stay_below_the_limit(tmp_path: Path) -> None:
    """No request of a large batch is larger than the limit, over HTTP and over gRPC."""
    batch = big(tmp_path, 3000, "x" * 2000)
    for receiver in (http_receiver(), grpc_receiver()):
        with receiver as server:
            assert deliver(to(server, timeout=20), batch) == [Accepted()]
        assert len(server.spans) == 3000
        assert len(server.requests) >= 2
        assert max(request.size for request in server.requests) < 3_800_000


def test_a_slow_receiver_gets_less_at_a_time(tmp_path: Path) -> None:
    """A receiver that needs longer than the timeout for many spans gets them in smaller pieces."""
    batch = big(tmp_path, 400, "x")

    def slow(request: Received) -> Any:
        spans = request.message.resource_spans[0].scope_spans[0].spans
        return 1.0 if len(spans) > 120 else None

    with http_receiver() as server:
        server.script = [slow] * 100
        answers = deliver(to(server), batch)
    assert answers[-1] == Accepted()
    assert {type(one) for one in answers[:-1]} == {RetryAfter}
    assert len(server.spans) == 400


def test_goes_on_where_it_stopped(tmp_path: Path) -> None:
    """After an outage in the middle of a batch only what is left is sent again."""
    with http_receiver() as server:
        server.script = [None, None, 503]
        destination = to(server, max_request_bytes=10_000)
        answers = deliver(destination, big(tmp_path, 30))
    assert [type(one) for one in answers] == [RetryAfter, Accepted]
    assert len(server.spans) == 30
    assert server.copies == 0


def test_nobody_there() -> None:
    """A refused connection says so, and port 4317 gets a word about gRPC."""
    root = Path.cwd()
    training(root, epochs=1, steps=1)
    destination = OtlpDestination(OtlpTarget("http://127.0.0.1:4317/v1/traces", timeout=0.5))
    answer = destination.send(parcels(root)[0])
    assert isinstance(answer, RetryAfter)
    assert answer.status is None
    assert "4317 usually speaks gRPC" in answer.reason
    destination.close()


# --- gRPC -----------------------------------------------------------------------------------------


def _retry_details(seconds: float) -> list[tuple[str, bytes]]:
    detail = AnyMessage()
    detail.Pack(RetryInfo(retry_delay=Duration(nanos=int(seconds * 1e9))))
    return [("grpc-status-details-bin", Status(code=8, details=[detail]).SerializeToString())]


@pytest.mark.parametrize(
    ("code", "trailing", "expected"),
    [
        ("UNAVAILABLE", [], RetryAfter(None, "UNAVAILABLE: why")),
        ("UNAUTHENTICATED", [], RetryAfter(None, "UNAUTHENTICATED: why")),
        ("RESOURCE_EXHAUSTED", _retry_details(0.25), RetryAfter(0.25, "RESOURCE_EXHAUSTED: why")),
        ("RESOURCE_EXHAUSTED", [], RetryAfter(None, "RESOURCE_EXHAUSTED: why")),
        ("INVALID_ARGUMENT", [], Rejected(None, "INVALID_ARGUMENT: why")),
    ],
)
def test_grpc_statuses(tmp_path: Path, code: str, trailing: Any, expected: Answer) -> None:
    """Each status becomes the answer the contract has for it, with the delay that was asked for."""
    training(tmp_path, epochs=1, steps=1)
    with grpc_receiver() as server:
        server.script = [(grpc.StatusCode[code], "why", trailing)]
        destination = to(server)
        assert destination.send(parcels(tmp_path)[0]) == expected
        destination.close()


def test_grpc_receiver_with_a_small_limit(tmp_path: Path) -> None:
    """RESOURCE_EXHAUSTED over the size of a message halves it until the receiver takes it."""
    with grpc_receiver(max_bytes=20_000) as server:
        destination = to(server, timeout=5)
        assert deliver(destination, big(tmp_path, 100)) == [Accepted()]
    assert len(server.spans) == 100
    assert server.copies == 0


def test_grpc_server_away_and_back(tmp_path: Path) -> None:
    """While nothing listens the answer is to try again; later everything arrives."""
    training(tmp_path, epochs=1, steps=1)
    with grpc_receiver() as server:
        pass
    destination = to(server)
    answer = destination.send(parcels(tmp_path)[0])
    assert isinstance(answer, RetryAfter)
    assert answer.reason.startswith(("UNAVAILABLE", "DEADLINE_EXCEEDED"))
    destination.close()


# --- what is still on its way ---------------------------------------------------------------------


def test_a_batch_waits_for_values_from_a_device(tmp_path: Path) -> None:
    """A fresh batch whose span lacks a mark waits for the writer's next batch, and no longer."""
    now = (time.time_ns() - T0) / 1e6
    late = mark("s/x", "loss", 0.5, at=3)
    write = Writer(tmp_path, session="s/1", writer="w")
    write.batch(now, [span("s/x", "step", "s/1", 0, 5, mark_ids=(late.id,))],
                open=[span("s/1", "cirron.session", None, 0, None)])  # fmt: skip
    with http_receiver() as server:
        destination = to(server)
        (first,) = parcels(tmp_path)
        with ThreadPoolExecutor(1) as pool:
            sending = pool.submit(destination.send, first)
            time.sleep(0.2)
            assert server.requests == []
            write.batch(now + 1, [], [late])
            assert sending.result() == Accepted()
        assert deliver(destination, parcels(tmp_path)[1:]) == [Accepted()]
    (step,) = server.spans.values()
    assert [event.name for event in step.events] == ["loss"]
    assert destination.forgotten_marks == 0


def test_what_never_comes_is_not_waited_for(tmp_path: Path) -> None:
    """A batch that is no longer young, or ends its session, goes out as it is."""
    write = Writer(tmp_path, session="s/1", writer="w")
    write.batch(10, [span("s/x", "step", "s/1", 0, 5, mark_ids=("m" * 32,))])
    now = (time.time_ns() - T0) / 1e6
    write.batch(now, [span("s/y", "step", "s/1", 0, 5, mark_ids=("m" * 32,)),
                      span("s/1", "cirron.session", None, 0, 5)])  # fmt: skip
    with http_receiver() as server:
        destination = to(server)
        assert deliver(destination, parcels(tmp_path)) == [Accepted(), Accepted()]
    assert server.names() == ["cirron.session", "step", "step"]
    assert destination.forgotten_marks == 2


def test_nothing_is_waited_for_after_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the writer has ended its session, a batch does not wait for more, however young."""
    monkeypatch.setattr(otlp, "_HOLD_NS", 10**18)
    now = (time.time_ns() - T0) / 1e6
    write = Writer(tmp_path, session="s/1", writer="w")
    write.batch(now, [span("s/y", "step", "s/1", 0, 5, mark_ids=("m" * 32,))])
    write.batch(now + 1, [span("s/1", "cirron.session", None, 0, 5)])
    with http_receiver() as server:
        assert deliver(to(server), parcels(tmp_path)) == [Accepted(), Accepted()]
    assert server.names() == ["cirron.session", "step"]


def test_a_batch_that_was_put_off_comes_again_whole(tmp_path: Path) -> None:
    """A batch refused for now, after which others went first, still has its marks from before."""
    write = Writer(tmp_path, session="s/1", writer="w")
    opened = [span("s/1", "cirron.session", None, 0, None), span("s/e", "long", "s/1", 1, None)]
    early = mark("s/e", "loss", 0.25, at=3)
    write.batch(10, [], [early], open=opened)
    write.batch(20, [span("s/e", "long", "s/1", 1, 9, mark_ids=(early.id,))], open=opened[:1])
    write.batch(30, [span("s/z", "other", "s/1", 1, 9)])
    first, second, third = parcels(tmp_path)
    with http_receiver() as server:
        destination = to(server)
        assert destination.send(first) == Accepted()
        server.script = [500]
        assert destination.send(second) == RetryAfter(None, "HTTP 500", 500)
        assert deliver(destination, [third, second]) == [Accepted(), Accepted()]
    ended = next(one for one in server.spans.values() if one.name == "long")
    assert [event.name for event in ended.events] == ["loss"]


def test_a_restart_remembers_what_came_before(tmp_path: Path) -> None:
    """A new process that begins in the middle knows epochs and marks from the files before."""
    training(tmp_path, epochs=2, steps=3)
    loss = mark("session", "late", 1.0, at=5000)
    Writer(tmp_path, session="session", writer="host-100-1").batch(5000, [], [loss])
    batches = parcels(tmp_path)
    with http_receiver() as server:
        deliver(to(server), batches[:1])
        deliver(to(server), batches[1:])
    epochs = [
        attribute.value.int_value
        for one in server.spans.values()
        if one.name == "epoch"
        for attribute in one.attributes
        if attribute.key == "cirron.epoch"
    ]
    assert epochs == [0, 1]
    assert len(server.spans) == 2 * 3 * 5 + 3
