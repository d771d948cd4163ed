"""The rows of scopes that have ended, decoded once for everything that looks at a run.

Rows become text where they are made; the batcher leaves each piece of that text here, and the flush
thread makes rows of it: of the few fields that anybody asks for, a bounded number at a time, as the
threads of the program wait for the interpreter meanwhile.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Final

import msgspec

if TYPE_CHECKING:
    from cirron_otel._guard import Guard

#: Bytes that are decoded in one go: some hundred rows, a fraction of a millisecond.
MOST_BYTES: Final = 32_768
#: How a row begins, behind the one before. In no text: there a quotation mark has a backslash.
_BETWEEN: Final = b'},{"id":"'
_ROW: Final = re.compile(rb'\},\{"id":"[0-9a-f]{32}","name":')


class Row(msgspec.Struct, gc=False):
    """As much of a span's row as anybody here asks for. Times in ns since the Unix epoch."""

    id: str
    name: str
    start_ns: int
    end_ns: int | None = None
    parent_id: str | None = None
    thread_id: int | None = None
    gpu_ns: int | None = None
    iteration: int | None = None
    index: int | None = None


_decoder = msgspec.json.Decoder(list[Row])
#: Takes rows, children before their parents.
Consumer = Callable[[Sequence[Row]], object]


def rows_of(piece: bytes) -> Sequence[Row]:
    """The rows in a part of a batch: JSON objects with commas between them; none if it is none."""
    try:
        return _decoder.decode(b"[%b]" % piece)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ()


def parts(rest: bytes) -> Iterator[bytes]:
    """A piece of a batch in parts of about :data:`MOST_BYTES`, each of whole rows."""
    start = 0
    while len(rest) - start > MOST_BYTES:
        end = rest.rfind(_BETWEEN, start, start + MOST_BYTES)
        while end >= 0 and _ROW.match(rest, end) is None:  # something of the program's own
            end = rest.rfind(_BETWEEN, start, end)
        if end < 0:  # one row that is larger
            found = _ROW.search(rest, start + MOST_BYTES)
            if found is None:
                break
            end = found.start()
        yield rest[start : end + 1]
        start = end + 2
    yield rest[start:]


class RowFeed:
    """Gives every row to one consumer at once, and to the others on the flush thread.

    The first one, which keeps the account that a session ends with, may be asked for on another
    thread: the one that ends the session. Nobody is given a row twice.
    """

    def __init__(
        self,
        guard: Guard,
        first: Consumer,
        *,
        lock: AbstractContextManager[object],
        matters: Callable[[bytes], bool],
        pause: Callable[[], object],
    ) -> None:
        #: Pieces of text as they went into batches; any thread appends.
        self.seen: deque[Any] = deque()
        self.consumers: list[Consumer] = []
        #: Whether pieces without a scope that anybody charges are decoded, too.
        self.wants_all = False
        self._guard = guard
        self._first = first
        self._matters = matters
        #: Lets the other threads go first.
        self._pause = pause
        #: Held while the first one works; reentrant.
        self._lock = lock
        #: What the first one had while nobody was there to give it to the others.
        self._late: deque[Sequence[Row]] = deque()

    def take(self) -> None:
        """Give out what has come, with a pause between the parts. Flush thread."""
        while self._next():
            self._share()
            self._pause()
        self._share()

    def take_now(self, pieces: Sequence[Any] = ()) -> None:
        """Give the first one what has come, and these pieces, without a pause. Any thread."""
        self.seen.extend(pieces)
        while self._next():
            pass

    def _next(self) -> bool:
        """Decode one part; whether there was any."""
        with self._lock:
            try:
                piece = self.seen.popleft()
            except IndexError:
                return False
            if not isinstance(piece, bytes):
                piece = bytes(piece)
            if len(piece) > MOST_BYTES:
                several = list(parts(piece))
                if len(several) > 1:
                    self.seen.extendleft(reversed(several))
                    return True
            rows = rows_of(piece) if self.wants_all or self._matters(piece) else ()
            if rows:
                self._give(self._first, rows)
                if self.consumers:
                    self._late.append(rows)
            return True

    def _share(self) -> None:
        while self._late:
            try:
                rows = self._late.popleft()
            except IndexError:
                return
            for consumer in self.consumers:
                self._give(consumer, rows)

    def _give(self, consumer: Consumer, rows: Sequence[Row]) -> None:
        try:
            consumer(rows)
        except Exception as error:  # noqa: BLE001 - one that fails must not keep rows from others
            self._guard.swallow("rows", error)
