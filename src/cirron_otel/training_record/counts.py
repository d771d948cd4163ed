"""The counts that ``run_end`` carries, made from the events and rows as they go by."""

from __future__ import annotations

from collections.abc import Mapping

#: Event type to the key of ``run_end.counts`` that counts it.
_COUNTED = {
    "alarm": "alarms",
    "repair": "repairs",
    "loss_spike": "loss_spikes",
    "nonfinite_loss": "nonfinite",
    "nonfinite_gradient": "nonfinite",
    "skipped_step": "skipped_steps",
}
_NONE = {
    "alarms": 0,
    "stuck_layers": 0,
    "repairs": 0,
    "channels_repaired": 0,
    "loss_spikes": 0,
    "nonfinite": 0,
    "skipped_steps": 0,
    "checks_without_gradients": 0,
}


class Counts:
    """Counts of one record, never changed.

    ``steps`` is one more than the highest step seen in a row or an event; a monitor that counts
    every step knows better and says so when it closes the record.
    """

    __slots__ = ("_counts", "checks", "events", "steps")

    def __init__(
        self, events: int = 0, checks: int = 0, steps: int = 0, counts: dict[str, int] = _NONE
    ) -> None:
        self.events = events
        self.checks = checks
        self.steps = steps
        self._counts = counts

    def with_event(self, event: Mapping[str, object]) -> Counts:
        """These counts and one diary line more."""
        kind = event.get("event")
        counts = self._counts
        key = _COUNTED.get(kind) if type(kind) is str else None
        if key is not None:
            counts = {**counts, key: counts[key] + 1}
            if kind == "repair" and type(count := event.get("count")) is int:
                counts["channels_repaired"] += count
        elif kind == "channels" and event.get("level") != "none":
            counts = {**counts, "stuck_layers": counts["stuck_layers"] + 1}
        return Counts(self.events + 1, self.checks, self._seen(event), counts)

    def with_row(self, row: Mapping[str, object]) -> Counts:
        """These counts and one row of the metrics file more."""
        counts = self._counts
        if row.get("grad") == {}:
            name = "checks_without_gradients"
            counts = {**counts, name: counts[name] + 1}
        return Counts(self.events, self.checks + 1, self._seen(row), counts)

    def plus(self, other: Counts) -> Counts:
        """The counts of the lines and those of the rows together."""
        counts = {key: count + other._counts[key] for key, count in self._counts.items()}
        return Counts(
            self.events + other.events, self.checks + other.checks,
            max(self.steps, other.steps), counts,
        )  # fmt: skip

    def _seen(self, line: Mapping[str, object]) -> int:
        step = line.get("step")
        return step + 1 if type(step) is int and step >= self.steps else self.steps

    def to_dict(self) -> dict[str, int]:
        """``run_end.counts``."""
        return dict(self._counts)
