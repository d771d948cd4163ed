"""What the torch backend of Keras needs beside the torch hook.

Keras's layers are torch modules and its losses call ``backward``, so the torch hook sees those. Its
optimizers are no torch optimizers; and a layer that is called to find out shapes computes nothing.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.core import RecordedCall, inside_forward
from cirron_otel.hook_core import OPTIMIZER_STEP
from cirron_otel.hooks.recording import Foreign, is_number

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.keras.logs import Logs
    from cirron_otel.hooks.patches import Patches
    from cirron_otel.recorder import Recorder


class _Here(threading.local):
    """What one thread is in the middle of."""

    #: A call with symbolic tensors.
    symbolic = False
    #: An update of the weights.
    applying = False


class OnTorch:
    """The hooks that only this backend needs."""

    def __init__(self, rec: Recorder, logs: Logs) -> None:
        self._rec = rec
        self._logs = logs
        self._here = _Here()
        self._active = True
        self._phases: Any = None
        self._before: tuple[Any, Any] | None = None

    def patch(self, keras: Foreign, patches: Patches) -> None:
        """Replace what computes the loss; with the torch hook also what updates the weights."""
        compiling = sys.modules["torch"].compiler.is_dynamo_compiling
        owner = next(
            (kind, name)
            for name in ("_compute_loss", "compute_loss")
            for kind in keras.Model.__mro__
            if name in vars(kind)
        )
        patches.replace(*owner, self._loss(vars(owner[0])[owner[1]], compiling))
        if self._rec.torch_phases is None:
            return
        self._phases = self._rec.torch_phases
        optimizer = next(one for one in keras.optimizers.Optimizer.__mro__ if "apply" in vars(one))
        patches.replace(optimizer, "apply", self._apply(vars(optimizer)["apply"], compiling))
        layer = next(one for one in keras.Layer.__mro__ if "__call__" in vars(one))
        patches.replace(layer, "__call__", self._call(vars(layer)["__call__"], compiling))
        self._silence_shapes()

    def remove(self) -> None:
        """Leave the torch hook as it was; the patches are the hook's to undo."""
        self._active = False
        if self._before is not None and self._phases is not None:
            self._phases.compiling, self._phases.compiling_key = self._before
            self._before = None

    def _loss(
        self, original: Callable[..., Any], compiling: Callable[[], bool]
    ) -> Callable[..., Any]:
        here = self._logs.here

        @functools.wraps(original)
        def compute_loss(model: Foreign, *args: Any, **kwargs: Any) -> Foreign:
            loss = original(model, *args, **kwargs)
            if not compiling() and here.learning and self._active:
                try:
                    if is_number(loss):
                        # Here it may still change in place; on a device it is read when needed.
                        kept = loss.detach()
                        here.losses += (kept.item() if kept.device.type == "cpu" else kept,)
                except Exception as error:  # noqa: BLE001 - see _guard
                    self._rec.guard.swallow("keras.loss", error)
            return loss

        return compute_loss

    def _apply(
        self, original: Callable[..., Any], compiling: Callable[[], bool]
    ) -> Callable[..., Any]:
        here, rec = self._here, self._rec
        recorded = RecordedCall(self._phases, OPTIMIZER_STEP, semconv.OPTIMIZER_STEP, original)

        @functools.wraps(original)
        def apply(optimizer: Foreign, *args: Any, **kwargs: Any) -> Foreign:
            # One that scales the loss calls the one inside it: that is one update.
            if compiling() or here.applying or not self._active:
                return original(optimizer, *args, **kwargs)
            here.applying = True
            try:
                if rec.before_optimizer_step and not self._phases.silent():
                    rec.boundaries.optimizer_stepping(optimizer)
                return recorded(optimizer, *args, **kwargs)
            finally:
                here.applying = False

        return apply

    def _call(
        self, original: Callable[..., Any], compiling: Callable[[], bool]
    ) -> Callable[..., Any]:
        here = self._here
        symbolic = importlib.import_module("keras.src.backend.common.keras_tensor")
        any_symbolic = symbolic.any_symbolic_tensors

        @functools.wraps(original)
        def call(layer: Foreign, *args: Any, **kwargs: Any) -> Foreign:
            if compiling() or inside_forward() or here.symbolic or not any_symbolic(args, kwargs):
                return original(layer, *args, **kwargs)
            here.symbolic = True
            try:
                return original(layer, *args, **kwargs)
            finally:
                here.symbolic = False

        return call

    def _silence_shapes(self) -> None:
        """Have the torch hook take calls that find out shapes for a capture of code."""
        phases, here = self._phases, self._here
        scopes = importlib.import_module("keras.src.backend.common.symbolic_scope")
        in_symbolic_scope = scopes.in_symbolic_scope
        before, key = self._before = phases.compiling, phases.compiling_key

        def compiling() -> bool:
            known = before() if callable(before) else before[key]
            return bool(known or here.symbolic or in_symbolic_scope())

        phases.compiling = compiling
