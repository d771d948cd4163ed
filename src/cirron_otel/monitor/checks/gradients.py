"""Loss and gradient events by the rules that a verifier recomputes from the metrics rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cirron_otel.monitor.observing import Observation
from cirron_otel.training_record.rules import Decisions, Expected, Rules

_SEVERITY = {
    "alarm": "warning",
    "loss_spike": "warning",
    "no_gradients": "warning",
    "nonfinite_loss": "critical",
    "nonfinite_gradient": "critical",
    "skipped_step": "info",
}
_FALLING = frozenset({"no_gradient", "vanishing"})
_NO_GRADIENTS = (
    "no watched layer has a gradient: call step() after backward() and before zero_grad()"
)


class Gradients:
    """What the rules remember. ``kinds`` gives the class name of each watched layer, in order."""

    def __init__(self, config: Mapping[str, object], kinds: dict[str, str]) -> None:
        self._decisions = Decisions(Rules.of(config))
        self._kinds = kinds
        #: Layers with an open alarm, and its diagnosis.
        self.alarms: dict[str, str] = {}

    @property
    def scaler_is_on(self) -> bool:
        """Whether non-finite gradients mean that a gradient scaler skips the step."""
        return self._decisions.scaler

    @scaler_is_on.setter
    def scaler_is_on(self, value: bool) -> None:
        self._decisions.scaler = value

    def events(self, seen: Observation) -> list[tuple[str, dict[str, Any]]]:
        """The events of one check with their fields, in the order in which they are written."""
        expected = self._decisions.check(seen.step, seen.loss, seen.grad)
        for one in expected:
            fields = dict(one.exact)
            if one.event == "alarm":
                self.alarms[str(fields["layer"])] = str(fields["diagnosis"])
            elif one.event == "alarm_cleared":
                self.alarms.pop(str(fields["layer"]), None)
        return [(one.event, self._fields(one, seen)) for one in expected]

    def _fields(self, one: Expected, seen: Observation) -> dict[str, Any]:
        fields: dict[str, Any] = {"step": one.step}
        if one.event in _SEVERITY:
            fields["severity"] = _SEVERITY[one.event]
        fields.update(one.exact)
        fields.update(one.floats)
        if one.event == "alarm":
            layer = fields["layer"]
            fields["kind"] = self.kind_of(layer)
            cause = self.cause_of(layer)
            if cause is not None:
                fields["caused_by"] = cause
        elif one.event == "no_gradients":
            fields["message"] = _NO_GRADIENTS
        elif one.event == "skipped_step":
            fields["scale"] = seen.scale
        return fields

    def kind_of(self, layer: str) -> str:
        """The class name of a watched layer."""
        return self._kinds.get(layer, "")

    def cause_of(self, layer: str) -> str | None:
        """The layer in which the trouble of ``layer`` begins; None where it is its own.

        Gradients flow from the last layer to the first: of the layers with an alarm of one kind
        the last is the cause.
        """
        falls = self.alarms[layer] in _FALLING
        alike = {name for name, what in self.alarms.items() if (what in _FALLING) is falls}
        last = next((name for name in reversed(self._kinds) if name in alike), layer)
        return None if last == layer else last
