"""From queued rows to sealed batches, a small slice at a time.

Producers append finished rows (structs the garbage collector never sees) to a queue: no JSON, no
I/O, no lock. The flush thread takes them off in slices short enough that a training loop waiting
for the interpreter does not notice, encodes each, and seals a batch when it is large enough.

**Back-pressure.** When more than :data:`ASSIST_ROWS` rows are queued, the producing thread itself
encodes one bounded slice every time it draws new ids (every 64 rows); counted as
``producer_assists``. Where sealed batches already wait for the disk it steps aside for at most a
millisecond instead, counted the same, so that the flush thread gets to write them and memory stays
bounded. Rows are dropped only while the disk refuses to take batches: the oldest
point marks first, then the oldest spans, each counted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice, repeat, starmap
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel import ids
from cirron_otel._guard import Guard
from cirron_otel.batch import (
    SCHEMA_VERSION,
    MarkRecord,
    SnapshotRecord,
    SpanOtel,
    SpanRecord,
    encode_rows,
)
from cirron_otel.clock import Clock
from cirron_otel.values import attributes, clean_text, cut_text

#: Rows queued before producers help.
ASSIST_ROWS = 65_536
#: Rows kept in memory while the disk refuses.
MAX_ROWS = 2 * ASSIST_ROWS
#: A batch is sealed before its rows pass this size, so that no file reaches 4 MB.
SEAL_BYTES = 3_000_000
SEAL_ROWS = 20_000
#: No batch is made larger than this (but for one with more than 7,000 open scopes).
_HARD_BYTES = 3_700_000
#: One slice, and one row, is at most this large; what is larger is encoded row by row, then cut.
_CHUNK_BYTES = 700_000
_CUT_BYTES = 256
#: A row's name, in UTF-8 bytes, where it has to be cut.
MAX_NAME_BYTES = 1024
#: Stands in ``attrs`` for those that a row of bounded size has no room for: their number.
ATTRIBUTES_LEFT_OUT = "cirron.attributes_left_out"
#: How JSON writes the character that databases refuse.
_NUL = rb"\u0000"
_BACKSLASH = b"\\"
#: Rows encoded at a time on the flush thread, and by an assisting producer: at most, and fewer
#: where rows are so large that they would make more than these bytes.
SLICE_ROWS = 64
ASSIST_SLICE = 256
SLICE_BYTES = 65_536
#: Sealed batches that may wait for the disk before producers stop encoding more and step aside.
MAX_SEALED = 4
#: How long a producer steps aside, in seconds.
PAUSE_S = 0.001

_Row = SpanRecord | MarkRecord | SnapshotRecord


class Sealed(msgspec.Struct):
    """A batch ready for the disk: its pieces in order, and what is in it."""

    batch_id: str
    created_ns: int
    chunks: list[bytes | memoryview]
    rows: int
    size: int


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
        #: Rows of window roots, which are not part of the canonical tree.
        self.windows: deque[SpanRecord] = deque()
        self.sealed: deque[Sealed] = deque()
        #: Told of the spans that were encoded.
        self.sinks: Sequence[Callable[[list[SpanRecord]], None]] = ()
        self.producer_assists = 0
        self.disk_refuses = False
        #: Told when something was sealed outside the flush thread.
        self.wake: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._last_created = 0
        #: Bytes of a row in the last slice of its kind.
        self._row_bytes = {"spans": 1, "marks": 1, "snapshots": 1}
        self._reset()

    def _reset(self) -> None:
        # Pieces of JSON with the commas between them, so that sealing is copying three lists.
        self._chunks: dict[str, list[bytes]] = {"spans": [], "marks": [], "snapshots": []}
        self._size = 0
        self._rows = 0

    @property
    def queued(self) -> int:
        """Rows waiting to be encoded."""
        return len(self.spans) + len(self.marks) + len(self.snapshots)

    def forget(self) -> None:
        """Drop everything: after a fork the rows are the parent's to write."""
        self._lock = threading.Lock()
        for queue in (
            self.spans,
            self.marks,
            self.snapshots,
            self.windows,
            self.sealed,
        ):
            queue.clear()
        self._reset()

    # --- producers -------------------------------------------------------------------------------

    def relieve(self) -> None:
        """Called by producers every 64 rows: help if the flush thread is behind.

        Waits for nothing but, past :data:`ASSIST_ROWS` with :data:`MAX_SEALED` batches unwritten,
        the :data:`PAUSE_S` it gives away.
        """
        if len(self.spans) + len(self.marks) <= ASSIST_ROWS:
            return
        if not self.envelope or self.disk_refuses or len(self.sealed) >= MAX_SEALED:
            self.wake()
            if self.disk_refuses:
                if self.queued > MAX_ROWS and self._lock.acquire(blocking=False):
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

    def _drop_oldest(self) -> None:
        """Make room while the disk refuses: oldest point marks first, then spans."""
        room = MAX_ROWS // 16
        oldest = list(islice(self.marks, room * 4))
        points = sum(mark.kind == "point" for mark in oldest)
        if points:
            kept = [mark for mark in oldest if mark.kind != "point"]
            for _ in oldest:
                self.marks.popleft()
            self.marks.extendleft(reversed(kept))
            self._guard.lost("disk_full_marks", points)
        else:
            gone = min(room, len(self.spans))
            for _ in range(gone):
                self.spans.popleft()
            self._guard.lost("disk_full_spans", gone)

    # --- flush thread --------------------------------------------------------------------------

    def slices(self) -> Callable[[], bool]:
        """A function that encodes one slice per call, until what is queued *now* is encoded.

        It returns False when there is no more to do. Rows that arrive meanwhile are left for the
        next flush, so a flush ends however fast the producers are.
        """
        left = {
            "marks": len(self.marks),
            "spans": len(self.spans),
            "snapshots": len(self.snapshots),
        }

        def step() -> bool:
            for name, more in left.items():
                queue = getattr(self, name)
                if more > 0 and queue:
                    with self._lock:
                        left[name] -= self._encode_slice(name, queue, SLICE_ROWS)
                        if self._full():
                            self._seal({})
                    return True
            return False

        return step

    def seal(self, open_rows: list[SpanRecord] | None) -> None:
        """Seal what has been encoded, with the rows of the scopes that are open (None: as before).

        Never raises for what a row holds: an open row that cannot be written would otherwise
        keep every later batch from the disk.
        """
        extra: dict[str, bytes] = {}
        if open_rows is not None:
            extra["open"] = self._encoded_list(open_rows)
            if len(extra["open"]) > _CHUNK_BYTES:
                extra["open"] = self._encoded_list([_bare(row) for row in open_rows])
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
        return bool(self.sealed) or self.queued > SEAL_ROWS // 4

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
        chunk = _encoded(rows)
        if chunk is None:
            chunk = b",".join(filter(None, map(self._encoded_alone, rows)))
        return chunk

    def _full(self) -> bool:
        return self._size >= SEAL_BYTES or self._rows >= SEAL_ROWS

    def _encode_slice(self, name: str, queue: deque[Any], most: int) -> int:
        most = max(1, min(most, SLICE_BYTES * most // (self._row_bytes[name] * SLICE_ROWS)))
        rows: list[_Row] = []
        # Not a loop of ours: the other threads wait for the interpreter meanwhile.
        with contextlib.suppress(IndexError):  # the queue has run empty
            rows.extend(starmap(queue.popleft, repeat((), most)))
        if not rows:
            return most
        if name == "spans":
            for sink in self.sinks:
                self._tell(sink, rows)
        chunk = _encoded(rows)
        if chunk is not None:
            self._row_bytes[name] = max(1, len(chunk) // len(rows))
            self._add(name, chunk, len(rows))
        else:
            self._row_bytes[name] = _CHUNK_BYTES // len(rows)
            for row in rows:
                chunk = self._encoded_alone(row)
                if chunk:
                    self._add(name, chunk, 1)
        return len(rows)

    def _tell(self, sink: Callable[[Any], None], rows: list[_Row]) -> None:
        try:
            sink(rows)
        except Exception as error:  # noqa: BLE001 - a closed stdout must not stop the spool
            self._guard.repeat_warning("sink", f"a span line could not be written: {error!r}")

    def _encoded_alone(self, row: _Row) -> bytes:
        """A row that JSON or the size of a batch refuses: cleaned and cut, only then given up."""
        try:
            return _encoded([row]) or encode_rows([_fitting(_cleaned(row))])
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not suffer
            self._guard.lost("not_encodable")
            self._guard.swallow("encode", error)
            return b""

    def _add(self, name: str, chunk: bytes, rows: int) -> None:
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
        batch_id = ids.new_row_id()
        head = {
            "schema_version": SCHEMA_VERSION,
            "sdk_version": self._sdk_version,
            "batch_id": batch_id,
            "created_ns": created,
        }
        chunks: list[bytes | memoryview] = [msgspec.json.encode(head)[:-1]]
        for name, pieces in self._chunks.items():
            chunks.append(f',"{name}":['.encode())
            chunks.extend(pieces)
            chunks.append(b"]")
        chunks.extend(b',"%b":[%b]' % (name.encode(), rows) for name, rows in extra.items())
        chunks.append(b"," + encode_rows([self.envelope])[1:] if self.envelope else b"}")
        size = sum(map(len, chunks))
        self.sealed.append(Sealed(batch_id, created, chunks, self._rows, size))
        self._reset()


def _bare(row: SpanRecord) -> SpanRecord:
    """An open row that only says what is open: all come in one batch, however many and large.

    The closed row has the rest.
    """
    attrs = {ATTRIBUTES_LEFT_OUT: len(row.attrs)} if row.attrs else {}
    otel = row.otel
    if otel is not UNSET and otel.events is not UNSET:
        otel = _fewer_events(otel, 0)
    return msgspec.structs.replace(row, attrs=attrs, attrs_truncated=UNSET, mark_ids=(), otel=otel)


def _encoded(rows: Sequence[_Row]) -> bytes | None:
    """Rows as they are; None if one of them has to be cleaned or cut first."""
    try:
        chunk = encode_rows(rows)
    except (ValueError, TypeError, OverflowError, RecursionError, msgspec.MsgspecError):
        return None
    if len(chunk) > _CHUNK_BYTES:
        return None
    # One character is looked for many times faster than six, and most rows have no backslash.
    return None if _BACKSLASH in chunk and _NUL in chunk else chunk


def _cleaned(row: _Row) -> _Row:
    """The row with text and numbers that every store can keep."""
    if isinstance(row, SpanRecord):
        row = msgspec.structs.replace(row, attrs=attributes(row.attrs)[0], name=_name(row.name))
    elif isinstance(row, MarkRecord):
        row = msgspec.structs.replace(row, attrs=attributes(row.attrs)[0], name=_name(row.name))
        if isinstance(row.value, str):
            row.value = clean_text(row.value)
    return row


def _name(name: str) -> str:
    return cut_text(clean_text(str(name)), MAX_NAME_BYTES)


def _fitting(row: _Row) -> _Row:
    """The row, its largest attributes and oldest events left out until it fits a batch."""
    if isinstance(row, SnapshotRecord) or len(encode_rows([row])) <= _CHUNK_BYTES:
        return row
    sizes = {key: len(encode_rows([value])) for key, value in row.attrs.items()}
    otel = row.otel if isinstance(row, SpanRecord) else UNSET
    room = _CHUNK_BYTES // (2 if otel is not UNSET and otel.events else 1) - 100_000
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


def envelope(
    resource: dict[str, Any], scope: dict[str, Any], writer: str
) -> dict[str, Sequence[object] | Any]:
    """The keys every batch of one process bears."""
    return {"resource": attributes(resource)[0], "scope": scope, "writer": writer}
