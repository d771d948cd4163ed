"""A row of the spool as the OTLP span that an exporter on the same run would have sent.

Pure functions, any thread, no I/O. What a single row does not say (its marks, the epoch it lies
in) comes from :mod:`cirron_otel.otlp.gathering`; how a span becomes bytes is the business of
:mod:`cirron_otel.otlp.protobuf` and :mod:`cirron_otel.otlp.json_form`.
"""

from __future__ import annotations

import hashlib
import os
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET, UnsetType

from cirron_otel import semconv
from cirron_otel.batch import MarkRecord, SpanOtel, SpanRecord

#: OTLP numbers kinds from 1; a row without a kind is internal.
KINDS: Mapping[str, int] = {"internal": 1, "server": 2, "client": 3, "producer": 4, "consumer": 5}
STATUS: Mapping[str, int] = {"ok": 1, "error": 2}
#: ``SpanFlags``: it is known whether the parent is of another process; and it is.
PARENT_KNOWN = 0x100
PARENT_REMOTE = 0x200

PENDING_SUFFIX = " (open)"

_COUNT = 128
_VALUE_TYPES = {float: "float", int: "int", str: "string", bool: "bool", type(None): "float"}
#: Names of marks that one span shows as attributes; as many as no span limit lets through.
_MAX_MARK_NAMES = 1024


class Event(NamedTuple):
    """A span event. ``dropped`` counts attributes that the limits left out."""

    ts_ns: int
    name: str
    attrs: dict[str, Any]
    dropped: int = 0


class Link(NamedTuple):
    """A link to another span; ids in hex."""

    trace_id: str
    span_id: str
    attrs: dict[str, Any]
    dropped: int = 0


class Scope(NamedTuple):
    """An instrumentation scope."""

    name: str
    version: str


class OtlpSpan(msgspec.Struct, gc=False):
    """A span in OTLP's terms. Ids in hex, times in ns, attributes as JSON-like data."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    attrs: dict[str, Any]
    events: list[Event]
    links: list[Link]
    status: int = 0
    status_message: str = ""
    trace_state: str = ""
    flags: int = 0
    dropped_attributes: int = 0
    dropped_events: int = 0
    dropped_links: int = 0
    #: None is the batch's own scope.
    scope: Scope | None = None


class Limits(msgspec.Struct, frozen=True):
    """OTel's span limits; None is no limit."""

    attributes: int | None = _COUNT
    attribute_length: int | None = None
    events: int | None = _COUNT
    links: int | None = _COUNT
    event_attributes: int | None = _COUNT
    link_attributes: int | None = _COUNT
    #: Characters of a text in the attributes of events and links.
    value_length: int | None = None

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ) -> Limits:
        """The limits that ``OTEL_SPAN_*`` and ``OTEL_ATTRIBUTE_*`` set.

        One value that is no number leaves all at their defaults, as it does for our own provider,
        which warns of it.
        """

        def read(name: str, default: int | None) -> int | None:
            if name not in environ:
                return default
            text = environ[name].strip()
            if not text:
                return None
            number = int(text)
            if number < 0:
                raise ValueError
            return number

        try:
            count = read("OTEL_ATTRIBUTE_COUNT_LIMIT", _COUNT)
            count = _COUNT if count is None else count
            length = read("OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", None)
            return cls(
                attributes=read("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", count),
                attribute_length=read("OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT", length),
                events=read("OTEL_SPAN_EVENT_COUNT_LIMIT", _COUNT),
                links=read("OTEL_SPAN_LINK_COUNT_LIMIT", _COUNT),
                event_attributes=read("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", count),
                link_attributes=read("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", count),
                value_length=length,
            )
        except ValueError:
            return cls()


class Marks:
    """The marks of one span: the newest as events, the last value of each name, how many."""

    __slots__ = ("count", "events", "for_metrics", "times", "values")

    def __init__(self, limit: int | None) -> None:
        self.events: deque[Event] = deque(maxlen=limit)
        self.values: dict[str, Any] = {}
        #: When each of these values was marked: one from a device comes late, not last.
        self.times: dict[str, int] = {}
        self.count = 0
        #: Marks of ours that become metrics: no span shows them.
        self.for_metrics = 0

    def add(self, mark: MarkRecord) -> None:
        """Take one more."""
        if mark.name in semconv.FOR_METRICS:
            self.for_metrics += 1
            return
        self.count += 1
        self.events.append(Event(mark.ts_ns, mark.name, mark_attributes(mark)))
        key = semconv.MARK_PREFIX + mark.name
        last = self.times.get(key)
        if len(self.times) < _MAX_MARK_NAMES if last is None else mark.ts_ns >= last:
            self.times[key] = mark.ts_ns
            value = _value(mark)
            self.values[key] = mark.value_nonfinite if value is None else value


