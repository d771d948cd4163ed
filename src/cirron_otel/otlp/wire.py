"""What an encoding of OTLP does, whichever it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from cirron_otel.otlp.instruments import Metric
from cirron_otel.otlp.logs import OtlpLog
from cirron_otel.otlp.rows import OtlpSpan, Scope


class Encoded(NamedTuple):
    """One span as bytes, and whose it is."""

    scope: Scope
    data: bytes


class Refusal(NamedTuple):
    """What a receiver complained of in an answer that is a success."""

    rejected: int
    message: str


class Wire(Protocol):
    """Spans to the body of a request, one span at a time, so that it can be cut anywhere."""

    content_type: str

    def span(self, span: OtlpSpan) -> bytes:
        """One span."""
        ...

    def request(self, resource: Mapping[str, Any], spans: Sequence[Encoded]) -> bytes:
        """The body of a request: the spans, grouped by scope, under one resource."""
        ...

    def refusal(self, body: bytes) -> Refusal:
        """What the answer's body says of spans that were not taken; zeros where it says nothing."""
        ...

    def reason(self, body: bytes) -> str:
        """The message in the body of an error; empty where it holds none."""
        ...


class Beside(Protocol):
    """Metrics and log records to the body of a request."""

    def metrics(
        self, resource: Mapping[str, Any], scope: Scope, metrics: Sequence[Metric]
    ) -> bytes:
        """The body of a request with metrics."""
        ...

    def logs(self, resource: Mapping[str, Any], scope: Scope, logs: Sequence[OtlpLog]) -> bytes:
        """The body of a request with log records."""
        ...
