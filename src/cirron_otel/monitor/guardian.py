"""What watches certified layers between checks: from hooks on their modules and on optimizers.

Nothing here reads from a device, but where weights lie on the CPU and somebody else than an
optimizer wrote to them: then they are looked at before the step.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from cirron_otel.monitor.checks.channels import classify
from cirron_otel.monitor.filters import Rows, row_max
from cirron_otel.monitor.hooking import Hook, Hooks, makes_graph
from cirron_otel.monitor.modules import is_optimizer, version_of
from cirron_otel.monitor.stepping import Listening

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

    from cirron_otel._guard import Guard
    from cirron_otel.monitor.owners import Owners
    from cirron_otel.monitor.producers import Producer

#: Called with a layer that lost its certificate, which channels (None: all), and why.
Violated = Callable[[str, "torch.Tensor | None", str], object]

#: A parameter that an optimizer holds, and the group it is in.
_Held = tuple[torch.Tensor, dict[str, Any]]

_WHERE = "monitor.guardian"
WRITTEN = "something else than an optimizer wrote to its weights"
#: Of a parameter group, what decides how it moves a parameter without a gradient.
_SETTINGS = (
    "lr", "weight_decay", "momentum", "dampening", "nesterov", "decoupled_weight_decay", "eps",
)  # fmt: skip


class _Watched:
    """A certified layer, and what was seen of it since the last optimizer step."""

    def __init__(self, producer: Producer, channels: torch.Tensor) -> None:
        self.producer = producer
        #: A boolean vector: which channels are certified.
        self.channels = channels
        self.found = producer.now()
        self.tensors = [one for one in self.found if one is not None]
        self.ids = {id(tensor) for tensor in self.tensors}
        self.versions = _versions(self.tensors)
        self.settings: dict[int, object] = {}
        self.runs = self.batchnorm_runs = 0
        #: Forward passes of the model before those that count for the next step.
        self.passes_before = 0
        self.through_evaluation = False
        #: It was written to, and its values have not been looked at since.
        self.written = False


class Guardian:
    """Watches the layers that have certificates, and no others. The training thread."""

    def __init__(self, model: nn.Module, owners: Owners, guard: Guard, violated: Violated) -> None:
        self._model = model
        self._owners = owners
        self._guard = guard
        self._tell = weakref.WeakMethod(violated)
        self._layers: dict[str, _Watched] = {}
        self._hooks = Hooks(guard)
        self._steps: Listening | None = None
        self._passes = 0

    def channels(self, layer: str) -> torch.Tensor | None:
        """Which channels of a layer have a certificate; None where none has."""
        watched = self._layers.get(layer)
        return None if watched is None else watched.channels

    @property
    def layers(self) -> list[Producer]:
        """Those that have certificates."""
        return [watched.producer for watched in self._layers.values()]

    def was_written(self, layer: str) -> bool:
        """Whether something else than an optimizer wrote to a layer since it was looked at."""
        watched = self._layers.get(layer)
        if watched is None:
            return False
        return watched.written or watched.versions != _versions(watched.tensors)

    def watch(self, producer: Producer, channels: torch.Tensor) -> None:
        """Watch a layer from now on, of which these channels are certified; none ends it."""
        if not bool(channels.any()):
            if self._layers.pop(producer.name, None) is not None and not self._layers:
                self._install()
            return
        known = self._layers.get(producer.name)
        if known is None or _are_others(known, producer):
            self._layers[producer.name] = _Watched(producer, channels)
            self._install()
            return
        known.channels = channels
        known.versions, known.written = _versions(known.tensors), False

    def stop(self) -> None:
        """Watch nothing more."""
        self._layers.clear()
        self._install()

    def _install(self) -> None:
        self._hooks.remove()
        self._passes = 0
        if not self._layers:
            if self._steps is not None:
                self._steps.stop()
                self._steps = None
            return
        if self._steps is None:
            self._steps = Listening(self._guard, _WHERE, self._stepping, self._stepped)
        self._hooks.before(self._model, self._pass_begins)
        for watched in self._layers.values():
            watched.runs = watched.batchnorm_runs = watched.passes_before = 0
            self._hooks.after(watched.producer.module, self._ran, watched)
            if watched.producer.batchnorm is not None:
                self._hooks.after(watched.producer.batchnorm, self._normalised, watched)

    # --- forward passes ---------------------------------------------------------------------------

    def _pass_begins(self, _module: nn.Module, _args: object) -> None:
        self._passes += makes_graph()

    def _ran(self, watched: _Watched, _module: nn.Module, _args: object, _output: object) -> None:
        watched.runs += makes_graph()

    def _normalised(
        self, watched: _Watched, module: nn.Module, _args: object, output: object
    ) -> None:
        watched.batchnorm_runs += makes_graph()
        if not module.training and isinstance(output, torch.Tensor) and output.requires_grad:
            # Only a pass that is learned from counts, and a backward pass tells.
            hook = Hook(self._flows, self._guard, more=(watched,))
            output.register_hook(hook)  # type: ignore[no-untyped-call]

    def _flows(self, watched: _Watched, _gradient: object) -> None:
        watched.through_evaluation = True

    # --- optimizer steps --------------------------------------------------------------------------

    def _violated(self, layer: str, mask: torch.Tensor | None, why: str) -> None:
        tell = self._tell()
        if tell is not None:
            tell(layer, mask, why)

    def _stepping(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step: may it, and was everything as it has to be?"""
        if not is_optimizer(optimizer):
            return
        for watched in list(self._layers.values()):
            if _are_others(watched, watched.producer):
                self._violated(watched.producer.name, None, "its parameters were replaced")
        for watched, held in self._held(optimizer):
            why = self._broken(optimizer, watched, held)
            watched.runs = watched.batchnorm_runs = 0
            watched.passes_before, watched.through_evaluation = self._passes, False
            if why is not None:
                self._violated(watched.producer.name, None, why)
            elif self._was_written_now(watched):
                self._look_at_values(watched)

    def _stepped(self, optimizer: Optimizer) -> None:
        for watched, _ in self._held(optimizer):
            watched.versions = _versions(watched.tensors)

    def _held(self, optimizer: Optimizer) -> list[tuple[_Watched, list[_Held]]]:
        """The layers an optimizer moves, with what it holds of each: one pass over its groups."""
        every = {one for watched in self._layers.values() for one in watched.ids}
        held = [
            (parameter, group)
            for group in optimizer.param_groups
            for parameter in group["params"]
            if id(parameter) in every
        ]
        found = [
            (watched, [one for one in held if id(one[0]) in watched.ids])
            for watched in self._layers.values()
        ]
        return [one for one in found if one[1]]

    def _broken(self, optimizer: Optimizer, watched: _Watched, held: list[_Held]) -> str | None:
        producer = watched.producer
        if watched.through_evaluation:
            return f"a gradient went through {producer.batchnorm_name!r} in evaluation mode"
        runs = {watched.runs}
        if producer.batchnorm is not None:
            runs.add(watched.batchnorm_runs)
        passes = self._passes - watched.passes_before
        if passes:
            runs.add(passes)
        if len(runs) > 1:
            return "it did not run exactly once in each forward pass"
        self._owners.note(optimizer)
        for parameter, group in held:
            why = self._settings(optimizer, watched, parameter, group)
            if why is not None:
                return why
        return None

    def _settings(
        self, optimizer: Optimizer, watched: _Watched, parameter: torch.Tensor,
        group: dict[str, Any],
    ) -> str | None:  # fmt: skip
        """Why an optimizer as it is set now may move the layer; looked at where that changed."""
        now = (id(optimizer), *(group.get(name) for name in _SETTINGS))
        if any(isinstance(value, torch.Tensor) for value in now):
            return None  # to be read by the next check
        if watched.settings.get(id(parameter)) == now:
            return None
        watched.settings[id(parameter)] = now
        producer = watched.producer
        shifts = parameter is producer.shift or parameter is producer.gamma
        for owner in self._owners.of(parameter):
            why = self._owners.why_it_moves(parameter, owner, shifts=shifts)
            if why is not None:
                return why
        if parameter.device.type == "cpu":
            return self._momentum(watched, parameter)
        return None

    def _momentum(self, watched: _Watched, parameter: torch.Tensor) -> str | None:
        """Whether an optimizer brings momentum for a certified channel."""
        producer = watched.producer
        if parameter is producer.shift and self._owners.decays_with_momentum(parameter):
            return None
        for moment in self._owners.first_moments(parameter):
            # What lies before a scale of zero may move: it changes nothing.
            is_before = parameter is producer.weight or parameter is producer.bias
            if is_before and producer.gamma is not None:
                still = watched.channels & (producer.gamma.detach() != 0)
            else:
                still = watched.channels
            if bool((producer.by_channel(moment)[still] != 0).any()):
                return "an optimizer brings momentum for these channels"
        return None

    # --- values -----------------------------------------------------------------------------------

    @staticmethod
    def _was_written_now(watched: _Watched) -> bool:
        now = _versions(watched.tensors)
        if now == watched.versions:
            return False
        watched.versions, watched.written = now, True
        return True

    def _look_at_values(self, watched: _Watched) -> None:
        """Whether a foreign write left the channels dead; on a device a check will say."""
        if any(tensor.device.type != "cpu" for tensor in watched.tensors):
            return
        alive = _alive(watched.producer, watched.channels)
        watched.written = False
        if bool(alive.any()):
            self._violated(watched.producer.name, alive, WRITTEN)


def _are_others(watched: _Watched, producer: Producer) -> bool:
    """Whether a layer has other parameters than those that are watched."""
    pairs = zip(producer.now(), watched.found, strict=True)
    return any(now is not before for now, before in pairs)


def _versions(tensors: list[torch.Tensor]) -> list[int]:
    return [version_of(tensor) for tensor in tensors]


def _alive(producer: Producer, channels: torch.Tensor) -> torch.Tensor:
    """The channels of a mask that are no longer those of a certificate, as a mask."""
    some = channels.nonzero().flatten()
    rows = Rows(
        row_max(producer.filters.detach()[some]),
        *(
            None if vector is None else vector.detach()[some]
            for vector in (producer.bias, producer.gamma, producer.beta)
        ),
    )
    alive = torch.zeros_like(channels)
    alive[some] = ~classify(rows, has_relu=False, tolerance=0.0).candidate
    return alive
