"""What a module is to the monitor: a layer with channels, a BatchNorm, a ReLU; subclasses too.

A subclass counts as what it is derived from only as far as it computes what that does: one with a
``forward`` of its own may do anything. Nothing here evaluates a parametrization: that may change
the model (spectral norm goes on with its iteration each time).
"""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.utils import parametrize

_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_SPATIAL = {base: axes + 1 for bases in (_CONVS, _TRANSPOSED) for axes, base in enumerate(bases)}
_PRODUCERS: tuple[type[nn.Module], ...] = (*_CONVS, nn.Linear, *_TRANSPOSED)
_BATCHNORMS: tuple[type[nn.Module], ...] = (
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm,
)  # fmt: skip
_RELUS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.ReLU6)
#: What a class may define to compute something else.
_COMPUTES = ("forward", "_conv_forward", "__call__")
_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_ROWS = 2


def producer_base(module: nn.Module) -> type[nn.Module] | None:
    """The class of torch's whose channels a module has; None for one without channels."""
    return _base(module, _PRODUCERS)


def is_batchnorm(module: nn.Module) -> bool:
    """Whether it is a BatchNorm that computes what torch's does."""
    return _computes_as_one(module, _BATCHNORMS)


def is_relu(module: nn.Module) -> bool:
    """Whether it is a ReLU that computes what torch's does."""
    return _computes_as_one(module, _RELUS)


def _base(module: nn.Module, bases: tuple[type[nn.Module], ...]) -> type[nn.Module] | None:
    return next((base for base in bases if isinstance(module, base)), None)


def _computes_as_one(module: nn.Module, bases: tuple[type[nn.Module], ...]) -> bool:
    base = _base(module, bases)
    return base is not None and _computes_as(type(module), base)


def _computes_as(kind: type, base: type) -> bool:
    return all(getattr(kind, name, None) is getattr(base, name, None) for name in _COMPUTES)


def has_forward_of_its_own(module: nn.Module) -> bool:
    """Whether the class, or the module itself, computes something else than torch's class."""
    base = producer_base(module)
    if base is None or not _computes_as(type(module), base):
        return True
    return not vars(module).keys().isdisjoint(_COMPUTES)


def channel_axis(module: nn.Module, dimensions: int) -> int:
    """Which axis of what a module puts out has its channels; without a batch they come first."""
    base = producer_base(module)
    if base is None:
        return 1
    return dimensions - 1 - _SPATIAL.get(base, 0)


def channels(module: nn.Module) -> int:
    """How many channels a layer or a BatchNorm has."""
    weight = module._parameters.get("weight")  # noqa: SLF001 - torch's own use of it
    if weight is not None and not is_transposed(module):
        return int(weight.shape[0])
    for name in ("out_channels", "out_features", "num_features"):
        if isinstance(found := getattr(module, name, None), int):
            return found
    return 0


def is_transposed(module: nn.Module) -> bool:
    """Whether its weight has channels on the second axis."""
    return isinstance(module, _TRANSPOSED)


def channels_first(module: nn.Module, weight: torch.Tensor) -> torch.Tensor:
    """A weight, or what is of its shape, with a row for each channel: a view where there is one."""
    if not is_transposed(module):
        return weight
    groups = int(module.groups)  # type: ignore[arg-type]
    if groups == 1:
        return weight.transpose(0, 1)
    size, outside, *kernel = weight.shape
    apart = weight.reshape(groups, size // groups, outside, *kernel).transpose(1, 2)
    return apart.reshape(groups * outside, size // groups, *kernel)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor | None:
    """A weight or bias, as far as looking at it computes nothing."""
    own = module._parameters.get(name)  # noqa: SLF001 - as above
    if own is not None:
        return own
    if parametrize.is_parametrized(module, name):
        return None
    found = getattr(module, name, None)  # computed before each forward pass: by hooks
    return found if isinstance(found, torch.Tensor) else None


def sizes_of(module: nn.Module) -> torch.Tensor | None:
    """What says how large the filter of each channel is: its weight, or weight norm's magnitude.

    None where nothing does: another parametrization, a forward of its own, numbers of another kind,
    a sparse weight.
    """
    if not _computes_as(type(module), producer_base(module) or nn.Module):
        return None
    weight = tensor_of(module, "weight")
    if weight is None:
        weight = _magnitude(module)
    if weight is None or weight.dim() < _ROWS or not weight.numel():
        return None
    if weight.dtype not in _FLOATS or weight.layout is not torch.strided:
        return None
    return weight if type(weight) in (torch.Tensor, nn.Parameter) else None


def _magnitude(module: nn.Module) -> torch.Tensor | None:
    """Of ``torch.nn.utils.parametrizations.weight_norm`` by channel: a number each."""
    if not parametrize.is_parametrized(module, "weight"):
        return None
    steps = module.parametrizations["weight"]  # type: ignore[index]
    found = getattr(steps, "original0", None)
    if len(steps) != 1 or type(steps[0]).__name__ != "_WeightNorm" or found is None:
        return None
    axis = int(is_transposed(module))
    of_channels = found.dim() >= _ROWS and found.numel() == found.shape[axis] == channels(module)
    return found if of_channels else None
