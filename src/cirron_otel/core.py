"""The hot path of a scope: compiled where that was built, else in Python.

Both are the same classes with the same promises, and both pass the tests. ``CIRRON_OTEL_PURE=1``
takes the Python one in any case.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from msgspec import UNSET
from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.trace import SpanKind, StatusCode

from cirron_otel import hook_core, joined_core, scope_core, semconv
from cirron_otel.batch import MAX_MARK_IDS, MarkRecord, SpanRecord, encode_value
from cirron_otel.context import GONE, SCOPE_KEY, SPAN_KEY, VARIABLE
from cirron_otel.scope_core import ESTIMATED, MAX_DEPTH, NO_ATTRS

__all__ = [
    "COMPILED", "HookCore", "JoinedCore", "PassCore", "RecordedCall", "RecordedFetch",
    "RecorderCore", "RowBuffer", "ScopeCore", "TraceCore", "if_not_stepping", "in_compiled_code",
    "inside_forward", "is_stepping", "make_mark", "module_gone", "nothing", "record_number",
]  # fmt: skip


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
    _fast.configure_joined(
        ReadableSpan, SpanKind.INTERNAL, StatusCode.UNSET, semconv.INDEX, semconv.MARK_PREFIX,
        semconv.MARK_VALUE,
    )  # fmt: skip
    _fast.configure_rows(encode_value)
    return _fast


if TYPE_CHECKING:
    from cirron_otel._fast import RowBuffer
    from cirron_otel.hook_core import (
        HookCore,
        PassCore,
        RecordedCall,
        RecordedFetch,
        if_not_stepping,
        in_compiled_code,
        inside_forward,
        is_stepping,
        module_gone,
    )
    from cirron_otel.joined_core import JoinedCore, nothing
    from cirron_otel.scope_core import (
        RecorderCore,
        ScopeCore,
        TraceCore,
        make_mark,
        record_number,
    )

    COMPILED: bool
else:
    _module = _compiled()
    #: Whether the hot path is the compiled one.
    COMPILED = _module is not None
    _hooks = _module or hook_core
    _module = _module or scope_core
    RecorderCore, ScopeCore, TraceCore = _module.RecorderCore, _module.ScopeCore, _module.TraceCore
    record_number, make_mark = _module.record_number, _module.make_mark
    _joined = _module if COMPILED else joined_core
    JoinedCore, nothing = _joined.JoinedCore, _joined.nothing
    #: What takes rows as text; only the compiled hot path writes such.
    RowBuffer = getattr(_module, "RowBuffer", None)
    HookCore, PassCore = _hooks.HookCore, _hooks.PassCore
    RecordedCall, RecordedFetch = _hooks.RecordedCall, _hooks.RecordedFetch
    inside_forward, is_stepping = _hooks.inside_forward, _hooks.is_stepping
    if_not_stepping, in_compiled_code = _hooks.if_not_stepping, _hooks.in_compiled_code
    module_gone = _hooks.module_gone
