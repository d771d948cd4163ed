"""OTLP over gRPC: only where it was chosen, because gRPC and forking do not go well together.

The request's bytes are made by :mod:`cirron_otel.otlp.protobuf`; here they are only carried.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import urlsplit

import grpc
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from cirron_otel.destinations.base import Accepted, Answer, Rejected, RetryAfter, TooLarge
from cirron_otel.destinations.otlp_settings import Endpoint
from cirron_otel.errors import ConfigurationError
from cirron_otel.imports import untraced
from cirron_otel.otlp.wire import Wire
from cirron_otel.version import VERSION

METHODS = {
    "traces": "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
    "metrics": "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
    "logs": "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
}
_COMPRESSIONS = {
    "none": grpc.Compression.NoCompression,
    "gzip": grpc.Compression.Gzip,
    "deflate": grpc.Compression.Deflate,
}
#: A request this small is not refused for its size: the receiver has run out of something else.
_SMALL = 256 * 1024
_SIZE_WORDS = ("larger", "too large", "max size", "exceeds", "message length")


class GrpcSender:
    """Requests by the ``Export`` call of a signal's service."""

    def __init__(self, target: Endpoint, wire: Wire, signal: str = "traces") -> None:
        self._target = target
        self._method = METHODS[signal]
        self._wire = wire
        parts = urlsplit(target.url)
        self._place = parts.netloc
        self._credentials = _credentials(target) if parts.scheme == "https" else None
        self._metadata = [
            (name, value) for name, value in target.headers.items() if name != "user-agent"
        ]
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._channel: grpc.Channel | None = None

    def _call(self, body: bytes) -> bytes:
        with self._lock:
            if self._channel is None or os.getpid() != self._pid:
                self._pid = os.getpid()
                options = [("grpc.primary_user_agent", f"cirron-otel/{VERSION}")]
                compression = _COMPRESSIONS[self._target.compression]
                self._channel = (
                    grpc.insecure_channel(self._place, options, compression)
                    if self._credentials is None
                    else grpc.secure_channel(self._place, self._credentials, options, compression)
                )
            channel = self._channel
        # No serialiser: bytes go out and bytes come back.
        export = channel.unary_unary(self._method)
        return bytes(export(body, timeout=self._target.timeout, metadata=self._metadata))

    def send(self, body: bytes) -> Answer:
        """Call once. The answer as the destination's contract has it."""
        try:
            with untraced():
                answer = self._call(body)
        except grpc.RpcError as error:
            return _answer(error, len(body))
        except (ValueError, OSError) as error:  # closed meanwhile
            return RetryAfter(None, f"{type(error).__name__}: {error}"[:200])
        refusal = self._wire.refusal(answer)
        return Accepted(refusal.message, refusal.rejected)

    def close(self) -> None:
        """Close the channel; a call that runs fails by it."""
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None and os.getpid() == self._pid:
            channel.close()


def _answer(error: grpc.RpcError, size: int) -> Answer:
    code, details = error.code(), str(error.details() or "")
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return Rejected(None, f"INVALID_ARGUMENT: {details}"[:2000])
    wait = _retry_seconds(error.trailing_metadata() or ())
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and wait is None:
        about_size = any(word in details.lower() for word in _SIZE_WORDS)
        if about_size or size > _SMALL:
            return TooLarge(None, None, details)
    reason = getattr(code, "name", str(code))
    return RetryAfter(wait, f"{reason}: {details[:200]}" if details else reason)


def _retry_seconds(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """The delay of a ``RetryInfo`` in the error's details."""
    for key, value in metadata:
        if key == "grpc-status-details-bin" and isinstance(value, bytes):
            info = RetryInfo()
            try:
                for detail in Status.FromString(value).details:
                    if detail.Unpack(info):
                        return float(info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
            except DecodeError:
                return None
    return None


def _credentials(target: Endpoint) -> grpc.ChannelCredentials:
    """TLS by the target's certificates, else by those that gRPC finds."""
    tls = target.tls

    def read(path: str | None) -> bytes | None:
        if path is None:
            return None
        try:
            return Path(path).read_bytes()
        except OSError as exc:
            raise ConfigurationError(
                f"the certificate or key {path} for OTLP cannot be read: {exc.strerror}"
            ) from None

    return grpc.ssl_channel_credentials(
        root_certificates=read(tls.ca),
        private_key=read(tls.client_key),
        certificate_chain=read(tls.client_certificate),
    )
