"""What the rules of the record do not see: single layers, episodes, trends.

A finding that fits an event of the record becomes one, with ``rule`` naming why it is there; any
other goes into the metrics row of its check.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

from cirron_otel.findings import Finding
from cirron_otel.monitor.checks.gradients import Gradients
from cirron_otel.monitor.config import MonitorConfig
from cirron_otel.monitor.observing import Observation

Event = tuple[str, dict[str, Any]]
#: Weight of a new value in the trend of the loss.
_TREND_RATE = 0.1
_NOW_RATE = 0.5
#: Checks without a new best trend until a loss counts as not improving, and what is an improvement.
_PLATEAU_CHECKS = 60
_IMPROVEMENT = 0.005


class _Gone(NamedTuple):
    """A layer whose gradient is away: for how many checks, and whether that was told."""

    checks: int
    told: bool


class Beyond:
    """What is remembered between two checks. ``layers`` are the watched ones, in order."""

    def __init__(self, config: MonitorConfig, layers: Collection[str]) -> None:
        self._config = config
        self._layers = layers
        self._events: list[Event] = []
        self._last_norm: dict[str, float] = {}
        self._gone: dict[str, _Gone] = {}
        self._checks = 0
        self._never_told = False
        self._bad_loss = 0
        self._bad_layers: set[str] = set()
        self._bad_checks = 0
        self._skipped = 0
        self._trend = _Trend(config)

    def look(self, seen: Observation, gradients: Gradients) -> Iterator[Finding]:
        """The findings of one check that are no events; :meth:`take_events` has those that are."""
        self._checks += 1
        if seen.grad:
            self._lost_gradients(seen, gradients)
            yield from self._never_learned(seen)
        yield from self._nonfinite_loss(seen)
        if gradients.scaler_is_on:
            yield from self._skips(seen)
        else:
            yield from self._nonfinite_gradients(seen)
        if seen.loss is not None and math.isfinite(seen.loss):
            yield from self._trend.take(seen.step, seen.loss)

    def take_events(self) -> list[Event]:
        """Events found by the last :meth:`look`, once."""
        events, self._events = self._events, []
        return events

    # --- single layers ----------------------------------------------------------------------------

    def _lost_gradients(self, seen: Observation, gradients: Gradients) -> None:
        for layer in seen.without_gradient:
            if layer not in self._last_norm:
                continue
            checks, told = self._gone.get(layer, _Gone(0, told=False))
            checks += 1
            if checks >= self._config.alarm_confirmations and not told:
                told = True
                self._events.append(self._lost(seen.step, layer, gradients))
            self._gone[layer] = _Gone(checks, told)
        for layer, norm in seen.grad.items():
            gone = self._gone.pop(layer, None)
            if gone is not None and gone.told:
                self._events.append((
                    "alarm_cleared",
                    {
                        "step": seen.step, "layer": layer, "diagnosis": "no_gradient",
                        "grad_norm": norm, "baseline": self._last_norm[layer],
                        "rule": "gradient_lost",
                    },
                ))  # fmt: skip
            if math.isfinite(norm) and norm > 0:
                self._last_norm[layer] = norm

    def _lost(self, step: int, layer: str, gradients: Gradients) -> Event:
        return (
            "alarm",
            {
                "step": step, "severity": "warning", "layer": layer,
                "kind": gradients.kind_of(layer), "diagnosis": "no_gradient", "grad_norm": 0.0,
                "baseline": self._last_norm[layer], "sigma": self._config.sigma,
                "rule": "gradient_lost",
            },
        )  # fmt: skip

    def _never_learned(self, seen: Observation) -> Iterator[Finding]:
        if self._never_told or self._checks < self._config.patience:
            return
        self._never_told = True
        never = [name for name in seen.without_gradient if name not in self._last_norm]
        for name in never[: self._config.layer_list_limit]:
            yield Finding(
                "never_trained", "warning",
                f"layer {name!r} learns, but has had no gradient at {self._checks} checks: the "
                "loss does not depend on it",
                name, seen.step,
            )  # fmt: skip

    # --- episodes ---------------------------------------------------------------------------------

    def _nonfinite_loss(self, seen: Observation) -> Iterator[Finding]:
        if seen.loss is None:
            return
        if not math.isfinite(seen.loss):
            self._bad_loss += 1
        elif self._bad_loss:
            yield Finding(
                "finite_loss", "info",
                f"the loss is finite again after {_checks(self._bad_loss)}",
                None, seen.step, {"checks": self._bad_loss},
            )  # fmt: skip
            self._bad_loss = 0

    def _nonfinite_gradients(self, seen: Observation) -> Iterator[Finding]:
        if not seen.grad:
            return
        bad = {name for name, norm in seen.grad.items() if not math.isfinite(norm)}
        joined = bad - self._bad_layers
        if self._bad_layers and joined:
            names = [name for name in self._layers if name in joined]
            shown = names[: self._config.layer_list_limit]
            yield Finding(
                "nonfinite_gradient_spreads", "critical",
                f"the gradients of {len(names)} more layers are not finite: "
                f"{', '.join(map(repr, names[:4]))}",
                names[-1], seen.step, {"layers": shown},
            )  # fmt: skip
        if bad:
            self._bad_layers |= bad
            self._bad_checks += 1
        elif self._bad_layers:
            yield Finding(
                "finite_gradients", "info",
                f"all gradients are finite again after {_checks(self._bad_checks)}",
                None, seen.step, {"checks": self._bad_checks},
            )  # fmt: skip
            self._bad_layers, self._bad_checks = set(), 0

    def _skips(self, seen: Observation) -> Iterator[Finding]:
        bad = [name for name, norm in seen.grad.items() if not math.isfinite(norm)]
        self._skipped = self._skipped + 1 if bad else 0
        if self._skipped == self._config.patience:
            yield Finding(
                "steps_skipped_for_good", "critical",
                f"the gradient scaler has skipped the step at {self._skipped} checks on end (scale "
                f"{seen.scale:g}): the gradients stay non-finite, nothing is learned",
                bad[-1], seen.step,
                {"scale": seen.scale, "layers": bad[: self._config.layer_list_limit]},
            )  # fmt: skip


class _Trend:
    """The loss averaged over the last checks: does it fall, stand, or rise?"""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._mean = 0.0
        #: The same with a short memory: a loss that has come down again does not diverge.
        self._now = 0.0
        self._count = 0
        self._best = math.inf
        self._since_best = 0
        self._above = 0
        self._told: str | None = None

    def take(self, step: int, loss: float) -> Iterator[Finding]:
        """Take in a finite loss; say what has become of it, once an episode."""
        self._count += 1
        rate = max(_TREND_RATE, 1 / self._count)
        self._mean += rate * (loss - self._mean)
        self._now += max(_NOW_RATE, rate) * (loss - self._now)
        mean, config = self._mean, self._config
        if mean < self._best - _IMPROVEMENT * abs(self._best) or math.isinf(self._best):
            self._best, self._since_best, self._above, self._told = mean, 0, 0, None
            return
        self._since_best += 1
        is_above = min(mean, self._now) > config.loss_spike_factor * self._best > 0
        self._above = self._above + 1 if is_above else 0
        if self._above >= 2 * config.patience and self._count > config.warmup:
            if self._told != "loss_diverging":
                self._told = "loss_diverging"
                yield Finding(
                    "loss_diverging", "warning",
                    f"the loss has risen to {mean:.4g} on average, from {self._best:.4g} at best",
                    None, step, {"mean": mean, "best": self._best},
                )  # fmt: skip
        elif self._since_best == _PLATEAU_CHECKS and self._told is None:
            self._told = "loss_plateau"
            yield Finding(
                "loss_plateau", "info",
                f"the loss has not improved on {self._best:.4g} for {_PLATEAU_CHECKS} checks",
                None, step, {"mean": mean, "best": self._best},
            )  # fmt: skip


def _checks(count: int) -> str:
    return "one check" if count == 1 else f"{count} checks"
