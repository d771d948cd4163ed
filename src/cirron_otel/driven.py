"""Loops that a framework runs: how its hook tells us of epochs, steps and evaluations.

A framework's hook keeps one :class:`DrivenLoop` for each of its loops (a trainer, a model) and
calls it where the framework does the thing. While it is active, between ``begin_fit`` and
``end_fit`` or inside a stage, the loop lies in the OTel context under a key of its own, so it is
seen by what runs in that context and by nothing else:

* The outermost loop owns ``epoch`` and ``step``. Inside a ``ci.epochs`` a driven loop opens no
  epochs, inside the step of another loop or inside another driven loop neither epochs nor steps;
  its evaluations are recorded all the same. A loop in another thread is its own.
* Passes over a data source that are made meanwhile (see :mod:`cirron_otel.loops`) own nothing: a
  ``DataLoader`` gives ``data_load`` in the scope that is current, ``ci.batches`` ``micro_batch``
  scopes. An evaluation that the program makes by hand, in a callback, stays one.

All methods run on the thread of the framework's loop, never raise and never block.
"""

from __future__ import annotations

import weakref
from threading import get_ident
from typing import TYPE_CHECKING, Any

from opentelemetry import context as otel_context
from opentelemetry.context import Context

from cirron_otel import semconv
from cirron_otel.context import attach_context, get_current
from cirron_otel.scope_base import BaseScope, current_scope
from cirron_otel.watching import watched

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron_otel.recorder import Recorder

_KEY = otel_context.create_key("cirron-driven-loop")


def active_loop(rec: Recorder) -> DrivenLoop | None:
    """The innermost driven loop of ``rec`` that this thread is in, by the current context."""
    loop = get_current().get(_KEY)
    while isinstance(loop, DrivenLoop):
        if loop.active and loop.rec is rec and loop.thread == get_ident():
            return loop
        loop = loop.outer
    return None


