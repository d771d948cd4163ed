"""The loops of Lightning's Trainer, told to a driven loop (see :mod:`cirron_otel.driven`).

An epoch is what lies between the start and the end of Lightning's own, its hooks included. A step
is one optimizer update: its batches are ``micro_batch`` scopes where gradients are accumulated; in
manual optimization it is one batch, however many optimizers step in it. Validation is no part of
the step after which it runs, and the sanity check lies outside the epochs.
"""

from __future__ import annotations

import functools
import math
import weakref
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.driven import DrivenLoop, active_loop
from cirron_otel.hooks.lightning.classes import CONNECTOR, find
from cirron_otel.hooks.recording import Foreign, in_scope, mark
from cirron_otel.scope_base import current_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.lightning.values import Values
    from cirron_otel.hooks.patches import Patches
    from cirron_otel.recorder import Recorder


class _Driver:
    """What we know of one Trainer."""

    def __init__(self, rec: Recorder) -> None:
        self.driven = DrivenLoop(rec, "lightning")
        #: Whether batches are being gathered into a step, and how many there were.
        self.in_group = False
        self.parts = 0
        #: Whether the batch that is to come may not come, and whether it is one of several.
        self.deferred = False
        self.several = False
        #: Sum and number of the losses of the step.
        self.loss: Any = None
        self.losses = 0
        #: Learning rates at the start of the step.
        self.rates: list[Any] = []
        #: The evaluations and predictions that run, inner last: whether each has begun.
        self.runs: list[bool] = []


