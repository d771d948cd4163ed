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
from opentelemetry.trace import Link, SpanKind, StatusCode

from cirron_otel import ids, semconv
from cirron_otel._guard import Guard, logger
from cirron_otel.batch import SpanOtel
from cirron_otel.scope_base import BaseScope, Extra, Trace
from cirron_otel.span_api import valid_link
from cirron_otel.spans import ScopeSpan
from cirron_otel.values import attributes

if TYPE_CHECKING:
    from collections.abc import Sequence
    from types import TracebackType

    from opentelemetry.sdk.trace import SpanProcessor
    from opentelemetry.util.types import Attributes

    from cirron_otel.recorder import Recorder

#: Events, and links, of one span that the spool keeps at least.
_KEPT = 1024


class Limits:
    """OTel's span limits, from its environment variables (``OTEL_SPAN_*``, ``OTEL_ATTRIBUTE_*``).

    They bound what a span shows to exporters; None is no limit. The spool keeps all attributes
    and marks; of events and links that are neither it keeps ``max_events`` and ``max_links``,
    so that a scope that is never closed cannot fill the memory.
    """

    def __init__(self) -> None:
        try:
            limits = SdkSpanLimits()
        except ValueError as error:
            logger.warning("cirron-otel: %s; the default span limits hold", error)
            limits = SdkSpanLimits(
                max_attributes=128, max_events=128, max_links=128, max_span_attributes=128,
                max_event_attributes=128, max_link_attributes=128,
                max_attribute_length=SdkSpanLimits.UNSET,
                max_span_attribute_length=SdkSpanLimits.UNSET,
            )  # fmt: skip
        self.max_attributes = limits.max_span_attributes
        self.max_attribute_length = limits.max_span_attribute_length
        #: Of event and link attributes, in characters.
        self.max_value_length = limits.max_attribute_length
        self.max_event_attributes = limits.max_event_attributes
        self.max_link_attributes = limits.max_link_attributes
        self.shown_events = limits.max_events
        self.shown_links = limits.max_links
        self.max_events = max(limits.max_events or 0, _KEPT)
        self.max_links = max(limits.max_links or 0, _KEPT)


def blame(guard: Guard, what: str, error: Exception, processor: str) -> None:
    """Count and log what a foreign span processor raised in its method ``what``."""
    guard.swallowed[f"processor.{what}"] += 1
    guard.repeat_warning(f"processor.{what}", f"{processor}.{what}() raised {error!r}")


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


