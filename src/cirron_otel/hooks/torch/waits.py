"""``collective_wait`` of collectives that Python waits for: FSDP2's, barriers, the program's own.

They wait in ``Work.wait``, on the thread that needs the result; with gloo for as long as the
slowest rank takes. NCCL only has the stream wait, so there the time that counts is the device's.
A step of a sharded model has hundreds of waits, most of them short: these are added up, and told
once they are worth a row.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from cirron_otel.context import get_current
from cirron_otel.hooks.torch.ddp import add_wait
from cirron_otel.scope_base import BaseScope, current_scope

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.hooks.torch.cuda import Begun, DeviceTimer
    from cirron_otel.hooks.torch.phases import Phases

#: What is worth a row, ns; shorter waits of one phase are added up to it.
WORTH_NS = 1_000_000
_BROADCAST = "_broadcast_coalesced"


class _Here(threading.local):
    """The short waits of one thread that were not told yet."""

    def __init__(self) -> None:
        self.scope: BaseScope | None = None
        self.sum_ns = 0
        #: Inside one wait another is none of its own.
        self.waiting = False


class CollectiveWaits:
    """The hook on what waits for a collective."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases
        self._rec = phases.rec
        self._here = _Here()

    def patch(self, patches: Patches) -> None:
        """Replace ``Work.wait``, and DDP's exchange of buffers, which waits in C++."""
        work = getattr(torch.distributed, "Work", None)
        if work is not None and "wait" in vars(work):
            patches.replace(work, "wait", self._timed(vars(work)["wait"]))
        broadcast = vars(torch.distributed).get(_BROADCAST)
        if broadcast is not None:
            patches.replace(torch.distributed, _BROADCAST, self._timed(broadcast))

    def _timed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        phases, here, clock = self._phases, self._here, self._rec.clock.monotonic_ns
        timer = phases.timer

        @functools.wraps(original)
        def wait(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            if is_dynamo_compiling() or here.waiting or not phases.active:
                return original(*args, **kwargs)
            here.waiting = True
            begun = None if timer is None else self._begin(timer)
            start_ns = clock()
            try:
                return original(*args, **kwargs)
            finally:
                here.waiting = False
                self._ended(start_ns, clock(), begun)

        return wait

    def _begin(self, timer: DeviceTimer) -> Begun | None:
        try:
            return timer.begin()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.collective_wait", error)
            return None

    def _ended(self, start_ns: int, end_ns: int, begun: Begun | None) -> None:
        here = self._here
        try:
            length_ns = end_ns - start_ns
            if begun is None and length_ns < WORTH_NS:
                scope = current_scope(self._rec, get_current())
                if scope is not here.scope:
                    here.scope, here.sum_ns = scope, 0
                here.sum_ns += length_ns
                if here.sum_ns < WORTH_NS:
                    return
                # Their sum, where the last of them ended.
                start_ns, here.sum_ns = end_ns - here.sum_ns, 0
            add_wait(self._phases, start_ns, end_ns, begun)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.collective_wait", error)
