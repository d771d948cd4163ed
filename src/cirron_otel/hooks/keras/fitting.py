"""Keras's loops, told to a driven loop (see :mod:`cirron_otel.driven`).

All of Keras's loops call a ``CallbackList`` at the same places, on every backend and from loops
that a program writes itself; those are the places told of. ``fit`` and its kin are watched only for
what ends them early. A step is one call of the train function: one batch, or
``steps_per_execution`` of them.
"""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.driven import DrivenLoop
from cirron_otel.hooks.recording import Foreign, in_scope
from cirron_otel.scope_base import current_scope

if TYPE_CHECKING:
    from cirron_otel.hooks.keras.logs import Logs
    from cirron_otel.hooks.patches import Patches
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

TRAIN, TEST, PREDICT = "train", "test", "predict"
_STAGES = {TEST: semconv.EVALUATION, PREDICT: semconv.PREDICTION}


class _Run:
    """One loop that runs: of ``fit``, ``evaluate`` or ``predict``, by its list of callbacks."""

    def __init__(self, kind: str, callbacks: Foreign, driven: DrivenLoop) -> None:
        self.kind = kind
        self.callbacks = callbacks
        self.driven = driven
        #: When a batch began that may turn out to be none, in ns since the Unix epoch.
        self.begun_ns: int | None = None

    def end(self, error: BaseException | None) -> None:
        """It is over; what is still open in it ends with it."""
        if self.kind == TRAIN:
            self.driven.end_fit(error)
        else:
            self.driven.end_stage(error)


#: Told of an event: the loop, and what the event was called with.
_Tell = Callable[[_Run, tuple[Any, ...], dict[str, Any]], None]


class _Here(threading.local):
    """The loops that run on one thread, inner last."""

    def __init__(self) -> None:
        self.runs: list[_Run] = []
        #: By model: it counts its evaluations.
        self.driven: weakref.WeakKeyDictionary[Any, DrivenLoop] = weakref.WeakKeyDictionary()


