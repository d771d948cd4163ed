"""Layers of which half has decayed: small beside what they were, and no longer beside each other.

The record's rule measures a filter by the median of its layer, and so sees nothing where half of
them, or all, have gone. Here each layer is measured by the largest that it has been.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron_otel.findings import Finding

if TYPE_CHECKING:
    from cirron_otel.monitor.checks.channels import Classes
    from cirron_otel.monitor.config import MonitorConfig
    from cirron_otel.monitor.observing import Observation
    from cirron_otel.monitor.producers import Producer


class Fading:
    """How large the filters of each layer have been. The training thread."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        #: By producer, the largest size of a filter at any check at which none was small.
        self._largest: dict[str, float] = {}
        self._told: dict[str, int] = {}
        #: Of the check under way.
        self.findings: list[Finding] = []

    def begin(self) -> None:
        """Begin a check."""
        self.findings = []

    def largest(self, producer: str) -> float:
        """What the filters of a layer are measured by; 0 where it has not been seen."""
        return self._largest.get(producer, 0.0)

    def look(self, seen: Observation, producer: Producer, classes: Classes | None) -> None:
        """Take in one layer that a ReLU follows."""
        if not producer.has_relu:
            return
        name, rows = producer.name, seen.rows.get(producer.name)
        if rows is None:
            size = seen.sizes.get(name, 0.0)
            if size > self._largest.get(name, 0.0):
                self._largest[name] = size
            self._told.pop(name, None)
            return
        sizes, usual = rows.row_max, self._largest.get(name, 0.0)
        small = (sizes > 0) & (sizes <= self._config.decayed_rel_tol * usual)
        if classes is not None:
            small = small & ~classes.decayed  # those are told as such
        count = int(small.sum())
        if count <= self._told.get(name, 0):
            if not count:
                self._told.pop(name, None)
                if classes is None:
                    self._largest[name] = max(usual, float(sizes.max()))
            return
        self._told[name] = count
        size = float(sizes[small].max())
        self.findings.append(
            Finding(
                "decayed_layer", "warning",
                f"{count} of {producer.channels} filters of layer {name!r} have decayed: none has "
                f"a weight above {size:.3g}, where the layer once had {usual:.3g}",
                name, seen.step, {"count": count, "largest": size, "usual": usual},
            )
        )  # fmt: skip
