"""What ``forward``, ``backward`` and ``optimizer_step`` have in common: one scope around a call."""

from __future__ import annotations

import threading
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_compiling

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
        #: Inside an outermost module call. Read at each nested call: nothing may be cheaper.
        self.depth = 0
        self.in_backward = False
        #: The optimizers whose step is running, innermost last.
        self.stepping: list[torch.optim.Optimizer] = []
        #: Ids of optimizers whose step we know of by torch's own hooks only, with their scopes.
        self.hooked: list[tuple[int, BaseScope]] = []
        #: The outermost module called last, and the last one that was called in order to learn.
        self.seen: weakref.ref[torch.nn.Module] | None = None
        self.learner: weakref.ref[torch.nn.Module] | None = None


class Phases:
    """Puts scopes around calls. ``active`` is false once the hook is gone: then it does nothing."""

    def __init__(self, rec: Recorder, timer: DeviceTimer | None) -> None:
        self.rec = rec
        self.timer = timer
        self.here = Here()
        self.active = False

    def silent(self) -> bool:
        """Whether a call that begins now is none to record.

        That is while torch captures code, and inside autograd: its threads have no context to find
        a parent in, so what runs there (a recomputed forward, say) is recorded on no device.
        """
        return not self.active or not self.rec.active or is_compiling() or _graph_task() != -1

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
