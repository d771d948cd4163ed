"""Gradient norms of a model whose parameters lie in parts on several ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from cirron_otel.monitor.modules import Layer


def together(norms: Mapping[str, float], layers: Sequence[Layer]) -> dict[str, float]:
    """The norm of each layer's whole gradient, from the norm of this rank's part.

    One all-reduce of a vector with an entry per watched layer: every rank calls it with the same
    layers, whichever of them have a gradient there. Waits for the other ranks.
    """
    world = torch.distributed.get_world_size()
    shares = [norms.get(layer.name, 0.0) ** 2 * _parts(layer) / world for layer in layers]
    has_one = [float(layer.name in norms) for layer in layers]
    device = next(iter(layers[0].parameters.values())).device
    total = torch.tensor([shares, has_one], dtype=torch.float64, device=device)
    torch.distributed.all_reduce(total)
    squares, ranks = total.tolist()
    return {
        layer.name: math.sqrt(square) if square >= 0 else square
        for layer, square, count in zip(layers, squares, ranks, strict=True)
        if count
    }


def _parts(layer: Layer) -> int:
    """In how many different parts the parameters of a layer lie on the ranks."""
    parameter: Any = next(iter(layer.parameters.values()))
    mesh = getattr(parameter, "device_mesh", None)
    if mesh is None:
        return 1
    placements = enumerate(parameter.placements)
    return math.prod(mesh.size(axis) for axis, placement in placements if placement.is_shard())
