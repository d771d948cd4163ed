"""OpenTelemetry for machine-learning training and inference.

::

    import cirron_otel as ci

    ci.profile()
    for epoch in ci.epochs(range(20)):
        for x, y in ci.batches(loader):
            loss = train_step(x, y)
            ci.mark("loss", loss)

Importing this module loads nothing else; the names below load what they need at first use.
"""

from __future__ import annotations

# Type checkers take this name for true; importing `typing` alone would double the import time.
TYPE_CHECKING = False

if TYPE_CHECKING:
    from cirron_otel.errors import (
        CirronDependencyError,
        CirronError,
        ConfigurationError,
        SpoolError,
        SpoolFormatError,
        StopTraining,
    )
    from cirron_otel.findings import Finding
    from cirron_otel.hooks.sklearn.wrapping import wrap
    from cirron_otel.monitor.config import MonitorConfig
    from cirron_otel.monitor.front import Monitor
    from cirron_otel.profiler import (
        Cirron,
        Profiler,
        flush,
        health,
        profile,
        shutdown,
        trace,
        watch,
    )
    from cirron_otel.profiler_bridge.windows import profile_window
    from cirron_otel.run.correlation import logging_filter
    from cirron_otel.scopes import batches, epochs, mark, scope
    from cirron_otel.serving.decorator import inference
    from cirron_otel.serving.middleware import CirronMiddleware
    from cirron_otel.serving.request_batches import request_batch, trace_headers
    from cirron_otel.serving.requests import current_request, request
    from cirron_otel.serving.wsgi import CirronWsgiMiddleware
    from cirron_otel.webhooks import webhook
    from cirron_otel.weights.calls import snapshot, snapshots

    __version__: str

__all__ = [
    "Cirron",
    "CirronDependencyError",
    "CirronError",
    "CirronMiddleware",
    "CirronWsgiMiddleware",
    "ConfigurationError",
    "Finding",
    "Monitor",
    "MonitorConfig",
    "Profiler",
    "SpoolError",
    "SpoolFormatError",
    "StopTraining",
    "__version__",
    "batches",
    "current_request",
    "epochs",
    "flush",
    "health",
    "inference",
    "logging_filter",
    "mark",
    "profile",
    "profile_window",
    "request",
    "request_batch",
    "scope",
    "shutdown",
    "snapshot",
    "snapshots",
    "trace",
    "trace_headers",
    "watch",
    "webhook",
    "wrap",
]

_HOMES = {
    "errors": (
        "CirronDependencyError",
        "CirronError",
        "ConfigurationError",
        "SpoolError",
        "SpoolFormatError",
        "StopTraining",
    ),
    "findings": ("Finding",),
    "hooks.sklearn.wrapping": ("wrap",),
    "monitor.config": ("MonitorConfig",),
    "monitor.front": ("Monitor",),
    "profiler": (
        "Cirron",
        "Profiler",
        "flush",
        "health",
        "profile",
        "shutdown",
        "trace",
        "watch",
    ),
    "profiler_bridge.windows": ("profile_window",),
    "run.correlation": ("logging_filter",),
    "serving.decorator": ("inference",),
    "serving.middleware": ("CirronMiddleware",),
    "serving.request_batches": ("request_batch", "trace_headers"),
    "serving.requests": ("current_request", "request"),
    "serving.wsgi": ("CirronWsgiMiddleware",),
    "scopes": ("batches", "epochs", "mark", "scope"),
    "webhooks": ("webhook",),
    "weights.calls": ("snapshot", "snapshots"),
}


def __getattr__(name: str) -> object:
    """Load a public name at its first use; from then on it is an ordinary module attribute."""
    from importlib import import_module  # noqa: PLC0415 - only for names not loaded yet

    if name == "__version__":
        found = import_module("cirron_otel.version").VERSION
    else:
        home = next((home for home, names in _HOMES.items() if name in names), None)
        if home is None:
            message = f"module {__name__!r} has no attribute {name!r}"
            raise AttributeError(message)
        found = getattr(import_module(f"cirron_otel.{home}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """The public names."""
    return sorted(__all__)
