"""The rules by which a monitor decides on gradient, loss and non-finite events, from numbers alone.

What a monitor writes and what a verifier recomputes come from the same arithmetic, step by step, so
that on the same platform the numbers are equal to the last bit.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import NamedTuple, cast

from cirron_otel.training_record.compiled import compiled

#: A decision nearer to its threshold than this, relative to the numbers compared, may fall either
#: way on another machine.
NEAR = 1e-9
#: The same for decades, which are of the order of ten.
_NEAR_SIZE = 10 * NEAR


class Rules(NamedTuple):
    """The part of ``run_start.config`` that the decisions depend on."""

    sigma: float
    warmup: int
    rate_floor: float
    min_decades: float
    confirmations: int
    spike_factor: float
    layer_limit: int

    @classmethod
    def of(cls, config: object) -> Rules:
        """Read ``run_start.config``. Raises ``ValueError`` naming what is missing or no number."""
        if not isinstance(config, Mapping):
            raise ValueError("run_start has no config")  # noqa: TRY004 - the record is wrong

        def read(name: str) -> float:
            value = number(config.get(name))
            if value is None or math.isnan(value):
                raise ValueError(f"run_start.config.{name} is no number")
            return value

        def whole(name: str) -> int:
            value = read(name)
            if not value.is_integer():
                raise ValueError(f"run_start.config.{name} is no whole number")
            return int(value)

        floor = read("baseline_rate_floor")
        if not 0 <= floor <= 1:
            raise ValueError("run_start.config.baseline_rate_floor is not between 0 and 1")
        return cls(
            read("sigma"),
            whole("warmup"),
            floor,
            read("alarm_min_decades"),
            whole("alarm_confirmations"),
            read("loss_spike_factor"),
            whole("layer_list_limit"),
        )


_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def number(value: object) -> float | None:
    """A number of a record as a float, however it was read; None for what is no number."""
    kind = value.__class__
    if kind is float:
        return value  # type: ignore[return-value]
    if value is None or kind is bool:
        return None
    if kind is str:
        return _SPECIAL.get(value)  # type: ignore[call-overload, no-any-return]
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None


class Expected(NamedTuple):
    """An event the numbers call for. ``near``: a decision before it was nearly the other one."""

    step: int
    event: str
    #: Fields that must be equal, and fields that are floats.
    exact: tuple[tuple[str, object], ...]
    floats: tuple[tuple[str, float], ...]
    near: bool


class _Baseline:
    """A running mean and variance: plain averages first, exponential ones later."""

    __slots__ = ("count", "mean", "near", "variance")

    def __init__(self) -> None:
        self.mean = 0.0
        self.variance = 0.0
        self.count = 0
        self.near = False

    def update(self, value: float, floor: float) -> None:
        rate = max(floor, 1 / (self.count + 1))
        distance = value - self.mean
        self.mean += rate * distance
        self.variance = (1 - rate) * (self.variance + rate * distance * distance)
        self.count += 1

    def above(self, value: float, threshold: float) -> bool:
        """``value > threshold``, remembering when that was decided by a hair."""
        if abs(value - threshold) <= NEAR * max(abs(value), abs(threshold)):
            self.near = True
        return value > threshold


class _Layer(_Baseline):
    __slots__ = ("alarm", "pending", "repeats")

    def __init__(self) -> None:
        super().__init__()
        self.alarm: str | None = None
        self.pending: str | None = None
        self.repeats = 0


class Layers:
    """The gradient norms of all layers: baselines, alarms and their ends, as in ``_record.c``."""

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self._layers: dict[str, _Layer] = {}

    def near(self, layer: str) -> bool:
        """Whether a decision about this layer was nearly the other one."""
        found = self._layers.get(layer)
        return found is not None and found.near

    def check(self, step: int, grad: Mapping[str, float], found: list[Expected]) -> None:
        """Look at the norms of one check, which are finite numbers.

        This runs for every layer of every row that is verified: what is nothing to write about is
        seen to here, without a call.
        """
        sigma, warmup, floor, min_decades, *_ = self._rules
        layers, log10, sqrt, watched = self._layers, math.log10, math.sqrt, 2 * _NEAR_SIZE
        for name, norm in grad.items():
            layer = layers.get(name)
            if layer is None:
                layer = layers[name] = _Layer()
            size = log10(norm + 1e-30)
            count, mean, variance = layer.count, layer.mean, layer.variance
            if count >= warmup:
                margin = sigma * (sqrt(variance) + 1e-6)
                # Not max(), for the same reason.
                if margin < min_decades:  # noqa: PLR1730
                    margin = min_decades
                if (
                    norm == 0
                    # Beyond a limit, or nearer to one than that.
                    or not mean - margin + watched < size < mean + margin - watched
                ):
                    condition = self._condition(layer, norm, size, margin)
                    if condition is not None:
                        self._found(step, name, norm, layer, condition, found)
                        continue
                if layer.repeats:
                    layer.pending = None
                    layer.repeats = 0
                if layer.alarm is not None:
                    exact = (("layer", name), ("diagnosis", layer.alarm))
                    floats = (("grad_norm", norm), ("baseline", _power(mean)))
                    found.append(Expected(step, "alarm_cleared", exact, floats, layer.near))
                    layer.alarm = None
            # As in update().
            rate = 1 / (count + 1)
            if rate < floor:  # noqa: PLR1730
                rate = floor
            distance = size - mean
            layer.mean = mean + rate * distance
            layer.variance = (1 - rate) * (variance + rate * distance * distance)
            layer.count = count + 1

    def _found(  # noqa: PLR0913, PLR0917 - what was found, and where
        self, step: int, name: str, norm: float, layer: _Layer, condition: str,
        found: list[Expected],
    ) -> None:  # fmt: skip
        layer.repeats = layer.repeats + 1 if condition == layer.pending else 1
        layer.pending = condition
        if layer.repeats >= self._rules.confirmations and layer.alarm != condition:
            layer.alarm = condition
            exact = (("layer", name), ("diagnosis", condition))
            floats = (
                ("grad_norm", norm), ("baseline", _power(layer.mean)), ("sigma", self._rules.sigma)
            )  # fmt: skip
            found.append(Expected(step, "alarm", exact, floats, layer.near))

    def _condition(self, layer: _Layer, norm: float, size: float, margin: float) -> str | None:
        mean = layer.mean
        low, high = mean - margin, mean + margin
        # As in above(), for both sides at once; ``size`` lies between -30 and 309.
        if abs(size - low) <= _NEAR_SIZE or abs(size - high) <= _NEAR_SIZE:
            layer.near = True
        if norm == 0:
            if abs(mean + 29.0) <= _NEAR_SIZE:
                layer.near = True
            if mean > -29.0:  # noqa: PLR2004 - above what a zero counts as, by a decade
                return "no_gradient"
        if size < low:
            return "vanishing"
        return "exploding" if size > high else None


def _power(decades: float) -> float:
    """Ten to that power; infinite where a float cannot be that large."""
    try:
        return math.pow(10.0, decades)
    except OverflowError:
        return math.inf


def _layers(rules: Rules) -> Layers:
    """The compiled layers where they were built."""
    if compiled is not None:
        with contextlib.suppress(OverflowError):  # counts beyond 64 bits
            made = compiled.Layers(
                Expected, rules.sigma, rules.warmup, rules.rate_floor, rules.min_decades,
                rules.confirmations, _NEAR_SIZE,
            )  # fmt: skip
            return cast("Layers", made)
    return Layers(rules)


class Decisions:
    """Everything the rules remember between two checks.

    ``scaler`` says whether a gradient scaler is on: non-finite gradients then skip the step.
    """

    def __init__(self, rules: Rules) -> None:
        self._rules = rules
        self.scaler = False
        self._loss = _Baseline()
        self._loss_nonfinite = False
        self._spiking = False
        self._gradient_nonfinite = False
        self._without_gradients = False
        self._layers = _layers(rules)

    def check(self, step: int, loss: float | None, grad: Mapping[str, float]) -> list[Expected]:
        """The events of one check, in the order in which a monitor writes them."""
        bad: list[str] = []
        if not all(map(math.isfinite, grad.values())):
            bad = [name for name, norm in grad.items() if not math.isfinite(norm)]
        skipped = bool(bad) and self.scaler
        found: list[Expected] = []
        if loss is not None and not (skipped and math.isfinite(loss)):
            self._check_loss(step, loss, found)
        if not grad and not self._without_gradients:
            found.append(Expected(step, "no_gradients", (), (), near=False))
            self._without_gradients = True
        if skipped:
            found.append(self._nonfinite(step, "skipped_step", bad))
            return found
        if bad and not self._gradient_nonfinite:
            found.append(self._nonfinite(step, "nonfinite_gradient", bad))
        if grad:  # a check without gradients says nothing about them
            self._gradient_nonfinite = bool(bad)
        if bad:
            grad = {name: norm for name, norm in grad.items() if math.isfinite(norm)}
        self._layers.check(step, grad, found)
        return found

    def near(self, layer: object) -> bool:
        """Whether what was decided about a layer, or the loss (None), might have been otherwise."""
        if layer is None:
            return self._loss.near
        return isinstance(layer, str) and bool(self._layers.near(layer))

    def _nonfinite(self, step: int, event: str, names: list[str]) -> Expected:
        shown = (("layers", names[: self._rules.layer_limit]),)
        return Expected(step, event, shown, (), near=False)

    def _check_loss(self, step: int, loss: float, found: list[Expected]) -> None:
        if not math.isfinite(loss):
            if not self._loss_nonfinite:
                text = "nan" if math.isnan(loss) else "inf" if loss > 0 else "-inf"
                found.append(Expected(step, "nonfinite_loss", (("value", text),), (), near=False))
            self._loss_nonfinite = True
            return
        self._loss_nonfinite = False
        rules, base = self._rules, self._loss
        if base.count >= rules.warmup:
            deviation = rules.sigma * (math.sqrt(base.variance) + 1e-12)
            # Both are looked at, so that both are known to be near or not.
            unusual = base.above(loss, base.mean + deviation)
            large = base.above(loss, rules.spike_factor * base.mean)
            if unusual and large:
                if not self._spiking:
                    found.append(self._loss_event(step, "loss_spike", loss))
                self._spiking = True
                return
        if self._spiking:
            found.append(self._loss_event(step, "loss_recovered", loss))
            self._spiking = False
        base.update(loss, rules.rate_floor)

    def _loss_event(self, step: int, event: str, loss: float) -> Expected:
        floats = (("value", loss), ("baseline", self._loss.mean))
        return Expected(step, event, (), floats, near=self._loss.near)
