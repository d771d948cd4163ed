"""What is watched: the model without its wrappers, its layers, its optimizer, and who we are.

Reads attributes and shapes only; no tensor's values.
"""

from __future__ import annotations

import fnmatch
import hashlib
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from cirron_otel.errors import ConfigurationError

_WRAPPERS = frozenset({"DistributedDataParallel", "DataParallel"})
_HYPER = ("lr", "weight_decay", "momentum", "betas")
_DEEPEST_WRAPPING = 16


class Layer(NamedTuple):
    """A watched module: it owns parameters of its own, and at least one of them learns."""

    name: str
    kind: str
    module: nn.Module
    #: Its direct parameters, by name.
    parameters: dict[str, nn.Parameter]


class Unwrapped(NamedTuple):
    """A model without what was put around it, and what that was."""

    model: nn.Module
    wrappers: list[str]
    is_compiled: bool


def unwrap_model(model: object) -> Unwrapped:
    """Take off ``torch.compile``'s module, DDP and DataParallel, in whatever order they come.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for what is no module.
    """
    wrappers: list[str] = []
    is_compiled = False
    for _ in range(_DEEPEST_WRAPPING):
        if not isinstance(model, nn.Module):
            break
        inner = vars(model).get("_modules", {}).get("_orig_mod")
        if isinstance(inner, nn.Module):
            wrappers.append("torch.compile")
            is_compiled = True
        elif type(model).__name__ in _WRAPPERS:
            inner = getattr(model, "module", None)
            wrappers.append(type(model).__name__)
        else:
            # model.compile() compiles in place.
            in_place = getattr(model, "_compiled_call_impl", None) is not None
            return Unwrapped(model, wrappers, is_compiled or in_place)
        model = inner
    raise ConfigurationError(f"Monitor(model=...): {type(model).__name__} is no torch.nn.Module")


def unwrap_optimizer(optimizer: object) -> object:
    """The optimizer inside the wrappers of Lightning, Fabric and accelerate."""
    for _ in range(_DEEPEST_WRAPPING):
        if is_optimizer(optimizer):
            return optimizer
        inner = getattr(optimizer, "optimizer", None) or getattr(optimizer, "_optimizer", None)
        if inner is None or inner is optimizer:
            return optimizer
        optimizer = inner
    return optimizer


def is_optimizer(found: object) -> TypeGuard[torch.optim.Optimizer]:
    """Whether it is one of torch's own kind, and none around another one."""
    return isinstance(found, torch.optim.Optimizer) and not isinstance(
        vars(found).get("optimizer"), torch.optim.Optimizer
    )


def watched_layers(model: nn.Module, patterns: Sequence[str] | None) -> tuple[list[Layer], int]:
    """The layers to watch, in the model's order, and how many there were before the filter.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for patterns that name no layer, and
    for parameters whose shapes are not known yet.
    """
    found = [
        Layer(name, type(module).__name__, module, own)
        for name, module in model.named_modules()
        if (own := _own_parameters(module)) and any(p.requires_grad for p in own.values())
    ]
    if any(_is_lazy(p) for layer in found for p in layer.parameters.values()):
        raise ConfigurationError(
            "Monitor: the model has lazy modules whose shapes are not known: call it once first"
        )
    if patterns is None:
        return found, len(found)
    if isinstance(patterns, str) or not patterns:
        raise ConfigurationError(
            f"Monitor(layers={patterns!r}): give a list of names or patterns such as ['encoder.*'],"
            " or None for all"
        )
    kept = [layer for layer in found if any(fnmatch.fnmatchcase(layer.name, p) for p in patterns)]
    if not kept:
        names = ", ".join(layer.name for layer in found[:8])
        raise ConfigurationError(
            f"Monitor(layers={list(patterns)!r}) matches no layer; there are {names}, ..."
        )
    return kept, len(found)


def _own_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in module._parameters.items() if p is not None}  # noqa: SLF001


def _is_lazy(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, (nn.UninitializedParameter, nn.UninitializedBuffer))


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sharded tensor; any other tensor as it is."""
    shard = getattr(tensor, "_local_tensor", None)
    return tensor if shard is None else shard


def is_sharded(model: nn.Module) -> bool:
    """Whether FSDP, of either kind, or another DTensor layout holds only a part of it here."""
    if any("FullyShardedDataParallel" in type(m).__name__ for m in model.modules()):
        return True
    return any(
        hasattr(p, "_local_tensor") or "FlatParameter" in type(p).__name__
        for p in model.parameters()
    )


class Place(NamedTuple):
    """Who this process is among those that train the model."""

    mode: str
    rank: int
    world_size: int


def place_of(unwrapped: Unwrapped) -> Place:
    """``none``, ``ddp``, ``fsdp`` or ``distributed``, with rank and world size."""
    sharded = is_sharded(unwrapped.model)
    torch_distributed = torch.distributed
    if not (torch_distributed.is_available() and torch_distributed.is_initialized()):
        return Place("none", 0, 1)
    if sharded:
        mode = "fsdp"
    else:
        is_ddp = "DistributedDataParallel" in unwrapped.wrappers
        mode = "ddp" if is_ddp else "distributed"
    return Place(mode, torch_distributed.get_rank(), torch_distributed.get_world_size())


def describe_model(model: nn.Module) -> dict[str, object]:
    """``model``, ``parameters`` and ``architecture_sha256`` of ``run_start``."""
    named = list(model.named_parameters())
    text = "|".join(f"{name}:{tuple(p.shape)}" for name, p in named)
    return {
        "model": type(model).__name__,
        "parameters": sum(p.numel() for _, p in named),
        "architecture_sha256": hashlib.sha256(text.encode()).hexdigest(),
    }


def describe_optimizer(optimizer: object) -> dict[str, object] | None:
    """``optimizer`` of ``run_start``: its type and what its first group says."""
    if optimizer is None:
        return None
    found: dict[str, object] = {"type": type(optimizer).__name__}
    if is_optimizer(optimizer) and optimizer.param_groups:
        group: dict[str, Any] = optimizer.param_groups[0]
        for name in _HYPER:
            if name in group:
                value = group[name]
                found[name] = list(value) if isinstance(value, tuple) else value
    return found


def version_of(tensor: torch.Tensor) -> int:
    """How often a tensor was changed in place."""
    return tensor._version  # noqa: SLF001 - torch has no other name for it


def count_elements(parameters: Iterable[torch.Tensor]) -> int:
    """How many numbers they hold in all."""
    return sum(p.numel() for p in parameters)
