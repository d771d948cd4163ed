"""One check's look at the training: one pass over gradients and weights, one host read.

Everything is reduced where it lies, without a copy of a weight, and packed into one vector per
device and number type, which is the only thing that is read. On the CPU nothing is packed, since
nothing has to travel.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch

from cirron_otel.monitor.modules import Layer, local
from cirron_otel.monitor.sharding import together

_LOW = frozenset({torch.float16, torch.bfloat16})
_DOUBLE = frozenset({torch.float64, torch.complex128})
_INFINITY = float("inf")
_FLOAT32 = struct.Struct("f")
#: Of the rows of a weight, one in so many is copied to look at it; more are looked at in place.
_MANY = 8
#: What float32 holds: normal numbers.
_LEAST, _MOST = 1.1754943508222875e-38, 3.4028234663852886e38


#: Names, and a vector with a number for each, in pieces.
Further = Sequence[tuple[Sequence[str], torch.Tensor]]


class Rows(NamedTuple):
    """What a producer's channels are, each a vector on the CPU with one entry per channel.

    ``row_max`` is max |weight| of the row; where only zero rows matter, as no ReLU follows, any
    other row may have 1. ``bias`` is the producer's own; ``gamma`` and ``beta`` its BatchNorm's.
    """

    row_max: torch.Tensor
    bias: torch.Tensor | None
    gamma: torch.Tensor | None
    beta: torch.Tensor | None


class Wanted(NamedTuple):
    """A producer to look at: its tensors now.

    ``tolerance`` is the part of a layer's median below which a row is small; None where it only
    matters whether a row is zero.
    """

    name: str
    #: With a row for each channel; None where nothing says how large they are.
    weight: torch.Tensor | None
    bias: torch.Tensor | None
    gamma: torch.Tensor | None
    beta: torch.Tensor | None
    peak: torch.Tensor | None
    tolerance: float | None
    #: A size that the filters have had: rows that are small beside it are not ordinary either.
    usual: float = 0.0


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
    sizes: dict[str, float] = {}
    unusual = [one for one in wanted if one.weight is not None]
    if all(one.weight.device.type == "cpu" for one in unusual if one.weight is not None):
        unusual = _unusual(unusual, sizes)
    rows_at = {
        one.name: [None if v is None else read.put(v) for v in _row_tensors(one, one.weight)]
        for one in unusual
        if one.weight is not None
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
        is_double = any(g.dtype in _DOUBLE for g in own)
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
            zeros = 0
            for _, own in members:
                first = len(lines) - zeros
                lines += norms[first : first + len(own)]
                lines += [zero] * (width - len(own))
                zeros += width - len(own)
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


# --- weights ----------------------------------------------------------------------------------


def _unusual(wanted: list[Wanted], sizes: dict[str, float]) -> list[Wanted]:
    """Those that need a closer look, as a row or a scale may be zero or small. On the CPU only.

    What is usual is asked of all layers at once, and of each only where the answer is no.
    """
    scales_are_usual = _have_usual_scales(wanted)
    without_relu = [one for one in wanted if one.tolerance is None]
    no_row_is_zero = _have_no_zero_row(without_relu)
    return [
        one
        for one in wanted
        if not (
            (no_row_is_zero and scales_are_usual)
            if one.tolerance is None
            else scales_are_usual and _are_alike(one, one.weight, one.tolerance, sizes)  # type: ignore[arg-type]
        )
        and not _is_ordinary(one, one.weight, sizes)  # type: ignore[arg-type]
    ]


def _have_usual_scales(wanted: list[Wanted]) -> bool:
    """Whether no scale of any layer is zero, negative, or small beside the largest of all."""
    scales = [one.gamma.detach() for one in wanted if one.gamma is not None]
    if not scales:
        return True
    if len({scale.dtype for scale in scales}) > 1:
        return False
    smallest, largest = map(float, torch.cat(scales).aminmax())
    tolerance = max(one.tolerance or 0.0 for one in wanted)
    return smallest > 0 and smallest > tolerance * largest


def _have_no_zero_row(wanted: list[Wanted]) -> bool:
    """Whether the first number of no row is zero: then no row is one of zeros."""
    firsts = [
        one.weight.detach().as_strided((one.weight.shape[0],), (one.weight.stride(0),))
        for one in wanted
        if one.weight is not None
    ]
    if len({first.dtype for first in firsts}) > 1:
        return False
    return not firsts or bool(torch.cat(firsts).all())


def _is_ordinary(one: Wanted, weight: torch.Tensor, sizes: dict[str, float]) -> bool:
    """Whether no row and no scale can be zero or small, told without looking at each number twice.

    Only on the CPU, where asking costs no wait. ``sizes`` takes in how large the layer's are.
    """
    weight, gamma = weight.detach(), one.gamma
    if weight.device.type != "cpu":
        return False
    if one.tolerance is None:
        first = weight
        while first.dim() > 1:
            first = first.select(1, 0)
        if not bool(first.all()):  # a row whose first number is not zero is none of zeros
            return False
    elif not _are_alike(one, weight, one.tolerance, sizes):
        return False
    if gamma is None:
        return True
    smallest, largest = map(float, gamma.detach().aminmax())
    return smallest > 0 and smallest > (one.tolerance or 0.0) * largest


def _are_alike(
    one: Wanted, weight: torch.Tensor, tolerance: float, sizes: dict[str, float]
) -> bool:
    """Whether no row can be zero, or small beside the others or what they were.

    That is told by the L2 norms, which take one fast pass: of n numbers whose largest is r the norm
    lies between r and sqrt(n) r, and so does the median of all rows.
    """
    norms = torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())))
    smallest, largest = map(float, norms.aminmax())
    root = math.sqrt(weight.numel() // max(1, weight.shape[0]))
    sizes[one.name] = largest / root
    return smallest > root * tolerance * max(largest, one.usual)


def _row_tensors(one: Wanted, weight: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    weight = weight.detach()
    if one.tolerance is not None or weight.device.type != "cpu":
        largest = row_max(weight)
        if one.tolerance is None:
            largest = (largest != 0).to(torch.float32)
    else:
        largest = _nonzero_rows(weight)
    return (largest, *(None if v is None else v.detach() for v in (one.bias, one.gamma, one.beta)))


def row_max(weight: torch.Tensor) -> torch.Tensor:
    """Give max |w| of each row (dim 0), without a copy of the weight."""
    others = tuple(range(1, weight.dim()))
    if weight.device.type != "cpu":
        largest: torch.Tensor = torch.linalg.vector_norm(weight, _INFINITY, dim=others)
        return largest
    # Four times as fast there as the norm.
    return torch.maximum(weight.amax(others), weight.amin(others).neg_())


def _nonzero_rows(weight: torch.Tensor) -> torch.Tensor:
    """1 for each row that is not all zero; its first number settles that for nearly all."""
    first = weight
    while first.dim() > 1:
        first = first.select(1, 0)
    found = first != 0
    if not bool(found.all()):
        rest = (~found).nonzero().flatten()
        if _MANY * rest.numel() > found.numel():
            found = row_max(weight) != 0
        else:
            found[rest] = row_max(weight[rest]) != 0
    return found.to(torch.float32)


# --- the read ---------------------------------------------------------------------------------


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
        if tensor.dtype not in _DOUBLE and tensor.dtype is not torch.float32:
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
