"""The recorder of a process: provider, queues, flush thread and session, from start to shutdown.

One exists at a time (:data:`_current`, the only module-level mutable state of the package). In a
forked child the same object lives on with its parts reset: see :meth:`Recorder.after_fork`.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

from msgspec import UNSET
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider as SdkTracerProvider
from opentelemetry.sdk.util.instrumentation import InstrumentationScope

from cirron_otel import identity, ids, marks, run_state, semconv, windows
from cirron_otel._guard import Guard, logger
from cirron_otel.boundaries import Boundaries
from cirron_otel.clock import Clock
from cirron_otel.context import get_current
from cirron_otel.core import RecorderCore
from cirron_otel.cursors import Delivered
from cirron_otel.errors import SpoolError
from cirron_otel.findings import Findings
from cirron_otel.joined import JoinedSpans
from cirron_otel.listening import Listening, ScopeListener
from cirron_otel.process_usage import ProcessUsage
from cirron_otel.provider import OwnSpans
from cirron_otel.run_state import RunState
from cirron_otel.scope_base import BaseScope, RemoteScope, Trace, current_scope
from cirron_otel.scope_core import ENDED, INHERITED
from cirron_otel.spool_writer import SpoolWriter

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron_otel.batch import MarkRecord, SpanRecord
    from cirron_otel.forward_process import ForwardProcess
    from cirron_otel.forwarder import Forwarder
    from cirron_otel.settings import Settings

#: The recorder of this process, or None.
_current: Recorder | None = None

#: Marks made while there is none.
early_marks = marks.EarlyMarks()

#: What a flush, and what an orderly end of the process, may take at most.
FLUSH_TIMEOUT_S = 10.0
SHUTDOWN_TIMEOUT_S = 5.0
#: Spans left for epochs in a session's trace, from which on those that announce them are counted.
_HEADROOM_TO_ANNOUNCE = 20
#: Losses of marks that do not say so in their name.
_MARK_LOSSES = ("graph_capture", "device_not_ready", "device_read_failed")


class Recorder(RecorderCore):
    """Everything one process records. Public methods never raise and are safe from any thread."""

    def __init__(  # noqa: PLR0913, PLR0915 - what a recorder is made of
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
        self.findings = Findings()
        self.pid = os.getpid()
        self.rank = settings.rank
        self.open = {}
        self.session: BaseScope | None = None
        self.active = False
        self.busy = self.detour = self.shows_marks = False
        #: Whether a pass of a loop waits for its first sign of life (see loops.py).
        self.pending = False
        self.loops: Any = None
        #: What the torch hook goes by, while it is in place: for hooks of what runs on torch.
        self.torch_phases: Any = None
        #: How requests are made, once one was (see serving/requests.py).
        self.requests: Any = None
        #: Who is called when an epoch ends and before an optimizer steps; changed in place only.
        self.boundaries = Boundaries(self.guard)
        self.at_epoch_end = self.boundaries.at_epoch_end
        self.before_optimizer_step = self.boundaries.before_optimizer_step
        #: Who is told of scopes and of what fails in them.
        self.listening = Listening(self.guard)
        #: What copies values that are given to other libraries, where that is asked for.
        self.tee: Any = None
        #: What looks at the run as a whole (see run/), where there is something that does.
        self.run: Any = None
        #: What takes snapshots of models (see weights/), where there is something that does.
        self.snapshots: Any = None
        self.resources = ProcessUsage.for_settings(settings.resources)
        self.overhead_ns = 0.0
        self.fork_parent: BaseScope | None = None
        #: Held while a window is chosen and opened; reentrant, for processors that open scopes.
        self.window_lock = threading.RLock()
        self.span_ids = []
        self.mark_ids = []
        self.headroom = max(1, settings.trace_max_spans // 10)
        run = identity.run_id(settings) if carrier is None else str(carrier["run_id"])
        self.resource = Resource.create(identity.resource_attributes(settings, run))
        self.run_id = str(self.resource.attributes[semconv.RUN_ID])
        self.spans: OwnSpans | JoinedSpans = (
            JoinedSpans(self, provider)
            if isinstance(provider, SdkTracerProvider)
            else OwnSpans(self)
        )
        self.limits = self.spans.limits
        self.instrumentation_scope = InstrumentationScope(semconv.INSTRUMENTATION_NAME, sdk_version)
        #: Whether the next flush closes what dead processes left open.
        self.recovers = carrier is None
        #: Set by a signal that will end the process: its name.
        self.last_words: str | None = None
        #: What else ends with this process: called with the signal that ends it, None where none
        #: does, before the last flush; on the flush thread or the one that ends the process.
        self.endings: list[Callable[[str | None], object]] = []
        #: Whether the interpreter is ending (set by the atexit handler).
        self.at_exit = False
        self.out = SpoolWriter(self)
        self.spool, self.batcher, self.flushes = self.out.spool, self.out.batcher, self.out.flushes
        self.spool.evict_order = Delivered(self.spool.root)
        #: What takes the spool's batches to their destinations; None in a child, and where nothing
        #: is to be delivered from this process.
        self.delivery: Forwarder | ForwardProcess | None = None
        self._destinations: list[dict[str, Any]] = []
        self._await_first_row()
        #: Takes back what was patched for a recorder that no profiler owns (a child's).
        self.undo: Callable[[], None] | None = None
        self.is_child = carrier is not None
        self.refresh_busy()
        if carrier is not None:
            self.session = RemoteScope(self, carrier["parent"])
            self.out.run_state = RunState.none(int(carrier.get("attempt") or 1))
            self.active = True

    # --- session ----------------------------------------------------------------------------------

    def start_session(self, attrs: dict[str, Any], links: list[Any]) -> None:
        """Open the root scope on the calling thread, in a trace of its own; it becomes current."""
        if "spool" in self.settings.output:
            self.out.run_state = run_state.begin(
                self.spool.run_directory, self.run_id, self.rank, self.settings.start_iteration,
                world_size=self.settings.world_size,
            )  # fmt: skip
        self.active = True
        session = self.make_scope(semconv.SESSION, None, attrs)
        session.open_root(links)
        # In its trace the session and every epoch are announced by a span while they are open (see
        # otlp/gathering.py): their room, and that of an epoch that has not ended, is taken here. A
        # very small trace has none to give: its next epoch would not fit.
        if self.headroom >= _HEADROOM_TO_ANNOUNCE:
            session.trace.count += 2
            self.boundaries.at_epoch_end.append(_take_room_for_announcement)
        self.session = session
        self.spans.session_opened(session)
        self.out.prepare()
        self.ensure_started()  # what is open is announced even while nothing ends

    def refresh_busy(self) -> None:
        """Whether scopes have to take the general path, and whether spans show marks."""
        self.shows_marks = bool(self.processors) or not self.spans.lean
        self.detour = bool(self.pending or self.resources or self.is_child or self.listening.scopes)
        self.busy = bool(self.detour or self.processors or not self.spans.lean)

    def listen(self, listener: ScopeListener) -> None:
        """Tell ``listener`` of every scope from now on; all scopes take the general path then."""
        self.listening.scopes = (*self.listening.scopes, listener)
        self.refresh_busy()

    def listen_no_more(self, listener: ScopeListener) -> None:
        """Tell ``listener`` no more."""
        self.listening.scopes = tuple(one for one in self.listening.scopes if one is not listener)
        self.refresh_busy()

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

    # --- ids --------------------------------------------------------------------------------------

    def next_span_id(self) -> str:
        """The next span id (16 hex); draws 64 at a time and relieves the queue meanwhile."""
        try:
            return self.span_ids.pop()
        except IndexError:
            self.spans.sample_next()
            self.batcher.relieve()
            fresh = ids.span_ids()
            last = fresh.pop()
            self.span_ids.extend(fresh)
            return last

    def next_mark_id(self) -> str:
        """The next mark id (32 hex)."""
        try:
            return self.mark_ids.pop()
        except IndexError:
            self.batcher.relieve()
            fresh = ids.mark_ids()
            last = fresh.pop()
            self.mark_ids.extend(fresh)
            return last

    def mark_id(self, scope: BaseScope, ts_ns: int) -> str:
        """The id of a mark on ``scope``.

        Where marks are shown on spans it can be told from the span event that shows it: the span
        id, then the event's time, 16 hex each. So the event need not carry it.
        """
        return f"{scope.id[:16]}{ts_ns:016x}" if self.shows_marks else self.next_mark_id()

    # --- rows -------------------------------------------------------------------------------------

    def emit(self, scope: BaseScope) -> None:
        """Queue the row of an ended scope."""
        extra = scope.extra
        if extra is not None and extra.instrumentation is not None and self.settings.spans != "all":
            return
        row = scope.row(scope.end_ns)
        if extra is not None and extra.device_time is not None:
            self.ensure_started()
            self.out.defer_span(row, extra.device_time)
        else:
            self.append_span(row)

    def mark(self, name: object, value: object, kind: object, attrs: dict[str, Any]) -> None:
        """Record a mark on the current scope, whatever its value is."""
        if self.session is not None and not self.active:  # after the last flush nobody writes it
            early_marks.keep(name, value, kind, attrs)
            return
        marks.record_mark(self, name, value, kind, attrs)

    def overhead_mark(self, scope: BaseScope, now: int) -> None:
        """Say on a scope with children what recording them took."""
        marks.overhead_mark(self, scope, now)

    def exported_attributes(self, scope: BaseScope) -> dict[str, Any]:
        """What a scope's OTel span bears beside the user's attributes."""
        out: dict[str, Any] = self.spans.common_attributes(scope)
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
                out[key] = value  # noqa: PERF403 - out has entries already
        return {**out, **(extra.mark_values or {})}

    # --- window traces ----------------------------------------------------------------------------

    def open_window(self, first: BaseScope, parent: BaseScope) -> Trace:
        """A new trace for what a full one cannot take; see :mod:`cirron_otel.windows`."""
        return windows.open_window(self, first, parent)

    def close_window(self, window: Trace) -> None:
        """End the root span of a window that is full."""
        windows.close_window(self, window)

    # --- flushing ---------------------------------------------------------------------------------

    def _await_first_row(self) -> None:
        self.append_span, self.append_mark = self._first_span, self._first_mark
        self.span_rows = self.mark_rows = None

    def _first_span(self, row: SpanRecord) -> None:
        self.ensure_started()
        self.append_span, self.span_rows = self.batcher.way_in("spans")
        self.append_span(row)

    def _first_mark(self, row: MarkRecord) -> None:
        self.ensure_started()
        self.append_mark, self.mark_rows = self.batcher.way_in("marks")
        self.append_mark(row)

    def ensure_started(self) -> None:
        """Start the flush thread of this process, from its first open scope or row on."""
        if not self.flushes.started:
            self.flushes.ensure()
            run_state.on_process_exit(self.finalize)

    @property
    def run_state(self) -> RunState:
        """Run and attempt of this process."""
        return self.out.run_state

    @property
    def writer(self) -> str | None:
        """The name this process writes under, once it has begun to write."""
        return self.batcher.envelope.get("writer")

    def end_others(self, signal_name: str | None) -> None:
        """Have what ends with this process end now."""
        endings, self.endings = self.endings, []
        for ending in endings:
            try:
                ending(signal_name)
            except Exception as error:  # noqa: BLE001 - the others must still end
                self.guard.swallow("endings", error)

    def say_last_words(self) -> bool:
        """If the process ends by a signal after this flush: close what is open. Flush thread."""
        signal_name, self.last_words = self.last_words, None
        if signal_name is None:
            return False
        self.end_others(signal_name)
        self.out.ending = True
        session = self.session
        if session is not None and not self.is_child:
            session.attrs = {**session.attrs, semconv.INTERRUPTED: signal_name}
        self.close_open_scopes()
        return True

    def flush(self, timeout: float = FLUSH_TIMEOUT_S) -> bool:
        """Write everything recorded so far; waits at most ``timeout`` s; says if it is done.

        Its delivery begins at once, but is not waited for.
        """
        done = self.flushes.request(timeout)
        if self.delivery is not None:
            self.delivery.wake()
        return done and not self.batcher.disk_refuses

    # --- the end ----------------------------------------------------------------------------------

    def close_open_scopes(self, *, error: BaseException | None = None) -> None:
        """Close every scope of this process that is still open, children before parents."""
        scopes = sorted(self.open.copy().values(), key=lambda scope: -scope.depth)
        now = self.clock.monotonic_ns()
        for scope in scopes:
            if scope.otel.window is True:
                continue
            is_session = scope is self.session
            orderly = is_session or scope.auto
            idle = scope.auto and scope.name == semconv.EPOCH
            end = scope.last_ns if idle else scope.at(now)
            if is_session and self.run is not None:
                self.run.close(error, end)
            try:
                scope.close(
                    end_ns=end, truncated=not orderly, restore=False,
                    exc=error if is_session else None,
                )  # fmt: skip
            except Exception as failure:  # noqa: BLE001 - the others must still be closed
                self.guard.swallow("close_open_scopes", failure)
        windows.close_windows(self)

    def finalize(self, timeout: float = 0.5) -> None:
        """The process ends now, without a proper shutdown: close, write, release; bounded."""
        self.end_others(None)
        if self.flushes.started or self.open:
            self.out.ending = True
            self.close_open_scopes()
            self.out.resolve(wait_s=timeout / 2)
            wait_for_outlets = self.findings.end_outlets(timeout)
            self.flush(timeout)
            wait_for_outlets()
        self.out.release()

    def shutdown(self, timeout: float | None = None) -> bool:
        """End the session, write everything, deliver what can be delivered.

        Waits at most ``timeout`` seconds in all; without one, :data:`SHUTDOWN_TIMEOUT_S` for the
        disk and then the exit budget for the delivery. What is not delivered stays in the spool:
        the answer is about the disk alone.
        """
        if not self.active:
            return True
        began = time.monotonic()
        budget = self.settings.exit_budget
        disk_timeout = SHUTDOWN_TIMEOUT_S if timeout is None else timeout
        error = None
        if sys.exc_info()[1] is None:
            error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
        session = self.session
        if self.at_exit:
            self.end_others(None)
        if self.loops is not None:
            self.loops.shut_down()
        self.close_open_scopes(error=error if self.at_exit else None)
        self.active = False
        self.boundaries.forget()
        self.listening.ended()
        if self.snapshots is not None:
            self.snapshots.stop()
        if session is not None and session._state == ENDED:  # noqa: SLF001
            session.restore_after_session()
        self.out.ending = True
        self.out.resolve(wait_s=min(1.0, disk_timeout / 4))
        deadline = time.monotonic() + disk_timeout
        self.flushes.request(disk_timeout)
        # Scopes that other threads had just opened have ended meanwhile. The thread ends also where
        # the last flush does not: nobody would write for it later.
        left_s = max(0.0, deadline - time.monotonic())
        done = self.flushes.stop(left_s) and not self.batcher.disk_refuses
        left = self.batcher.queued + sum(sealed.rows for sealed in self.batcher.sealed)
        if left:
            self.guard.lost("not_written_at_shutdown", left)
            self.guard.repeat_warning("shutdown", f"{left} rows could not be written in time")
        self.spans.shutdown()
        self.out.release()
        if timeout is not None:
            budget = min(budget, max(0.0, began + timeout - time.monotonic()))
        wait_for_outlets = self.findings.end_outlets(budget)
        self._deliver_rest(budget)
        wait_for_outlets()
        return done and not left

    def _deliver_rest(self, budget: float) -> None:
        """End the delivery within ``budget`` seconds, and say what is left for the next run."""
        delivery, self.delivery = self.delivery, None
        if delivery is None:
            return
        from cirron_otel.forwarder import describe_left  # noqa: PLC0415 - loaded by then

        try:
            left = describe_left(delivery.stop(budget), self.spool.root)
            if left is not None:
                logger.warning("cirron-otel: %s", left)
            self._destinations = delivery.health()
        except Exception as error:  # noqa: BLE001 - the batches are on disk
            self.guard.swallow("deliver", error)

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
        self.out.after_fork()
        if self.delivery is not None:
            self.delivery.after_fork()
            self.delivery = None
        self.pid = os.getpid()
        self.window_lock = threading.RLock()
        self.is_child = True
        for scope in self.open.values():
            scope._state = INHERITED  # noqa: SLF001
        self.open.clear()
        self.span_ids.clear()
        self.mark_ids.clear()
        self._await_first_row()
        self.endings = []
        self.boundaries.forget()
        self.listening.forget()
        self.run = None
        self.snapshots = None
        self.guard.losses.clear()
        self.guard.swallowed.clear()
        self.findings.forget()
        if self.loops is not None:
            self.loops.after_fork()

    # --- health -----------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """Counts and states of this recorder; see ``cirron_otel.health``."""
        losses = dict(self.guard.losses)
        if self.spool.evicted_undelivered:
            losses["evicted_undelivered"] = self.spool.evicted_undelivered
        delivery = self.delivery
        marks = sum(
            count for reason, count in losses.items()
            if "mark" in reason or reason in _MARK_LOSSES
        )  # fmt: skip
        context = current_scope(self, get_current())
        try:
            spool_bytes = self.spool.known_size()
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
            "pending_device_values": self.out.deferred,
            "disk_refuses": self.batcher.disk_refuses,
            "scope_depth": -1 if context is None else context.depth,
            "open_scopes": len(self.open),
            "provider": self.spans.description,
            "run_id": self.run_id,
            "attempt": self.run_state.attempt,
            "forward": "off" if self.is_child else self.settings.forward,
            "destinations": self._destinations if delivery is None else delivery.health(),
            "forward_restart_count": 0 if delivery is None else delivery.restarts,
            "findings": self.findings.health(),
        }  # fmt: skip


def _take_room_for_announcement(epoch: BaseScope) -> None:
    epoch.trace.count += 1


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
