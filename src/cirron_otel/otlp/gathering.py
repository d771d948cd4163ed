"""What belongs to a span but stands in another row or file: its marks, its epoch, its parent.

A span is written when it ends; its marks are written when they are made, so those of a long scope
lie in earlier files. A :class:`Gatherer` sees the batches of a spool in order and remembers, within
bounds, the marks whose span has not come yet and the scopes that are or were open. What stands in a
*later* file (a value that was still on a device, the parent of a child that a full batch parted
from it) is looked up there, by way of the function that it is given.

One gatherer belongs to one destination, because each reads the spool at its own pace. Not
thread-safe; no network, and no disk but through that function.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch, MarkRecord, SpanRecord
from cirron_otel.long_scopes import is_long
from cirron_otel.otlp.batches import Later, LaterRow, is_request
from cirron_otel.otlp.budget import Budget
from cirron_otel.otlp.ranks import RankLinks, is_session
from cirron_otel.otlp.request_budget import Judged, RequestBudget
from cirron_otel.otlp.rows import (
    PARENT_KNOWN,
    PARENT_REMOTE,
    Limits,
    Marks,
    OtlpSpan,
    make_pending,
    make_span,
)

#: Marks of spans that have not come yet: so many are remembered, the newest of each span.
MAX_MARKS = 50_000
#: Spans that went out with marks from a later file; those marks are not kept when it comes.
_MAX_TAKEN = 10_000
_MAX_ENDED = 10_000

#: The batches that the same writer wrote after this one, the nearest first. May be read lazily: no
#: more are taken than are needed.
Ahead = Callable[[], Iterable[Later]]


def nothing_ahead() -> Iterable[Later]:
    """For a batch that is all there is."""
    return ()


class _Place(msgspec.Struct, frozen=True, gc=False):
    """A scope's place in the tree."""

    name: str
    parent_id: str | None
    index: int | None
    writer: str

    @classmethod
    def of(cls, row: SpanRecord | LaterRow, writer: str) -> _Place:
        """The place of a row; a request is told by its name, whatever the service calls it."""
        name = semconv.REQUEST if is_request(row) else row.name
        return cls(name, row.parent_id, row.index, writer)


