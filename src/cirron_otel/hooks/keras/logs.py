"""What Keras says of its batches and epochs, as marks.

The logs of a batch are means since the epoch began, so they are kept as ``log/<name>``; the logs of
an epoch are what they say, so they are summaries under their own names. The ``loss`` of a step is
what the batch gave. That is known where Keras runs batch by batch in Python: on the torch backend
and in ``train_on_batch``.

Logs may be values on a device that are not there yet. Nothing here waits for them.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.hooks.recording import Foreign, is_number, mark

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cirron_otel.recorder import Recorder


class _Here(threading.local):
    """What one thread is in the middle of."""

    #: Whether a batch is learned from, and the losses that it gave.
    learning = False
    losses: tuple[Any, ...] = ()


class Logs:
    """Marks of what Keras reports."""

    def __init__(self, rec: Recorder, backend: str) -> None:
        self._rec = rec
        self._backend = backend
        self.here = _Here()

    def begin_batch(self) -> None:
        """This thread begins to learn from a batch."""
        here = self.here
        here.learning, here.losses = True, ()

    def leave_batch(self) -> None:
        """The batch is over, and its losses are not needed."""
        here = self.here
        here.learning, here.losses = False, ()

    def batch(self, model: Foreign, logs: Foreign) -> None:
        """The marks of a step that is about to end."""
        losses = self.here.losses
        self.leave_batch()
        if losses:
            mark(self._rec, semconv.LOSS, losses[0] if len(losses) == 1
                 else sum(losses[1:], losses[0]) / len(losses))  # fmt: skip
        for name, value in _flat(logs):
            mark(self._rec, semconv.LOG_PREFIX + name, value)
        if self._backend == "torch":
            self._rate(model, "point")

    def whole_batch(self, result: Foreign) -> None:
        """The marks of a step by what ``train_on_batch`` returned: of this batch alone."""
        if isinstance(result, dict):
            for name, value in _flat(result):
                mark(self._rec, name if name == semconv.LOSS else semconv.LOG_PREFIX + name, value)
            return
        first = result[0] if isinstance(result, (list, tuple)) and result else result
        if is_number(first):
            mark(self._rec, semconv.LOSS, first)

    def epoch(self, model: Foreign, logs: Foreign) -> None:
        """The marks of an epoch that is about to end."""
        named = False
        for name, value in _flat(logs):
            named = named or name == semconv.LEARNING_RATE
            mark(self._rec, name, value, "summary")
        # While jax trains, the variables are not where they seem to be.
        if not named and self._backend in ("torch", "tensorflow"):
            self._rate(model, "summary")

    def stage(self, logs: Foreign) -> None:
        """The marks of an evaluation that is about to end."""
        for name, value in _flat(logs):
            mark(self._rec, name, value, "summary")

    def _rate(self, model: Foreign, kind: str) -> None:
        try:
            rate = model.optimizer.learning_rate
            rate = getattr(rate, "value", rate)
            if hasattr(rate, "read_value"):  # a variable of TensorFlow
                rate = rate.read_value()
        except Exception:  # noqa: BLE001 - a model without an optimizer, or one of the user's own
            return
        if is_number(rate):
            mark(self._rec, semconv.LEARNING_RATE, rate, kind)


def _flat(logs: Foreign) -> Iterator[tuple[str, Any]]:
    """The numbers in logs, which may be nested."""
    if not isinstance(logs, dict):
        return
    for name, value in list(logs.items()):
        if isinstance(value, dict):
            yield from _flat(value)
        elif is_number(value):
            yield str(name), value
