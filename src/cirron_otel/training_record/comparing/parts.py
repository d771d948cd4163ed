"""The parts of a comparison of two records: their losses, and their layers."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import METRICS
from cirron_otel.training_record.report import words
from cirron_otel.training_record.report.lines import Reading, number, objects, whole
from cirron_otel.training_record.report.model import Layer, Run

#: The loss is judged by the mean of so many checks: one batch says little.
JUDGED = 10


@dataclass(frozen=True, slots=True)
class LayerChange:
    """A layer whose findings differ: the counts of both runs, and what that amounts to.

    A count is None where the layer is not in that run, or was not scanned.
    """

    layer: str
    health: str
    a: dict[str, object]
    b: dict[str, object]
    new: list[str]
    fixed: list[str]


@dataclass(frozen=True, slots=True)
class LossChange:
    """The losses at the steps that both runs checked, and their ends.

    ``mean_a`` and ``mean_b`` are over the last :data:`JUDGED` common checks with a finite loss in
    both.
    """

    common: int = 0
    first_step: int | None = None
    last_step: int | None = None
    first_difference: int | None = None
    largest: float | None = None
    largest_step: int | None = None
    mean_a: float | None = None
    mean_b: float | None = None
    final_a: float | None = None
    final_b: float | None = None
    best_a: float | None = None
    best_b: float | None = None


def equal(x: object, y: object) -> bool:
    """Equal, also in type, but for the whole float: 0 and 0.0 are the same setting."""
    if isinstance(x, bool) != isinstance(y, bool):
        return False
    both_nan = isinstance(x, float) and isinstance(y, float) and math.isnan(x) and math.isnan(y)
    try:
        return both_nan or x == y
    except RecursionError:  # nested as deep as no setting is
        return False


def losses(run_a: Run, run_b: Run) -> LossChange:
    """Compare the losses at common steps, streaming both metrics files."""
    common = 0
    first = last = differs = largest_step = None
    largest: float | None = None
    judged: deque[tuple[float, float]] = deque(maxlen=JUDGED)
    for step, a, b in _joined(_series(run_a), _series(run_b)):
        common += 1
        first = step if first is None else first
        last = step
        if not equal(a, b) and differs is None:
            differs = step
        if math.isfinite(a) and math.isfinite(b):
            judged.append((a, b))
            if largest is None or abs(b - a) > largest:
                largest, largest_step = abs(b - a), step
    return LossChange(
        common=common,
        first_step=first,
        last_step=last,
        first_difference=differs,
        largest=_finite(largest),
        largest_step=largest_step,
        mean_a=_mean([a for a, _ in judged]),
        mean_b=_mean([b for _, b in judged]),
        final_a=run_a.loss.final,
        final_b=run_b.loss.final,
        best_a=run_a.loss.best,
        best_b=run_b.loss.best,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _mean(values: list[float]) -> float | None:
    return math.fsum(value / len(values) for value in values) if values else None


def _series(run: Run) -> Iterator[tuple[int, float]]:
    """Step and loss of each check that had a loss, steps ascending; not finite is NaN."""
    if run.directory is None or run.metrics_reading is None:
        return
    before = -1
    try:
        for row in objects(run.directory / METRICS, Reading(), follow=False):
            step, loss = whole(row.get("step")), number(row.get("loss"))
            said = row.get("nonfinite")
            if loss is None and isinstance(said, dict) and "loss" in said:
                loss = math.nan
            if step is None or loss is None or step <= before:
                continue
            before = step
            yield step, loss if math.isfinite(loss) else math.nan
    except RecordError:
        # It was readable a moment ago; what was read so far is what there is.
        return


def _joined(
    a: Iterator[tuple[int, float]], b: Iterator[tuple[int, float]]
) -> Iterator[tuple[int, float, float]]:
    """What both have at one step."""
    one, other = next(a, None), next(b, None)
    while one is not None and other is not None:
        if one[0] == other[0]:
            yield one[0], one[1], other[1]
            one, other = next(a, None), next(b, None)
        elif one[0] < other[0]:
            one = next(a, None)
        else:
            other = next(b, None)


def _counts(layer: Layer | None) -> dict[str, object]:
    if layer is None:
        return {}
    scanned = layer.scanned
    return {
        "alarms": layer.alarms,
        "open_alarms": int(layer.open_alarm is not None),
        "nonfinite": layer.nonfinite_gradients,
        "peak_stuck": layer.peak_stuck if scanned else None,
        "stuck_at_end": layer.stuck_at_end,
        "proven_peak": layer.peak_proven if scanned else None,
        "proven_at_end": layer.proven_at_end,
        "silent_peak": layer.peak_silent if scanned else None,
        "silent_at_end": layer.silent_at_end,
        "certified": layer.certified,
        "repairs": layer.repairs,
        "channels_repaired": layer.channels_repaired,
        "diagnoses": sorted(layer.diagnoses),
    }


def findings(layer: Layer | None) -> set[str]:
    """What was found in a layer, by name: what can be new or fixed."""
    if layer is None:
        return set()
    found = {words.DIAGNOSES.get(item, item) for item in layer.diagnoses}
    if layer.nonfinite_gradients:
        found.add("gradient not finite")
    if layer.peak_stuck > layer.inherited:
        found.add("stuck channels")
    if layer.inherited:
        found.add("stuck channels from the start")
    return found


def layer_change(name: str, a: Layer | None, b: Layer | None) -> LayerChange | None:
    """The change in a layer; None where there is none to tell of."""
    counts_a, counts_b = _counts(a), _counts(b)
    if a is None or b is None:
        present = b if a is None else a
        if present is None or not present.has_findings:
            return None
        health = "only in the second" if a is None else "only in the first"
        return LayerChange(name, health, counts_a, counts_b, sorted(findings(b)), [])
    if counts_a == counts_b:
        return None
    before, after = findings(a), findings(b)
    return LayerChange(
        name,
        _health(counts_a, counts_b),
        counts_a,
        counts_b,
        sorted(after - before),
        sorted(before - after),
    )


def _health(a: Mapping[str, object], b: Mapping[str, object]) -> str:
    """How a layer did in the second run: first by how it ended, then by how bad it ever was."""
    for keys in (
        ("proven_at_end", "stuck_at_end", "open_alarms", "nonfinite"),
        ("proven_peak", "peak_stuck", "certified", "alarms"),
        ("silent_at_end", "silent_peak"),
    ):
        moves = {_move(a.get(key), b.get(key)) for key in keys} - {0}
        if moves:
            silent = "silent " if keys[0].startswith("silent") else ""
            if moves == {1}:
                return "more silent" if silent else "worse"
            if moves == {-1}:
                return "fewer silent" if silent else "better"
            return f"{silent}mixed"
    return "changed"


def _move(a: object, b: object) -> int:
    """1 up, -1 down, 0 the same or not to be compared: not scanned is not zero."""
    if not isinstance(a, int) or not isinstance(b, int):
        return 0
    return (b > a) - (b < a)
