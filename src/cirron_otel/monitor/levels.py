"""How many channels of each layer are stuck: the events about that, and what they say."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from cirron_otel.monitor.checks.channels import Channels

if TYPE_CHECKING:
    from cirron_otel.monitor.config import MonitorConfig
    from cirron_otel.monitor.producers import Producer


class Levels:
    """The channels of each layer at the last check. The training thread."""

    def __init__(self, config: MonitorConfig) -> None:
        self._config = config
        self._last: dict[str, Channels] = {}
        #: Counts by class of each producer that was looked at in this check.
        self.stuck: dict[str, list[int]] = {}

    def begin(self) -> None:
        """Begin a check."""
        self.stuck = {}

    def stays_calm(self, producer: Producer) -> bool:
        """Of a layer in which nothing is stuck now: whether nothing was at the last check."""
        before = self._last.get(producer.name)
        if before is not None and before.stuck:
            return False
        self.stuck[producer.name] = [0, 0, 0, 0]
        return True

    def last(self, producer: Producer) -> Channels:
        """The channels of a layer at the last check; none is stuck before the first."""
        found = self._last.get(producer.name)
        return Channels(producer.channels, [], [], [], []) if found is None else found

    def look(
        self, step: int, producer: Producer, channels: Channels
    ) -> Iterator[tuple[str, dict[str, Any]]]:
        """The event about a layer's level, where that changed or more channels are stuck."""
        before = self.last(producer)
        self._last[producer.name] = channels
        self.stuck[producer.name] = channels.row()
        rule = {}
        if channels.level == before.level:
            if _without_silent(channels) <= _without_silent(before):
                return
            rule = {"rule": "more_channels"}
        kind = "channels_cleared" if channels.level == "none" else "channels"
        yield kind, {**self.fields(step, producer, channels), **rule}

    def fields(self, step: int, producer: Producer, channels: Channels) -> dict[str, Any]:
        """The fields of an event about the channels of a layer."""
        limit = self._config.list_limit
        return {
            "step": step,
            "severity": "info" if channels.level == "none" else "warning",
            "layer": producer.name,
            "batchnorm": producer.batchnorm_name,
            "channels": channels.total,
            "level": channels.level,
            "n_certified": len(channels.certified),
            "n_flat": len(channels.flat),
            "n_observed": len(channels.silent),
            "n_decayed": len(channels.decayed),
            "certified": channels.certified[:limit],
            "flat": channels.flat[:limit],
            "observed": channels.silent[:limit],
        }


def _without_silent(channels: Channels) -> int:
    """How many are stuck for sure: which are silent changes with the data."""
    return channels.stuck - len(channels.silent)
