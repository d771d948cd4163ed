"""What the flush thread does: rows in, files out, and nothing else.

It touches no network and holds no lock over I/O. Values that lie on a device are waited for here,
each by its own event, never by stopping the device.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from msgspec import UNSET

from cirron_otel import identity, run_state, semconv
from cirron_otel.batch import MarkRecord, SpanRecord
from cirron_otel.batching import Batcher, Sealed, envelope
from cirron_otel.core import RowBuffer
from cirron_otel.errors import SpoolError
from cirron_otel.flush_thread import THREAD_NAME, FlushThread
from cirron_otel.heartbeats import Heartbeats
from cirron_otel.recovery import WriterLock, recover
from cirron_otel.sinks.lines import sinks
from cirron_otel.spool import Spool
from cirron_otel.values import Deferred, MarkValue, mark_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

#: How long the flush thread steps back between two slices, so that a waiting thread goes first.
_YIELD_S = 0.0001


class BatchWatcher(Protocol):
    """Who looks at what this process has recorded, from its rows. On the flush thread."""

    def written(self, batch: Sealed) -> None:
        """A batch is on disk, or would be if files were kept."""

    def flushed(self) -> None:
        """A flush is over: what had ended before it has been shown."""


class SpoolWriter:
    """The queues, the thread and the directory of one recorder."""

    def __init__(self, rec: Recorder) -> None:
        settings = rec.settings
        self._rec = rec
        self._guard = rec.guard
        self.spool = Spool(Path(settings.output_dir).absolute(), max_bytes=settings.spool_max_bytes)
        self.flushes = FlushThread(settings.flush_interval, self._flush, rec.guard)
        self.batcher = Batcher(rec.clock, rec.guard, {}, rec.sdk_version)
        self.batcher.wake = self.flushes.ring
        self.batcher.sinks = sinks(settings.output, THREAD_NAME)
        if RowBuffer is not None and not self.batcher.sinks:  # those want rows, not text
            self.batcher.take_text(RowBuffer)
        self._keeps_files = "spool" in settings.output
        self.run_state = run_state.RunState.none()
        self._marks: deque[tuple[MarkRecord, Deferred]] = deque()
        self._spans: deque[tuple[SpanRecord, Deferred]] = deque()
        self._announced: tuple[str, ...] = ()
        self._heartbeats = Heartbeats(rec)
        self._lock: WriterLock | None = None
        self._prepared = False
        #: Who looks at the batches that were written; on the flush thread.
        self.watchers: list[BatchWatcher] = []
        #: The process is ending: no more stepping back between slices.
        self.ending = False

    # --- producers -------------------------------------------------------------------------------

    def defer_mark(self, row: MarkRecord, value: Deferred) -> None:
        """Write a mark once its value has come from the device."""
        self._marks.append((row, value))

    def defer_span(self, row: SpanRecord, device_time: Deferred) -> None:
        """Write a span once its ``gpu_ns`` is known."""
        self._spans.append((row, device_time))

    @property
    def deferred(self) -> int:
        """Rows that wait for a device."""
        return len(self._marks) + len(self._spans)

    # --- the process's name ----------------------------------------------------------------------

    def prepare(self) -> None:
        """Once per process: take the writer lock and name the batches. May touch the disk."""
        if self._prepared:
            return
        self._prepared = True
        rec = self._rec
        start_ns = rec.clock.now()
        host = identity.host_name()
        if self._keeps_files:
            details = {"flush_interval": rec.settings.flush_interval, "run_id": rec.run_id}
            try:
                self._lock = WriterLock.acquire(
                    self.spool.run_directory, host=host, pid=rec.pid, start_ns=start_ns,
                    details=details,
                )  # fmt: skip
            except SpoolError as error:
                self._guard.repeat_warning("lock", str(error))
        writer = f"{host}-{rec.pid}-{start_ns}" if self._lock is None else self._lock.name
        if self._lock is not None and self._lock.held and rec.settings.world_size > 1:
            self.run_state.holds(writer)
        resource = {
            **rec.resource.attributes,
            semconv.RUN_ATTEMPT: self.run_state.attempt,
            semconv.PROCESS_PID: rec.pid,
        }
        if rec.session is not None:
            resource[semconv.SESSION_ID] = rec.session.id
        scope = {"name": semconv.INSTRUMENTATION_NAME, "version": rec.sdk_version}
        self.batcher.envelope = envelope(resource, scope, writer)

    def _recover(self) -> None:
        """Once per session: close what dead processes left open."""
        if not self._rec.recovers or not self._keeps_files:
            return
        self._rec.recovers = False
        try:
            recover(self.spool, sdk_version=self._rec.sdk_version)
        except Exception as error:  # noqa: BLE001 - an old run's trouble is not this run's
            self._guard.swallow("recover", error)

    def release(self) -> None:
        """Give up the writer lock: this process writes no more."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def after_fork(self) -> None:
        """In a forked child: the parent's rows and lock stay the parent's."""
        if self._lock is not None:
            self._lock.close_in_child()
            self._lock = None
        self._marks.clear()
        self._spans.clear()
        self.watchers = []
        self._announced = ()
        self._prepared = False
        self.batcher.forget()
        self.flushes.reset()
        self.run_state = run_state.RunState.none(self.run_state.attempt)

    # --- the flush thread ------------------------------------------------------------------------

    def _flush(self) -> None:
        """One flush; on the flush thread, or where there is none on the caller's."""
        rec = self._rec
        self.prepare()
        self._recover()
        rec.clock.resync()
        last = rec.say_last_words()
        if rec.run is not None:
            rec.run.tick()
        self.resolve(wait_s=0.0)
        # The open scopes are taken before the rows: what ends in between is then in both, and a
        # reader lets the closed row win. The other way round it could be in neither.
        scopes = list(rec.open.values())
        self._tell(self._heartbeats.tick, scopes)
        if self.batcher.disk_refuses:
            self._write()
        if self.batcher.disk_refuses:
            return
        open_rows: list[SpanRecord] | None = None
        names = tuple(scope.id for scope in scopes)
        if names != self._announced:
            open_rows = [row for scope in scopes if (row := _open_row(scope)) is not None]
            self.step_back()
        if open_rows is not None and self.batcher.is_large:
            # Several batches will be written: the parents are announced before their children.
            self.batcher.announce(open_rows)
            if self._write():
                self._announced, open_rows = names, None
        self._encode()
        self.step_back()
        self.batcher.seal(open_rows)
        if self._write():
            self._announced = names
        self._flush_is_over()
        if last:
            self.release()

    def _flush_is_over(self) -> None:
        loops = self._rec.loops
        if self._keeps_files:
            outcome = getattr(self._rec.run, "outcome", None)
            self.run_state.save(
                loops.iteration if loops is not None else 0,
                "" if outcome is None else str(outcome.word),
            )
        for watcher in self.watchers:
            self._tell(watcher.flushed)

    def _encode(self) -> None:
        """Encode what is queued now, a slice at a time; write what is full meanwhile."""
        encode_slice = self.batcher.slices()
        while (encoded := encode_slice()) is not None:
            if encoded:
                self.step_back()
            if len(self.batcher.sealed) > 1:
                self._write()

    def step_back(self) -> None:
        """Let the other threads go first: what runs here in one go is what they wait for."""
        if not self.ending and not self.flushes.waited_for:
            time.sleep(_YIELD_S)

    def _write(self) -> bool:
        sealed = self.batcher.sealed
        while sealed:
            first: Sealed = sealed[0]
            try:
                if self._keeps_files:
                    self.spool.write(
                        first.chunks, created_ns=first.created_ns, batch_id=first.batch_id
                    )
            except SpoolError as error:
                self.batcher.disk_refuses = True
                self._guard.swallowed["spool_write"] += 1
                self._guard.repeat_warning(
                    "spool_write", f"{error}; rows are kept in memory and written later"
                )
                return False
            self.batcher.disk_refuses = False
            sealed.popleft()
            for watcher in self.watchers:
                self._tell(watcher.written, first)
        return True

    def _tell(self, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - who only looks must not stop the spool
            self._guard.swallow("watcher", error)

    def resolve(self, *, wait_s: float) -> None:
        """Queue the rows whose device values have come; wait for the others at most ``wait_s``."""
        deadline = time.monotonic() + wait_s
        queues: tuple[deque[tuple[Any, Deferred]], ...] = (self._marks, self._spans)
        for queue in queues:
            for _ in range(len(queue)):
                try:
                    row, value = queue.popleft()
                except IndexError:
                    break  # the other one who resolves, at the end of the process, took it
                try:
                    while not value.ready() and time.monotonic() < deadline:
                        time.sleep(0.001)
                    if value.ready():
                        self._resolved(row, value.resolve())
                    elif wait_s:
                        self._guard.lost("device_not_ready")
                        self._resolved(row, None)
                    else:
                        queue.append((row, value))
                except Exception as error:  # noqa: BLE001 - a foreign library's read
                    self._guard.lost("device_read_failed")
                    self._guard.repeat_warning(
                        "deferred", f"a value on a device could not be read: {error!r}"
                    )
                    self._resolved(row, None)

    def _resolved(self, row: MarkRecord | SpanRecord, value: object) -> None:
        if isinstance(row, SpanRecord):
            row.gpu_ns = value if isinstance(value, int) else None
            self.batcher.way_in("spans")[0](row)
        elif value is not None:
            made = mark_value(value)
            if isinstance(made, MarkValue):
                row.value_type, row.value = made.value_type, made.value
                row.value_nonfinite = made.nonfinite or UNSET
                self.batcher.way_in("marks")[0](row)


def _open_row(scope: BaseScope) -> SpanRecord | None:
    try:
        return scope.row()
    except Exception:  # noqa: BLE001 - whatever a user has put into it
        return None  # it is being opened or changed at this moment; the next flush has it
