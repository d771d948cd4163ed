"""What a report knows of a run: everything bounded, whatever the length of the record."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cirron_otel.training_record.report.lines import Reading
from cirron_otel.training_record.report.thinning import Band, Columns, Kept, Marks, Peaks

#: Order of the counts in a metrics row, and in :attr:`Layer.stuck_now`.
STUCK_KINDS = ("certified", "constant", "silent", "decayed")
CERTIFIED, CONSTANT, SILENT, DECAYED = range(4)


#: Event type to lane, in the order of the lanes from the top.
LANES = {
    "nonfinite_loss": "nonfinite",
    "nonfinite_gradient": "nonfinite",
    "loss_spike": "spike",
    "alarm": "alarm",
    "channels": "channels",
    "certificate": "certificate",
    "repair": "repair",
    "alarm_cleared": "cleared",
    "channels_cleared": "cleared",
    "loss_recovered": "cleared",
}


@dataclass(slots=True)
class Event:
    """One event of the diary, its long lists cut; several alike in a row are one with a count."""

    seq: int | None
    time: float | None
    step: int | None
    name: str
    severity: str
    layer: str | None
    fields: dict[str, object]
    count: int = 1
    last_step: int | None = None


@dataclass(slots=True)
class Episode:
    """Something that began and, perhaps, ended. ``end`` None: it lasted to the end of the record.

    ``kind`` is ``no_gradient``, ``vanishing``, ``exploding``, ``stuck``, ``loss_spike`` or
    ``nonfinite``; ``layer`` None where the whole run is meant.
    """

    kind: str
    layer: str | None
    start: int
    end: int | None = None
    #: ``cleared``, ``repaired``, or ``open``.
    outcome: str = "open"
    detail: str = ""


@dataclass(slots=True)
class Spike:
    """A loss spike, and the earliest sign of trouble since the loss was last well."""

    step: int
    value: float | None
    baseline: float | None
    recovered: int | None = None
    sign_step: int | None = None
    sign: str | None = None


@dataclass(slots=True)
class Finding:
    """What a check found that is no event type of the format; alike ones are one with a count."""

    kind: str
    severity: str
    layer: str | None
    message: str
    first: int
    last: int
    count: int = 1


@dataclass(slots=True)
class Layer:
    """One watched module. Counts of channels are None where its channels were never scanned."""

    name: str
    kind: str | None = None
    batchnorm: str | None = None
    channels: int | None = None
    certifiable: bool | None = None
    reason: str | None = None
    gradient: Band = field(default_factory=Band)
    #: One series per :data:`STUCK_KINDS`; None as long as every count was zero.
    stuck: Peaks | None = None
    scanned: bool = False
    last_gradient: float | None = None
    nonfinite_gradients: int = 0
    alarms: int = 0
    open_alarm: str | None = None
    diagnoses: list[str] = field(default_factory=list)
    certified: int = 0
    refused: list[str] = field(default_factory=list)
    repairs: int = 0
    channels_repaired: int = 0
    #: Stuck (certified, constant or decayed) channels at the first check: starting weights.
    inherited: int = 0
    stuck_now: list[int] | None = None
    peak_stuck: int = 0
    peak_proven: int = 0
    peak_silent: int = 0

    @property
    def stuck_at_end(self) -> int | None:
        """Certified, constant and decayed channels at the last check."""
        return None if self.stuck_now is None else stuck_count(self.stuck_now)

    @property
    def proven_at_end(self) -> int | None:
        """Certified channels at the last check."""
        return None if self.stuck_now is None else self.stuck_now[CERTIFIED]

    @property
    def silent_at_end(self) -> int | None:
        """Silent channels at the last check."""
        return None if self.stuck_now is None else self.stuck_now[SILENT]

    @property
    def has_findings(self) -> bool:
        """Whether anything at all was found in it."""
        return bool(
            self.alarms
            or self.nonfinite_gradients
            or self.peak_stuck
            or self.peak_silent
            or self.repairs
            or self.certified
        )


def stuck_count(row: list[int]) -> int:
    """Channels that are stuck: certified, constant, decayed. Silent ones may wake by themselves."""
    return row[CERTIFIED] + row[CONSTANT] + row[DECAYED]


@dataclass(slots=True)
class Loss:
    """The loss over the run."""

    band: Band = field(default_factory=Band)
    first: float | None = None
    last: float | None = None
    best: float | None = None
    best_step: int | None = None
    #: The last finite values, at most :data:`RECENT`.
    recent: list[float] = field(default_factory=list)
    #: Checks at which there was none, and at which it was no finite number.
    missing: int = 0
    nonfinite: int = 0
    first_nonfinite: int | None = None
    #: Whether the last loss that was given was no finite number.
    ended_nonfinite: bool = False

    @property
    def final(self) -> float | None:
        """The mean of the last values: a single batch says little. None if it ended not finite."""
        if self.ended_nonfinite or not self.recent:
            return None
        return math.fsum(value / len(self.recent) for value in self.recent)


#: So many checks make the final loss.
RECENT = 10


@dataclass(slots=True)
class Clock:
    """Wall-clock time at some steps, to say how long something took. Unix seconds."""

    steps: list[int] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, step: int, time: float) -> None:
        """Note when a step was; what runs backwards is passed over."""
        if self.steps and (step <= self.steps[-1] or time < self.times[-1]):
            return
        self.steps.append(step)
        self.times.append(time)
        if len(self.steps) > 4096:  # noqa: PLR2004 - a bound
            self.steps = self.steps[::2]
            self.times = self.times[::2]

    def at(self, step: int) -> float | None:
        """The time of a step, between known ones in proportion; None outside them."""
        if not self.steps or not self.steps[0] <= step <= self.steps[-1]:
            return None
        right = bisect_left(self.steps, step)
        if self.steps[right] == step:
            return self.times[right]
        before, after = self.steps[right - 1], self.steps[right]
        share = (step - before) / (after - before)
        return self.times[right - 1] + share * (self.times[right] - self.times[right - 1])

    def between(self, start: int, end: int) -> float | None:
        """Seconds from one step to another."""
        a, b = self.at(start), self.at(end)
        return None if a is None or b is None else b - a


@dataclass(slots=True)
class Run:
    """A record, gathered once. Made by :func:`~cirron_otel.training_record.report.gather.load`."""

    path: Path
    diary: Path
    #: None: only a diary was given.
    directory: Path | None
    diary_reading: Reading = field(default_factory=Reading)
    #: None: there is no metrics file, or it cannot be read (:attr:`notes` says why).
    metrics_reading: Reading | None = None
    start: dict[str, object] = field(default_factory=dict)
    structure: dict[str, object] = field(default_factory=dict)
    manifest: dict[str, object] = field(default_factory=dict)
    end: dict[str, object] | None = None
    events: Kept[Event] = field(default_factory=lambda: Kept(2000))
    minor_events: Kept[Event] = field(default_factory=lambda: Kept(400))
    counts: Counter[str] = field(default_factory=Counter)
    critical_events: int = 0
    #: Where events happened, by the lane of the chart (:data:`LANES`).
    marks: dict[str, Marks] = field(default_factory=dict)
    episodes: Kept[Episode] = field(default_factory=lambda: Kept(2000))
    spikes: Kept[Spike] = field(default_factory=lambda: Kept(200))
    findings: list[Finding] = field(default_factory=list)
    columns: Columns = field(default_factory=lambda: Columns(400))
    loss: Loss = field(default_factory=Loss)
    layers: dict[str, Layer] = field(default_factory=dict)
    clock: Clock = field(default_factory=Clock)
    checks: int = 0
    first_step: int | None = None
    last_step: int | None = None
    first_time: float | None = None
    last_time: float | None = None
    #: Checks at which at least one layer had more stuck channels than it began with, in steps.
    steps_stuck: int = 0
    seconds_stuck: float | None = None
    #: What the verifier says, in the form of ``Verdict.to_dict()``.
    verdict: dict[str, object] = field(default_factory=dict)
    #: What could not be read, in words.
    notes: list[str] = field(default_factory=list)

    def saw(self, step: int) -> None:
        """Note that something happened at a step."""
        self.first_step = step if self.first_step is None else min(self.first_step, step)
        self.last_step = step if self.last_step is None else max(self.last_step, step)

    @property
    def name(self) -> str:
        """The run's name, else its directory's."""
        name = self.start.get("name")
        if isinstance(name, str) and name.strip():
            return name if len(name) <= 200 else name[:199] + "…"  # noqa: PLR2004
        return (self.directory or self.diary).resolve().name

    @property
    def steps(self) -> int | None:
        """Optimizer steps: what ``run_end`` says, else up to the last one that was seen."""
        said = self.end.get("steps") if self.end else None
        if isinstance(said, int) and not isinstance(said, bool) and 0 <= said <= 2**53:
            return said
        return None if self.last_step is None else self.last_step + 1

    @property
    def seconds(self) -> float | None:
        """Wall-clock length from the first event to the last."""
        if self.first_time is None or self.last_time is None:
            return None
        return max(self.last_time - self.first_time, 0.0)

    @property
    def error(self) -> str | None:
        """How the run failed, where its writer said so."""
        error = self.end.get("error") if self.end else None
        return error if isinstance(error, str) else None

    @property
    def interrupted(self) -> bool:
        """The record was closed for a run that did not come to its own end."""
        return bool(self.end and self.end.get("interrupted") is True)

    @property
    def finished(self) -> bool:
        """The run ended by itself and said so."""
        return self.end is not None and not self.interrupted and self.error is None
