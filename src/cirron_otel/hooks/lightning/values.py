"""What Lightning's modules return and log, as marks.

The ``loss`` of a step is what ``training_step`` returned, the mean over the batches that are
accumulated; Lightning's own copy is divided by their number. What is given to ``self.log`` is a
point ``log/<name>`` each time, and what Lightning makes of it for an epoch or an evaluation a
summary ``<name>`` at its end. Values on a device are read later; nothing here waits for them.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.hooks.lightning.classes import CONNECTOR, find
from cirron_otel.hooks.recording import Foreign, is_number, mark

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.recorder import Recorder


class _Here(threading.local):
    """What one thread is in the middle of."""

    #: Whether it is inside a batch, and the first loss that was returned there.
    in_batch = False
    loss: Any = None


class Values:
    """The hooks on what is returned and logged. ``active`` is false once the hook is gone."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._here = _Here()
        self.active = False

    def patch(self, package: str, patches: Patches) -> None:
        """Replace the methods that get the values."""
        for name in ("automatic.ClosureResult", "manual.ManualResult"):
            self._patch_result(find(package, f"loops.optimization.{name}"), patches)
        module = find(package, "core.module.LightningModule")
        patches.replace(module, "log", self._log(vars(module)["log"]))
        connector = find(package, CONNECTOR)
        patches.replace(connector, "log_metrics", self._log_metrics(vars(connector)["log_metrics"]))

    # --- the loss --------------------------------------------------------------------------------

    def begin_batch(self) -> None:
        """This thread begins to train on a batch."""
        here = self._here
        here.in_batch, here.loss = True, None

    def end_batch(self) -> Foreign:
        """The batch is over: what ``training_step`` returned as its loss, or None."""
        here = self._here
        loss, here.loss, here.in_batch = here.loss, None, False
        return loss

    def _patch_result(self, kind: type, patches: Patches) -> None:
        name = "from_training_step_output"
        original: Callable[..., Any] = vars(kind)[name].__func__

        @functools.wraps(original)
        def from_training_step_output(
            cls: type, training_step_output: object, *args: Any, **kwargs: Any
        ) -> Foreign:
            result = original(cls, training_step_output, *args, **kwargs)
            if self.active and self._here.in_batch:
                self._returned(training_step_output)
            return result

        patches.replace(kind, name, classmethod(from_training_step_output))

    def _returned(self, output: Foreign) -> None:
        here = self._here
        try:
            if here.loss is not None:  # an optimizer may evaluate its closure many times
                return
            loss = output.get("loss") if hasattr(output, "get") else output
            if loss is None or not is_number(loss):
                return
            if hasattr(loss, "detach"):
                loss = loss.detach()
                loss = loss.item() if loss.device.type == "cpu" else loss
            here.loss = loss
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning.loss", error)

    # --- what is logged --------------------------------------------------------------------------

    def _log(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log(module: Foreign, name: str, value: Foreign, *args: Any, **kwargs: Any) -> Foreign:
            result = original(module, name, value, *args, **kwargs)
            if self.active:
                self._logged(module, name, value)
            return result

        return log

    def _logged(self, module: Foreign, name: str, value: Foreign) -> None:
        try:
            trainer = getattr(module, "_trainer", None)
            # A metric that has a state is computed at the end of the epoch, and not for us.
            if trainer is None or trainer.sanity_checking or not is_number(value):
                return
            mark(self._rec, semconv.LOG_PREFIX + str(name), value)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning.log", error)

    def _log_metrics(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def log_metrics(
            connector: Foreign,
            metrics: Mapping[str, Any],
            *args: Any,
            **kwargs: Any,
        ) -> Foreign:
            result = original(connector, metrics, *args, **kwargs)
            # None: no batch is under way, the metrics are those of an epoch or an evaluation.
            if self.active and getattr(connector, "_first_loop_iter", False) is None:
                self._summarised(metrics)
            return result

        return log_metrics

    def _summarised(self, metrics: Mapping[str, Any]) -> None:
        try:
            for name, value in metrics.items():
                if is_number(value):
                    mark(self._rec, str(name), value, "summary")
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("lightning.log", error)