class TrainerLoops:
    """The hooks on the loops. ``active`` is false once the hook is gone."""

    def __init__(self, rec: Recorder, values: Values) -> None:
        self._rec = rec
        self._values = values
        self.active = False
        self._drivers: weakref.WeakKeyDictionary[Any, _Driver] = weakref.WeakKeyDictionary()

    def patch(self, package: str, patches: Patches) -> None:
        """Replace the methods of the loops in ``package``, which is imported."""
        fit = find(package, "loops._FitLoop")
        self._around(patches, fit, "run", self._fit)
        self._around(patches, fit, "on_advance_start", self._epoch_starts)
        self._around(patches, fit, "advance", self._epoch)
        self._around(patches, fit, "on_advance_end", self._epoch_ends)
        self._around(patches, find(package, "loops._TrainingEpochLoop"), "advance", self._batch)
        self._around(patches, find(package, CONNECTOR), "on_batch_start", self._batch_came)
        for kind, step in (
            (find(package, "loops._EvaluationLoop"), "_evaluation_step"),
            (find(package, "loops._PredictionLoop"), "_predict_step"),
        ):
            self._around(patches, kind, "run", self._run)
            self._around(patches, kind, "reset", self._run_begins)
            self._around(patches, kind, "on_run_start", self._run_started)
            self._around(patches, kind, step, self._run_step)
        self._patch_fetches(find(package, "loops.fetchers._DataFetcher"), patches)
        self._patch_checkpoints(find(package, "trainer.trainer.Trainer"), patches)

    def _around(self, patches: Patches, owner: type, name: str, record: Callable[..., Any]) -> None:
        """``record(driver, call, loop)`` around each call of a method of a loop."""
        original: Callable[..., Any] = vars(owner)[name]

        @functools.wraps(original)
        def wrapper(loop: Foreign, *args: Any, **kwargs: Any) -> Foreign:
            call = functools.partial(original, loop, *args, **kwargs)
            driver = self._driver(loop) if self.active else None
            return call() if driver is None else record(driver, call, loop)

        patches.replace(owner, name, wrapper)

    def _driver(self, loop: Foreign) -> _Driver | None:
        try:
            driver = self._drivers.get(loop.trainer)
            if driver is None:
                driver = self._drivers[loop.trainer] = _Driver(self._rec)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning", error)
            return None
        return driver

    # --- fit -------------------------------------------------------------------------------------

    def _fit(self, driver: _Driver, call: Callable[[], Any], loop: Foreign) -> Foreign:
        driver.in_group = False
        driver.driven.begin_fit()
        driver.driven.trains(getattr(loop.trainer, "lightning_module", None))
        try:
            result = call()
        except BaseException as error:
            driver.driven.end_fit(error)
            raise
        driver.driven.end_fit()
        return result

    def _epoch_starts(self, driver: _Driver, call: Callable[[], Any], loop: Foreign) -> Foreign:
        driver.in_group = False
        try:
            planned = loop.trainer.max_epochs  # None and -1: no end
            driver.driven.total_epochs = planned if planned and planned > 0 else None
            driver.driven.begin_epoch(
                int(loop.trainer.current_epoch), steps=_steps_of_epoch(loop.trainer)
            )
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning.epoch", error)
        return self._ending_epoch_on_error(driver, call)

    def _epoch(self, driver: _Driver, call: Callable[[], Any], _loop: object) -> Foreign:
        return self._ending_epoch_on_error(driver, call)

    def _epoch_ends(self, driver: _Driver, call: Callable[[], Any], _loop: object) -> Foreign:
        driver.driven.end_step()
        result = self._ending_epoch_on_error(driver, call)
        driver.driven.end_epoch()
        return result

    def _ending_epoch_on_error(self, driver: _Driver, call: Callable[[], Any]) -> Foreign:
        try:
            return call()
        except BaseException as error:
            # StopIteration is how the epoch is left early.
            driver.driven.end_epoch(None if isinstance(error, StopIteration) else error)
            raise

    # --- batches and steps -----------------------------------------------------------------------

    def _batch(self, driver: _Driver, call: Callable[[], Any], loop: Foreign) -> Foreign:
        phases = self._rec.torch_phases
        try:
            self._begin_batch(driver, loop, call.args[1:])  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning.step", error)
        if phases is not None:
            phases.here.closure_first = True
        try:
            result = call()
        except BaseException as error:
            self._values.end_batch()
            driver.in_group = driver.deferred = False
            driver.driven.end_step(None if isinstance(error, StopIteration) else error)
            raise
        finally:
            if phases is not None:
                phases.here.closure_first = False
        try:
            self._end_batch(driver, loop)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning.step", error)
        return result

    def _begin_batch(self, driver: _Driver, loop: Foreign, args: tuple[Any, ...]) -> None:
        driven, trainer = driver.driven, loop.trainer
        automatic = trainer.lightning_module.automatic_optimization
        if not driver.in_group:
            driver.in_group = True
            driver.parts = driver.losses = 0
            driver.loss = None
            driver.rates = [one.param_groups[0]["lr"] for one in trainer.optimizers]
            iteration = trainer.global_step if automatic else loop.batch_progress.total.ready
            # It may come back at once: to the validation it was stopped at, or at the end.
            driver.deferred = bool(loop.restarting or (args and args[0].done))
            if driver.deferred:
                driven.expect_step(iteration=iteration)
            else:
                driven.begin_step(iteration=iteration)
        driver.several = automatic and trainer.accumulate_grad_batches > 1
        if driver.several and not driver.deferred:
            driven.begin_micro_batch(driver.parts)
        driver.parts += 1
        self._values.begin_batch()

    def _batch_came(self, driver: _Driver, call: Callable[[], Any], _loop: object) -> Foreign:
        if driver.deferred:
            driver.deferred = False
            if driver.driven.step is None:
                driver.driven.begin_step()
            if driver.several:
                driver.driven.begin_micro_batch(driver.parts - 1)
        return call()

    def _end_batch(self, driver: _Driver, loop: Foreign) -> None:
        driven, trainer = driver.driven, loop.trainer
        loss = self._values.end_batch()
        if loss is not None:
            driver.loss = loss if driver.loss is None else driver.loss + loss
            driver.losses += 1
            if driven.micro_batch is not None:
                mark(self._rec, semconv.LOSS, loss)
        driven.end_micro_batch()
        if trainer.lightning_module.automatic_optimization and loop._should_accumulate():  # noqa: SLF001
            return
        driver.in_group = False
        if driver.deferred:  # there was no batch
            driver.deferred = False
            driven.expect_nothing()
            return
        if driver.loss is not None:
            mean = driver.loss if driver.losses == 1 else driver.loss / driver.losses
            mark(self._rec, semconv.LOSS, mean)
            driver.loss = None
        for number, rate in enumerate(driver.rates):
            name = semconv.LEARNING_RATE if number == 0 else f"{semconv.LEARNING_RATE}/{number}"
            mark(self._rec, name, rate)
        driven.end_step()

    # --- validate, test, predict -----------------------------------------------------------------

    def _run(self, driver: _Driver, call: Callable[[], Any], _loop: object) -> Foreign:
        driver.runs.append(False)
        try:
            result = call()
        except BaseException as error:
            if driver.runs.pop():
                driver.driven.end_stage(error)
            raise
        if driver.runs.pop():
            driver.driven.end_stage()
        return result

    def _run_begins(self, driver: _Driver, call: Callable[[], Any], loop: Foreign) -> Foreign:
        """There is something to evaluate; before this it was not clear."""
        if driver.runs and not driver.runs[-1]:
            driver.runs[-1] = True
            try:
                self._begin_stage(driver.driven, loop.trainer)
            except Exception as error:  # noqa: BLE001 - see _guard
                self._rec.guard.swallow("lightning.evaluation", error)
        return call()

    def _begin_stage(self, driven: DrivenLoop, trainer: Foreign) -> None:
        if trainer.predicting:
            driven.begin_stage(semconv.PREDICTION)
        elif trainer.sanity_checking:
            driven.begin_stage(semconv.SANITY_CHECK)
        else:
            driven.begin_stage(semconv.EVALUATION)
            if driven.stage is not None:
                driven.stage.attrs = {"stage": "test" if trainer.testing else "validate"}

    def _run_started(self, driver: _Driver, call: Callable[[], Any], _loop: object) -> Foreign:
        result = call()
        if driver.runs and driver.runs[-1]:
            driver.driven.expect_step()
        return result

    def _run_step(self, driver: _Driver, call: Callable[[], Any], loop: Foreign) -> Foreign:
        driven = driver.driven
        # A step that gets the iterator may find it at its end: a fetch of its own opens the step.
        fetcher = type(getattr(loop, "_data_fetcher", None)).__name__
        fetches = fetcher == "_DataLoaderIterDataFetcher"
        if driven.step is None and not fetches:
            driven.begin_step()
        try:
            result = call()
        except BaseException as error:
            driven.end_step(None if isinstance(error, StopIteration) else error)
            raise
        driven.end_step()
        driven.expect_step()
        return result

    # --- data ------------------------------------------------------------------------------------

    def _patch_fetches(self, fetcher: type, patches: Patches) -> None:
        """One ``data_load`` for a batch, of whatever and however many loaders it comes."""
        original: Callable[..., Any] = vars(fetcher)["__next__"]
        rec = self._rec
        here, now = rec.loops.here, rec.clock.now

        @functools.wraps(original)
        def __next__(self_: Foreign) -> Foreign:  # noqa: N807 - it takes the place of one
            driven = active_loop(rec) if self.active and rec.active else None
            if driven is None or here.fetching:
                return original(self_)
            begun = now()
            here.fetching += 1
            try:
                batch = original(self_)
            except BaseException as error:
                here.fetching -= 1
                if not isinstance(error, StopIteration):
                    self._fetched(driven, begun, error)
                raise
            here.fetching -= 1
            self._fetched(driven, begun, None)
            return batch

        patches.replace(fetcher, "__next__", __next__)

    def _fetched(self, driven: DrivenLoop, begun_ns: int, error: BaseException | None) -> None:
        try:
            end_ns = self._rec.clock.now()
            if error is None:
                driven.fetched(begun_ns, end_ns)
                return
            scope = current_scope(self._rec, get_current())
            if scope is not None:
                scope.add_closed(semconv.DATA_LOAD, begun_ns, end_ns, error)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning.data_load", failure)

    # --- checkpoints -----------------------------------------------------------------------------

    def _patch_checkpoints(self, trainer: type, patches: Patches) -> None:
        original: Callable[..., Any] = vars(trainer)["save_checkpoint"]

        @functools.wraps(original)
        def save_checkpoint(
            self_: Foreign, filepath: Foreign, *args: Any, **kwargs: Any
        ) -> Foreign:
            call = functools.partial(original, self_, filepath, *args, **kwargs)
            if not self.active or not self._rec.active:
                return call()
            attrs = {"operation": "save", "path": str(filepath)}
            return in_scope(self._rec, semconv.CHECKPOINT, attrs, call)

        patches.replace(trainer, "save_checkpoint", save_checkpoint)


def _steps_of_epoch(trainer: Foreign) -> int | None:
    """How many optimizer updates an epoch has, if its batches are counted."""
    if not isinstance(trainer.num_training_batches, int):  # infinity
        return None
    batches = int(trainer.num_training_batches)
    automatic = trainer.lightning_module.automatic_optimization
    return math.ceil(batches / int(trainer.accumulate_grad_batches)) if automatic else batches
