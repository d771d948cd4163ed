"""torchdata's ``StatefulDataLoader``: where its passes begin.

Its iterators fetch as those of ``DataLoader`` do, which is recorded there; but it has an
``__iter__`` of its own, and with persistent workers one iterator for all passes.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cirron_otel.hooks.patches import Patches
from cirron_otel.hooks.torch.loader import Loaders

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

_ITER = "__iter__"


def make(rec: Recorder) -> StatefulLoaderHook:
    """The hook for one recorder, not in place yet."""
    return StatefulLoaderHook(rec)


class StatefulLoaderHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()

    def instrument(self) -> None:
        """Patch the loader, where torch's hook is in place."""
        phases = self._rec.torch_phases
        kind = sys.modules["torchdata.stateful_dataloader"].StatefulDataLoader
        if phases is not None and _ITER in vars(kind):
            self._patches.replace(kind, _ITER, Loaders(phases).recorded_iter(vars(kind)[_ITER]))

    def uninstrument(self) -> None:
        """Put the loader back; torch's hook sees to it that what is left does nothing."""
        self._patches.undo()
