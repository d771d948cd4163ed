"""``profile(monitor=True)``: makes a ``Monitor`` for each model that is trained, and calls it.

It is called where an optimizer is about to step: its gradients are whole then, whoever owns the
loop. The loss is the tensor that ``backward()`` was called on, summed up over the micro-batches of
a step. Under a ``GradScaler`` its ``step`` is the place, as it may skip that of the optimizer.
"""

from __future__ import annotations

import functools
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from cirron_otel._guard import logger
from cirron_otel.errors import CirronError, StopTraining
from cirron_otel.hooks.patches import Patches
from cirron_otel.monitor.options import arguments_of
from cirron_otel.watching import watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.torch.phases import Phases
    from cirron_otel.monitor.front import Monitor
    from cirron_otel.monitor.stepping import Steps
    from cirron_otel.monitor.structure import Discovery
    from cirron_otel.recorder import Recorder


class _Trained:
    """An optimizer that steps, and the monitor it is followed by, if any."""

    def __init__(self, optimizer: object, monitor: Monitor | None) -> None:
        self.optimizer = weakref.ref(optimizer)
        self.monitor = monitor
        #: The forward pass of this step was not seen: it is not counted.
        self.unseen = False
        #: A gradient scaler calls its step: that is where we are called.
        self.scaled = False


