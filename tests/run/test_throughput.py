"""Tokens, samples and MFU: counted by the loop, rated over the same steps, never above the peak."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch_counts import samples_of
from cirron_otel.run import throughput_peaks
from cirron_otel.run.rows import Row
from cirron_otel.run.throughput import WARMUP, Counts, _Mark
from helpers import read_spool

SECOND = 1_000_000_000


def step(start_ns: int, end_ns: int, iteration: int | None) -> Row:
    """A step that has ended."""
    return Row("s", "step", start_ns, end_ns, iteration=iteration)


def counted(first: int, steps: int, tokens: float = 100, begin: int = 0) -> Counts:
    """Steps of half a second each, with so many tokens and 4 samples."""
    counts = Counts(begin)
    for number in range(first, first + steps):
        counts.marks([_Mark("tokens", tokens, number), _Mark("samples", 4, number)])
        counts.steps([step(0, SECOND // 2, number)])
    return counts


def test_one_set_of_steps_for_both_sides() -> None:
    """Tokens of a step count only with its length, and in one rate only (D.105)."""
    counts = counted(0, WARMUP + 10)
    counts.marks([_Mark("tokens", 1e9, 100)])  # still under way
    counts.steps([step(0, SECOND, 200), Row("f", "forward", 0, SECOND, iteration=100)])
    rate = counts.take()
    assert rate is not None
    assert (rate.tokens, rate.samples, rate.seconds, rate.steps) == (1000, 40, 5.0, 10)
    assert (rate.tokens_per_second, rate.samples_per_second) == (200, 8)
    assert counts.take() is None
    counts.steps([step(0, SECOND, 100)])
    rate = counts.take()
    assert rate is not None
    assert rate.tokens_per_second == 1e9


def test_a_resumed_run_begins_anew() -> None:
    """After a resume the rate is that of this attempt, without its first steps (D.104)."""
    counts = counted(5000, WARMUP + 4, begin=5000)
    rate = counts.take()
    assert rate is not None
    assert (rate.steps, rate.last, rate.tokens_per_second) == (4, 5000 + WARMUP + 3, 200)


def test_what_is_no_count() -> None:
    """Texts, negative numbers, other marks and marks outside of steps are no counts."""
    counts = Counts()
    counts.marks([
        _Mark("tokens", "many", 9), _Mark("tokens", None, 9), _Mark("tokens", True, 9),  # noqa: FBT003
        _Mark("tokens", -5, 9), _Mark("tokens", 5), _Mark("loss", 5, 9),
    ])  # fmt: skip
    counts.steps([step(0, SECOND, 9), step(0, SECOND, None)])
    assert counts.take() is None


@pytest.mark.parametrize(
    ("batch", "samples"),
    [
        (np.zeros((4, 7)), 4),
        ({"input_ids": np.zeros((3, 5)), "labels": np.zeros(9)}, 3),
        ([("text", 1), [np.zeros((2, 2))]], 2),
        (np.float64(1), None),
        ("text", None),
        ([[[[[[np.zeros(3)]]]]]], None),
    ],
)
def test_samples_of_a_batch(batch: object, samples: int | None) -> None:
    """The first dimension of the first array, wherever it lies; nothing where there is none."""
    assert samples_of(batch) == samples


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 9.895e14),
        ("NVIDIA H100 80GB HBM3", 9.895e14),
        ("NVIDIA H100 PCIe", 7.56e14),
        ("NVIDIA A100-SXM4-80GB", 3.12e14),
        ("NVIDIA L4", 1.21e14),
        ("NVIDIA L40S", 3.62e14),
        ("Tesla T4", 6.5e13),
        ("NVIDIA GeForce RTX 4090", 1.652e14),
        ("Some Future Device", None),
    ],
)
def test_peaks(name: str, peak: float | None) -> None:
    """Devices are known by their names; of the unknown nothing is guessed."""
    assert throughput_peaks.peak_of(name) == peak
    assert throughput_peaks.peak_of_device() is None  # no accelerator is used here


class _Known:
    """What a model of transformers says of itself."""

    def __init__(self, *, frozen: bool = False) -> None:
        self.weight = type("Parameter", (), {"requires_grad": not frozen})()

    def num_parameters(self, *, exclude_embeddings: bool = False) -> int:
        """How many weights it has."""
        return 10 if exclude_embeddings else 15

    def parameters(self) -> list[object]:
        """Its weights."""
        return [self.weight]


def test_operations_of_known_models() -> None:
    """Six for each weight that is no embedding; nothing where some are frozen, or it is unclear."""
    try:
        for models, flops in (
            ([_Known()], 60.0), ([_Known(frozen=True)], None), ([_Known(), _Known()], None),
            ([object()], None),
        ):  # fmt: skip
            ci.watch(None)
            for model in models:
                ci.watch(model)
            assert throughput_peaks.flops_of_models() == flops
    finally:
        ci.watch(None)


def trained(tmp_path: Path, **settings: float) -> ci.Profiler:
    """A loop of 20 steps of 40 tokens in 4 samples, recorded."""
    profiler = ci.profile(path=tmp_path, frameworks=[], terminal="none", **settings)  # type: ignore[arg-type]
    batch = {"input_ids": np.zeros((4, 10))}
    for _ in ci.batches([batch] * 20, tokens=lambda one: one["input_ids"].size):
        pass
    ci.flush()
    return profiler


def rates(tmp_path: Path) -> dict[str, float]:
    """The marks of the session that are rates."""
    rows = read_spool(tmp_path)
    session = rows.one(semconv.SESSION).id
    return {
        mark.name: mark.value  # type: ignore[misc]
        for mark in rows.marks
        if mark.span_id == session and mark.name.startswith("cirron.train.")
    }


def test_a_loop_that_counts(tmp_path: Path) -> None:
    """Counts are marks of their steps; rates and MFU are told over the lengths of these steps."""
    trained(tmp_path, flops_per_token=1e3, device_peak_flops=1e12)
    ci.shutdown()
    rows = read_spool(tmp_path)
    steps = {span.id: span for span in rows.named(semconv.STEP)}
    marks = [mark for mark in rows.marks if mark.span_id in steps]
    assert [mark.value for mark in marks if mark.name == "tokens"] == [40] * 20
    assert [mark.value for mark in marks if mark.name == "samples"] == [4] * 20
    found = rates(tmp_path)
    tokens = found[semconv.TRAIN_TOKENS_PER_SECOND]
    rated = list(steps.values())[WARMUP:]
    seconds = sum(span.end_ns - span.start_ns for span in rated) / 1e9  # type: ignore[operator]
    assert tokens == pytest.approx(40 * len(rated) / seconds)
    assert found[semconv.TRAIN_SAMPLES_PER_SECOND] == pytest.approx(tokens / 10)
    assert found[semconv.TRAIN_MFU] == pytest.approx(tokens * 1e3 / 1e12)


def test_more_than_the_peak_is_a_finding(tmp_path: Path) -> None:
    """More than 100 % is told as what it is, a wrong number, and is no point of MFU (D.105)."""
    profiler = trained(tmp_path, flops_per_token=1e12, device_peak_flops=1e3)
    ci.shutdown()
    found = profiler.health()["findings"]["recent"]
    assert [one["kind"] for one in found] == ["impossible_mfu"]
    assert "count the tokens of this rank only" in found[0]["message"]
    assert semconv.TRAIN_MFU not in rates(tmp_path)
    assert semconv.TRAIN_TOKENS_PER_SECOND in rates(tmp_path)


def test_without_counts_nothing_is_told(tmp_path: Path) -> None:
    """A loop that counts nothing has no rate, and its steps have no marks."""
    ci.profile(path=tmp_path, frameworks=[], terminal="none")
    for _ in ci.batches(range(10)):
        pass
    ci.shutdown()
    assert rates(tmp_path) == {}
    assert read_spool(tmp_path).named(semconv.STEP)[0].mark_ids == ()


def test_counting_never_reaches_the_loop(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A count that raises, or is no function, is said once; the loop and the other count go on."""
    ci.profile(path=tmp_path, frameworks=[], terminal="none")
    caplog.set_level(logging.WARNING, "cirron_otel")
    seen = list(ci.batches([[1], [2], [3]], tokens=lambda _: 1 / 0, samples=len))
    assert seen == [[1], [2], [3]]
    assert list(ci.batches([1, 2], tokens=512)) == [1, 2]  # type: ignore[arg-type]
    ci.shutdown()
    rows = read_spool(tmp_path)
    assert [mark.value for mark in rows.marks if mark.name == "samples"] == [1, 1, 1]
    assert "ci.batches(tokens=...) raised ZeroDivisionError" in caplog.text
    assert "takes a function from a batch to a number, not int" in caplog.text
    for batch in ci.batches([[1]], tokens=len):  # nothing is recorded any more
        assert batch == [1]


def test_a_loop_that_is_left(tmp_path: Path) -> None:
    """The batch in whose body the loop was left counts: it was trained on."""
    ci.profile(path=tmp_path, frameworks=[], terminal="none")
    for number in ci.batches(range(10), tokens=lambda _: 8):
        if number == 2:
            break
    ci.shutdown()
    assert [mark.value for mark in read_spool(tmp_path).marks if mark.name == "tokens"] == [8] * 3
