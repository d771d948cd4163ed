"""Ids from our own entropy, and how a spool id is made of the ids of OpenTelemetry.

``random.seed()`` in the user's program never changes an id, and we never consume the user's
random streams. Ids are made as hex text, 64 at a time, because text is what the spool wants; the
integer an OTel :class:`SpanContext` wants is made only when somebody asks for one.

A **spool id** is 32 hex: the span id (16) followed by the low half of the trace id (16), so its
first half *is* the OTel span id.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_hex_ids: Callable[[bytes, int], list[str]] | None
try:
    from cirron_otel._fast import hex_ids
except ImportError:  # not built here
    _hex_ids = None
else:
    _hex_ids = hex_ids

_ZERO = "0" * 16


def new_trace_id() -> str:
    """A trace id: 32 lowercase hex, never all zero in either half."""
    while True:
        text = os.urandom(16).hex()
        if text[:16] != _ZERO and text[16:] != _ZERO:
            return text


def new_row_id() -> str:
    """The id of something that is not a span (a batch, a snapshot): 32 lowercase hex."""
    return os.urandom(16).hex()


def span_ids(count: int = 64) -> list[str]:
    """``count`` span ids, 16 lowercase hex each, none of them zero."""
    if _hex_ids is not None:
        return _hex_ids(os.urandom(8 * count), 8) or span_ids()
    # Grouped and split by bytes and str themselves: a loop of ours takes six times as long.
    text = os.urandom(8 * count).hex(" ", 8)
    found = text.split()
    return found if _ZERO not in text else [one for one in found if one != _ZERO] or span_ids()


def mark_ids(count: int = 64) -> list[str]:
    """``count`` mark ids, 32 lowercase hex each."""
    if _hex_ids is not None:
        return _hex_ids(os.urandom(16 * count), 16) or mark_ids()
    return os.urandom(16 * count).hex(" ", 16).split()


def spool_id(span_id: int, trace_id: int) -> str:
    """The spool id of an OTel span."""
    return f"{span_id:016x}{trace_id & 0xFFFFFFFFFFFFFFFF:016x}"