class Fits:
    """The hooks on models and lists of callbacks. ``active`` is false once the hook is gone."""

    def __init__(self, rec: Recorder, logs: Logs, backend: str) -> None:
        self._rec = rec
        self._logs = logs
        #: Compiled train functions fetch their data themselves: a batch may turn out to be none.
        self._fetches_inside = backend != "torch"
        self._here = _Here()
        self._batches = 0
        self.active = True

    def patch(self, keras: Foreign, patches: Patches) -> None:
        """Replace the methods of models and of ``CallbackList``."""
        for name in ("fit", "evaluate", "predict"):
            self._replace(patches, keras.Model, name, self._call)
        self._replace(patches, keras.Model, "train_on_batch", self._train_on_batch)
        for name in ("save", "save_weights"):
            self._replace(patches, keras.Model, name, self._saved)
        events: dict[str, Callable[..., Any]] = {
            "on_epoch_begin": self._event(self._epoch_begins, self._steps_follow),
            "on_epoch_end": self._event(self._epoch_ends, self._epoch_has_ended),
        }
        for kind in (TRAIN, TEST, PREDICT):
            events[f"on_{kind}_begin"] = functools.partial(self._begins, kind)
            events[f"on_{kind}_end"] = self._event(self._ends, self._has_ended)
            events[f"on_{kind}_batch_begin"] = self._event(self._batch_begins)
            events[f"on_{kind}_batch_end"] = self._event(self._batch_ends, self._batch_has_ended)
        for name, record in events.items():
            self._replace(patches, keras.callbacks.CallbackList, name, record)

    def _replace(self, patches: Patches, kind: type, name: str, record: Callable[..., Any]) -> None:
        """``record(call, self, args, kwargs)`` around each call of a method."""
        owner = next(one for one in kind.__mro__ if name in vars(one))
        original: Callable[..., Any] = vars(owner)[name]

        @functools.wraps(original)
        def wrapper(self_: Foreign, *args: Any, **kwargs: Any) -> Foreign:
            call = functools.partial(original, self_, *args, **kwargs)
            if not self.active or not self._rec.active:
                return call()
            return record(call, self_, args, kwargs)

        patches.replace(owner, name, wrapper)

    # --- models ----------------------------------------------------------------------------------

    def _call(self, call: Callable[[], Any], _model: object, *_arguments: object) -> Foreign:
        """What ends a loop without a word to its callbacks: an exception."""
        runs = self._here.runs
        depth = len(runs)
        try:
            result = call()
        except BaseException as error:
            self._end_down_to(depth, error)
            raise
        self._end_down_to(depth, None)
        return result

    def _end_down_to(self, depth: int, error: BaseException | None) -> None:
        runs = self._here.runs
        while len(runs) > depth:
            self._logs.leave_batch()
            runs.pop().end(error)

    def _train_on_batch(
        self, call: Callable[[], Any], _model: object, *_arguments: object
    ) -> Foreign:
        step = self._own_step()
        try:
            result = call()
        except BaseException as error:
            if step is not None:
                step.close(exc=error)
            raise
        try:
            self._logs.whole_batch(result)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("keras.train_on_batch", error)
        if step is not None:
            step.__exit__(None, None, None)
        return result

    def _own_step(self) -> BaseScope | None:
        """A step for a batch that is trained on by hand, unless it lies in one already."""
        rec = self._rec
        try:
            loops = rec.loops
            if rec.pending:
                loops.activity()
            scope = current_scope(rec, get_current())
            while scope is not None:
                if scope.name == semconv.STEP and scope.is_open:
                    return None
                scope = scope.above
            epoch = loops.current_epoch()
            if epoch is None:
                index, self._batches = self._batches, self._batches + 1
            else:
                counters = epoch.counters = epoch.counters or {}
                index = counters.get(semconv.STEP, 0)
                counters[semconv.STEP] = index + 1
            step: BaseScope = rec.make_loop_scope(semconv.STEP, index)
            return step if step.open(iteration=loops.next_iteration()) else None
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("keras.train_on_batch", error)
            return None

    def _saved(
        self,
        call: Callable[[], Any],
        _model: object,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Foreign:
        """What is saved while a loop runs is a checkpoint."""
        if not self._here.runs:
            return call()
        path = str(args[0] if args else kwargs.get("filepath", ""))
        attrs = {"operation": "save", "path": path}
        return in_scope(self._rec, semconv.CHECKPOINT, attrs, call)

    # --- lists of callbacks ----------------------------------------------------------------------

    def _run(self, callbacks: object) -> _Run | None:
        for run in reversed(self._here.runs):
            if run.callbacks is callbacks:
                return run
        return None

    def _begins(
        self,
        kind: str,
        call: Callable[[], Any],
        callbacks: Foreign,
        *_arguments: object,
    ) -> Foreign:
        runs = self._here.runs
        # A list may stand in another one, as one of its callbacks.
        if any(one is callbacks for run in runs for one in run.callbacks.callbacks):
            return call()
        driven = self._loop(kind, callbacks)
        runs.append(_Run(kind, callbacks, driven))
        if kind == TRAIN:
            driven.begin_fit()
            driven.trains(getattr(callbacks, "model", None))
            return call()
        driven.begin_stage(_STAGES[kind])
        result = call()
        driven.expect_step()
        return result

    def _loop(self, kind: str, callbacks: Foreign) -> DrivenLoop:
        """The loop of the model; another one for a fit inside its own fit."""
        known = self._here.driven
        try:
            driven = known.get(callbacks.model)
            if driven is None:
                driven = known[callbacks.model] = DrivenLoop(self._rec, "keras")
            if kind != TRAIN or not driven.active:
                return driven
        except Exception:  # noqa: BLE001, S110 - a list without a model, or one of an odd kind
            pass
        return DrivenLoop(self._rec, "keras")

    # --- events of a list: its loop, and the event's arguments -----------------------------------

    def _event(self, before: _Tell, after: _Tell | None = None) -> Callable[..., Any]:
        """``before`` the callbacks hear of an event of a loop, and ``after``; neither raises."""

        def record(
            call: Callable[[], Any],
            callbacks: Foreign,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Foreign:
            run = self._run(callbacks)
            if run is None:
                return call()
            self._tell(before, run, args, kwargs)
            result = call()
            if after is not None:
                self._tell(after, run, args, kwargs)
            return result

        return record

    def _tell(self, tell: _Tell, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        try:
            tell(run, args, kwargs)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("keras.callbacks", error)

    def _ends(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run.driven.expect_nothing()
        if run.kind == TEST:
            self._logs.stage(_argument(args, kwargs, 0))

    def _has_ended(self, run: _Run, *_arguments: object) -> None:
        self._end_down_to(self._here.runs.index(run), None)

    def _epoch_begins(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        index = args[0] if args else kwargs["epoch"]
        epochs = (getattr(run.callbacks, "params", None) or {}).get("epochs")
        run.driven.total_epochs = epochs if isinstance(epochs, int) else None
        run.driven.begin_epoch(int(index), steps=_steps(run.callbacks))

    def _steps_follow(self, run: _Run, *_arguments: object) -> None:
        run.driven.expect_step()

    def _epoch_ends(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run.driven.end_step()
        self._logs.epoch(run.callbacks.model, _argument(args, kwargs, 1))

    def _epoch_has_ended(self, run: _Run, *_arguments: object) -> None:
        run.driven.end_epoch()

    def _batch_begins(self, run: _Run, *_arguments: object) -> None:
        if self._fetches_inside and _steps(run.callbacks) is None:
            run.begun_ns = self._rec.clock.now()
        elif run.driven.step is None:
            run.driven.begin_step()
        if run.kind == TRAIN:
            self._logs.begin_batch()

    def _batch_ends(self, run: _Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        begun_ns, run.begun_ns = run.begun_ns, None
        if begun_ns is not None:
            run.driven.begin_step(start_ns=begun_ns)
        if run.kind == TRAIN:
            self._logs.batch(run.callbacks.model, _argument(args, kwargs, 1))

    def _batch_has_ended(self, run: _Run, *_arguments: object) -> None:
        run.driven.end_step()
        run.driven.expect_step()


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], position: int) -> Foreign:
    """The logs of an event."""
    return args[position] if len(args) > position else kwargs.get("logs")


def _steps(callbacks: Foreign) -> int | None:
    """How many calls of the train function an epoch has, where Keras knows."""
    batches = (getattr(callbacks, "params", None) or {}).get("steps")
    if not isinstance(batches, int) or batches < 1:
        return None
    at_once = getattr(callbacks.model, "steps_per_execution", 1)
    return math.ceil(batches / at_once) if isinstance(at_once, int) and at_once > 1 else batches
