"""What ``forward``, ``backward`` and ``optimizer_step`` have in common: one scope around a call."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

from cirron_otel.core import HookCore, module_gone

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.torch.cuda import DeviceTimer
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

#: Number of the running autograd graph task on this thread, -1 outside of one.
_graph_task: Callable[[], int] = getattr(torch._C, "_current_graph_task_id", lambda: -1)  # noqa: SLF001


class Here(threading.local):
    """What one thread is in the middle of."""

    def __init__(self) -> None:
        #: Ids of optimizers whose step we know of by torch's own hooks only, with their scopes.
        self.hooked: list[tuple[int, BaseScope]] = []
        #: Whether the closure of an optimizer step holds forward and backward: the framework that
        #: runs the loop does it so, and the step is what comes after them.
        self.closure_first = False
        #: The optimizer whose step is recorded that way now.
        self.late: object = None
        #: The outermost module called last, and the last one that was called in order to learn.
        self.seen: weakref.ref[torch.nn.Module] | None = None
        self.learner: weakref.ref[torch.nn.Module] | None = None


class Phases(HookCore):
    """Puts scopes around calls. ``active`` is false once the hook is gone: then it does nothing."""

    def __init__(self, rec: Recorder, timer: DeviceTimer | None) -> None:
        self.rec = rec
        self.timer = timer
        self.timed = timer is not None
        self.here = Here()
        self.active = False
        # What `is_compiling` reads in the versions we know: a look at it instead of two calls.
        known = vars(torch.compiler)
        self.compiling_key = "_is_compiling_flag"
        self.compiling = known if known.get(self.compiling_key) is False else is_compiling
        self.graph_task = _graph_task
        self.grad_enabled = torch.is_grad_enabled
        #: Told of the outermost module of a forward, where it is another one than before.
        self.newcomers: list[Callable[[torch.nn.Module], object]] = []

    def note(self, module: torch.nn.Module, learns: bool) -> None:  # noqa: FBT001 - two of a kind
        """This thread has called ``module``, and whether in order to learn."""
        here = self.here
        if here.seen is None or here.seen() is not module:
            here.seen = weakref.ref(module, module_gone)
            for tell in self.newcomers:
                tell(module)
        if learns:
            here.learner = here.seen

    def run(
        self,
        name: str,
        attrs: dict[str, Any],
        call: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - what the call returns
        """``call(*args, **kwargs)`` in a scope; its exceptions are recorded and fly on."""
        rec, timer = self.rec, self.timer
        spans: Any = rec.spans
        kind = spans.scope_class
        if timer is None and spans.lean and kind is not spans.timed_class:
            own = attrs.copy()
            quick = kind(rec, name, None, own)
            quick.clean = own
            return quick.around(call, args, kwargs)
        begun = None
        scope: BaseScope | None = None
        try:
            own = attrs.copy()
            scope = rec.make_scope(name, None, own)
            scope.clean = own
            scope.__enter__()
            if timer is not None:
                begun = timer.begin()
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow(f"torch.{name}", error)
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            self.end(scope, begun, error)
            raise
        if begun is None and scope is not None:
            scope.__exit__(None, None, None)
        else:
            self.end(scope, begun, None)
        return result

    def end(self, scope: BaseScope | None, begun: Any, error: BaseException | None) -> None:  # noqa: ANN401 - the timer's
        """End what :meth:`run` began."""
        if scope is None:
            return
        try:
            if begun is not None and self.timer is not None:
                self.timer.end(scope, begun)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.rec.guard.swallow("torch.gpu_ns", failure)
        scope.__exit__(type(error) if error is not None else None, error,
                       error.__traceback__ if error is not None else None)  # fmt: skip