class DrivenLoop:
    """One loop that a framework runs. Its methods never raise; each may be left out.

    A method that begins something ends what was begun before it and not ended; what ends something
    ends what stands inside it first.

    Attributes that others may read: ``framework``, ``active``, ``epoch``, ``step`` (open scopes, or
    None), ``steps`` (the number of steps of this epoch, None where it is not known) and ``model``.
    """

    def __init__(self, rec: Recorder, framework: str) -> None:
        self.rec = rec
        self.framework = framework
        self.active = False
        self.epoch: BaseScope | None = None
        self.step: BaseScope | None = None
        self.micro_batch: BaseScope | None = None
        self.steps: int | None = None
        #: What is planned in all, where the framework says so; steps are counted as iterations are.
        self.total_steps: int | None = None
        self.total_epochs: int | None = None
        self.outer: DrivenLoop | None = None
        self._model: weakref.ref[object] | None = None
        self._fits = 0
        self._attrs: dict[str, Any] = {}
        self._stages: list[BaseScope | None] = []
        self._stage_counts: dict[str, int] = {}
        #: What waits for the end of a stage: the open step, its part, whether one is expected.
        self._waiting: list[
            tuple[BaseScope | None, BaseScope | None, tuple[int, int | None] | None]
        ] = []
        #: Contexts: the one that this loop attached, and the one before it.
        self._attached: Context | None = None
        self._before = Context()
        self.thread = 0
        #: When the steps of the epoch were done, in ns; 0: they are not, or nobody said so.
        self._trained_ns = 0
        self._owns_epochs = self._owns_steps = False
        #: Steps in an epoch so far, where no epoch of anybody's counts them.
        self._count = 0
        #: What is added to the framework's iterations to make them go on over the whole run.
        self._shift: int | None = None
        #: When the step that is to come has begun, and its iteration.
        self._expected: tuple[int, int | None] | None = None

    # --- the whole loop ------------------------------------------------------------------------

    def begin_fit(self, **attrs: Any) -> None:
        """The framework begins to train; ``attrs`` go onto the epochs that this loop opens."""
        try:
            self._fits += 1
            if self._fits > 1 or not self.rec.active:
                return
            self._attrs = attrs
            self._shift = None
            self._count = 0
            self._enter()
        except Exception as error:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.begin_fit", error)

    def trains(self, model: object) -> None:
        """Say which model the fit is of, once it exists; it is held weakly."""
        try:
            if model is None or not self.active:
                return
            self._model = weakref.ref(model)
            epoch = self.rec.loops.current_epoch()
            watched.note_trained(model, None if epoch is None else epoch.id)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.trains", failure)

    @property
    def model(self) -> object | None:
        """The model that the fit is of, where its hook has said so and it still exists."""
        return None if self._model is None else self._model()

    def end_fit(self, error: BaseException | None = None) -> None:
        """The training is over; ``error`` is what ended it, and what is still open has it."""
        try:
            self._fits = max(0, self._fits - 1)
            if self._fits:
                return
            while self._stages:
                self.end_stage(error)
            self.end_epoch(error)
            self._leave()
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.end_fit", failure)

    def begin_epoch(self, index: int, *, steps: int | None = None, done: int = 0) -> None:
        """An epoch begins: ``index`` counts from 0, over resumes too; ``steps`` is its length.

        ``done`` of them were made before a resume.
        """
        try:
            if self.epoch is not None or self.step is not None:
                self.end_epoch()
            self.steps = steps
            self._trained_ns = 0
            if not self._owns_epochs:
                return
            self.rec.loops.end_implicit_epoch()
            attrs = {semconv.FRAMEWORK: self.framework, **self._attrs}
            epoch = self._open(semconv.EPOCH, index, attrs=attrs)
            if epoch is not None:
                epoch.counters = {semconv.STEP: done}
            self.epoch = epoch
        except Exception as error:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.begin_epoch", error)

    def end_training_of_epoch(self) -> None:
        """All steps of the epoch are done, and what belongs to it may follow: its evaluation.

        Where a framework says no more, the epoch ends with the last thing recorded in it, at the
        latest when the next one begins.
        """
        self.end_step()
        try:
            epoch = self.epoch
            if epoch is not None and epoch.is_open:
                self.rec.loops.epoch_ending(epoch)
            self._trained_ns = self.rec.clock.now()
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.end_training_of_epoch", failure)

    def skip_steps(self, done: int) -> None:
        """The first ``done`` steps of the epoch were made before a resume."""
        if self.epoch is not None:
            self.epoch.counters = {semconv.STEP: done}

    def end_epoch(self, error: BaseException | None = None) -> None:
        """The epoch is over, and the step in it."""
        self.end_step(error)
        try:
            self._expected = None
            epoch, self.epoch = self.epoch, None
            if epoch is not None:
                if error is None and epoch.is_open:
                    self.rec.loops.epoch_ending(epoch)
                if error is None and self._trained_ns:
                    epoch.close(end_ns=max(self._trained_ns, epoch.last_ns))
                else:
                    _close(epoch, error)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.end_epoch", failure)

    # --- steps ---------------------------------------------------------------------------------

    def expect_step(self, *, iteration: int | None = None) -> None:
        """The framework goes for the data of a step: it begins now, if data comes.

        It is opened, back-dated to now, by the first fetch that returns something or by
        ``begin_step``. Without either, as at the end of the data, there is none.
        """
        if self.step is None:
            self._expected = self.rec.clock.now(), iteration

    def expect_nothing(self) -> None:
        """No step is to come after all."""
        self._expected = None

    def begin_step(self, *, iteration: int | None = None, start_ns: int | None = None) -> None:
        """A step begins: one optimizer update, or one batch of the stage that is open.

        ``iteration`` is the framework's own count of steps, from 0 and going on after a resume;
        ``start_ns`` back-dates, in ns since the Unix epoch.
        """
        try:
            expected, self._expected = self._expected, None
            if self.step is not None:
                self.end_step()
            if expected is not None:
                start_ns = expected[0] if start_ns is None else start_ns
                iteration = expected[1] if iteration is None else iteration
            if self._stages:
                stage = self._stages[-1]
                if stage is not None:
                    self.step = self._open(semconv.STEP, _next_index(stage), start_ns)
            elif self._owns_steps:
                index, self._count = self._count, self._count + 1
                epoch = self.epoch or self.rec.loops.current_epoch()
                if epoch is not None:
                    index = _next_index(epoch)
                self.step = self._open(semconv.STEP, index, start_ns, self._iteration(iteration))
                if not self.rec.loops.warm:
                    self.rec.loops.warm_up(self.step)
        except Exception as error:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.begin_step", error)

    def end_step(self, error: BaseException | None = None) -> None:
        """The step is over."""
        try:
            self._expected = None
            self.end_micro_batch(error)
            step, self.step = self.step, None
            if step is not None:
                _close(step, error)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.end_step", failure)

    def begin_micro_batch(self, k: int) -> None:
        """Part ``k`` of a step that accumulates gradients begins."""
        try:
            self.end_micro_batch()
            if self.step is not None:
                self.micro_batch = self._open(semconv.MICRO_BATCH, k)
        except Exception as error:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.begin_micro_batch", error)

    def end_micro_batch(self, error: BaseException | None = None) -> None:
        """The part of the step is over."""
        try:
            part, self.micro_batch = self.micro_batch, None
            if part is not None:
                _close(part, error)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.end_micro_batch", failure)

    @property
    def is_last_step(self) -> bool:
        """Whether the open step is the last one of its epoch, as far as that is known."""
        step = self.step
        return step is not None and self.steps is not None and step.index == self.steps - 1

    # --- evaluation and the like ---------------------------------------------------------------

    def begin_stage(self, name: str, index: int | None = None) -> None:
        """Something that is no training begins: ``evaluation``, ``prediction``, ``sanity_check``.

        Without ``index`` it gets the number of such stages before it, of this loop or inside the
        stage that is open. Also outside of a fit. ``begin_step`` inside opens steps that have no
        iteration. A training step that is open stays so, and its end waits for the stage's.
        """
        try:
            self._suspend()
            if not self.rec.active:
                self._stages.append(None)
                return
            if not self.active:
                self._enter()
            above = self.stage
            counts = self._stage_counts if above is None else _counters(above)
            if index is None:
                index = counts.get(name, 0)
            counts[name] = index + 1
            stage = self._open(name, index)
            if stage is not None:
                stage.counters = {}
            self._stages.append(stage)
        except Exception as error:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.begin_stage", error)

    def end_stage(self, error: BaseException | None = None) -> None:
        """The innermost stage is over."""
        if not self._stages:
            return
        self.end_step(error)
        try:
            stage = self._stages.pop()
            if stage is not None:
                _close(stage, error)
            self._resume()
            if not self._stages and not self._fits:
                self._leave()
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow(f"{self.framework}.end_stage", failure)

    @property
    def stage(self) -> BaseScope | None:
        """The scope of the innermost stage."""
        return self._stages[-1] if self._stages else None

    # --- what passes over data ask -------------------------------------------------------------

    @property
    def expects_fetches(self) -> bool:
        """Whether a fetch that happens now is sure to be for this loop."""
        return bool(self._stages or self._expected is not None)

    def fetched(self, start_ns: int, end_ns: int) -> None:
        """A data source that is read for this loop has returned an item."""
        if self._expected is not None:
            self.begin_step()
        scope = current_scope(self.rec, get_current())
        if scope is not None:
            scope.add_closed(semconv.DATA_LOAD, start_ns, end_ns)

    # --- parts ---------------------------------------------------------------------------------

    def _enter(self) -> None:
        """Become the active loop of this context; find out what is ours to open."""
        rec = self.rec
        if rec.pending:
            rec.loops.activity()
        context = get_current()
        self.outer = active_loop(rec)
        self.thread = get_ident()
        in_step = self.outer is not None or any(
            one.name == semconv.STEP and one.auto and one.thread_id == self.thread
            for one in _open_scopes(rec, context)
        )
        if not in_step:
            rec.loops.give_way()
            context = get_current()
        in_epoch = any(one.name == semconv.EPOCH for one in _open_scopes(rec, context))
        self._owns_steps = not in_step
        self._owns_epochs = not in_step and not in_epoch
        self._before = context
        self._attached = Context({**context, _KEY: self})
        attach_context(self._attached)
        self.active = True

    def _leave(self) -> None:
        """Be active no more."""
        self.active = False
        self.steps = None
        self._model = None
        attached, self._attached = self._attached, None
        context = get_current()
        if attached is None or context.get(_KEY) is not self:
            return
        if context is attached:
            attach_context(self._before)
        else:
            rest: dict[str, Any] = {key: value for key, value in context.items() if key != _KEY}
            if _KEY in self._before:
                rest[_KEY] = self._before[_KEY]
            attach_context(Context(rest))
        self._before = Context()
        self.outer = None

    def _suspend(self) -> None:
        """A stage begins inside a step: the step waits, and the stage's steps are others."""
        self._waiting.append((self.step, self.micro_batch, self._expected))
        self.step = self.micro_batch = self._expected = None

    def _resume(self) -> None:
        if self._waiting:
            self.step, self.micro_batch, expected = self._waiting.pop()
            self._expected = expected and (self.rec.clock.now(), expected[1])

    def _open(
        self,
        name: str,
        index: int | None,
        start_ns: int | None = None,
        iteration: int | None = None,
        attrs: dict[str, Any] | None = None,
    ) -> BaseScope | None:
        rec = self.rec
        scope = rec.make_loop_scope(name, index)
        if attrs:
            scope.attrs = attrs
        reserve = 0 if name == semconv.EPOCH else rec.headroom
        if scope.open_here(start_ns, iteration, reserve):
            return scope
        return scope if scope.open(start_ns=start_ns, iteration=iteration) else None

    def _iteration(self, given: int | None) -> int:
        """The iteration over the whole run; ``given`` is the framework's, which may start anew."""
        loops = self.rec.loops
        if given is None:
            return int(loops.next_iteration())
        if self._shift is None:
            self._shift = max(0, loops.iteration - given)
        number = given + self._shift
        loops.iteration = number + 1
        return number


def _open_scopes(rec: Recorder, context: Context) -> Iterator[BaseScope]:
    """The open scopes of the context, innermost first."""
    scope = current_scope(rec, context)
    while scope is not None:
        if scope.is_open:
            yield scope
        scope = scope.above


def _counters(scope: BaseScope) -> dict[str, int]:
    if scope.counters is None:
        scope.counters = {}
    return scope.counters


def _next_index(scope: BaseScope) -> int:
    counters = _counters(scope)
    index = counters.get(semconv.STEP, 0)
    counters[semconv.STEP] = index + 1
    return index


def _close(scope: BaseScope, error: BaseException | None) -> None:
    if error is None:
        scope.__exit__(None, None, None)  # the fast way out, where there is one
    else:
        scope.close(exc=error)
