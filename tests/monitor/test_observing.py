"""What one check sees: norms of gradients of any kind, with one read."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from cirron_otel.monitor.modules import watched_layers
from cirron_otel.monitor.observing import Observation, observe


def _observe(model: nn.Module, *, scale: float | None = None, bears: bool = False) -> Observation:
    layers, _ = watched_layers(model, None)
    return observe(0, None, layers, [], scale=scale, bears_scale=bears)


def _linear(dtype: torch.dtype, weight: float, bias: float) -> nn.Linear:
    model = nn.Linear(3, 2).to(dtype)
    model.weight.grad = torch.full((2, 3), weight, dtype=dtype)
    model.bias.grad = torch.full((2,), bias, dtype=dtype)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_a_norm_is_that_of_all_parameters_of_a_module(dtype: torch.dtype) -> None:
    """Weight and bias together, added up in float32 or better."""
    found = _observe(_linear(dtype, 2.0, 3.0)).grad
    assert found[""] == pytest.approx(math.sqrt(6 * 4 + 2 * 9), rel=1e-6)


@pytest.mark.parametrize(
    ("dtype", "size"),
    [
        (torch.float64, 1e-60),
        (torch.float64, 1e60),
        (torch.float64, 1e-300),
        (torch.float64, 1e300),
        (torch.float32, 1e-25),
        (torch.float32, 1e20),
        (torch.float32, 1e38),
    ],
)
def test_extreme_gradients_keep_their_norm(dtype: torch.dtype, size: float) -> None:
    """Squares that leave the number type make no gradient zero or infinite (R-W37)."""
    found = _observe(_linear(dtype, size, 0.0)).grad[""]
    assert found == pytest.approx(math.sqrt(6) * size, rel=1e-6)


def test_zero_and_non_finite_gradients_are_what_they_are() -> None:
    """A zero stays zero, an infinity infinite, a NaN no number."""
    assert _observe(_linear(torch.float32, 0.0, 0.0)).grad[""] == 0.0
    assert _observe(_linear(torch.float32, math.inf, 0.0)).grad[""] == math.inf
    assert math.isnan(_observe(_linear(torch.float32, math.nan, 0.0)).grad[""])


def test_mixed_types_sparse_and_absent_gradients() -> None:
    """Each module has its own norm, in the model's order; one without a gradient is named."""
    model = nn.Sequential(
        nn.Embedding(5, 2, sparse=True), nn.Linear(2, 2).double(), nn.Linear(2, 2), nn.Linear(2, 2)
    )
    model[0](torch.tensor([1, 1, 3])).sum().backward()
    model[1].weight.grad = torch.ones(2, 2, dtype=torch.float64)
    model[2].bias.grad = torch.full((2,), 2.0)
    seen = _observe(model)
    assert list(seen.grad) == ["0", "1", "2"]
    assert seen.grad["0"] == pytest.approx(math.sqrt(2 * 4 + 2))
    assert seen.grad["1"] == 2.0
    assert seen.grad["2"] == pytest.approx(math.sqrt(8))
    assert seen.without_gradient == ["3"]


def test_gradients_that_bear_a_scale_are_divided_by_it() -> None:
    """Those that were unscaled already are not."""
    model = _linear(torch.float32, 1024.0, 0.0)
    assert _observe(model, scale=1024.0, bears=True).grad[""] == pytest.approx(math.sqrt(6))
    assert _observe(model, scale=1024.0).grad[""] == pytest.approx(1024 * math.sqrt(6))


def test_observing_changes_nothing() -> None:
    """Weights, gradients and the random stream are as before."""
    model = _linear(torch.float32, 1.0, 1.0)
    before = [(p.detach().clone(), p.grad.clone(), p._version) for p in model.parameters()]
    state = torch.get_rng_state()
    _observe(model)
    assert torch.equal(state, torch.get_rng_state())
    for parameter, (value, gradient, version) in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, value)
        assert torch.equal(parameter.grad, gradient)
        assert parameter._version == version
