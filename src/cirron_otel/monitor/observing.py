"""One check's look at the training: one pass over gradients and weights, one host read.

Everything is reduced where it lies, without a copy of a weight: gradients here, weights in
``filters.py``. What comes of it is the only thing that is read (``reads.py``).
"""

from __future__ import annotations

import itertools
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from cirron_otel.monitor import filters
from cirron_otel.monitor.filters import Rows, Wanted
from cirron_otel.monitor.modules import Layer, local
from cirron_otel.monitor.reads import DOUBLE, At, Read
from cirron_otel.monitor.sharding import together

_LOW = frozenset({torch.float16, torch.bfloat16})
_INFINITY = float("inf")
_FLOAT32 = struct.Struct("f")
#: What float32 holds: normal numbers.
_LEAST, _MOST = 1.1754943508222875e-38, 3.4028234663852886e38

#: Names, and a vector with a number for each, in pieces.
Further = Sequence[tuple[Sequence[str], torch.Tensor]]


class Observation(NamedTuple):
    """What one check saw. ``loss`` is None where none was given."""

    step: int
    loss: float | None
    #: Norm of the gradient by watched module, of those that have one, in the model's order.
    grad: dict[str, float]
    #: Scale of the gradient scaler; None where there is none or it is off.
    scale: float | None
    #: By producer; those are left out of which no row and no scale is zero or small.
    rows: dict[str, Rows]
    #: The largest outputs in the window, by producer, of those that ran.
    peaks: dict[str, torch.Tensor]
    #: Watched modules that learn and have no gradient at all, in the model's order.
    without_gradient: list[str]
    #: Further numbers that were asked for, by whoever asked.
    further: Mapping[str, Mapping[str, float]] = MappingProxyType({})
    #: About how large the largest filter is, by producer with a ReLU of which ``rows`` has nothing.
    sizes: Mapping[str, float] = MappingProxyType({})


@torch.no_grad()
def observe(  # noqa: PLR0913 - what there is to look at
    step: int,
    loss: object,
    layers: Sequence[Layer],
    wanted: Sequence[Wanted],
    *,
    scale: torch.Tensor | float | None,
    bears_scale: bool,
    is_shared: bool = False,
    further: Mapping[str, Further] = MappingProxyType({}),
) -> Observation:
    """Look once. ``loss`` is a number, a tensor of one number, or None.

    ``is_shared`` puts the norms of all ranks' shards together, by a collective that every rank has
    to take part in.

    ``further`` are numbers on a device that go along with the read, by who asks: names, and vectors
    with a number for each.

    Gradients that bear the ``scale`` are divided by it. The calling thread; waits for the device
    where the tensors are on one.
    """
    grad, absent = _gradients(layers)
    read = Read()
    norms = _module_norms(grad, read)
    loss_at = read.put(loss.detach()) if isinstance(loss, torch.Tensor) else None
    vectors, sizes = filters.look(wanted)
    rows_at = {
        name: [None if v is None else read.put(v) for v in four] for name, four in vectors.items()
    }
    peaks_at = {one.name: read.put(one.peak) for one in wanted if one.peak is not None}
    scale_at = read.put(scale) if isinstance(scale, torch.Tensor) else None
    further_at = {
        asker: [(names, read.put(numbers)) for names, numbers in pieces]
        for asker, pieces in further.items()
    }
    read.now()
    by_name: dict[str, float] = {}
    for names, at in norms:
        by_name.update(zip(names, read.vector(at).tolist(), strict=True))
    found = {name: by_name[name] for name in grad}
    _look_again(found, grad)
    if is_shared:
        found = together(found, layers)
    factor = scale if scale_at is None else float(read.vector(scale_at))
    factor = None if factor is None else float(factor)
    if bears_scale and factor:
        found = {name: value / factor for name, value in found.items()}
    value = loss if loss_at is None else _as_float32(float(read.vector(loss_at)))
    return Observation(
        step,
        float(value) if isinstance(value, (int, float)) else None,
        found,
        factor,
        {
            name: Rows(*(None if at is None else read.vector(at) for at in places))  # type: ignore[arg-type]
            for name, places in rows_at.items()
        },
        {name: read.vector(at) for name, at in peaks_at.items()},
        absent,
        {
            asker: {
                name: value
                for names, at in places
                for name, value in zip(names, read.vector(at).tolist(), strict=True)
            }
            for asker, places in further_at.items()
        },
        sizes,
    )


