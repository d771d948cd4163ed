"""Which way each tensor of a call is reduced: the kernel, the device, or torch's operations."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from cirron_otel.weights import reductions_host, reductions_kernel, reductions_torch
from cirron_otel.weights.devices import Coming, beside, to_device
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
    elsewhere: dict[torch.device, list[int]] = {}
    for number, one in enumerate(tensors):
        where = address(one) if reductions_kernel.COMPILED else None
        if where is None:
            elsewhere.setdefault(one.tensor.device, []).append(number)
        else:
            in_memory.append(number)
            stretches.append((where, one.tensor.numel(), one.dtype))
    # What a device does it does meanwhile, and each device beside the others.
    begun = [
        _OnDevice(device, [(number, tensors[number]) for number in members], histogram=histogram)
        for device, members in elsewhere.items()
    ]
    if stretches:
        threads = usable_threads(torch.get_num_threads())
        numbers = reduce_memory(stretches, histogram=histogram, threads=threads)
        for number, found in zip(in_memory, numbers, strict=True):
            out[number] = found
    for one_device in begun:
        for number, made in one_device.finish():
            out[number] = made
    return out


def _is_fusible(one: Readable) -> bool:
    tensor = one.tensor
    return one.plain and tensor.device.type in FUSED_DEVICES and flat_view(tensor) is not None


class _OnDevice:
    """The tensors of one device: what is fused is queued at once, all else done in the end."""

    def __init__(
        self, device: torch.device, tensors: Sequence[tuple[int, Readable]], *, histogram: bool
    ) -> None:
        self._device = device
        self._histogram = histogram
        #: What the rows to come are of, in their order; and all that is still to be done.
        self._fused: list[tuple[int, torch.Tensor]] = []
        self._rest: list[tuple[int, torch.Tensor]] = []
        self._coming: Coming | None = None
        self._captures = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        fusible: dict[torch.dtype, list[tuple[int, torch.Tensor]]] = {}
        for number, one in tensors:
            fuses = not self._captures and _is_fusible(one)
            some = fusible.setdefault(one.tensor.dtype, []) if fuses else self._rest
            some.append((number, one.tensor))
        if fusible:
            with beside(device):
                self._begin(fusible)

    def _begin(self, fusible: Mapping[torch.dtype, list[tuple[int, torch.Tensor]]]) -> None:
        """Queue the launches of all dtypes, and one copy of all that they give."""
        rows: list[torch.Tensor] = []
        for dtype, some in fusible.items():
            launch = fused_way(self._device, dtype)
            try:
                made = launch and launch([one for _, one in some], histogram=self._histogram)
            except Exception:  # noqa: BLE001 - then the other way, which says what is wrong
                made = None
            if made is None:
                self._rest += some
            else:
                rows.append(made)
                self._fused += some
        try:
            self._coming = Coming(torch.cat(rows)) if rows else None
        except Exception:  # noqa: BLE001 - as above
            self._rest += self._fused
            self._fused = []

    def finish(self) -> Iterator[tuple[int, Found]]:
        """Number and numbers of each tensor; waits for the device."""
        if self._captures:
            for number, _ in self._rest:
                yield number, Skipped("capture", "a graph is being captured")
            return
        if self._coming is not None:
            try:
                found = self._read(self._coming)
            except Exception:  # noqa: BLE001 - as above
                self._rest += self._fused
            else:
                yield from found
        if self._rest:
            way = reductions_host if self._device.type in HOST_DEVICES else reductions_torch
            with beside(self._device):
                made = _each(
                    lambda some: way.reduce_all(some, histogram=self._histogram),
                    [one for _, one in self._rest],
                )
            yield from zip((number for number, _ in self._rest), made, strict=True)

    def _read(self, coming: Coming) -> list[tuple[int, Found]]:
        from cirron_otel.weights import reductions_triton  # noqa: PLC0415 - it is there by now

        return [
            (number, reductions_triton.reduced(row, histogram=self._histogram))
            for (number, _), row in zip(self._fused, coming.rows(), strict=True)
        ]


_Launch = Callable[..., torch.Tensor]


@functools.cache
def fused_way(device: torch.device, dtype: torch.dtype) -> _Launch | None:
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
    try:
        values = [3.0, -1.0, torch.nan, 0.5, torch.inf, 0.5]
        probe = to_device(torch.tensor(values, dtype=dtype, device="cpu"), device)
        (row,) = Coming(reductions_triton.launch([probe], histogram=True)).rows()
        found = reductions_triton.reduced(row, histogram=True)
        (expected,) = reductions_torch.reduce_all([probe], histogram=True)
    except Exception as error:  # noqa: BLE001 - no compiler, no driver, a device it does not know
        _warn(device, f"Triton failed: {type(error).__name__}: {error}"[:300])
        return None
    # To the last bit: sums of six values leave nothing to the order.
    if describe(found, "", (6,)) != describe(expected, "", (6,)):
        _warn(device, "Triton's kernels gave other numbers than torch")
        return None
    return reductions_triton.launch


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
