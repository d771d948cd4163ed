"""How far a training is, and when it will be done: from its iterations and what it plans. Pure."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from cirron_otel.run.closing import clock

#: The rate is that of this much time, evaluations and checkpoints included.
WINDOW_S = 120.0
#: Measurements nearer to each other than this say nothing new.
_APART_S = 0.5
_FEWEST_STEPS = 3


class Plan(NamedTuple):
    """What is known of the work: ``epoch`` and ``step`` count from 0, lengths may be unknown.

    ``total`` is the number of steps of the whole training, where a framework says so.
    """

    epoch: int
    step: int
    epochs: int | None = None
    steps: int | None = None
    total: int | None = None
    #: Steps of the whole training that are done, where ``total`` is known.
    done: int = 0

    def fraction(self) -> float | None:
        """How much is done, from 0 to 1; None where nobody said how much there is."""
        if self.total:
            return min(1.0, max(0.0, self.done / self.total))
        if self.epochs and self.steps:
            return min(1.0, max(0.0, (self.epoch + min(1.0, self.step / self.steps)) / self.epochs))
        return None

    def left(self) -> int | None:
        """The steps that are still to come; None where that is not known."""
        if self.total:
            return max(0, self.total - self.done)
        if self.epochs and self.steps:
            return max(0, self.epochs * self.steps - self.epoch * self.steps - self.step)
        return None


class Progress:
    """Steps a second of this attempt alone, and what follows from it. One thread."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque(maxlen=int(WINDOW_S / _APART_S))
        self.plan: Plan | None = None

    def note(self, now_s: float, iteration: int) -> None:
        """The number of steps begun, at a moment (monotonic, s)."""
        seen = self._seen
        if not seen or now_s - seen[-1][0] >= _APART_S:
            seen.append((now_s, iteration))
        while len(seen) > 2 and now_s - seen[0][0] > WINDOW_S:  # noqa: PLR2004 - it takes two
            seen.popleft()

    def rate(self) -> float | None:
        """Steps a second, lately; None while too few were made."""
        if len(self._seen) < 2:  # noqa: PLR2004 - as above
            return None
        (begun, first), (ended, last) = self._seen[0], self._seen[-1]
        if last - first < _FEWEST_STEPS or ended <= begun:
            return None
        return (last - first) / (ended - begun)

    def eta(self) -> float | None:
        """Seconds to the end; None where the plan or the rate is not known."""
        left = None if self.plan is None else self.plan.left()
        rate = self.rate()
        return None if left is None or not rate else left / rate

    def line(self) -> str:
        """One line for a terminal; empty while there is nothing to say."""
        plan = self.plan
        if plan is None:
            return ""
        words = [f"epoch {plan.epoch + 1}" + (f"/{plan.epochs}" if plan.epochs else "")]
        words.append(f"step {plan.step}" + (f"/{plan.steps}" if plan.steps else ""))
        fraction, rate, eta = plan.fraction(), self.rate(), self.eta()
        if fraction is not None:
            words.append(f"{fraction:.0%}")
        if rate is not None:
            words.append(f"{rate:.3g} steps/s")
        if eta is not None:
            words.append(f"{clock(eta)} left")
        return "  ".join(words)
