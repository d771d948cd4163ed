"""The layers whose channels are looked at, with what stands behind each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel.monitor.activity import Activity, Site
from cirron_otel.monitor.modules import PRODUCERS, Layer
from cirron_otel.monitor.observing import Wanted

if TYPE_CHECKING:
    import torch
    from torch import nn

    from cirron_otel._guard import Guard
    from cirron_otel.monitor.manifest import Facts
    from cirron_otel.monitor.structure import Structure

_ROWS = 2


class Producer(NamedTuple):
    """A layer whose channels are looked at: channel i is row i of its weight."""

    name: str
    layer: Layer
    batchnorm_name: str | None
    batchnorm: nn.Module | None
    has_relu: bool
    channels: int
    #: An output that never is above this is next to nothing behind the activation; None: unknown.
    quiet_below: float | None = None

    @property
    def module(self) -> nn.Module:
        """The layer itself."""
        return self.layer.module

    @property
    def weight(self) -> torch.Tensor:
        """Its weight now."""
        weight: torch.Tensor = self.module.weight  # type: ignore[assignment]
        return weight

    @property
    def bias(self) -> torch.Tensor | None:
        """Its own bias now."""
        return getattr(self.module, "bias", None)

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

    def wanted(self, peaks: Mapping[str, torch.Tensor], tolerance: float) -> Wanted:
        """What one check looks at."""
        return Wanted(
            self.name, self.weight, self.bias, self.gamma, self.beta, peaks.get(self.name),
            tolerance if self.has_relu else None,
        )  # fmt: skip


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
    for layer in facts.layers:
        weight: Any = getattr(layer.module, "weight", None)
        if layer.kind not in PRODUCERS or weight is None or weight.dim() < _ROWS:
            continue
        name = structure.pairs.get(layer.name)
        batchnorm = modules.get(name) if name is not None else None
        found.append(
            Producer(
                layer.name, layer, name, batchnorm, structure.has_relu(layer.name),
                int(weight.shape[0]), structure.quiet_below(layer.name),
            )
        )  # fmt: skip
    return found


def activity_of(facts: Facts, producers: list[Producer], guard: Guard) -> Activity:
    """What sees the outputs of those that an activation with a zero region follows."""
    sites = [
        Site(one.name, one.batchnorm if one.batchnorm is not None else one.module, one.module)
        for one in producers
        if one.quiet_below is not None
    ]
    return Activity(facts.model, sites, guard)
