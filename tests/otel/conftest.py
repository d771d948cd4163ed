"""The two ways a span can come about, behind one handle: our provider, or the application's."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.util._once import Once

import cirron_otel as ci
from cirron_otel.batch import MarkRecord
from helpers import Rows, read_spool


class Way:
    """A recording whose spans go to a stock batch processor and an in-memory exporter."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.exporter = InMemorySpanExporter()
        self.provider: Any = None
        self.profiler: Any = None

    def start(self, *processors: SpanProcessor, **settings: Any) -> Any:
        """Begin to record; ``processors`` come before the batch processor, in this order."""
        added = (*processors, BatchSpanProcessor(self.exporter))
        if self.kind == "joined":
            self.provider = TracerProvider()
            trace.set_tracer_provider(self.provider)
            for processor in added:
                self.provider.add_span_processor(processor)
        self.profiler = ci.profile(frameworks=[], **settings)
        if self.kind == "own":
            self.provider = self.profiler.tracer_provider
            for processor in added:
                self.provider.add_span_processor(processor)
        return self.profiler

    def tracer(self, name: str = "third.party") -> trace.Tracer:
        """A tracer as an instrumentation library gets one."""
        tracer: trace.Tracer = self.provider.get_tracer(name, "1.2")
        return tracer

    def finish(self) -> list[ReadableSpan]:
        """End the recording; everything that was exported, in order of ending."""
        assert ci.shutdown()
        if self.kind == "joined":
            self.provider.force_flush()
        return list(self.exporter.get_finished_spans())

    def rows(self) -> Rows:
        """What is in the spool."""
        return read_spool()

    def marks(self) -> list[MarkRecord]:
        """The user's marks in the spool, without those about our own overhead."""
        return [mark for mark in self.rows().marks if mark.name != "cirron.overhead_ns"]


def named(spans: Sequence[ReadableSpan], name: str) -> ReadableSpan:
    """The only exported span of this name."""
    found = [span for span in spans if span.name == name]
    assert len(found) == 1, f"{[span.name for span in spans]} has not one {name!r}"
    return found[0]


def spool_id(span: Any) -> str:
    """The spool id that an OTel span must have."""
    context = span.get_span_context()
    return f"{context.span_id:016x}{context.trace_id & (2**64 - 1):016x}"


def _forget_global_provider() -> None:
    # The global provider can be set once in a process; each test is a process of its own here.
    trace._TRACER_PROVIDER = None
    trace._TRACER_PROVIDER_SET_ONCE = Once()


@pytest.fixture(autouse=True)
def _no_global_provider() -> Iterator[None]:
    """Every test begins and ends without a global tracer provider."""
    _forget_global_provider()
    yield
    ci.shutdown()
    provider = trace._TRACER_PROVIDER
    if isinstance(provider, TracerProvider):
        provider.shutdown()
    _forget_global_provider()


@pytest.fixture(params=["own", "joined"])
def way(request: pytest.FixtureRequest) -> Way:
    """Each test that takes it runs over both ways."""
    return Way(request.param)


@pytest.fixture(name="named")
def _named() -> Any:
    return named


@pytest.fixture(name="spool_id")
def _spool_id() -> Any:
    return spool_id