class Gatherer:
    """Turns the batches of a spool, in order, into the spans to export."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        pending: bool = False,
        budget: Budget | None = None,
        ranks: RankLinks | None = None,
        requests: RequestBudget | None = None,
    ) -> None:
        self.budget = budget
        self.requests = requests
        self.ranks = RankLinks() if ranks is None else ranks
        self.limits = Limits.from_environment() if limits is None else limits
        self.pending = pending
        self._open: dict[str, _Place] = {}
        self._open_of: dict[str, list[str]] = {}
        self._announced: set[str] = set()
        #: By span id, the span longest untouched first.
        self._marks: dict[str, Marks] = {}
        self._mark_count = 0
        self._taken: dict[str, None] = {}
        #: Scopes that were open once, the longest ended first.
        self._ended: dict[str, _Place] = {}
        #: Marks that had to be forgotten before their span came.
        self.forgotten_marks = 0
        #: Marks that are known to exist but were in no file yet when their span went out.
        self.missed_marks = 0

    # --- what a batch tells --------------------------------------------------------------------

    def learn(self, batch: Batch) -> None:
        """Take in a batch that was exported before: its open scopes and their marks.

        For the files before the first one of a new process.
        """
        self._note_marks(batch.marks)
        self.ranks.note(batch)
        closed = {row.id for row in batch.spans}
        for row in batch.spans:
            self._take_marks(row.id)
        self._note_open(batch, closed)
        if batch.open is not UNSET:
            self._announced.update(row.id for row in batch.open if _announces(row, batch))

    def spans(self, batch: Batch, ahead: Ahead = nothing_ahead) -> Iterator[OtlpSpan]:
        """The spans to export of a batch: window roots, closed spans, announcements.

        Each batch is given once, in the order of the files. What the sampler dropped is left out,
        and what is over the budget.
        ``ahead`` is called only where something is missing.
        """
        session_id = None if batch.resource is UNSET else batch.resource.get(semconv.SESSION_ID)
        self._note_marks(batch.marks)
        self.ranks.note(batch)
        closed = {row.id: row for row in batch.spans}
        places = self._places(batch, closed, ahead)
        judged = self._judge(batch, places)
        left_out = judged.left_out
        limits, writer = self.limits, _writer(batch)
        epochs: dict[str | None, int | None] = {None: None}
        if batch.windows is not UNSET:
            for row in batch.windows:
                self._announced.discard(row.id)
                if _sampled(row):
                    root = make_span(row, limits, session_id=session_id, flags=PARENT_KNOWN)
                    yield self._with_left_out(row, root)
        for row in batch.spans:
            self._announced.discard(row.id)
            marks = self._take_marks(row.id)
            if not _sampled(row) or row.id in left_out:
                continue
            self.missed_marks += _lacking(row, marks)
            own = row.name == semconv.EPOCH
            span = make_span(
                row,
                limits,
                session_id=session_id,
                epoch=row.index if own else _epoch(row.parent_id, places, epochs),
                marks=marks,
                flags=_flags(row, places, writer),
            )
            if row.parent_id is None:
                self._link_to_rank_0(row, span, batch)
                span = self._with_left_out(row, span)
            yield from self._judged(row, span, judged)
        self._note_open(batch, closed)
        if self.pending:
            yield from self._announcements(batch, session_id)

    def _judge(self, batch: Batch, places: dict[str, _Place | SpanRecord]) -> Judged:
        """What the budget and the limits of requests say of the rows of a batch."""
        judged = Judged() if self.requests is None else self.requests.judge(batch, places)
        if self.budget is not None:
            judged.left_out |= self.budget.choose(batch, judged.in_requests)
        return judged

    def _judged(self, row: SpanRecord, span: OtlpSpan, judged: Judged) -> Iterator[OtlpSpan]:
        """A span that goes, with what has waited for it; none while it has to wait itself."""
        requests = self.requests
        if requests is not None and row.id in judged.held:
            requests.hold(judged.held[row.id], span)
            return
        if requests is not None and is_request(row):
            yield from requests.release(row, span)
        yield span

    def _with_left_out(self, row: SpanRecord, root: OtlpSpan) -> OtlpSpan:
        """The root of a trace, which says what of the trace was not sent."""
        missing = None if self.budget is None else self.budget.missing_from(row)
        if missing is not None:
            said = {semconv.LEFT_OUT_SPANS: missing.spans, semconv.LEFT_OUT_STEPS: missing.steps}
            root.attrs = {**root.attrs, **said}
        return root

    def _link_to_rank_0(self, row: SpanRecord, span: OtlpSpan, batch: Batch) -> None:
        limit = self.limits.links
        if is_session(row) and (limit is None or len(span.links) < limit):
            link = self.ranks.link_of(batch)
            span.links += [] if link is None else [link]

    def _announcements(self, batch: Batch, session_id: object) -> Iterator[OtlpSpan]:
        for row in () if batch.open is UNSET else batch.open:
            # What ended while the batch was made is in both lists.
            if row.id not in self._open or row.id in self._announced or not _sampled(row):
                continue
            if self.requests is not None and self.requests.waits(row.id, self._open):
                continue
            if _announces(row, batch):
                self._announced.add(row.id)
                own = row.name == semconv.EPOCH
                epoch = row.index if own else _epoch(row.parent_id, self._open, {None: None})
                span = make_pending(row, self.limits, session_id, epoch)
                self._link_to_rank_0(row, span, batch)
                yield span

    # --- marks ---------------------------------------------------------------------------------

    def _note_marks(self, marks: Sequence[MarkRecord]) -> None:
        kept, taken, limit = self._marks, self._taken, self.limits.events
        for mark in marks:
            span_id = mark.span_id
            if span_id in taken:
                continue
            of_span = kept.get(span_id)
            if of_span is None:
                of_span = kept[span_id] = Marks(limit)
            before = len(of_span.events)
            of_span.add(mark)
            self._mark_count += len(of_span.events) - before
        # The spans of this batch take theirs at once; what then stays over is bounded.

    def _take_marks(self, span_id: str) -> Marks | None:
        marks = self._marks.pop(span_id, None)
        if marks is not None:
            self._mark_count -= len(marks.events)
        return marks

    def _forget_marks(self) -> None:
        # Spans of which nothing was heard longest go first: dicts keep the order of insertion.
        while self._mark_count > MAX_MARKS:
            marks = self._take_marks(next(iter(self._marks)))
            self.forgotten_marks += 0 if marks is None else len(marks.events)

    # --- places --------------------------------------------------------------------------------

    def _note_open(self, batch: Batch, closed: Any) -> None:  # noqa: ANN401 - any container of ids
        self._forget_marks()
        writer = _writer(batch)
        if batch.open is UNSET:
            return
        for known in self._open_of.get(writer, ()):
            place = self._open.pop(known, None)
            if place is not None:
                self._remember(known, place)  # a thread's scopes may outlive what they stand in
        over = () if batch.windows is UNSET else {row.id for row in batch.windows}
        rows = [row for row in batch.open if row.id not in closed and row.id not in over]
        for row in rows:
            self._open[row.id] = _Place.of(row, writer)
        gone = set(self._open_of.get(writer, ())).difference(row.id for row in rows)
        self._announced -= gone
        if rows:
            self._open_of[writer] = [row.id for row in rows]
        else:
            self._open_of.pop(writer, None)

    def _remember(self, row_id: str, place: _Place) -> None:
        self._ended[row_id] = place
        if len(self._ended) > _MAX_ENDED:
            del self._ended[next(iter(self._ended))]

    def _places(
        self, batch: Batch, closed: dict[str, SpanRecord], ahead: Ahead
    ) -> dict[str, _Place | SpanRecord]:
        """Every scope that a span of the batch may stand in, as far as it is known."""
        places: dict[str, _Place | SpanRecord] = {**self._ended, **self._open, **closed}
        if batch.open is not UNSET:
            for row in batch.open:
                places.setdefault(row.id, row)
        lacking = {
            row.id: row
            for row in batch.spans
            if row.mark_ids and _lacking(row, self._marks.get(row.id))
        }
        unknown = {
            row.parent_id
            for row in batch.spans
            if row.parent_id is not None and row.parent_id not in places
        }
        if lacking or unknown:
            writer = _writer(batch)
            for later in ahead():
                self._find_marks(lacking, later)
                for found in (*later.spans, *later.open):
                    if found.id in unknown:
                        unknown.discard(found.id)
                        place = _Place.of(found, writer)
                        places[found.id] = place
                        self._remember(found.id, place)
                        # Children come before their parents: that one is still to be read.
                        if found.parent_id is not None and found.parent_id not in places:
                            unknown.add(found.parent_id)
                if not lacking and not unknown:
                    break
        return places

    def _find_marks(self, lacking: dict[str, SpanRecord], later: Later) -> None:
        """Take from a later batch the marks of these spans; a span that has all is taken off."""
        if not lacking:
            return
        found = [mark for mark in later.marks if mark.span_id in lacking]
        self._note_marks(found)
        for span_id in {mark.span_id for mark in found}:
            # When that batch comes, its span is gone.
            self._taken[span_id] = None
            if not _lacking(lacking[span_id], self._marks.get(span_id)):
                del lacking[span_id]
        while len(self._taken) > _MAX_TAKEN:
            del self._taken[next(iter(self._taken))]


def _announces(row: SpanRecord, batch: Batch) -> bool:
    """Whether an open scope is one that a reader of traces waits long for."""
    window = row.otel is not UNSET and row.otel.window is True
    return window or is_long(row.name, batch.created_ns - row.start_ns)


def _writer(batch: Batch) -> str:
    return "" if batch.writer is UNSET else batch.writer


def _lacking(row: SpanRecord, marks: Marks | None) -> int:
    """How many of a span's marks are not among those known."""
    expected = len(row.mark_ids) if row.mark_count is UNSET else row.mark_count
    return max(0, expected - (0 if marks is None else marks.count + marks.for_metrics))


