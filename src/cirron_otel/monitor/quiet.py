"""Channels that put out nothing, or next to nothing, at several checks on end."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron_otel.findings import Finding
from cirron_otel.monitor.checks.channels import Silence, indices

if TYPE_CHECKING:
    import torch

    from cirron_otel.monitor.config import MonitorConfig
    from cirron_otel.monitor.observing import Observation
    from cirron_otel.monitor.producers import Producer


class Quiet:
    """For how long the channels of each layer have been quiet. The training thread."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._silence: dict[str, Silence] = {}
        self._told: dict[str, int] = {}
        #: Of the check under way: units that are quiet behind another activation than a ReLU.
        self.findings: list[Finding] = []

    def begin(self) -> None:
        """Begin a check."""
        self.findings = []

    def look(self, seen: Observation, producer: Producer) -> torch.Tensor | None:
        """Which channels of a layer never open their ReLU; None for none of them."""
        name = producer.name
        silence = self._silence.get(name)
        if silence is None:
            silence = self._silence[name] = Silence(producer.channels)
        peak = seen.peaks.get(name)
        if peak is not None and producer.quiet_below:
            peak = peak - producer.quiet_below
        silence.update(peak)
        quiet = silence.lasting(self._config.patience)
        if quiet is None or producer.has_relu:
            return quiet
        self._tell(seen.step, producer, quiet)
        return None  # the record's classes are about ReLUs

    def _tell(self, step: int, producer: Producer, quiet: torch.Tensor) -> None:
        """Units behind a GELU or the like that put out next to nothing: told as they grow."""
        count, told = int(quiet.sum()), self._told.get(producer.name, 0)
        if count <= told:
            return
        self._told[producer.name] = count
        self.findings.append(
            Finding(
                "silent_units", "warning",
                f"{count} of {producer.channels} units of layer {producer.name!r} have put out "
                f"next to nothing behind their activation at {self._config.patience} checks on end",
                producer.name, step,
                {"units": indices(quiet)[: self._config.list_limit], "count": count},
            )
        )  # fmt: skip
