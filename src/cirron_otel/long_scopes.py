"""Which open scopes are told of before they end: announced by a span, named in heartbeats."""

from __future__ import annotations

from cirron_otel import semconv

_LONG_SCOPES = frozenset({semconv.SESSION, semconv.EPOCH, semconv.EVALUATION})
_LONG_NS = 5_000_000_000


def is_long(name: str, open_ns: int) -> bool:
    """Whether a reader of traces waits long for a scope: by its kind, or open for so long now."""
    return name in _LONG_SCOPES or open_ns >= _LONG_NS
