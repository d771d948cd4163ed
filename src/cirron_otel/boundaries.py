"""The two moments of a loop that others wait for: an epoch ends, an optimizer is about to step.

Whoever wants to do something there appends a function to a list; whoever owns the loop calls. Both
lists are only ever changed in place: the torch hook keeps the list itself, so that an optimizer
step nobody waits for costs one look at whether it is empty, also where the hot path is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cirron_otel.errors import StopTraining

if TYPE_CHECKING:
    from cirron_otel._guard import Guard
    from cirron_otel.scope_base import BaseScope


class Boundaries:
    """Who is called, and calling them. On the training thread; never raises past _guard."""

    __slots__ = ("_guard", "at_epoch_end", "before_optimizer_step")

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        #: Called with the epoch's scope while it is still open.
        self.at_epoch_end: list[Callable[[BaseScope], object]] = []
        #: Called with the optimizer; its gradients are what the step will use.
        self.before_optimizer_step: list[Callable[[Any], object]] = []

    def epoch_ending(self, epoch: BaseScope) -> None:
        """The training of an epoch is over, and its scope is open."""
        for call in tuple(self.at_epoch_end):
            try:
                call(epoch)
            except Exception as error:  # noqa: BLE001 - the others must still be called
                self._guard.swallow("epoch_end", error)

    def optimizer_stepping(self, optimizer: object) -> None:
        """An optimizer is about to step."""
        for call in tuple(self.before_optimizer_step):
            try:
                call(optimizer)
            except StopTraining:  # the user asked for it, here
                raise
            except Exception as error:  # noqa: BLE001 - as above
                self._guard.swallow("before_optimizer_step", error)

    def forget(self) -> None:
        """In a forked child nobody waits: what was started in the parent is the parent's."""
        self.at_epoch_end.clear()
        self.before_optimizer_step.clear()
