"""Numbers that lie on devices, read together: one transfer per device and number type.

On the CPU nothing is packed for that, since nothing has to travel.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from cirron_otel.monitor.modules import local

#: Number types that are read as they are, like float32; all others as float32.
DOUBLE = frozenset({torch.float64, torch.complex128})


class At(NamedTuple):
    """Where a value lies in what is read: in which pack, from which entry on, how many."""

    pack: _Pack
    first: int
    size: int


class _Pack:
    """Vectors of one device and number type, read together."""

    def __init__(self) -> None:
        self.parts: list[torch.Tensor] = []
        self.size = 0
        self.read = torch.empty(0)


class Read:
    """Gathers vectors, reads them in one transfer per device and number type, gives them out."""

    def __init__(self) -> None:
        self._packs: dict[tuple[torch.device, torch.dtype], _Pack] = {}

    def put(self, tensor: torch.Tensor) -> At:
        """Have a vector, or a number, read; low precision travels as float32."""
        tensor = local(tensor).reshape(-1)
        if tensor.dtype not in DOUBLE and tensor.dtype is not torch.float32:
            tensor = tensor.to(torch.float32)
        key = (tensor.device, tensor.dtype)
        pack = self._packs.get(key)
        if pack is None:
            pack = self._packs[key] = _Pack()
        at = At(pack, pack.size, tensor.numel())
        pack.parts.append(tensor)
        pack.size += at.size
        return at

    def now(self) -> None:
        """Read. Waits for the device."""
        for (device, _), pack in self._packs.items():
            joined = pack.parts[0] if len(pack.parts) == 1 else torch.cat(pack.parts)
            pack.read = joined if device.type == "cpu" else joined.cpu()

    @staticmethod
    def vector(at: At) -> torch.Tensor:
        """What was put there, on the CPU."""
        return at.pack.read[at.first : at.first + at.size]
