"""Batches as the export reads them: fast, in slices where somebody waits, or only as far as needed.

Any thread, no I/O.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType

from cirron_otel import semconv
from cirron_otel.batch import SCHEMA_VERSION, Batch, MarkRecord, SpanRecord, decode
from cirron_otel.errors import SpoolFormatError

#: Rows that are read at a time where somebody waits for the interpreter.
SLICE_ROWS = 256
_YIELD_S = 0.0001

_decoder = msgspec.json.Decoder(Batch)


class LaterAttrs(
    msgspec.Struct,
    frozen=True,
    gc=False,
    rename={"request_id": semconv.REQUEST_ID, "operation": semconv.GEN_AI_OPERATION},
):
    """What of a span's attributes says that it is a request."""

    request_id: Any = None
    operation: Any = None


_NO_ATTRS = LaterAttrs()


class LaterRow(msgspec.Struct, gc=False):
    """A span of a later batch, as far as a reader of an earlier one wants it."""

    id: str
    name: str
    parent_id: str | None = None
    index: int | None = None
    attrs: LaterAttrs = _NO_ATTRS


def is_request(row: SpanRecord | LaterRow) -> bool:
    """Whether a row is a request's, whatever the service calls its requests."""
    attrs = row.attrs
    if isinstance(attrs, LaterAttrs):
        said = attrs.request_id is not None and attrs.operation is not None
    else:
        said = semconv.REQUEST_ID in attrs and semconv.GEN_AI_OPERATION in attrs
    return said or row.name == semconv.REQUEST


class Later(msgspec.Struct, gc=False):
    """A later batch as far as a reader of an earlier one wants it."""

    writer: str = ""
    spans: list[LaterRow] = []
    open: list[LaterRow] = []
    marks: list[MarkRecord] = []


_later_decoder = msgspec.json.Decoder(Later)


def read_later(data: bytes) -> Later:
    """A batch for looking ahead. Raises :class:`~cirron_otel.errors.SpoolFormatError`."""
    try:
        return _later_decoder.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise SpoolFormatError(str(error)) from error


class _Raw(msgspec.Struct, gc=False):
    """A batch whose many rows are still text."""

    spans: list[msgspec.Raw] = []
    marks: list[msgspec.Raw] = []


class _Rest(msgspec.Struct, gc=False):
    """A batch without its many rows."""

    schema_version: int
    sdk_version: str
    batch_id: str
    created_ns: int
    resource: dict[str, Any] | UnsetType = UNSET
    scope: dict[str, Any] | UnsetType = UNSET
    writer: str | UnsetType = UNSET
    open: list[SpanRecord] | UnsetType = UNSET
    windows: list[SpanRecord] | UnsetType = UNSET
    logs: list[dict[str, Any]] | UnsetType = UNSET


_raw_decoder = msgspec.json.Decoder(_Raw)
_rest_decoder = msgspec.json.Decoder(_Rest)
_span_decoder = msgspec.json.Decoder(SpanRecord)
_mark_decoder = msgspec.json.Decoder(MarkRecord)


def breathing() -> Callable[[], object] | None:
    """What gives the interpreter away for a moment; None where no training waits for it.

    In a process that records, whoever works through a batch calls it between slices.
    """
    return _breathe if "cirron_otel.recorder" in sys.modules else None


def _breathe() -> None:
    time.sleep(_YIELD_S)


def read_batch(data: bytes, breathe: Callable[[], object] | None = None) -> Batch:
    """A batch for export: faster than :func:`cirron_otel.batch.decode`, without unknown keys.

    With ``breathe`` it takes the interpreter for a millisecond or a few at a time and calls that in
    between, for a thread beside a training loop. Raises
    :class:`~cirron_otel.errors.SpoolFormatError`.
    """
    try:
        batch = _decoder.decode(data) if breathe is None else _read_gently(data, breathe)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return decode(data)  # reads what other writers make of it, or says what is wrong
    return batch if batch.schema_version == SCHEMA_VERSION else decode(data)


def _read_gently(data: bytes, breathe: Callable[[], object]) -> Batch:
    raw = _raw_decoder.decode(data)
    breathe()
    rest = _rest_decoder.decode(data)
    breathe()
    batch = Batch(rest.schema_version, rest.sdk_version, rest.batch_id, rest.created_ns)
    batch.resource, batch.scope, batch.writer = rest.resource, rest.scope, rest.writer
    batch.open, batch.windows, batch.logs = rest.open, rest.windows, rest.logs
    for i in range(0, len(raw.spans), SLICE_ROWS):
        batch.spans += map(_span_decoder.decode, raw.spans[i : i + SLICE_ROWS])
        breathe()
    for i in range(0, len(raw.marks), SLICE_ROWS):
        batch.marks += map(_mark_decoder.decode, raw.marks[i : i + SLICE_ROWS])
        breathe()
    return batch