class Monitoring:
    """The monitors of one recording. The training thread, but for :meth:`end`."""

    def __init__(self, rec: Recorder, phases: Phases) -> None:
        self._rec = rec
        self._phases = phases
        self._patches = Patches()
        self._is_on = False
        self._steps: Steps
        self._unwrap: Callable[[object], object]
        self._noted: Callable[[torch.Tensor, object], object]
        self._by_optimizer: dict[int, _Trained] = {}
        self._by_model: list[tuple[weakref.ref[Module], Monitor]] = []
        #: Watched models that no optimizer has stepped yet, and who looks at their first passes.
        self._ahead: list[tuple[weakref.ref[Module], Discovery]] = []
        self._loss: torch.Tensor | None = None
        self._node: object = None

    @property
    def monitors(self) -> list[Monitor]:
        """Those that were made."""
        return [monitor for _, monitor in self._by_model]

    def begin(self) -> None:
        """Follow what is watched, now and later."""
        watched.listeners.append(self._something_is_watched)
        if self._rec.settings.monitor is not False:
            self._switch_on()
        self._something_is_watched()

    def end(self) -> None:
        """Let go of torch, and close every record."""
        if self._something_is_watched in watched.listeners:
            watched.listeners.remove(self._something_is_watched)
        if self._stepping in self._rec.before_optimizer_step:
            self._rec.before_optimizer_step.remove(self._stepping)
        self._patches.undo()
        for _, discovery in self._ahead:
            discovery.forget()
        for monitor in self.monitors:
            monitor.close()
        if self._is_on:
            self._steps.release()
            self._is_on = False
        self._ahead.clear()
        self._by_optimizer.clear()
        self._by_model.clear()
        self._loss = self._node = None

    def _switch_on(self) -> None:
        if self._is_on:
            return
        from cirron_otel.monitor import modules, pipeline, stepping  # noqa: PLC0415 - where asked for

        self._is_on = True
        self._steps = stepping.steps
        # A monitor may be made while torch goes through its hooks, where none can come or go.
        self._steps.hold()
        self._unwrap, self._noted = modules.unwrap_optimizer, pipeline.Noted
        # First of all: others may want to act on what is found.
        self._rec.before_optimizer_step.insert(0, self._stepping)
        patches = self._patches
        patches.replace(torch.Tensor, "backward", self._noting(vars(torch.Tensor)["backward"]))
        scaler = torch.amp.GradScaler
        patches.replace(scaler, "step", self._scaled_step(vars(scaler)["step"]))

    # --- what torch calls -------------------------------------------------------------------------

    def _noting(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def backward(tensor: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            if not is_dynamo_compiling():
                try:
                    self._note(tensor)
                except Exception as error:  # noqa: BLE001 - see _guard
                    self._rec.guard.swallow("monitor.loss", error)
            return original(tensor, *args, **kwargs)

        return backward

    def _note(self, loss: torch.Tensor) -> None:
        if loss.numel() != 1 or not self._wants_losses():
            return
        value = loss.detach()
        self._loss = value if self._loss is None else self._loss + value
        if self._ahead or any(monitor.wants_graph for _, monitor in self._by_model):
            self._node = loss.grad_fn

    def _wants_losses(self) -> bool:
        return bool(self._ahead) or any(monitor.wants_loss for _, monitor in self._by_model)

    def _scaled_step(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            try:
                if not self._phases.silent() and scaler.is_enabled():
                    self._step(optimizer, scaler)
            except StopTraining:  # the user asked for it
                raise
            except Exception as error:  # noqa: BLE001 - see _guard
                self._rec.guard.swallow("monitor.step", error)
            return original(scaler, optimizer, *args, **kwargs)

        return step

    def _stepping(self, optimizer: object) -> None:
        self._step(optimizer, None)

    def _step(self, optimizer: object, scaler: Any) -> None:  # noqa: ANN401 - a GradScaler
        optimizer = self._unwrap(optimizer)
        trained = self._by_optimizer.get(id(optimizer))
        if trained is None or trained.optimizer() is not optimizer:
            trained = self._by_optimizer[id(optimizer)] = self._adopt(optimizer)
        monitor = trained.monitor
        if scaler is None and trained.scaled:
            return  # from inside the scaler's own step
        # Also where this one is not followed: the loss was its own.
        loss, self._loss = self._loss, None
        node, self._node = self._node, None
        trained.scaled = scaler is not None
        if monitor is None:
            return
        if scaler is not None:
            monitor.use_scaler(scaler)
        if trained.unseen:
            trained.unseen = False
            return
        if loss is not None and scaler is not None:
            scale = getattr(scaler, "_scale", None)
            loss = loss if scale is None else loss / scale
        monitor.step(None if loss is None else self._noted(loss, node))

    # --- who is watched ---------------------------------------------------------------------------

    def _something_is_watched(self) -> None:
        """Look at the first passes of what is to be monitored. Never raises."""
        try:
            for model in self._models():
                if self._arguments(model) is not None:
                    self._switch_on()
                    self._look_ahead(model)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("monitor.watch", error)

    def _look_ahead(self, model: Module) -> None:
        from cirron_otel.monitor.modules import unwrap_model  # noqa: PLC0415 - where asked for
        from cirron_otel.monitor.structure import Discovery  # noqa: PLC0415

        known = [reference() for reference, _ in (*self._ahead, *self._by_model)]
        if any(one is model for one in known):
            return
        inner = unwrap_model(model)
        if not inner.is_compiled:
            found = Discovery(inner.model, dict(inner.model.named_modules()), self._rec.guard)
            self._ahead.append((weakref.ref(model), found))

    def _adopt(self, optimizer: object) -> _Trained:
        """An optimizer steps for the first time: whose is it, and is that to be monitored?"""
        model = next((model for model in self._models() if _trains(optimizer, model)), None)
        if model is None:
            seen = self._phases.here.learner or self._phases.here.seen
            model = None if seen is None else seen()
            if model is None or not _trains(optimizer, model):
                return _Trained(optimizer, None)
        if self._arguments(model) is None or self._monitor_of(model) is not None:
            return _Trained(optimizer, None)
        ahead = next((found for known, found in self._ahead if known() is model), None)
        self._ahead = [one for one in self._ahead if one[0]() not in (None, model)]
        trained = _Trained(optimizer, self._make(model, optimizer))
        if ahead is None:
            trained.unseen = True
        elif trained.monitor is not None:
            trained.monitor.take_over(ahead)
        else:
            ahead.forget()
        return trained

    def _models(self) -> list[Module]:
        return [model for model in watched.models if isinstance(model, Module)]

    def _monitor_of(self, model: Module) -> Monitor | None:
        return next((monitor for known, monitor in self._by_model if known() is model), None)

    def _arguments(self, model: Module) -> dict[str, Any] | None:
        asked = watched.monitor_option(model)
        option: Any = self._rec.settings.monitor if asked is None else asked
        return arguments_of(option)

    def _make(self, model: Module, optimizer: object) -> Monitor | None:
        from cirron_otel.monitor.front import Monitor  # noqa: PLC0415 - as above

        arguments = self._arguments(model) or {}
        if "out" not in arguments:
            arguments["out"] = self._directory(model)
            arguments.setdefault("append", True)  # another attempt of this run
        try:
            monitor = Monitor(model, optimizer, **arguments)
        except (CirronError, TypeError) as error:
            logger.warning("cirron-otel: %s is not monitored: %s", type(model).__name__, error)
            return None
        self._by_model.append((weakref.ref(model), monitor))
        return monitor

    def _directory(self, model: Module) -> Path:
        settings = self._rec.settings
        records = Path(settings.output_dir) / "records"
        if not self._by_model:
            return records / self._rec.run_id
        name = next((e.name for e in watched.entries if e.model is model), type(model).__name__)
        return records / f"{self._rec.run_id}-{name.replace('/', '_')}"


def _trains(optimizer: Any, model: Module) -> bool:  # noqa: ANN401 - whatever has groups
    """Whether the optimizer moves any parameter of the model."""
    own = {id(parameter) for parameter in model.parameters()}
    groups = getattr(optimizer, "param_groups", ())
    return any(id(p) in own for group in groups for p in group["params"])
