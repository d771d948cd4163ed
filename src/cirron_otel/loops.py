"""Who owns the loop: epochs, steps and evaluations that nobody opened by hand.

A **pass** is one traversal of a data source, seen either by ``ci.batches`` (explicit) or by a
framework hook (implicit). Its scopes are *created when a fetch has returned*, back-dated to the
start of the fetch, because a span that was started cannot be taken back: an exhausting fetch
creates nothing, and a peek (``next(iter(loader))``) opens no epoch.

* An implicit pass waits, fetch by fetch, for its first sign of life: a forward, backward, mark or
  scope while its iterator is still alive. Then its epoch (unless one is open) and its step are
  created with the times noted. An iterator that is collected before that was a peek.
* A pass is ``evaluation`` if it is told so, or if gradients are off or the model is in eval mode
  at its first fetch and still at its first sign of life (``model.train()`` may come in the loop's
  body); its steps lie in one ``evaluation`` scope, and it never makes an epoch.
* The steps of a pass are siblings, in the scope where the pass began. A later fetch inside another
  scope (``with ci.scope("fetch"): next(it)``) waits for the next sign of life and stands where
  that stands.
* A broken-off loop's step ends when its iterator is collected.
* An implicit epoch stays current after its loop, for what belongs to it (validation, marks), until
  the next training pass; its end is the end of the last thing recorded in it.
* One loop owns ``step``. Another training pass that fetches while the owner's step is open gives
  ``data_load`` only, or ``micro_batch`` scopes if it is ``ci.batches``. An owner whose function is
  no longer running was abandoned; so was, most likely, an implicit one that does not fetch while
  the other pass fetches twice. Then the new pass takes over. If the old owner comes back after
  all, it is an outer loop and keeps its place from then on.
* Inside a loop that a framework runs (see :mod:`cirron_otel.driven`) no pass owns anything.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.driven import active_loop
from cirron_otel.passes import Pass
from cirron_otel.scope_base import BaseScope, current_scope
from cirron_otel.scope_core import NEW, OPEN

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


class _Thread(threading.local):
    """What one thread's loops are up to."""

    def __init__(self) -> None:
        self.owner: Pass | None = None
        #: Passes that have fetched and have not seen a sign of life since, oldest fetch first.
        self.waiting: list[Pass] = []
        #: Inside ci.batches' own fetch: hooks must not see it as a second one.
        self.fetching = 0
        self.epochs = 0
        self.implicit_epoch: BaseScope | None = None
        #: The epoch whose end was told last, and the number of the step that was to come.
        self.told: tuple[str, int] | None = None