def mark_attributes(mark: MarkRecord) -> dict[str, Any]:
    """The attributes of a mark's event: what its type already says is not said again."""
    attrs: dict[str, Any] = dict(mark.attrs)
    value = _value(mark)
    if value is not None:
        attrs[semconv.MARK_VALUE] = value
    elif mark.value_nonfinite is not UNSET:
        attrs[semconv.MARK_VALUE] = float(mark.value_nonfinite)
        attrs[semconv.MARK_NONFINITE] = mark.value_nonfinite
    if mark.kind != "point":
        attrs[semconv.MARK_KIND] = mark.kind
    if mark.value_type != _VALUE_TYPES.get(type(value)):
        attrs[semconv.MARK_VALUE_TYPE] = mark.value_type
    return attrs


def _value(mark: MarkRecord) -> Any:  # noqa: ANN401 - bool, int, float, str or None
    """The value in its own type: another writer may have left the point out of a whole float."""
    value = mark.value
    return float(value) if mark.value_type == "float" and type(value) is int else value


def make_span(  # noqa: PLR0913 - what a row does not say
    row: SpanRecord,
    limits: Limits,
    *,
    session_id: object = None,
    epoch: int | None = None,
    marks: Marks | None = None,
    flags: int = 0,
) -> OtlpSpan:
    """The OTLP span of a closed row (a row without an end has no length).

    ``session_id`` and ``epoch`` become attributes, ``marks`` are the span's own.
    """
    otel = row.otel
    attrs = {**row.attrs, **_said_by_fields(row, session_id, epoch, otel)}
    if marks is not None:
        attrs.update(marks.values)
    kept, dropped = bounded(attrs, limits.attributes, limits.attribute_length)
    span = OtlpSpan(
        trace_id=trace_id(row),
        span_id=row.id[:16],
        parent_id="" if row.parent_id is None else row.parent_id[:16],
        name=_name(row),
        kind=1,
        start_ns=row.start_ns,
        end_ns=row.start_ns if row.end_ns is UNSET else row.end_ns,
        attrs=kept,
        events=[],
        links=[],
        flags=flags,
        dropped_attributes=dropped,
    )
    if otel is not UNSET:
        _fill_from_otel(span, otel, limits)
    if marks is not None or (otel is not UNSET and otel.events is not UNSET):
        _fill_events(span, row, marks, limits)
    elif row.mark_ids:
        span.dropped_events += _mark_count(row)
    return span


def trace_id(row: SpanRecord) -> str:
    """The whole trace id, 32 hex; of rows that tell only its low half the high one is zero."""
    otel = row.otel
    high = "0" * 16 if otel is UNSET or otel.trace_id is UNSET else otel.trace_id
    return high + row.id[16:]


def _said_by_fields(
    row: SpanRecord, session_id: object, epoch: int | None, otel: SpanOtel | UnsetType
) -> dict[str, Any]:
    out: dict[str, Any] = {semconv.RANK: row.rank}
    if row.thread_id is not None:
        out[semconv.THREAD_ID] = row.thread_id
    if session_id is not None:
        out[semconv.SESSION_ID] = session_id
    if row.index is not None:
        out[semconv.INDEX] = row.index
    if row.iteration is not UNSET:
        out[semconv.ITERATION] = row.iteration
    if epoch is not None:
        out[semconv.EPOCH_INDEX] = epoch
    if row.parent_id is not None and (
        row.parent_id[16:] != row.id[16:]
        or (otel is not UNSET and otel.parent_span_id is not UNSET)
    ):
        out[semconv.PARENT_ID] = row.parent_id
    for key, value in (
        (semconv.CPU_NS, row.cpu_ns),
        (semconv.GPU_NS, row.gpu_ns),
        (semconv.MEMORY_PEAK_BYTES, row.memory_peak_bytes),
        (semconv.ERROR_TYPE, error_type(row)),
    ):
        if value is not None:
            out[key] = value  # noqa: PERF403 - out has entries already
    return out


def _name(row: SpanRecord) -> str:
    """The span's name; a request is named as OpenTelemetry's convention has it."""
    operation = row.attrs.get(semconv.GEN_AI_OPERATION) if row.name == semconv.REQUEST else None
    if not isinstance(operation, str):
        return row.name
    model = row.attrs.get(semconv.GEN_AI_REQUEST_MODEL)
    return f"{operation} {model}" if isinstance(model, str) else operation


