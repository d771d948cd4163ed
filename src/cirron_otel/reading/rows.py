"""The spool's rows as the tree readers need them: few fields, decoded fast, nothing kept twice.

:mod:`cirron_otel.batch` reads a batch whole and keeps even the keys it does not know. A tree needs
less: a spool at its cap holds millions of rows, so here a field that nobody looks at is never
built. Listing sessions does not even decode rows: it counts them.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cirron_otel import semconv
from cirron_otel.batch import SCHEMA_VERSION
from cirron_otel.errors import SpoolError, SpoolFormatError


class OtelRow(msgspec.Struct, gc=False):
    """What a reader of trees wants of a span's ``otel`` object."""

    status: str | None = None
    status_message: str | None = None
    events: list[dict[str, Any]] | None = None
    window: bool = False


class SpanRow(msgspec.Struct, gc=False):
    """A span as far as it is shown. Times in ns; ``end_ns`` is None while the scope is open."""

    id: str
    name: str
    start_ns: int
    parent_id: str | None = None
    index: int | None = None
    end_ns: int | None = None
    cpu_ns: int | None = None
    gpu_ns: int | None = None
    memory_peak_bytes: int | None = None
    pid: int | None = None
    rank: int = 0
    attrs: dict[str, Any] = {}
    otel: OtelRow | None = None


class MarkRow(msgspec.Struct, gc=False):
    """A mark as far as it is shown."""

    span_id: str
    name: str
    ts_ns: int = 0
    value: float | int | str | bool | None = None
    kind: str = "point"
    value_nonfinite: str | UnsetType = UNSET


class SnapshotRow(msgspec.Struct, gc=False):
    """The owner of a snapshot; trees only count them."""

    span_id: str


class Rows(msgspec.Struct, gc=False):
    """One batch with its rows, for building trees."""

    schema_version: int
    batch_id: str = ""
    spans: list[SpanRow] = []
    marks: list[MarkRow] = []
    snapshots: list[SnapshotRow] = []


class Counted(msgspec.Struct, gc=False):
    """Any row at all: its fields are skipped, only the number of rows is wanted."""


class SpanLink(msgspec.Struct, gc=False):
    """A span's place in the tree, for batches that do not say whose they are."""

    id: str
    parent_id: str | None = None
    start_ns: int = 0
    pid: int | None = None


class OwnerLink(msgspec.Struct, gc=False):
    """The owner of a mark or snapshot."""

    span_id: str


class Links(msgspec.Struct, gc=False):
    """One batch as bare links."""

    spans: list[SpanLink] = []
    marks: list[OwnerLink] = []
    snapshots: list[OwnerLink] = []


class ResourceKeys(msgspec.Struct, gc=False):
    """The attributes of the OTel resource that say whose rows these are."""

    session_id: Any = msgspec.field(default=None, name=semconv.SESSION_ID)
    run_id: Any = msgspec.field(default=None, name=semconv.RUN_ID)
    attempt: Any = msgspec.field(default=None, name=semconv.RUN_ATTEMPT)
    rank: Any = msgspec.field(default=None, name=semconv.DL_RANK)
    service: Any = msgspec.field(default=None, name=semconv.SERVICE_NAME)


class Head(msgspec.Struct, gc=False):
    """One batch without its rows."""

    schema_version: int
    created_ns: int
    batch_id: str = ""
    sdk_version: str = ""
    spans: list[Counted] = []
    marks: list[Counted] = []
    snapshots: list[Counted] = []
    resource: ResourceKeys | None = None
    writer: str = ""
    open: list[SpanRow] | None = None


class Source(NamedTuple):
    """Where a row came from: the session its batch names ("" for none), and the writer."""

    session_id: str
    writer: str


_T = TypeVar("_T", Rows, Links, Head)
_SESSION_BYTES = f'"{semconv.SESSION}"'.encode()
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (Rows, Links, Head)
}


def read(path: Path) -> bytes | None:
    """The bytes of a batch file; None when it has vanished (evicted or cleared meanwhile)."""
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise SpoolError(f"cannot read {path}: {exc.strerror}") from exc


def decode(data: bytes, kind: type[_T]) -> _T:
    """Decode as much of a batch as ``kind`` asks for.

    Raises :class:`~cirron_otel.errors.SpoolFormatError` for anything that is not a batch.
    """
    try:
        rows: _T = _DECODERS[kind].decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SpoolFormatError(str(exc)) from exc
    version = getattr(rows, "schema_version", SCHEMA_VERSION)
    if version != SCHEMA_VERSION:
        raise SpoolFormatError(f"schema_version is {version}, this reader knows {SCHEMA_VERSION}")
    return rows


def is_session(row: SpanRow) -> bool:
    """Whether a span is the root of a session."""
    return row.parent_id is None and row.name == semconv.SESSION


def is_window(row: SpanRow) -> bool:
    """Whether a span is the root of a window trace, which no canonical tree shows."""
    return row.otel is not None and row.otel.window


def session_rows(data: bytes) -> Sequence[SpanRow]:
    """The closed session roots in a batch; batches that have none are not decoded."""
    if _SESSION_BYTES not in data:
        return ()
    return [row for row in decode(data, Rows).spans if is_session(row)]
