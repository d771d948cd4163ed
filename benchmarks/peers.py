"""The OpenTelemetry SDK as a peer: provider, batch processor, and an exporter that discards.

The exporter serialises nothing and sends nothing, so the peer's number is what recording costs,
without any output; ours contains the encoding and the files. The queue is large enough for
everything a side records: with the default of 2048 the SDK drops most of a flat-out loop, and
would look quicker for it.
"""

from __future__ import annotations

from collections.abc import Sequence

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult


class DiscardingExporter(SpanExporter):
    """Counts what it is given."""

    def __init__(self) -> None:
        self.spans = 0
        self.events = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Take the spans and forget them."""
        self.spans += len(spans)
        self.events += sum(len(span.events) for span in spans)
        return SpanExportResult.SUCCESS


def provider(spans: int) -> tuple[TracerProvider, DiscardingExporter]:
    """A provider with a batch processor whose queue holds ``spans``."""
    made = TracerProvider()
    exporter = DiscardingExporter()
    made.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=spans + 4096))
    return made, exporter
