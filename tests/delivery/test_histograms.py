"""Exponential histograms: in which bucket a length falls, and how they arrive."""

from __future__ import annotations

from fractions import Fraction
from math import log2
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cirron_otel.batch import SpanOtel
from cirron_otel.destinations.base import Accepted
from cirron_otel.destinations.otlp_signals import otlp_receivers
from cirron_otel.errors import ConfigurationError
from cirron_otel.otlp.histograms import MAX_BUCKETS, MAX_SCALE, Exponential, index_of
from delivery.otlp_server import grpc_receiver, http_receiver
from delivery.test_metrics import ENDPOINT, WRITER, deliver, last, parcels, to
from spool_by_hand import Writer, span, training

AGGREGATION = "OTEL_EXPORTER_OTLP_METRICS_DEFAULT_HISTOGRAM_AGGREGATION"
EXPONENTIAL = {AGGREGATION: "base2_exponential_bucket_histogram"}
LENGTHS = st.lists(st.integers(0, 86_400_000_000_000), min_size=1, max_size=60)
TRACE = "0123456789abcdef00000000deadbeef"


@given(st.integers(1, 10**15))
def test_a_length_lies_within_the_bounds_of_its_bucket(length: int) -> None:
    """A bucket holds what is above its lower bound and at most its upper one, at every scale."""
    value = length / 1e9
    at = index_of(value)
    exact = log2(value) * 2**MAX_SCALE
    # Doubles cannot tell on which side of a bound a value lies that is closer than this.
    assert at - 1e-5 <= exact <= at + 1 + 1e-5
    for scale in (10, 3, 0, -2):
        found = at >> (MAX_SCALE - scale)
        assert found - 1e-5 <= log2(value) * 2.0**scale <= found + 1 + 1e-5


@pytest.mark.parametrize("power", [-30, -10, -1, 0, 1, 5, 14])
def test_a_power_of_two_is_the_upper_bound_of_its_bucket(power: int) -> None:
    """At scale 0 a bucket is (2**i, 2**(i + 1)], exactly."""
    value = float(Fraction(2) ** power)
    assert index_of(value) >> MAX_SCALE == power - 1
    assert index_of(value * (1 + 2**-52)) >> MAX_SCALE == power


@settings(max_examples=40)
@given(st.lists(LENGTHS, min_size=1, max_size=5))
def test_batches_add_up_whatever_their_order(batches: list[list[int]]) -> None:
    """Counts, sum and extremes are exact, and buckets the same as of all lengths at once."""
    first = batches[0][0]
    one, two = Exponential(0, 0, first, first), Exponential(0, 0, first, first)
    for batch in batches:
        one.add(batch)
    for batch in reversed(batches):
        two.add(batch)
    lengths = [length for batch in batches for length in batch]
    assert one == two
    assert (one.count, one.sum_ns) == (len(lengths), sum(lengths))
    assert (one.least_ns, one.most_ns) == (min(lengths), max(lengths))
    offset, counts = one.dense()
    assert len(counts) <= MAX_BUCKETS
    assert sum(counts) + one.zero_count == len(lengths)
    positive = [length / 1e9 for length in lengths if length]
    if positive:
        shift = MAX_SCALE - one.scale
        assert offset == min(index_of(value) >> shift for value in positive)
        assert all((counts[0], counts[-1]))


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
def test_they_arrive_where_they_are_asked_for(tmp_path: Path, protocol: str) -> None:
    """Every histogram of a run is exponential, with the sums and exemplars it has otherwise."""
    training(tmp_path, epochs=2, steps=10)
    seen = span("seen", "step", None, 0, 50, otel=SpanOtel(trace_id=TRACE[:16]))
    seen.id = seen.id[:16] + TRACE[16:]
    Writer(tmp_path, **WRITER).batch(2000, [seen])
    with grpc_receiver() if protocol == "grpc" else http_receiver() as server:
        more: dict[str, Any] = {} if protocol == "grpc" else {"protocol": protocol}
        assert set(deliver(to(server, EXPONENTIAL, **more), parcels(tmp_path))) == {Accepted()}
        kinds = {
            metric.name: metric.WhichOneof("data")
            for request in server.beside
            for resource in getattr(request.message, "resource_metrics", ())
            for metric in resource.scope_metrics[0].metrics
        }
        steps = last(server, "cirron.step.duration")[""]
        phases = last(server, "cirron.phase.duration")
    for name in ("cirron.step.duration", "cirron.phase.duration"):
        assert kinds[name] == "exponential_histogram"
    assert "histogram" not in kinds.values()
    assert steps.count == sum(steps.positive.bucket_counts) + steps.zero_count == 21
    assert steps.sum == pytest.approx(21 * 0.05)
    assert steps.min == steps.max == pytest.approx(0.05)
    (exemplar,) = steps.exemplars
    assert (exemplar.as_double, exemplar.trace_id) == (0.05, bytes.fromhex(TRACE))
    base = 2.0 ** (2.0**-steps.scale)
    assert base**steps.positive.offset <= 0.05 <= base ** (steps.positive.offset + 1)
    assert {key: point.count for key, point in phases.items()} == {
        "data_load": 20, "forward": 20, "backward": 20, "optimizer_step": 20, "epoch": 2,
    }  # fmt: skip


def test_with_other_buckets_the_sums_begin_anew(tmp_path: Path) -> None:
    """A forwarder that goes on with other buckets mixes nothing: that is a counter reset."""
    training(tmp_path, epochs=2, steps=10)
    batches = parcels(tmp_path)
    assert len(batches) > 1
    with http_receiver() as server:
        deliver(to(server), batches[:1])
        before = last(server, "cirron.step.duration")[""].count
        deliver(to(server, EXPONENTIAL), batches[1:])
        after = last(server, "cirron.step.duration")[""]
    assert before
    assert after.count == 20 - before
    assert after.positive.bucket_counts


def test_another_word_is_an_error() -> None:
    """A misspelt aggregation is told with the variable's name."""
    with pytest.raises(ConfigurationError, match=f"{AGGREGATION} = 'summary' must be"):
        otlp_receivers(environ={**ENDPOINT, AGGREGATION: "summary"})
    (target,) = otlp_receivers(environ={**ENDPOINT, AGGREGATION: "explicit_bucket_histogram"})
    assert target.metrics is not None
    assert not target.metrics.exponential
