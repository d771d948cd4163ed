"""The run as a whole, watched from the flush thread: time by category, progress, hangs, outcome.

Nothing is done where the training runs: closed scopes are read as the rows they have become, and
the open ones are looked at from outside, once a flush.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cirron_otel import driven, semconv
from cirron_otel._guard import logger
from cirron_otel.marks import append_point
from cirron_otel.run import closing, watchdog
from cirron_otel.run.hangs import Hangs
from cirron_otel.run.ledger import CATEGORIES, CHARGED, Ledger, matters
from cirron_otel.run.outcome import COMPLETED, RUNNING, Ending, Outcome
from cirron_otel.run.progress import Plan, Progress
from cirron_otel.run.reporter import Reporter
from cirron_otel.run.rows import RowFeed
from cirron_otel.run.startup import Startup

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

#: Seconds between two marks of what the time went into and how far the training is.
MARKS_EVERY_S = 10.0
#: The position of each category.
_NAMES = {name: position for position, name in enumerate(CATEGORIES)}


def watch(rec: Recorder) -> RunWatch | None:
    """Have the run watched; None where there is no session of this process's own."""
    session = rec.session
    if session is None or rec.is_child:
        return None
    rec.run = run = RunWatch(rec, session)
    before = round(run.before_profile_s, 3)
    session.attrs = {**session.attrs, semconv.RUN_BEFORE_PROFILE: before}
    rec.batcher.seen = run.feed.seen
    rec.out.watchers.append(run)
    return run


