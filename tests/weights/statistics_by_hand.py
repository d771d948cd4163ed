"""What a tensor's statistics must be, in numpy, and every way the package has to make them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch

from cirron_otel.weights import (
    reductions,
    reductions_buffer,
    reductions_kernel,
    reductions_numpy,
    reductions_python,
)
from cirron_otel.weights.dtypes import BYTES_CODE, DTYPES
from cirron_otel.weights.numbers import Finite, TensorStats, describe, edges
from cirron_otel.weights.statistics import buffer_stats, tensor_stats

if TYPE_CHECKING:
    from numpy.typing import NDArray

#: Every dtype that this torch has and we describe.
NAMES = [name for name in DTYPES if hasattr(torch, name)]
FLOATS = [name for name in NAMES if getattr(torch, name).is_floating_point]


def tensor_of(bits: bytes, name: str) -> torch.Tensor:
    """A tensor with exactly these bytes."""
    raw = torch.tensor(list(bits), dtype=torch.uint8)
    if name == "bool":
        return raw % 2 == 1
    return raw.view(getattr(torch, name))


def bytes_of(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


# --- ways -----------------------------------------------------------------------------------------

Way = Callable[[torch.Tensor], TensorStats]


@contextmanager
def _without_kernel() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions_kernel, "COMPILED", False)
        patch.setattr(reductions_buffer, "COMPILED", False)
        yield


def _one(tensor: torch.Tensor) -> TensorStats:
    (found,) = tensor_stats([tensor])
    assert isinstance(found, TensorStats)
    return found


def _kernel(loops: str, tensor: torch.Tensor) -> TensorStats:
    if not reductions_kernel.COMPILED:
        pytest.skip("the kernel was not built")
    if not reductions_kernel.kernel.use_loops(loops):
        pytest.skip(f"this processor has no {loops}")
    try:
        return _one(tensor)
    finally:
        reductions_kernel.kernel.use_loops("avx2")


def _torch(tensor: torch.Tensor) -> TensorStats:
    with _without_kernel():
        return _one(tensor)


def _device(tensor: torch.Tensor) -> TensorStats:
    """As on a device without fused kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reductions, "HOST_DEVICES", frozenset())
        return _torch(tensor)


def _buffer(tensor: torch.Tensor) -> TensorStats:
    found = buffer_stats(bytes_of(tensor), str(tensor.dtype), tensor.shape)
    assert isinstance(found, TensorStats)
    return found


def _numpy(tensor: torch.Tensor) -> TensorStats:
    with _without_kernel():
        return _buffer(tensor)


def _python(tensor: torch.Tensor) -> TensorStats:
    name = str(tensor.dtype).removeprefix("torch.")
    if not tensor.numel() or DTYPES[name].code == BYTES_CODE:
        return _numpy(tensor)
    pieces = partial(reductions_python.pieces, memoryview(bytes_of(tensor)), DTYPES[name])
    reduced = reductions_buffer.reduce_pieces(pieces, reductions_python, histogram=True)
    return describe(reduced, name, tensor.shape)


#: Every way to the numbers of a tensor.
WAYS: dict[str, Way] = {
    "avx2": partial(_kernel, "avx2"),
    "plain": partial(_kernel, "plain"),
    "torch": _torch,
    "device": _device,
    "buffer": _buffer,
    "numpy": _numpy,
    "python": _python,
}
assert reductions_numpy.pieces is not None


# --- what must come out ---------------------------------------------------------------------------


def doubles(tensor: torch.Tensor) -> NDArray[np.float64]:
    """The values in double precision, by torch."""
    return np.asarray(tensor.to(torch.float64).reshape(-1).numpy())


def check(found: TensorStats, tensor: torch.Tensor) -> None:
    """Hold every number against numpy, in extended precision where that makes a difference."""
    values = doubles(tensor)
    assert found.shape == tuple(tensor.shape)
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    finite = values[np.isfinite(values)]
    assert found.nonfinite_count == values.size - finite.size
    if found.nonfinite_count == 0:
        assert found.finite is None
        _check_finite(found, finite)
        return
    with np.errstate(all="ignore"):
        expected = (values.mean(), values.std(), values.min(), values.max())
    got = (found.mean, found.std, found.min, found.max)
    for mine, theirs in zip(got[2:], expected[2:], strict=True):
        assert mine == theirs or (math.isnan(mine) and math.isnan(theirs))
    assert math.isnan(found.std)
    assert math.isnan(found.norm) or found.norm == math.inf
    if np.isnan(values).any() or {math.inf, -math.inf} <= set(values):
        assert math.isnan(found.mean)
    else:
        assert math.isinf(found.mean)
    assert found.histogram is None
    if finite.size:
        assert found.finite is not None
        assert found.finite.count == finite.size
        _check_finite(found.finite, finite)
    else:
        assert found.finite is None


def _check_finite(found: TensorStats | Finite, values: NDArray[np.float64]) -> None:
    assert found.histogram is not None
    if not values.size:
        assert (found.mean, found.std, found.min, found.max, found.norm) == (0, 0, 0, 0, 0)
        assert found.histogram.counts == (0,) * 16
        assert found.histogram.bins == [0.0] * 17
        return
    lo, hi = values.min(), values.max()
    assert (found.min, found.max) == (lo, hi)
    most = float(max(abs(lo), abs(hi)))
    exponent = math.frexp(most)[1]
    long = np.ldexp(values.astype(np.longdouble), -exponent)
    mean, std = long.mean(), long.std()
    norm = np.sqrt((long * long).sum())
    close(found.mean, float(np.ldexp(mean, exponent)), 1e-14 * most)
    close(found.std, float(np.ldexp(std, exponent)), 4e-16 * most)
    close(found.norm, float(np.ldexp(norm, exponent)), 0.0)
    bins = found.histogram.bins
    assert bins == edges(float(lo), float(hi))
    assert bins == sorted(bins)
    assert (bins[0], bins[-1]) == (lo, hi if lo < hi else lo + 1)
    where = np.searchsorted(np.array(bins[1:16]), values, side="right")
    expected = np.bincount(where, minlength=16).tolist() if lo < hi else [values.size] + [0] * 15
    assert list(found.histogram.counts) == expected
    assert sum(found.histogram.counts) == values.size


def close(found: float, expected: float, beside: float) -> None:
    """Equal but for the rounding of a few double-precision operations."""
    if math.isinf(expected):
        assert found == expected
        return
    assert abs(found - expected) <= 1e-12 * abs(expected) + beside + 5e-324, (found, expected)
