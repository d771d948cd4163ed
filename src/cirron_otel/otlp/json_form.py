"""OTLP as JSON, by msgspec alone: ids in hex, 64-bit numbers as text, NaN by its name."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cirron_otel.otlp.rows import OtlpSpan, Scope
from cirron_otel.otlp.wire import Encoded, Refusal

_encode = msgspec.json.Encoder().encode


class JsonWire:
    """OTLP JSON. Pure functions; any thread."""

    content_type = "application/json"

    def span(self, span: OtlpSpan) -> bytes:
        """One span as a JSON object; what is empty or zero is left out, as ProtoJSON has it."""
        out: dict[str, Any] = {
            "traceId": span.trace_id,
            "spanId": span.span_id,
            "name": span.name,
            "kind": span.kind,
            "startTimeUnixNano": str(span.start_ns),
            "endTimeUnixNano": str(span.end_ns),
            "attributes": json_attributes(span.attrs),
            "status": _status(span),
        }
        if span.parent_id:
            out["parentSpanId"] = span.parent_id
        if span.trace_state:
            out["traceState"] = span.trace_state
        if span.flags:
            out["flags"] = span.flags
        if span.events:
            out["events"] = [
                {
                    "timeUnixNano": str(event.ts_ns),
                    "name": event.name,
                    "attributes": json_attributes(event.attrs),
                    "droppedAttributesCount": event.dropped,
                }
                for event in span.events
            ]
        if span.links:
            out["links"] = [
                {
                    "traceId": link.trace_id,
                    "spanId": link.span_id,
                    "attributes": json_attributes(link.attrs),
                    "droppedAttributesCount": link.dropped,
                }
                for link in span.links
            ]
        for key, count in (
            ("droppedAttributesCount", span.dropped_attributes),
            ("droppedEventsCount", span.dropped_events),
            ("droppedLinksCount", span.dropped_links),
        ):
            if count:
                out[key] = count  # noqa: PERF403 - out has entries already
        return _encode(out)

    def request(self, resource: Mapping[str, Any], spans: Sequence[Encoded]) -> bytes:
        """The body of a request."""
        by_scope: dict[Scope, list[bytes]] = {}
        for scope, data in spans:
            by_scope.setdefault(scope, []).append(data)
        scopes = [
            b'{"scope":%b,"spans":[%b]}'
            % (_encode({"name": scope.name, "version": scope.version}), b",".join(pieces))
            for scope, pieces in by_scope.items()
        ]
        return b'{"resourceSpans":[{"resource":%b,"scopeSpans":[%b]}]}' % (
            _encode({"attributes": json_attributes(resource)}),
            b",".join(scopes),
        )

    def refusal(self, body: bytes) -> Refusal:
        """What the answer says under ``partialSuccess``."""
        said = _object(_decoded(body).get("partialSuccess"))
        # `rejectedSpans`, and of the other signals `rejectedDataPoints` and `rejectedLogRecords`.
        counts = [value for key, value in said.items() if key.startswith("rejected")]
        try:
            rejected = int(counts[0] or 0) if counts else 0
        except (TypeError, ValueError):
            rejected = 0
        return Refusal(rejected, str(said.get("errorMessage") or ""))

    def reason(self, body: bytes) -> str:
        """The ``message`` of an error."""
        return str(_decoded(body).get("message") or "")


def _status(span: OtlpSpan) -> dict[str, Any]:
    if not span.status:
        return {}
    return {"code": span.status, "message": span.status_message}


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return _object(msgspec.json.decode(body))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _object(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def json_attributes(attrs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Attributes as OTLP JSON has them."""
    return [{"key": key, "value": _value(value)} for key, value in attrs.items()]


def _value(value: object) -> dict[str, Any]:  # noqa: PLR0911 - a type each
    if isinstance(value, str):
        return {"stringValue": value}
    if isinstance(value, bool):
        return {"boolValue": value}
    if isinstance(value, int):
        if -(2**63) <= value < 2**63:
            return {"intValue": str(value)}
        return {"stringValue": str(value)}
    if isinstance(value, float):
        return {"doubleValue": value if math.isfinite(value) else _not_finite(value)}
    if isinstance(value, list):
        return {"arrayValue": {"values": [_value(item) for item in value]}}
    if isinstance(value, Mapping):
        pairs = [{"key": str(key), "value": _value(item)} for key, item in value.items()]
        return {"kvlistValue": {"values": pairs}}
    return {} if value is None else {"stringValue": str(value)}


def _not_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"
