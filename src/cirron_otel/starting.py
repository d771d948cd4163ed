"""How a recording comes to be: recorder, session, hooks and patches, all or none of them."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from opentelemetry import trace as otel_trace
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.trace import Link
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from cirron_otel import recorder, scopes
from cirron_otel._guard import Guard, logger
from cirron_otel.hooks import HookSet
from cirron_otel.lifecycle import Lifecycle
from cirron_otel.provider import sdk_disabled
from cirron_otel.version import VERSION

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.settings import Settings

_FAILED_START_WAIT_S = 1.0

#: What runs now; all None when it could not be started.
Started = tuple["Recorder | None", HookSet | None, Lifecycle | None]


def start(settings: Settings) -> Started:
    """Start recording and put every hook and patch in place; if that fails, leave nothing behind.

    Raises :class:`~cirron_otel.errors.CirronDependencyError`, before any effect, for a framework
    that is named and not installed. The calling thread's context gets the session.
    """
    guard = Guard()
    disabled = sdk_disabled()
    provider = None if disabled else _application_provider()
    hooks = HookSet.choose(settings.frameworks)  # may raise, before there is any effect
    lifecycle: Lifecycle | None = None
    rec: Recorder | None = None
    try:
        rec = scopes.adopt(
            recorder.Recorder(settings, sdk_version=VERSION, guard=guard, provider=provider)
        )
        recorder.install(rec)
        recorder.early_marks.wanted = True
        recorder.early_marks.hand_over(rec)
        rec.start_session(_session_attributes(rec), _inherited_links())
        lifecycle = Lifecycle(rec)
        lifecycle.install()
        hooks.install(rec)
        if settings.set_global and provider is None and not disabled:
            otel_trace.set_tracer_provider(rec.spans.provider)
    except Exception as error:  # noqa: BLE001 - see _guard
        _undo_start(guard, hooks, rec, lifecycle)
        logger.warning("cirron-otel: could not start, nothing is recorded: %r", error)
        guard.swallow("profile", error)
        return None, None, None
    return rec, hooks, lifecycle


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
    """What the session came from: the current span, or ``TRACEPARENT`` of the environment."""
    span = otel_trace.get_current_span()
    current = span.get_span_context()
    # A span that has ended (of a session that another thread shut down) stays in this context.
    if not current.is_valid or getattr(span, "end_time", None) is not None:
        carrier = {
            key.lower(): os.environ[key]
            for key in ("TRACEPARENT", "TRACESTATE")
            if key in os.environ
        }
        context = TraceContextTextMapPropagator().extract(carrier)
        current = otel_trace.get_current_span(context).get_span_context()
    return [Link(current)] if current.is_valid else []
