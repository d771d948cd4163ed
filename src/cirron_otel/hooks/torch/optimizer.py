"""``optimizer_step``: a scope around each step of each optimizer.

torch wraps the ``step`` of an optimizer class when the first of its kind is made; we put ourselves
around that wrapper, because its own step hooks are not called when a step raises. They are our
second way in, for steps that do not pass the class: a scheduler that was made before us holds the
older ``step``.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

from torch.compiler import is_dynamo_compiling
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from cirron_otel import semconv
from cirron_otel.core import RecordedCall, if_not_stepping, in_compiled_code, is_stepping
from cirron_otel.errors import StopTraining
from cirron_otel.hook_core import OPTIMIZER_STEP
from cirron_otel.hooks.torch.closures import after_closure
from cirron_otel.hooks.torch.compiled import TAKES_STAND_INS

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.hooks.torch.phases import Phases

_ATTRIBUTE = "optimizer"


class Steps:
    """The hooks on optimizers."""

    def __init__(self, phases: Phases, patches: Patches) -> None:
        self._phases = phases
        self._patches = patches
        self._handles: list[RemovableHandle] = []
        self._ours: set[Callable[..., Any]] = set()

    def patch(self) -> None:
        """Wrap the classes torch has wrapped, see to those that come, register the hooks."""
        for kind in _all_kinds(Optimizer):
            self._wrap(kind)
        make_known = vars(Optimizer)["_patch_step_function"]

        @functools.wraps(make_known)
        def patch_step_function(optimizer: Optimizer) -> None:
            make_known(optimizer)
            if self._phases.active:
                try:
                    for kind in type(optimizer).__mro__:
                        self._wrap(kind)
                except Exception as error:  # noqa: BLE001 - see _guard
                    self._phases.rec.guard.swallow("torch.optimizer", error)

        self._patches.replace(Optimizer, "_patch_step_function", patch_step_function)
        before, after = self._before, self._after
        if TAKES_STAND_INS:  # nearly all steps pass the class: no frame of ours for those
            before = functools.partial(if_not_stepping, before)
            after = functools.partial(if_not_stepping, after)
        self._handles = [
            register_optimizer_step_pre_hook(before),
            register_optimizer_step_post_hook(after),
        ]

    def remove(self) -> None:
        """Remove torch's hooks; the patches are the hook's to undo."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._ours.clear()

    def _wrap(self, kind: type) -> None:
        step = vars(kind).get("step")
        if getattr(step, "hooked", False) and step not in self._ours and callable(step):
            recorded = self._recorded(step)
            self._ours.add(recorded)
            self._patches.replace(kind, "step", recorded)

    def _recorded(self, step: Callable[..., Any]) -> Callable[..., Any]:
        call = RecordedCall(self._phases, OPTIMIZER_STEP, semconv.OPTIMIZER_STEP, step)
        # The list itself, which is changed in place: while it is empty this costs a look at it.
        waiting = self._phases.rec.before_optimizer_step
        compiles = in_compiled_code if TAKES_STAND_INS else is_dynamo_compiling

        @functools.wraps(step)  # takes over torch's own mark, `hooked`
        def recorded(optimizer: Optimizer, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if compiles():
                return step(optimizer, *args, **kwargs)
            if args or kwargs or waiting:
                return self._with_more(step, call, optimizer, args, kwargs)
            return call(optimizer)

        return recorded

    def _with_more(
        self,
        step: Callable[..., Any],
        call: Callable[..., Any],
        optimizer: Optimizer,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - what the step returns
        """A step with a closure or so, or one that somebody wants to be told of."""
        if self._phases.here.closure_first and (args or kwargs):
            return after_closure(self._phases, step, call, optimizer, args, kwargs)
        if self._phases.rec.before_optimizer_step:
            self._tell(optimizer)
        return call(optimizer, *args, **kwargs)

    def _tell(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, not from inside its own step."""
        phases = self._phases
        try:
            if not is_stepping(optimizer) and not phases.silent():
                phases.rec.boundaries.optimizer_stepping(optimizer)
        except StopTraining:  # the user asked for it
            raise
        except Exception as error:  # noqa: BLE001 - see _guard
            phases.rec.guard.swallow("torch.optimizer", error)

    # --- steps that do not pass the class ------------------------------------------------------

    def _before(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
        phases = self._phases
        if is_dynamo_compiling() or is_stepping(optimizer) or phases.here.late is optimizer:
            return
        hooked = phases.here.hooked
        try:
            if phases.silent():
                return
            if phases.rec.before_optimizer_step:
                phases.rec.boundaries.optimizer_stepping(optimizer)
            # What is left of a step that raised ends where its last child did.
            while hooked and (hooked[-1][0] == id(optimizer) or not hooked[-1][1].is_open):
                _, left = hooked.pop()
                left.close(end_ns=left.last_ns)
            scope = phases.rec.make_scope(
                semconv.OPTIMIZER_STEP, None, {_ATTRIBUTE: type(optimizer).__name__}
            )
            scope.auto = True
            if scope.open():
                hooked.append((id(optimizer), scope))
        except StopTraining:  # the user asked for it
            raise
        except Exception as error:  # noqa: BLE001 - see _guard
            phases.rec.guard.swallow("torch.optimizer", error)

    def _after(self, optimizer: Optimizer, _args: Any, _kwargs: Any) -> None:  # noqa: ANN401
        if is_dynamo_compiling() or is_stepping(optimizer):
            return
        hooked = self._phases.here.hooked
        if not hooked:
            return
        try:
            if any(known == id(optimizer) for known, _ in hooked):
                while hooked:
                    known, scope = hooked.pop()
                    scope.close()
                    if known == id(optimizer):
                        return
        except Exception as error:  # noqa: BLE001 - see _guard
            self._phases.rec.guard.swallow("torch.optimizer", error)


def _all_kinds(kind: type[Optimizer]) -> list[type]:
    found: list[type[Optimizer]] = [kind]
    for one in found:  # grows as it goes
        found += [below for below in one.__subclasses__() if below not in found]
    return list(found)
