"""A real collector between us and a backend: what went in over HTTP or gRPC comes out whole."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from cirron_otel.destinations.base import Accepted, Parcel, RetryAfter
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_settings import otlp_targets
from cirron_otel.otlp.batches import read_batch
from cirron_otel.otlp.gathering import Gatherer
from cirron_otel.otlp.protobuf import ProtobufWire
from cirron_otel.otlp.rows import Scope
from cirron_otel.otlp.wire import Encoded
from delivery.counterparts import Rotel, free_port, running_rotel
from delivery.otlp_server import OtlpServer, http_receiver
from spool_by_hand import training


def send(collector: str, root: Path, **options: Any) -> None:
    """Deliver a spool to the collector."""
    (target,) = otlp_targets([{"endpoint": collector, **options}], environ={})
    destination = OtlpDestination(target, pending=False)
    for file in sorted(root.glob("spool/*.json")):
        answer = destination.send(Parcel.read(file))
        while isinstance(answer, RetryAfter):
            answer = destination.send(Parcel.read(file))
        assert answer == Accepted()
    destination.close()


def expected(root: Path) -> dict[str, Any]:
    """The spans of a spool as they should arrive, by id."""
    gatherer, wire = Gatherer(), ProtobufWire()
    files = sorted(root.glob("spool/*.json"))
    spans = [span for file in files for span in gatherer.spans(read_batch(file.read_bytes()))]
    body = wire.request({}, [Encoded(Scope("", ""), wire.span(span)) for span in spans])
    message = ExportTraceServiceRequest.FromString(body)
    return {one.span_id.hex(): one for one in message.resource_spans[0].scope_spans[0].spans}


@pytest.mark.parametrize(
    ("way", "options"),
    [("http", {}), ("http", {"protocol": "http/json"}), ("http", {"compression": "gzip"}),
     ("grpc", {}), ("grpc", {"compression": "gzip"})],
)  # fmt: skip
def test_through_a_collector(tmp_path: Path, way: str, options: dict[str, Any]) -> None:
    """Every span of a run comes out of the collector as it went in, by each protocol."""
    training(tmp_path, epochs=2, steps=10)
    with http_receiver() as backend, running_rotel(tmp_path / "rotel", backend.url) as collector:
        send(getattr(collector, way), tmp_path, **options)
        collector.stop()
        # This collector reads the decimals of JSON to the last bit but one.
        _check(backend, expected(tmp_path), digits=15 if "protocol" in options else 17)


def _check(backend: OtlpServer, spans: dict[str, Any], digits: int = 17) -> None:
    assert backend.spans.keys() == spans.keys()
    for key, span in spans.items():
        assert _shown(backend.spans[key], digits) == _shown(span, digits)
    assert len(spans) == 2 * 10 * 5 + 3


def _shown(span: Any, digits: int) -> str:
    text = json_format.MessageToJson(span, sort_keys=True)
    return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.{digits}g}", text)


def test_large_batches_pass_a_grpc_limit_of_4_mib(tmp_path: Path) -> None:
    """A spool with batches of several megabytes of OTLP passes the collector's gRPC limit."""
    root = tmp_path / "large"
    training(root, epochs=1, steps=4000)
    (first, *_) = sorted(root.glob("spool/*.json"))
    size = len(read_batch(first.read_bytes()).spans)
    with http_receiver() as backend, running_rotel(tmp_path / "rotel", backend.url) as collector:
        send(collector.grpc, root, timeout=30)
        collector.stop()
        assert len(backend.spans) == size + 1 == 4000 * 5 + 2


def test_what_a_killed_collector_lost(tmp_path: Path) -> None:
    """A collector that keeps all in memory and dies loses it; the spool sends it once more."""
    training(tmp_path, epochs=2, steps=10)
    nowhere = f"http://127.0.0.1:{free_port()}"
    with running_rotel(tmp_path / "first", nowhere) as collector:
        send(collector.http, tmp_path)  # it answers success, with no backend to be seen
        collector.kill()
    with http_receiver() as backend, running_rotel(tmp_path / "second", backend.url) as collector:
        assert isinstance(collector, Rotel)
        assert backend.spans == {}
        send(collector.http, tmp_path)
        collector.stop()
        _check(backend, expected(tmp_path))
