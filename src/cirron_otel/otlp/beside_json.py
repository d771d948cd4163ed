"""Metrics and logs as OTLP JSON, by msgspec alone; for spans see :mod:`.json_form`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from cirron_otel.otlp.instruments import Exemplar, Instrument, Metric, Point
from cirron_otel.otlp.json_form import json_attributes
from cirron_otel.otlp.logs import OtlpLog
from cirron_otel.otlp.rows import Scope

_encode = msgspec.json.Encoder().encode
_CUMULATIVE = 2


class JsonBeside:
    """The bodies of requests. Pure functions; any thread."""

    def metrics(
        self, resource: Mapping[str, Any], scope: Scope, metrics: Sequence[Metric]
    ) -> bytes:
        """The body of a request to ``/v1/metrics``."""
        return _request(resource, scope, ("Metrics", "metrics"), list(map(_metric, metrics)))

    def logs(self, resource: Mapping[str, Any], scope: Scope, logs: Sequence[OtlpLog]) -> bytes:
        """The body of a request to ``/v1/logs``."""
        return _request(resource, scope, ("Logs", "logRecords"), list(map(_log, logs)))


def _request(
    resource: Mapping[str, Any], scope: Scope, names: tuple[str, str], rows: list[dict[str, Any]]
) -> bytes:
    signal, key = names
    return _encode(
        {
            f"resource{signal}": [
                {
                    "resource": {"attributes": json_attributes(resource)},
                    f"scope{signal}": [
                        {"scope": {"name": scope.name, "version": scope.version}, key: rows}
                    ],
                }
            ]
        }
    )


def _metric(metric: Metric) -> dict[str, Any]:
    instrument = metric.instrument
    points = [_point(point, instrument) for point in metric.points]
    data: dict[str, Any] = {"dataPoints": points}
    if instrument.kind != "gauge":
        data["aggregationTemporality"] = _CUMULATIVE
    if instrument.kind == "sum":
        data["isMonotonic"] = True
    exponential = metric.points and metric.points[0].scale is not None
    return {
        "name": instrument.name,
        "unit": instrument.unit,
        "description": instrument.description,
        "exponentialHistogram" if exponential else instrument.kind: data,
    }


def _point(point: Point, instrument: Instrument) -> dict[str, Any]:
    kind = instrument.kind
    out: dict[str, Any] = {
        "attributes": json_attributes(point.attrs),
        "timeUnixNano": str(point.time_ns),
    }
    if kind != "gauge":
        out["startTimeUnixNano"] = str(point.start_ns)
    if point.exemplars:
        out["exemplars"] = list(map(_exemplar, point.exemplars))
    if kind == "histogram":
        out |= {
            "count": str(point.total), "sum": point.value, "min": point.least, "max": point.most,
        }  # fmt: skip
        counts, scale = list(map(str, point.buckets)), point.scale
        if scale is None:
            out |= {"bucketCounts": counts, "explicitBounds": instrument.boundaries}
        else:
            out |= {
                "scale": scale.scale,
                "zeroCount": str(scale.zero_count),
                "positive": {"offset": scale.offset, "bucketCounts": counts},
            }
    elif type(point.value) is int:
        out["asInt"] = str(point.value)
    else:
        out["asDouble"] = point.value
    return out


def _exemplar(one: Exemplar) -> dict[str, Any]:
    return {
        "timeUnixNano": str(one.ts_ns),
        "asDouble": one.value,
        "traceId": one.trace_id,
        "spanId": one.span_id,
    }


def _log(one: OtlpLog) -> dict[str, Any]:
    out: dict[str, Any] = {
        "timeUnixNano": str(one.ts_ns),
        "observedTimeUnixNano": str(one.ts_ns),
        "severityNumber": one.severity_number,
        "severityText": one.severity_text,
        "eventName": one.event_name,
        "body": {"stringValue": one.body},
        "attributes": json_attributes(one.attrs),
    }
    if one.trace_id:
        out |= {"traceId": one.trace_id, "spanId": one.span_id, "flags": one.flags}
    return out
