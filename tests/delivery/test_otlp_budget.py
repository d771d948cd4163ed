"""The export budget: what goes when not everything may, and what says that something did not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel.batch import Batch, MarkRecord, SpanOtel, SpanRecord
from cirron_otel.destinations.base import Accepted, Parcel
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_settings import OtlpTarget, otlp_targets
from cirron_otel.otlp.budget import Budget
from cirron_otel.otlp.gathering import Gatherer
from cirron_otel.otlp.rows import OtlpSpan
from delivery.otlp_server import http_receiver
from helpers import read_spool
from spool_by_hand import hex32, mark, span

#: Steps of ten milliseconds, each with two phases: 300 spans a second.
STEP_MS = 10.0


def steps(first: int, last: int, **odd: Any) -> list[SpanRecord]:
    """The rows of some steps, children first; ``odd`` maps ``i<number>`` to fields of that step."""
    rows: list[SpanRecord] = []
    for i in range(first, last):
        at = i * STEP_MS
        key = f"s/step{i}"
        fields = {"end": at + 9, **odd.get(f"i{i}", {})}
        end = fields.pop("end")
        rows += [
            span(f"{key}.f", "forward", key, at, at + 4, iteration=i),
            span(f"{key}.b", "backward", key, at + 4, at + 8, iteration=i),
            span(key, "step", "s/epoch", at, end, iteration=i, index=i, **fields),
        ]
    return rows


def batch(at: float, rows: Sequence[SpanRecord], marks: Sequence[MarkRecord] = ()) -> Batch:
    """A batch of one session."""
    made = Batch(1, "9", hex32(f"b{at}"), round(at), list(rows), list(marks))
    made.resource = {"cirron.session.id": hex32("s/1")}
    return made


def gone(budget: Budget, *batches: Batch) -> list[int]:
    """The iterations of the steps that are left out of these batches, whole as they are."""
    left: Counter[int] = Counter()
    for one in batches:
        out = budget.choose(one)
        left.update(int(row.iteration) for row in one.spans if row.id in out)  # type: ignore[arg-type]
    assert set(left.values()) <= {3}
    return sorted(left)


def test_within_the_budget_everything_goes() -> None:
    """As long as the bucket is not empty, and where there is no budget, nothing is left out."""
    assert gone(Budget(200, 20_000), batch(1, steps(0, 1000))) == []
    assert gone(Budget(400, 10), batch(1, steps(0, 1000))) == []
    assert gone(Budget(0, 0), batch(1, steps(0, 10_000))) == []


def test_beyond_it_every_kth_step_goes() -> None:
    """First the burst goes, then steps evenly, as many as the rate has room for, none in part."""
    budget = Budget(100, 300)
    left = gone(budget, *(batch(i, steps(500 * i, 500 * i + 500)) for i in range(4)))
    sent = sorted(set(range(2000)) - set(left))
    assert sent[:100] == list(range(100))
    later = [i for i in sent if i >= 200]
    gaps = Counter(b - a for a, b in pairwise(later))
    assert set(gaps) <= {2, 3, 4}
    assert 580 <= len(later) <= 620
    assert budget.left_out == 3 * len(left)


def test_slow_failed_and_alarmed_steps_go_anyway() -> None:
    """A step above the p99 of those before it, a failed one, one with a NaN or a finding go."""
    budget = Budget(1, 3)
    gone(budget, batch(1, steps(0, 500)))
    odd = {
        "i510": {"end": 5100 + 60},
        "i520": {"otel": SpanOtel(status="error")},
    }
    rows = steps(500, 560, **odd)
    nan = mark("s/step530", "loss", None, at=5305, iteration=530, value_nonfinite="nan")
    finding = mark("s/step540", "cirron.finding", "layer4 is dead", at=5405, iteration=540)
    left = gone(budget, batch(2, rows, [nan, finding]))
    assert {500, 501, 559} <= set(left)
    assert {510, 520, 530, 540}.isdisjoint(left)


def test_what_is_in_no_step_goes() -> None:
    """Epochs, sessions and checkpoints are never left out, however deep in debt."""
    budget = Budget(1, 3)
    others = [span(f"s/c{i}", "checkpoint", "s/1", i, i + 1) for i in range(100)]
    assert budget.choose(batch(1, [*steps(0, 100), *others])).isdisjoint(row.id for row in others)
    assert budget.choose(batch(2, [span("s/epoch", "epoch", "s/1", 0, 9)])) == set()


def test_a_step_in_two_batches_is_decided_once() -> None:
    """The rest of a step follows what its first part did, also when a batch comes again."""
    budget = Budget(10, 30)
    rows = steps(0, 200)
    for middle in (100, 301, 500):
        first, second = batch(1, rows[:middle]), batch(2, rows[middle:])
        fresh = Budget(10, 30)
        out = fresh.choose(first) | fresh.choose(second)
        together = Counter(row.iteration for row in rows if row.id in out)
        assert set(together.values()) <= {3}
    once = budget.choose(batch(1, rows))
    assert budget.choose(batch(1, rows)) == once
    assert once


def test_the_root_says_what_is_missing() -> None:
    """The session's span and a window's root bear the numbers left out of their own trace."""
    gatherer = Gatherer(budget=Budget(1, 30))
    window = span("w/root", "steps[100..199]", None, 0, 2000, otel=SpanOtel(window=True))
    rows = steps(0, 100)
    in_window = steps(100, 200)
    for row in in_window:
        row.id = row.id[:16] + window.id[16:]
    made = batch(1, [*rows, *in_window, span("s/1", "cirron.session", None, 0, 3000)])
    made.windows = [window]
    found: list[OtlpSpan] = list(gatherer.spans(made))
    by_name = {one.name: one for one in found}
    kept = sum(one.name == "step" for one in found)
    missing = [
        by_name[name].attrs["cirron.left_out.steps"]
        for name in ("cirron.session", "steps[100..199]")
    ]
    assert kept + sum(missing) == 200
    assert min(missing) > 50
    assert by_name["cirron.session"].attrs["cirron.left_out.spans"] == 3 * missing[0]


def test_a_run_over_its_budget() -> None:
    """Of a real run that is too fast, part is exported, whole steps; the spool has all of it."""
    ci.profile(frameworks=[])
    for _ in ci.epochs(range(1)):
        for _ in ci.batches(range(2000)):
            with ci.scope("forward"):
                pass
    assert ci.shutdown()
    with http_receiver() as server:
        (target,) = otlp_targets(server.url, environ={}, export_rate=100, export_burst=600)
        assert isinstance(target, OtlpTarget)
        destination = OtlpDestination(target, pending=False)
        for file in sorted(read_files()):
            assert destination.send(Parcel.read(file)) == Accepted()
        destination.close()
    names = Counter(one.name for one in server.spans.values())
    assert names["step"] == names["forward"] == names["data_load"]
    assert 150 <= names["step"] < 1500
    assert names["cirron.session"] == names["epoch"] == 1
    assert destination.left_out_spans == 3 * (2000 - names["step"])
    assert len(read_spool().named("step")) == 2000


def read_files() -> list[Path]:
    """The batch files of the test's spool."""
    return list(Path(".cirron/spool").glob("*.json"))


@pytest.mark.parametrize("mode", ["thread", "process"])
def test_health_says_what_was_left_out(mode: str) -> None:
    """What the budget left out is in health(), by whatever way it is delivered."""
    with http_receiver() as server:
        profiler = ci.profile(
            frameworks=[], otlp=server.url, forward=mode, exit_budget=60,
            export_rate=100, export_burst=600,
        )  # fmt: skip
        for _ in ci.epochs(range(1)):
            for _ in ci.batches(range(2000)):
                pass
        assert ci.shutdown()
        (state,) = profiler.health()["destinations"]
    steps_sent = sum(one.name == "step" for one in server.spans.values())
    assert state["queue_batches"] == state["forgotten_marks"] == 0
    assert state["left_out_spans"] == 2 * (2000 - steps_sent) > 0
