"""Statistics of tensors are right for every dtype, whichever way they are made."""

from __future__ import annotations

import json
import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cirron_otel.weights.dtypes import DTYPES, byte_values
from cirron_otel.weights.numbers import edges
from cirron_otel.weights.statistics import TensorStats, tensor_stats, to_record
from weights.statistics_by_hand import FLOATS, NAMES, WAYS, Way, bytes_of, check, doubles, tensor_of

quiet = settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.parametrize("name", NAMES)
@quiet
@given(data=st.data())
def test_any_bits_give_what_numpy_says(name: str, data: st.DataObject) -> None:
    """Tensors of arbitrary bits, so of NaN, infinities, subnormals and all: every way agrees."""
    size = DTYPES[name].size
    bits = data.draw(st.binary(max_size=80 * size).map(lambda raw: raw[: len(raw) // size * size]))
    tensor = tensor_of(bits, name)
    for way in WAYS.values():
        check(way(tensor), tensor)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@pytest.mark.parametrize("name", FLOATS)
@quiet
@given(data=st.data())
def test_values_of_one_size_give_what_numpy_says(name: str, way: Way, data: st.DataObject) -> None:
    """Values that lie close together, around zero or far from it, over more than one block."""
    seed, size = data.draw(st.integers(0, 2**32 - 1)), data.draw(st.integers(1, 9000))
    middle = data.draw(st.sampled_from([0.0, 1.0, -3.0, 100.0]))
    spread = data.draw(st.sampled_from([0.0, 1e-6, 1e-2, 1.0, 50.0]))
    random = np.random.default_rng(seed)
    values = torch.from_numpy(random.normal(middle, spread, size))
    tensor = values.to(getattr(torch, name))
    check(way(tensor), tensor)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_more_than_one_chunk_in_order_and_not(way: Way) -> None:
    """Chunks that differ as much as sorted values do are merged exactly."""
    size = 3 * (1 << 17) + 77 if way is not WAYS["python"] else 2 * (1 << 16) + 77
    for tensor in (
        torch.linspace(-7, 90, size),
        torch.linspace(1000, 1001, size),
        torch.arange(size, dtype=torch.int64) - 5,
        torch.linspace(-1, 1, size).bfloat16(),
        torch.linspace(-1, 1, size, dtype=torch.float64) * 1e300,
        (torch.arange(size) % 251).to(torch.uint8),
    ):
        check(way(tensor), tensor)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_what_is_not_finite_is_counted_anywhere(way: Way) -> None:
    """One NaN or infinity at any place is counted, and the rest is described."""
    for name in ("float32", "float64", "bfloat16", "float16"):
        for odd in (math.nan, math.inf, -math.inf):
            tensor = torch.linspace(-1, 2, 5000).to(getattr(torch, name))
            for place in (0, 1, 2047, 2048, 4999):
                tensor[place] = odd
                check(way(tensor), tensor)
        check(way(torch.full((3000,), math.nan)), torch.full((3000,), math.nan))


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_the_norm_neither_overflows_nor_vanishes(way: Way) -> None:
    """Squares beyond a double's range, and below it, do not spoil norm and std."""
    for scale in (1e300, 1e-300, 5e-324, 1.7e308):
        tensor = torch.tensor([0.3, -0.4, 0.5, 1.0], dtype=torch.float64) * scale
        check(way(tensor), tensor)
    both = torch.tensor([1.7e308, -1.7e308, 1e-300, 1.0], dtype=torch.float64)
    check(way(both), both)
    small = torch.full((5,), 1e-42)
    check(way(small), small)
    large = torch.tensor([3e38, -3e38, 1e-40])
    check(way(large), large)


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_values_on_the_edges_lie_above_them(way: Way) -> None:
    """A value on an edge counts for the bin that begins there; the last bin holds its end."""
    for lo, hi in (
        (0.0, 1.0), (-1.0, 1.0), (-0.1, 0.3), (1 / 3, 2 / 3), (1.0, 1.0000001),
        (-7.0, 0.0), (-9.0, -4.0), (-1e-3, 1e3), (-1e9, 0.1),
    ):  # fmt: skip
        near = np.array(edges(lo, hi), dtype=np.float32)
        around = [np.nextafter(near, np.float32(step)) for step in (-np.inf, np.inf)]
        values = np.clip(np.concatenate([near, *around]), np.float32(lo), np.float32(hi))
        tensor = torch.from_numpy(np.tile(values, 50))
        check(way(tensor), tensor)


@pytest.mark.slow
def test_more_elements_than_a_float_can_count() -> None:
    """Beyond 2^24 elements nothing saturates: not the mean, not a bin of the histogram."""
    tensor = torch.full(((1 << 24) + 1001,), 0.1)
    tensor[:500] = 1.0
    (found,) = tensor_stats([tensor])
    assert isinstance(found, TensorStats)
    check(found, tensor)
    assert found.histogram is not None
    assert found.histogram.counts[0] == (1 << 24) + 501


def test_the_ways_agree_to_the_last_count() -> None:
    """The compiled kernel and each way without it give the same counts and nearly the same sums."""
    random = np.random.default_rng(3)
    for name in NAMES:
        values = torch.from_numpy(random.normal(3, 9, 20_000)).to(getattr(torch, name))
        first, *others = (way(values) for way in WAYS.values())
        for other in others:
            assert other.histogram == first.histogram
            assert (other.min, other.max) == (first.min, first.max)
            for field in ("mean", "std", "norm"):
                assert getattr(other, field) == pytest.approx(getattr(first, field), rel=1e-13)


def test_the_quicker_histogram_counts_what_comparing_counts() -> None:
    """Values on a grid, so on the edges, and near to them: AVX2's bins are those of comparisons."""
    random = np.random.default_rng(11)
    for number in range(60):
        values = random.normal(random.normal(), 10 ** random.normal(), 9_000)
        if number % 3 == 0:
            values = np.round(values * 8 / np.abs(values).max())
        for name in ("float32", "bfloat16", "float16", "int16"):
            tensor = torch.from_numpy(values * (100 if name == "int16" else 1))
            tensor = tensor.to(getattr(torch, name))
            quick, slow = WAYS["avx2"](tensor), WAYS["plain"](tensor)
            assert quick.histogram == slow.histogram, (number, name)


def test_bytes_mean_what_torch_says() -> None:
    """All 256 bytes of every type of one byte read as torch reads them."""
    every = bytes(range(256))
    for name in NAMES:
        if DTYPES[name].size == 1 and name != "bool":
            expected = doubles(tensor_of(every, name))
            assert np.array_equal(np.array(byte_values(name)), expected, equal_nan=True), name


def test_the_record_is_what_the_format_asks_for() -> None:
    """``stats`` of a row: the seed's keys, and the additional ones where values are not finite."""
    plain, odd, none = (
        to_record(one)
        for one in tensor_stats(
            [
                torch.tensor([1.0, 2.0, 3.0, 4.0]),
                torch.tensor([math.inf, 1.0, 3.0]),
                torch.tensor([math.nan, -math.inf]),
            ]
        )
        if isinstance(one, TensorStats)
    )
    assert list(plain) == ["mean", "std", "min", "max", "norm", "histogram"]
    assert plain["std"] == pytest.approx(math.sqrt(1.25))
    assert len(plain["histogram"]["bins"]) == 17
    assert len(plain["histogram"]["counts"]) == 16
    steps = [after - before for before, after in pairwise(plain["histogram"]["bins"])]
    assert steps == pytest.approx([3 / 16] * 16)
    assert odd["nonfinite"] == {"mean": "inf", "std": "nan", "max": "inf", "norm": "inf"}
    assert (odd["mean"], odd["min"], odd["nonfinite_count"]) == (None, 1.0, 1)
    assert "histogram" not in odd
    assert odd["finite"]["count"] == 2
    assert sum(odd["finite"]["histogram"]["counts"]) == 2
    assert none["finite"] == {"count": 0}
    assert set(none["nonfinite"].values()) == {"nan"}
    json.dumps([plain, odd, none], allow_nan=False)


def test_a_norm_beyond_a_double_is_named() -> None:
    """Finite values whose norm no double holds: null, and named, also within ``finite``."""
    huge = torch.full((100,), 1.7e308, dtype=torch.float64)
    broken = huge.clone()
    broken[0] = math.nan
    first, second = tensor_stats([huge, broken])
    assert isinstance(first, TensorStats)
    assert isinstance(second, TensorStats)
    record = to_record(first)
    assert record["norm"] is None
    assert record["nonfinite"] == {"norm": "inf"}
    assert record["mean"] == 1.7e308
    assert to_record(second)["finite"]["nonfinite"] == {"norm": "inf"}


def test_one_value_and_none() -> None:
    """A scalar lies in bin 0 of ``[v, v + 1]``; an empty tensor is zero throughout."""
    scalar, empty = tensor_stats([torch.tensor(-2.5), torch.empty(0, 4)])
    assert isinstance(scalar, TensorStats)
    assert isinstance(empty, TensorStats)
    record = to_record(scalar)
    assert record["histogram"]["counts"] == [1] + [0] * 15
    assert record["histogram"]["bins"][::16] == [-2.5, -1.5]
    assert (scalar.std, scalar.norm, scalar.shape) == (0.0, 2.5, ())
    zero = to_record(empty)
    assert zero["histogram"] == {"bins": [0.0] * 17, "counts": [0] * 16}
    assert {zero[key] for key in ("mean", "std", "min", "max", "norm")} == {0.0}


def test_bytes_survive_the_round_trip() -> None:
    """What the other tests build on: a tensor of bytes has these bytes."""
    assert bytes_of(tensor_of(b"\x01\x02\x03\x04", "int16")) == b"\x01\x02\x03\x04"
