"""A receiver of OTLP traces: a collector, Tempo, Jaeger, MLflow, a vendor.

A batch becomes one or several requests, each below the receiver's size. What the receiver refuses
for its size is halved here, down to the single span that is too large, and what it takes too long
over is halved as well, so that a slow backend gets its work in pieces it can manage. A batch that
went out in part goes on where it stopped, as long as the process lives; after that some spans are
sent again, under the same ids.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch
from cirron_otel.destinations import otlp_beside
from cirron_otel.destinations.base import (
    Accepted,
    Answer,
    Parcel,
    Rejected,
    RetryAfter,
    TooLarge,
)
from cirron_otel.destinations.otlp_beside import sender_of, wire_of
from cirron_otel.destinations.otlp_settings import OtlpTarget
from cirron_otel.errors import SpoolFormatError
from cirron_otel.otlp.batches import Later, breathing, read_batch, read_later
from cirron_otel.otlp.budget import Budget
from cirron_otel.otlp.gathering import Gatherer
from cirron_otel.otlp.ranks import RankLinks, leaves_out
from cirron_otel.otlp.request_budget import RequestBudget
from cirron_otel.otlp.rows import Limits, Scope, scope_of
from cirron_otel.otlp.wire import Encoded
from cirron_otel.spool import is_batch_name

#: Spans in one request, and the fewest that a slow receiver is given at a time.
_MOST_SPANS, _LEAST_SPANS = 5000, 32
_LEAST_BYTES = 64 * 1024
_FRAME_BYTES = 16
#: Files before the first one that are read for marks and scopes still open.
_LOOK_BACK, _LOOK_BACK_BYTES = 64, 32_000_000
#: Files of a writer after one that are searched for what it lacks.
_LOOK_AHEAD = 16
#: How long a batch waits for the next one of its writer where it lacks something, in ns.
_HOLD_NS = 2_500_000_000
_LOOK_S = 0.05
#: Ids of batches that are remembered as given to the gatherer.
_MAX_KNOWN = 10_000
#: Scopes are announced by batches at most this old: in a queue that is late they have ended.
_ANNOUNCE_NS = 60_000_000_000
#: In a process that records, the interpreter is given away after so many spans.
_SLICE_SPANS = 32
#: Stands in a batch that shows a session.
_SESSION = f'"{semconv.SESSION}"'.encode()


class _Work(msgspec.Struct):
    """What is left of one batch."""

    #: Its file and its id: the same id may lie in two files, where somebody copied one.
    parcel: tuple[Path, str]
    resource: Mapping[str, Any]
    #: Requests still to be sent, the next one last.
    chunks: list[list[Encoded]]
    beside: otlp_beside.Work
    refused: int = 0
    note: str = ""
    rejected: Rejected | None = None
    #: Whether a part was taken since the last try.
    moved: bool = False


class OtlpDestination:
    """Sends the spans of spool batches to one receiver; see the module.

    Each batch file has to come in order, because marks lie in earlier files than their span; the
    first one is preceded by a look at the files before it. One thread at a time.
    """

    def __init__(
        self,
        target: OtlpTarget,
        *,
        pending: bool = True,
        limits: Limits | None = None,
        lasting: bool = True,
    ) -> None:
        """Connect to nothing yet. ``lasting`` totals of metrics outlive this process."""
        self.target = target
        self.name = target.cursor_name
        self.description = f"OTLP {target.protocol} to {target.shown}"
        self.wire = wire_of(target.protocol)
        self._sender = sender_of(target)
        self._beside = otlp_beside.BesideSender(target, lasting=lasting)
        self._budget = Budget(target.export_rate, target.export_burst)
        self._ranks = RankLinks()
        self._requests = RequestBudget(
            self._budget, ratio=target.request_sample_ratio, tenant_rate=target.tenant_rate
        )
        self._gatherer = Gatherer(
            limits,
            pending=pending,
            budget=self._budget,
            ranks=self._ranks,
            requests=self._requests,
        )
        self._pending = pending
        #: Spool directories, and sessions in them, whose earlier files were looked at.
        self._entered: set[tuple[Path, str]] = set()
        self._known: dict[str, None] = {}
        self._closed = threading.Event()
        self._work: _Work | None = None
        self._max_bytes = target.max_request_bytes
        self._max_spans = _MOST_SPANS
        #: Spans the receiver has, requests made, and what was left behind, by its reason.
        self.counts = {
            "spans": 0,
            "requests": 0,
            "refused_spans": 0,
            "too_large_spans": 0,
            "not_encodable_spans": 0,
        }

    @property
    def measure(self) -> Callable[[], Mapping[str, Any]] | None:
        """Says how the queue is, for the metrics; see :class:`~.base.Measured`."""
        return self._beside.measure

    @measure.setter
    def measure(self, measure: Callable[[], Mapping[str, Any]] | None) -> None:
        self._beside.measure = measure

    @property
    def forgotten_marks(self) -> int:
        """Marks that are missing on the spans sent, because they came too far apart from them."""
        return self._gatherer.forgotten_marks + self._gatherer.missed_marks

    @property
    def left_out_spans(self) -> int:
        """Spans that the export budget left out."""
        return self._budget.left_out

    def omitted(self) -> Mapping[str, int]:
        """What did not go out; see :class:`~.base.Omitting`."""
        return {"left_out_spans": self.left_out_spans, "forgotten_marks": self.forgotten_marks}

    def send(self, parcel: Parcel) -> Answer:
        """Send what is left of a batch.

        Blocks at most twice the timeout, and before that up to 2.5 s where a batch so young lacks
        what its writer will have written by then. A batch of a rank that does not go to this
        receiver is accepted and not looked at.
        """
        if leaves_out(self.target.ranks, parcel.data):
            return Accepted()
        work = self._work
        if work is None or work.parcel != (parcel.path, parcel.batch_id):
            try:
                work = self._work = self._prepared(parcel)
            except SpoolFormatError as error:
                return Rejected(None, f"not a batch: {error}")
        until = time.monotonic() + self.target.timeout
        while work.chunks or work.beside.requests:
            # The spans first: they never wait for a signal that the receiver does not take.
            answer = self._send_chunk(work) if work.chunks else self._beside.send(work.beside)
            if answer is not None:
                moved, work.moved = work.moved, False
                return msgspec.structs.replace(answer, moved=moved)
            if (work.chunks or work.beside.requests) and time.monotonic() > until:
                reason = "the receiver is slow; the rest of the batch follows"
                return RetryAfter(0.0, reason, told=True, moved=True)
        self._beside.done(work.beside)
        self._work = None
        if work.rejected is not None:
            return work.rejected
        beside = work.beside
        return Accepted(work.note or beside.note, work.refused + beside.refused)

    def close(self) -> None:
        """Give up the connection. From any thread."""
        self._closed.set()
        self._sender.close()
        self._beside.close()

    # --- requests ------------------------------------------------------------------------------

    def _send_chunk(self, work: _Work) -> RetryAfter | None:
        """Send the next request; None when there is progress of some kind."""
        chunk = work.chunks[-1]
        body = self.wire.request(work.resource, chunk)
        self.counts["requests"] += 1
        begun = time.monotonic()
        answer = self._sender.send(body)
        if isinstance(answer, TooLarge):
            limit = len(body) // 2 if answer.limit is None else answer.limit - 1024
            self._max_bytes = max(_LEAST_BYTES, min(self._max_bytes, limit))
            if len(chunk) > 1:
                _halve(work.chunks)
                return None
            work.chunks.pop()
            self.counts["too_large_spans"] += 1
            work.refused += 1
            work.note = work.note or (
                f"one span of {len(chunk[0].data):,} bytes is larger than the receiver takes "
                f"({answer.status or 'size limit'})"
            )
            return None
        if isinstance(answer, RetryAfter):
            took = time.monotonic() - begun
            slow = took > 0.9 * self.target.timeout and answer.status in {None, 504}
            if slow and len(chunk) > _LEAST_SPANS:
                self._max_spans = max(_LEAST_SPANS, len(chunk) // 2)
                _halve(work.chunks)
            return self._explained(answer)
        work.chunks.pop()
        work.moved = True
        if isinstance(answer, Rejected):
            work.rejected = work.rejected or answer
            return None
        self.counts["spans"] += len(chunk) - answer.refused_rows
        self.counts["refused_spans"] += answer.refused_rows
        work.refused += answer.refused_rows
        work.note = work.note or answer.note
        return None

    def _explained(self, answer: RetryAfter) -> RetryAfter:
        hint = self.target.hint
        if answer.status is None and hint:
            return msgspec.structs.replace(answer, reason=f"{answer.reason} ({hint})")
        return answer

    # --- from a batch to requests --------------------------------------------------------------

    def _prepared(self, parcel: Parcel) -> _Work:
        breathe = breathing()
        batch = read_batch(parcel.data, breathe)
        spans, refused = self._spans(parcel, batch, breathe) if self.target.traces else ([], 0)
        beside = self._beside.prepare(parcel, batch, breathe)
        resource = {} if batch.resource is UNSET else batch.resource
        work = _Work((parcel.path, parcel.batch_id), resource, self._chunks(spans), beside, refused)
        if refused:
            work.note = f"{refused:,} spans cannot be said in OTLP"
        return work

    def _spans(
        self, parcel: Parcel, batch: Batch, breathe: Callable[[], object] | None
    ) -> tuple[list[Encoded], int]:
        """The spans to send of a batch, and how many cannot be said."""
        gatherer = self._gatherer_for(parcel, batch)
        age_ns = time.time_ns() - batch.created_ns
        gatherer.pending = self._pending and age_ns < _ANNOUNCE_NS
        own = Scope("", "") if batch.scope is UNSET else scope_of(batch.scope)
        spans: list[Encoded] = []
        refused = 0
        for span in gatherer.spans(batch, lambda: self._after(parcel.path, batch, age_ns)):
            try:
                spans.append(Encoded(span.scope or own, self.wire.span(span)))
            except (ValueError, TypeError, OverflowError, RecursionError):
                # A foreign writer's row: an id that is no hex, text that is no Unicode.
                refused += 1
            if breathe is not None and len(spans) % _SLICE_SPANS == 0:
                breathe()
        self.counts["not_encodable_spans"] += refused
        return spans, refused

    def _gatherer_for(self, parcel: Parcel, batch: Batch) -> Gatherer:
        """The gatherer that knows what came before this batch."""
        session = None if batch.resource is UNSET else batch.resource.get(semconv.SESSION_ID)
        entered = parcel.path.parent, str(session)
        if parcel.batch_id in self._known:
            # It was put off for others and comes again: what it said is known already, so that
            # one of its own looks at the files before.
            gatherer = Gatherer(
                self._gatherer.limits,
                budget=self._budget,
                ranks=self._ranks,
                requests=self._requests,
            )
        else:
            self._remember(parcel.batch_id)
            gatherer = self._gatherer
            if entered in self._entered:
                return gatherer
            self._entered.add(entered)
        for earlier in _before(parcel.path, b"" if session is None else entered[1].encode()):
            gatherer.learn(earlier)
        if self._ranks.lacks(batch):
            for earlier in _before(parcel.path, _SESSION):
                self._ranks.note(earlier)
        return gatherer

    def _remember(self, batch_id: str) -> None:
        self._known[batch_id] = None
        if len(self._known) > _MAX_KNOWN:
            del self._known[next(iter(self._known))]

    def _after(self, path: Path, batch: Batch, age_ns: int) -> Iterator[Later]:
        """The next batches of the writer; of a young batch they are waited for.

        What a device still had to say comes with the next flush.
        """
        young = 0 <= age_ns < _HOLD_NS and not _ends_session(batch)
        until = time.monotonic() + ((_HOLD_NS - age_ns) / 1e9 if young else 0)
        writer = "" if batch.writer is UNSET else batch.writer
        last, left, seen = path, _LOOK_AHEAD, 0
        while True:
            changed = _changed_ns(path.parent)
            for file in _neighbours(last)[1] if changed != seen else ():
                last = file
                later = _read_later(file)
                if later is not None and later.writer == writer:
                    yield later
                    left -= 1
                    if not left or _ends_session(later):
                        return
            seen = changed
            if time.monotonic() >= until or self._closed.wait(_LOOK_S):
                return

    def _chunks(self, spans: Sequence[Encoded]) -> list[list[Encoded]]:
        """The spans in requests of bounded size, the last request first."""
        chunks: list[list[Encoded]] = []
        size = self._max_bytes
        for one in spans:
            room = len(one.data) + _FRAME_BYTES
            if size + room > self._max_bytes or len(chunks[-1]) >= self._max_spans:
                chunks.append([])
                size = 4096  # the resource, the scopes
            chunks[-1].append(one)
            size += room
        chunks.reverse()
        return chunks


def _halve(chunks: list[list[Encoded]]) -> None:
    chunk = chunks.pop()
    middle = len(chunk) // 2
    chunks += [chunk[middle:], chunk[:middle]]


def _ends_session(batch: Batch | Later) -> bool:
    return any(row.parent_id is None and row.name == semconv.SESSION for row in batch.spans)


def _neighbours(path: Path) -> tuple[list[Path], list[Path]]:
    """The batch files before and after one, each by time."""
    try:
        names = sorted(file.name for file in path.parent.iterdir() if is_batch_name(file.name))
    except OSError:
        return [], []
    before = [path.parent / name for name in names if name < path.name]
    after = [path.parent / name for name in names if name > path.name]
    return before, after


def _changed_ns(directory: Path) -> int:
    try:
        return directory.stat().st_mtime_ns
    except OSError:
        return 0


def _before(path: Path, wanted: bytes) -> Iterator[Batch]:
    """The batches before this one that name something, as far as they may tell of it."""
    files, size = _neighbours(path)[0][-_LOOK_BACK:], 0
    for index in range(len(files) - 1, -1, -1):
        with contextlib.suppress(OSError):
            size += files[index].stat().st_size
        if size > _LOOK_BACK_BYTES:
            files = files[index + 1 :]
            break
    for file in files:
        with contextlib.suppress(OSError, SpoolFormatError):  # evicted meanwhile, or no batch
            data = file.read_bytes()
            if wanted in data:
                yield read_batch(data)


def _read_later(path: Path) -> Later | None:
    try:
        return read_later(path.read_bytes())
    except (OSError, SpoolFormatError):
        return None
