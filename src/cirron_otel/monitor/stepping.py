"""Who is told of each step of each optimizer in this process.

torch goes through its global hooks by a view of the dictionary that holds them: one that comes or
goes meanwhile ends the user's ``step()`` with an error. So torch has one hook of ours before and
one behind a step, put in place and taken away only where no step is under way on this thread;
whom these tell may change at any time.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch.compiler import is_dynamo_compiling
from torch.optim import optimizer as torch_optimizer
from torch.optim.optimizer import (
    Optimizer,
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cirron_otel.monitor.hooking import Hook

if TYPE_CHECKING:
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from cirron_otel._guard import Guard

See = Callable[[Optimizer], object]


class Listening:
    """That somebody is told, until :meth:`stop`, or until the object whose methods these are goes.

    ``before`` and ``after`` are bound methods that are called with each optimizer that is about to
    step, and has stepped; the object is held weakly.
    """

    def __init__(self, guard: Guard, where: str, before: See | None, after: See | None) -> None:
        self.before = None if before is None else Hook(before, guard, where)
        self.after = None if after is None else Hook(after, guard, where)
        see: Any = after if before is None else before
        gone = weakref.finalize(see.__self__, steps.forget, self)
        gone.atexit = False
        self._gone = gone
        steps.add(self)

    def stop(self) -> None:
        """Be told no more. May be called from where one is told."""
        self._gone.detach()
        steps.forget(self)


class Steps:
    """Our two hooks, and who is behind them. Lists are replaced, never changed: any thread."""

    def __init__(self) -> None:
        self._told: tuple[Listening, ...] = ()
        self._handles: list[RemovableHandle] = []
        self._held = 0

    def hold(self) -> None:
        """Have the hooks in place: somebody may want to listen while an optimizer steps."""
        self._held += 1
        self._prepare()

    def release(self) -> None:
        """As far as the one who called :meth:`hold` goes they may be taken away."""
        self._held -= 1
        self._tidy()

    def _prepare(self) -> None:
        if not self._handles and not is_stepping():
            self._handles = [
                register_optimizer_step_pre_hook(self._before),
                register_optimizer_step_post_hook(self._after),
            ]

    def add(self, one: Listening) -> None:
        """Tell somebody from now on."""
        self._told = (*self._told, one)
        self._prepare()

    def forget(self, one: Listening) -> None:
        """Tell somebody no more, and take the hooks away where nobody is left."""
        self._told = tuple(other for other in self._told if other is not one)
        self._tidy()

    def _tidy(self) -> None:
        """Take the hooks away where nobody is told; where a step is under way that waits."""
        if not (self._told or self._held) and self._handles and not is_stepping():
            handles, self._handles = self._handles, []
            for handle in handles:
                handle.remove()

    def _before(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if is_dynamo_compiling():
            return
        del args, kwargs
        for one in self._told:
            if one.before is not None:
                one.before(optimizer)

    def _after(self, optimizer: Optimizer, args: object, kwargs: object) -> None:
        if is_dynamo_compiling():
            return
        del args, kwargs
        for one in self._told:
            if one.after is not None:
                one.after(optimizer)


def is_stepping() -> bool:
    """Whether an optimizer's step is under way on this thread: its file is on the stack.

    Steps of torch's optimizers, and of all that are derived from them, begin there.
    """
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - what it is for
    while frame is not None:
        if frame.f_code.co_filename == torch_optimizer.__file__:
            return True
        frame = frame.f_back
    return False


#: Those of this process.
steps = Steps()
