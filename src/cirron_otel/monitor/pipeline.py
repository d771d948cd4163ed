"""A check from its observation to the record: in the order in which its events are written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cirron_otel.findings import Finding
from cirron_otel.monitor import manifest, observing
from cirron_otel.monitor.activity import Activity, Site
from cirron_otel.monitor.checks.beyond import Beyond
from cirron_otel.monitor.checks.channels import (
    Channels,
    Classes,
    Silence,
    classify,
    indices,
    nothing_stuck,
)
from cirron_otel.monitor.checks.gradients import Gradients
from cirron_otel.monitor.modules import PRODUCERS, Layer, watched_layers
from cirron_otel.monitor.observing import Observation, Wanted
from cirron_otel.monitor.structure import Discovery, Structure

if TYPE_CHECKING:
    from torch import nn

    from cirron_otel.monitor.manifest import Facts
    from cirron_otel.monitor.telling import Teller
    from cirron_otel.training_record.writing.journal import Journal

_NOTHING_SEEN = Structure({}, frozenset(), None, {}, seen=False)


class Producer(NamedTuple):
    """A layer whose channels are looked at."""

    name: str
    layer: Layer
    batchnorm_name: str | None
    batchnorm: nn.Module | None
    has_relu: bool
    channels: int


class Pipeline:
    """Everything one monitor remembers between two checks. The training thread."""

    def __init__(self, facts: Facts, journal: Journal, teller: Teller) -> None:
        self._facts = facts
        self._journal = journal
        self.teller = teller
        self._kinds = {layer.name: layer.kind for layer in facts.layers}
        config = facts.config.to_dict()
        self._gradients = Gradients(config, self._kinds)
        self._beyond = Beyond(facts.config, self._kinds)
        self._parameters = list(facts.model.parameters())
        self._learning = sum(parameter.requires_grad for parameter in self._parameters)
        self._discovery: Discovery | None = None
        self._structure: Structure | None = None
        self._activity: Activity | None = None
        self._producers: list[Producer] = []
        self._silence: dict[str, Silence] = {}
        self._levels: dict[str, str] = {}
        self._told_stuck: dict[str, int] = {}
        self._told_reduced = False
        self._scans = facts.scans_channels

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
        """Look at activations from now on: the next step is checked."""
        if self._activity is not None:
            self._activity.begin()

    def end_window(self) -> None:
        """Look at activations no more."""
        if self._activity is not None:
            self._activity.stop()

    def stop(self) -> None:
        """Take every hook away."""
        if self._discovery is not None:
            self._discovery.forget()
        if self._activity is not None:
            self._activity.stop()

    def use_scaler(self, scaler: object) -> None:
        """Take the scaler that was found to be in use, where none was given."""
        if self._facts.scaling.scaler is None:
            self._facts.scaling.scaler = scaler

    def kept_loss(self, loss: object) -> object:
        """What to keep of a noted loss: no graph, but before the first check its node."""
        if not isinstance(loss, torch.Tensor):
            return loss
        if self._structure is None:
            return Noted(loss.detach(), loss.grad_fn)
        return loss.detach()

    # --- a check ----------------------------------------------------------------------------------

    def check(self, step: int, loss: object) -> None:
        """Observe, judge, write."""
        root: object = loss
        if isinstance(loss, Noted):
            noted = loss
            root, loss = noted.node, noted.value
        is_first = self._structure is None
        unfrozen = self._unfrozen(step)
        structure = self._structure or self._discover(root)
        loss, elements = _one_number(loss)
        scaling = self._facts.scaling
        peaks: Mapping[str, torch.Tensor] = {} if self._activity is None else self._activity.end()
        tolerance = self._facts.config.decayed_rel_tol
        wanted = [_wanted(one, peaks, tolerance) for one in self._producers if self._scans]
        observation = observing.observe(
            step, loss, self._facts.layers, wanted,
            scale=scaling.scale(), bears_scale=scaling.gradients_bear_it(),
            is_shared=self._facts.shares_norms,
        )  # fmt: skip
        teller = self.teller
        if is_first:
            fields = manifest.manifest_fields(self._facts, structure, observation.scale)
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
        stuck: dict[str, list[int]] = {}
        for producer in self._producers if self._scans else ():
            channels = self._channels_of(producer, observation)
            stuck[producer.name] = channels.row()
            for kind, event in self._channel_events(step, producer, channels):
                teller.event(kind, **event)
        further = [*unfrozen, *self._beyond.look(observation, self._gradients)]
        for kind, event in self._beyond.take_events():
            teller.event(kind, **event)
        row = self._journal.check(
            step, observation.loss, observation.grad, stuck,
            findings=[_as_row(found) for found in further],
        )  # fmt: skip
        teller.row(row)
        for found in further:
            teller.finding(found)

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
        self._activity = self._find_producers(structure)
        for one in self._producers if discovery is not None else ():
            peak = discovery.peaks.get(one.batchnorm_name or one.name)  # type: ignore[union-attr]
            if one.has_relu and peak is not None:
                self._activity.add(one.name, peak)
        return structure

    def _find_producers(self, structure: Structure) -> Activity:
        """Say whose channels are looked at, and give the hooks that see what they put out."""
        modules = dict(self._facts.model.named_modules())
        self._producers = []
        for layer in self._facts.layers:
            weight = getattr(layer.module, "weight", None)
            if layer.kind not in PRODUCERS or weight is None or weight.dim() < 2:  # noqa: PLR2004
                continue
            name = structure.pairs.get(layer.name)
            batchnorm = modules.get(name) if name is not None else None
            self._producers.append(
                Producer(
                    layer.name, layer, name, batchnorm, structure.has_relu(layer.name),
                    int(weight.shape[0]),
                )
            )  # fmt: skip
            self._silence.setdefault(layer.name, Silence(int(weight.shape[0])))
        sites = [
            Site(one.name, one.batchnorm if one.batchnorm is not None else one.layer.module)
            for one in self._producers
            if one.has_relu
        ]
        return Activity(self._facts.model, sites, self._journal.guard)

    def _unfrozen(self, step: int) -> list[Finding]:
        """Take in layers that have begun to learn since the last check, and tell of them."""
        learning = sum(parameter.requires_grad for parameter in self._parameters)
        before, self._learning = self._learning, learning
        if learning <= before:
            return []
        facts = self._facts
        known = {layer.name for layer in facts.layers}
        facts.layers[:], _ = watched_layers(facts.model, facts.patterns)
        self._kinds.clear()
        self._kinds.update({layer.name: layer.kind for layer in facts.layers})
        if self._structure is not None and self._activity is not None:
            self._activity.stop()
            self._activity = self._find_producers(self._structure)
        return [
            Finding(
                "layer_unfrozen", "info", f"layer {layer.name!r} learns from now on", layer.name,
                step,
            )
            for layer in facts.layers
            if layer.name not in known
        ]  # fmt: skip

    def _channels_of(self, producer: Producer, seen: Observation) -> Channels:
        config = self._facts.config
        name, total, has_relu = producer.name, producer.channels, producer.has_relu
        silence = self._silence[name]
        if has_relu:
            silence.update(seen.peaks.get(name))
        quiet = silence.lasting(config.patience)
        rows, tolerance = seen.rows.get(name), config.decayed_rel_tol
        if rows is None or nothing_stuck(rows, has_relu=has_relu, tolerance=tolerance):
            return Channels(total, [], [], [] if quiet is None else indices(quiet), [])
        classes: Classes = classify(rows, has_relu=has_relu, tolerance=tolerance)
        flat = classes.constant | classes.candidate
        known = flat | classes.decayed
        silent = [] if quiet is None else indices(quiet & ~known)
        return Channels(total, [], indices(flat), silent, indices(classes.decayed))

    def _channel_events(
        self, step: int, producer: Producer, channels: Channels
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        name, level = producer.name, channels.level
        before = self._levels.get(name, "none")
        self._levels[name] = level
        proven = channels.stuck - len(channels.silent)
        told, self._told_stuck[name] = self._told_stuck.get(name, 0), proven
        fields: dict[str, Any] = {}
        if level == before:
            if proven <= told:
                return
            fields["rule"] = "more_channels"
        limit = self._facts.config.list_limit
        yield (
            "channels_cleared" if level == "none" else "channels",
            {
                "step": step,
                "severity": "info" if level == "none" else "warning",
                "layer": name,
                "batchnorm": producer.batchnorm_name,
                "channels": channels.total,
                "level": level,
                "n_certified": len(channels.certified),
                "n_flat": len(channels.flat),
                "n_observed": len(channels.silent),
                "n_decayed": len(channels.decayed),
                "certified": channels.certified[:limit],
                "flat": channels.flat[:limit],
                "observed": channels.silent[:limit],
                **fields,
            },
        )


class Noted(NamedTuple):
    """A loss that was given before: its value without a graph, and the node that made it."""

    value: torch.Tensor
    node: object


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


def _wanted(producer: Producer, peaks: Mapping[str, torch.Tensor], tolerance: float) -> Wanted:
    module, batchnorm = producer.layer.module, producer.batchnorm
    weight: Any = module.weight
    bias: Any = getattr(module, "bias", None)
    gamma: Any = None if batchnorm is None else getattr(batchnorm, "weight", None)
    beta: Any = None if batchnorm is None else getattr(batchnorm, "bias", None)
    return Wanted(
        producer.name, weight, bias, gamma, beta, peaks.get(producer.name),
        tolerance if producer.has_relu else None,
    )  # fmt: skip


def _as_row(found: Finding) -> dict[str, object]:
    row: dict[str, object] = {
        "kind": found.kind,
        "severity": found.severity,
        "layer": found.layer,
        "message": found.message,
    }
    return {**row, **found.attributes}
