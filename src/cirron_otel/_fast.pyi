# Types of the compiled hot path; its classes are those of scope_core.
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import SpanKind, StatusCode

from cirron_otel.hook_core import HookCore as HookCore
from cirron_otel.hook_core import PassCore as PassCore
from cirron_otel.hook_core import RecordedCall as RecordedCall
from cirron_otel.hook_core import RecordedFetch as RecordedFetch
from cirron_otel.hook_core import if_not_stepping as if_not_stepping
from cirron_otel.hook_core import in_compiled_code as in_compiled_code
from cirron_otel.hook_core import inside_forward as inside_forward
from cirron_otel.hook_core import is_stepping as is_stepping
from cirron_otel.hook_core import module_gone as module_gone
from cirron_otel.joined_core import JoinedCore as JoinedCore
from cirron_otel.joined_core import nothing as nothing
from cirron_otel.scope_core import RecorderCore as RecorderCore
from cirron_otel.scope_core import ScopeCore as ScopeCore
from cirron_otel.scope_core import TraceCore as TraceCore
from cirron_otel.scope_core import record_number as record_number

class ClockCore:
    offset_ns: int
    monotonic_ns: Any

class RowBuffer:
    rows: int
    blocks: int
    bytes: int
    def __init__(self, append: Callable[[Any], None], /) -> None: ...
    def append(self, row: object, /) -> None: ...
    def close(self) -> None: ...
    def took(self, block: object, /) -> None: ...
    def clear(self) -> None: ...

def hex_ids(random: bytes, size: int, /) -> list[str]: ...
def write_whole(spare: str, target: str, chunks: Sequence[bytes | memoryview], /) -> int: ...
def scan_batches(
    directory: str, wanted: int, oldest_tmp: float, /
) -> tuple[int, int, int, int, list[tuple[int, str, int]]]: ...
def configure_rows(encode: Callable[[object], bytes], /) -> None: ...
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
def configure_joined(
    readable: type[Any],
    kind: SpanKind,
    unset: StatusCode,
    index_key: str,
    mark_prefix: str,
    value_key: str,
    /,
) -> None: ...
