"""Metrics of a training run, added up from the batches of its spool.

One :class:`Totals` belongs to one process that recorded (a *writer*) and one destination. Every
batch is taken in once, known by its id, and every request says the sums since the writer's start.
So a request that is sent twice says nothing twice, and totals that were saved with the ids of the
batches in them go on exactly where they were, wherever the forwarder was killed.

Not thread-safe, no I/O.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch, MarkRecord, SpanRecord
from cirron_otel.otlp.batches import is_request
from cirron_otel.otlp.histograms import Exponential, Histogram, buckets_of
from cirron_otel.otlp.instruments import (
    INSTRUMENTS,
    KNOWN_MARKS,
    MAX_SERIES,
    PART,
    PHASES,
    REQUEST_MARKS,
    RUN_MARKS,
    Exemplar,
    Metric,
    Point,
)
from cirron_otel.otlp.request_metrics import measured

VERSION = 1
#: Ids of batches that are remembered after the receiver had them: a crash may lose that answer.
_MAX_DONE = 64
#: Batches taken in that the receiver has not taken; more than a destination ever puts off.
_MAX_PENDING = 10_000
_SLICE_ROWS = 128
_MAX_DEPTH = 64
_MOST = 2**1023
_INT64 = 2**63
_OVERFLOW = "\x1e"
_MEASURED = PHASES | {semconv.STEP, semconv.REQUEST}
_BOUNDS_NS = {
    name: tuple(round(bound * 1e9) for bound in one.boundaries)
    for name, one in INSTRUMENTS.items()
    if one.kind == "histogram"
}


class Gauge(msgspec.Struct, array_like=True, gc=False):
    """The newest value of a series, and whether a receiver lacks it."""

    value: float
    ts_ns: int
    span_id: str = ""
    trace_id: str = ""
    changed: bool = True


class Saved(msgspec.Struct):
    """What lasts of the totals; by the instrument's name, then by the series' key."""

    version: int
    writer: str
    start_ns: int
    time_ns: int
    #: ``created_ns`` of the last batch with which a request went out.
    sent_ns: int = 0
    gauges: dict[str, dict[str, Gauge]] = {}
    sums: dict[str, dict[str, float]] = {}
    histograms: dict[str, dict[str, Histogram]] = {}
    #: In place of these, where exponential buckets were asked for.
    exponentials: dict[str, dict[str, Exponential]] = {}
    #: Batches that are in here: those the receiver does not have yet, and the last that it has.
    pending: list[str] = []
    done: list[str] = []


class Totals:
    """What a writer's batches add up to; lengths in given buckets, or ``exponential`` ones."""

    def __init__(self, saved: Saved, *, exemplars: bool = True, exponential: bool = False) -> None:
        self.saved = saved
        self._exponential = exponential
        self._exemplars = exemplars
        self._known = {*saved.pending, *saved.done}
        self._open: dict[str, SpanRecord] = {}
        #: Exemplars since the last points: by instrument and series, one a bucket.
        self._shown: dict[tuple[str, str], dict[int, tuple[SpanRecord, int]]] = {}

    @classmethod
    def begin(
        cls, batch: Batch, writer: str = "", *, exemplars: bool = True, exponential: bool = False
    ) -> Totals:
        """Empty totals of a writer whose first batch this is."""
        rows = [*batch.spans, *(() if batch.open is UNSET else batch.open)]
        times = [batch.created_ns, *(row.start_ns for row in rows)]
        start_ns = max(1, min(times))
        saved = Saved(VERSION, writer, start_ns, start_ns)
        return cls(saved, exemplars=exemplars, exponential=exponential)

    # --- taking in -----------------------------------------------------------------------------

    def add(self, batch: Batch, breathe: Callable[[], object] | None = None) -> bool:
        """Take in a batch; False where it is in already. ``breathe`` is called now and then."""
        places = {**self._open, **{row.id: row for row in batch.spans}}
        if batch.open is not UNSET:
            self._open = {row.id: row for row in batch.open}
            places = {**self._open, **places}
        if batch.batch_id in self._known:
            return False
        self._known.add(batch.batch_id)
        self.saved.pending.append(batch.batch_id)
        if len(self.saved.pending) > _MAX_PENDING:
            self._known.discard(self.saved.pending.pop(0))
        self.saved.time_ns = max(self.saved.time_ns, batch.created_ns)
        for row in batch.spans:
            if row.name == semconv.SESSION and semconv.RUN_OUTCOME in row.attrs:
                self._count(semconv.RUN_OUTCOME, str(row.attrs[semconv.RUN_OUTCOME]), 1)
        evaluating: dict[str | None, bool] = {None: False}
        for at in range(0, len(batch.spans), _SLICE_ROWS):
            self._add_spans(batch.spans[at : at + _SLICE_ROWS])
            if breathe is not None:
                breathe()
        for at in range(0, len(batch.marks), _SLICE_ROWS):
            self._add_marks(batch.marks[at : at + _SLICE_ROWS], places, evaluating)
            if breathe is not None:
                breathe()
        return True

    def accepted(self, batch_id: str) -> None:
        """The receiver has everything of this batch."""
        saved = self.saved
        if batch_id in saved.pending:
            saved.pending.remove(batch_id)
        if batch_id not in saved.done:
            saved.done.append(batch_id)
        if len(saved.done) > _MAX_DONE:
            self._known.discard(saved.done.pop(0))

    def _add_spans(self, rows: Sequence[SpanRecord]) -> None:
        groups: dict[tuple[str, str], list[SpanRecord]] = {}
        requests: list[SpanRecord] = []
        for row in filter(_says_its_length, rows):
            if is_request(row):
                requests.append(row)
            elif row.name in _MEASURED:
                mode = "eval" if row.attrs.get(semconv.MODE) == "eval" else ""
                groups.setdefault((row.name, mode), []).append(row)
        for (scope, mode), members in groups.items():
            if scope == semconv.STEP:
                last = max(members, key=_end)
                self._set(semconv.LAST_STEP_TIME, "", _end(last) / 1e9, _end(last), last)
                # A step in which something was compiled says nothing of the others.
                if warm := [row for row in members if semconv.WARMUP not in row.attrs]:
                    self._add_lengths(semconv.STEP_DURATION, "", warm)
            else:
                self._add_lengths(semconv.PHASE_DURATION, series_key(mode, scope), members)
        for (name, key), found in measured(requests).items():
            self._add_lengths(name, key, found.rows, found.lengths)

    def _add_lengths(
        self,
        name: str,
        key: str,
        rows: Sequence[SpanRecord],
        lengths: Sequence[int] | None = None,
    ) -> None:
        """Take in lengths in ns, those of the rows themselves where none are given."""
        if lengths is None:
            lengths = [max(0, _end(row) - row.start_ns) for row in rows]
        bounds = _BOUNDS_NS[name]
        saved = self.saved
        series: dict[str, Any] = (
            saved.exponentials if self._exponential else saved.histograms
        ).setdefault(name, {})
        if key not in series and len(series) >= MAX_SERIES:
            key = _OVERFLOW
        buckets = buckets_of(bounds, lengths)
        if self._exponential:
            series.setdefault(key, Exponential(0, 0, lengths[0], lengths[0])).add(lengths)
        else:
            empty = Histogram(0, 0, lengths[0], lengths[0], [0] * (len(bounds) + 1))
            series.setdefault(key, empty).add(lengths, buckets)
        if self._exemplars:  # one a bucket, and few of those that are given
            shown = self._shown.setdefault((name, key), {})
            shown.update(zip(buckets, zip(rows, lengths, strict=True), strict=True))

    def _add_marks(
        self,
        marks: Sequence[MarkRecord],
        places: Mapping[str, SpanRecord],
        evaluating: dict[str | None, bool],
    ) -> None:
        newest: dict[tuple[str, str], MarkRecord] = {}
        for mark in marks:
            if mark.value_nonfinite is not UNSET:
                self._count(semconv.NONFINITE_METRIC, mark.name, 1)
                continue
            value: Any = mark.value
            if not _is_number(value) or mark.name == semconv.OVERHEAD:
                continue
            if mark.kind == "summary" and mark.name in REQUEST_MARKS:
                continue
            series = _series_of(mark, places, evaluating)
            if INSTRUMENTS[series[0]].kind == "sum":
                if value >= 0:
                    self._count(*series, value)
                continue
            before = newest.get(series)
            if before is None or mark.ts_ns >= before.ts_ns:
                newest[series] = mark
        for series, mark in newest.items():
            value = mark.value
            self._set(*series, float(value), mark.ts_ns, places.get(mark.span_id))

    def _set(self, name: str, key: str, value: float, ts_ns: int, row: SpanRecord | None) -> None:
        series = self.saved.gauges.setdefault(name, {})
        known = series.get(key)
        if known is None and len(series) >= MAX_SERIES:
            key = _OVERFLOW
            known = series.get(key)
        if known is None:
            known = series[key] = Gauge(value, 0)
        if ts_ns < known.ts_ns:
            return  # one from a device comes late, not last
        known.value, known.ts_ns, known.changed = value, ts_ns, True
        if row is None or not self._exemplars or not _sampled(row):
            known.span_id = known.trace_id = ""
        else:
            known.span_id, known.trace_id = row.id[:16], _trace_id(row)

    def _count(self, name: str, key: str, value: float) -> None:
        series = self.saved.sums.setdefault(name, {})
        if key not in series and len(series) >= MAX_SERIES:
            key = _OVERFLOW
        total = series.get(key, 0) + value
        series[key] = total if -_INT64 <= total < _INT64 else float(total)

    # --- giving out ----------------------------------------------------------------------------

    def metrics(self) -> list[Metric]:
        """All sums and histograms, and the gauges that have changed since :meth:`sent`."""
        start_ns, time_ns = self.saved.start_ns, self.saved.time_ns
        out: list[Metric] = []
        for name, gauges in self.saved.gauges.items():
            points = [
                Point(
                    series_attributes(name, key), 0, one.ts_ns, one.value,
                    (Exemplar(one.ts_ns, one.value, one.trace_id, one.span_id),)
                    if _is_hex(one.trace_id, 16) and _is_hex(one.span_id, 8) else (),
                )
                for key, one in gauges.items() if one.changed
            ]  # fmt: skip
            if points:
                out.append(Metric(INSTRUMENTS[name], points))
        for name, sums in self.saved.sums.items():
            counted = [
                Point(series_attributes(name, key), start_ns, time_ns, value)
                for key, value in sums.items()
            ]
            out.append(Metric(INSTRUMENTS[name], counted))
        kinds: tuple[Mapping[str, Mapping[str, Histogram | Exponential]], ...] = (
            self.saved.histograms, self.saved.exponentials,
        )  # fmt: skip
        for name, histograms in (item for kind in kinds for item in kind.items()):
            lengths = [
                Point(
                    series_attributes(name, key), start_ns, time_ns, one.sum_ns / 1e9,
                    tuple(self._exemplars_of(name, key)),
                    one.count, one.least_ns / 1e9, one.most_ns / 1e9, *one.shape(),
                )
                for key, one in histograms.items()
            ]  # fmt: skip
            out.append(Metric(INSTRUMENTS[name], lengths))
        return out

    def _exemplars_of(self, name: str, key: str) -> Iterator[Exemplar]:
        for row, length in self._shown.get((name, key), {}).values():
            trace = _trace_id(row)
            if _sampled(row) and _is_hex(trace, 16) and _is_hex(row.id[:16], 8):
                yield Exemplar(_end(row), length / 1e9, trace, row.id[:16])

    def sent(self, created_ns: int) -> None:
        """The receiver has what :meth:`metrics` last said."""
        self.saved.sent_ns = max(self.saved.sent_ns, created_ns)
        self._shown.clear()
        for gauges in self.saved.gauges.values():
            for one in gauges.values():
                one.changed = False


