# Types of the compiled hot path; its classes are those of scope_core.
from contextvars import ContextVar
from typing import Any

from opentelemetry.context import Context

from cirron_otel.scope_core import RecorderCore as RecorderCore
from cirron_otel.scope_core import ScopeCore as ScopeCore
from cirron_otel.scope_core import TraceCore as TraceCore
from cirron_otel.scope_core import record_number as record_number

class ClockCore:
    offset_ns: int
    monotonic_ns: Any

def configure(
    variable: ContextVar[Context],
    context_type: type[Context],
    span_key: str,
    scope_key: str,
    gone: Context,
    span_record: type[Any],
    mark_record: type[Any],
    no_attrs: dict[str, Any],
    unset: object,
    estimated: dict[str, Any],
    overhead_name: str,
    max_depth: int,
    max_mark_ids: int,
    /,
) -> None: ...
