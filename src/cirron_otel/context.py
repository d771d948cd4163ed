"""OpenTelemetry's current context, at the speed of the variable behind it.

``get_current`` and ``attach_context`` are :mod:`opentelemetry.context`'s ``get_current`` and
``attach``. Its
default runtime keeps the context in one :class:`contextvars.ContextVar`, and a scope reads and sets
it four times; so the variable is looked up once, by attaching a context and seeing, through the
public :func:`contextvars.copy_context`, where it went. With another runtime
(``OTEL_PYTHON_CONTEXT``) the official functions are used as they are.
"""

from __future__ import annotations

import contextvars
import sys
from collections.abc import Callable

from opentelemetry import context as otel_context
from opentelemetry import trace as otel_trace
from opentelemetry.context import Context

#: OpenTelemetry keeps its key private; a context with one span in it tells it.
(SPAN_KEY,) = otel_trace.set_span_in_context(otel_trace.INVALID_SPAN, Context())
SCOPE_KEY = otel_context.create_key("cirron-scope")

#: In place of the context that a scope attached, once it has ended: a scope and a context that hold
#: each other would have to wait for the garbage collector.
GONE = Context()


def _find_variable() -> contextvars.ContextVar[Context] | None:
    probe = Context({SCOPE_KEY: "probe"})

    def look() -> contextvars.ContextVar[Context] | None:
        otel_context.attach(probe)
        for variable, value in contextvars.copy_context().items():
            if value is probe:
                return variable
        return None

    return contextvars.copy_context().run(look)


def _with_default() -> contextvars.ContextVar[Context] | None:
    """The variable, if it answers also where nothing was attached yet."""
    variable = _find_variable()
    if variable is not None:
        try:
            contextvars.Context().run(variable.get)
        except LookupError:  # the official function knows what to answer then
            return None
    return variable


def _safe_set(variable: contextvars.ContextVar[Context]) -> Callable[[Context], object]:
    """The variable's ``set``; up to Python 3.11 with the present values held meanwhile.

    There the garbage collector may run inside the setting, and a finalizer that sets a variable,
    too (a loop's generator, say), would take away the values that are being copied: a crash.
    """
    if sys.version_info >= (3, 12):
        return variable.set

    def attach(context: Context) -> None:
        held = contextvars.copy_context()
        variable.set(context)
        del held

    return attach


#: The variable that holds the context; None where it lies elsewhere.
VARIABLE = _with_default()
get_current: Callable[[], Context] = otel_context.get_current
attach_context: Callable[[Context], object] = otel_context.attach
if VARIABLE is not None:
    get_current, attach_context = VARIABLE.get, _safe_set(VARIABLE)
