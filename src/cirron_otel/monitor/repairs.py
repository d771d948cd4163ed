"""Which channels are due for a repair, and which repairs can be taken back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from cirron_otel.monitor.checks.channels import Classes
from cirron_otel.monitor.owners import Owners
from cirron_otel.monitor.producers import Producer, shared_parameters
from cirron_otel.monitor.repair import Repaired, Streaks, repair, undo

if TYPE_CHECKING:
    from cirron_otel.monitor.manifest import Facts


class Repairs:
    """What is remembered of the channels to repair, by layer. The training thread."""

    def __init__(self, facts: Facts, owners: Owners) -> None:
        self._facts = facts
        self._owners = owners
        self._streaks: dict[str, Streaks] = {}
        self._undoable: dict[str, Repaired] = {}

    def follows(self, layer: str) -> bool:
        """Whether channels of a layer may be due for a repair."""
        return layer in self._streaks

    def targets(
        self, producer: Producer, classes: Classes | None, from_start: torch.Tensor | None,
        quiet: torch.Tensor | None,
    ) -> torch.Tensor | None:  # fmt: skip
        """The channels of a layer that are to be repaired if they stay as they are."""
        kinds = self._facts.repair_targets
        if not kinds or not producer.can_be_repaired:
            return None
        found = torch.zeros(producer.channels, dtype=torch.bool)
        if classes is not None:
            found = classes.candidate | classes.constant | classes.decayed
            if self._facts.repair != "all" and from_start is not None:
                found = found & ~from_start
        if "silent" in kinds and quiet is not None:
            found = found | quiet
        return found

    def look(
        self, step: int, producer: Producer, targets: torch.Tensor | None,
        certified: torch.Tensor | None,
    ) -> tuple[Repaired, dict[str, Any]] | None:  # fmt: skip
        """Repair the channels of a layer that are due; gives the event's fields."""
        name, facts = producer.name, self._facts
        if targets is None or (name not in self._streaks and not bool(targets.any())):
            return None
        streaks = self._streaks.setdefault(name, Streaks(producer.channels))
        due = streaks.update(
            targets, torch.zeros_like(targets) if certified is None else certified,
            facts.config.patience, facts.config.certified_repair_streak,
        )  # fmt: skip
        if not due or id(producer.weight) in shared_parameters(facts.model):
            return None
        done = repair(producer, due, self._owners, seed=facts.repair_seed, step=step)
        self._undoable[name] = done
        return done, self._fields(step, done, done.fields)

    def undo(self, step: int, layer: str | None) -> Iterator[tuple[Repaired, dict[str, Any]]]:
        """Take back the last repair of a layer, or of every layer; gives the events' fields."""
        for name in [layer] if layer is not None else list(self._undoable):
            done = self._undoable.pop(name, None)
            if done is not None:
                fields = self._fields(step, done, undo(done))
                yield done, {**fields, "rule": "undone", "undone_step": done.step}

    def _fields(self, step: int, done: Repaired, measured: Mapping[str, object]) -> dict[str, Any]:
        return {
            "step": step, "severity": "action", "layer": done.producer.name,
            "batchnorm": done.producer.batchnorm_name,
            "channels": done.channels[: self._facts.config.channel_list_limit],
            "count": len(done.channels), "modification_class": "discrete", "bound": None,
            **measured,
        }  # fmt: skip
