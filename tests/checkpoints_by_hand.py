"""Checkpoints made by hand: safetensors files byte by byte, and small models in them."""

from __future__ import annotations

import json
import random
import struct
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Raw(NamedTuple):
    """A tensor as it lies in a file."""

    code: str
    shape: tuple[int, ...]
    data: bytes


def f32(values: Sequence[float], *shape: int) -> Raw:
    """A float32 tensor; without a shape a vector."""
    return Raw("F32", shape or (len(values),), array("f", values).tobytes())


def packed(table: object, data: bytes) -> bytes:
    """A file of a table, which may be text, and what follows it."""
    text = table if isinstance(table, bytes) else json.dumps(table).encode()
    return struct.pack("<Q", len(text)) + text + data


def write(path: Path, tensors: Mapping[str, Raw]) -> Path:
    """A sound safetensors file."""
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, one in tensors.items():
        offsets = [len(data), len(data) + len(one.data)]
        table[name] = {"dtype": one.code, "shape": list(one.shape), "data_offsets": offsets}
        data += one.data
    path.write_bytes(packed(table, data))
    return path


def batchnorm(name: str, channels: int, **changed: Sequence[float]) -> dict[str, Raw]:
    """A sound BatchNorm, or one with other values for ``weight``, ``bias``, ..."""
    parts: dict[str, Sequence[float]] = {
        "weight": [1.0] * channels,
        "bias": [0.1] * channels,
        "running_mean": [0.0] * channels,
        "running_var": [1.0] * channels,
        **changed,
    }
    return {f"{name}.{part}": f32(values) for part, values in parts.items()}


def rows(channels: int, size: int, *, seed: int = 0) -> list[float]:
    """The values of an ordinary weight."""
    source = random.Random(seed)
    return [source.gauss(0, 1) for _ in range(channels * size)]


def network(channels: int = 8, **batchnorm_values: Sequence[float]) -> dict[str, Raw]:
    """A convolution, its BatchNorm, a classifier."""
    return {
        "conv1.weight": f32(rows(channels, 27), channels, 3, 3, 3),
        **batchnorm("bn1", channels, **batchnorm_values),
        "fc.weight": f32(rows(10, channels, seed=1), 10, channels),
        "fc.bias": f32([0.0] * 10),
    }


def changed(tensors: Mapping[str, Raw], name: str, values: Mapping[int, float]) -> dict[str, Raw]:
    """The same with some values of a float32 tensor replaced."""
    old = tensors[name]
    data = array("f", old.data)
    for at, value in values.items():
        data[at] = value
    return {**tensors, name: old._replace(data=data.tobytes())}
