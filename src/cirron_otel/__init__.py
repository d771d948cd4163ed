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
    )
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
    from cirron_otel.scopes import batches, epochs, mark, scope

    __version__: str

__all__ = [
    "Cirron",
    "CirronDependencyError",
    "CirronError",
    "ConfigurationError",
    "Profiler",
    "SpoolError",
    "SpoolFormatError",
    "__version__",
    "batches",
    "epochs",
    "flush",
    "health",
    "mark",
    "profile",
    "scope",
    "shutdown",
    "trace",
    "watch",
]

_HOMES = {
    "errors": (
        "CirronDependencyError",
        "CirronError",
        "ConfigurationError",
        "SpoolError",
        "SpoolFormatError",
    ),
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
    "scopes": ("batches", "epochs", "mark", "scope"),
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
