"""Log records of the spool at a receiver, and metrics and logs through a real collector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel.destinations.base import Accepted, RetryAfter
from cirron_otel.otlp.logs import log_records
from cirron_otel.record_anchors import open_journal
from delivery.counterparts import running_rotel
from delivery.otlp_server import OtlpServer, attributes, grpc_receiver, http_receiver
from delivery.test_metrics import WRITER, deliver, last, parcels, to
from journal_records import START
from spool_by_hand import T0, Writer, training

TRACE, SPAN = "0123456789abcdef00000000deadbeef", "1111111111111111"


def record(number: int, **more: Any) -> dict[str, Any]:
    """A log row as the spool has it."""
    return {
        "ts_ns": T0 + number,
        "severity_number": 13,
        "severity_text": "WARN",
        "event_name": "a.b",
        "body": f"text {number}",
        "attrs": {"number": number, "ratio": 0.5, "deep": {"a": [1, "x"]}},
        **more,
    }


def in_span(number: int) -> dict[str, Any]:
    """A log row of a span."""
    return record(number, trace_id=TRACE, span_id=SPAN, trace_flags=1)


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
def test_records_arrive_with_their_context(tmp_path: Path, protocol: str) -> None:
    """Every field of a record arrives by each protocol, and a record without a span has no ids."""
    Writer(tmp_path, **WRITER).batch(10, [], logs=[in_span(1), record(2)])
    with grpc_receiver() if protocol == "grpc" else http_receiver() as server:
        more: dict[str, Any] = {} if protocol == "grpc" else {"protocol": protocol}
        assert deliver(to(server, **more), parcels(tmp_path)) == [Accepted()]
        one, two = server.logs()
        (request,) = (r for r in server.beside if r.path == "/v1/logs")
    assert (one.time_unix_nano, one.observed_time_unix_nano) == (T0 + 1, T0 + 1)
    assert (one.severity_number, one.severity_text, one.event_name) == (13, "WARN", "a.b")
    assert one.body.string_value == "text 1"
    assert attributes(one.attributes)["number"] == 1
    assert attributes(one.attributes)["ratio"] == 0.5
    assert (one.trace_id.hex(), one.span_id.hex(), one.flags) == (TRACE, SPAN, 1)
    assert (two.trace_id, two.span_id, two.flags) == (b"", b"", 0)
    resource = request.message.resource_logs[0].resource
    assert attributes(resource.attributes)["cirron.run.id"] == "digits-cnn"


def test_rows_that_are_no_records_are_counted(tmp_path: Path) -> None:
    """What a foreign writer made of a row is left out with a word, the others arrive."""
    bad = [record(3, ts_ns=-1), record(4, severity_number=99), record(5, ts_ns="soon")]
    Writer(tmp_path, **WRITER).batch(10, [], logs=[*bad, record(6, trace_id="x", span_id="y")])
    with http_receiver() as server:
        (answer,) = deliver(to(server), parcels(tmp_path))
        (kept,) = server.logs()
    assert answer == Accepted("3 log rows cannot be said in OTLP", 3)
    assert kept.body.string_value == "text 6"
    assert not kept.trace_id
    assert log_records([{}]) == ([], 1)


def test_trouble_with_logs(tmp_path: Path) -> None:
    """Logs are tried again until taken, halved where too large; a 404 switches them off alone."""
    write = Writer(tmp_path, **WRITER)
    write.batch(10, [], logs=[record(number) for number in range(10)])
    write.batch(20, [], logs=[record(10)])
    write.batch(30, [], logs=[record(11)])
    first, second, third = parcels(tmp_path)
    with http_receiver() as server:
        server.beside_script = {"/v1/logs": [503, 413, None, None, 404]}
        destination = to(server)
        refused = destination.send(first)
        assert isinstance(refused, RetryAfter)
        assert refused.reason == "logs: HTTP 503"
        assert destination.send(first) == Accepted()
        assert len(server.logs()) == 10
        (answer,) = deliver(destination, [second])
        assert isinstance(answer, Accepted)
        assert "no logs go there" in answer.note
        asked = server.beside_requests
        assert deliver(destination, [third]) == [Accepted()]
        assert len(server.logs()) == 10
        assert server.beside_requests == asked


def test_logs_can_be_off(tmp_path: Path) -> None:
    """With OTEL_LOGS_EXPORTER=none no log leaves."""
    Writer(tmp_path, **WRITER).batch(10, [], logs=[record(1)])
    with http_receiver() as server:
        deliver(to(server, {"OTEL_LOGS_EXPORTER": "none"}), parcels(tmp_path))
        assert server.logs() == []


def test_anchors_of_a_record_leave_the_machine(tmp_path: Path) -> None:
    """The anchors of a training record arrive as log records in the trace they were made in."""
    with http_receiver() as server:
        ci.profile(frameworks=[], otlp=server.url, exit_budget=30)
        with ci.scope("epoch"):
            journal = open_journal(tmp_path / "run", run_start=START, run_id="r")
            journal.close()
        ci.shutdown()
        anchors = [one for one in server.logs() if one.event_name == "cirron.record.anchor"]
        epoch = next(one for one in server.spans.values() if one.name == "epoch")
    assert {attributes(one.attributes)["cirron.record.event"] for one in anchors} == {
        "run_start", "run_end",
    }  # fmt: skip
    assert {(one.trace_id, one.span_id) for one in anchors} == {(epoch.trace_id, epoch.span_id)}


@pytest.mark.parametrize("way", ["http", "grpc"])
def test_through_a_collector(tmp_path: Path, way: str) -> None:
    """A real collector takes metrics and logs, and passes on what was sent."""
    root = tmp_path / "job"
    training(root, epochs=2, steps=10)
    Writer(root, **WRITER).batch(5000, [], logs=[in_span(1), record(2)])
    with http_receiver() as backend, running_rotel(tmp_path / "rotel", backend.url) as collector:
        at = OtlpServer()
        at.url = getattr(collector, way)
        answers = deliver(to(at), parcels(root))
        assert set(answers) == {Accepted()}
        collector.stop()
        steps = last(backend, "cirron.step.duration")[""]
        assert (steps.count, steps.start_time_unix_nano) == (20, T0)
        assert [round(p.as_double, 6) for _, p in backend.points("cirron.train.loss")] == [
            round(2.3 / (1 + 0.2 * k), 6) for k in (9, 19)
        ]
        assert last(backend, "cirron.phase.duration")["forward"].count == 20
        bodies = {one.body.string_value: one for one in backend.logs()}
        assert bodies.keys() == {"text 1", "text 2"}
        assert bodies["text 1"].trace_id.hex() == TRACE
        assert len(backend.spans) == 2 * 10 * 5 + 2 + 1
