"""An OTLP receiver that keeps what it takes and misbehaves as it is told to: HTTP and gRPC."""

from __future__ import annotations

import contextlib
import gzip
import json
import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import grpc
from google.protobuf import json_format
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

#: How a request is treated: an HTTP status, headers of the answer, its body; None takes it.
Behaviour = Callable[["Received"], "tuple[int, dict[str, str], bytes] | None"]


class Received(NamedTuple):
    """One request as it came; ``message`` is None where it is no OTLP."""

    path: str
    headers: dict[str, str]
    size: int
    message: Any


#: The messages of each signal, by the path of its requests.
MESSAGES: dict[str, Any] = {
    "/v1/metrics": ExportMetricsServiceRequest,
    "/v1/logs": ExportLogsServiceRequest,
}


def from_json(body: bytes, message: Any = ExportTraceServiceRequest) -> Any:
    """OTLP JSON as the official message; ids are hex there, base64 in ProtoJSON."""
    import base64  # noqa: PLC0415

    def walk(thing: Any) -> None:
        if isinstance(thing, dict):
            for key in ("traceId", "spanId", "parentSpanId"):
                if isinstance(thing.get(key), str):
                    thing[key] = base64.b64encode(bytes.fromhex(thing[key])).decode()
            for value in thing.values():
                walk(value)
        elif isinstance(thing, list):
            for value in thing:
                walk(value)

    document = json.loads(body)
    walk(document)
    return json_format.ParseDict(document, message())


class OtlpServer:
    """Answers by ``script`` (one entry a request), then takes everything.

    Metrics and logs are kept apart, in ``beside``, and answered by ``beside_script``.
    """

    def __init__(self) -> None:
        self.requests: list[Received] = []
        #: Spans by their id; a repeated one is there once.
        self.spans: dict[str, Any] = {}
        self.copies = 0
        self.resources: list[Any] = []
        self.scopes: set[tuple[str, str]] = set()
        self.script: list[Any] = []
        #: Requests with metrics and logs that were taken, and how to treat the next ones by path.
        self.beside: list[Received] = []
        self.beside_requests = 0
        self.beside_script: dict[str, list[Any]] = {}
        self.url = ""

    def names(self) -> list[str]:
        """The names of the spans kept, sorted."""
        return sorted(span.name for span in self.spans.values())

    def points(self, name: str) -> list[tuple[dict[str, Any], Any]]:
        """Every point of a metric in the order of arrival, with its attributes."""
        found = []
        for request in self.beside:
            for resource in getattr(request.message, "resource_metrics", ()):
                for scope in resource.scope_metrics:
                    for metric in scope.metrics:
                        if metric.name == name:
                            data = getattr(metric, metric.WhichOneof("data"))
                            found += [(attributes(p.attributes), p) for p in data.data_points]
        return found

    def logs(self) -> list[Any]:
        """Every log record in the order of arrival."""
        return [
            record
            for request in self.beside
            for resource in getattr(request.message, "resource_logs", ())
            for scope in resource.scope_logs
            for record in scope.log_records
        ]

    def take(self, request: Received) -> None:
        """Keep what is in a request."""
        if not isinstance(request.message, ExportTraceServiceRequest):
            self.beside.append(request)
            return
        for resource in request.message.resource_spans:
            self.resources.append(resource.resource)
            for scope in resource.scope_spans:
                self.scopes.add((scope.scope.name, scope.scope.version))
                for span in scope.spans:
                    self.copies += span.span_id.hex() in self.spans
                    self.spans[span.span_id.hex()] = span

    def next_behaviour(self, request: Received) -> Any:
        """What to do with the request at hand."""
        if not isinstance(request.message, ExportTraceServiceRequest):
            self.beside_requests += 1
            script = self.beside_script.get(request.path, [])
            return script.pop(0) if script else None
        self.requests.append(request)
        return self.script.pop(0) if self.script else None


