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

# Those that OpenTelemetry's convention for generative AI gives for each of its histograms.
_REQUEST_BOUNDARIES = (
    0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92,
)  # fmt: skip
_FIRST_TOKEN_BOUNDARIES = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
)  # fmt: skip
_TOKEN_BOUNDARIES = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5,
)  # fmt: skip

#: Series of one metric of one process; what comes after goes into one series of its own.
MAX_SERIES = 2000

#: Parts the values of a series' attributes in its key, the last of which may be any text.
PART = "\x1f"
#: Characters of a value in such a key that comes from outside, a model's name, say.
MAX_KEY_CHARS = 256

Kind = Literal["gauge", "sum", "histogram"]


class Instrument(NamedTuple):
    """One metric. ``keys`` are the names of its attributes; all sums only rise.

    ``boundaries`` are those of a histogram: upper bounds of its buckets, in its unit.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    keys: tuple[str, ...] = ()
    boundaries: tuple[float, ...] = BOUNDARIES


class Exemplar(NamedTuple):
    """A measurement with the span it was made in; ids in hex."""

    ts_ns: int
    value: float
    trace_id: str
    span_id: str


class Scale(NamedTuple):
    """How the buckets of an exponential histogram lie; see :mod:`.histograms`."""

    scale: int
    #: Index of the first bucket.
    offset: int
    #: How many measurements were 0.
    zero_count: int


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
    #: Of a histogram whose buckets are not the instrument's but exponential.
    scale: Scale | None = None


class Metric(NamedTuple):
    """Points of one instrument. Sums and histograms are cumulative."""

    instrument: Instrument
    points: list[Point]


_SUCCESS_KEYS = (
    semconv.GEN_AI_OPERATION, semconv.GEN_AI_PROVIDER, semconv.GEN_AI_REQUEST_MODEL,
    semconv.GEN_AI_RESPONSE_MODEL,
)  # fmt: skip

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
            semconv.TRAIN_TOKENS_PER_SECOND, "gauge", "{token}/s", "Tokens trained on per second",
        ),
        Instrument(
            semconv.TRAIN_SAMPLES_PER_SECOND, "gauge", "{sample}/s",
            "Samples trained on per second",
        ),
        Instrument(
            semconv.TRAIN_MFU, "gauge", "1", "Share of the device's peak that the model uses",
        ),
        Instrument(semconv.PROGRESS, "gauge", "1", "Share of the training that is done, 0 to 1"),
        Instrument(semconv.ETA, "gauge", "s", "Seconds to the end of the training"),
        Instrument(
            semconv.MEMORY_ALLOCATED, "gauge", "By", "Memory in use on the accelerator",
            (semconv.MEMORY_DEVICE,),
        ),
        Instrument(
            semconv.MEMORY_RESERVED, "gauge", "By", "Memory that torch holds of the accelerator",
            (semconv.MEMORY_DEVICE,),
        ),
        Instrument(
            semconv.MEMORY_PEAK, "gauge", "By", "The most memory in use so far",
            (semconv.MEMORY_DEVICE,),
        ),
        Instrument(
            semconv.PROCESS_MEMORY, "gauge", "By", "The resident set of the process",
        ),
        Instrument(
            semconv.RUN_TIME, "sum", "s", "What the wall time went into, by category",
            (semconv.CATEGORY,),
        ),
        Instrument(
            semconv.RUN_OUTCOME, "sum", "{run}", "Recordings that ended, by how they ended",
            (semconv.OUTCOME,),
        ),
        Instrument(
            semconv.MARK_METRIC, "gauge", "", "Other marks, the last value of each name",
            (semconv.MARK_KIND, semconv.PHASE, semconv.NAME),
        ),
        Instrument(
            semconv.NONFINITE_METRIC, "sum", "{mark}", "Marks that were NaN or infinite",
            (semconv.NAME,),
        ),
        Instrument(
            semconv.SERVER_DURATION, "histogram", "s",
            "Length of requests, from their beginning to the last part of the answer",
            (semconv.ERROR_TYPE, *_SUCCESS_KEYS), _REQUEST_BOUNDARIES,
        ),
        Instrument(
            semconv.SERVER_TIME_TO_FIRST_TOKEN, "histogram", "s",
            "Time to the first part of the answer, of requests that came to a good end",
            _SUCCESS_KEYS, _FIRST_TOKEN_BOUNDARIES,
        ),
        Instrument(
            semconv.SERVER_TIME_PER_OUTPUT_TOKEN, "histogram", "s",
            "Time per token after the first, of requests that came to a good end",
            _SUCCESS_KEYS, _TOKEN_BOUNDARIES,
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

#: Marks that are metrics of their own: the instrument has their name, and their attributes.
RUN_MARKS = frozenset({
    semconv.TRAIN_TOKENS_PER_SECOND, semconv.TRAIN_SAMPLES_PER_SECOND, semconv.TRAIN_MFU,
    semconv.PROGRESS, semconv.ETA, semconv.RUN_TIME, semconv.MEMORY_ALLOCATED,
    semconv.MEMORY_RESERVED, semconv.MEMORY_PEAK, semconv.PROCESS_MEMORY,
})  # fmt: skip

#: Final values of requests: what they say is in the histograms of requests, and the last one of
#: many requests says nothing.
REQUEST_MARKS = frozenset({
    semconv.TIME_TO_FIRST_TOKEN_MS, semconv.TOKENS_PER_SECOND, semconv.REQUEST_DURATION_MS,
    semconv.INPUT_TOKENS, semconv.OUTPUT_TOKENS, semconv.TOTAL_TOKENS, semconv.OUTPUT_CHUNKS,
    semconv.INTER_TOKEN_MS_P50, semconv.INTER_TOKEN_MS_P95, semconv.INTER_TOKEN_MS_MAX,
})  # fmt: skip

#: Scopes whose lengths are measured as phases.
PHASES = frozenset({
    semconv.DATA_LOAD, semconv.FORWARD, semconv.BACKWARD, semconv.OPTIMIZER_STEP,
    semconv.MICRO_BATCH, semconv.EVALUATION, semconv.EPOCH,
})  # fmt: skip
