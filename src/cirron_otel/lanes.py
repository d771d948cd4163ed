"""The queue of a destination in a directory: which batch is next, and how much waits.

Nothing is moved or copied: the queue is the listing of the spool without what the cursor has
settled. The listing is shared by all destinations and made again only when the directory has
changed, and not so often that it costs more than a fiftieth of the time.
"""

from __future__ import annotations

import contextlib
import heapq
import os
import threading
import time
from collections.abc import Container
from pathlib import Path

from cirron_otel.cursors import Cursor, CursorReader, Outcome
from cirron_otel.spool import created_ns_of, is_batch_name

#: The directory is listed this often even where its time of change says that nothing happened.
_RELIST_S = 30.0
#: A listing that took 1 ms is repeated after 50 ms at the earliest.
_PAUSE_PER_LISTING = 50.0
#: A directory's time of change is no finer than this: a later change may bear the same time.
_MTIME_GRAIN_NS = 100_000_000


class Listing:
    """The batch files of one output directory, with their sizes. Safe from any thread."""

    def __init__(self, root: Path) -> None:
        """Touch no file."""
        self.root = root
        self.directory = root / "spool"
        self.sizes: dict[str, int] = {}
        #: Counts the listings, so that a lane knows whether it has seen this one.
        self.edition = 0
        self._lock = threading.Lock()
        self._listed = 0.0
        self._not_before = 0.0
        self._mtime_ns = -1

    def refresh(self, *, force: bool = False) -> None:
        """List the directory again where that may show something new. Never raises.

        ``force`` lists it in any case, and waits for another thread that is at it.
        """
        if not self._lock.acquire(blocking=force):
            return
        try:
            now = time.monotonic()
            if force or (now >= self._not_before and self._may_have_changed(now)):
                self._list(now)
        except OSError:
            pass  # what cannot be listed now is listed next time
        finally:
            self._lock.release()

    def _may_have_changed(self, now: float) -> bool:
        if self.edition == 0 or now - self._listed >= _RELIST_S:
            return True
        return self.directory.stat().st_mtime_ns != self._mtime_ns

    def _list(self, now: float) -> None:
        try:
            mtime_ns = self.directory.stat().st_mtime_ns
            names = [name for name in os.listdir(self.directory) if is_batch_name(name)]  # noqa: PTH208 - a Path for each of 100,000 is dear
        except FileNotFoundError:
            mtime_ns, names = -1, []
        known = self.sizes
        sizes: dict[str, int] = {}
        prefix = str(self.directory) + os.sep
        for name in names:
            size = known.get(name)
            if size is None:
                with contextlib.suppress(OSError):
                    sizes[name] = os.stat(prefix + name).st_size  # noqa: PTH116 - as above
            else:
                sizes[name] = size
        self.sizes = sizes
        self.edition += 1
        settled_long_ago = time.time_ns() - mtime_ns > _MTIME_GRAIN_NS
        self._mtime_ns = mtime_ns if settled_long_ago else -1
        self._listed = time.monotonic()
        self._not_before = self._listed + (self._listed - now) * _PAUSE_PER_LISTING

    def after_fork(self) -> None:
        """In a forked child: the lock may have been held."""
        self._lock = threading.Lock()


