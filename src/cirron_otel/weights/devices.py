"""Work on a device beside the program's: a stream of our own, and numbers that come back from it.

Whoever begins something here waits for it before returning. So the program's tensors live and stay
as they are while our stream reads them, and the allocator needs no word of it (``record_stream``);
what we allocate belongs to our stream from the start, and goes back to it.
"""

from __future__ import annotations

import contextlib
import functools
from contextlib import AbstractContextManager
from typing import Any

import torch


def beside(device: torch.device) -> AbstractContextManager[Any]:
    """Our stream of a CUDA device, which goes on from where the program's current one has got to.

    Inside, it is the current stream, and the device the current device. Another kind of device has
    no stream of ours: there the program's queue is used.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = _stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


@functools.cache
def _stream(device: torch.device) -> Any:  # noqa: ANN401 - torch.cuda.Stream, untyped
    """One for each device: the allocator keeps memory apart for every stream that it has seen."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def to_device(host: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy of a small tensor on a device; queued on the current stream, not waited for."""
    if device.type == "cuda":
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


class Coming:
    """A table on its way from a device to the host: one copy, queued on the current stream."""

    def __init__(self, table: torch.Tensor) -> None:
        # Kept until it has been copied. An event is waited for, and no read of a device's tensor:
        # that would be refused where the program has torch.cuda.set_sync_debug_mode("error").
        self._table = self._host = table
        self._copied: Any = None
        if table.device.type == "cuda":
            shape, dtype = table.shape, table.dtype
            self._host = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
            self._host.copy_(table, non_blocking=True)
            self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._copied.record(torch.cuda.current_stream(table.device))

    def rows(self) -> list[list[float]]:
        """The table. Waits for the copy, with the interpreter free meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()
        found: list[list[float]] = self._host.tolist()
        return found
