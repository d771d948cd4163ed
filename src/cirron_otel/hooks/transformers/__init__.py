"""The hook into transformers: the loop of its ``Trainer``.

What the Trainer calls is recorded from two sides. Its callback events pass ``CallbackHandler``,
where they are seen without a callback of ours among the user's; the methods between them are
wrapped on ``Trainer`` and on each of its subclasses that has its own, so that an overridden
``training_step`` is seen whether it calls the original or not. Nothing is put on trainers, their
arguments, states or models.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from typing import TYPE_CHECKING, Any

from transformers import trainer as trainer_module
from transformers.trainer import Trainer
from transformers.trainer_callback import CallbackHandler

from cirron_otel.driven import active_loop
from cirron_otel.hooks.patches import Patches
from cirron_otel.hooks.transformers.trainer_loop import (
    AFTER_EVENTS,
    AROUND_METHODS,
    BEFORE_EVENTS,
    Call,
    Event,
    Theirs,
    TrainerLoop,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron_otel.recorder import Recorder


def make(rec: Recorder) -> TransformersHook:
    """The hook for one recorder, not in place yet."""
    return TransformersHook(rec)


class TransformersHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()
        self._active = False
        self._loops: weakref.WeakKeyDictionary[Any, TrainerLoop] = weakref.WeakKeyDictionary()
        self._ours: set[Callable[..., Any]] = set()

    def instrument(self) -> None:
        """Wrap the Trainer; a version whose parts have other names is told of and left alone."""
        if "get_batch_samples" not in vars(Trainer) or "call_event" not in vars(CallbackHandler):
            self._rec.guard.warn(
                "transformers",
                "this version of transformers is not supported, its Trainer is recorded as plain "
                "torch: pip install 'transformers>=4.46'",
            )
            return
        self._active = True
        try:
            for kind in _all_kinds(Trainer):
                self._wrap_class(kind)
            init = vars(Trainer)["__init__"]
            self._patches.replace(Trainer, "__init__", self._initialised(init))
            call_event = vars(CallbackHandler)["call_event"]
            self._patches.replace(CallbackHandler, "call_event", self._event(call_event))
            skip = vars(trainer_module).get("skip_first_batches")
            if callable(skip):
                self._patches.replace(trainer_module, "skip_first_batches", self._skipping(skip))
            sampler = getattr(sys.modules.get("accelerate.data_loader"), "SkipBatchSampler", None)
            if sampler is not None:
                one_by_one = vars(sampler)["__iter__"]
                self._patches.replace(sampler, "__iter__", self._sampling(one_by_one))
        except BaseException:
            self.uninstrument()
            raise

    def uninstrument(self) -> None:
        """Put the Trainer back. A loop under way goes on unrecorded."""
        self._active = False
        self._patches.undo()
        self._ours.clear()

    # --- which loop ----------------------------------------------------------------------------

    def _loop_of(self, trainer: Theirs) -> TrainerLoop:
        loop = self._loops.get(trainer)
        if loop is None:
            loop = self._loops[trainer] = TrainerLoop(self._rec, trainer)
        return loop

    def _guarded(self, place: str, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow(f"transformers.{place}", error)

    # --- methods -------------------------------------------------------------------------------

    def _initialised(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``Trainer.__init__``: a subclass that was made meanwhile is wrapped, too."""

        @functools.wraps(original)
        def __init__(trainer: Theirs, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            original(trainer, *args, **kwargs)
            if self._active:
                for kind in type(trainer).__mro__:
                    if issubclass(kind, Trainer):
                        self._guarded("wrap", self._wrap_class, kind)

        return __init__

    def _wrap_class(self, kind: type) -> None:
        for name in AROUND_METHODS:
            method = vars(kind).get(name)
            if inspect.isfunction(method) and method not in self._ours:
                wrapped = self._method(name, method)
                self._ours.add(wrapped)
                self._patches.replace(kind, name, wrapped)

    def _method(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        begin, end = AROUND_METHODS[name]

        @functools.wraps(original)
        def method(trainer: Theirs, *args: Any, **kwargs: Any) -> Theirs:
            if not self._active or not self._rec.active:
                return original(trainer, *args, **kwargs)
            loop = self._loop_of(trainer)
            outer = loop.inside.get(name)
            if outer is not None and outer is not original:  # called by an overriding method
                return original(trainer, *args, **kwargs)
            loop.inside[name] = original
            self._guarded(name, begin, loop, trainer)
            try:
                result = original(trainer, *args, **kwargs)
            except BaseException as error:
                loop.inside[name] = outer
                self._guarded(name, end, loop, Call(None, error))
                raise
            loop.inside[name] = outer
            self._guarded(name, end, loop, Call(result, None))
            return result

        return method

    # --- events --------------------------------------------------------------------------------

    def _event(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``CallbackHandler.call_event``: ours first when something begins, last when it ends."""

        @functools.wraps(original)
        def call_event(
            handler: Theirs,
            event: str,
            args: Theirs,
            state: Theirs,
            control: Theirs,
            **kwargs: Any,
        ) -> Theirs:
            before, after = BEFORE_EVENTS.get(event), AFTER_EVENTS.get(event)
            known = self._active and (before is not None or after is not None)
            loop = active_loop(self._rec) if known else None
            if not isinstance(loop, TrainerLoop) or not loop.is_told_by(handler):
                return original(handler, event, args, state, control, **kwargs)
            told = Event(handler, args, state, kwargs)
            if before is not None:
                self._guarded(event, before, loop, told)
            result = original(handler, event, args, state, control, **kwargs)
            if after is not None:
                self._guarded(event, after, loop, told)
            return result

        return call_event

    # --- resuming ------------------------------------------------------------------------------

    def _skipping(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``skip_first_batches``: a resumed epoch begins in the middle of its data."""

        @functools.wraps(original)
        def skip_first_batches(*args: Any, **kwargs: Any) -> Theirs:
            result = original(*args, **kwargs)
            loop = active_loop(self._rec) if self._active else None
            if isinstance(loop, TrainerLoop):
                self._guarded("resume_skip", self._note_skip, loop, result, args, kwargs)
            return result

        return skip_first_batches

    def _sampling(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """``SkipBatchSampler.__iter__``: batches that are skipped without being fetched."""

        def timed(loop: TrainerLoop, sampler: Theirs) -> Iterator[Any]:
            iterator = original(sampler)
            begun = self._rec.clock.now()
            for item in iterator:
                if begun:
                    batches, now = sampler.skip_batches, self._rec.clock.now()
                    self._guarded("resume_skip", loop.skipped_in_sampler, begun, now, batches)
                    begun = 0
                yield item

        @functools.wraps(original)
        def __iter__(sampler: Theirs) -> Theirs:  # noqa: N807
            loop = active_loop(self._rec) if self._active else None
            if isinstance(loop, TrainerLoop) and getattr(sampler, "skip_batches", None):
                return timed(loop, sampler)
            return original(sampler)

        return __iter__

    def _note_skip(
        self, loop: TrainerLoop, data: object, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        batches = kwargs.get("num_batches", args[1] if len(args) > 1 else 0)
        if isinstance(batches, int) and batches > 0:
            fetched = getattr(data, "skip_batches", 0)
            loop.skips_batches(batches, fetched if isinstance(fetched, int) else 0)


def _all_kinds(kind: type[Trainer]) -> list[type[Trainer]]:
    """The class and all below it."""
    found: list[type[Trainer]] = [kind]
    for one in found:  # grows as it goes
        found += [below for below in one.__subclasses__() if below not in found]
    return found
