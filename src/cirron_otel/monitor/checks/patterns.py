"""Patterns over several checks that no single alarm of the record is about: gradients by layer.

A baseline of the record stands still while something is unusual, takes in zeros while it warms up,
and asks for the same trouble at checks on end. So three kinds of trouble would go untold.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator

from cirron_otel.findings import Finding
from cirron_otel.monitor.checks.gradients import Gradients
from cirron_otel.monitor.config import MonitorConfig
from cirron_otel.monitor.observing import Observation

#: Checks that a layer's usual gradient is the median of, and of which so many may be extreme.
_RECENT, _MAX_EXTREME = 10, 3
#: Checks until an alarm that stays open is about a new level, and the powers of ten it may vary by.
_SETTLED, _SPREAD = 20, 0.5


class _Past:
    """The last norms of one layer, as powers of ten."""

    __slots__ = ("extreme", "in_alarm", "recent", "settled", "unsteady", "zeros")

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=_RECENT)
        self.extreme: deque[bool] = deque(maxlen=_RECENT)
        self.zeros = 0
        self.in_alarm = 0
        self.settled = self.unsteady = False


class Patterns:
    """What is remembered of each layer's gradient."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._past: dict[str, _Past] = {}

    def look(self, seen: Observation, gradients: Gradients) -> Iterator[Finding]:
        """The findings of one check."""
        some_learn = any(norm > 0 for norm in seen.grad.values())
        for layer, norm in seen.grad.items():
            past = self._past.get(layer)
            if past is None:
                past = self._past[layer] = _Past()
            alarm = gradients.alarms.get(layer)
            past.zeros = past.zeros + 1 if norm == 0 and some_learn else 0
            if past.zeros == 2 * self._config.patience and alarm is None:
                yield Finding(
                    "zero_gradient", "warning",
                    f"the gradient of layer {layer!r} has been exactly zero at {past.zeros} checks "
                    "on end, from before there was a baseline",
                    layer, seen.step,
                )  # fmt: skip
            if norm > 0 and math.isfinite(norm):
                yield from self._take(seen.step, layer, past, math.log10(norm), alarm)

    def _take(
        self, step: int, layer: str, past: _Past, level: float, alarm: str | None
    ) -> Iterator[Finding]:
        usual = statistics.median(past.recent) if len(past.recent) == _RECENT else None
        far = max(self._config.alarm_min_decades, 1.0)
        is_extreme = usual is not None and abs(level - usual) > far
        past.recent.append(level)
        past.extreme.append(is_extreme and alarm is None)
        if alarm is None:
            past.in_alarm, past.settled = 0, False
            if sum(past.extreme) < _MAX_EXTREME:
                past.unsteady = False
            elif not past.unsteady and usual is not None:
                past.unsteady = True
                yield Finding(
                    "unsteady_gradient", "warning",
                    f"the gradient of layer {layer!r} was far from its usual {10**usual:.3g} at "
                    f"{sum(past.extreme)} of the last {_RECENT} checks, now {10**level:.3g}",
                    layer, step, {"usual": 10**usual, "grad_norm": 10**level},
                )  # fmt: skip
            return
        past.in_alarm += 1
        if past.in_alarm < _SETTLED or past.settled:
            return
        if max(past.recent) - min(past.recent) <= _SPREAD:
            past.settled = True
            yield Finding(
                "gradient_settled", "info",
                f"the gradient of layer {layer!r} has settled at {10**level:.3g}: the alarm is "
                "about a level that stays",
                layer, step, {"grad_norm": 10**level, "diagnosis": alarm},
            )  # fmt: skip
