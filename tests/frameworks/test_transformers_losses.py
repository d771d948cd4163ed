"""Losses that come late, as from a GPU: sums, means and the comparison with the Trainer's log."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.hooks.transformers.losses import Losses, mark_loss
from cirron_otel.values import Deferred
from helpers import read_spool


class Late:
    """A value that comes when it is let go."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.there = False

    def deferred(self) -> Deferred:
        """As the marks take it."""
        return Deferred(lambda: self.value, lambda: self.there)


@pytest.fixture
def losses() -> Iterator[Losses]:
    """The losses of a recording under way."""
    ci.profile(frameworks=[], snapshots=None)
    rec = recorder._current
    assert rec is not None
    yield Losses(rec)
    ci.shutdown()


def test_a_step_waits_for_all_its_parts(losses: Losses) -> None:
    """The sum over the group is written once the last of its values has come."""
    first, second = Late(1.0), Late(2.0)
    assert losses.add(first.deferred(), 2) is not None
    losses.add(second.deferred(), 2)
    value = losses.end_step()
    assert isinstance(value, Deferred)
    first.there = True
    assert not value.ready()
    second.there = True
    assert value.ready()
    rec = recorder._current
    assert rec is not None
    mark_loss(rec, value)
    ci.shutdown()
    assert [(mark.name, mark.value) for mark in read_spool().marks] == [("loss", 3.0)]


def test_a_part_compares_with_a_step(losses: Losses) -> None:
    """A micro-batch's own value is its part times the size of the group, late or not."""
    late = Late(0.5)
    part = losses.add(late.deferred(), 4)
    assert isinstance(part, Deferred)
    assert part.resolve() == 2.0
    now = losses.add(0.25, 4)
    assert now is not None
    assert not isinstance(now, Deferred)
    assert now.value == 1.0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_filtered_loss_is_found_out_when_it_comes(losses: Losses, value: float) -> None:
    """The Trainer has logged long before the flush thread knows better (101)."""
    values = [Late(1.0), Late(value)]
    resolved = []
    for late in values:
        losses.add(late.deferred(), 1)
        resolved.append(losses.end_step())
    losses.logged(0.765, step=1, alone=True)
    assert ci.health()["findings"]["count"] == 0
    for late, step in zip(values, resolved, strict=True):
        late.there = True
        assert isinstance(step, Deferred)
        step.resolve()
    found = ci.health()["findings"]
    assert found["by_kind"] == {"loss_filtered": 1}
    assert found["recent"][0]["attributes"]["nonfinite"] == 1


def test_the_mean_of_an_epoch_comes_with_its_last_step(losses: Losses) -> None:
    """A summary that waits for the steps; without steps there is none."""
    assert losses.epoch_mean() is None
    late = Late(4.0)
    losses.add(2.0, 1)
    losses.end_step()
    assert losses.epoch_mean() == 2.0
    losses.begin_epoch()
    losses.add(late.deferred(), 1)
    step = losses.end_step()
    mean = losses.epoch_mean()
    assert isinstance(step, Deferred)
    assert isinstance(mean, Deferred)
    assert not mean.ready()
    late.there = True
    step.resolve()
    assert mean.ready()
    assert mean.resolve() == 4.0


@pytest.mark.parametrize("returned", [None, "0.5", {"loss": 1.0}, True])
def test_what_is_no_loss_is_none(losses: Losses, returned: object) -> None:
    """A subclass may return anything from ``training_step``."""
    assert losses.add(returned, 1) is None
    assert losses.end_step() is None
