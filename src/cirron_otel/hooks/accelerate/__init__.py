"""The hook into Accelerate: prepared data loaders, and gradients gathered over several batches.

The loop is the program's own, and the torch hook sees it; two things it cannot know. A prepared
loader reads one batch ahead, so it is the loader that is watched and not the torch one inside:
``data_load`` is how long the program waited for its batch. And inside ``accelerator.accumulate``
a step is one optimizer update, with a ``micro_batch`` scope for each batch.

Inside a loop that another framework runs all this is that framework's business.
"""

from __future__ import annotations

import functools
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.driven import active_loop
from cirron_otel.hooks.patches import Patches
from cirron_otel.hooks.recording import Foreign
from cirron_otel.scope_base import BaseScope, current_scope

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron_otel.passes import Pass
    from cirron_otel.recorder import Recorder

_LOADERS = ("DataLoaderShard", "DataLoaderDispatcher", "SkipDataLoader")
_COUNT = "batches"


def make(rec: Recorder) -> AccelerateHook:
    """The hook for one recorder, not in place yet."""
    return AccelerateHook(rec)


class AccelerateHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()
        self._active = False

    def instrument(self) -> None:
        """Patch the loaders and ``Accelerator.accumulate``; all of it or nothing."""
        self._active = True
        try:
            loaders = sys.modules["accelerate.data_loader"]
            for name in _LOADERS:
                kind = getattr(loaders, name, None)
                if kind is not None and "__iter__" in vars(kind):
                    self._patches.replace(kind, "__iter__", self._iter(vars(kind)["__iter__"]))
            accelerator = sys.modules["accelerate.accelerator"].Accelerator
            self._patches.replace(
                accelerator, "accumulate", self._accumulate(vars(accelerator)["accumulate"])
            )
        except BaseException:
            self.uninstrument()
            raise

    def uninstrument(self) -> None:
        """Put Accelerate back. Functions that somebody else has wrapped meanwhile do nothing."""
        self._active = False
        self._patches.undo()

    def _silent(self) -> bool:
        rec = self._rec
        return (
            not self._active
            or not rec.active
            or bool(rec.loops.here.fetching)
            or (rec.is_child and rec.worker_id() is not None)
            or active_loop(rec) is not None
        )

    # --- loaders ---------------------------------------------------------------------------------

    def _iter(self, original: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        @functools.wraps(original)
        def __iter__(loader: Foreign) -> Iterator[Any]:  # noqa: N807 - it takes the place of one
            batches = original(loader)
            try:
                if self._silent():
                    return batches
                kept: list[Pass] = []
                told = self._told(batches, loader, kept)
                kept.append(self._rec.loops.begin(explicit=False, iterator=told, source=loader))
            except Exception as error:  # noqa: BLE001 - see _guard
                self._rec.guard.swallow("accelerate.data_load", error)
                return batches
            return told

        return __iter__

    def _told(self, batches: Iterator[Any], loader: Foreign, kept: list[Pass]) -> Iterator[Any]:
        """``batches``, its fetches told to the pass in ``kept``; a generator as it is one."""
        rec = self._rec
        here, now = rec.loops.here, rec.clock.now
        one = kept[0]
        skipped = int(getattr(loader, "skip_batches", 0) or 0)
        while True:
            if here.fetching:  # ci.batches fetches, and tells of it itself
                try:
                    item = next(batches)
                except StopIteration:
                    return
                yield item
                continue
            goes_on = self._before_fetch(one, loader)
            begun = now()
            here.fetching += 1
            try:
                item = next(batches)
            except BaseException as error:
                here.fetching -= 1
                self._ended(one, begun, now(), error)
                if isinstance(error, StopIteration):
                    return
                raise
            here.fetching -= 1
            self._fetched(one, goes_on, begun, now(), skipped)
            skipped = 0
            yield item

    def _before_fetch(self, one: Pass, loader: Foreign) -> BaseScope | None:
        """The step is over, unless it gathers more gradients: then it is what is returned."""
        try:
            step: BaseScope | None = one.step
            if (
                step is not None
                and step.is_open
                and semconv.MICRO_BATCH in (step.counters or {})
                and not loader.gradient_state.sync_gradients
            ):
                return step
            if self._active:
                one.before_fetch()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("accelerate.data_load", error)
        return None

    def _fetched(
        self, one: Pass, step: BaseScope | None, begun_ns: int, end_ns: int, skipped: int
    ) -> None:
        if not self._active:
            return
        try:
            if step is not None:
                step.add_closed(semconv.DATA_LOAD, begun_ns, end_ns)
                return
            if skipped:
                # The batch that came is in there, too: the loader does not say when it began.
                self._add_skip(skipped, begun_ns, end_ns)
                begun_ns = end_ns
            one.fetched(begun_ns, end_ns)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("accelerate.data_load", error)

    def _add_skip(self, batches: int, begun_ns: int, end_ns: int) -> None:
        rec = self._rec
        parent = current_scope(rec, get_current())
        if parent is not None:
            scope = rec.make_scope(semconv.RESUME_SKIP, None, {_COUNT: batches})
            if scope.open(parent=parent, start_ns=begun_ns, attach=False):
                scope.close(end_ns=end_ns, restore=False)

    def _ended(self, one: Pass, begun_ns: int, end_ns: int, error: BaseException) -> None:
        try:
            if isinstance(error, StopIteration):
                one.finish()
            else:
                one.failed(begun_ns, end_ns, error)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("accelerate.data_load", failure)

    # --- accumulation ----------------------------------------------------------------------------

    def _accumulate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def accumulate(accelerator: Foreign, *models: Foreign) -> Foreign:
            manager = original(accelerator, *models)
            try:
                if self._silent() or accelerator.gradient_accumulation_steps < 2:  # noqa: PLR2004
                    return manager
                scope = self._micro_batch()
            except Exception as error:  # noqa: BLE001 - see _guard
                self._rec.guard.swallow("accelerate.accumulate", error)
                return manager
            return manager if scope is None else _in(scope, manager)

        return accumulate

    def _micro_batch(self) -> BaseScope | None:
        """The scope for the next batch of the step of this thread, not open yet."""
        rec = self._rec
        if rec.pending:
            rec.loops.activity()
        step = current_scope(rec, get_current())
        while step is not None and not (step.name == semconv.STEP and step.auto):
            step = step.above
        if step is None or not step.is_open:
            return None
        counters = step.counters = step.counters or {}
        index = counters.get(semconv.MICRO_BATCH, 0)
        counters[semconv.MICRO_BATCH] = index + 1
        scope: BaseScope = rec.make_scope(semconv.MICRO_BATCH, index, {})
        return scope


@contextmanager
def _in(scope: BaseScope, manager: Foreign) -> Iterator[None]:
    with scope, manager:
        yield
