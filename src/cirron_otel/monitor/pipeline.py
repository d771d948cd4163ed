"""A check from its observation to the record: in the order in which its events are written."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from cirron_otel.errors import ConfigurationError
from cirron_otel.findings import Finding
from cirron_otel.monitor import manifest, observing
from cirron_otel.monitor.channel_watch import ChannelWatch
from cirron_otel.monitor.checks.beyond import Beyond
from cirron_otel.monitor.checks.gradients import Gradients
from cirron_otel.monitor.checks.patterns import Patterns
from cirron_otel.monitor.making import Making
from cirron_otel.monitor.modules import watched_layers
from cirron_otel.monitor.residuals import Residuals
from cirron_otel.monitor.structure import Discovery, Structure
from cirron_otel.monitor.updates import Updates

if TYPE_CHECKING:
    from cirron_otel.monitor.manifest import Facts
    from cirron_otel.monitor.telling import Teller
    from cirron_otel.training_record.writing.journal import Journal

_NOTHING_SEEN = Structure({}, frozenset(), None, {}, seen=False)


class Pipeline:
    """Everything one monitor remembers between two checks. The training thread."""

    def __init__(
        self, facts: Facts, journal: Journal, teller: Teller, now: Callable[[], int]
    ) -> None:
        self._facts = facts
        self._journal = journal
        self.teller = teller
        self._kinds = {layer.name: layer.kind for layer in facts.layers}
        config = facts.config.to_dict()
        self._gradients = Gradients(config, self._kinds)
        self._beyond = Beyond(facts.config, self._kinds)
        self._patterns = Patterns(facts.config)
        self._making = Making(facts.model)
        self._learning = self._making.learning
        self._discovery: Discovery | None = None
        self._structure: Structure | None = None
        self._told_reduced = False
        self._scans = facts.scans_channels
        self._channels = ChannelWatch(facts, journal.guard, teller.event, now)
        self._updates = Updates(facts.config, self._channels.owners, journal.guard)
        self._residuals = Residuals(facts.model, facts.config, journal.guard)

    @property
    def pairs(self) -> dict[str, str]:
        """Producer to its BatchNorm."""
        if self._structure is None:
            return {}
        return manifest.watched_pairs(self._facts, self._structure)

    # --- windows ----------------------------------------------------------------------------------

    def begin_first_window(self) -> None:
        """Put the hooks in place that find out what follows what."""
        facts = self._facts
        if self._scans and not facts.is_compiled:
            self._discovery = Discovery(
                facts.model, dict(facts.model.named_modules()), self._journal.guard
            )

    def take_over(self, discovery: Discovery) -> None:
        """Use hooks that were put in place earlier, in place of our own."""
        own, self._discovery = self._discovery, None
        if own is None:  # nothing is looked at here
            discovery.forget()
            return
        own.forget()
        self._discovery = discovery

    def begin_window(self) -> None:
        """Look at forward passes from now on: the next step is checked."""
        self._channels.begin_window()
        self._residuals.begin()

    def end_window(self) -> None:
        """Look at forward passes no more."""
        self._channels.end_window()
        self._residuals.stop()

    def stop(self) -> None:
        """Take every hook away."""
        if self._discovery is not None:
            self._discovery.forget()
        self._channels.stop()
        self._updates.stop()
        self._residuals.stop()
        if self._channels.violated:
            self._journal.end_fields["certificates_violated"] = self._channels.violated

    def undo_repair(self, layer: str | None) -> int:
        """Take back the last repair of a layer, or of each; says how many were."""
        events = list(self._channels.undo(layer))
        for kind, event in events:
            self.teller.event(kind, **event)
        return len(events)

    @property
    def wants_graph(self) -> bool:
        """Whether the graph of the next checked loss will be looked at."""
        return self._scans and self._channels.wants_graph

    def use_scaler(self, scaler: object) -> None:
        """Take the scaler that was found to be in use, where none was given."""
        if self._facts.scaling.scaler is None:
            self._facts.scaling.scaler = scaler

    def kept_loss(self, loss: object) -> object:
        """What to keep of a noted loss: its node, where the graph is to be looked at."""
        if not isinstance(loss, torch.Tensor):
            return loss
        if self._structure is None or self.wants_graph:
            return Noted(loss.detach(), loss.grad_fn)
        return loss.detach()

    # --- a check ----------------------------------------------------------------------------------

    def check(self, step: int, loss: object) -> None:
        """Observe, judge, write, tell."""
        self.teller.hold()
        try:
            self._check(step, loss)
        finally:
            self.teller.release()

    def _check(self, step: int, loss: object) -> None:
        root: object = loss
        if isinstance(loss, Noted):
            noted = loss
            root, loss = noted.node, noted.value
        is_first = self._structure is None
        changed = self._changed(step)
        structure = self._structure or self._discover(root)
        loss, elements = _one_number(loss)
        scaling = self._facts.scaling
        wanted = self._channels.wanted() if self._scans else []
        observation = observing.observe(
            step, loss, self._facts.layers, wanted,
            scale=scaling.scale(), bears_scale=scaling.gradients_bear_it(),
            is_shared=self._facts.shares_norms,
            further={"updates": self._updates.take(), "residuals": self._residuals.take()},
        )  # fmt: skip
        teller = self.teller
        if is_first:
            fields = manifest.manifest_fields(
                self._facts, structure, observation.scale, self._channels.never
            )
            teller.event(
                "structure", step=step, **manifest.structure_fields(self._facts, structure)
            )
            teller.event("manifest", step=step, **fields)
            self._gradients.scaler_is_on = self._facts.scaling.is_on
        if elements != 1 and not self._told_reduced:
            self._told_reduced = True
            teller.event("loss_reduced", step=step, severity="info", elements=elements)
        for kind, event in self._gradients.events(observation):
            teller.event(kind, **event)
        if self._scans:
            skips = self._gradients.scaler_is_on and not all(
                map(math.isfinite, observation.grad.values())
            )
            for kind, event in self._channels.look(observation, root, skips=skips):
                teller.event(kind, **event)
        further = [
            *changed,
            *self._channels.findings,
            *self._beyond.look(observation, self._gradients),
            *self._patterns.look(observation, self._gradients),
            *self._updates.look(
                step, observation.further["updates"], observation.grad, self._facts.layers
            ),
            *self._residuals.look(step, observation.further["residuals"]),
        ]
        for kind, event in self._beyond.take_events():
            teller.event(kind, **event)
        row = self._journal.check(
            step, observation.loss, observation.grad, self._channels.stuck,
            findings=[_as_row(found) for found in further],
        )  # fmt: skip
        teller.row(row)
        for found in further:
            teller.finding(found)
        self._updates.sample(self._facts.layers)

    def take_part(self) -> None:
        """Give this rank's part of the norms to the rank that checks."""
        try:
            observing.observe(
                0, None, self._facts.layers, [], scale=None, bears_scale=False, is_shared=True
            )
        except Exception as error:  # noqa: BLE001 - see _guard
            self._journal.guard.swallow("monitor.check", error)

    def _discover(self, root: object) -> Structure:
        discovery, self._discovery = self._discovery, None
        structure = _NOTHING_SEEN if discovery is None else discovery.finish(root)
        self._structure = structure
        self._channels.begin(structure, discovery)
        return structure

    def _changed(self, step: int) -> list[Finding]:
        """Take in layers that have begun to learn, or have other parameters, since the last check.

        Gives what is to be told of them.
        """
        facts, making = self._facts, self._making
        replaced = not making.is_the_same
        if replaced:
            making.take()
        before, self._learning = self._learning, making.learning
        if self._learning <= before and not replaced:
            return []
        known = {layer.name: layer.parameters for layer in facts.layers}
        try:
            facts.layers[:], _ = watched_layers(facts.model, facts.patterns)
        except ConfigurationError:  # nothing learns, or no shape is known: as it was, for now
            return []
        self._kinds.clear()
        self._kinds.update({layer.name: layer.kind for layer in facts.layers})
        self._channels.find_producers()
        return [
            Finding(
                "layer_unfrozen", "info", f"layer {layer.name!r} learns from now on", layer.name,
                step,
            )
            if layer.name not in known
            else Finding(
                "layer_replaced", "info",
                f"layer {layer.name!r} has other parameters than before: those are watched now",
                layer.name, step,
            )
            for layer in facts.layers
            if not _same(known.get(layer.name), layer.parameters)
        ]  # fmt: skip


class Noted(NamedTuple):
    """A loss that was given before: its value without a graph, and the node that made it."""

    value: torch.Tensor
    node: object


def _same(before: Mapping[str, object] | None, now: Mapping[str, object]) -> bool:
    """Whether a layer has the very same parameters."""
    if before is None or before.keys() != now.keys():
        return False
    return all(before[name] is parameter for name, parameter in now.items())


def _one_number(loss: object) -> tuple[object, int]:
    """A loss as one number, and how many it was; None for one of which there is nothing."""
    if isinstance(loss, torch.Tensor):
        elements = loss.numel()
        if elements == 1:
            return loss.detach(), 1
        return (loss.detach().float().mean() if elements else None), elements
    if loss is None:
        return None, 1
    try:
        return float(loss), 1  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return None, 1


def _as_row(found: Finding) -> dict[str, object]:
    row: dict[str, object] = {
        "kind": found.kind,
        "severity": found.severity,
        "layer": found.layer,
        "message": found.message,
    }
    return {**row, **found.attributes}