class RunWatch:
    """What is known of a run while it goes on. Methods say which thread they are for."""

    def __init__(self, rec: Recorder, session: BaseScope) -> None:
        settings = rec.settings
        self._rec = rec
        self._session = session
        self.ending = Ending()
        self.outcome: Outcome | None = None
        self.before_profile_s = _seconds_before_profile()
        begin_ns = session.start_ns - round(self.before_profile_s * 1e9)
        self.ledger = Ledger(begin_ns, session.thread_id, session.id)
        self.ledger.in_time = self._in_time
        self.progress = Progress()
        self.watchdog = watchdog.Watchdog(
            watchdog.thresholds_of(settings.watchdog),
            interactive=_is_interactive() and settings.source("watchdog") == "default",
            interval_s=settings.flush_interval,
        )
        self.startup = Startup(rec, session, interactive=_is_interactive())
        self._hangs = Hangs(rec, session, self.watchdog)
        self._lock = threading.RLock()
        self.feed = RowFeed(
            rec.guard, self.ledger.add, lock=self._lock, matters=matters, pause=rec.out.step_back
        )
        #: When a silence was over, ns.
        self._moved_ns = 0
        self._leaving: BaseException | None = None
        #: What was told of each category in marks, ns.
        self._told = [0] * len(CATEGORIES)
        self._marked_s = time.monotonic()
        self.reporter = Reporter(rec, self.progress)

    # --- what the program says -------------------------------------------------------------------

    def signalled(self, name: str) -> None:
        """A signal came. On the main thread, in its handler."""
        self.ending.signalled(name, self._iteration())

    def exiting(self, status: object) -> None:
        """The program asks to end with this status. Any thread."""
        self.ending.exiting(status, self._iteration())

    def leaving(self, error: BaseException | None) -> None:
        """The block of ``with ci.profile()`` ends, by this exception if it is one."""
        self._leaving = error

    def _iteration(self) -> int:
        loops = self._rec.loops
        return 0 if loops is None else int(loops.iteration)

    def _in_time(self, time_ns: int) -> int:
        """A time as the session counts, also where the clock was set since it began.

        A row counts from what the clock said when its scope was opened. Of one that cannot have
        been then, before the session or in the future, it is known that the clock was set before.
        """
        clock = self._rec.clock
        now_ns: int = self._session.at(clock.monotonic_ns())
        if self.ledger.begin_ns <= time_ns <= now_ns:
            return time_ns
        shifted_ns: int = time_ns - (clock.now() - now_ns)
        return min(max(self.ledger.begin_ns, shifted_ns), now_ns)

    # --- the flush thread ------------------------------------------------------------------------

    def tick(self) -> None:
        """Look at everything once. Flush thread; never raises."""
        if self.outcome is not None:
            return
        try:
            with self._lock:
                scopes = list(self._rec.open.values())
                self._note_plan(scopes)
                silence = self._look(scopes)
            thread, steps = self.ledger.thread_id, self.ledger.steps
            if silence is not None:
                self._hangs.report(silence, scopes, thread, steps, self._iteration())
            self._hangs.beat(scopes, thread, steps, self._iteration())
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("run", error)

    def written(self, _batch: object) -> None:
        """Take in the rows of what was written: as many as one file has. Flush thread."""
        self.feed.take()

    def flushed(self) -> None:
        """Count what is certain, and tell of it. Flush thread."""
        self.feed.take()
        if self.outcome is None:
            with self._lock:
                self._settle()
                self.startup.tell(self.ledger.first_step_ns)
                self._mark_progress()

    def _settle(self) -> None:
        scopes = self._rec.open
        ledger = self.ledger
        ledger.tops = {self._session.id}
        ledger.tops.update(
            scope.id for scope in list(scopes.values()) if scope.name == semconv.EPOCH
        )

        def place(scope_id: str | None) -> str:
            scope = None if scope_id is None else scopes.get(scope_id)
            if scope is None:
                return "gone"
            above: BaseScope | None = scope
            while above is not None:
                if above.name in CHARGED:
                    return "inside"
                above = above.above
            return "outside"

        ledger.settle(place)

    def _look(self, scopes: list[BaseScope]) -> watchdog.Silence | None:
        if not self.watchdog.active:
            return None
        ledger, clock = self.ledger, self._rec.clock
        before = self.watchdog.told
        monotonic_ns = clock.monotonic_ns()
        now = monotonic_ns + clock.offset_ns
        silence = self.watchdog.look(
            scopes, ledger.thread_id, now, steps=ledger.steps, monotonic_ns=monotonic_ns
        )
        if silence is not None:
            ledger.stalled(silence.since_ns, now)
        elif self._moved_ns:
            # The row of whatever spans the silence would be here by now.
            self.feed.take_now()
            ledger.moved(self._moved_ns)
            self._moved_ns = 0
        elif before is not None and self.watchdog.told is None:
            self._moved_ns = now
        return silence

    # --- progress ---------------------------------------------------------------------------------

    def _note_plan(self, scopes: list[BaseScope]) -> None:
        self.progress.note(time.monotonic(), self._iteration())
        thread = self.ledger.thread_id
        epoch = None
        for scope in scopes:
            if scope.name == semconv.EPOCH and scope.thread_id == thread:
                epoch = scope
        if epoch is not None:
            self.progress.plan = self._plan(epoch)

    def _plan(self, epoch: BaseScope) -> Plan:
        loops = self._rec.loops
        counters = epoch.counters or {}
        begun = counters.get(semconv.STEP, 0)
        inside = any(
            scope.name == semconv.STEP and scope.above is epoch
            for scope in list(self._rec.open.values())
        )
        step = max(0, begun - inside)
        loop = None if epoch.ctx is None else epoch.ctx.get(driven._KEY)  # noqa: SLF001 - of one machine
        if isinstance(loop, driven.DrivenLoop):
            total = loop.total_steps
            return Plan(
                epoch.index or 0,
                step,
                loop.total_epochs if epoch.auto else loops.planned_epochs,
                loop.steps,
                total,
                max(0, self._iteration() - inside),
            )
        training = loops.training
        length = None if training is None else training.length
        return Plan(epoch.index or 0, step, None if epoch.auto else loops.planned_epochs, length)

    # --- marks of the session ---------------------------------------------------------------------

    def _mark_progress(self) -> None:
        now = time.monotonic()
        if not self.ledger.steps or now - self._marked_s < MARKS_EVERY_S:
            return
        self._marked_s = now
        self._mark_times(self.ledger.times())
        plan, eta = self.progress.plan, self.progress.eta()
        fraction = None if plan is None else plan.fraction()
        if fraction is not None:
            self._mark(semconv.PROGRESS, fraction)
        if eta is not None:
            self._mark(semconv.ETA, eta)

    def _mark_times(self, times: dict[str, int]) -> None:
        for name, position in _NAMES.items():
            more = times[name] - self._told[position]
            if more > 0:
                self._told[position] = times[name]
                self._mark(semconv.RUN_TIME, more / 1e9, {semconv.CATEGORY: name})

    def _mark(self, name: str, value: float, attrs: dict[str, Any] | None = None) -> None:
        append_point(self._rec, self._session.id, name, value, attrs=attrs)

    # --- the end ----------------------------------------------------------------------------------

    def close(self, error: BaseException | None, end_ns: int) -> None:
        """The session is about to end at ``end_ns``. The thread that ends it; never raises."""
        if self.outcome is not None:
            return
        try:
            error = error or self._leaving or _in_flight()
            self.outcome = outcome = self.ending.outcome(error, self._iteration())
            with self._lock:
                self.feed.take_now(self._rec.batcher.waiting_spans())
                self._rec.batcher.seen = None
                self.feed.seen.clear()
                self._settle()
                self.startup.tell(self.ledger.first_step_ns)
                times = self.ledger.times(end_ns)
                self._end_session(outcome, times)
            self.reporter.stop(outcome.word)
            if self.ledger.steps:
                self._show(outcome, times)
            self._hangs.ended(end_ns, outcome.word, self._iteration())
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("run.close", failure)

    def _end_session(self, outcome: Outcome, times: dict[str, int]) -> None:
        attrs: dict[str, Any] = {**outcome.attributes()}
        if self.ledger.steps:
            attrs[semconv.RUN_STEPS] = self.ledger.steps
            for name, length in times.items():
                if length:
                    attrs[f"{semconv.RUN_TIME}.{name}"] = round(length / 1e9, 6)
            self._mark_times(times)
            if outcome.word == COMPLETED and self.progress.plan is not None:
                self._mark(semconv.PROGRESS, 1.0)
                self._mark(semconv.ETA, 0.0)
        session = self._session
        session.attrs = {**session.attrs, **attrs}

    def _show(self, outcome: Outcome, times: dict[str, int]) -> None:
        rec = self._rec
        lines = closing.table(
            {name: length / 1e9 for name, length in times.items()},
            outcome=outcome.word,
            steps=self.ledger.steps,
            title=f"run {rec.run_id}",
        )
        logger.info("cirron-otel: %s", "\n".join(lines))
        mode = rec.settings.terminal
        stream = sys.stderr
        if rec.rank or mode == "none" or stream is None:
            return
        if mode != "auto" or stream.isatty():
            stream.write("\n".join(lines) + "\n")

    # --- health -----------------------------------------------------------------------------------

    def health(self) -> dict[str, Any]:
        """``health()["run"]``; any thread, no lock."""
        plan = self.progress.plan
        outcome = self.outcome
        return {
            "outcome": RUNNING if outcome is None else outcome.word,
            "error_type": None if outcome is None else outcome.error_type,
            "signal": None if outcome is None else outcome.signal,
            "steps": self.ledger.steps,
            "progress": None if plan is None else plan.fraction(),
            "eta": self.progress.eta(),
            "hanging": self.watchdog.told is not None and outcome is None,
            "time": {name: round(length / 1e9, 3) for name, length in self.ledger.times().items()},
        }


def _in_flight() -> BaseException | None:
    """The exception in whose handling the program ends the recording."""
    error = sys.exc_info()[1]
    return None if isinstance(error, (GeneratorExit, StopIteration)) else error


def _is_interactive() -> bool:
    return hasattr(sys, "ps1") or bool(sys.flags.interactive) or "ipykernel" in sys.modules


def _seconds_before_profile() -> float:
    """How long this process ran before its first recording: its imports, mostly.

    0 where that says nothing: at a prompt, and for every recording but the first of a process.
    """
    if _is_interactive() or getattr(_seconds_before_profile, "asked", False):
        return 0.0
    _seconds_before_profile.asked = True  # type: ignore[attr-defined]
    try:
        # Field 22, behind the name in brackets: clock ticks from the boot to the process's start.
        fields = Path("/proc/self/stat").read_text("ascii", "replace").rpartition(")")[2].split()
        began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - began)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0
