"""One traversal of a data source: what its fetches are part of, and when its scopes are made.

The rules are those of :mod:`cirron_otel.loops`, which keeps the passes of a recording.
"""

from __future__ import annotations

import inspect
import sys
import threading
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.core import PassCore
from cirron_otel.driven import active_loop
from cirron_otel.scope_base import BaseScope, current_scope
from cirron_otel.scope_core import ENDED, NEW, OPEN

if TYPE_CHECKING:
    from cirron_otel.loops import Loops

TRAIN = "train"
EVALUATION = semconv.EVALUATION
_MAX_PENDING = 10_000


class Pass(PassCore):
    """One traversal of a data source on one thread."""

    __slots__ = (
        "__weakref__", "_frame", "_hint", "_iterator", "_outer", "_pending", "_seen", "_taken",
        "_unowned", "container", "displaced", "gone_ns", "length", "source", "thread",
        "thread_id",
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
        #: How many items it has, where that is known and was harmless to ask.
        self.length: int | None = None
        #: When the iterator was collected, if it was.
        self.gone_ns: int | None = None
        #: What the first fetch suggested for ``stage``.
        self._hint: str | None = None
        #: The scope the steps lie in.
        self._place: BaseScope | None = None
        self._outer = False
        self._unowned = 0
        self._seen = -1
        #: Read by a loop that a framework runs.
        self._taken = False
        self._frame = 0
        self._pending: list[tuple[int, int]] = []
        #: What is looped over, where the iterator is not all there is.
        self.source: object | None = None
        self._iterator: weakref.ref[object] | None = None
        if iterator is not None:
            reference = weakref.ref(self)
            self._iterator = weakref.ref(iterator, lambda _: _collected(reference))

    def alive(self) -> bool:
        """Whether the iterator still exists (explicit passes live as long as they run)."""
        return self._iterator is None or self._iterator() is not None

    def total(self) -> int | None:
        """How many items the source has, where it says so."""
        source = self.source if self._iterator is None else self._iterator()
        try:
            return len(source)  # type: ignore[arg-type]
        except Exception:  # noqa: BLE001 - a data set may raise anything where it has no length
            return None

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
        if self.fetched_here(start_ns, end_ns) or self.state == ENDED:
            return
        if not self._frame:
            self._frame = next(_loop_frames(), 0)
            if self.stage is None:
                self._hint = self._loops.stage_probe()
        if not self.explicit and self.stage != EVALUATION:
            driven = active_loop(self.recorder)
            if driven is not None and (self._taken or driven.expects_fetches or self._hint is None):
                self._taken = True
                driven.fetched(start_ns, end_ns)
                return
        if self.state == OPEN and (self.explicit or self._is_in_place()):
            self._record(start_ns, end_ns)
            return
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
        self._pending.clear()
        self.source = None
        if loops.here.owner is not self:
            return
        loops.here.owner = None
        epoch = self.epoch
        if epoch is not None and epoch is loops.here.implicit_epoch and epoch.is_open:
            loops.epoch_ending(epoch)

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
        if active_loop(self.recorder) is not None:
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
        self.length = self._planned()
        loops.training = self
        self._stay()

    def _planned(self) -> int | None:
        # Asked for its length, a loader of an iterable data set warns later if it gives more.
        return None if getattr(self.source, "_dataset_kind", 0) == 1 else self.total()

    def _record(self, start_ns: int, end_ns: int) -> None:
        loops = self._loops
        if self.stage == EVALUATION:
            step = self._auto(semconv.STEP, self.count, start_ns, None)
            self.count += 1
        else:
            owner = loops.here.owner
            if active_loop(self.recorder) is not None:
                step = self._inner(start_ns)
            elif owner is self:
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
        step = self._auto(semconv.STEP, index, start_ns, self._loops.next_iteration())
        if not self._loops.warm:
            self._loops.warm_up(step)
        return step

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