def _sampled(row: SpanRecord) -> bool:
    return row.otel is UNSET or row.otel.sampled is not False


def _epoch(
    parent_id: str | None,
    places: Any,  # noqa: ANN401 - a dict of places or rows
    known: dict[str | None, int | None],
) -> int | None:
    """The index of the epoch that a scope with this parent lies in; None outside of epochs."""
    path: list[str | None] = []
    found: int | None = None
    at = parent_id
    while at not in known:
        path.append(at)
        known[at] = None  # a ring of parents ends here
        place = places.get(at)
        if place is None:
            break
        if place.name == semconv.EPOCH:
            found = place.index
            break
        at = place.parent_id
    else:
        found = known[at]
    for one in path:
        known[one] = found
    return found


def _flags(row: SpanRecord, places: dict[str, Any], writer: str) -> int:
    """Whether the parent is of another process, where the rows tell."""
    if row.parent_id is None:
        return PARENT_KNOWN
    otel = row.otel
    above = row.parent_id
    if otel is not UNSET and otel.parent_span_id is not UNSET:
        above = otel.parent_span_id + row.id[16:]
    place = places.get(above)
    if place is None:
        return 0
    if isinstance(place, _Place) and place.writer != writer:
        return PARENT_KNOWN | PARENT_REMOTE
    return PARENT_KNOWN
