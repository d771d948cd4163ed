"""From queued rows to sealed batches, a small slice at a time.

Producers append finished rows (structs the garbage collector never sees) to a queue: no JSON, no
I/O, no lock. The flush thread takes them off in slices short enough that a training loop waiting
for the interpreter does not notice, encodes each, and seals a batch when it is large enough.

**Back-pressure.** When more than :data:`ASSIST_ROWS` rows are queued, the producing thread itself
encodes one bounded slice every time it draws new ids (every 64 rows); counted as
``producer_assists``. Rows are dropped only while the disk refuses to take batches: the oldest
point marks first, then the oldest spans, each counted.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import msgspec

from cirron_otel import ids
from cirron_otel._guard import Guard
from cirron_otel.batch import (
    SCHEMA_VERSION,
    MarkRecord,
    SnapshotRecord,
    SpanRecord,
    encode_rows,
)
from cirron_otel.clock import Clock
from cirron_otel.values import attributes, clean_text

#: Rows queued before producers help.
ASSIST_ROWS = 65_536
#: Rows kept in memory while the disk refuses.
MAX_ROWS = 2 * ASSIST_ROWS
#: A batch is sealed before its rows pass this size, so that no file reaches 4 MB.
SEAL_BYTES = 3_000_000
SEAL_ROWS = 20_000
#: Rows encoded at a time on the flush thread, and by an assisting producer.
SLICE_ROWS = 64
ASSIST_SLICE = 256
#: Sealed batches that may wait for the disk before producers stop encoding more.
MAX_SEALED = 8

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
        self.producer_assists = 0
        self.disk_refuses = False
        #: Told when something was sealed outside the flush thread.
        self.wake: Callable[[], object] = lambda: None
        self._lock = threading.Lock()
        self._last_created = 0
        self._reset()

    def _reset(self) -> None:
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
        for queue in (self.spans, self.marks, self.snapshots, self.windows, self.sealed):
            queue.clear()
        self._reset()

    # --- producers -------------------------------------------------------------------------------

    def relieve(self) -> None:
        """Called by producers every 64 rows: help if the flush thread is behind. Never waits."""
        if len(self.spans) + len(self.marks) <= ASSIST_ROWS:
            return
        if self.disk_refuses or len(self.sealed) >= MAX_SEALED:
            self.wake()
            if self.queued > MAX_ROWS and self.disk_refuses:
                self._drop_oldest()
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
            for name in left:
                queue = getattr(self, name)
                if left[name] > 0 and queue:
                    with self._lock:
                        left[name] -= self._encode_slice(name, queue, SLICE_ROWS)
                        if self._full():
                            self._seal({})
                    return True
            return False

        return step

    def seal(self, extra: dict[str, Any]) -> None:
        """Seal what has been encoded, with ``extra`` keys on the batch (``open``, ``windows``)."""
        windows = [self.windows.popleft() for _ in range(len(self.windows))]
        if windows:
            extra = {**extra, "windows": windows}
        with self._lock:
            if self._rows or extra:
                self._seal(extra)

    def _full(self) -> bool:
        return self._size >= SEAL_BYTES or self._rows >= SEAL_ROWS

    def _encode_slice(self, name: str, queue: deque[Any], most: int) -> int:
        rows: list[_Row] = []
        try:
            for _ in range(most):
                rows.append(queue.popleft())  # noqa: PERF401 - the queue may run empty
        except IndexError:
            pass
        if not rows:
            return most
        try:
            self._add(name, encode_rows(rows), len(rows))
        except (ValueError, TypeError, OverflowError, msgspec.MsgspecError):
            for row in rows:
                self._encode_odd(name, row)
        return len(rows)

    def _encode_odd(self, name: str, row: _Row) -> None:
        """A row that JSON refuses: cleaned as text, and only then given up."""
        try:
            self._add(name, encode_rows([_cleaned(row)]), 1)
        except Exception as error:  # noqa: BLE001 - whatever it is, the others must not suffer
            self._guard.lost("not_encodable")
            self._guard.swallow("encode", error)

    def _add(self, name: str, chunk: bytes, rows: int) -> None:
        if self._size + len(chunk) > SEAL_BYTES + 500_000 and self._rows:
            self._seal({})
        self._chunks[name].append(chunk)
        self._size += len(chunk)
        self._rows += rows

    def _seal(self, extra: dict[str, Any]) -> None:
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
            for position, piece in enumerate(pieces):
                if position:
                    chunks.append(b",")
                chunks.append(piece)
            chunks.append(b"]")
        tail = {**self.envelope, **extra}
        chunks.append(b"," + encode_rows([tail])[1:] if tail else b"}")
        size = sum(map(len, chunks))
        self.sealed.append(Sealed(batch_id, created, chunks, self._rows, size))
        self._reset()


def _cleaned(row: _Row) -> _Row:
    if isinstance(row, SpanRecord):
        row.attrs = attributes(row.attrs)[0]
        row.name = clean_text(str(row.name))
    elif isinstance(row, MarkRecord):
        row.attrs = attributes(row.attrs)[0]
        row.name = clean_text(str(row.name))
        if isinstance(row.value, str):
            row.value = clean_text(row.value)
    return row


def envelope(
    resource: dict[str, Any], scope: dict[str, Any], writer: str
) -> dict[str, Sequence[object] | Any]:
    """The keys every batch of one process bears."""
    return {"resource": attributes(resource)[0], "scope": scope, "writer": writer}