def series_attributes(name: str, key: str) -> dict[str, Any]:
    """The attributes of a series; those without a value are left out."""
    if key == _OVERFLOW:
        return {semconv.OVERFLOW: True}
    names = INSTRUMENTS[name].keys
    values = key.split(PART, len(names) - 1) if names else ()
    return {one: value for one, value in zip(names, values, strict=True) if value}


def series_key(*values: str) -> str:
    """The key of the series with these values of its instrument's attributes."""
    return PART.join(values)


def _says_its_length(row: SpanRecord) -> bool:
    """Whether a row is a scope of ours that has ended.

    Another instrumentation's span may bear the same name. And a row that a reader closed says when
    its process was last seen, not how long it took.
    """
    otel = row.otel
    return (
        row.end_ns is not UNSET
        and (otel is UNSET or otel.scope is UNSET)
        and semconv.RECOVERED not in row.attrs
    )


def _series_of(
    mark: MarkRecord, places: Mapping[str, SpanRecord], evaluating: dict[str | None, bool]
) -> tuple[str, str]:
    """The metric of a mark, and the key of its series there."""
    if mark.name in RUN_MARKS:
        keys = INSTRUMENTS[mark.name].keys
        return mark.name, series_key(*(str(mark.attrs.get(key, "")) for key in keys))
    kind = "" if mark.kind == "point" else mark.kind
    phase = ""
    known = KNOWN_MARKS.get(mark.name)
    if known is not None:
        if _in_evaluation(mark.span_id, places, evaluating):
            phase = semconv.EVALUATION
        elif not kind:
            return known, ""
    return semconv.MARK_METRIC, series_key(kind, phase, mark.name)


