"""The recorder of a process: provider, queues, flush thread and session, from start to shutdown.

One exists at a time (:data:`_current`, the only module-level mutable state of the package). In a
forked child the same object lives on with its parts reset: see :meth:`Recorder.after_fork`.
"""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import UNSET
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from cirron_otel import ids, run_state, semconv
from cirron_otel._guard import Guard
from cirron_otel.batch import ROOT_SPAN_ID, MarkRecord, SpanRecord
from cirron_otel.batching import MAX_NAME_BYTES, Batcher, Sealed, envelope
from cirron_otel.clock import Clock
from cirron_otel.context import get_current
from cirron_otel.errors import SpoolError
from cirron_otel.flush_thread import FlushThread
from cirron_otel.joined import JoinedSpans
from cirron_otel.process_usage import ProcessUsage
from cirron_otel.provider import OwnSpans
from cirron_otel.recovery import WriterLock, recover
from cirron_otel.scope_base import (
    ENDED,
    INHERITED,
    NO_ATTRS,
    OPEN,
    BaseScope,
    RemoteScope,
    Trace,
    current_scope,
)
from cirron_otel.spool import Spool
from cirron_otel.values import (
    Deferred,
    MarkValue,
    UnsupportedValueError,
    attributes,
    clean_text,
    cut_text,
    mark_value,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron_otel.settings import Settings

#: The recorder of this process, or None.
_current: Recorder | None = None



class EarlyMarks:
    """The last marks made while nothing records; ``profile()`` takes them over."""

    def __init__(self) -> None:
        self._kept: deque[tuple[object, object, object, dict[str, Any], int]] = deque(maxlen=10_000)
        self.wanted = True

    def keep(self, name: object, value: object, kind: object, attrs: dict[str, Any]) -> None:
        """Keep one mark, unless recording was switched off."""
        if self.wanted:
            self._kept.append((name, value, kind, attrs, time.time_ns()))

    def hand_over(self, rec: Recorder) -> None:
        """Record what was kept, owned by nobody: the seed's ``"root"`` sentinel."""
        while self._kept:
            *given, ts_ns = self._kept.popleft()
            rec.mark(*given, orphan_since=ts_ns)  # type: ignore[arg-type]


early_marks = EarlyMarks()

#: What a flush, and what an orderly end of the process, may take at most.
FLUSH_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0
#: How long the flush thread steps back between two slices, so that a waiting thread goes first.
_YIELD_S = 0.0001
_ESTIMATED: dict[str, Any] = {semconv.ESTIMATED: True}


class Recorder:
    """Everything one process records. Public methods never raise and are safe from any thread."""

    def __init__(  # noqa: PLR0913 - what a recorder is made of
        self,
        settings: Settings,
        *,
        sdk_version: str,
        clock: Clock | None = None,
        guard: Guard | None = None,
        provider: object | None = None,
        carrier: Mapping[str, Any] | None = None,
    ) -> None:
        self.settings = settings
        self.sdk_version = sdk_version
        self.clock = clock or Clock()
        self.guard = guard or Guard()
        self.pid = os.getpid()
        self.rank = settings.rank
        self.open: dict[str, BaseScope] = {}
        self.session: BaseScope | None = None
        self.active = False
        #: Anything that makes scopes take the general path instead of the fast one.
        self.busy = False
        #: Whether a pass of a loop waits for its first sign of life (see loops.py).
        self.pending = False
        self.loops: Any = None
        self.resources = ProcessUsage.for_settings(settings.resources)
        self.overhead_ns = 0.0
        self.fork_parent: BaseScope | None = None
        self._span_ids: list[str] = []
        self._mark_ids: list[str] = []
        self.pop_span_id = self._span_ids.pop
        self.pop_mark_id = self._mark_ids.pop
        self._deferred: deque[tuple[MarkRecord, Deferred]] = deque()
        self._deferred_spans: deque[tuple[SpanRecord, Deferred]] = deque()
        self._announced: tuple[str, ...] = ()
        self._lock: WriterLock | None = None
        self._prepared = False
        self.run_state = run_state.RunState.none()
        self.headroom = max(1, settings.trace_max_spans // 10)
        self.spool = Spool(Path(settings.output_dir).absolute(), max_bytes=settings.spool_max_bytes)
        self.resource = Resource.create(_resource_attributes(settings, carrier))
        self.run_id = str(self.resource.attributes[semconv.RUN_ID])
        self.spans: OwnSpans | JoinedSpans = (
            JoinedSpans(self, provider)
            if isinstance(provider, SdkTracerProvider)
            else OwnSpans(self)
        )
        self.limits = self.spans.limits
        self.instrumentation_scope = InstrumentationScope(
            semconv.INSTRUMENTATION_NAME, sdk_version
        )
        self.flushes = FlushThread(settings.flush_interval, self._flush, self.guard)
        self.batcher = Batcher(self.clock, self.guard, {}, sdk_version)
        self.batcher.wake = self.flushes.ring
        self.append_span: Callable[[SpanRecord], None] = self._first_span
        self.append_mark: Callable[[MarkRecord], None] = self._first_mark
        #: Takes back what was patched for a recorder that no profiler owns (a child's).
        self.undo: Callable[[], None] | None = None
        self.is_child = carrier is not None
        self.refresh_busy()
        if carrier is not None:
            self.session = RemoteScope(self, carrier["parent"])
            self.active = True

    # --- session ---------------------------------------------------------------------------------

    def start_session(self, attrs: dict[str, Any], links: list[Any]) -> None:
        """Open the root scope on the calling thread, in a trace of its own; it becomes current."""
        self.run_state = run_state.begin(
            self.spool.run_directory, self.run_id, self.rank, self.settings.start_iteration
        )
        self.active = True
        session = self.make_scope(semconv.SESSION, None, attrs)
        session.open_root(links)
        self.session = session
        self.ensure_started()  # what is open is announced even while nothing ends

    def refresh_busy(self) -> None:
        """Whether scopes have to take the general path."""
        self.busy = bool(
            self.pending or self.resources or self.processors or not self.spans.lean
            or self.is_child
        )

    @property
    def processors(self) -> tuple[Any, ...]:
        """Foreign span processors on our own provider."""
        return self.spans.processors

    def make_scope(self, name: str, index: int | None, attrs: dict[str, Any]) -> BaseScope:
        """A scope of this recorder's kind, not opened."""
        return self.spans.scope_class(self, name, index, attrs)

    def make_loop_scope(self, name: str, index: int | None) -> BaseScope:
        """A scope that a loop opens on the user's behalf, not opened."""
        return self.spans.loop_class(self, name, index, {})

    def new_trace(self, *, limit: float | None = None) -> Trace:
        """A trace of our own, with the sampler's decision for it."""
        trace_id = ids.new_trace_id()
        return Trace(
            trace_id,
            sampled=self.spans.sampled(trace_id),
            limit=self.settings.trace_max_spans if limit is None else limit,
        )

    # --- ids -----------------------------------------------------------------------------------------

    def next_span_id(self) -> str:
        """The next span id (16 hex); draws 64 at a time and relieves the queue meanwhile."""
        try:
            return self._span_ids.pop()
        except IndexError:
            self.spans.sample_next()
            self.batcher.relieve()
            fresh = ids.span_ids()
            last = fresh.pop()
            self._span_ids.extend(fresh)
            return last

    def next_mark_id(self) -> str:
        """The next mark id (32 hex)."""
        try:
            return self._mark_ids.pop()
        except IndexError:
            self.batcher.relieve()
            fresh = ids.mark_ids()
            last = fresh.pop()
            self._mark_ids.extend(fresh)
            return last

    # --- rows ----------------------------------------------------------------------------------------

    def emit(self, scope: BaseScope) -> None:
        """Queue the row of an ended scope."""
        extra = scope.extra
        if extra is not None and extra.instrumentation is not None and self.settings.spans != "all":
            return
        row = scope.row(scope.end_ns)
        if extra is not None and extra.device_time is not None:
            self.ensure_started()
            self._deferred_spans.append((row, extra.device_time))
        else:
            self.append_span(row)

    def mark(
        self, name: object, value: object, kind: object, attrs: dict[str, Any],
        *, orphan_since: int = 0,
    ) -> None:  # fmt: skip
        """Record a mark on the current scope, whatever its value is.

        ``orphan_since``: the mark was made at that time, ns, when there was no scope.
        """
        if self.pending and not orphan_since:
            self.loops.activity()
        kind = self._checked_kind(kind)
        name = name if type(name) is str else str(name)
        try:
            made = mark_value(value)
        except UnsupportedValueError as error:
            reason = str(error)
            graph = reason == "graph_capture"
            self.guard.lost(reason if graph else "unsupported_mark_value")
            self.guard.warn(
                f"mark:{name}",
                f"mark {name!r} is not recorded: "
                + ("its stream is capturing a CUDA graph" if graph else reason),
            )
            return
        scope = None if orphan_since else current_scope(self, get_current())
        if self.is_child and (worker := self.worker_id()) is not None:
            attrs = {**attrs, semconv.WORKER_ID: worker}
        mark_id = self.next_mark_id()
        deferred = isinstance(made, Deferred)
        plain = made if isinstance(made, MarkValue) else MarkValue("float", None)
        record = MarkRecord(
            mark_id,
            scope.id if scope is not None else ROOT_SPAN_ID,
            cut_text(clean_text(name), MAX_NAME_BYTES),
            plain.value_type,
            plain.value,
            attributes(attrs)[0] if attrs else NO_ATTRS,
            orphan_since or self.clock.now(),
            str(kind),
            scope.iteration if scope is not None else UNSET,
            UNSET if plain.nonfinite is None else plain.nonfinite,
        )
        if scope is not None:
            if scope._state == OPEN:  # noqa: SLF001 - the recorder keeps scopes
                scope.note_mark(mark_id)
                scope.last_ns = max(scope.last_ns, record.ts_ns)
            scope.mark_event(record, deferred=deferred)
        if isinstance(made, Deferred):
            self.ensure_started()
            self._deferred.append((record, made))
        else:
            self.append_mark(record)

    def _checked_kind(self, kind: object) -> str:
        if kind in ("point", "summary"):
            return str(kind)
        self.guard.warn(
            "mark_kind", f"mark kind {kind!r} is neither 'point' nor 'summary'; taken as 'point'"
        )
        return "point"

    def overhead_mark(self, scope: BaseScope, now: int) -> None:
        """Say on a scope with children what recording them took, by the sampled cost of one."""
        if not self.overhead_ns:
            return
        mark_id = self.next_mark_id()
        scope.note_mark(mark_id)
        cost = min(int(scope.ops * self.overhead_ns), max(0, now - scope.start_ns))
        self.append_mark(
            MarkRecord(
                mark_id, scope.id, semconv.OVERHEAD, "int", cost,
                _ESTIMATED, now, "point", scope.iteration,
            )
        )  # fmt: skip

    def exported_attributes(self, scope: BaseScope) -> dict[str, Any]:
        """What a scope's OTel span bears beside the user's attributes."""
        out: dict[str, Any] = {semconv.RANK: self.rank, semconv.THREAD_ID: scope.thread_id}
        if self.session is not None:
            out[semconv.SESSION_ID] = self.session.id
        if scope.index is not None:
            out[semconv.INDEX] = scope.index
        if scope.iteration is not UNSET:
            out[semconv.ITERATION] = scope.iteration
        above: BaseScope | None = scope
        while above is not None and above.name != semconv.EPOCH:
            above = above.above
        if above is not None and above.index is not None:
            out[semconv.EPOCH_INDEX] = above.index
        extra = scope.extra
        if scope.above is not None and (
            scope.trace is not scope.above.trace
            or (extra is not None and extra.otel_parent is not None)
        ):
            out[semconv.PARENT_ID] = scope.above.id
        if extra is None:
            return out
        for key, value in (
            (semconv.CPU_NS, extra.cpu_ns),
            (semconv.GPU_NS, extra.gpu_ns),
            (semconv.MEMORY_PEAK_BYTES, extra.memory_peak_bytes),
            (semconv.ERROR_TYPE, extra.error_type),
        ):
            if value is not None:
                out[key] = value
        return {**out, **(extra.mark_values or {})}

    # --- window traces -----------------------------------------------------------------------------

    def open_window(self, first: BaseScope, parent: BaseScope) -> Trace:
        """A new trace for what a full one cannot take, under a root span linked to it."""
        trace = self.new_trace()
        trace.first, trace.last = first, first
        label = "steps" if first.name == semconv.STEP else f"{first.name}s"
        root = self.make_scope(f"{label}[{_ordinal(first, parent)}..]", None, {})
        root.open_window_root(trace, [parent, self.session])
        trace.root = root
        trace.child_otel = msgspec.structs.replace(trace.otel, parent_span_id=root.id[:16])
        self.ensure_started()
        self.batcher.windows.append(root.row())
        return trace

    def close_window(self, window: Trace) -> None:
        """End the root span of a window that is full, or at the end of the session."""
        root = window.root
        if root is None or not root.is_open or window.last is None:
            return
        name = root.name.removesuffix("]")
        last = window.last
        root.rename(f"{name}{_ordinal(last, last.above)}]")
        root.finish_window_root()
        self.batcher.windows.append(root.row(root.end_ns))

    def _close_windows(self, trace: Trace | None) -> None:
        while trace is not None:
            if trace.window is not None:
                self.close_window(trace.window)
            trace = trace.window

    # --- flushing --------------------------------------------------------------------------------------

    def _first_span(self, row: SpanRecord) -> None:
        self.ensure_started()
        self.append_span = self.batcher.spans.append
        self.append_span(row)

    def _first_mark(self, row: MarkRecord) -> None:
        self.ensure_started()
        self.append_mark = self.batcher.marks.append
        self.append_mark(row)

    def ensure_started(self) -> None:
        """Start the flush thread of this process, from its first open scope or row on."""
        if not self.flushes.started:
            self.flushes.ensure()
            run_state.on_process_exit(self.finalize)

    def _prepare(self) -> None:
        """Once per process, on the flush thread: take the writer lock, close the dead."""
        if self._prepared:
            return
        self._prepared = True
        start_ns = self.clock.now()
        try:
            self._lock = WriterLock.acquire(
                self.spool.run_directory, host=run_state.host_name(), pid=self.pid,
                start_ns=start_ns, details={
                    "flush_interval": self.settings.flush_interval, "run_id": self.run_id,
                },
            )  # fmt: skip
        except SpoolError as error:
            self.guard.repeat_warning("lock", str(error))
        writer = (
            self._lock.name
            if self._lock is not None
            else f"{run_state.host_name()}-{self.pid}-{start_ns}"
        )
        resource = {
            **self.resource.attributes,
            semconv.RUN_ATTEMPT: self.run_state.attempt,
            semconv.PROCESS_PID: self.pid,
        }
        if self.session is not None:
            resource[semconv.SESSION_ID] = self.session.id
        scope = {"name": semconv.INSTRUMENTATION_NAME, "version": self.sdk_version}
        self.batcher.envelope = envelope(resource, scope, writer)
        try:
            recover(self.spool, sdk_version=self.sdk_version)
        except Exception as error:  # noqa: BLE001 - an old run's trouble is not this run's
            self.guard.swallow("recover", error)

    @property
    def writer(self) -> str | None:
        """The name this process writes under, once it has begun to write."""
        return self.batcher.envelope.get("writer")

    def _flush(self) -> None:
        """One flush; on the flush thread, or where there is none on the caller's."""
        self._prepare()
        self.clock.resync()
        last = self.last_words is not None
        if last:
            self._say_last_words()
        self._resolve_deferred(wait_s=0.0)
        # The open scopes are taken before the rows: what ends in between is then in both, and a
        # reader lets the closed row win. The other way round it could be in neither.
        scopes = list(self.open.values())
        if self.batcher.disk_refuses:
            self._write()
        if self.batcher.disk_refuses:
            return
        encode_slice = self.batcher.slices()
        while encode_slice():
            if not self._ending and not self.flushes.waited_for:
                time.sleep(_YIELD_S)
            if len(self.batcher.sealed) > 1:
                self._write()
        open_rows: list[SpanRecord] | None = None
        names = tuple(scope.id for scope in scopes)
        if names != self._announced:
            open_rows = [row for scope in scopes if (row := self._open_row(scope)) is not None]
        self.batcher.seal(open_rows)
        if self._write():
            self._announced = names
        self.run_state.save(self.loops.iteration if self.loops is not None else 0)
        if last:
            self._release()

    _ending = False
    #: Set by a signal that will end the process: its name.
    last_words: str | None = None

    def _say_last_words(self) -> None:
        """The process ends by a signal as soon as this flush is done: close what is open."""
        signal_name, self.last_words = self.last_words, None
        self._ending = True
        session = self.session
        if session is not None and not self.is_child:
            session.attrs = {**session.attrs, semconv.INTERRUPTED: signal_name}
        self.close_open_scopes()

    def _open_row(self, scope: BaseScope) -> SpanRecord | None:
        try:
            return scope.row()
        except (AttributeError, RuntimeError):
            return None  # it is being opened or changed at this moment; the next flush has it

    def _write(self) -> bool:
        sealed = self.batcher.sealed
        while sealed:
            first: Sealed = sealed[0]
            try:
                self.spool.write(
                    first.chunks, created_ns=first.created_ns, batch_id=first.batch_id
                )
            except SpoolError as error:
                self.batcher.disk_refuses = True
                self.guard.swallowed["spool_write"] += 1
                self.guard.repeat_warning(
                    "spool_write", f"{error}; rows are kept in memory and written later"
                )
                return False
            self.batcher.disk_refuses = False
            sealed.popleft()
        return True

    def _resolve_deferred(self, *, wait_s: float) -> None:
        deadline = time.monotonic() + wait_s
        for queue in (self._deferred, self._deferred_spans):
            for _ in range(len(queue)):
                record, deferred = queue.popleft()
                try:
                    while not deferred.ready() and time.monotonic() < deadline:
                        time.sleep(0.001)
                    if deferred.ready():
                        self._resolved(record, deferred.resolve())
                    elif wait_s:
                        self.guard.lost("device_not_ready")
                        self._resolved(record, None)
                    else:
                        queue.append((record, deferred))  # type: ignore[arg-type]
                except Exception as error:  # noqa: BLE001 - a foreign library's read
                    self.guard.lost("device_read_failed")
                    self.guard.repeat_warning("deferred", f"a device value was not read: {error!r}")

    def _resolved(self, record: MarkRecord | SpanRecord, value: object) -> None:
        if isinstance(record, SpanRecord):
            record.gpu_ns = value if isinstance(value, int) else None
            self.batcher.spans.append(record)
        elif value is not None:
            made = mark_value(value)
            if isinstance(made, MarkValue):
                record.value_type, record.value = made.value_type, made.value
                record.value_nonfinite = made.nonfinite or UNSET
                self.batcher.marks.append(record)

    def flush(self, timeout: float = FLUSH_TIMEOUT_S) -> bool:
        """Write everything recorded so far; waits at most ``timeout`` s, says whether it is done."""
        done = self.flushes.request(timeout)
        return done and not self.batcher.disk_refuses

    # --- the end -------------------------------------------------------------------------------------

    def close_open_scopes(self, *, error: BaseException | None = None) -> None:
        """Close every scope of this process that is still open, children before parents."""
        scopes = sorted(list(self.open.values()), key=lambda scope: -scope.depth)
        now = self.clock.monotonic_ns()
        for scope in scopes:
            is_session = scope is self.session
            orderly = is_session or scope.auto
            idle = scope.auto and scope.name == semconv.EPOCH
            end = scope.last_ns if idle else scope.at(now)
            try:
                scope.close(
                    end_ns=end, truncated=not orderly, restore=False,
                    exc=error if is_session else None,
                )  # fmt: skip
            except Exception as failure:  # noqa: BLE001 - the others must still be closed
                self.guard.swallow("close_open_scopes", failure)
        if self.session is not None and not self.is_child:
            self._close_windows(self.session.trace)

    def finalize(self, timeout: float = 0.5) -> None:
        """The process ends now, without a proper shutdown: close, write, release; bounded."""
        if self.flushes.started or self.open:
            self._ending = True
            self.close_open_scopes()
            self._resolve_deferred(wait_s=timeout / 2)
            self.flush(timeout)
        self._release()

    def shutdown(self, timeout: float = SHUTDOWN_TIMEOUT_S) -> bool:
        """End the session and write everything; waits at most ``timeout`` seconds."""
        if not self.active:
            return True
        error = None
        if sys.exc_info()[1] is None:
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        session = self.session
        if self.loops is not None:
            self.loops.shut_down()
        self.close_open_scopes(error=error if self.at_exit else None)
        self.active = False
        if session is not None and session._state == ENDED:  # noqa: SLF001
            session.restore_after_session()
        self._ending = True
        self._resolve_deferred(wait_s=min(1.0, timeout / 4))
        # The thread ends also where the last flush does not: nobody would write for it later.
        done = self.flushes.stop(timeout) and not self.batcher.disk_refuses
        left = self.batcher.queued + sum(sealed.rows for sealed in self.batcher.sealed)
        if left:
            self.guard.lost("not_written_at_shutdown", left)
            self.guard.repeat_warning("shutdown", f"{left} rows could not be written in time")
        self.spans.shutdown()
        self._release()
        return done and not left

    #: Whether the interpreter is ending (set by the atexit handler).
    at_exit = False

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def parent_in_child(self, scope: BaseScope) -> BaseScope:
        """Who is the parent, in a forked child, of what opens under an inherited scope.

        For a DataLoader worker the epoch that was open when its iterator was made (persistent
        workers outlive it: the session); else the scope itself.
        """
        if self.worker_id() is None:
            return scope
        if self.fork_parent is not None:
            return self.fork_parent
        above: BaseScope | None = scope
        while above is not None:
            if above.name in (semconv.EPOCH, semconv.SESSION):
                return above
            above = above.above
        return self.session or scope

    def worker_id(self) -> int | None:
        """The number of this DataLoader worker process; None in any other."""
        if not self.is_child:
            return None
        module = sys.modules.get("torch.utils.data")
        info = module.get_worker_info() if module is not None else None
        return None if info is None else int(info.id)

    def after_fork(self) -> None:
        """In a forked child: the parent's rows, scopes and lock stay the parent's.

        Nothing runs here until the child records something of its own.
        """
        if self._lock is not None:
            self._lock.close_in_child()
            self._lock = None
        self.pid = os.getpid()
        self.is_child = True
        for scope in self.open.values():
            scope._state = INHERITED  # noqa: SLF001
        self.open.clear()
        self._span_ids.clear()
        self._mark_ids.clear()
        self._deferred.clear()
        self._deferred_spans.clear()
        self._announced = ()
        self._prepared = False
        self.batcher.forget()
        self.flushes.reset()
        self.append_span = self._first_span
        self.append_mark = self._first_mark
        self.guard.losses.clear()
        self.guard.swallowed.clear()
        if self.loops is not None:
            self.loops.after_fork()
        self.run_state = run_state.RunState.none(self.run_state.attempt)

    # --- health --------------------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """Counts and states of this recorder; see ``cirron_otel.health``."""
        losses = dict(self.guard.losses)
        marks = sum(
            count for reason, count in losses.items()
            if "mark" in reason or reason in ("graph_capture", "device_not_ready")
        )  # fmt: skip
        context = current_scope(self, get_current())
        try:
            spool_bytes = self.spool.size()
        except (OSError, SpoolError):
            spool_bytes = 0
        return {
            "enabled": True,
            "scope_drop_count": losses.get("depth_limit", 0) + losses.get("disk_full_spans", 0),
            "mark_drop_count": marks,
            "spool_drop_count": self.spool.evicted_files,
            "swallowed_error_count": sum(self.guard.swallowed.values()),
            "swallowed_errors": dict(self.guard.swallowed),
            "losses": losses,
            "spool_dir": str(self.spool.directory),
            "spool_bytes": spool_bytes,
            "flush_mode": "spool_only" if self.flushes.degraded
            else "normal" if self.active else "stopped",
            "flush_restart_count": self.flushes.restarts,
            "flush_latency_ns": self.flushes.last_duration_ns,
            "producer_assists": self.batcher.producer_assists,
            "queued_rows": self.batcher.queued,
            "pending_device_values": len(self._deferred) + len(self._deferred_spans),
            "disk_refuses": self.batcher.disk_refuses,
            "scope_depth": -1 if context is None else context.depth,
            "open_scopes": len(self.open),
            "provider": self.spans.description,
            "run_id": self.run_id,
            "attempt": self.run_state.attempt,
        }  # fmt: skip


def _ordinal(scope: BaseScope, parent: BaseScope | None) -> int:
    if scope.name == semconv.STEP and isinstance(scope.iteration, int):
        return scope.iteration
    if scope.index is not None:
        return scope.index
    return parent.ops if parent is not None else 0


def _resource_attributes(
    settings: Settings, carrier: Mapping[str, Any] | None
) -> dict[str, Any]:
    run_id = run_state.run_id(settings) if carrier is None else str(carrier["run_id"])
    out: dict[str, Any] = {
        semconv.RUN_ID: run_id,
        semconv.SERVICE_INSTANCE_ID: f"{run_id}-rank{settings.rank}",
        semconv.HOST_NAME: run_state.host_name(),
        semconv.PROCESS_PID: os.getpid(),
        semconv.DL_RANK: settings.rank,
        semconv.DL_WORLD_SIZE: settings.world_size,
        semconv.DL_LOCAL_RANK: settings.local_rank,
    }
    for name, value in (
        (semconv.WORKSPACE_ID, settings.workspace_id),
        (semconv.PIPELINE_ID, settings.pipeline_id),
        (semconv.DEPLOYMENT_ID, settings.deployment_id),
        (semconv.MODEL_ID, settings.model_id),
    ):
        if value is not None:
            out[name] = value
    named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get(
        "OTEL_RESOURCE_ATTRIBUTES", ""
    )
    if not named:
        out[semconv.SERVICE_NAME] = run_state.program_name()
    return out


def install(rec: Recorder | None) -> None:
    """Make ``rec`` the recorder of this process."""
    global _current  # noqa: PLW0603 - the one module-level state there is
    _current = rec
    if rec is not None and not getattr(install, "fork_registered", False):
        install.fork_registered = True  # type: ignore[attr-defined]
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    if _current is not None:
        try:
            _current.after_fork()
        except Exception as error:  # noqa: BLE001 - see _guard
            _current.guard.swallow("after_fork", error)
