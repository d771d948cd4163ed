"""Series of any length in bounded memory."""

from __future__ import annotations

import math
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from cirron_otel.training_record.report import load
from cirron_otel.training_record.report.thinning import Band, Columns, Kept, Marks, Peaks
from record_by_hand import RecordWriter

VALUES = st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=300)


@given(values=VALUES, keep=st.integers(1, 20))
def test_extremes_and_counts_survive(values: list[float | None], keep: int) -> None:
    """However often columns are merged, no extreme and no bad value is lost, and none invented."""
    columns, band, peaks = Columns(keep), Band(), Peaks(1)
    for step, value in enumerate(values):
        if columns.full():
            many = len(columns)
            columns.merge()
            band.merge(many)
            peaks.merge(many)
        column = columns.add(step)
        band.add(column, value)
        peaks.add(column, [step])
    finite = [value for value in values if value is not None]
    assert len(columns) <= 2 * keep
    assert sum(band.count) == len(finite)
    assert sum(band.bad) == len(values) - len(finite)
    if finite:
        assert min(value for value in band.low if not math.isnan(value)) == min(finite)
        assert max(value for value in band.high if not math.isnan(value)) == max(finite)
    assert columns.first[0] == 0
    assert columns.last[-1] == len(values) - 1
    assert list(columns.first) == sorted(set(columns.first))
    # Every column covers what its neighbours do not, without a gap.
    assert all(a + 1 == b for a, b in zip(columns.last, columns.first[1:], strict=False))
    assert list(peaks.kinds[0]) == list(columns.last)


@given(total=st.integers(0, 500), limit=st.integers(2, 40))
def test_the_first_and_the_last_are_kept(total: int, limit: int) -> None:
    """Of many, both ends stay in order, and what is missing from the middle is counted."""
    kept: Kept[int] = Kept(limit)
    for item in range(total):
        kept.add(item)
    shown = kept.all()
    assert shown == sorted(shown)
    assert len(shown) <= limit
    assert kept.omitted == total - len(shown)
    if total:
        assert shown[0] == 0
        assert shown[-1] == total - 1


def test_one_spike_in_a_long_run_is_still_drawn(tmp_path: Path) -> None:
    """One extreme check among thousands is in the thinned series, at its place."""
    writer = RecordWriter(tmp_path)
    for check in range(5000):
        writer.row(check, 99.0 if check == 3333 else 1.0, {"fc": 0.0 if check == 77 else 0.5})
    run = load(writer.end())
    assert len(run.columns) <= 800
    at = max(range(len(run.columns)), key=lambda column: run.loss.band.high[column])
    assert run.loss.band.high[at] == 99.0
    assert run.columns.first[at] <= 3333 <= run.columns.last[at]
    zero = min(range(len(run.columns)), key=lambda column: run.layers["fc"].gradient.low[column])
    assert run.columns.first[zero] <= 77 <= run.columns.last[zero]


def test_too_many_layers_are_counted(tmp_path: Path) -> None:
    """A record with more layers than can be followed is read, and says that some are left out."""
    writer = RecordWriter(tmp_path)
    writer.row(0, 1.0, {f"layer{at}": 0.1 for at in range(3000)})
    run = load(writer.end())
    assert len(run.layers) == 2048
    assert any("2048" in note for note in run.notes)


@given(steps=st.lists(st.integers(0, 10_000), max_size=200), most=st.integers(1, 30))
def test_no_mark_is_ever_left_out(steps: list[int], most: int) -> None:
    """Places may become wider, but every event is counted, and the first of all keeps its step."""
    marks = Marks(most)
    for step in steps:
        marks.add(step, f"at {step}")
    places = marks.all()
    assert len(places) <= most
    assert sum(many for many, _, _ in places) == len(steps)
    assert [first for _, first, _ in places] == sorted({first for _, first, _ in places})
    assert all(what == f"at {first}" for _, first, what in places)
    if steps:
        assert places[0][1] == min(steps)
