"""Metrics and logs as OTLP protobuf; for spans see :mod:`.protobuf`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, InstrumentationScope
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1 import metrics_pb2 as pb
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from cirron_otel.otlp.instruments import Exemplar, Metric, Point, Scale
from cirron_otel.otlp.logs import OtlpLog
from cirron_otel.otlp.protobuf import protobuf_attributes
from cirron_otel.otlp.rows import Scope

_CUMULATIVE = pb.AGGREGATION_TEMPORALITY_CUMULATIVE


class ProtobufBeside:
    """The bodies of requests. Pure functions; any thread."""

    def metrics(
        self, resource: Mapping[str, Any], scope: Scope, metrics: Sequence[Metric]
    ) -> bytes:
        """The body of a request to ``MetricsService/Export``."""
        scoped = pb.ScopeMetrics(scope=_scope(scope), metrics=list(map(_metric, metrics)))
        whole = pb.ResourceMetrics(resource=_resource(resource), scope_metrics=[scoped])
        request = ExportMetricsServiceRequest(resource_metrics=[whole])
        return bytes(request.SerializeToString())

    def logs(self, resource: Mapping[str, Any], scope: Scope, logs: Sequence[OtlpLog]) -> bytes:
        """The body of a request to ``LogsService/Export``."""
        scoped = ScopeLogs(scope=_scope(scope), log_records=list(map(_log, logs)))
        whole = ResourceLogs(resource=_resource(resource), scope_logs=[scoped])
        return bytes(ExportLogsServiceRequest(resource_logs=[whole]).SerializeToString())


def _scope(scope: Scope) -> InstrumentationScope:
    return InstrumentationScope(name=scope.name, version=scope.version)


def _resource(resource: Mapping[str, Any]) -> Resource:
    return Resource(attributes=protobuf_attributes(resource))


def _metric(metric: Metric) -> pb.Metric:
    instrument = metric.instrument
    out = pb.Metric(name=instrument.name, unit=instrument.unit, description=instrument.description)
    if instrument.kind == "gauge":
        out.gauge.CopyFrom(pb.Gauge(data_points=list(map(_number, metric.points))))
    elif instrument.kind == "sum":
        points = list(map(_number, metric.points))
        total = pb.Sum(data_points=points, aggregation_temporality=_CUMULATIVE, is_monotonic=True)
        out.sum.CopyFrom(total)
    elif metric.points and metric.points[0].scale is not None:
        scaled = [_exponential(point, point.scale) for point in metric.points if point.scale]
        out.exponential_histogram.CopyFrom(
            pb.ExponentialHistogram(data_points=scaled, aggregation_temporality=_CUMULATIVE)
        )
    else:
        lengths = [_histogram(point, instrument.boundaries) for point in metric.points]
        out.histogram.CopyFrom(
            pb.Histogram(data_points=lengths, aggregation_temporality=_CUMULATIVE)
        )
    return out


def _number(point: Point) -> pb.NumberDataPoint:
    out = pb.NumberDataPoint(**_common(point))
    if type(point.value) is int:
        out.as_int = point.value
    else:
        out.as_double = point.value
    return out


def _histogram(point: Point, boundaries: tuple[float, ...]) -> pb.HistogramDataPoint:
    return pb.HistogramDataPoint(
        bucket_counts=point.buckets, explicit_bounds=boundaries, **_lengths(point)
    )


def _exponential(point: Point, scale: Scale) -> pb.ExponentialHistogramDataPoint:
    buckets = pb.ExponentialHistogramDataPoint.Buckets(
        offset=scale.offset, bucket_counts=point.buckets
    )
    return pb.ExponentialHistogramDataPoint(
        scale=scale.scale, zero_count=scale.zero_count, positive=buckets, **_lengths(point)
    )


def _lengths(point: Point) -> dict[str, Any]:
    """What both kinds of histogram say of their points."""
    return {
        **_common(point),
        "count": point.total,
        "sum": point.value,
        "min": point.least,
        "max": point.most,
    }


def _common(point: Point) -> dict[str, Any]:
    """What every point says."""
    return {
        "attributes": protobuf_attributes(point.attrs),
        "start_time_unix_nano": point.start_ns,
        "time_unix_nano": point.time_ns,
        "exemplars": list(map(_exemplar, point.exemplars)),
    }


def _exemplar(one: Exemplar) -> pb.Exemplar:
    return pb.Exemplar(
        time_unix_nano=one.ts_ns,
        as_double=one.value,
        trace_id=bytes.fromhex(one.trace_id),
        span_id=bytes.fromhex(one.span_id),
    )


def _log(one: OtlpLog) -> LogRecord:
    return LogRecord(
        time_unix_nano=one.ts_ns,
        observed_time_unix_nano=one.ts_ns,
        severity_number=one.severity_number,  # type: ignore[arg-type] # an enumeration is its number
        severity_text=one.severity_text,
        event_name=one.event_name,
        body=AnyValue(string_value=one.body),
        attributes=protobuf_attributes(one.attrs),
        trace_id=bytes.fromhex(one.trace_id),
        span_id=bytes.fromhex(one.span_id),
        flags=one.flags,
    )
