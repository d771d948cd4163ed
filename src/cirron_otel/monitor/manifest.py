"""What a record says of how it was made: the events ``structure`` and ``manifest``, the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel.monitor.config import MonitorConfig
from cirron_otel.monitor.modules import Layer, Place
from cirron_otel.monitor.owners import family_of
from cirron_otel.monitor.producers import producing_layers
from cirron_otel.monitor.scaling import Scaling
from cirron_otel.monitor.structure import Structure
from cirron_otel.training_record import report as reports

if TYPE_CHECKING:
    from torch import nn

NO_RELU = "no ReLU takes the output (a residual sum or another activation does)"
IN_PARTS = "each rank holds a part of each weight: channels are not looked at"
_REPORT = "report.html"


class Facts(NamedTuple):
    """What a monitor was made with."""

    config: MonitorConfig
    model: nn.Module
    optimizer: object
    layers: list[Layer]
    #: Layers before the filter, and the filter.
    total: int
    patterns: Sequence[str] | None
    place: Place
    wrappers: list[str]
    scaling: Scaling
    is_compiled: bool
    #: Whether the norms of all ranks' shards are put together.
    shares_norms: bool
    #: Whether channels are repaired: False, True or "all".
    repair: bool | str = False

    @property
    def scans_channels(self) -> bool:
        """Whether channels are looked at: not where a rank holds only a part of each weight."""
        return self.place.mode != "fsdp"

    @property
    def repair_targets(self) -> list[str]:
        """The classes of channels that are repaired."""
        if self.repair is False:
            return []
        # Whether a channel is silent depends on a rank's own data.
        silent = self.repair == "all" and self.place.mode == "none"
        return ["certified", "flat", "decayed", *(["silent"] if silent else [])]

    @property
    def repair_seed(self) -> int:
        """The seed of repairs: the program's own random streams are never drawn from."""
        return self.config.repair_seed or 0


def watched_pairs(facts: Facts, structure: Structure) -> dict[str, str]:
    """Producer to its BatchNorm, of the watched producers."""
    watched = {layer.name for layer in facts.layers}
    return {name: other for name, other in structure.pairs.items() if name in watched}


def structure_fields(facts: Facts, structure: Structure) -> dict[str, Any]:
    """The fields of ``structure`` beyond the step."""
    return {
        "pairs": watched_pairs(facts, structure),
        "relu_after": sorted(structure.relu_after),
        "graph": structure.graph,
    }


def why_no_relu(facts: Facts, structure: Structure, producer: str) -> str | None:
    """Why no ReLU is known to follow a producer; None where one does."""
    if structure.has_relu(producer):
        return None
    return NO_RELU if structure.seen else _unseen(facts)


def _unseen(facts: Facts) -> str:
    if facts.is_compiled:
        return "the model is compiled: its forward passes run without the hooks that would see them"
    return "no forward pass in training mode was seen before the first check"


def manifest_fields(
    facts: Facts, structure: Structure, scale: float | None, never: Mapping[str, str]
) -> dict[str, Any]:
    """The fields of ``manifest`` beyond the step. ``never``: see ``Certificates``."""
    return {
        "check_every": facts.config.check_every,
        "layers": {
            "monitored": len(facts.layers),
            "total": facts.total,
            "filter": None if facts.patterns is None else list(facts.patterns),
        },
        "producers": [
            {
                "layer": layer.name,
                "kind": layer.kind,
                "batchnorm": structure.pairs.get(layer.name),
                "relu_after": structure.has_relu(layer.name),
                "certificate": facts.scans_channels and layer.name not in never,
                "reason": never.get(layer.name) if facts.scans_channels else IN_PARTS,
            }
            for layer in producing_layers(facts.model, facts.layers)
        ],
        "channel_checks": facts.scans_channels,
        "optimizer": {
            "type": None if facts.optimizer is None else type(facts.optimizer).__name__,
            "certificate_family": family_of(facts.optimizer, facts.config.certify_optimizers),
        },
        "repair": {
            "mode": facts.repair,
            "targets": facts.repair_targets,
            "rng": None if facts.repair is False else f"seed {facts.repair_seed}, step and layer",
            "modification_class": "discrete",
            "bound": None,
        },
        "precision": {
            "scaler": facts.scaling.given,
            "scaler_enabled": facts.scaling.is_on,
            "scale": scale,
            "gradient_norms": "added up in float32, float64 for float64 gradients",
        },
        "distributed": {
            "mode": facts.place.mode,
            "rank": facts.place.rank,
            "world_size": facts.place.world_size,
            "wrappers": facts.wrappers,
        },
        "notes": _notes(facts, structure),
    }


def _notes(facts: Facts, structure: Structure) -> list[str]:
    notes = []
    if not structure.seen:
        notes.append(f"channels that never fire are not looked for: {_unseen(facts)}")
    if facts.place.mode == "fsdp":
        notes.append(
            "each rank holds a part of each weight: channels are not looked at, and gradient norms "
            + ("are put together" if facts.shares_norms else "are those of this rank's part")
        )
    if facts.place.world_size > 1:
        notes.append(
            "rank 0 alone "
            + ("looks and writes" if facts.repair is False else "writes; all repair alike")
        )
    if facts.scaling.given:
        notes.append("steps that the gradient scaler skips are seen at checks only")
    return notes


def write_report(directory: Path) -> str:
    """Write the report of a record beside it, whole or not at all; returns its path.

    Raises ``OSError`` or :class:`~cirron_otel.errors.RecordError`.
    """
    page = reports.html(reports.load(directory))
    path = directory / _REPORT
    spare = directory / f".{_REPORT}.tmp"
    spare.write_bytes(page.encode("utf-8", "replace"))
    spare.replace(path)
    return str(path)