class Lane:
    """What one destination still lacks of one directory. For one thread; counts may be read by all.

    ``batches`` and ``bytes`` say how much waits, ``gone`` how many files vanished (evicted,
    cleared) before they were delivered.
    """

    def __init__(self, listing: Listing, name: str) -> None:
        """Touch no file."""
        self.listing = listing
        self.name = name
        self.cursor = Cursor(listing.root, name)
        self.batches = 0
        self.bytes = 0
        self.gone = 0
        self._reader = CursorReader(listing.root, name)
        self._queue: list[str] = []
        self._queued: dict[str, int] = {}
        #: Batches that wait for a better time: (monotonic time, name).
        self._deferred: list[tuple[float, str]] = []
        self._edition = -1

    def take(self) -> bool:
        """Whether this lane drains; see :meth:`cirron_otel.cursors.Cursor.take`."""
        if self.cursor.held:
            return True
        if not self.cursor.take():
            return False
        self._forget_queue()
        return True

    def update(self, sending: str | None = None) -> None:
        """Queue what the listing shows and the cursor has not settled; pass over what has gone.

        ``sending`` is a batch that is in memory: it is delivered though its file may have gone.
        """
        listing = self.listing
        edition, sizes = listing.edition, listing.sizes
        if edition == self._edition or not self.cursor.held:
            return
        self._edition = edition
        self.cursor.forget(sizes)
        settled, queued = self.cursor.settled, self._queued
        fresh = [name for name in sizes if name not in settled and name not in queued]
        for name in fresh:
            queued[name] = sizes[name]
            heapq.heappush(self._queue, name)
        self.bytes += sum(sizes[name] for name in fresh)
        self._pass_over({name for name in queued if name not in sizes} - {sending})
        self.batches = len(queued)

    def first(self, *, hurry: bool = False) -> str | None:
        """The oldest batch whose time has come; ``hurry`` waits for no better time."""
        now = time.monotonic()
        while self._deferred and (hurry or self._deferred[0][0] <= now):
            heapq.heappush(self._queue, heapq.heappop(self._deferred)[1])
        return self._queue[0] if self._queue else None

    @property
    def ready(self) -> int:
        """How many batches wait for nothing but their turn."""
        return len(self._queue)

    def size_of(self, name: str) -> int:
        """The bytes of a batch of the queue."""
        return self._queued.get(name, 0)

    def defer(self, name: str, seconds: float) -> None:
        """Let the others go before this batch of the queue, for so long."""
        self._unqueue(name)
        heapq.heappush(self._deferred, (time.monotonic() + seconds, name))

    def settle(self, name: str, outcome: Outcome) -> bool:
        """This batch of the queue need not be sent again; False where that cannot be noted yet."""
        noted = self.cursor.settle(name, outcome)
        self._remove(name)
        return noted

    def _pass_over(self, gone: set[str]) -> None:
        if not gone:
            return
        self.gone += len(gone)
        self.bytes -= sum(self._queued.pop(name) for name in gone)
        self._queue = [name for name in self._queue if name not in gone]
        heapq.heapify(self._queue)
        self._deferred = [one for one in self._deferred if one[1] not in gone]
        heapq.heapify(self._deferred)

    def vanished(self, name: str) -> None:
        """The file of this batch of the queue is no more."""
        self.gone += 1
        self._remove(name)

    def _remove(self, name: str) -> None:
        self._unqueue(name)
        self.bytes -= self._queued.pop(name, 0)
        self.batches = len(self._queued)

    def _unqueue(self, name: str) -> None:
        if self._queue and self._queue[0] == name:
            heapq.heappop(self._queue)
        else:  # an older one came meanwhile
            self._queue.remove(name)
            heapq.heapify(self._queue)

    def oldest_ns(self) -> int | None:
        """When the oldest batch that waits was made; None where none waits. From any thread."""
        oldest = [*self._queue[:1], *(name for _, name in self._deferred[:])]
        return created_ns_of(Path(min(oldest))) if oldest else None

    def unsettled(self) -> int:
        """How many files of the last listing are not settled, by whomever. From any thread."""
        settled: Container[str] = self.cursor.settled
        if not self.cursor.held:
            reader = CursorReader(self.listing.root, self.name)
            reader.refresh()
            settled = reader.settled
        return sum(name not in settled for name in self.listing.sizes)

    def left_to_others(self) -> int:
        """How many batches the process that drains this lane has not settled yet."""
        self._reader.refresh()
        return len(self.listing.sizes.keys() - self._reader.settled)

    def release(self) -> None:
        """Let somebody else drain."""
        self.cursor.release()
        self._edition = -1

    def _forget_queue(self) -> None:
        self._queue, self._queued, self._deferred = [], {}, []
        self.batches = self.bytes = 0
        self._edition = -1
