"""What spool v1 *is*: the rows, the envelope, and how both are read and written.

A batch file is one JSON object. Readers must tolerate keys they do not know; so do we, and a
batch that is read and written again keeps them (:attr:`SpanRecord.unknown` and its siblings).

The row types are ``gc=False`` structs: the garbage collector never looks at queued rows, however
many there are. They must therefore never take part in a reference cycle; they hold only strings,
numbers and JSON-like containers made for them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from cirron_otel.errors import SpoolFormatError

SCHEMA_VERSION = 1

#: The longest list of mark ids a span row carries; ``mark_count`` has the true number.
MAX_MARK_IDS = 1024

#: Seed sentinel: the owner of a mark that was made while no session existed.
ROOT_SPAN_ID = "root"

_UNKNOWN = "(unknown)"
_HEX_32 = "^[0-9a-f]{32}$"


class SpanOtel(msgspec.Struct, gc=False, omit_defaults=True):
    """What OpenTelemetry knows of a span beyond the seed's fields (optional key ``otel``).

    ``trace_id`` is the *high* half (16 hex) of the trace id; the low half is the second half of
    the row's ``id``. ``parent_span_id`` stands only where the OTel parent is not the span that
    ``parent_id`` names. ``status`` is ``"ok"`` or ``"error"``; absent means unset.
    """

    trace_id: str | UnsetType = UNSET
    parent_span_id: str | UnsetType = UNSET
    kind: str | UnsetType = UNSET
    status: str | UnsetType = UNSET
    status_message: str | UnsetType = UNSET
    trace_state: str | UnsetType = UNSET
    sampled: bool | UnsetType = UNSET
    links: list[dict[str, Any]] | UnsetType = UNSET
    events: list[dict[str, Any]] | UnsetType = UNSET
    dropped: dict[str, int] | UnsetType = UNSET
    scope: dict[str, Any] | UnsetType = UNSET
    window: bool | UnsetType = UNSET
    unknown: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name=_UNKNOWN)


class SpanRecord(msgspec.Struct, gc=False):
    """One row of ``spans[]`` (and of ``open[]``, where ``end_ns`` is absent). Times are ns."""

    id: str
    name: str
    parent_id: str | None
    index: int | None
    start_ns: int
    end_ns: int | UnsetType = UNSET
    cpu_ns: int | None = None
    gpu_ns: int | None = None
    memory_peak_bytes: int | None = None
    thread_id: int | None = None
    pid: int | None = None
    rank: int = 0
    attrs: dict[str, Any] = msgspec.field(default_factory=dict)
    mark_ids: tuple[str, ...] = ()
    mark_count: int | UnsetType = UNSET
    iteration: int | UnsetType = UNSET
    attrs_truncated: list[str] | UnsetType = UNSET
    otel: SpanOtel | UnsetType = UNSET
    unknown: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name=_UNKNOWN)


class MarkRecord(msgspec.Struct, gc=False):
    """One row of ``marks[]``. ``value`` is null for a non-finite float; see ``value_nonfinite``."""

    id: str
    span_id: str
    name: str
    value_type: str
    value: float | int | str | bool | None
    attrs: dict[str, Any]
    ts_ns: int
    kind: str
    iteration: int | UnsetType = UNSET
    value_nonfinite: str | UnsetType = UNSET
    unknown: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name=_UNKNOWN)


class SnapshotRecord(msgspec.Struct, gc=False):
    """One row of ``snapshots[]``: the statistics of one tensor, and where its values lie."""

    id: str
    span_id: str
    tensor_name: str
    shape: list[int]
    dtype: str
    mode: str
    stats: dict[str, Any] | None
    blob_uri: str | None
    ts_ns: int
    attrs: dict[str, Any]
    unknown: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name=_UNKNOWN)


class LogRecord(msgspec.Struct, gc=False, omit_defaults=True):
    """One row of ``logs[]``, as we write it: OpenTelemetry's log data model. Readers get dicts.

    ``severity_number`` and ``severity_text`` are OTel's (9 and ``INFO``, 13 and ``WARN``, ...).
    ``trace_id`` (32 hex) and ``span_id`` (16 hex) are OTel's ids of the span it was made in, both
    absent where there was none; that span's row has the id ``span_id + trace_id[16:]``.
    """

    ts_ns: int
    severity_number: int
    severity_text: str
    event_name: str
    body: str
    attrs: dict[str, Any]
    trace_id: str | UnsetType = UNSET
    span_id: str | UnsetType = UNSET
    trace_flags: int | UnsetType = UNSET


class Batch(msgspec.Struct, gc=False, omit_defaults=True):
    """One file of the spool.

    Optional keys that the seed does not have: ``resource`` and ``scope`` (OTel's, once for all
    rows), ``writer`` (the process that wrote it, the name of its lock), ``open`` (the scopes open
    when the batch was sealed, written whenever that set changed), ``windows`` (the root spans of
    window traces, which are not part of the canonical tree) and ``logs``.
    """

    schema_version: int
    sdk_version: str
    batch_id: str
    created_ns: int
    spans: list[SpanRecord] = msgspec.field(default_factory=list)
    marks: list[MarkRecord] = msgspec.field(default_factory=list)
    snapshots: list[SnapshotRecord] = msgspec.field(default_factory=list)
    resource: dict[str, Any] | UnsetType = UNSET
    scope: dict[str, Any] | UnsetType = UNSET
    writer: str | UnsetType = UNSET
    open: list[SpanRecord] | UnsetType = UNSET
    windows: list[SpanRecord] | UnsetType = UNSET
    logs: list[dict[str, Any]] | UnsetType = UNSET
    unknown: dict[str, Any] | UnsetType = msgspec.field(default=UNSET, name=_UNKNOWN)


_R = TypeVar("_R", SpanOtel, SpanRecord, MarkRecord, SnapshotRecord)

_KNOWN: dict[type, frozenset[str]] = {
    cls: frozenset(cls.__struct_encode_fields__) - {_UNKNOWN}
    for cls in (SpanOtel, SpanRecord, MarkRecord, SnapshotRecord, Batch)
}
_LISTS: tuple[tuple[str, type], ...] = (
    ("spans", SpanRecord),
    ("marks", MarkRecord),
    ("snapshots", SnapshotRecord),
    ("open", SpanRecord),
    ("windows", SpanRecord),
)


class Late:
    """A part of a row that is made when the row is encoded, on the flush thread as a rule."""

    __slots__ = ()

    def make(self) -> object:
        """The part, as JSON knows it."""
        raise NotImplementedError


def _encode_hook(value: object) -> object:
    """Anything JSON has no word for becomes its text: a row is never lost for an odd attribute."""
    return value.make() if isinstance(value, Late) else str(value)


_encoder = msgspec.json.Encoder(enc_hook=_encode_hook)

#: One value as JSON, the way rows are encoded.
encode_value = _encoder.encode


def encode_rows(rows: Iterable[object]) -> bytes:
    """Rows made by us, as the inside of a JSON array: no brackets, ``b""`` for none.

    Raises whatever msgspec raises for text that is not Unicode (lone surrogates); callers then
    encode row by row through :func:`cirron_otel.values.clean_text`.
    """
    return _encoder.encode(rows)[1:-1]


def encode(batch: Batch) -> bytes:
    """The bytes of a batch file. Unknown keys that were read come out again."""
    document = _object(batch)
    document["spans"] = [_object(row) for row in batch.spans]
    document["marks"] = [_object(row) for row in batch.marks]
    document["snapshots"] = [_object(row) for row in batch.snapshots]
    if batch.open is not UNSET:
        document["open"] = [_object(row) for row in batch.open]
    if batch.windows is not UNSET:
        document["windows"] = [_object(row) for row in batch.windows]
    ordered = {name: document[name] for name in batch.__struct_encode_fields__ if name in document}
    return _encoder.encode({**ordered, **document})


def _object(record: msgspec.Struct) -> dict[str, Any]:
    """A record as a dict in field order, absent fields left out, unknown keys put back."""
    unknown: dict[str, Any] = {}
    out: dict[str, Any] = {}
    for field, name in zip(record.__struct_fields__, record.__struct_encode_fields__, strict=True):
        value = getattr(record, field)
        if name == _UNKNOWN:
            unknown = {} if value is UNSET else value
        elif isinstance(value, SpanOtel):
            out[name] = _object(value)
        elif value is not UNSET:
            out[name] = value
    return {**out, **unknown}


def decode(data: bytes) -> Batch:
    """Read a batch file.

    Raises :class:`~cirron_otel.errors.SpoolFormatError` when the bytes are not a batch; the
    message says where. Unknown keys are kept, never refused.
    """
    try:
        raw = msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
        raise SpoolFormatError(f"not JSON: {exc}") from exc
    if not isinstance(raw, dict):
        raise SpoolFormatError(f"a batch is a JSON object, not {type(raw).__name__}")
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise SpoolFormatError(f"schema_version is {version!r}, this reader knows {SCHEMA_VERSION}")
    for name, kind in _LISTS:
        if name in raw:
            rows = raw[name]
            if not isinstance(rows, list):
                raise SpoolFormatError(f"{name} must be an array")
            raw[name] = [_record(row, kind, f"{name}[{i}]") for i, row in enumerate(rows)]
    _set_apart(raw, Batch)
    try:
        return msgspec.convert(raw, Batch)
    except msgspec.ValidationError as exc:
        raise SpoolFormatError(str(exc)) from exc


def _record(raw: object, kind: type[_R], where: str) -> _R:
    if not isinstance(raw, dict):
        raise SpoolFormatError(f"{where} must be an object")
    if kind is SpanRecord:
        if raw.get("end_ns") is None:
            raw.pop("end_ns", None)
        if isinstance(raw.get("otel"), dict):
            raw["otel"] = _record(raw["otel"], SpanOtel, f"{where}.otel")
    _set_apart(raw, kind)
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as exc:
        raise SpoolFormatError(f"{where}: {exc}") from exc


def _set_apart(raw: dict[str, Any], kind: type) -> None:
    unknown = {key: raw.pop(key) for key in list(raw) if key not in _KNOWN[kind]}
    if unknown:
        raw[_UNKNOWN] = unknown


def json_schema() -> Mapping[str, Any]:
    """JSON Schema (2020-12) of the batch files we write, made from the types above.

    Stricter than :func:`decode` where readers must be patient and writers have no excuse: every
    field of the seed is there, closed spans have an end, enumerations hold nothing else.
    """
    _, components = msgspec.json.schema_components(
        [Batch, LogRecord], ref_template="#/$defs/{name}"
    )
    for kind in (SpanOtel, SpanRecord, MarkRecord, SnapshotRecord, LogRecord, Batch):
        definition = components[kind.__name__]
        properties = definition["properties"]
        properties.pop(_UNKNOWN, None)
        for field in properties.values():
            field.pop("default", None)
        definition["required"] = [
            field.encode_name
            for field in msgspec.structs.fields(kind)
            if field.default is not UNSET
        ]
    batch, mark = components["Batch"]["properties"], components["MarkRecord"]["properties"]
    batch["schema_version"] = {"const": SCHEMA_VERSION}
    batch["batch_id"]["pattern"] = _HEX_32
    batch["spans"]["items"]["required"] = ["end_ns"]
    batch["logs"]["items"] = {"$ref": "#/$defs/LogRecord"}
    log = components["LogRecord"]["properties"]
    log["severity_number"].update(minimum=1, maximum=24)
    log["trace_id"]["pattern"] = _HEX_32
    log["span_id"]["pattern"] = "^[0-9a-f]{16}$"
    components["SpanRecord"]["properties"]["id"]["pattern"] = _HEX_32
    mark["id"]["pattern"] = _HEX_32
    mark["span_id"]["pattern"] = f"{_HEX_32}|^{ROOT_SPAN_ID}$"
    mark["value_type"]["enum"] = ["float", "int", "string", "bool"]
    mark["value_nonfinite"]["enum"] = ["nan", "inf", "-inf"]
    mark["kind"]["enum"] = ["point", "summary"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Cirron spool v1 batch",
        "$ref": "#/$defs/Batch",
        "$defs": components,
    }
