"""The layers whose channels are looked at, with what stands behind each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from cirron_otel.monitor import kinds
from cirron_otel.monitor.activity import Activity, Site
from cirron_otel.monitor.filters import Wanted
from cirron_otel.monitor.modules import Layer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cirron_otel._guard import Guard
    from cirron_otel.monitor.manifest import Facts
    from cirron_otel.monitor.structure import Structure


class Producer(NamedTuple):
    """A layer whose channels are looked at: channel i is row i of its filters."""

    name: str
    layer: Layer
    batchnorm_name: str | None
    batchnorm: nn.Module | None
    has_relu: bool
    channels: int
    #: An output that never is above this is next to nothing behind the activation; None: unknown.
    quiet_below: float | None = None
    #: Its parameters as they were found, None where its weight is computed from others; the model
    #: is looked through again where any was replaced.
    found: tuple[torch.Tensor | None, ...] | None = None

    @property
    def module(self) -> nn.Module:
        """The layer itself."""
        return self.layer.module

    @property
    def weight(self) -> torch.Tensor | None:
        """Its weight now, or what says as well how large each filter is; None for neither."""
        return kinds.sizes_of(self.module)

    @property
    def filters(self) -> torch.Tensor:
        """The weight with a row for each channel, of a layer that has one."""
        return self.by_channel(self.weight)  # type: ignore[arg-type]

    def by_channel(self, tensor: torch.Tensor) -> torch.Tensor:
        """Any of its tensors, or what is of the same shape, with a row for each channel."""
        is_filter = tensor.dim() > 1
        return kinds.channels_first(self.module, tensor) if is_filter else tensor

    @property
    def bias(self) -> torch.Tensor | None:
        """Its own bias now."""
        return kinds.tensor_of(self.module, "bias")

    @property
    def can_be_repaired(self) -> bool:
        """Whether its filters can be written to, and are what it computes with."""
        return (
            self.weight is not None
            and is_own_weight(self.module)
            and (not kinds.is_transposed(self.module) or bool(self.module.groups == 1))
        )

    @property
    def gamma(self) -> torch.Tensor | None:
        """The scale of its BatchNorm."""
        return None if self.batchnorm is None else getattr(self.batchnorm, "weight", None)

    @property
    def beta(self) -> torch.Tensor | None:
        """The shift of its BatchNorm."""
        return None if self.batchnorm is None else getattr(self.batchnorm, "bias", None)

    @property
    def shift(self) -> torch.Tensor | None:
        """What a channel of zeros puts out in front of the ReLU; None for zero."""
        return self.bias if self.batchnorm is None else self.beta

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them that there are, by a name for a person."""
        prefix = f"{self.name}." if self.name else ""
        found = {f"{prefix}weight": self.weight, f"{prefix}bias": self.bias}
        if self.batchnorm is not None:
            found[f"{self.batchnorm_name}.weight"] = self.gamma
            found[f"{self.batchnorm_name}.bias"] = self.beta
        return {name: tensor for name, tensor in found.items() if tensor is not None}

    def wanted(self, peaks: Mapping[str, torch.Tensor], tolerance: float, usual: float) -> Wanted:
        """What one check looks at. ``usual`` is a size that its filters have had."""
        weight, bias, gamma, beta = self.found or self.now()
        if weight is not None:
            weight = self.by_channel(weight)
        return Wanted(
            self.name, weight, bias, gamma, beta, peaks.get(self.name),
            tolerance if self.has_relu else None, usual,
        )  # fmt: skip

    def now(self) -> tuple[torch.Tensor | None, ...]:
        """Weight, bias, scale and shift, looked up anew."""
        return self.weight, self.bias, self.gamma, self.beta


def is_own_weight(module: nn.Module) -> bool:
    """Whether a layer's weight is a parameter of its own, and not computed from others.

    Weight norm, spectral norm and the masks of ``torch.nn.utils.prune`` compute it anew.
    """
    return module._parameters.get("weight") is not None  # noqa: SLF001 - torch's own use of it


def shared_parameters(model: nn.Module) -> set[int]:
    """The ids of parameters that several modules have."""
    uses = Counter(
        id(parameter)
        for module in model.modules()
        for parameter in module._parameters.values()  # noqa: SLF001 - as above
        if parameter is not None
    )
    return {one for one, count in uses.items() if count > 1}


def find_producers(facts: Facts, structure: Structure) -> list[Producer]:
    """Say whose channels are looked at, in the model's order."""
    modules = dict(facts.model.named_modules())
    found: list[Producer] = []
    for layer in producing_layers(facts.model, facts.layers):
        channels = kinds.channels(layer.module)
        if not channels:
            continue
        name = structure.pairs.get(layer.name)
        batchnorm = modules.get(name) if name is not None else None
        one = Producer(
            layer.name, layer, name, batchnorm, structure.has_relu(layer.name), channels,
            structure.quiet_below(layer.name),
        )  # fmt: skip
        if is_own_weight(layer.module):
            one = one._replace(found=one.now())
        found.append(one)
    return found


def producing_layers(model: nn.Module, layers: Sequence[Layer]) -> list[Layer]:
    """The watched layers that have channels; of a parametrized one the parameters lie below it."""
    watched = {layer.name: layer for layer in layers}
    found: list[Layer] = []
    for name, module in model.named_modules():
        if kinds.producer_base(module) is None:
            continue
        if name in watched:
            found.append(watched[name])
        elif f"{name}.parametrizations.weight" in watched:
            found.append(Layer(name, type(module).__name__, module, {}))
    return found


def activity_of(facts: Facts, producers: list[Producer], guard: Guard) -> Activity:
    """What sees the outputs of those that an activation with a zero region follows."""
    sites = [
        Site(one.name, one.batchnorm if one.batchnorm is not None else one.module, one.module)
        for one in producers
        if one.quiet_below is not None
    ]
    return Activity(facts.model, sites, guard)
