"""The loss of a step from what ``training_step`` returned, and what the Trainer says it was.

``training_step`` returns its share of the step's loss: the parts of a group of micro-batches add up
to the mean over the group. A part may still lie on a device; then the sum is made on the flush
thread, once the values have come. What the Trainer logs is compared with it: by default it leaves
out values that are not finite, so that a broken training logs a healthy loss.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from cirron_otel import semconv
from cirron_otel.findings import Finding, report
from cirron_otel.hooks.recording import mark
from cirron_otel.values import Deferred, MarkValue, UnsupportedValueError, mark_value

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

#: Rounding to four digits, and sums made in single precision.
_ABSOLUTE, _RELATIVE = 2e-4, 1e-3


class _Sum:
    """A sum of step losses, some of which may come later."""

    def __init__(self) -> None:
        self.total = 0.0
        #: How many are in the sum, and how many of them are not finite.
        self.count = self.nonfinite = 0
        #: How many there are, those included that are still to come. Only the training thread
        #: counts this, and where values come late only the flush thread counts the others.
        self.sent = 0

    @property
    def waits(self) -> bool:
        return self.sent > self.count

    def add(self, value: float) -> None:
        self.total += value
        self.nonfinite += not math.isfinite(value)
        self.count += 1

    def mean(self) -> float:
        return self.total / self.count


class _Window(_Sum):
    """The steps between two logged losses."""

    def __init__(self) -> None:
        super().__init__()
        #: What the Trainer logged for them: the value, its step, whether it is about us alone. Two
        #: threads may want to take it out.
        self.logged: list[tuple[float, int, bool]] = []


class Losses:
    """The losses of one training. Used on its thread; what comes late, on the flush thread."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._parts: list[MarkValue | Deferred] = []
        self._window = _Window()
        self._epoch = _Sum()

    def begin_epoch(self) -> None:
        """The mean that follows is of the steps from here on."""
        self._epoch = _Sum()

    def begin_step(self) -> None:
        """What was added and belongs to no finished step is dropped."""
        self._parts = []

    def add(self, returned: object, of: int) -> MarkValue | Deferred | None:
        """Take what ``training_step`` returned for one of ``of`` micro-batches.

        Returns the part as a loss of its own, comparable with that of a step.
        """
        try:
            part = mark_value(returned)
        except UnsupportedValueError:
            return None  # a subclass that returns something else: it has no loss to tell
        if isinstance(part, MarkValue) and part.value_type not in {"float", "int"}:
            return None
        self._parts.append(part)
        if of == 1:
            return part
        if isinstance(part, Deferred):
            return Deferred(lambda: _number(part.resolve()) * of, part.ready)
        return mark_value(_number(part) * of)

    def end_step(self) -> float | Deferred | None:
        """The step's loss; None where nothing was added."""
        parts, self._parts = self._parts, []
        if not parts:
            return None
        window, epoch = self._window, self._epoch
        window.sent += 1
        epoch.sent += 1
        late = [part for part in parts if isinstance(part, Deferred)]
        if not late:
            value = math.fsum(map(_number, parts)) if len(parts) > 1 else _number(parts[0])
            window.add(value)
            epoch.add(value)
            return value

        def resolve() -> float:
            value = sum(
                _number(part.resolve() if isinstance(part, Deferred) else part) for part in parts
            )
            window.add(value)
            epoch.add(value)
            self._compare(window)
            return value

        return Deferred(resolve, lambda: all(part.ready() for part in late))

    def epoch_mean(self) -> float | Deferred | None:
        """The mean over the epoch's steps so far; None where there was none."""
        epoch = self._epoch
        if epoch.waits:
            return Deferred(epoch.mean, lambda: not epoch.waits)
        return epoch.mean() if epoch.count else None

    def logged(self, value: object, *, step: int, alone: bool) -> None:
        """The Trainer logs ``value`` as the mean loss since it last did.

        ``alone`` where it is of this process, not a mean over several.
        """
        window, self._window = self._window, _Window()
        if isinstance(value, (int, float)):
            window.logged.append((float(value), step, alone))
            self._compare(window)

    def _compare(self, window: _Window) -> None:
        """Say so where the Trainer's word and the losses differ, once all of them are known."""
        if window.waits or not window.count:
            return
        try:
            logged, step, alone = window.logged.pop()
        except IndexError:
            return
        mean = window.mean()
        steps = "the last step" if window.count == 1 else f"the last {window.count} steps"
        attributes = {"logged": logged, "mean": mean, "steps": window.count}
        if window.nonfinite and math.isfinite(logged):
            lost = (
                f"{window.nonfinite} of them was" if window.nonfinite == 1
                else f"{window.nonfinite} of them were"
            )  # fmt: skip
            report(self._rec, Finding(
                "loss_filtered", "warning",
                f"the Trainer logged a loss of {logged:g} for {steps}, but {lost} not finite: it "
                "leaves such values out (logging_nan_inf_filter)",
                step=step, attributes={**attributes, "nonfinite": window.nonfinite},
            ))  # fmt: skip
        elif alone and abs(mean - logged) > _ABSOLUTE + _RELATIVE * max(abs(mean), abs(logged)):
            report(self._rec, Finding(
                "loss_disagrees", "warning",
                f"the Trainer logged a loss of {logged:g} for {steps}, whose mean loss as returned "
                f"by training_step was {mean:g}",
                step=step, attributes=attributes,
            ))  # fmt: skip


def _number(value: object) -> float:
    """A part as a float; what is not finite as such a float."""
    if isinstance(value, MarkValue):
        return float(value.nonfinite or value.value or 0.0)
    return float(value)  # type: ignore[arg-type]


def mark_loss(rec: Recorder, value: object, kind: str = "point") -> None:
    """Mark a loss that may come later, on the scope that is current."""
    if isinstance(value, MarkValue):
        value = _number(value)
    if value is not None:
        mark(rec, semconv.LOSS, value, kind)
