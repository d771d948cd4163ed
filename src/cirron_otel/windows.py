"""Window traces: where the spans go that a full trace cannot take.

No trace of ours grows past its limit, because trace viewers cannot show it and backends refuse it.
What opens after that opens in a *window*: a trace of its own whose root span, ``steps[a..b]``, is
linked to the canonical parent and to the session and is ended when the window is full. The choice
is made when a scope opens, so no id ever changes. The spool's tree does not know windows: their
roots are written under the batch key ``windows`` (while open, with ``otel.window``, under
``open``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec
from opentelemetry.context import Context
from opentelemetry.trace import set_span_in_context

from cirron_otel import semconv

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope, Trace


def open_window(rec: Recorder, first: BaseScope, parent: BaseScope) -> Trace:
    """A new trace for what a full one cannot take, under a root span linked to it."""
    trace = rec.new_trace()
    trace.last = first
    label = "steps" if first.name == semconv.STEP else f"{first.name}s"
    root = rec.make_scope(f"{label}[{_ordinal(first, parent)}..]", None, {})
    root.open_window_root(trace, [parent, rec.session])
    trace.root = root
    trace.parent = parent
    trace.root_context = set_span_in_context(root._span(), Context())  # noqa: SLF001
    trace.child_otel = msgspec.structs.replace(trace.otel, parent_span_id=root.id[:16])
    root.otel = msgspec.structs.replace(root.otel, window=True)
    rec.open[root.id] = root
    return trace


def close_window(rec: Recorder, window: Trace) -> None:
    """End the root span of a window that is full, or at the end of the session."""
    if window.window is not None:
        close_window(rec, window.window)
    root, last = window.root, window.last
    if root is None or not root.is_open or last is None:
        return
    root.rename(f"{root.name.removesuffix(']')}{_ordinal(last, last.above)}]")
    root.finish_window_root()
    rec.batcher.windows.append(root.row(root.end_ns))
    rec.open.pop(root.id, None)


def close_windows(rec: Recorder) -> None:
    """End every window that is still open."""
    for scope in list(rec.open.values()):
        if scope.otel.window is True:
            close_window(rec, scope.trace)


def _ordinal(scope: BaseScope, parent: BaseScope | None) -> int:
    if scope.name == semconv.STEP and isinstance(scope.iteration, int):
        return scope.iteration
    if scope.index is not None:
        return scope.index
    return parent.ops if parent is not None else 0
