"""OTLP as protobuf, by the official messages.

A span is serialised once and alone. A request is put together from such pieces: in protobuf's
encoding a message within another is its field's tag, its length, and its own bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceResponse
from opentelemetry.proto.common.v1.common_pb2 import (
    AnyValue,
    ArrayValue,
    InstrumentationScope,
    KeyValue,
    KeyValueList,
)
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from cirron_otel import semconv
from cirron_otel.otlp.rows import OtlpSpan, Scope
from cirron_otel.otlp.wire import Encoded, Refusal

# Tags of length-delimited fields: number << 3 | 2.
_RESOURCE_SPANS = 1 << 3 | 2
_RESOURCE = 1 << 3 | 2
_SCOPE_SPANS = 2 << 3 | 2
_SCOPE = 1 << 3 | 2
_SPANS = 2 << 3 | 2
_STATUS_MESSAGE = 2 << 3 | 2


class ProtobufWire:
    """OTLP protobuf. Pure functions; any thread."""

    content_type = "application/x-protobuf"

    def span(self, span: OtlpSpan) -> bytes:
        """One span as a serialised ``Span``."""
        message = Span(
            trace_id=bytes.fromhex(span.trace_id),
            span_id=bytes.fromhex(span.span_id),
            parent_span_id=bytes.fromhex(span.parent_id),
            trace_state=span.trace_state,
            flags=span.flags,
            name=span.name,
            kind=span.kind,  # type: ignore[arg-type] # an enumeration is its number
            start_time_unix_nano=span.start_ns,
            end_time_unix_nano=span.end_ns,
            attributes=protobuf_attributes(span.attrs),
            dropped_attributes_count=span.dropped_attributes,
            dropped_events_count=span.dropped_events,
            dropped_links_count=span.dropped_links,
            status=Status(code=span.status, message=span.status_message),  # type: ignore[arg-type]
        )
        if span.events:
            message.events.extend(
                Span.Event(
                    time_unix_nano=event.ts_ns,
                    name=event.name,
                    attributes=protobuf_attributes(event.attrs),
                    dropped_attributes_count=event.dropped,
                )
                for event in span.events
            )
        if span.links:
            message.links.extend(
                Span.Link(
                    trace_id=bytes.fromhex(link.trace_id),
                    span_id=bytes.fromhex(link.span_id),
                    attributes=protobuf_attributes(link.attrs),
                    dropped_attributes_count=link.dropped,
                )
                for link in span.links
            )
        return bytes(message.SerializeToString())

    def request(self, resource: Mapping[str, Any], spans: Sequence[Encoded]) -> bytes:
        """A serialised ``ExportTraceServiceRequest``."""
        by_scope: dict[Scope, list[bytes]] = {}
        for scope, data in spans:
            by_scope.setdefault(scope, []).append(_field(_SPANS, data))
        described = Resource(attributes=protobuf_attributes(resource)).SerializeToString()
        parts = [_field(_RESOURCE, described)]
        for scope, pieces in by_scope.items():
            named = InstrumentationScope(name=scope.name, version=scope.version)
            pieces.insert(0, _field(_SCOPE, named.SerializeToString()))
            parts.append(_field(_SCOPE_SPANS, b"".join(pieces)))
        return _field(_RESOURCE_SPANS, b"".join(parts))

    def refusal(self, body: bytes) -> Refusal:
        """What an ``ExportTraceServiceResponse`` says under ``partial_success``.

        The other signals' responses have the same fields under other names.
        """
        try:
            said = ExportTraceServiceResponse.FromString(body).partial_success
        except DecodeError:
            return Refusal(0, "")  # a receiver that answers in its own words has taken all
        return Refusal(said.rejected_spans, said.error_message)

    def reason(self, body: bytes) -> str:
        """The ``message`` of a ``google.rpc.Status``, without its generated class."""
        try:
            # A status message lies where OTLP's own Status has its: in field 2, as text.
            return Status.FromString(body).message if body else ""
        except (DecodeError, UnicodeDecodeError):
            return ""


def _field(tag: int, data: bytes) -> bytes:
    """A field of bytes: tag, length as a varint, the bytes."""
    size = len(data)
    head = bytearray((tag,))
    while size > 0x7F:  # noqa: PLR2004 - seven bits a byte
        head.append(size & 0x7F | 0x80)
        size >>= 7
    head.append(size)
    return bytes(head) + data


#: What thousands of spans say alike is made once; these are ours, so never of two types.
_STEADY = frozenset({
    semconv.RANK, semconv.THREAD_ID, semconv.SESSION_ID, semconv.EPOCH_INDEX, semconv.PARENT_ID,
})  # fmt: skip
_MAX_STEADY = 1024
_made: dict[tuple[str, Any], KeyValue] = {}


def _steady(key: str, value: Any) -> KeyValue:  # noqa: ANN401 - JSON-like
    if type(value) is not int and type(value) is not str:
        return KeyValue(key=key, value=_value(value))  # a user's attribute of the same name
    pair = _made.get((key, value))
    if pair is None:
        if len(_made) >= _MAX_STEADY:
            _made.clear()
        pair = _made[key, value] = KeyValue(key=key, value=_value(value))
    return pair


def protobuf_attributes(attrs: Mapping[str, Any]) -> list[KeyValue]:
    """Attributes as OTLP has them."""
    return [
        _steady(key, value) if key in _STEADY else KeyValue(key=key, value=_value(value))
        for key, value in attrs.items()
    ]


def _value(value: object) -> AnyValue:  # noqa: PLR0911 - a type each
    if isinstance(value, str):
        return AnyValue(string_value=value)
    if isinstance(value, bool):
        return AnyValue(bool_value=value)
    if isinstance(value, int):
        # A writer of another kind may have put more than 64 bits into its JSON.
        if -(2**63) <= value < 2**63:
            return AnyValue(int_value=value)
        return AnyValue(string_value=str(value))
    if isinstance(value, float):
        return AnyValue(double_value=value)
    if isinstance(value, list):
        return AnyValue(array_value=ArrayValue(values=[_value(item) for item in value]))
    if isinstance(value, Mapping):
        pairs = [KeyValue(key=str(key), value=_value(item)) for key, item in value.items()]
        return AnyValue(kvlist_value=KeyValueList(values=pairs))
    return AnyValue() if value is None else AnyValue(string_value=str(value))
