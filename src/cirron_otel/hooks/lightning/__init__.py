"""The hook into Lightning: fit, validate, test and predict of its ``Trainer``.

``lightning`` and ``pytorch_lightning`` are two packages with the same content; each has a hook of
its own, this one the first. What is replaced are methods of the loops of the Trainer: no callback,
logger or profiler is added, so nothing of ours stands in a checkpoint or in ``trainer.callbacks``.
What happens inside a batch the torch hook sees.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cirron_otel.hooks.lightning.loops import TrainerLoops
from cirron_otel.hooks.lightning.values import Values
from cirron_otel.hooks.patches import Patches

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


def make(rec: Recorder) -> LightningHook:
    """The hook for one recorder, not in place yet."""
    return LightningHook(rec, "lightning.pytorch")


class LightningHook:
    """See :class:`cirron_otel.hooks.Hook`. ``package`` holds the Trainer and is imported."""

    def __init__(self, rec: Recorder, package: str) -> None:
        self._rec = rec
        self._package = package
        self._patches = Patches()
        self._values = Values(rec)
        self._loops = TrainerLoops(rec, self._values)

    def instrument(self) -> None:
        """Patch the loops; all of it or nothing."""
        version = str(getattr(sys.modules[self._package], "__version__", ""))
        if version.startswith(("0.", "1.")):
            self._rec.guard.warn(
                "lightning",
                f"{self._package} {version} is not recorded as a framework, its phases are: "
                "pip install 'lightning>=2'",
            )
            return
        self._loops.active = self._values.active = True
        try:
            self._loops.patch(self._package, self._patches)
            self._values.patch(self._package, self._patches)
        except BaseException:
            self.uninstrument()
            raise

    def uninstrument(self) -> None:
        """Put Lightning back. Functions that somebody else has wrapped meanwhile do nothing."""
        self._loops.active = self._values.active = False
        self._patches.undo()
