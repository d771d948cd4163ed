"""The hook into ``pytorch_lightning``, the package of Lightning's Trainer alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron_otel.hooks.lightning import LightningHook

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


def make(rec: Recorder) -> LightningHook:
    """The hook for one recorder, not in place yet."""
    return LightningHook(rec, "pytorch_lightning")