def error_type(row: SpanRecord) -> str | None:
    """What kind of error ended the scope: as it says itself, or the class of its exception."""
    said = row.attrs.get(semconv.ERROR_TYPE)
    if isinstance(said, str):
        return said
    if semconv.ERROR not in row.attrs or row.otel is UNSET or row.otel.events is UNSET:
        return None
    for event in reversed(row.otel.events):
        if event.get("name") == semconv.EXCEPTION_EVENT:
            found = (event.get("attrs") or {}).get(semconv.EXCEPTION_TYPE)
            return found if isinstance(found, str) else None
    return None


def _fill_from_otel(span: OtlpSpan, otel: SpanOtel, limits: Limits) -> None:
    if otel.parent_span_id is not UNSET:
        span.parent_id = otel.parent_span_id
    if otel.kind is not UNSET:
        span.kind = KINDS.get(otel.kind, 1)
    if otel.status is not UNSET:
        span.status = STATUS.get(otel.status, 0)
    if otel.status_message is not UNSET:
        span.status_message = otel.status_message
    if otel.trace_state is not UNSET:
        span.trace_state = otel.trace_state
    if otel.scope is not UNSET:
        span.scope = scope_of(otel.scope)
    if otel.dropped is not UNSET:
        span.dropped_events = otel.dropped.get("events", 0)
        span.dropped_links = otel.dropped.get("links", 0)
    if otel.links is not UNSET:
        shown = newest(otel.links, limits.links)
        span.dropped_links += len(otel.links) - len(shown)
        span.links = [
            Link(
                link["trace_id"],
                link["span_id"],
                *bounded(link.get("attrs") or {}, limits.link_attributes, limits.value_length),
            )
            for link in shown
        ]


def _fill_events(span: OtlpSpan, row: SpanRecord, marks: Marks | None, limits: Limits) -> None:
    events = [] if marks is None else list(marks.events)
    otel = row.otel
    others = [] if otel is UNSET or otel.events is UNSET else otel.events
    events += [Event(event["ts_ns"], event["name"], event.get("attrs") or {}) for event in others]
    events.sort(key=_time)
    shown = newest(events, limits.events)
    if limits.event_attributes is not None or limits.value_length is not None:
        shown = [
            Event(
                event.ts_ns,
                event.name,
                *bounded(event.attrs, limits.event_attributes, limits.value_length),
            )
            for event in shown
        ]
    span.events = shown
    known = 0 if marks is None else marks.count
    hidden = 0 if marks is None else marks.for_metrics
    span.dropped_events += max(_mark_count(row) - hidden, known) + len(others) - len(shown)


def _time(event: Event) -> int:
    return event.ts_ns


def _mark_count(row: SpanRecord) -> int:
    return len(row.mark_ids) if row.mark_count is UNSET else row.mark_count


def scope_of(said: Mapping[str, Any]) -> Scope:
    """An instrumentation scope as a batch or a row names it."""
    return Scope(str(said.get("name") or ""), str(said.get("version") or ""))


def newest(things: list[Any], limit: int | None) -> list[Any]:
    """The last ``limit`` of them."""
    return things if limit is None or len(things) <= limit else things[len(things) - limit :]


def bounded(
    attrs: dict[str, Any], count: int | None, length: int | None
) -> tuple[dict[str, Any], int]:
    """Attributes within the limits, the newest kept, and how many were left out."""
    total = len(attrs)
    if "" in attrs:
        attrs = {key: value for key, value in attrs.items() if key}
    if count is not None and len(attrs) > count:
        attrs = dict(newest(list(attrs.items()), count)) if count else {}
    if length is not None:
        attrs = {key: _cut(value, length) for key, value in attrs.items()}
    return attrs, total - len(attrs)


def _cut(value: Any, length: int) -> Any:  # noqa: ANN401 - JSON-like data
    if isinstance(value, str):
        return value[:length]
    if isinstance(value, list):
        return [_cut(item, length) for item in value]
    if isinstance(value, dict):
        return {key: _cut(item, length) for key, item in value.items()}
    return value


def make_pending(
    row: SpanRecord, limits: Limits, session_id: object, epoch: int | None
) -> OtlpSpan:
    """The announcement of a scope that is still open: a child of the span that will come.

    It has an id of its own, because backends keep the first span of an id, and no length.
    """
    span = make_span(row, limits, session_id=session_id, epoch=epoch)
    span.parent_id = span.span_id
    span.span_id = pending_id(row.id)
    span.name += PENDING_SUFFIX
    span.end_ns = span.start_ns
    span.attrs = {**span.attrs, semconv.PENDING: True}
    span.events, span.links = [], []
    span.dropped_events = span.dropped_links = 0
    return span


def pending_id(spool_id: str) -> str:
    """The span id of a scope's announcement: 16 hex."""
    return hashlib.sha256(f"{spool_id}pending".encode()).hexdigest()[:16]