class Loops:
    """The loops of a recorder. Methods run on the training thread, never raise past _guard."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self.here = _Thread()
        self.iteration = rec.settings.start_iteration
        #: Tells ``"evaluation"`` when the framework is not learning; set by a hook.
        self.stage_probe: Callable[[], str | None] = lambda: None
        #: How many epochs ``ci.epochs`` was given, and the pass that trains: what is planned.
        self.planned_epochs: int | None = None
        self.training: Pass | None = None
        #: Whether a training step was made: the first one is no measure of the others.
        self.warm = False
        self._waiting: set[Pass] = set()
        #: Passes whose iterator was collected while they were open: to be finished by their thread.
        self._gone: set[Pass] = set()

    # --- epochs --------------------------------------------------------------------------------

    def plan(self, epochs: object) -> None:
        """``ci.epochs`` begins with these."""
        if not self.is_inside_epochs():
            try:
                self.planned_epochs = len(epochs)  # type: ignore[arg-type]
            except Exception:  # noqa: BLE001 - a generator has no length; the user's class may raise
                self.planned_epochs = None

    def open_epoch(self, index: int) -> BaseScope | None:
        """Open an explicit epoch (``ci.epochs``), current on this thread."""
        self.end_implicit_epoch()
        epoch = self._rec.make_scope(semconv.EPOCH, index, {})
        epoch.__enter__()
        epoch.counters = {}
        return epoch

    def end_implicit_epoch(self) -> None:
        """End the epoch that a loop of this thread left open, if there is one."""
        epoch, self.here.implicit_epoch = self.here.implicit_epoch, None
        if epoch is not None and epoch.is_open:
            try:
                self.epoch_ending(epoch)
            finally:
                epoch.close(end_ns=epoch.last_ns)

    def end_epoch(self, epoch: BaseScope) -> None:
        """End an explicit epoch."""
        try:
            if epoch.is_open:
                self.epoch_ending(epoch)
        finally:
            epoch.__exit__(None, None, None)

    def epoch_ending(self, epoch: BaseScope) -> None:
        """Tell whoever waits that the training of an open epoch is over, on its own thread.

        An implicit epoch stays open for its validation, so it is told of when its pass has ended,
        as long as the model is sure to exist; again at its end only if it was trained on since.
        """
        told = epoch.id, self.iteration
        if self.here.told != told and epoch.thread_id == threading.get_ident():
            self.here.told = told
            self._rec.boundaries.epoch_ending(epoch)

    def is_last_step(self) -> bool:
        """Whether this thread is in the last step of its pass, as far as its source says so."""
        driven = active_loop(self._rec)
        if driven is not None:
            return driven.is_last_step
        owner = self.here.owner
        return owner is not None and owner.count == owner.total()

    def is_inside_epochs(self) -> bool:
        """Whether epochs that are open here, or the loop that will open them, come first."""
        above = self.current_epoch()
        return (above is not None and not above.auto) or active_loop(self._rec) is not None

    def give_way(self) -> None:
        """A framework's loop begins, in no step: what plain loops have left open is over."""
        self._settle()
        owner = self.here.owner
        if owner is not None and not owner.is_running():
            owner.finish()
        self.end_implicit_epoch()

    def current_epoch(self) -> BaseScope | None:
        """The open epoch this thread stands in."""
        scope = current_scope(self._rec, get_current())
        while scope is not None:
            if scope.name == semconv.EPOCH and scope.is_open:
                return scope
            scope = scope.above
        return None

    def warm_up(self, step: BaseScope | None) -> None:
        """Tag the first training step of the recording as ``warmup``."""
        if step is not None:
            self.warm = True
            step.attrs = {**step.attrs, semconv.WARMUP: True}

    def next_iteration(self) -> int:
        """The number of the next training step, monotonic over the run."""
        number = self.iteration
        self.iteration = number + 1
        return number

    # --- passes ----------------------------------------------------------------------------------

    def begin(
        self,
        *,
        explicit: bool,
        iterator: object | None = None,
        stage: str | None = None,
        source: object | None = None,
    ) -> Pass:
        """A pass is about to make its first fetch; ``source`` may know how many there will be."""
        one = Pass(self, explicit=explicit, iterator=iterator, stage=stage)
        one.source = source
        return one

    def wait_for_life(self, one: Pass) -> None:
        """``one`` has fetched and nothing has happened yet."""
        waiting = self.here.waiting
        if one not in waiting:
            waiting.append(one)
        self._waiting.add(one)
        self._refresh()

    def stop_waiting(self, one: Pass) -> None:
        """``one`` was activated, finished or collected."""
        waiting = self.here.waiting
        if one in waiting:
            waiting.remove(one)
        self._waiting.discard(one)
        self._gone.discard(one)
        self._refresh()

    def collected(self, one: Pass) -> None:
        """The iterator of ``one`` is gone. May run at any point, on any thread: only notes it."""
        if one.state == NEW:
            self._waiting.discard(one)
        elif one.state == OPEN:
            one.gone_ns = self._rec.clock.now()
            self._gone.add(one)
        else:
            return
        self._rec.pending = True
        self._rec.busy = self._rec.detour = True

    def _refresh(self) -> None:
        rec = self._rec
        rec.pending = bool(self._waiting or self._gone)
        if self._gone:  # one may have come in the middle of the last line
            rec.pending = True
        rec.refresh_busy()

    def activity(self) -> None:
        """A scope or mark is about to be recorded on this thread: wake the waiting passes."""
        self._settle()
        here = self.here
        waiting, here.waiting = here.waiting, []
        self._waiting.difference_update(waiting)
        self._refresh()
        for one in waiting:
            if one.alive():
                one.activate()

    def _settle(self) -> None:
        """Finish the passes of this thread whose iterator is gone, at the time it went."""
        if self._gone:
            me = threading.get_ident()
            for one in list(self._gone):
                thread = one.thread()
                if one.thread_id == me or thread is None or not thread.is_alive():
                    self._gone.discard(one)
                    one.finish()

    def shut_down(self) -> None:
        """The session ends: nothing waits any more; epochs end with their last child."""
        self._settle()
        self._waiting.clear()
        self._gone.clear()
        self.here.waiting.clear()
        owner = self.here.owner
        if owner is not None:
            owner.finish()
        self.end_implicit_epoch()
        self._refresh()

    def after_fork(self) -> None:
        """In a forked child the loops are the parent's."""
        self.here = _Thread()
        self._waiting = set()
        self._gone = set()
        self._refresh()