def sdk_disabled() -> bool:
    """Whether ``OTEL_SDK_DISABLED`` switches OpenTelemetry off; any text but ``true`` does not."""
    return os.environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true"


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
        #: By ``OTEL_SDK_DISABLED``: the spool goes on, nobody else sees a span.
        self.disabled = sdk_disabled()
        known = otel_trace.get_tracer_provider()
        # The global provider cannot be replaced; one of ours from an earlier recording goes on.
        self.provider = known if isinstance(known, ScopeTracerProvider) else ScopeTracerProvider()
        self.provider.follow(rec, self)
        self._sampler = sampler_from_environment()
        asked = self._sampler.get_description()
        #: Whether every new trace is kept, and what goes on with a sampled one, so that the sampler
        #: need not be asked.
        self.keeps_all = asked.startswith(("AlwaysOnSampler", "ParentBased{root:AlwaysOnSampler,"))
        #: Whether what goes on with a trace is kept exactly where its parent is.
        self.parent_decides = asked.startswith("ParentBased{")

    def session_opened(self, session: BaseScope) -> None:
        """The session's span exists now."""

    def common_attributes(self, scope: BaseScope) -> dict[str, Any]:
        """What every exported span of ours bears."""
        out: dict[str, Any] = {semconv.RANK: self._rec.rank, semconv.THREAD_ID: scope.thread_id}
        if self._rec.session is not None:
            out[semconv.SESSION_ID] = self._rec.session.id
        return out

    def sample_next(self) -> None:
        """Have the next scope measure what it costs."""
        self._rec.quick_kind = None
        self.scope_class = self.timed_class

    def sampled(self, trace_id: str) -> bool:
        """The sampler's decision for a new trace; what is not sampled is recorded all the same.

        A new trace has no parent, whatever span is current where it begins.
        """
        return self._decided(Context(), int(trace_id, 16), semconv.SESSION)

    def decide(self, context: Context | None, trace_id: int, span: ScopeSpan) -> bool:
        """The sampler's decision for a span that somebody else's span, or none, is above."""
        if self.keeps_all:
            parent = otel_trace.get_current_span(context).get_span_context()
            if parent.trace_flags.sampled or not parent.is_valid:
                return True
        extra = span.extra or Extra()
        return self._decided(
            context, trace_id, span.name, extra.kind, attributes(span.attrs)[0], extra.links
        )

    def _decided(self, context: Context | None, trace_id: int, *about: Any) -> bool:
        result = self._sampler.should_sample(context, trace_id, *about)
        return result.decision is sampling.Decision.RECORD_AND_SAMPLE

    def blame(self, what: str, error: Exception, processor: object) -> None:
        """Count and log what a foreign processor raised; it never reaches the user's code."""
        blame(self._rec.guard, what, error, type(processor).__name__)

    def shutdown(self) -> None:
        """Shut down the processors that were added."""
        processors, self.processors = self.processors, ()
        for processor in processors:
            try:
                processor.shutdown()
            except Exception as error:  # noqa: BLE001 - a foreign processor may raise anything
                self.blame("shutdown", error, processor)


class ScopeTracerProvider(otel_trace.TracerProvider):
    """An OTel tracer provider whose spans are lean and go to the spool.

    As the global provider it outlives one recording: it follows the newest, and between two its
    tracers hand out spans that record nothing.
    """

    rec: Recorder
    _spans: OwnSpans

    def follow(self, rec: Recorder, spans: OwnSpans) -> None:
        """Make spans for this recorder from now on."""
        self.rec = rec
        self._spans = spans

    @property
    def resource(self) -> Any:  # noqa: ANN401 - opentelemetry.sdk.resources.Resource
        """The resource of every span."""
        return self.rec.resource

    def get_tracer(
        self,
        instrumenting_module_name: str,
        instrumenting_library_version: str | None = None,
        schema_url: str | None = None,
        attributes: Attributes = None,
    ) -> otel_trace.Tracer:
        """A tracer for an instrumentation scope. Its spans are children like any other's."""
        if self._spans.disabled:
            return otel_trace.NoOpTracer()
        scope = InstrumentationScope(
            instrumenting_module_name, instrumenting_library_version or "", schema_url, attributes
        )
        return ScopeTracer(self, scope)

    def add_span_processor(self, span_processor: SpanProcessor) -> None:
        """Have a processor see every span from now on, after those added before it."""
        if not self._spans.disabled:
            self._spans.processors = (*self._spans.processors, span_processor)
            self.rec.refresh_busy()

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the spool and every processor; False if one of them says so or raises."""
        done = self.rec.flush(timeout_millis / 1000)
        for processor in self._spans.processors:
            try:
                # None counts as done: not every processor knows of the answer.
                done = processor.force_flush(timeout_millis) is not False and done
            except Exception as error:  # noqa: BLE001 - a foreign processor may raise anything
                self._spans.blame("force_flush", error, processor)
                done = False
        return done

    def shutdown(self) -> None:
        """Shut down the added processors. The recorder goes on; end it with ``ci.shutdown()``."""
        self._spans.shutdown()
        self.rec.refresh_busy()


class LoopSpan(ScopeSpan):
    """A scope that a loop opened on the user's behalf."""

    __slots__ = ()
    auto = True


#: Somebody else's spans may be as deep as they like.
_ANY_DEPTH = 1 << 30


