"""Our own provider: lean spans, and room for anybody's span processors.

Used when the process has no OpenTelemetry SDK provider. It is set as the global provider only
when asked (``profile(set_global=True)``); the context is OpenTelemetry's in any case.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context
from opentelemetry.sdk.trace import SpanLimits as SdkSpanLimits
from opentelemetry.sdk.trace import sampling
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanKind
from opentelemetry.util.types import Attributes

from cirron_otel import semconv
from cirron_otel._guard import logger
from cirron_otel.batch import SpanOtel
from cirron_otel.scope_base import SPAN_KEY, BaseScope, Extra
from cirron_otel.spans import ScopeSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opentelemetry.sdk.trace import SpanProcessor

    from cirron_otel.recorder import Recorder


class Limits:
    """OTel's span limits, from its environment variables (``OTEL_SPAN_*``, ``OTEL_ATTRIBUTE_*``).

    They bound what a span shows to exporters; the spool keeps everything.
    """

    def __init__(self) -> None:
        limits = SdkSpanLimits()
        self.max_attributes = limits.max_span_attributes
        self.max_attribute_length = limits.max_span_attribute_length
        self.max_events = _or_endless(limits.max_events)
        self.max_links = _or_endless(limits.max_links)


def _or_endless(limit: int | None) -> float:
    return float("inf") if limit is None else limit


def sampler_from_environment(environ: Mapping[str, str] = os.environ) -> sampling.Sampler:
    """The sampler that ``OTEL_TRACES_SAMPLER`` names; parent-based always-on by default."""
    name = environ.get("OTEL_TRACES_SAMPLER", "").strip().lower() or "parentbased_always_on"
    plain = name.removeprefix("parentbased_")
    root: sampling.Sampler | None = {
        "always_on": sampling.ALWAYS_ON,
        "always_off": sampling.ALWAYS_OFF,
    }.get(plain)
    if plain == "traceidratio":
        root = sampling.TraceIdRatioBased(_ratio(environ.get("OTEL_TRACES_SAMPLER_ARG", "")))
    if root is None:
        logger.warning("cirron-otel: OTEL_TRACES_SAMPLER=%r is not known here, sampling all", name)
        root = sampling.ALWAYS_ON
    return sampling.ParentBased(root) if name.startswith("parentbased_") else root


def _ratio(text: str) -> float:
    try:
        ratio = float(text) if text.strip() else 1.0
    except ValueError:
        ratio = -1.0
    if 0.0 <= ratio <= 1.0:
        return ratio
    logger.warning("cirron-otel: OTEL_TRACES_SAMPLER_ARG=%r is no ratio in [0, 1], using 1", text)
    return 1.0


class OwnSpans:
    """How the recorder makes scopes with our own provider."""

    description = "own"
    #: Plain scopes may take the fast path.
    lean = True

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self.limits = Limits()
        self.scope_class: type[BaseScope] = ScopeSpan
        #: What ``scope_class`` is for one scope in 64.
        self.timed_class: type[BaseScope] = ScopeSpan
        self.loop_class: type[BaseScope] = LoopSpan
        self.processors: tuple[SpanProcessor, ...] = ()
        self.provider = ScopeTracerProvider(rec, self)
        self._sampler = sampler_from_environment()

    def sample_next(self) -> None:
        """Have the next scope measure what it costs."""
        self.scope_class = self.timed_class

    def sampled(self, trace_id: str) -> bool:
        """The sampler's decision for a new trace; what is not sampled is recorded all the same."""
        result = self._sampler.should_sample(None, int(trace_id, 16), semconv.SESSION)
        return result.decision is sampling.Decision.RECORD_AND_SAMPLE

    def shutdown(self) -> None:
        """Shut down the processors that were added."""
        processors, self.processors = self.processors, ()
        for processor in processors:
            try:
                processor.shutdown()
            except Exception as error:  # noqa: BLE001 - a foreign processor may raise anything
                self._rec.guard.swallow("processor.shutdown", error)