def _in_evaluation(
    span_id: str, places: Mapping[str, SpanRecord], known: dict[str | None, bool]
) -> bool:
    """Whether a scope lies in an evaluation, as far as its parents are known."""
    path: list[str] = []
    at: str | None = span_id
    found = False
    while at is not None and at not in known and len(path) < _MAX_DEPTH:
        path.append(at)
        row = places.get(at)
        if row is None:
            break
        if row.name == semconv.EVALUATION or row.attrs.get(semconv.MODE) == "eval":
            found = True
            break
        at = row.parent_id
    else:
        found = known.get(at, False)
    for one in path:
        known[one] = found
    return found


def _is_number(value: object) -> bool:
    """Whether it is one that a double holds; a foreign writer's integer may have any size."""
    return isinstance(value, (int, float)) and -_MOST <= value <= _MOST


def _end(row: SpanRecord) -> int:
    return row.start_ns if row.end_ns is UNSET else row.end_ns


def _sampled(row: SpanRecord) -> bool:
    return row.otel is UNSET or row.otel.sampled is not False


def _trace_id(row: SpanRecord) -> str:
    """The whole trace id; empty where the row tells only half of it."""
    if row.otel is UNSET or row.otel.trace_id is UNSET:
        return ""
    return row.otel.trace_id + row.id[16:]


def _is_hex(text: str, size: int) -> bool:
    """Whether an id can be said in OTLP; a foreign writer's may be anything."""
    try:
        return len(bytes.fromhex(text)) == size
    except ValueError:
        return False
