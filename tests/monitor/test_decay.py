"""Whether weight decay can carry a number past zero: against vectors, and against torch itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cirron_otel.monitor.decay import sgd_keeps_sign, why_it_may_lift

_VECTORS = json.loads(
    (Path(__file__).resolve().parent.parent / "formats/records/vectors.json").read_text()
)["sgd_decay_keeps_sign"]


def test_the_rule_is_that_of_the_existing_monitor() -> None:
    """On all its vectors."""
    for lr, weight_decay, momentum, dampening, nesterov, keeps in _VECTORS:
        found = sgd_keeps_sign(lr, weight_decay, momentum, dampening, nesterov=nesterov)
        assert found is keeps, (lr, weight_decay, momentum, dampening, nesterov)


@settings(max_examples=40)
@given(
    lr=st.sampled_from([1e-3, 0.1, 1.0]),
    weight_decay=st.sampled_from([0.0, 5e-4, 0.05, 0.5, 0.99]),
    momentum=st.sampled_from([0.0, 0.5, 0.9, 0.99]),
    damped=st.booleans(),
    nesterov=st.booleans(),
)
def test_where_the_rule_allows_it_torch_never_passes_zero(
    *, lr: float, weight_decay: float, momentum: float, damped: bool, nesterov: bool
) -> None:
    """Many steps of the real optimizer without a gradient, from both states."""
    nesterov = nesterov and momentum > 0
    dampening = 0.5 if damped and not nesterov else 0.0
    if not sgd_keeps_sign(lr, weight_decay, momentum, dampening, nesterov=nesterov):
        return
    shift = torch.nn.Parameter(torch.tensor([-1.0], dtype=torch.float64))
    optimizer = torch.optim.SGD(
        [shift], lr=lr, weight_decay=weight_decay, momentum=momentum, dampening=dampening,
        nesterov=nesterov, foreach=False,
    )  # fmt: skip
    shift.grad = torch.zeros(1, dtype=torch.float64)
    for _ in range(120):
        optimizer.step()
        assert shift.item() <= 0


@pytest.mark.parametrize(
    ("family", "kind", "group", "allowed"),
    [
        ("adam", "Adam", {"lr": 1e-3, "weight_decay": 0.0}, True),
        ("adam", "Adam", {"lr": 1e-3, "weight_decay": 1e-2}, False),
        ("adam", "AdamW", {"lr": 1e-3, "weight_decay": 1e-2}, True),
        ("adam", "AdamW", {"lr": 10.0, "weight_decay": 0.1}, False),
        (
            "adam",
            "NAdam",
            {"lr": 1e-3, "weight_decay": 0.1, "decoupled_weight_decay": True},
            True,
        ),
        ("opt-in", "Lion", {"lr": 1e-3, "weight_decay": 0.1}, False),
        ("sgd", "SGD", {"lr": torch.tensor(0.1), "weight_decay": 1e-4, "momentum": 0.9}, True),
        ("sgd", "SGD", {"lr": 0.1, "weight_decay": 5e-4, "momentum": 0.99}, False),
    ],
)
def test_which_decay_is_allowed(
    family: str,
    kind: str,
    group: dict[str, Any],
    allowed: bool,  # noqa: FBT001 - a column
) -> None:
    """Decay inside the gradient moves Adam; decoupled decay only shrinks."""
    assert (why_it_may_lift(family, kind, group) is None) is allowed
