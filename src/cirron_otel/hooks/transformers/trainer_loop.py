"""One Trainer's loop: what its methods and callback events mean for epochs, steps and marks."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.driven import DrivenLoop
from cirron_otel.hooks.recording import is_number, mark
from cirron_otel.hooks.transformers.losses import Losses, mark_loss
from cirron_otel.scope_base import BaseScope, current_scope

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Objects of transformers, whose types differ from version to version.
Theirs = Any

#: Attributes of a checkpoint (``save`` or ``load``) and of a ``resume_skip``.
_OPERATION, _BATCHES = "operation", "batches"


class Event(NamedTuple):
    """An event of the Trainer's callbacks, as its ``CallbackHandler`` gets it."""

    handler: Theirs
    args: Theirs
    state: Theirs
    given: Mapping[str, Any]


class Call(NamedTuple):
    """A call of a Trainer's method that has ended: ``error`` is what it raised, if it did."""

    result: Theirs
    error: BaseException | None


class TrainerLoop(DrivenLoop):
    """Holds its Trainer weakly, and nothing else of it.

    The tables at the end of this module say what is called when. All of it runs on the thread of
    the Trainer; what is raised here is caught by the hook.
    """

    def __init__(self, rec: Recorder, trainer: Theirs) -> None:
        super().__init__(rec, "transformers")
        self._trainer = weakref.ref(trainer)
        #: The methods of the Trainer that are running and recorded: of which class's.
        self.inside: dict[str, Callable[..., Any] | None] = {}
        self._losses = Losses(rec)
        #: Micro-batches of a group: how many by the arguments, how many this one has, how far.
        self._accumulates = self._group = 1
        self._part = 0
        self._epochs = self._first_epoch = 0
        #: What ``training_step`` raised last; the Trainer itself may go on after it.
        self._failed: BaseException | None = None
        #: The skipping of batches after a resume, and how many of them are still to be fetched.
        self._skip: BaseScope | None = None
        self._to_skip = 0
        #: When a sampler was done with skipping, in ns: the fetch in which it did so begins there.
        self._skipped_ns = 0
        self._checkpoints: list[BaseScope | None] = []

    def is_told_by(self, handler: Theirs) -> bool:
        """Whether the events of a ``CallbackHandler`` are about this loop."""
        return getattr(self._trainer(), "callback_handler", None) is handler

    # --- the training --------------------------------------------------------------------------

    def train_begins(self, trainer: Theirs) -> None:
        """``train`` was called: all that goes before the first epoch."""
        self._losses = Losses(self.rec)
        self._epochs = 0
        self._accumulates = max(1, int(trainer.args.gradient_accumulation_steps))
        self.begin_fit(trainer=type(trainer).__name__)

    def train_ended(self, call: Call) -> None:
        """It has returned, or was broken off."""
        self._failed = None
        self._end_skip(call.error)
        self.end_fit(call.error)

    def training_begins(self, event: Event) -> None:
        """The first epoch is next; once more where a smaller batch size is tried."""
        self.total_steps = int(event.state.max_steps) or None
        self.end_epoch(self._failed)
        self._failed = None
        self._epochs = 0
        # It may have been made by `train` itself.
        self.trains(getattr(self._trainer(), "model", None))

    def epoch_begins(self, event: Event) -> None:
        """An epoch begins; the one before it has ended with its evaluation."""
        if not self._epochs:
            self._first_epoch = int(event.state.epoch or 0)
        index = self._first_epoch + self._epochs
        self._epochs += 1
        self._losses.begin_epoch()
        self.begin_epoch(index, steps=self._steps(event))

    def _steps(self, event: Event) -> int | None:
        """How many steps the epoch has, as far as the data has a length."""
        try:
            # Some versions left it with the state.
            data = event.handler.train_dataloader
            batches = len(event.state.train_dataloader if data is None else data)
        except (AttributeError, TypeError):
            return None
        left = int(event.state.max_steps) - int(event.state.global_step)
        return min(-(-batches // self._accumulates), max(0, left))

    def epoch_trained(self, _event: Event) -> None:
        """All steps of the epoch are done; its evaluation may follow."""
        mark_loss(self.rec, self._losses.epoch_mean(), "summary")
        self.end_training_of_epoch()

    def training_ends(self, _event: Event) -> None:
        """Nothing more belongs to the last epoch."""
        self.end_epoch()

    # --- steps ---------------------------------------------------------------------------------

    def group_begins(self, trainer: Theirs) -> None:
        """A step begins: the Trainer fetches its group of micro-batches."""
        if self._fits and not self._stages:
            self._losses.begin_step()
            self._part = 0
            self._group = self._accumulates
            self.expect_step(iteration=int(trainer.state.global_step))

    def group_fetched(self, call: Call) -> None:
        """The group is there, or there is none: the data was at its end."""
        if call.error is not None or not self._fits or self._stages:
            return
        self._end_skip(None)
        group = call.result[0] if isinstance(call.result, tuple) and call.result else None
        if isinstance(group, list):
            self._group = len(group)
        if not self._group:
            self.expect_nothing()
        else:
            if self.step is None:
                self.begin_step()
            self._count_tokens(group)

    def _count_tokens(self, group: Theirs) -> None:
        """How many tokens and samples the batches of a group hold, by their shapes alone."""
        inputs = [
            batch["input_ids"]
            for batch in (group if isinstance(group, list) else ())
            if isinstance(batch, Mapping) and "input_ids" in batch
        ]
        shapes = [tuple(getattr(one, "shape", ())) for one in inputs]
        if shapes and all(shapes):
            mark(self.rec, semconv.TOKENS, sum(map(math.prod, shapes)))
            mark(self.rec, semconv.SAMPLES, sum(shape[0] for shape in shapes))

    def step_begins(self, event: Event) -> None:
        """The forward of the first micro-batch is next."""
        if self.step is None:
            self.begin_step(iteration=int(event.state.global_step))
        groups = getattr(getattr(self._trainer(), "optimizer", None), "param_groups", None)
        if groups:
            mark(self.rec, semconv.LEARNING_RATE, groups[0]["lr"])

    def micro_batch_begins(self, _trainer: Theirs) -> None:
        """Forward and backward of one micro-batch."""
        if self._accumulates > 1:
            self.begin_micro_batch(self._part)

    def micro_batch_ended(self, call: Call) -> None:
        """It is done, and this is its part of the loss."""
        if call.error is None:
            self._part += 1
            part = self._losses.add(call.result, self._group)
            if self.micro_batch is not None:
                mark_loss(self.rec, part)
        self._failed = call.error
        self.end_micro_batch(call.error)

    def step_ends(self, _event: Event) -> None:
        """The optimizer has stepped; what the program's callbacks record is still in the step."""
        mark_loss(self.rec, self._losses.end_step())

    def step_ended(self, _event: Event) -> None:
        """The program's callbacks have run, too."""
        self.end_step()

    # --- evaluation and prediction -------------------------------------------------------------

    def evaluation_begins(self, _trainer: Theirs) -> None:
        """``evaluate`` was called, by the Trainer or by the program."""
        self.begin_stage(semconv.EVALUATION)
        self.expect_step()

    def prediction_begins(self, _trainer: Theirs) -> None:
        """``predict`` was called."""
        self.begin_stage(semconv.PREDICTION)
        self.expect_step()

    def stage_ended(self, call: Call) -> None:
        """The evaluation or the prediction is over."""
        self.end_stage(call.error)

    def batch_begins(self, _trainer: Theirs) -> None:
        """The forward of a batch; it may have been fetched during the one before."""
        if self._stages and self.step is None:
            self.begin_step()

    def batch_ended(self, _event: Event) -> None:
        """The batch is done; the fetch of the next one begins the next step."""
        if self._stages:
            self.end_step()
            self.expect_step()

    def metrics_known(self, event: Event) -> None:
        """The metrics of the stage."""
        self._summarize(event.given.get("metrics"))

    # --- what is logged ------------------------------------------------------------------------

    def logs(self, event: Event) -> None:
        """The Trainer logs: kept as it says it, and compared with what we know."""
        logs = event.given.get("logs")
        if not isinstance(logs, dict):
            return
        last = "train_runtime" in logs and not self._stages
        if last:
            self.end_epoch()
        step = int(event.state.global_step)
        for name, value in logs.items():
            if is_number(value):
                attrs = {semconv.LOG_STEP: step}
                self.rec.mark(f"{semconv.LOG_PREFIX}{name}", value, "point", attrs)
        if last:
            self._summarize(logs)
        elif semconv.LOSS in logs and not self._stages:
            alone = int(event.args.world_size) == 1
            self._losses.logged(logs[semconv.LOSS], step=max(0, step - 1), alone=alone)

    def _summarize(self, metrics: object) -> None:
        if isinstance(metrics, dict):
            for name, value in metrics.items():
                if is_number(value) and name != semconv.EPOCH:  # the Trainer adds where it is
                    self.rec.mark(str(name), value, "summary", {})

    # --- checkpoints ---------------------------------------------------------------------------

    def saving_begins(self, _trainer: Theirs) -> None:
        """A checkpoint, or the weights alone, are written."""
        self._begin_checkpoint("save")

    def loading_begins(self, _trainer: Theirs) -> None:
        """The weights of a checkpoint are read."""
        self._begin_checkpoint("load")

    def _begin_checkpoint(self, operation: str) -> None:
        scope = None
        if not self._checkpoints:
            scope = self.rec.make_scope(semconv.CHECKPOINT, None, {_OPERATION: operation})
            scope.__enter__()
        self._checkpoints.append(scope)

    def checkpoint_ended(self, call: Call) -> None:
        """What was begun last is done."""
        scope = self._checkpoints.pop() if self._checkpoints else None
        if scope is not None:
            scope.close(exc=call.error)

    # --- resuming ------------------------------------------------------------------------------

    def skips_batches(self, batches: int, fetched: int) -> None:
        """The data of this epoch begins after ``batches`` that an earlier attempt had.

        ``fetched`` of them will be fetched all the same, and thrown away.
        """
        self.skip_steps(-(-batches // self._accumulates))
        if fetched:
            self._to_skip = fetched
            skip = self.rec.make_loop_scope(semconv.RESUME_SKIP, None)
            skip.attrs = {_BATCHES: batches}
            self._skip = skip if skip.open() else None

    def _end_skip(self, error: BaseException | None) -> None:
        skip, self._skip = self._skip, None
        if skip is not None:
            skip.close(exc=error)

    def fetched(self, start_ns: int, end_ns: int) -> None:
        """As any fetch; one that is thrown away belongs to the skipping, and begins no step."""
        if self._skip is None:
            super().fetched(max(start_ns, self._skipped_ns), end_ns)
            return
        self._skip.add_closed(semconv.DATA_LOAD, start_ns, end_ns)
        self._to_skip -= 1
        if not self._to_skip:
            self._end_skip(None)
            self._expect_anew()

    def skipped_in_sampler(self, start_ns: int, end_ns: int, batches: int) -> None:
        """Batches were skipped without being fetched: in the sampler, during one fetch."""
        scope = current_scope(self.rec, get_current())
        if scope is not None:
            skip = self.rec.make_loop_scope(semconv.RESUME_SKIP, None)
            skip.attrs = {_BATCHES: batches}
            if skip.open(parent=scope, start_ns=start_ns, attach=False):
                skip.close(end_ns=end_ns, restore=False)
        self._skipped_ns = end_ns
        self._expect_anew()

    def _expect_anew(self) -> None:
        """The step that is to come has not begun before now."""
        if self._expected is not None:
            self.expect_step(iteration=self._expected[1])


Begin = Callable[[TrainerLoop, Theirs], None]
End = Callable[[TrainerLoop, Call], None]
Told = Callable[[TrainerLoop, Event], None]


def _nothing(_loop: TrainerLoop, _call: Call) -> None:
    pass


#: Methods of the Trainer: what is called before and after each. Those that begin with an underscore
#: have had their names and meanings in all versions we know; where one is missing nothing else is.
AROUND_METHODS: dict[str, tuple[Begin, End]] = {
    "train": (TrainerLoop.train_begins, TrainerLoop.train_ended),
    "evaluate": (TrainerLoop.evaluation_begins, TrainerLoop.stage_ended),
    "predict": (TrainerLoop.prediction_begins, TrainerLoop.stage_ended),
    "get_batch_samples": (TrainerLoop.group_begins, TrainerLoop.group_fetched),
    "training_step": (TrainerLoop.micro_batch_begins, TrainerLoop.micro_batch_ended),
    "prediction_step": (TrainerLoop.batch_begins, _nothing),
    "save_model": (TrainerLoop.saving_begins, TrainerLoop.checkpoint_ended),
    "_save_checkpoint": (TrainerLoop.saving_begins, TrainerLoop.checkpoint_ended),
    "_load_from_checkpoint": (TrainerLoop.loading_begins, TrainerLoop.checkpoint_ended),
}

#: Events: what is called before the program's callbacks, and after them.
BEFORE_EVENTS: dict[str, Told] = {
    "on_train_begin": TrainerLoop.training_begins,
    "on_epoch_begin": TrainerLoop.epoch_begins,
    "on_step_begin": TrainerLoop.step_begins,
    "on_step_end": TrainerLoop.step_ends,
    "on_log": TrainerLoop.logs,
    "on_evaluate": TrainerLoop.metrics_known,
    "on_predict": TrainerLoop.metrics_known,
    "on_train_end": TrainerLoop.training_ends,
}
AFTER_EVENTS: dict[str, Told] = {
    "on_epoch_end": TrainerLoop.epoch_trained,
    "on_step_end": TrainerLoop.step_ended,
    "on_prediction_step": TrainerLoop.batch_ended,
}
