"""Channels that are zeros when the training begins: some are meant to be, and will learn."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from cirron_otel.monitor.checks.channels import Classes

if TYPE_CHECKING:
    import torch

    from cirron_otel.monitor.certificate import Evidence


class FromStart:
    """Which channels were zero at the first check, and still are. The training thread."""

    def __init__(self) -> None:
        self._zero: dict[str, torch.Tensor] = {}

    def begin(self, classes: Mapping[str, Classes | None]) -> None:
        """Take in the first check."""
        self._zero = {
            name: zero
            for name, found in classes.items()
            if found is not None and bool((zero := found.candidate | found.constant).any())
        }

    def channels(self, layer: str) -> torch.Tensor | None:
        """Those of a layer, as a mask; None where none was."""
        return self._zero.get(layer)

    def without_learning(
        self, layer: str, classes: Classes | None, evidence: Mapping[str, Evidence]
    ) -> Classes | None:
        """The classes without channels that began as zeros and have a gradient: they will learn."""
        zero = self._zero.get(layer)
        if zero is None:
            return classes
        if classes is None:
            del self._zero[layer]
            return None
        zero = self._zero[layer] = zero & (classes.candidate | classes.constant)
        learns = zero & evidence[layer].gradient
        if not bool(learns.any()):
            return classes
        return Classes(
            classes.zero_row & ~learns, classes.zero_scale & ~learns, classes.constant & ~learns,
            classes.decayed,
        )  # fmt: skip

    def changed(self, layer: str, channels: list[int]) -> None:
        """These channels were given other weights: they no longer are as they began."""
        zero = self._zero.get(layer)
        if zero is not None:
            zero[channels] = False