class ScopeTracerProvider(otel_trace.TracerProvider):
    """An OTel tracer provider whose spans are lean and go to the spool."""

    def __init__(self, rec: Recorder, spans: OwnSpans) -> None:
        self._rec = rec
        self._spans = spans

    @property
    def resource(self) -> Any:  # noqa: ANN401 - opentelemetry.sdk.resources.Resource
        """The resource of every span."""
        return self._rec.resource

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> ScopeTracer:
        """A tracer for an instrumentation scope. Its spans are children like any other's."""
        scope = InstrumentationScope(
            instrumenting_module_name, instrumenting_library_version, schema_url, attributes
        )
        return ScopeTracer(self._rec, scope)

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        """Have a processor see every span from now on, after those added before it."""
        self._spans.processors = (*self._spans.processors, span_processor)
        self._rec.refresh_busy()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the spool and every processor; False if one of them says so."""
        done = self._rec.flush(timeout_millis / 1000)
        for processor in self._spans.processors:
            done = bool(processor.force_flush(timeout_millis)) and done
        return done

    def shutdown(self) -> None:
        """Shut down the added processors. The recorder goes on; end it with ``ci.shutdown()``."""
        self._spans.shutdown()
        self._rec.refresh_busy()


class LoopSpan(ScopeSpan):
    """A scope that a loop opened on the user's behalf."""

    __slots__ = ()
    auto = True


class TracerSpan(ScopeSpan):
    """A span that somebody made with a tracer: its parent is the context's span, nothing else."""

    __slots__ = ()

    def _place(self, parent: BaseScope, context: Context) -> Context:
        current = context.get(SPAN_KEY)
        if not isinstance(current, otel_trace.Span) or not current.get_span_context().is_valid:
            trace = self._rec.new_trace()
            self.trace, self.otel = trace, trace.otel
            return context
        if isinstance(current, BaseScope):
            above = current.get_span_context()
            self.trace = current.trace
            current.trace.count += 1
            self.otel = SpanOtel(
                trace_id=self.trace.id[:16],
                parent_span_id=f"{above.span_id:016x}",
                sampled=self.trace.otel.sampled,
            )
            self.extra = self.extra or Extra()
            self.extra.otel_parent = above
            return context
        return self._under_foreign(current, current.get_span_context(), context)


class ScopeTracer(otel_trace.Tracer):
    """A tracer of :class:`ScopeTracerProvider`. Thread-safe, never raises, never blocks."""

    def __init__(self, rec: Recorder, scope: InstrumentationScope) -> None:
        self._rec = rec
        self._scope = scope

    def start_span(  # noqa: PLR0913 - OTel's signature
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,  # noqa: FBT001, FBT002, ARG002 - OTel's signature
        set_status_on_exception: bool = True,  # noqa: FBT001, FBT002, ARG002
    ) -> otel_trace.Span:
        """Start a span under the span of ``context`` (default: the current one)."""
        span = TracerSpan(self._rec, name, None, dict(attributes or {}))
        span.extra = extra = Extra()
        extra.kind = kind
        extra.links = list(links or ())
        extra.instrumentation = self._scope
        token = None if context is None else otel_context.attach(context)
        try:
            opened = span.open(start_ns=start_time, attach=False)
        finally:
            if token is not None:
                otel_context.detach(token)
        return span if opened else otel_trace.INVALID_SPAN  # type: ignore[return-value]

    @contextmanager
    def start_as_current_span(  # noqa: PLR0913 - OTel's signature
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,  # noqa: FBT001, FBT002 - OTel's signature
        set_status_on_exception: bool = True,  # noqa: FBT001, FBT002
        end_on_exit: bool = True,  # noqa: FBT001, FBT002
    ) -> Iterator[otel_trace.Span]:
        """Start a span and make it current while the ``with`` block (or function) runs."""
        span = self.start_span(name, context, kind, attributes, links, start_time)
        with otel_trace.use_span(
            span,
            end_on_exit=end_on_exit,
            record_exception=record_exception,
            set_status_on_exception=set_status_on_exception,
        ):
            yield span
