"""Which rank is slow, and in what: told from the steps of all ranks, side by side.

The culprit of a step is the rank whose local time (see :mod:`cirron_otel.run.straggler_times`) is
the longest. One such step says little; over a window of steps it is a rank whose excess, against
the median of the other ranks, is large in the median and has the same sign nearly always. Its
phase is the one whose own excess is the largest. Pure: no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from cirron_otel import semconv
from cirron_otel.reading.values import duration
from cirron_otel.run.straggler_times import PHASES, StepTimes

#: Steps that are looked at together, and the fewest that say anything.
WINDOW = 50
FEWEST = 30
#: First steps of an attempt, in which ranks load, compile and settle at their own pace.
WARMUP = 5
#: A straggler: its excess in the median, as a share of the length of a step, and the share of steps
#: in which it had any. Less is enough where it is nearly always: of ranks that are alike none is
#: slower in more than two thirds of the steps, or by more than a fortieth of a step.
LEAST_EXCESS, LEAST_SHARE = 0.1, 0.8
STEADY_EXCESS, STEADY_SHARE = 0.05, 0.85

#: The steps of each rank by iteration.
Ranks = Mapping[int, Mapping[int, StepTimes]]


class Straggler(NamedTuple):
    """A rank that keeps the others waiting. Lengths in ns, medians over the steps looked at."""

    rank: int
    phase: str
    #: How much longer than the others its local time is, and a step as a whole.
    excess: float
    step: float
    #: In how many of so many steps it was slower than the others, and the last of these.
    slow_steps: int
    steps: int
    last: int

    @property
    def share(self) -> float:
        """The excess as a share of a step."""
        return self.excess / self.step if self.step else 0.0


class Summary(NamedTuple):
    """One rank over the steps looked at: medians in ns."""

    rank: int
    steps: int
    step: float
    phases: tuple[float, ...]
    wait: float
    local: float


def common(ranks: Ranks, *, first: int | None = None, window: int = WINDOW) -> list[int]:
    """The newest iterations that every rank has, oldest first, without the first ones of all.

    ``first`` is the iteration at which the attempt began, where it is not the least there is.
    """
    if not ranks:
        return []
    sets = [steps.keys() for steps in ranks.values()]
    shared = set(sets[0]).intersection(*sets[1:])
    if first is None:
        first = min((min(steps, default=0) for steps in ranks.values()), default=0)
    settled = sorted(number for number in shared if number >= first + WARMUP)
    return settled[-window:]  # all of them for 0


def summaries(ranks: Ranks, iterations: Sequence[int]) -> list[Summary]:
    """Each rank over these iterations, which all have."""
    found = []
    for rank in sorted(ranks):
        steps = [ranks[rank][number] for number in iterations]
        if steps:
            phases = tuple(median(step.phases[i] for step in steps) for i in range(len(PHASES)))
            found.append(
                Summary(
                    rank,
                    len(steps),
                    median(step.total for step in steps),
                    phases,
                    median(step.wait for step in steps),
                    median(step.local for step in steps),
                )
            )
    return found


def find(ranks: Ranks, iterations: Sequence[int]) -> list[Straggler]:
    """The ranks that keep the others waiting, the slowest first; none where too little is known."""
    if len(ranks) < 2 or len(iterations) < FEWEST:  # noqa: PLR2004 - it takes two to compare
        return []
    step = median(steps[number].total for steps in ranks.values() for number in iterations)
    if step <= 0:
        return []
    found = []
    for rank, own in ranks.items():
        others = [steps for other, steps in ranks.items() if other != rank]
        excesses = [
            own[number].local - median(steps[number].local for steps in others)
            for number in iterations
        ]
        excess = median(excesses)
        slow = sum(one > 0 for one in excesses)
        much, often = excess / step, slow / len(iterations)
        if (much >= LEAST_EXCESS and often >= LEAST_SHARE) or (
            much >= STEADY_EXCESS and often >= STEADY_SHARE
        ):
            phase = _slow_phase(own, others, iterations)
            found.append(
                Straggler(rank, phase, excess, step, slow, len(iterations), iterations[-1])
            )
    return sorted(found, key=lambda one: -one.excess)


def _slow_phase(
    own: Mapping[int, StepTimes],
    others: Sequence[Mapping[int, StepTimes]],
    iterations: Sequence[int],
) -> str:
    excesses = [
        median(
            own[number].phases[i] - median(steps[number].phases[i] for steps in others)
            for number in iterations
        )
        for i in range(len(PHASES))
    ]
    return PHASES[excesses.index(max(excesses))]


#: A phase as a person reads it.
_WORDS = {
    "data": "in data loading",
    "forward": "in its forward",
    "backward": "in its backward",
    "optimizer": "in its optimizer step",
    "other": "outside of data loading, forward, backward and optimizer step",
}


def message(found: Straggler, host: str = "") -> str:
    """The straggler in a sentence that stands by itself."""
    where = f" (host {host})" if host else ""
    return (
        f"rank {found.rank}{where} is slow {_WORDS[found.phase]}: it takes "
        f"{duration(found.excess)} longer than the other ranks, {found.share:.0%} of a step of "
        f"{duration(found.step)}, and they wait for it "
        f"({found.slow_steps} of the last {found.steps} steps looked at)"
    )


def attributes(found: Straggler, host: str = "") -> dict[str, Any]:
    """The straggler as attributes of a finding; lengths in s."""
    told: dict[str, Any] = {
        semconv.STRAGGLER_RANK: found.rank,
        semconv.STRAGGLER_PHASE: found.phase,
        semconv.STRAGGLER_EXCESS: round(found.excess / 1e9, 6),
        semconv.STRAGGLER_STEP: round(found.step / 1e9, 6),
        semconv.STRAGGLER_SLOW_STEPS: found.slow_steps,
        semconv.STRAGGLER_STEPS: found.steps,
    }
    if host:
        told[semconv.STRAGGLER_HOST] = host
    return told
