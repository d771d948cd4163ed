"""How a recording comes to be: recorder, session, hooks and patches, all or none of them."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry import baggage
from opentelemetry import trace as otel_trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.trace import Link, SpanContext, TraceFlags
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cirron_otel import children, recorder, scopes, transport
from cirron_otel._guard import Guard, logger
from cirron_otel.cursors import Delivered
from cirron_otel.hooks import HookSet
from cirron_otel.lifecycle import Lifecycle
from cirron_otel.monitor.options import arguments_of
from cirron_otel.profiler_bridge import attaching
from cirron_otel.provider import sdk_disabled
from cirron_otel.run import (
    correlation,
    data_stalls,
    memory,
    operations,
    straggler_watch,
    throughput,
)
from cirron_otel.run.watchdog import thresholds_of
from cirron_otel.serving.servers import make_room
from cirron_otel.tee.tees import Tees
from cirron_otel.version import VERSION

if TYPE_CHECKING:
    from cirron_otel.destinations.base import DestinationSpec
    from cirron_otel.findings import OnFinding
    from cirron_otel.recorder import Recorder
    from cirron_otel.settings import Settings

_FAILED_START_WAIT_S = 1.0

#: What runs now; all None when it could not be started.
Started = tuple["Recorder | None", HookSet | None, Lifecycle | None]


def start(settings: Settings, on_finding: tuple[OnFinding, ...] = ()) -> Started:
    """Start recording and put every hook and patch in place; if that fails, leave nothing behind.

    Raises :class:`~cirron_otel.errors.CirronDependencyError`, before any effect, for a framework
    that is named and not installed. The calling thread's context gets the session. ``on_finding``
    is told of each finding.
    """
    guard = Guard()
    disabled = sdk_disabled()
    provider = None if disabled else _application_provider()
    # These may raise, before there is any effect.
    arguments_of(settings.monitor)
    thresholds_of(settings.watchdog)
    webhooks = _webhooks(settings)
    hooks = HookSet.choose(settings.frameworks)
    tees = Tees.choose(settings.tee)
    attaching.check(settings)
    joined = provider is not None
    destinations = transport.resolve(settings, joined=joined, scraped="this_host")
    lifecycle: Lifecycle | None = None
    rec: Recorder | None = None
    try:
        rec = scopes.adopt(
            recorder.Recorder(settings, sdk_version=VERSION, guard=guard, provider=provider)
        )
        rec.findings.callbacks = (*on_finding, *webhooks)
        rec.findings.stop_on = frozenset(settings.stop_on)
        if on_finding or settings.stop_on:
            rec.before_optimizer_step.append(rec.findings.stop_if_asked)
        recorder.install(rec)
        recorder.early_marks.wanted = True
        recorder.early_marks.hand_over(rec)
        rec.start_session(_session_attributes(rec), _inherited_links())
        lifecycle = Lifecycle(rec)
        lifecycle.install()
        _start_snapshots(rec, destinations)
        operations.watch(rec)
        hooks.install(rec)
        tees.install(rec)
        make_room(rec)
        correlation.watch_device(rec)
        memory.watch(rec)
        attaching.attach(rec)
        straggler_watch.watch(rec)
        throughput.watch(rec)
        data_stalls.watch(rec)
        _start_delivery(rec, destinations)
        if settings.set_global and provider is None and not disabled:
            otel_trace.set_tracer_provider(rec.spans.provider)
    except Exception as error:  # noqa: BLE001 - see _guard
        _undo_start(guard, hooks, rec, lifecycle)
        logger.warning("cirron-otel: could not start, nothing is recorded: %r", error)
        guard.swallow("profile", error)
        return None, None, None
    return rec, hooks, lifecycle


def _webhooks(settings: Settings) -> list[OnFinding]:
    """Where findings are posted to by the settings. Raises ``ConfigurationError``."""
    if settings.webhook is None:
        return []
    from cirron_otel.webhooks import webhook  # noqa: PLC0415 - its HTTP client takes time to load

    return [webhook(settings.webhook)]


def _start_snapshots(rec: Recorder, destinations: list[DestinationSpec]) -> None:
    """Have snapshots taken at the boundaries of loops."""
    from cirron_otel.weights.taking import FILE_DESTINATIONS, Snapshots  # noqa: PLC0415 - as used

    names = [spec.name for spec in destinations if spec.name in FILE_DESTINATIONS]
    rec.snapshots = Snapshots(rec, uploads_to=names)
    rec.snapshots.start()


def _start_delivery(rec: Recorder, destinations: list[DestinationSpec]) -> None:
    """Have the spool drained to its destinations, in a thread or a process. Does not block."""
    settings = rec.settings
    # Also where another program delivers: what it was to deliver shall not leave first.
    receivers = [spec.name for spec in destinations if spec.kind != transport.PROMETHEUS]
    rec.spool.evict_order = Delivered(rec.spool.root, receivers)
    if not destinations or settings.forward == "off":
        return
    if settings.forward == "process" and _helper_can_be_started(rec.guard):
        from cirron_otel.forward_process import ForwardProcess  # noqa: PLC0415 - delivery only

        rec.delivery = ForwardProcess(
            rec.spool.root,
            destinations,
            guard=rec.guard,
            max_bytes=settings.spool_max_bytes,
            exit_budget=settings.exit_budget,
        )
    else:
        from cirron_otel.forwarder import Forwarder  # noqa: PLC0415 - as above

        rec.delivery = Forwarder(
            [rec.spool.root],
            [transport.connect(spec, rec.guard) for spec in destinations],
            guard=rec.guard,
            max_bytes=settings.spool_max_bytes,
        )
    rec.delivery.start()


def _helper_can_be_started(guard: Guard) -> bool:
    from cirron_otel.forward_process import can_be_started  # noqa: PLC0415 - delivery only

    if can_be_started():
        return True
    guard.warn(
        "forward_process",
        f"forward='process' needs a Python interpreter, and {sys.executable or 'this program'} is "
        "none: a thread delivers in place of it",
    )
    return False


def _undo_start(
    guard: Guard, hooks: HookSet, rec: Recorder | None, lifecycle: Lifecycle | None
) -> None:
    """Leave nothing of a start that failed: no hook, no patch, no thread, no open session."""
    recorder.install(None)
    steps: list[Callable[[], object]] = [hooks.uninstall]
    if rec is not None:
        failed = rec
        steps.append(lambda: failed.shutdown(_FAILED_START_WAIT_S))
    if lifecycle is not None:
        steps.append(lifecycle.uninstall)
    for step in steps:
        try:
            step()
        except Exception as error:  # noqa: BLE001 - the next step is needed all the same
            guard.swallowed["profile"] += 1
            logger.warning("cirron-otel: could not undo a failed start: %r", error)


def _application_provider() -> SdkTracerProvider | None:
    provider = otel_trace.get_tracer_provider()
    if isinstance(provider, SdkTracerProvider):
        return provider
    if not isinstance(provider, otel_trace.ProxyTracerProvider):
        logger.info(
            "cirron-otel: the process has a tracer provider of another kind (%s); "
            "recording with a private one beside it",
            type(provider).__name__,
        )
    return None


def _session_attributes(rec: Recorder) -> dict[str, Any]:
    settings = rec.settings
    attrs: dict[str, Any] = {"pid": rec.pid, "rank": rec.rank, "cirron.run_id": rec.run_id}
    if settings.world_size > 1:
        attrs["world_size"] = settings.world_size
    for name in ("pipeline_id", "deployment_id", "workspace_id"):
        value = getattr(settings, name)
        if value is not None:
            attrs[f"cirron.{name}"] = value
    return attrs


def _inherited_links() -> list[Link]:
    """What the session came from, as far as this process was told.

    The current span, or else ``TRACEPARENT`` of the environment with ``BAGGAGE`` on the link; and
    the session of a parent process that records too.
    """
    links: list[Link] = []
    span = otel_trace.get_current_span()
    current = span.get_span_context()
    # A span that has ended (of a session that another thread shut down) stays in this context.
    if current.is_valid and getattr(span, "end_time", None) is None:
        links.append(Link(current))
    else:
        carrier = {
            key.lower(): os.environ[key]
            for key in ("TRACEPARENT", "TRACESTATE", "BAGGAGE")
            if key in os.environ
        }
        context = TraceContextTextMapPropagator().extract(carrier)
        current = otel_trace.get_current_span(context).get_span_context()
        if current.is_valid:
            said = baggage.get_all(W3CBaggagePropagator().extract(carrier))
            links.append(Link(current, {key: str(value) for key, value in said.items()}))
    above = children.parent_session()
    if above is not None and above[1] != current.span_id:
        parent = SpanContext(*above, is_remote=True, trace_flags=TraceFlags(TraceFlags.SAMPLED))
        links.append(Link(parent))
    return links
