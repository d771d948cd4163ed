"""Rows made to fit: text that every store can keep, and a size that a batch has room for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel.batch import (
    LogRecord,
    MarkRecord,
    SnapshotRecord,
    SpanOtel,
    SpanRecord,
    encode_rows,
)
from cirron_otel.values import attributes, clean_text, cut_text

#: One slice, and one row, is at most this large; what is larger is encoded row by row, then cut.
CHUNK_BYTES = 700_000
_CUT_BYTES = 256
#: A row's name, in UTF-8 bytes, where it has to be cut.
MAX_NAME_BYTES = 1024
#: Stands in ``attrs`` for those that a row of bounded size has no room for: their number.
ATTRIBUTES_LEFT_OUT = "cirron.attributes_left_out"
#: How JSON writes the character that databases refuse.
_NUL = rb"\u0000"
_BACKSLASH = b"\\"

Row = SpanRecord | MarkRecord | SnapshotRecord | LogRecord


def bare(row: SpanRecord) -> SpanRecord:
    """An open row that only says what is open: all come in one batch, however many and large.

    The closed row has the rest.
    """
    attrs = {ATTRIBUTES_LEFT_OUT: len(row.attrs)} if row.attrs else {}
    otel = row.otel
    if otel is not UNSET and otel.events is not UNSET:
        otel = _fewer_events(otel, 0)
    return msgspec.structs.replace(row, attrs=attrs, attrs_truncated=UNSET, mark_ids=(), otel=otel)


def encoded(rows: Sequence[Row]) -> bytes | None:
    """Rows as they are; None if one of them has to be cleaned or cut first."""
    try:
        chunk = encode_rows(rows)
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        return None
    if len(chunk) > CHUNK_BYTES:
        return None
    # One character is looked for many times faster than six, and most rows have no backslash.
    return None if _BACKSLASH in chunk and _NUL in chunk else chunk


def cleaned(row: Row) -> Row:
    """The row with text and numbers that every store can keep."""
    if isinstance(row, LogRecord):
        row = msgspec.structs.replace(
            row, attrs=attributes(row.attrs)[0], body=clean_text(row.body)
        )
    elif isinstance(row, SpanRecord):
        row = msgspec.structs.replace(row, attrs=attributes(row.attrs)[0], name=_name(row.name))
    elif isinstance(row, MarkRecord):
        row = msgspec.structs.replace(row, attrs=attributes(row.attrs)[0], name=_name(row.name))
        if isinstance(row.value, str):
            row.value = clean_text(row.value)
    return row


def _name(name: str) -> str:
    return cut_text(clean_text(str(name)), MAX_NAME_BYTES)


def fitting(row: Row) -> Row:
    """The row, its largest attributes and oldest events left out until it fits a batch."""
    if isinstance(row, SnapshotRecord) or len(encode_rows([row])) <= CHUNK_BYTES:
        return row
    sizes = {key: len(encode_rows([value])) for key, value in row.attrs.items()}
    otel = row.otel if isinstance(row, SpanRecord) else UNSET
    room = CHUNK_BYTES // (2 if otel is not UNSET and otel.events else 1) - 100_000
    total = sum(sizes.values()) + sum(len(key.encode()) for key in sizes)
    cut: list[str] = []
    for key in sorted(sizes, key=sizes.__getitem__, reverse=True):
        if total <= room or sizes[key] <= _CUT_BYTES:
            break
        value = row.attrs[key]
        text = value if isinstance(value, str) else encode_rows([value]).decode()
        row.attrs[key] = cut_text(text, _CUT_BYTES)
        total -= sizes[key] - len(row.attrs[key])
        cut.append(key)
    if total > room:  # so many small ones that cutting each does not help
        kept = 0
        for key in list(row.attrs):
            size = len(key.encode()) + min(sizes[key], _CUT_BYTES)
            if kept + size > room or len(key) > MAX_NAME_BYTES:
                del row.attrs[key]
            else:
                kept += size
        cut = [key for key in cut if key in row.attrs]
        row.attrs[ATTRIBUTES_LEFT_OUT] = len(sizes) - len(row.attrs)
    if isinstance(row, SpanRecord):
        row.attrs_truncated = [*(row.attrs_truncated or []), *cut] or UNSET
        if otel is not UNSET:
            row.otel = _fewer_events(otel, room)
    return row


def _fewer_events(otel: SpanOtel, room: int) -> SpanOtel:
    kept: list[dict[str, Any]] = []
    for event in reversed(otel.events or []):
        room -= len(encode_rows([event]))
        if room < 0:
            break
        kept.append(event)
    gone = len(otel.events or []) - len(kept)
    if not gone:
        return otel
    dropped = dict(otel.dropped or {})
    dropped["events"] = dropped.get("events", 0) + gone
    return msgspec.structs.replace(otel, events=kept[::-1] or UNSET, dropped=dropped)
