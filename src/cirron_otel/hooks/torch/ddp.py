"""``collective_wait``: what a rank of a distributed training waits for the others.

With ``DistributedDataParallel`` the wait lies at the end of a backward: after the last gradient of
this rank there is nothing left to do but to wait for the sums of all ranks. Without parting the
two, a rank that is slow in its backward makes all backwards equally long, and one that is slow
elsewhere shows as a long backward on every other rank.

The time of the last gradient comes from ``register_post_accumulate_grad_hook``. In the first
backward every parameter has such a hook; from then on only those whose gradients came last do, as
the order hardly ever changes (DDP itself builds its buckets on that). Where they stop coming, all
parameters are asked again.
"""

from __future__ import annotations

import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn.parallel import DistributedDataParallel

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.scope_base import current_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.utils.hooks import RemovableHandle

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.hooks.torch.cuda import Begun
    from cirron_otel.hooks.torch.phases import Phases

#: Parameters that keep their hook: those whose gradients came last.
TAIL = 4
#: Backwards without a gradient of theirs before all are asked again: at first, and at most.
_MISSES, _MOST_MISSES = 4, 4096


class LastGradients:
    """The hooks on parameters of replicated models, and the scopes made of what they tell."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._rec = phases.rec
        self._replicas: list[_Replica] = []
        self._known: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()

    def patch(self, patches: Patches) -> None:
        """Stand around ``torch.autograd.backward``, inside what records it as a phase."""
        patches.replace(torch.autograd, "backward", self._around(torch.autograd.backward))
        self._phases.newcomers.append(self._look)

    def remove(self) -> None:
        """Take every hook off; the patch is the caller's to undo."""
        if self._look in self._phases.newcomers:
            self._phases.newcomers.remove(self._look)
        for replica in self._replicas:
            replica.remove()
        self._replicas.clear()
        self._known.clear()

    def _look(self, module: torch.nn.Module) -> None:
        """A module is called as the outermost one: hook the replicated models in it."""
        try:
            if not torch.distributed.is_initialized() or module in self._known:
                return
            self._known.add(module)
            for one in module.modules():
                if isinstance(one, DistributedDataParallel) and (
                    one is module or one not in self._known
                ):
                    self._known.add(one)
                    # Compiled autograd would trace the hooks, and break on them.
                    if not getattr(one, "_use_python_reducer", False):
                        self._replicas.append(_Replica(one, self._phases))
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.ddp", error)

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        replicas, graph_task = self._replicas, self._phases.graph_task

        @functools.wraps(original)
        def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            # Inside autograd (a checkpoint that is computed again) the outer one still goes on.
            if not replicas or is_dynamo_compiling() or graph_task() != -1:
                return original(*args, **kwargs)
            result = original(*args, **kwargs)
            self._tell()
            return result

        return backward

    def _tell(self) -> None:
        """A backward has ended: record what of it came after this rank's last gradient."""
        rec = self._rec
        now = rec.clock.monotonic_ns()
        try:
            for replica in tuple(self._replicas):
                if replica.is_gone:
                    self._replicas.remove(replica)
                    continue
                begun_ns, begun = replica.take()
                if begun_ns:
                    add_wait(self._phases, begun_ns, now, begun)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("torch.ddp", error)


class _Replica:
    """One ``DistributedDataParallel``. Hooks run on autograd's threads, :meth:`take` on its own."""

    def __init__(self, model: DistributedDataParallel, phases: Phases) -> None:
        self._model = weakref.ref(model)
        self._timer = phases.timer
        self._guard = phases.rec.guard
        self._clock = phases.rec.clock.monotonic_ns
        self._handles: dict[int, RemovableHandle] = {}
        #: The parameters in the order in which their gradients come; while that is being learned.
        self._order: list[int] | None = None
        self._last_ns = 0
        self._begun: Begun | None = None
        self._misses = 0
        self._patience = _MISSES
        self._ask_all()

    @property
    def is_gone(self) -> bool:
        """Whether the model is no more."""
        return self._model() is None

    def take(self) -> tuple[int, Begun | None]:
        """When the last gradient came, in monotonic ns; 0 where no wait followed it."""
        last_ns, self._last_ns = self._last_ns, 0
        begun, self._begun = self._begun, None
        model = self._model()
        if not last_ns:
            self._misses += 1
            if self._misses >= self._patience and self._order is None:
                self._patience = min(2 * self._patience, _MOST_MISSES)
                self._ask_all()
            return 0, None
        self._misses = 0
        if self._order:
            self._keep_tail(self._order)
        if model is None or not model.require_backward_grad_sync:
            return 0, None  # gradients are being accumulated: nothing was exchanged
        return last_ns, begun

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            handle.remove()

    def _ask_all(self) -> None:
        model = self._model()
        if model is None:
            return
        self.remove()
        self._misses = 0
        self._order = []
        for number, parameter in enumerate(model.parameters()):
            if parameter.requires_grad and parameter.is_leaf:
                register: Any = parameter.register_post_accumulate_grad_hook
                self._handles[number] = register(self._hook(number))

    def _keep_tail(self, order: list[int]) -> None:
        self._order = None
        tail = set(order[-TAIL:])
        for number in [number for number in self._handles if number not in tail]:
            self._handles.pop(number).remove()

    def _hook(self, number: int) -> Callable[[torch.Tensor], None]:
        clock, timed = self._clock, self._timer is not None

        def came(parameter: torch.Tensor) -> None:
            self._last_ns = clock()
            if self._order is not None:
                self._order.append(number)
            if timed and parameter.is_cuda:
                self._mark_device()

        return came

    def _mark_device(self) -> None:
        """Put an event behind the gradient, where its stream is current: on autograd's thread."""
        timer = self._timer
        if timer is None:
            return
        try:
            self._begun = timer.begin() if self._begun is None else timer.again(self._begun)
        except Exception as error:  # noqa: BLE001 - see _guard; autograd would raise it
            self._guard.swallow("torch.ddp", error)


def add_wait(phases: Phases, start_ns: int, end_ns: int, begun: Begun | None) -> None:
    """A ``collective_wait`` that is over, in the current scope. Times are monotonic ns.

    ``begun`` is a measurement on the device that began with it. Outside of every scope but the
    session there is nothing to record it in.
    """
    rec = phases.rec
    place = current_scope(rec, get_current())
    if place is None or place is rec.session or not phases.active or not rec.active:
        return
    scope = rec.make_scope(semconv.COLLECTIVE_WAIT, None, {})
    scope.auto = True
    offset = rec.clock.offset_ns
    if scope.open(parent=place, start_ns=start_ns + offset, attach=False):
        if begun is not None and phases.timer is not None:
            phases.timer.end(scope, begun)
        scope.close(end_ns=end_ns + offset, restore=False)
