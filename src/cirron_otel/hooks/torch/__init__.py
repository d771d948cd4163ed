"""The hook into PyTorch: forward, backward, optimizer steps, data loading, device time.

Made to be forgotten: no module, tensor or optimizer gets an attribute, a closure or a hook of its
own, but for a few parameters of a replicated model (``ddp.py``); what is replaced is a handful of
functions of torch and its classes, and ``uninstrument`` puts them back. What fails in here never
reaches the program; what fails in the program flies through.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cirron_otel.hooks.patches import Patches
from cirron_otel.hooks.torch.backward import patch_backward
from cirron_otel.hooks.torch.checkpoints import Checkpoints
from cirron_otel.hooks.torch.compiled import vanish_when_compiled
from cirron_otel.hooks.torch.compiling import Compiles
from cirron_otel.hooks.torch.cuda import DeviceTimer
from cirron_otel.hooks.torch.ddp import LastGradients
from cirron_otel.hooks.torch.forward import Forwards
from cirron_otel.hooks.torch.loader import Loaders
from cirron_otel.hooks.torch.monitoring import Monitoring
from cirron_otel.hooks.torch.optimizer import Steps
from cirron_otel.hooks.torch.phases import Phases
from cirron_otel.hooks.torch.startup import StartupParts
from cirron_otel.hooks.torch.waits import CollectiveWaits
from cirron_otel.values import capture_gate

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


def make(rec: Recorder) -> TorchHook:
    """The hook for one recorder, not in place yet."""
    return TorchHook(rec)


class TorchHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()
        # Counting devices does not start CUDA, which would spoil a later fork.
        self._devices = torch.cuda.device_count()
        timer = DeviceTimer(torch.cuda, _timing_event, capture_gate) if self._devices else None
        self._phases = Phases(rec, timer)
        self._steps = Steps(self._phases, self._patches)
        self._gradients = LastGradients(self._phases) if _is_distributed() else None
        self._monitoring = Monitoring(rec, self._phases)
        self._compiles = Compiles(rec)
        self._checkpoints = Checkpoints(self._phases, self._patches)
        self._startup = StartupParts(rec)

    def instrument(self) -> None:
        """Patch torch; what was patched stays consistent when a later part fails."""
        phases, patches = self._phases, self._patches
        phases.active = True
        try:
            forwards = Forwards(phases)
            forwards.patch(patches)
            if self._gradients is not None:
                self._gradients.patch(patches)  # inside the scope that the next line puts around it
                CollectiveWaits(phases).patch(patches)
            patch_backward(phases, patches)
            self._steps.patch()
            Loaders(phases).patch(patches)
            self._checkpoints.patch()
            self._startup.patch(patches)
            if phases.timer is not None:
                phases.timer.patch(patches, torch.cuda.CUDAGraph)
        except BaseException:
            self.uninstrument()
            raise
        self._monitoring.begin()
        self._compiles.begin()
        self._rec.loops.stage_probe = forwards.stage
        self._rec.torch_phases = phases
        vanish_when_compiled(self._rec.guard)
        session = self._rec.session
        if session is not None and session.is_open:
            session.attrs = {**session.attrs, **self._session_attributes()}

    def uninstrument(self) -> None:
        """Put torch back. Functions that somebody else has wrapped meanwhile do nothing."""
        self._monitoring.end()
        self._compiles.end()
        self._startup.remove()
        self._phases.active = False
        if self._gradients is not None:
            self._gradients.remove()
        self._rec.torch_phases = None
        self._steps.remove()
        self._patches.undo()
        self._rec.loops.stage_probe = lambda: None

    def _session_attributes(self) -> dict[str, Any]:
        attrs: dict[str, Any] = {"device": "cuda" if self._devices else "cpu"}
        if self._devices:
            attrs["cuda_count"] = self._devices
        attrs["mixed_precision"] = torch.is_autocast_enabled()
        return attrs


def _is_distributed() -> bool:
    """Whether this torch can train on several ranks at all."""
    return bool(torch.distributed.is_available())


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