class TracerSpan(ScopeSpan):
    """A span that somebody made with a tracer: its parent is the context's span, nothing else.

    It is in the spool only with ``spans="all"``; there its parent is the span above it, the
    session where it is the root of a trace.
    """

    __slots__ = ("handles_exceptions",)

    #: ``record_exception`` and ``set_status_on_exception`` of ``start_span``.
    handles_exceptions: tuple[bool, bool]

    def __enter__(self) -> TracerSpan:  # noqa: PYI034 - never subclassed
        """The span itself, started already; it does not become current."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the span, with the exception that passes through, if any."""
        if exc is not None and self.is_recording():
            record, set_status = self.handles_exceptions
            if record:
                self.record_exception(exc, escaped=True)
            if set_status:
                self.set_status(StatusCode.ERROR, f"{type(exc).__name__}: {exc}")
        self.end()

    def _place(self, parent: BaseScope, context: Context) -> Context:  # noqa: ARG002
        current: Any = otel_trace.get_current_span(context)
        between = current.get_span_context()
        if not between.is_valid:
            trace_id = ids.new_trace_id()
            sampled = self._own.decide(context, int(trace_id, 16), self)
            self.trace = Trace(trace_id, sampled=sampled, limit=float("inf"))
            self.otel = self.trace.otel
        elif isinstance(current, ScopeSpan) and current._rec is self._rec:  # noqa: SLF001
            self.above = current
            self.trace = current.trace
            self.trace.count += 1
            self.otel = self.trace.otel
        else:
            return self._under_foreign(current, between, context)
        return context

    def _wrap_up(self, end: int) -> None:
        if self._rec.settings.spans != "all":
            self.ops = 0  # what recording its children took is said on no row that is not there
        super()._wrap_up(end)

    def _otel(self, extra: Extra) -> SpanOtel:
        said = super()._otel(extra)
        scope = extra.instrumentation
        said.scope = {"name": scope.name, "version": scope.version}
        return said


class ScopeTracer(otel_trace.Tracer):
    """A tracer of :class:`ScopeTracerProvider`. Thread-safe, never raises, never blocks."""

    def __init__(self, provider: ScopeTracerProvider, scope: InstrumentationScope) -> None:
        self._provider = provider
        self._scope = scope

    def start_span(  # noqa: PLR0913, PLR0917 - OTel's signature
        self,
        name: str,
        context: Context | None = None,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Attributes = None,
        links: Sequence[Link] | None = None,
        start_time: int | None = None,
        record_exception: bool = True,  # noqa: FBT001, FBT002 - OTel's signature
        set_status_on_exception: bool = True,  # noqa: FBT001, FBT002
    ) -> otel_trace.Span:
        """Start a span under the span of ``context`` (default: the current one)."""
        rec = self._provider.rec
        if context is None:
            context = otel_context.get_current()
        span = TracerSpan(rec, name, None, dict(attributes or {}))
        span.handles_exceptions = (record_exception, set_status_on_exception)
        span.extra = extra = Extra()
        extra.kind = kind
        extra.links = [link for link in links or () if valid_link(link.context, link.attributes)]
        extra.instrumentation = self._scope
        token = otel_context.attach(context)
        try:
            opened = span.open(start_ns=start_time, attach=False, depth_limit=_ANY_DEPTH)
        except Exception as error:  # noqa: BLE001 - see _guard
            opened = False
            rec.guard.swallow("tracer.start_span", error)
        finally:
            otel_context.detach(token)
        if not opened:
            above = otel_trace.get_current_span(context).get_span_context()
            return otel_trace.NonRecordingSpan(above)
        if rec.settings.spans != "all":
            rec.open.pop(span.id, None)  # no row of it is written, so none is announced
        return span  # type: ignore[return-value] # a virtual subclass, see span_api

    @contextmanager
    def start_as_current_span(  # type: ignore[override] # noqa: PLR0913, PLR0917 - OTel's signature
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
