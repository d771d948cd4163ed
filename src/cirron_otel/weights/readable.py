"""Which tensors can be described, and where their values lie."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cirron_otel import semconv
from cirron_otel.weights.dtypes import DTYPES
from cirron_otel.weights.numbers import Skipped
from cirron_otel.weights.reductions_torch import flat_view

_DISPATCH = torch.Tensor.__torch_dispatch__
#: Those that most tensors are: nothing of the program's stands between them and their memory.
_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})
#: The name of every dtype that can be described, as far as this torch has it.
_NAMES: dict[torch.dtype, str] = {
    getattr(torch, name): name for name in DTYPES if hasattr(torch, name)
}
_FAKE = frozenset({"FakeTensor", "FunctionalTensor"})


class Readable(NamedTuple):
    """A tensor whose values can be read: strided, real, with memory.

    ``plain`` says that its memory is the values: no subclass or lazy negation stands between.
    """

    tensor: torch.Tensor
    dtype: str
    shape: tuple[int, ...]
    attrs: dict[str, Any]
    plain: bool


@contextlib.contextmanager
def undisturbed() -> Iterator[Any]:
    """No gradient is recorded, and no subclass or mode of the program's sees what we do.

    Gives the module ``torch``.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        stack.enter_context(torch._C.DisableTorchFunction())  # noqa: SLF001 - has no other name
        if torch._C._len_torch_dispatch_stack():  # noqa: SLF001 - as above
            stack.enter_context(_disable_current_modes())
        yield torch


def is_plain(tensor: Any) -> bool:  # noqa: ANN401
    """Whether a tensor's memory is its values: no class of a program's own stands between."""
    return getattr(type(tensor), "__torch_dispatch__", None) is _DISPATCH


def readable(value: object) -> Readable | Skipped:
    """The tensor, of a sharded one the part in this process; or why it cannot be described."""
    try:
        if type(value) in _ORDINARY:
            found = _in_memory(value)
            if found is not None:
                return found
        return _readable(value)
    except Exception as error:  # noqa: BLE001 - a subclass may do anything; the others go on
        return Skipped("error", f"{type(error).__name__}: {error}"[:500])


def _readable(value: object) -> Readable | Skipped:
    if not isinstance(value, torch.Tensor):
        return Skipped("not_a_tensor", f"a {type(value).__name__}")
    if torch.nn.parameter.is_lazy(value):
        return Skipped("uninitialized", "a lazy module has not seen an input yet")
    tensor, attrs = value, {}
    local = getattr(value, "_local_tensor", None)
    if isinstance(local, torch.Tensor) and hasattr(value, "placements"):
        tensor, attrs = local, _placement(value)
    name = _NAMES.get(tensor.dtype)
    odd = _oddity(tensor)
    if odd is not None:
        return odd
    if name is None:
        return Skipped("dtype", f"{tensor.dtype} has no values to describe")
    shape = tuple(tensor.shape)
    plain = is_plain(tensor) and not tensor.is_neg()
    if plain and tensor.numel() and _last_byte(tensor) > tensor.untyped_storage().nbytes():
        return Skipped("no_storage", "its memory is freed at present")
    return Readable(tensor, name, shape, attrs, plain)


def _oddity(tensor: torch.Tensor) -> Skipped | None:
    """Why a tensor of this kind has no values in order; None where it has."""
    return next((Skipped(*said) for is_so, *said in _oddities(tensor) if is_so), None)


def _oddities(tensor: torch.Tensor) -> Iterator[tuple[bool, str, str]]:
    kind = type(tensor).__name__
    yield kind in _FAKE, "fake", kind
    yield tensor.is_meta, "meta", "it has a shape and no values"
    yield tensor.is_nested, "nested", "its rows have different shapes"
    yield tensor.is_quantized, "quantized", str(tensor.dtype)
    yield tensor.layout is not torch.strided, "sparse", str(tensor.layout)
    yield tensor.is_complex(), "complex", f"{tensor.dtype}: complex numbers have no order"


def _in_memory(tensor: Any) -> Readable | None:  # noqa: ANN401 - torch's types are slow to narrow
    """The usual case, quickly: an ordinary tensor of the host or of CUDA, without gaps."""
    name = _NAMES.get(tensor.dtype)
    if (
        name is None
        or not (tensor.is_cpu or tensor.is_cuda)
        or tensor.layout is not torch.strided
        or tensor.is_nested
        or not tensor.is_contiguous()
        or tensor.is_neg()
    ):
        return None
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if end > tensor.untyped_storage().nbytes():
        return None
    return Readable(tensor, name, tuple(tensor.shape), {}, plain=True)


def _last_byte(tensor: torch.Tensor) -> int:
    """Where in its storage the last element ends."""
    last = int(tensor.storage_offset()) + sum(
        (size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )
    return (last + 1) * tensor.element_size()


def _placement(tensor: Any) -> dict[str, Any]:  # noqa: ANN401 - DTensor is not there in every build
    return {
        semconv.TENSOR_PLACEMENTS: [str(one) for one in tensor.placements],
        semconv.TENSOR_MESH_SHAPE: list(tensor.device_mesh.shape),
        semconv.TENSOR_GLOBAL_SHAPE: list(tensor.shape),
    }


def address(one: Readable) -> int | None:
    """Where the values begin in the host's memory; None where they lie elsewhere, or apart."""
    tensor = one.tensor
    if not one.plain or not tensor.is_cpu:
        return None
    if not tensor.is_contiguous() and flat_view(tensor) is None:
        return None
    return tensor.data_ptr()
