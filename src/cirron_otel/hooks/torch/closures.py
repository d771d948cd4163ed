"""An optimizer step whose closure holds forward and backward, as frameworks write it.

There ``optimizer_step`` is what comes after the closure: around all of it, it would hide the two
others. A closure that is evaluated again (LBFGS) is part of the step from the second time on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.core import is_stepping

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.torch.phases import Phases
    from cirron_otel.scope_base import BaseScope


def after_closure(  # noqa: PLR0913, PLR0917 - a call, taken apart
    phases: Phases,
    step: Callable[..., Any],
    recorded: Callable[..., Any],
    optimizer: Any,  # noqa: ANN401 - a torch optimizer
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:  # noqa: ANN401 - what the step returns
    """``step(optimizer, *args, **kwargs)``, recorded from the end of its closure on.

    Without a closure it is ``recorded(...)``, from the beginning.
    """
    closure = args[0] if args else kwargs.get("closure")
    here = phases.here
    if not callable(closure) or is_stepping(optimizer) or here.late is optimizer or phases.silent():
        return recorded(optimizer, *args, **kwargs)
    told = _Closure(phases, optimizer, closure)
    if args:
        args = (told, *args[1:])
    else:
        kwargs = {**kwargs, "closure": told}
    before, here.late = here.late, optimizer
    try:
        result = step(optimizer, *args, **kwargs)
    except BaseException as error:
        told.end(error)
        raise
    finally:
        here.late = before
    told.end(None)
    return result


class _Closure:
    """The closure, after whose first call the scope begins."""

    def __init__(self, phases: Phases, optimizer: object, closure: Callable[..., Any]) -> None:
        self._phases = phases
        self._optimizer = optimizer
        self._closure = closure
        self._scope: BaseScope | None = None
        self._begun: Any = None
        self._called = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        """Call the closure."""
        result = self._closure(*args, **kwargs)
        if not self._called:
            self._called = True
            self._begin()
        return result

    def _begin(self) -> None:
        phases = self._phases
        rec = phases.rec
        try:
            if rec.before_optimizer_step:
                rec.boundaries.optimizer_stepping(self._optimizer)
            attrs = {"optimizer": type(self._optimizer).__name__}
            scope = rec.make_scope(semconv.OPTIMIZER_STEP, None, attrs)
            scope.__enter__()
            self._scope = scope
            if phases.timer is not None:
                self._begun = phases.timer.begin()
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("torch.optimizer", error)

    def end(self, error: BaseException | None) -> None:
        """The step is over."""
        self._phases.end(self._scope, self._begun, error)
