"""The hook into Keras 3 on any backend: ``fit``, ``evaluate``, ``predict``, ``train_on_batch``.

What is watched is ``CallbackList``, which all of Keras's loops call: however callbacks are given,
none is added, so that Keras goes on dispatching them as it did. On the torch backend the phases of
a step come from the torch hook, and the optimizer's from here; on the others a step is one compiled
call, into which no hook sees.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from cirron_otel.hooks.keras.fitting import Fits
from cirron_otel.hooks.keras.logs import Logs
from cirron_otel.hooks.keras.on_torch import OnTorch
from cirron_otel.hooks.patches import Patches

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


def make(rec: Recorder) -> KerasHook:
    """The hook for one recorder, not in place yet."""
    return KerasHook(rec)


class KerasHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()
        self._fits: Fits | None = None
        self._torch: OnTorch | None = None

    def instrument(self) -> None:
        """Patch Keras; all of it or nothing."""
        keras = sys.modules["keras"]
        version = str(getattr(keras, "__version__", ""))
        if version.startswith(("1.", "2.")):
            self._rec.guard.warn(
                "keras", f"Keras {version} is not recorded: pip install 'keras>=3'"
            )
            return
        backend = str(keras.config.backend())
        logs = Logs(self._rec, backend)
        self._fits = Fits(self._rec, logs, backend)
        try:
            self._fits.patch(keras, self._patches)
            if backend == "torch":
                self._torch = OnTorch(self._rec, logs)
                self._torch.patch(keras, self._patches)
        except BaseException:
            self.uninstrument()
            raise

    def uninstrument(self) -> None:
        """Put Keras back. Functions that somebody else has wrapped meanwhile do nothing."""
        if self._fits is not None:
            self._fits.active = False
        if self._torch is not None:
            self._torch.remove()
        self._patches.undo()
