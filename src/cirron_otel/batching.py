"""From queued rows to sealed batches, a small slice at a time.

Rows come in two ways, in order across both. The compiled hot path writes them as JSON where they
are made; they lie in the queue as blocks of text, and a flush only passes those on. Every other row
is appended as an object (a struct the garbage collector never sees): no JSON, no I/O, no lock; the
flush thread takes these off in slices short enough that a training loop waiting for the interpreter
does not notice, and encodes each. A batch is sealed when it is large enough.

**Back-pressure.** When more than :data:`ASSIST_ROWS` rows or :data:`ASSIST_BYTES` of text are
queued, the producing thread itself encodes one bounded slice, or passes blocks on, every time it
draws new ids (every 64 rows); counted as ``producer_assists``. Where sealed batches already wait
for the disk it steps aside for at most a millisecond instead, counted the same, so that the flush
thread gets to write them and memory stays bounded. Rows are dropped only while the disk refuses to
take batches: the oldest point marks first, then the oldest spans, each counted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence, Sized
from itertools import chain, groupby, repeat, starmap
from operator import attrgetter
from typing import Any, Protocol

import msgspec

from cirron_otel import ids
from cirron_otel._guard import Guard
from cirron_otel.batch import (
    SCHEMA_VERSION,
    LogRecord,
    MarkRecord,
    SnapshotRecord,
    SpanRecord,
    encode_rows,
)
from cirron_otel.clock import Clock
from cirron_otel.fitting import CHUNK_BYTES, Row, bare, cleaned, encoded, fitting
from cirron_otel.values import attributes

#: Rows queued before producers help.
ASSIST_ROWS = 65_536
ASSIST_BYTES = 32_000_000
#: Rows, and bytes of text, kept in memory while the disk refuses.
MAX_ROWS = 2 * ASSIST_ROWS
#: Log records kept in memory; the oldest go first.
MAX_LOGS = 8192
MAX_BYTES = 2 * ASSIST_BYTES
#: A batch is sealed before its rows pass this size, so that no file reaches 4 MB.
SEAL_BYTES = 3_000_000
SEAL_ROWS = 20_000
#: No batch is made larger than this (but for one with more than 7,000 open scopes).
_HARD_BYTES = 3_700_000
#: Rows encoded at a time on the flush thread, and by an assisting producer: at most, and fewer
#: where rows are so large that they would make more than these bytes.
SLICE_ROWS = 64
ASSIST_SLICE = 256
SLICE_BYTES = 65_536
#: Sealed batches that may wait for the disk before producers stop encoding more and step aside.
MAX_SEALED = 4
#: How long a producer steps aside, in seconds.
PAUSE_S = 0.001

#: Rows written as text are flushed early when they take this much.
WAKE_BYTES = 6_000_000

_ROWS = (SpanRecord, MarkRecord, SnapshotRecord, LogRecord)
_ROWS_OF = attrgetter("rows")


class RowBuffer(Protocol):
    """What the compiled hot path writes rows into; it puts blocks into the queue of their kind.

    Every method happens at once, as seen from other threads.
    """

    @property
    def rows(self) -> int:
        """Rows that were written and not taken yet."""

    @property
    def blocks(self) -> int:
        """How many blocks of them are in the queue."""

    @property
    def bytes(self) -> int:
        """Bytes of those rows."""

    def append(self, row: Any, /) -> None:  # noqa: ANN401 - any row
        """Queue a row that is an object, behind what was written before."""

    def close(self) -> None:
        """Put what was written into the queue."""

    def took(self, block: Any, /) -> None:  # noqa: ANN401 - a block of its own
        """Count a block that was taken from the queue."""

    def clear(self) -> None:
        """Forget what was written."""


#: Behind the rows of one kind.
_CLOSING = b"]"


def _opening(name: str) -> bytes:
    """What stands before the rows of one kind."""
    return f',"{name}":['.encode()


class Sealed(msgspec.Struct):
    """A batch ready for the disk: its pieces in order, and what is in it."""

    batch_id: str
    created_ns: int
    chunks: list[Any]
    rows: int
    size: int

    def pieces(self, name: str) -> list[Any]:
        """Its rows of one kind (``spans``, ``marks``), encoded: whole JSON objects in each piece.

        Inside of a piece there are commas between them. A piece is anything with bytes in it.
        """
        first = self.chunks.index(_opening(name)) + 1
        # Every second one is the comma between two pieces.
        return self.chunks[first : self.chunks.index(_CLOSING, first) : 2]


class Batcher:
    """The queues and the batch being built. ``append_*`` may be called from any thread."""

    def __init__(
        self, clock: Clock, guard: Guard, envelope: dict[str, Any], sdk_version: str
    ) -> None:
        self._clock = clock
        self._guard = guard
        self.envelope = envelope
        self._sdk_version = sdk_version
        self.spans: deque[SpanRecord] = deque()
        self.marks: deque[MarkRecord] = deque()
        self.snapshots: deque[SnapshotRecord] = deque()
        self.logs: deque[LogRecord] = deque()
        #: Rows of window roots, which are not part of the canonical tree.
        self.windows: deque[SpanRecord] = deque()
        self.sealed: deque[Sealed] = deque()
        #: Told of the spans that were encoded.
        self.sinks: Sequence[Callable[[list[SpanRecord]], None]] = ()
        #: The ends at which rows come in as text, by the queue they go to.
        self._text: dict[str, RowBuffer] = {}
        self.producer_assists = 0
        self.disk_refuses = False
        #: Spans as they went into a batch, for whoever keeps account of them; None: nobody does.
        self.seen: deque[Any] | None = None
        #: Told when something was sealed outside the flush thread.
        self.wake: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._last_created = 0
        self._ids: list[str] = []
        self._end_of: dict[str, Any] | None = None
        self._end = b"}"
        #: Bytes of a row in the last slice of its kind.
        self._row_bytes = {"spans": 1, "marks": 1, "snapshots": 1, "logs": 1}
        self._reset()

    def _reset(self) -> None:
        # Pieces of JSON with the commas between them, so that sealing is copying three lists.
        self._chunks: dict[str, list[Any]] = {
            "spans": [], "marks": [], "snapshots": [], "logs": [],
        }  # fmt: skip
        self._size = 0
        self._rows = 0

    @property
    def queued(self) -> int:
        """Rows waiting to be encoded."""
        return self._waiting()[0]

    def _waiting(self) -> tuple[int, int]:
        """Rows waiting to be encoded, and the bytes of those that are text."""
        rows = len(self.spans) + len(self.marks) + len(self.snapshots) + len(self.logs)
        size = 0
        for text in self._text.values():
            rows += text.rows - text.blocks
            size += text.bytes
        return rows, size

    def take_text(self, make: Callable[[Callable[[Any], None]], RowBuffer]) -> None:
        """Have spans and marks come in as text too."""
        self._text = {"spans": make(self.spans.append), "marks": make(self.marks.append)}

    def way_in(self, name: str) -> tuple[Callable[[Any], None], RowBuffer | None]:
        """Where rows of a kind come in: as objects, and as text; in order across both."""
        text = self._text.get(name)
        return (getattr(self, name).append, None) if text is None else (text.append, text)

    def forget(self) -> None:
        """Drop everything: after a fork the rows are the parent's to write."""
        self._lock = threading.Lock()
        for queue in (
            self.spans,
            self.marks,
            self.snapshots,
            self.logs,
            self.windows,
            self.sealed,
        ):
            queue.clear()
        for text in self._text.values():
            text.clear()
        self._ids = []
        self.seen = None
        self._reset()

    # --- producers -------------------------------------------------------------------------------

    def append_log(self, row: LogRecord) -> None:
        """Queue a log record. Any thread; never waits."""
        if len(self.logs) >= MAX_LOGS:
            with contextlib.suppress(IndexError):
                self.logs.popleft()
                self._guard.lost("disk_full_logs")
        self.logs.append(row)

    def relieve(self) -> None:
        """Called by producers every 64 rows: help if the flush thread is behind.

        Waits for nothing but, past :data:`ASSIST_ROWS` with :data:`MAX_SEALED` batches unwritten,
        the :data:`PAUSE_S` it gives away.
        """
        rows, size = self._waiting()
        if rows <= ASSIST_ROWS and size <= ASSIST_BYTES:
            if size > WAKE_BYTES:
                self.wake()
            return
        if not self.envelope or self.disk_refuses or len(self.sealed) >= MAX_SEALED:
            self.wake()
            if self.disk_refuses:
                is_over = self.queued > MAX_ROWS or size > MAX_BYTES
                if is_over and self._lock.acquire(blocking=False):
                    try:
                        self._drop_oldest()
                    finally:
                        self._lock.release()
            elif self.envelope:
                self.producer_assists += 1
                time.sleep(PAUSE_S)
            return
        if self._lock.acquire(blocking=False):
            try:
                self.producer_assists += 1
                for name, queue in (("marks", self.marks), ("spans", self.spans)):
                    self._encode_slice(name, queue, ASSIST_SLICE)
                if self._full():
                    self._seal({})
                    self.wake()
            finally:
                self._lock.release()

    def waiting_spans(self) -> list[Any]:
        """Spans that are in no batch yet, as they will be in ``seen``: at the end of a session."""
        for text in self._text.values():
            text.close()
        with self._lock:
            waiting: list[Any] = []
            for kind, group in groupby(self.spans.copy(), type):
                items: list[Any] = list(group)
                if kind in _ROWS:
                    chunk = encoded(items)
                    items = [chunk] if chunk else list(filter(None, map(_text_of, items)))
                waiting.extend(items)
            return waiting

    def _drop_oldest(self) -> None:
        """Make room while the disk refuses: oldest point marks first, then spans."""
        room = MAX_ROWS // 16
        kept: list[MarkRecord] = []
        looked = points = 0
        while self.marks and looked < room * 4:
            mark: Any = self.marks.popleft()
            rows = self._taken("marks", mark)
            looked += rows
            if isinstance(mark, MarkRecord) and mark.kind != "point":
                kept.append(mark)
            else:  # only points are written as text
                points += rows
        self.marks.extendleft(reversed(kept))
        if points:
            self._guard.lost("disk_full_marks", points)
            return
        gone = 0
        while self.spans and gone < room:
            gone += self._taken("spans", self.spans.popleft())
        self._guard.lost("disk_full_spans", gone)

    def _taken(self, name: str, item: Any) -> int:  # noqa: ANN401 - a row or a block
        """The rows of what was taken from a queue."""
        if isinstance(item, _ROWS):
            return 1
        self._text[name].took(item)
        return int(item.rows)

    # --- flush thread --------------------------------------------------------------------------

    def slices(self) -> Callable[[], int | None]:
        """A function that encodes one slice per call, until what is queued *now* is encoded.

        It returns how many rows it encoded (rows that are text are only passed on), and None when
        there is no more to do. Rows that arrive meanwhile are left for the next flush, so a flush
        ends however fast the producers are.
        """
        for text in self._text.values():
            text.close()
        left = {
            "marks": len(self.marks),
            "spans": len(self.spans),
            "snapshots": len(self.snapshots),
            "logs": len(self.logs),
        }

        def step() -> int | None:
            for name, more in left.items():
                queue = getattr(self, name)
                if more > 0 and queue:
                    with self._lock:
                        taken, encoded = self._encode_slice(name, queue, min(more, SLICE_ROWS))
                        left[name] -= taken
                        if self._full():
                            self._seal({})
                    return encoded
            return None

        return step

    def seal(self, open_rows: list[SpanRecord] | None) -> None:
        """Seal what has been encoded, with the rows of the scopes that are open (None: as before).

        Never raises for what a row holds: an open row that cannot be written would otherwise
        keep every later batch from the disk.
        """
        extra: dict[str, bytes] = {}
        if open_rows is not None:
            extra["open"] = self._encoded_list(open_rows)
            if len(extra["open"]) > CHUNK_BYTES:
                extra["open"] = self._encoded_list([bare(row) for row in open_rows])
        windows = [self.windows.popleft() for _ in range(len(self.windows))]
        if windows:
            extra["windows"] = self._encoded_list(windows)
        with self._lock:
            if self._rows and self._size + sum(map(len, extra.values())) > _HARD_BYTES:
                self._seal({})
            if self._rows or extra:
                self._seal(extra)

    @property
    def is_large(self) -> bool:
        """Whether what waits will not fit one batch."""
        rows = sum(text.rows for text in self._text.values())
        queued, size = self._waiting()
        objects = queued - rows
        room = 1 - max(rows / SEAL_ROWS, size / SEAL_BYTES)
        return bool(self.sealed) or objects > room * SEAL_ROWS // 4

    def announce(self, open_rows: list[SpanRecord]) -> None:
        """Seal a batch of open rows alone, to be written before all others."""
        chunk = self._encoded_list(open_rows)
        with self._lock:
            building = self._chunks, self._size, self._rows
            self._reset()
            self._seal({"open": chunk})
            self.sealed.rotate(1)
            self._chunks, self._size, self._rows = building

    def _encoded_list(self, rows: list[SpanRecord]) -> bytes:
        chunk = encoded(rows)
        if chunk is None:
            chunk = b",".join(filter(None, map(self._encoded_alone, rows)))
        return chunk

    def _full(self) -> bool:
        return self._size >= SEAL_BYTES or self._rows >= SEAL_ROWS

    def _encode_slice(self, name: str, queue: deque[Any], most: int) -> tuple[int, int]:
        """Encode the first of a queue; says how many were taken from it, and rows encoded."""
        most = max(1, min(most, SLICE_BYTES * most // (self._row_bytes[name] * SLICE_ROWS)))
        items: list[Any] = []
        # Not a loop of ours: the other threads wait for the interpreter meanwhile.
        with contextlib.suppress(IndexError):  # the queue has run empty
            items.extend(starmap(queue.popleft, repeat((), most)))
        encoded = 0
        for kind, group in groupby(items, type):
            if kind in _ROWS:
                encoded += self._encode(name, list(group))
            else:
                self._pass_on(name, list(group))
        return len(items) or most, encoded

    def _pass_on(self, name: str, blocks: list[Any]) -> None:
        """Put blocks of text into the batch."""
        for block in blocks:
            self._text[name].took(block)
        if name == "spans" and self.seen is not None:
            self.seen.extend(blocks)
        size = sum(map(len, blocks)) + len(blocks)
        rows = sum(map(_ROWS_OF, blocks))
        if self._size + size <= SEAL_BYTES and self._rows + rows <= SEAL_ROWS:
            pieces = self._chunks[name]
            joined = chain.from_iterable(zip(repeat(b","), blocks))
            if not pieces:
                size -= len(next(joined))
            pieces.extend(joined)
            self._size += size
            self._rows += rows
            return
        for block in blocks:
            is_over = self._size + len(block) > SEAL_BYTES or self._rows + block.rows > SEAL_ROWS
            if self._rows and is_over:
                self._seal({})
            self._add(name, block, block.rows)

    def _encode(self, name: str, rows: list[Any]) -> int:
        if name == "spans":
            for sink in self.sinks:
                self._tell(sink, rows)
        chunk = encoded(rows)
        if chunk is not None:
            self._row_bytes[name] = max(1, len(chunk) // len(rows))
            self._put(name, chunk, len(rows))
        else:
            self._row_bytes[name] = CHUNK_BYTES // len(rows)
            for chunk in filter(None, map(self._encoded_alone, rows)):
                self._put(name, chunk, 1)
        return len(rows)

    def _put(self, name: str, chunk: bytes, rows: int) -> None:
        if name == "spans" and self.seen is not None:
            self.seen.append(chunk)
        self._add(name, chunk, rows)

    def _tell(self, sink: Callable[[Any], None], rows: list[Row]) -> None:
        try:
            sink(rows)
        except Exception as error:  # noqa: BLE001 - a closed stdout must not stop the spool
            self._guard.repeat_warning("sink", f"a span line could not be written: {error!r}")

    def _encoded_alone(self, row: Row) -> bytes:
        """A row that JSON or the size of a batch refuses: cleaned and cut, only then given up."""
        try:
            return _text(row)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not suffer
            self._guard.lost("not_encodable")
            self._guard.swallow("encode", error)
            return b""

    def _add(self, name: str, chunk: Sized, rows: int) -> None:
        if self._size + len(chunk) > _HARD_BYTES and self._rows:
            self._seal({})
        pieces = self._chunks[name]
        if pieces:
            pieces.append(b",")
            self._size += 1
        pieces.append(chunk)
        self._size += len(chunk)
        self._rows += rows

    def _seal(self, extra: dict[str, bytes]) -> None:
        self._last_created = created = max(self._clock.now(), self._last_created + 1)
        # Drawn many at a time: asking the system for entropy gives the interpreter away.
        self._ids = self._ids or ids.mark_ids()
        batch_id = self._ids.pop()
        head = {
            "schema_version": SCHEMA_VERSION,
            "sdk_version": self._sdk_version,
            "batch_id": batch_id,
            "created_ns": created,
        }
        chunks: list[Any] = [msgspec.json.encode(head)[:-1]]
        for name, pieces in self._chunks.items():
            if name == "logs" and not pieces:
                continue  # the seed does not have it
            chunks.append(_opening(name))
            chunks.extend(pieces)
            chunks.append(_CLOSING)
        chunks.extend(b',"%b":[%b]' % (name.encode(), rows) for name, rows in extra.items())
        if self._end_of is not self.envelope:  # it is the same for every batch of a process
            self._end_of = self.envelope
            self._end = b"," + encode_rows([self._end_of])[1:] if self._end_of else b"}"
        chunks.append(self._end)
        size = sum(map(len, chunks))
        self.sealed.append(Sealed(batch_id, created, chunks, self._rows, size))
        self._reset()


def envelope(
    resource: dict[str, Any], scope: dict[str, Any], writer: str
) -> dict[str, Sequence[object] | Any]:
    """The keys every batch of one process bears."""
    return {"resource": attributes(resource)[0], "scope": scope, "writer": writer}


def _text(row: Row) -> bytes:
    """A row as text, cleaned and cut only where it has to be; raises what its values raise."""
    return encoded([row]) or encode_rows([fitting(cleaned(row))])


def _text_of(row: Row) -> bytes:
    """The same, without a word where it cannot be: whoever writes it will say so."""
    try:
        return _text(row)
    except Exception:  # noqa: BLE001 - whatever is in it
        return b""
