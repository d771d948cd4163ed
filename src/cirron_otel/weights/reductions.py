"""Which way each tensor of a call is reduced: the kernel, the device, or torch's operations."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from cirron_otel.weights import reductions_host, reductions_kernel, reductions_torch
from cirron_otel.weights.numbers import Reduced, Skipped, describe
from cirron_otel.weights.readable import Readable, address
from cirron_otel.weights.reductions_kernel import Stretch, reduce_memory, usable_threads
from cirron_otel.weights.reductions_torch import flat_view

logger = logging.getLogger("cirron_otel")

Found = Reduced | Skipped

#: Kinds of devices that Triton compiles for.
FUSED_DEVICES = frozenset({"cuda", "xpu"})
#: Kinds whose memory is the host's, or that know no double precision.
HOST_DEVICES = frozenset({"cpu", "mps"})


def reduce_all(tensors: Sequence[Readable], *, histogram: bool) -> list[Found]:
    """The numbers of tensors that are not empty; a failure is of the tensor it befell."""
    out: list[Found] = [Skipped("error")] * len(tensors)
    stretches: list[Stretch] = []
    in_memory: list[int] = []
    groups: dict[tuple[torch.device, torch.dtype | None], list[int]] = {}
    for number, one in enumerate(tensors):
        where = address(one) if reductions_kernel.COMPILED else None
        if where is None:
            dtype = one.tensor.dtype if _is_fusible(one) else None
            groups.setdefault((one.tensor.device, dtype), []).append(number)
        else:
            in_memory.append(number)
            stretches.append((where, one.tensor.numel(), one.dtype))
    if stretches:
        threads = usable_threads(torch.get_num_threads())
        numbers = reduce_memory(stretches, histogram=histogram, threads=threads)
        for number, found in zip(in_memory, numbers, strict=True):
            out[number] = found
    for (device, fused), members in groups.items():
        some = [tensors[number].tensor for number in members]
        for number, made in zip(
            members, _on_device(some, device, fused, histogram=histogram), strict=True
        ):
            out[number] = made
    return out


def _is_fusible(one: Readable) -> bool:
    tensor = one.tensor
    return one.plain and tensor.device.type in FUSED_DEVICES and flat_view(tensor) is not None


def _on_device(
    tensors: Sequence[torch.Tensor],
    device: torch.device,
    fused: torch.dtype | None,
    *,
    histogram: bool,
) -> list[Found]:
    """The numbers of tensors of one device, in one call as far as that goes."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return [Skipped("capture", "a graph is being captured")] * len(tensors)
    with _beside(device):
        reduce = fused_way(device, fused) if fused is not None else None
        if reduce is not None:
            with contextlib.suppress(Exception):  # then the other way, which says what is wrong
                return list(reduce(tensors, histogram=histogram))
        way = reductions_host if device.type in HOST_DEVICES else reductions_torch
        return _each(lambda some: way.reduce_all(some, histogram=histogram), tensors)


def _beside(device: torch.device) -> AbstractContextManager[Any]:
    """A stream beside the program's, which begins when what that has to do so far is done."""
    if device.type != "cuda":
        return contextlib.nullcontext()
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    return torch.cuda.stream(stream)


_Reduce = Callable[..., list[Reduced]]


@functools.cache
def fused_way(device: torch.device, dtype: torch.dtype) -> _Reduce | None:
    """The fused kernels for this device, once they have shown that they work there; else None.

    The first call compiles them (seconds, unless Triton has them on disk).
    """
    try:
        from cirron_otel.weights import reductions_triton  # noqa: PLC0415 - not in every torch
    except ImportError:
        _warn(device, "Triton is not installed (pip install triton)")
        return None
    if dtype not in reductions_triton.DTYPES:
        return None
    probe = torch.tensor([3.0, -1.0, torch.nan, 0.5, torch.inf, 0.5], dtype=dtype, device=device)
    try:
        found = reductions_triton.reduce_all([probe], histogram=True)
        expected = reductions_torch.reduce_all([probe], histogram=True)
    except Exception as error:  # noqa: BLE001 - no compiler, no driver, a device it does not know
        _warn(device, f"Triton failed: {type(error).__name__}: {error}"[:300])
        return None
    # To the last bit: sums of six values leave nothing to the order.
    if describe(found[0], "", (6,)) != describe(expected[0], "", (6,)):
        _warn(device, "Triton's kernels gave other numbers than torch")
        return None
    return reductions_triton.reduce_all


def _warn(device: torch.device, why: str) -> None:
    logger.warning(
        "cirron-otel: statistics of snapshots on %s are made with torch's own operations, which "
        "takes many times longer: %s",
        device,
        why,
    )


def _each(
    reduce: Callable[[Sequence[torch.Tensor]], list[Reduced]], tensors: Sequence[torch.Tensor]
) -> list[Found]:
    """All in one call, or one by one where that fails."""
    try:
        return list(reduce(tensors))
    except Exception as error:  # noqa: BLE001 - whatever it is, it is one tensor's
        if len(tensors) == 1:
            return [Skipped("error", f"{type(error).__name__}: {error}"[:500])]
    return [_each(reduce, [one])[0] for one in tensors]
