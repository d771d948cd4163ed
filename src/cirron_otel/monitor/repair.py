"""Repair: stuck channels begin anew, with fresh weights; measured, and undone on request."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch

from cirron_otel.monitor.owners import Owners
from cirron_otel.monitor.producers import Producer

METHOD = (
    "filter drawn anew (normal, standard deviation sqrt(2 / fan-in)), bias 0, BatchNorm scale 1, "
    "shift 0, running mean 0 and variance 1, optimizer state of these channels 0"
)
_MASK = (1 << 63) - 1
_Slice = tuple[torch.Tensor, torch.Tensor]


class Repaired(NamedTuple):
    """What a repair changed: enough to tell of it, and to take it back."""

    producer: Producer
    step: int
    channels: list[int]
    #: Tensors and their rows before, of the model and of the optimizers.
    model: list[_Slice]
    state: list[_Slice]
    fields: dict[str, Any]


def seed_of(seed: int, step: int, layer: str) -> int:
    """The seed of the generator for one layer at one check, the same on every rank."""
    digest = hashlib.sha256(f"ormas-repair:{seed}:{step}:{layer}".encode()).digest()
    return int.from_bytes(digest[:8], "little") & _MASK


def fresh_rows(weight: torch.Tensor, count: int, seed: int, step: int, layer: str) -> torch.Tensor:
    """New filters: Kaiming's normal for a ReLU, drawn on the CPU in float32."""
    generator = torch.Generator().manual_seed(seed_of(seed, step, layer))
    fan_in = math.prod(weight.shape[1:])
    drawn = torch.randn((count, *weight.shape[1:]), generator=generator)
    return (drawn * math.sqrt(2 / fan_in)).to(weight)


@torch.no_grad()
def repair(
    producer: Producer, channels: list[int], owners: Owners, *, seed: int, step: int
) -> Repaired:
    """Begin some channels of a layer anew, and measure what that was.

    Called after ``backward()`` and before the optimizer steps; gradients stay. Waits for the
    device. The program's random streams are not touched.
    """
    weight = producer.filters.detach()
    rows = torch.tensor(channels, device=weight.device)
    new = fresh_rows(weight, len(channels), seed, step, producer.name)
    change: list[tuple[torch.Tensor, torch.Tensor | float]] = [(weight, new)]
    change += [(found, value) for found, value in _others(producer) if found is not None]
    before = _norm(weight)
    model = [_save(tensor, rows) for tensor, _ in change]
    for tensor, value in change:
        _put(tensor, rows, value)
    state = [_save(one, rows) for one in _states(producer, owners)]
    for one, _ in state:
        _put(one, rows, 0.0)
    fields = {
        "method": METHOD,
        "optimizer_slices_reset": len(state),
        **_measured(_distances(model, rows), before, _norm(weight)),
        "rng": f"generator on the CPU, from seed {seed}, step and layer",
    }
    return Repaired(producer, step, channels, model, state, fields)


@torch.no_grad()
def undo(done: Repaired) -> dict[str, Any]:
    """Put back what a repair replaced, optimizer state too, and measure what that was."""
    weight = done.producer.filters.detach()
    rows = torch.tensor(done.channels, device=weight.device)
    before = _norm(weight)
    distances = _distances(done.model, rows)
    for tensor, old in (*done.model, *done.state):
        _put(tensor, rows, old)
    return {
        "method": f"the repair of step {done.step} was undone",
        "optimizer_slices_reset": len(done.state),
        **_measured(distances, before, _norm(weight)),
        "rng": "none: the values before the repair",
    }


def _distances(saved: list[_Slice], rows: torch.Tensor) -> list[float]:
    """How far each tensor's rows are from what was saved of them; the weight comes first."""
    return [_norm(tensor.detach()[rows].float() - old.float()) for tensor, old in saved]


def _measured(distances: list[float], before: float, after: float) -> dict[str, Any]:
    """The fields of an event about how much was changed, from norms of the weight."""
    delta, *others = distances
    return {
        "delta_norm": delta,
        "weight_norm_before": before,
        "weight_norm_after": after,
        "relative_change": delta / before if before > 0 else None,
        # What the norms above leave out.
        "other_delta_norm": math.hypot(*others),
    }


def _others(producer: Producer) -> Iterable[tuple[torch.Tensor | None, float]]:
    """Everything of a channel but its filter, and what it is set to."""
    yield producer.bias, 0.0
    batchnorm: Any = producer.batchnorm
    if batchnorm is not None:
        yield producer.gamma, 1.0
        yield producer.beta, 0.0
        yield getattr(batchnorm, "running_mean", None), 0.0
        yield getattr(batchnorm, "running_var", None), 1.0


def _states(producer: Producer, owners: Owners) -> list[torch.Tensor]:
    """Every state tensor of an optimizer that has the shape of its parameter, rows by channel."""
    return [
        producer.by_channel(value)
        for parameter in producer.tensors().values()
        for optimizer, _ in owners.of(parameter)
        for value in (optimizer.state.get(parameter) or {}).values()
        if isinstance(value, torch.Tensor) and value.shape == parameter.shape
    ]


def _save(tensor: torch.Tensor, rows: torch.Tensor) -> _Slice:
    return tensor, tensor.detach()[rows.to(tensor.device)].clone()


def _put(tensor: torch.Tensor, rows: torch.Tensor, value: torch.Tensor | float) -> None:
    tensor.detach()[rows.to(tensor.device)] = value


def _norm(tensor: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor.detach(), dtype=_wide(tensor)))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


class Streaks:
    """For how many checks on end each channel of one layer has been one to repair."""

    def __init__(self, channels: int) -> None:
        self._streak = torch.zeros(channels, dtype=torch.int32)

    def update(
        self, targets: torch.Tensor, certified: torch.Tensor, patience: int, certified_streak: int
    ) -> list[int]:
        """Take in one check; say which are due, and begin their count anew."""
        self._streak = torch.where(targets, self._streak + 1, 0)
        due = (self._streak >= patience) | (certified & (self._streak >= certified_streak))
        self._streak[due] = 0
        found: list[int] = due.nonzero().flatten().tolist()
        return found
