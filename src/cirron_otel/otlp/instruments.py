"""Every metric that is made of a spool: its name, kind, unit, attributes and boundaries.

Metrics in OTLP's terms, ready to be encoded, are :class:`Metric` and :class:`Point`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from cirron_otel import semconv

#: Upper bounds of the histograms' buckets, in seconds: a fast step to a slow epoch.
BOUNDARIES = (
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0,
    120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0, 7200.0, 10800.0, 21600.0,
)  # fmt: skip

#: Series of one metric of one process; what comes after goes into one series of its own.
MAX_SERIES = 2000

Kind = Literal["gauge", "sum", "histogram"]


class Instrument(NamedTuple):
    """One metric. ``keys`` are the names of its attributes; all sums only rise."""

    name: str
    kind: Kind
    unit: str
    description: str
    keys: tuple[str, ...] = ()


class Exemplar(NamedTuple):
    """A measurement with the span it was made in; ids in hex."""

    ts_ns: int
    value: float
    trace_id: str
    span_id: str


class Point(NamedTuple):
    """One point of a series. ``start_ns`` is 0 for a gauge; ``buckets`` only a histogram has."""

    attrs: dict[str, Any]
    start_ns: int
    time_ns: int
    #: Of a histogram the sum.
    value: float
    exemplars: tuple[Exemplar, ...] = ()
    #: Of a histogram the number of measurements, the least and the greatest of them.
    total: int = 0
    least: float = 0.0
    most: float = 0.0
    buckets: tuple[int, ...] = ()


class Metric(NamedTuple):
    """Points of one instrument. Sums and histograms are cumulative."""

    instrument: Instrument
    points: list[Point]


INSTRUMENTS: Mapping[str, Instrument] = {
    one.name: one
    for one in (
        Instrument(semconv.TRAIN_LOSS, "gauge", "", "Training loss, the last one marked"),
        Instrument(semconv.TRAIN_GRAD_NORM, "gauge", "", "Norm of the gradient, the last marked"),
        Instrument(semconv.TRAIN_LEARNING_RATE, "gauge", "", "Learning rate, the last one marked"),
        Instrument(semconv.TRAIN_TOKENS, "sum", "{token}", "Tokens trained on"),
        Instrument(semconv.TRAIN_SAMPLES, "sum", "{sample}", "Samples trained on"),
        Instrument(semconv.STEP_DURATION, "histogram", "s", "Length of training steps"),
        Instrument(
            semconv.PHASE_DURATION, "histogram", "s",
            "Length of the parts of training: data_load, forward, epoch and so on",
            (semconv.MODE, semconv.PHASE),
        ),
        Instrument(semconv.LAST_STEP_TIME, "gauge", "s", "Unix time at which the last step ended"),
        Instrument(
            semconv.MARK_METRIC, "gauge", "", "Other marks, the last value of each name",
            (semconv.MARK_KIND, semconv.PHASE, semconv.NAME),
        ),
        Instrument(
            semconv.NONFINITE_METRIC, "sum", "{mark}", "Marks that were NaN or infinite",
            (semconv.NAME,),
        ),
        Instrument(
            semconv.QUEUE_AGE, "gauge", "s", "Age of the oldest batch that waits for delivery",
            (semconv.DESTINATION,),
        ),
        Instrument(
            semconv.QUEUE_BATCHES, "gauge", "{batch}", "Batches that wait for delivery",
            (semconv.DESTINATION,),
        ),
        Instrument(
            semconv.QUEUE_SIZE, "gauge", "By", "Bytes that wait for delivery",
            (semconv.DESTINATION,),
        ),
        Instrument(
            semconv.DELIVERY_BATCHES, "sum", "{batch}",
            "Batches by what became of them: delivered, rejected (set aside), gone (evicted)",
            (semconv.OUTCOME, semconv.DESTINATION),
        ),
        Instrument(
            semconv.DELIVERY_FAILURES, "sum", "{try}", "Tries to deliver that failed",
            (semconv.DESTINATION,),
        ),
        Instrument(
            semconv.DROPPED_METRIC, "sum", "{row}", "What was lost, by its reason",
            (semconv.REASON,),
        ),
    )
}  # fmt: skip

#: Names of marks that are known quantities of a training step.
KNOWN_MARKS: Mapping[str, str] = {
    "loss": semconv.TRAIN_LOSS,
    "train_loss": semconv.TRAIN_LOSS,
    "train/loss": semconv.TRAIN_LOSS,
    "dl.loss": semconv.TRAIN_LOSS,
    "grad_norm": semconv.TRAIN_GRAD_NORM,
    "dl.grad_norm": semconv.TRAIN_GRAD_NORM,
    "lr": semconv.TRAIN_LEARNING_RATE,
    "learning_rate": semconv.TRAIN_LEARNING_RATE,
    "dl.learning_rate": semconv.TRAIN_LEARNING_RATE,
    "tokens": semconv.TRAIN_TOKENS,
    "samples": semconv.TRAIN_SAMPLES,
}

#: Scopes whose lengths are measured as phases.
PHASES = frozenset({
    semconv.DATA_LOAD, semconv.FORWARD, semconv.BACKWARD, semconv.OPTIMIZER_STEP,
    semconv.MICRO_BATCH, semconv.EVALUATION, semconv.EPOCH,
})  # fmt: skip
