"""``data_load`` and ``step``: what a ``DataLoader``'s iterators fetch, told to the loops.

The iterators stay torch's own. Worker processes find their parent scope by what is set while they
are started: ``Recorder.fork_parent`` for a fork, the carrier in the environment for the rest.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader
from torch.utils.data.dataloader import _BaseDataLoaderIter

from cirron_otel import semconv
from cirron_otel.children import carrier
from cirron_otel.core import RecordedFetch
from cirron_otel.passes import Pass

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.hooks.torch.phases import Phases
    from cirron_otel.scope_base import BaseScope

#: Where an iterator keeps its pass. Iterators cannot be copied or pickled, so it stays there.
_KEY = "_cirron_otel_pass"


class Loaders:
    """The hooks on ``DataLoader`` and its iterators."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._rec = phases.rec

    def patch(self, patches: Patches) -> None:
        """Replace ``DataLoader.__iter__`` and ``__next__`` of its iterators."""
        patches.replace(DataLoader, "__iter__", self.recorded_iter(vars(DataLoader)["__iter__"]))
        patches.replace(
            _BaseDataLoaderIter, "__next__", self._next(vars(_BaseDataLoaderIter)["__next__"])
        )

    def _silent(self) -> bool:
        """Whether fetches are none to record: the hook is gone, or this is a worker process."""
        rec = self._rec
        return (
            not self._phases.active
            or not rec.active
            or (rec.is_child and rec.worker_id() is not None)
        )

    def recorded_iter(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """What takes the place of a loader's ``__iter__``."""

        @functools.wraps(original)
        def __iter__(loader: DataLoader[Any]) -> Any:  # noqa: ANN401, N807 - torch's iterator
            if self._silent():
                return original(loader)
            if loader.num_workers:
                with self._parent_of_workers(loader):
                    iterator = original(loader)
            else:
                iterator = original(loader)
            try:
                _end_workers_in_order(loader, iterator)
                # Persistent workers: the same iterator as last time, in a new pass.
                before = vars(iterator).pop(_KEY, None)
                if isinstance(before, Pass):
                    before.finish()
            except Exception as error:  # noqa: BLE001 - see _guard
                self._rec.guard.swallow("torch.data_load", error)
            return iterator

        return __iter__

    def _next(self, original: Callable[..., Any]) -> Callable[..., Any]:
        phases, rec = self._phases, self._rec
        loops, clock, swallow = rec.loops, rec.clock, rec.guard.swallow

        def slowly(iterator: Any) -> Any:  # noqa: ANN401 - torch's iterator
            here = loops.here
            if here.fetching or not phases.active or (rec.is_child and self._silent()):
                return original(iterator)
            one: Pass | None = None
            try:
                one = iterator.__dict__.get(_KEY)
                if one is None or one.recorder is not rec:
                    one = loops.begin(explicit=False, iterator=iterator)
                    setattr(iterator, _KEY, one)
                one.before_fetch()
            except Exception as error:  # noqa: BLE001 - see _guard
                swallow("torch.data_load", error)
            # Two monotonic readings and one offset: the clock may be set during the fetch.
            offset, monotonic_ns = clock.offset_ns, clock.monotonic_ns
            begun = monotonic_ns() + offset
            here.fetching += 1
            try:
                item = original(iterator)
            except BaseException as error:
                here.fetching -= 1
                if one is not None:
                    self._ended(one, begun, monotonic_ns() + offset, error)
                raise
            here.fetching -= 1
            try:
                if one is not None:
                    one.fetched(begun, monotonic_ns() + offset)
            except Exception as error:  # noqa: BLE001 - see _guard
                swallow("torch.data_load", error)
            return item

        # It stands in the class as it is: a function around it would be one more frame.
        fetch = RecordedFetch(phases, _KEY, original, slowly, self._ended)
        functools.update_wrapper(fetch, original)
        return fetch

    def _ended(self, one: Pass, begun_ns: int, end_ns: int, error: BaseException) -> None:
        try:
            if isinstance(error, StopIteration):
                one.finish()
            else:
                one.failed(begun_ns, end_ns, error)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.data_load", failure)

    @contextmanager
    def _parent_of_workers(self, loader: DataLoader[Any]) -> Iterator[None]:
        rec = self._rec
        before = os.environ.get(semconv.CARRIER_VARIABLE)
        try:
            parent = self._worker_parent(loader)
            rec.fork_parent = parent
            if before is not None and parent is not None:
                os.environ[semconv.CARRIER_VARIABLE] = carrier(rec, parent)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("torch.workers", error)
        try:
            yield
        finally:
            rec.fork_parent = None
            if before is not None:
                os.environ[semconv.CARRIER_VARIABLE] = before

    def _worker_parent(self, loader: DataLoader[Any]) -> BaseScope | None:
        """The epoch that is open, unless it is over but for the next one; else the session."""
        rec = self._rec
        if not loader.persistent_workers:
            epoch: BaseScope | None = rec.loops.current_epoch()
            if epoch is not None and epoch is not rec.loops.here.implicit_epoch:
                return epoch
        return rec.session


def _end_workers_in_order(loader: DataLoader[Any], iterator: object) -> None:
    """Have torch end persistent workers in order when the process exits.

    Those that are left to the end of the process are killed by ``multiprocessing`` otherwise, by a
    signal that torch has them die of at once, in C: what they had not flushed would be lost. Torch
    itself registers this where memory is pinned; versions that have no such handler lose at most
    one flush interval.
    """
    if loader.num_workers and loader.persistent_workers:
        register = getattr(iterator, "_register_persistent_workers_atexit", None)
        if register is not None:
            register()