# --- gradients --------------------------------------------------------------------------------


def _gradients(layers: Iterable[Layer]) -> tuple[dict[str, list[torch.Tensor]], list[str]]:
    found: dict[str, list[torch.Tensor]] = {}
    absent: list[str] = []
    for layer in layers:
        own: list[torch.Tensor] = []
        for parameter in layer.parameters.values():
            gradient = parameter.grad
            if gradient is not None:
                gradient = local(gradient)
                if gradient.layout is not torch.strided:
                    gradient = gradient.coalesce().values()
                own.append(gradient)
        if own:
            found[layer.name] = own
        elif any(parameter.requires_grad for parameter in layer.parameters.values()):
            absent.append(layer.name)
    return found, absent


def _module_norms(grad: Mapping[str, list[torch.Tensor]], read: Read) -> list[tuple[list[str], At]]:
    """The L2 norm of all gradients of each module; low precision is added up in float32."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[str, list[torch.Tensor]]]] = {}
    for name, own in grad.items():
        is_double = any(g.dtype in DOUBLE for g in own)
        key = (own[0].device, torch.float64 if is_double else torch.float32)
        groups.setdefault(key, []).append((name, own))
    places: list[tuple[list[str], At]] = []
    for (device, dtype), members in groups.items():
        # A layer's may lie on several devices.
        every = [g if g.device == device else g.to(device) for _, own in members for g in own]
        norms = _norms(every, dtype)
        width = max(len(own) for _, own in members)
        if width > 1:  # a matrix with a line per module, zeros where it has fewer parameters
            zero = norms[0].new_zeros(())
            lines: list[torch.Tensor] = []
            each = iter(norms)
            for _, own in members:
                lines += itertools.islice(each, len(own))
                lines += [zero] * (width - len(own))
            joined = torch.linalg.vector_norm(torch.stack(lines).view(-1, width), dim=1)
        else:
            joined = torch.stack(norms)
        places.append(([name for name, _ in members], read.put(joined)))
    return places


def _norms(gradients: list[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    """The norm of each, as ``dtype``."""
    low = [i for i, g in enumerate(gradients) if g.dtype in _LOW]
    norms: Sequence[torch.Tensor]
    if not low or len(low) == len(gradients):
        norms = torch._foreach_norm(gradients, 2, dtype=dtype if low else None)  # noqa: SLF001 - its public name
    else:
        norms = [torch.linalg.vector_norm(g, dtype=dtype if g.dtype in _LOW else None)
                 for g in gradients]  # fmt: skip
    return [norm if norm.dtype is dtype else norm.to(dtype) for norm in norms]


def _look_again(found: dict[str, float], grad: Mapping[str, list[torch.Tensor]]) -> None:
    """Norms that are 0 or infinite because squares left float32, and float64 itself, made right.

    Rounds to float32 what float32 can hold. Reads from the device only where a norm is 0 or
    infinite.
    """
    for name, value in found.items():
        if value == 0.0 or math.isinf(value):
            found[name] = _careful_norm(grad[name])
        else:
            found[name] = _as_float32(value)


def _careful_norm(gradients: Iterable[torch.Tensor]) -> float:
    norms: list[float] = []
    for gradient in gradients:
        if not gradient.numel():
            continue
        norm = float(torch.linalg.vector_norm(gradient, dtype=_wide(gradient)))
        if norm == 0.0 or math.isinf(norm):
            largest = float(torch.linalg.vector_norm(gradient, _INFINITY))
            if largest != 0.0 and math.isfinite(largest):
                norm = largest * float(torch.linalg.vector_norm(gradient / largest))
        norms.append(norm)
    return _as_float32(math.hypot(*norms))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.complex128 if tensor.is_complex() else torch.float64


def _as_float32(value: float) -> float:
    """Rounded to float32 where that has a normal number for it."""
    if not _LEAST <= abs(value) <= _MOST:
        return value
    rounded: float = _FLOAT32.unpack(_FLOAT32.pack(value))[0]
    return rounded
