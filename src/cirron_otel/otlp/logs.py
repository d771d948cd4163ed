"""Log records from spool rows (the batch key ``logs``), in OTLP's terms.

A row that is no log record (a foreign writer's) is left out and counted. Pure functions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_TRACE_ID, _SPAN_ID = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{16}")
#: OpenTelemetry's severity numbers end here.
_MAX_SEVERITY = 24


class OtlpLog(NamedTuple):
    """A log record. Ids in hex, empty where it was made in no span; the time in ns."""

    ts_ns: int
    severity_number: int
    severity_text: str
    event_name: str
    body: str
    attrs: Mapping[str, Any]
    trace_id: str = ""
    span_id: str = ""
    flags: int = 0


def log_records(rows: Sequence[Mapping[str, Any]]) -> tuple[list[OtlpLog], int]:
    """The log records of a batch, and how many rows were none."""
    found = [record for row in rows if (record := _record(row)) is not None]
    return found, len(rows) - len(found)


def _record(row: Mapping[str, Any]) -> OtlpLog | None:
    body, attrs = row.get("body", ""), row.get("attrs")
    ts_ns = _below(2**64, row.get("ts_ns"))
    number = _below(_MAX_SEVERITY + 1, row.get("severity_number", 0))
    flags = _below(2**32, row.get("trace_flags", 0))
    if ts_ns is None or number is None or flags is None:
        return None
    trace_id, span_id = str(row.get("trace_id", "")), str(row.get("span_id", ""))
    if not _TRACE_ID.fullmatch(trace_id) or not _SPAN_ID.fullmatch(span_id):
        trace_id = span_id = ""
    return OtlpLog(
        ts_ns,
        number,
        str(row.get("severity_text", "")),
        str(row.get("event_name", "")),
        body if isinstance(body, str) else str(body),
        attrs if isinstance(attrs, Mapping) else {},
        trace_id,
        span_id,
        flags,
    )


def _below(end: int, value: object) -> int | None:
    return value if type(value) is int and 0 <= value < end else None
