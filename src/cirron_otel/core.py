"""The hot path of a scope: compiled where that was built, else in Python.

Both are the same classes with the same promises, and both pass the tests. ``CIRRON_OTEL_PURE=1``
takes the Python one in any case.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import UNSET
from opentelemetry.context import Context

from cirron_otel import scope_core, semconv
from cirron_otel.batch import MAX_MARK_IDS, MarkRecord, SpanRecord
from cirron_otel.context import GONE, SCOPE_KEY, SPAN_KEY, VARIABLE
from cirron_otel.scope_core import ESTIMATED, MAX_DEPTH, NO_ATTRS

__all__ = ["COMPILED", "RecorderCore", "ScopeCore", "TraceCore", "record_number"]


def _compiled() -> object | None:
    """The compiled module, ready for use; None where it was not built or is not wanted."""
    if VARIABLE is None or os.environ.get("CIRRON_OTEL_PURE") == "1":
        return None
    try:
        from cirron_otel import _fast  # noqa: PLC0415 - it may not be there
    except ImportError:  # no compiler when it was installed, or another Python now
        return None
    _fast.configure(
        VARIABLE, Context, SPAN_KEY, SCOPE_KEY, GONE, SpanRecord, MarkRecord, NO_ATTRS, UNSET,
        ESTIMATED, semconv.OVERHEAD, MAX_DEPTH, MAX_MARK_IDS,
    )  # fmt: skip
    return _fast


if TYPE_CHECKING:
    from cirron_otel.scope_core import RecorderCore, ScopeCore, TraceCore, record_number

    COMPILED: bool
else:
    _module = _compiled()
    #: Whether the hot path is the compiled one.
    COMPILED = _module is not None
    _module = _module or scope_core
    RecorderCore, ScopeCore, TraceCore = _module.RecorderCore, _module.ScopeCore, _module.TraceCore
    record_number = _module.record_number
