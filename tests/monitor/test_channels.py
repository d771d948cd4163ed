"""The classes of channels, from numbers alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cirron_otel.monitor.checks.channels import (
    Channels,
    Silence,
    classify,
    indices,
    nothing_stuck,
)
from cirron_otel.monitor.filters import Rows, Wanted, row_max, row_vectors, unusual

_VECTORS = json.loads(
    (Path(__file__).resolve().parent.parent / "formats/records/vectors.json").read_text()
)["scan_channels"]
TOLERANCE = 1e-5


def _vector(values: list[float] | None) -> torch.Tensor | None:
    return None if values is None else torch.tensor(values)


@pytest.mark.parametrize("case", _VECTORS, ids=lambda case: case["why"][:40])
def test_the_classes_are_those_of_the_existing_monitor(case: dict[str, Any]) -> None:
    """On its own vectors; what it certifies is a candidate here."""
    sizes = _vector(case["row_max"])
    assert sizes is not None
    rows = Rows(sizes, _vector(case["bias"]), _vector(case["gamma"]), _vector(case["beta"]))
    classes = classify(rows, has_relu=True, tolerance=TOLERANCE)
    assert indices(classes.candidate) == case["certified"]
    assert indices(classes.constant) == case["flat"]
    assert indices(classes.decayed) == case["decayed"]


_NUMBERS = st.sampled_from(
    [0.0, -0.0, 1.0, -1.0, 3.0, 1e-3, 1e-6, 9e-6, -1e-7, 1e-20, 1e-30, 1e-44, 1e30, float("nan")]
)


@pytest.mark.parametrize("is_conv", [False, True])
@given(weight=st.lists(st.lists(_NUMBERS, min_size=6, max_size=6), min_size=2, max_size=9))
def test_the_fast_look_at_a_weight_finds_the_same_classes(
    weight: list[list[float]],
    is_conv: bool,  # noqa: FBT001 - a column
) -> None:
    """Norms and first numbers never hide a row that is zero or small, whatever the others are."""
    tensor = torch.tensor(weight)
    tensor = tensor.view(-1, 2, 3, 1) if is_conv else tensor
    exact = row_max(tensor)
    for tolerance in (TOLERANCE, None):
        wanted = Wanted("", tensor, None, None, None, None, tolerance)
        sizes, *_ = row_vectors(wanted, tensor)
        assert sizes is not None
        assert (sizes == 0).tolist() == (exact == 0).tolist()
        if not unusual([(wanted, tensor)], {}):
            has_relu = tolerance is not None
            rows = Rows(exact, None, None, None)
            classes = classify(rows, has_relu=has_relu, tolerance=TOLERANCE)
            assert not any(mask.any() for mask in classes)


@pytest.mark.parametrize("has_relu", [False, True])
@given(channels=st.lists(st.tuples(_NUMBERS, _NUMBERS, _NUMBERS), min_size=1, max_size=9))
def test_what_is_passed_over_at_once_has_no_class(
    channels: list[tuple[float, float, float]],
    has_relu: bool,  # noqa: FBT001 - a column
) -> None:
    """Where the short cut says that nothing is stuck, sorting finds nothing either."""
    sizes, gamma, beta = (torch.tensor(column) for column in zip(*channels, strict=True))
    rows = Rows(sizes.abs(), None, gamma, beta)
    if nothing_stuck(rows, has_relu=has_relu, tolerance=TOLERANCE):
        classes = classify(rows, has_relu=has_relu, tolerance=TOLERANCE)
        assert not any(mask.any() for mask in classes)


def test_a_channel_is_silent_after_patience_checks_on_end() -> None:
    """One output above zero begins the count anew; a window in which nothing ran leaves it."""
    silence = Silence(2)
    for peak in ([-1.0, 0.0], [0.0, 0.0], None, [-1.0, 2.0]):
        silence.update(None if peak is None else torch.tensor(peak))
    found = silence.lasting(3)
    assert found is not None
    assert found.tolist() == [True, False]
    assert silence.lasting(4) is None
    silence.update(torch.tensor([0.1, -1.0]))
    found = silence.lasting(1)
    assert found is not None
    assert found.tolist() == [False, True]


@pytest.mark.parametrize(
    ("stuck", "level"), [(0, "none"), (1, "some"), (3, "most"), (4, "most"), (5, "all")]
)
def test_levels(stuck: int, level: str) -> None:
    """Half and more is most, and every one is all."""
    assert Channels(5, [], list(range(stuck)), [], []).level == level


@pytest.mark.parametrize(
    "weight",
    [
        torch.randn(6, 4, 3, 3).to(memory_format=torch.channels_last),
        torch.randn(6, 9),
        torch.randn(9, 6).t(),
        torch.randn(6, 4, 5),
    ],
)
def test_the_largest_of_a_row_is_right_in_any_layout(weight: torch.Tensor) -> None:
    """Contiguous or not, of two to four dimensions."""
    expected = weight.abs().flatten(1).max(dim=1).values
    assert torch.equal(row_max(weight), expected)
