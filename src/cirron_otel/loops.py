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
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.core import PassCore
from cirron_otel.scope_base import BaseScope, current_scope
from cirron_otel.scope_core import ENDED, NEW, OPEN

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

TRAIN = "train"
EVALUATION = semconv.EVALUATION
_MAX_PENDING = 10_000


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


class Loops:
    """The loops of a recorder. Methods run on the training thread, never raise past _guard."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self.here = _Thread()
        self.iteration = rec.settings.start_iteration
        #: Tells ``"evaluation"`` when the framework is not learning; set by a hook.
        self.stage_probe: Callable[[], str | None] = lambda: None
        self._waiting: set[Pass] = set()
        #: Passes whose iterator was collected while they were open: to be finished by their thread.
        self._gone: set[Pass] = set()

    # --- epochs --------------------------------------------------------------------------------

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
            epoch.close(end_ns=epoch.last_ns)

    def current_epoch(self) -> BaseScope | None:
        """The open epoch this thread stands in."""
        scope = current_scope(self._rec, get_current())
        while scope is not None:
            if scope.name == semconv.EPOCH and scope.is_open:
                return scope
            scope = scope.above
        return None

    def next_iteration(self) -> int:
        """The number of the next training step, monotonic over the run."""
        number = self.iteration
        self.iteration = number + 1
        return number

    # --- passes ----------------------------------------------------------------------------------

    def begin(
        self, *, explicit: bool, iterator: object | None = None, stage: str | None = None
    ) -> Pass:
        """A pass is about to make its first fetch."""
        return Pass(self, explicit=explicit, iterator=iterator, stage=stage)

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


class Pass(PassCore):
    """One traversal of a data source on one thread."""

    __slots__ = (
        "__weakref__", "_frame", "_hint", "_iterator", "_outer", "_pending", "_seen", "_unowned",
        "container", "displaced", "gone_ns", "thread", "thread_id",
    )  # fmt: skip

    def __init__(
        self, loops: Loops, *, explicit: bool, iterator: object | None, stage: str | None
    ) -> None:
        self._loops = loops
        self.recorder = loops._rec  # noqa: SLF001 - parts of one machine
        self.kind = self.recorder.spans.loop_class
        self.explicit = explicit
        self.stage = stage
        self.state = NEW
        self.thread = weakref.ref(threading.current_thread())
        self.thread_id = threading.get_ident()
        self.container: BaseScope | None = None
        self.epoch: BaseScope | None = None
        self.step: BaseScope | None = None
        self.count = 0
        self.displaced = False
        #: When the iterator was collected, if it was.
        self.gone_ns: int | None = None
        #: What the first fetch suggested for ``stage``.
        self._hint: str | None = None
        #: The scope the steps lie in.
        self._place: BaseScope | None = None
        self._outer = False
        self._unowned = 0
        self._seen = -1
        self._frame = 0
        self._pending: list[tuple[int, int]] = []
        self._iterator: weakref.ref[object] | None = None
        if iterator is not None:
            reference = weakref.ref(self)
            self._iterator = weakref.ref(iterator, lambda _: _collected(reference))

    def alive(self) -> bool:
        """Whether the iterator still exists (explicit passes live as long as they run)."""
        return self._iterator is None or self._iterator() is not None

    # --- the source's events -------------------------------------------------------------------

    def before_fetch(self) -> None:
        """The program comes back for more: the step is over."""
        step, self.step = self.step, None
        if step is not None and step._state == OPEN:  # noqa: SLF001
            step.__exit__(None, None, None)  # the fast way out, where there is one
        elif self._pending and self.explicit:
            self.activate()
            self.before_fetch()

    def fetched(self, start_ns: int, end_ns: int) -> None:
        """A fetch has returned an item; times are ns since the Unix epoch."""
        if self.fetched_here(start_ns, end_ns):
            return
        if self.state == OPEN and (self.explicit or self._is_in_place()):
            self._record(start_ns, end_ns)
            return
        if self.state == ENDED:
            return
        if not self._frame:
            self._frame = next(_loop_frames(), 0)
            if self.stage is None:
                self._hint = self._loops.stage_probe()
        if self.explicit and self._hint is None:
            self._open(start_ns)
            self._record(start_ns, end_ns)
            return
        if len(self._pending) < _MAX_PENDING:
            self._pending.append((start_ns, end_ns))
        else:
            self.recorder.guard.lost("idle_fetches")
        self._loops.wait_for_life(self)

    def failed(self, start_ns: int, end_ns: int, error: BaseException) -> None:
        """A fetch raised: its data_load is recorded with the error, and no step."""
        self._data_load(None, start_ns, end_ns, error)

    def finish(self) -> None:
        """The pass is over: exhausted, broken out of, or collected."""
        if self.state == ENDED:
            return
        if self._pending and (self.explicit or self.state == OPEN):
            self.activate()
        loops = self._loops
        self.state = ENDED
        end_ns = self.gone_ns
        for scope in (self.step, self.container):
            if scope is not None and scope._state == OPEN:  # noqa: SLF001
                scope.close(end_ns=None if end_ns is None else max(end_ns, scope.last_ns))
        self.step = self.container = None
        loops.stop_waiting(self)
        if loops.here.owner is self:
            loops.here.owner = None
        self._pending.clear()

    # --- its scopes ------------------------------------------------------------------------------

    def activate(self) -> None:
        """A sign of life (or none will come): create what the fetches so far were part of."""
        if self.state == ENDED or not self._pending:
            return
        pending, self._pending = self._pending, []
        self._loops.stop_waiting(self)
        if self.state == NEW:
            if self._hint is not None and self._loops.stage_probe() is not None:
                self.stage = self._hint
            self._open(pending[0][0])
        for position, (start_ns, end_ns) in enumerate(pending):
            self._record(start_ns, end_ns)
            if position + 1 < len(pending) and self.step is not None:
                step, self.step = self.step, None
                step.close(end_ns=pending[position + 1][0])

    def _is_in_place(self) -> bool:
        """Whether the current scope is the one the steps lie in, or there is none such any more."""
        place = self._place
        return (
            place is None
            or not place.is_open
            or current_scope(self.recorder, get_current()) is place
        )

    def _open(self, start_ns: int) -> None:
        """Find or make the scope the steps lie in."""
        self.state = OPEN
        loops = self._loops
        if self.stage == EVALUATION:
            self.container = self._auto(semconv.EVALUATION, None, start_ns, None)
            self._stay()
            return
        owner = loops.here.owner
        if owner is not None and owner is not self and not owner.is_running():
            owner.finish()
        owner = loops.here.owner
        if owner is not None and owner is not self:
            return
        loops.here.owner = self
        self._claim_epoch(start_ns)

    def _stay(self) -> None:
        self._place = current_scope(self.recorder, get_current())

    def _claim_epoch(self, start_ns: int) -> None:
        loops = self._loops
        epoch = loops.current_epoch()
        if epoch is not None and epoch is loops.here.implicit_epoch:
            loops.end_implicit_epoch()
            epoch = loops.current_epoch()
        if epoch is None:
            loops.end_implicit_epoch()
            epoch = self._auto(semconv.EPOCH, loops.here.epochs, start_ns, None)
            if epoch is not None:
                loops.here.epochs += 1
                loops.here.implicit_epoch = epoch
        self.epoch = epoch
        self._stay()

    def _record(self, start_ns: int, end_ns: int) -> None:
        loops = self._loops
        if self.stage == EVALUATION:
            step = self._auto(semconv.STEP, self.count, start_ns, None)
            self.count += 1
        else:
            owner = loops.here.owner
            if owner is self:
                step = self._step(start_ns)
            elif owner is not None and self._is_inner(owner):
                step = self._inner(start_ns)
            else:
                self._take_over(owner, start_ns)
                step = self._step(start_ns)
        self.step = step
        self._data_load(step, start_ns, end_ns, None)

    def is_running(self) -> bool:
        """Whether the iterator lives and the function that loops over it is still running."""
        return self.alive() and self._frame in _loop_frames()

    def _is_inner(self, owner: Pass) -> bool:
        """Whether this pass fetches inside the owner's step, rather than in its place."""
        if self._outer or owner.step is None or not owner.step.is_open or not owner.alive():
            return False
        if owner.explicit or owner._outer:
            return True
        if owner.count != self._seen:
            self._seen, self._unowned = owner.count, 0
        self._unowned += 1
        return self._unowned < 2  # noqa: PLR2004 - once is an inner loop, twice a new owner

    def _take_over(self, owner: Pass | None, start_ns: int) -> None:
        if owner is not None:
            owner.before_fetch()
            owner.displaced = True
        self._outer = self._outer or self.displaced
        self._loops.here.owner = self
        epoch = self.epoch
        if epoch is None and owner is not None and owner.count <= 1:
            # Loops in one another from the first step on, or a first batch taken by hand: either
            # way what goes on is the same epoch.
            epoch = owner.epoch
        if epoch is not None and epoch.is_open:
            self.epoch = epoch
            self._stay()
        else:
            self._claim_epoch(start_ns)

    def _step(self, start_ns: int) -> BaseScope | None:
        epoch = self.epoch
        if epoch is not None and not epoch.is_open:
            self._claim_epoch(start_ns)
            epoch = self.epoch
        index = self.count
        if epoch is not None:
            counters = epoch.counters = epoch.counters or {}
            index = counters.get(semconv.STEP, 0)
            counters[semconv.STEP] = index + 1
        self.count += 1
        return self._auto(semconv.STEP, index, start_ns, self._loops.next_iteration())

    def _inner(self, start_ns: int) -> BaseScope | None:
        if not self.explicit:
            return None
        self.count += 1
        return self._auto(semconv.MICRO_BATCH, self.count - 1, start_ns, None)

    def _auto(
        self, name: str, index: int | None, start_ns: int, iteration: int | None
    ) -> BaseScope | None:
        rec = self.recorder
        scope: BaseScope = rec.make_loop_scope(name, index)
        reserve = 0 if name == semconv.EPOCH else rec.headroom
        if scope.open_here(start_ns, iteration, reserve):
            return scope
        return self.open_slowly(scope, start_ns, iteration)

    def open_slowly(
        self, scope: BaseScope, start_ns: int, iteration: int | None
    ) -> BaseScope | None:
        """The scope, opened the general way; None if it was not to be opened."""
        return scope if scope.open(start_ns=start_ns, iteration=iteration) else None

    def _data_load(
        self, step: BaseScope | None, start_ns: int, end_ns: int, error: BaseException | None
    ) -> None:
        parent = step or current_scope(self.recorder, get_current())
        if parent is not None:
            parent.add_closed(semconv.DATA_LOAD, start_ns, end_ns, error)


def _loop_frames() -> Iterator[int]:
    """Ids of the running frames that may hold a loop: no generators, nothing of ours."""
    frame = sys._getframe(1)  # noqa: SLF001 - the documented way to the caller
    while frame is not None:
        generator = frame.f_code.co_flags & inspect.CO_GENERATOR
        if not generator and not frame.f_globals.get("__name__", "").startswith("cirron_otel"):
            yield id(frame)
        frame = frame.f_back  # type: ignore[assignment]


def _collected(reference: weakref.ref[Pass]) -> None:
    """The iterator is gone. Garbage collection may run this on any thread, at any point."""
    one = reference()
    if one is not None:
        one._loops.collected(one)  # noqa: SLF001 - parts of one machine