def attributes(pairs: Any) -> dict[str, Any]:
    """Attributes as plain values."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in pairs}


def _plain(body: bytes, encoding: str) -> bytes:
    if encoding == "gzip":
        return gzip.decompress(body)
    return zlib.decompress(body) if encoding == "deflate" else body


@contextlib.contextmanager
def http_receiver(context: Any = None, port: int = 0) -> Iterator[OtlpServer]:
    """A receiver over HTTP on this port of the loopback, or a free one; ``context`` for TLS.

    An entry of ``script`` is a status, a tuple ``(status, headers, body)``, a number of seconds as
    a float (it takes the request, and answers so much later), or a function of the request.
    """
    server = OtlpServer()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            raw = self.rfile.read(int(self.headers["content-length"]))
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = _plain(raw, headers.get("content-encoding", ""))
            json_ = headers["content-type"] == "application/json"
            kind = MESSAGES.get(self.path, ExportTraceServiceRequest)
            message = from_json(body, kind) if json_ else kind.FromString(body)
            request = Received(self.path, headers, len(body), message)
            behaviour = server.next_behaviour(request)
            if callable(behaviour):
                behaviour = behaviour(request)
            if isinstance(behaviour, float):
                server.take(request)
                time.sleep(behaviour)
                behaviour = None
            if behaviour is None:
                server.take(request)
                behaviour = (200, {}, b"{}" if json_ else b"")
            if isinstance(behaviour, int):
                behaviour = (behaviour, {}, b"")
            status, extra, answer = behaviour
            with contextlib.suppress(OSError):
                self.send_response(status)
                for name, value in extra.items():
                    self.send_header(name, value)
                self.send_header("content-length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    listener = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    if context is not None:
        listener.socket = context.wrap_socket(listener.socket, server_side=True)
    thread = threading.Thread(target=listener.serve_forever, args=(0.01,))
    thread.start()
    scheme = "http" if context is None else "https"
    server.url = f"{scheme}://127.0.0.1:{listener.server_port}"
    try:
        yield server
    finally:
        listener.shutdown()
        thread.join()
        listener.server_close()


@contextlib.contextmanager
def grpc_receiver(
    max_bytes: int = 4 * 1024 * 1024, credentials: Any = None, *, traces_only: bool = False
) -> Iterator[OtlpServer]:
    """A receiver over gRPC; an entry of ``script`` is ``(status code, details, trailing metadata)``
    or an ``ExportTraceServiceResponse``.
    """  # noqa: D205 - one sentence
    server = OtlpServer()

    def export(request: Any, context: Any, path: str = "", answer: Any = None) -> Any:
        metadata = dict(context.invocation_metadata())
        received = Received(path, metadata, request.ByteSize(), request)
        behaviour = server.next_behaviour(received)
        if isinstance(behaviour, tuple):
            code, details, trailing = behaviour
            context.set_trailing_metadata(trailing)
            context.abort(code, details)
        server.take(received)
        return behaviour or answer or ExportTraceServiceResponse()

    handler = grpc.method_handlers_generic_handler(
        "opentelemetry.proto.collector.trace.v1.TraceService",
        {
            "Export": grpc.unary_unary_rpc_method_handler(
                export,
                request_deserializer=ExportTraceServiceRequest.FromString,
                response_serializer=ExportTraceServiceResponse.SerializeToString,
            )
        },
    )

    def beside(path: str, name: str, kind: Any, answer: Any) -> Any:
        return grpc.method_handlers_generic_handler(
            f"opentelemetry.proto.collector.{name}",
            {
                "Export": grpc.unary_unary_rpc_method_handler(
                    lambda request, context: export(request, context, path, answer()),
                    request_deserializer=kind.FromString,
                    response_serializer=answer.SerializeToString,
                )
            },
        )

    others = [
        beside("/v1/metrics", "metrics.v1.MetricsService", ExportMetricsServiceRequest,
               ExportMetricsServiceResponse),
        beside("/v1/logs", "logs.v1.LogsService", ExportLogsServiceRequest,
               ExportLogsServiceResponse),
    ]  # fmt: skip
    listener = grpc.server(
        ThreadPoolExecutor(2), options=[("grpc.max_receive_message_length", max_bytes)]
    )
    listener.add_generic_rpc_handlers((handler,) if traces_only else (handler, *others))
    if credentials is None:
        port = listener.add_insecure_port("127.0.0.1:0")
    else:
        port = listener.add_secure_port("127.0.0.1:0", credentials)
    listener.start()
    server.url = f"grpc{'' if credentials is None else 's'}://127.0.0.1:{port}"
    try:
        yield server
    finally:
        listener.stop(0).wait()
