"""Tokens and samples per second, and which share of the device's peak that is (MFU).

Counted are the marks ``tokens`` and ``samples`` of training steps: those of
``ci.batches(loader, tokens=...)``, of a framework's hook, or made by hand. A rate is what a set of
steps has counted over the lengths of the same steps, so that no evaluation, checkpoint or resume
gets into one side of it and not into the other, and only this attempt's steps are ever in it.
From rows that were written, on the flush thread; where nothing is counted nothing is decoded.

MFU is the share of a device's peak that the model's own operations make up: tokens per second times
``flops_per_token``, over ``device_peak_flops`` (Chowdhery et al., PaLM, appendix B). More than the
peak cannot be: then one of the three is wrong, and that is a finding, not a point.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from cirron_otel import semconv
from cirron_otel.findings import Finding, report
from cirron_otel.marks import append_point
from cirron_otel.run.throughput_peaks import flops_of_models, peak_of_device

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cirron_otel.batching import Sealed
    from cirron_otel.recorder import Recorder
    from cirron_otel.run.rows import Row

#: Seconds between two rates.
INTERVAL_S: Final = 10.0
#: First steps of an attempt, which compile and warm up: they are counted, but in no rate.
WARMUP: Final = 3
#: Steps whose counts or lengths have not come yet.
_MAX_OPEN = 4096
_COUNTED = (b'"name":"tokens"', b'"name":"samples"')


class _Mark(msgspec.Struct, gc=False):
    name: str
    value: Any = None
    iteration: int | None = None


_marks = msgspec.json.Decoder(list[_Mark])


class Rate(NamedTuple):
    """What some steps have counted, and how long they took together."""

    tokens: float
    samples: float
    seconds: float
    steps: int
    last: int

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of training steps."""
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def samples_per_second(self) -> float:
        """Samples per second of training steps."""
        return self.samples / self.seconds if self.seconds else 0.0


class Counts:
    """Brings together what steps have counted and how long they took. Pure."""

    def __init__(self, first: int = 0) -> None:
        #: The iteration at which this attempt began.
        self._first = first
        #: By iteration: tokens, samples; and the length, ns.
        self._counted: dict[int, list[float]] = {}
        self._lengths: dict[int, int] = {}

    def marks(self, rows: Iterable[_Mark]) -> None:
        """Take in marks."""
        for row in rows:
            if row.iteration is None or row.name not in (semconv.TOKENS, semconv.SAMPLES):
                continue
            value = row.value
            if not isinstance(value, (int, float)) or isinstance(value, bool) or value < 0:
                continue
            counts = self._counted.setdefault(row.iteration, [0.0, 0.0])
            counts[row.name == semconv.SAMPLES] += value
        _bound(self._counted)

    def steps(self, rows: Iterable[Row]) -> None:
        """Take in closed scopes."""
        for row in rows:
            if row.name == semconv.STEP and row.iteration is not None and row.end_ns is not None:
                # The outermost of an iteration comes last: it is the training step.
                self._lengths[row.iteration] = row.end_ns - row.start_ns
        _bound(self._lengths)

    def take(self) -> Rate | None:
        """The steps of which both is known, once each; None where there are none."""
        both = sorted(self._counted.keys() & self._lengths.keys())
        tokens = samples = 0.0
        length = steps = 0
        for iteration in both:
            counts, took = self._counted.pop(iteration), self._lengths.pop(iteration)
            if iteration < self._first + WARMUP:
                continue
            tokens += counts[0]
            samples += counts[1]
            length += took
            steps += 1
        return Rate(tokens, samples, length / 1e9, steps, both[-1]) if steps and length else None


def _bound(known: dict[int, Any]) -> None:
    while len(known) > _MAX_OPEN:
        del known[next(iter(known))]


class Throughput:
    """See the module; a :class:`~cirron_otel.spool_writer.BatchWatcher`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._counts = Counts(rec.settings.start_iteration)
        #: Whether anything is counted: until then nothing is looked at.
        self._is_on = False
        #: Rows of the batch that is being written, or was last.
        self._rows: list[Sequence[Row]] = []
        self._due = time.monotonic() + INTERVAL_S
        self._told: set[str] = set()
        self._flops: float | None = rec.settings.flops_per_token
        self._peak: float | None = rec.settings.device_peak_flops

    def rows(self, rows: Sequence[Row]) -> None:
        """Keep rows until it is known whether anything is counted in their batch."""
        self._rows.append(rows)

    def written(self, batch: Sealed) -> None:
        """Look for counts in a batch, and for steps once there were any."""
        for piece in batch.pieces("marks"):
            text = bytes(piece)
            if any(name in text for name in _COUNTED):
                self._is_on = True
                self._counts.marks(_marks.decode(b"[%b]" % text))
        self._take()

    def _take(self) -> None:
        rows, self._rows = self._rows, []
        if self._is_on:
            for some in rows:
                self._counts.steps(some)

    def flushed(self) -> None:
        """Tell the rate of the steps since last time, once it is time."""
        self._take()
        if not self._is_on:
            return
        now = time.monotonic()
        if now < self._due and not self._rec.out.ending:
            return
        self._due = now + INTERVAL_S
        rate = self._counts.take()
        if rate is not None:
            self._tell(rate)

    def _tell(self, rate: Rate) -> None:
        told: dict[str, float] = {}
        if rate.tokens:
            told[semconv.TRAIN_TOKENS_PER_SECOND] = rate.tokens_per_second
            share = self._share(rate)
            if share is not None:
                told[semconv.TRAIN_MFU] = share
        if rate.samples:
            told[semconv.TRAIN_SAMPLES_PER_SECOND] = rate.samples_per_second
        session = self._rec.session
        if session is None:
            return
        for name, value in told.items():
            append_point(self._rec, session.id, name, value)
        if session.is_open:
            if semconv.TRAIN_TOKENS_PER_SECOND in told:
                told[semconv.DL_TOKENS_PER_SECOND] = told.pop(semconv.TRAIN_TOKENS_PER_SECOND)
            session.attrs = {**session.attrs, **told}

    def _share(self, rate: Rate) -> float | None:
        """The MFU; None where it cannot be known, or is none."""
        if self._flops is None:
            self._flops = flops_of_models()
        if self._peak is None:
            self._peak = peak_of_device()
        if self._flops is None or self._peak is None:
            return None
        share = rate.tokens_per_second * self._flops / self._peak
        if share <= 1:
            return share
        if "mfu" not in self._told:
            self._told.add("mfu")
            report(self._rec, Finding("impossible_mfu", "warning", self._message(rate, share),
                                      step=rate.last))  # fmt: skip
        return None

    def _message(self, rate: Rate, share: float) -> str:
        return (
            f"the model would use {share:.0%} of the device's peak, which cannot be: "
            f"{rate.tokens_per_second:.6g} tokens per second x flops_per_token = {self._flops:.6g} "
            f"is more than device_peak_flops = {self._peak:.6g}; count the tokens of this rank "
            "only, and check both numbers (the peak is that of one device, dense, for the type "
            "that is computed in)"
        )


def watch(rec: Recorder) -> None:
    """Tell rates, where this process records itself."""
    if rec.run is not None:
        throughput = Throughput(rec)
        rec.run.feed.consumers.append(throughput.rows)
        rec.out.watchers.append(throughput)
