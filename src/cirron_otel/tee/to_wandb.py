"""``wandb.log`` and ``run.log``; and ``wandb.init``, which an outage turns into an offline run.

What an offline run has is on disk: ``wandb sync`` uploads it later.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cirron_otel.tee.copying import flat
from cirron_otel.tee.guarding import is_outage
from cirron_otel.tee.wrapping import Tee

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.recorder import Recorder

_LIBRARY = "wandb"


def make(rec: Recorder) -> WandbTee:
    """The tee for one recorder, not in place yet."""
    return WandbTee(rec, _LIBRARY, _outage)


class WandbTee(Tee):
    """See :class:`cirron_otel.tee.wrapping.Tee`."""

    def instrument(self) -> None:
        """Wrap the method, the bound one of a run that goes on already, and ``init``."""
        wandb: Any = sys.modules["wandb"]
        run_class = sys.modules["wandb.sdk.wandb_run"].Run
        original = vars(run_class)["log"]
        made = self.wrap(run_class, "log", _data)
        bound: Any = vars(wandb).get("log")
        if getattr(bound, "__func__", None) is original:
            self.patches.replace(wandb, "log", made.__get__(bound.__self__))
        init = vars(wandb)["init"]
        begun = self._init(init)
        for name in ("wandb", "wandb.sdk"):
            if vars(sys.modules[name]).get("init") is init:
                self.patches.replace(sys.modules[name], "init", begun)

    def _init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guarded = self.guarded

        @functools.wraps(original)
        def init(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            if not guarded.active or kwargs.get("mode") in ("offline", "disabled"):
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            except Exception as error:
                if _is(error, "AuthenticationError") or not _outage(error):
                    raise
                try:
                    run = original(*args, **{**kwargs, "mode": "offline"})
                except Exception:  # noqa: BLE001 - the first one says what is wrong
                    raise error from None
                guarded.note(error, "this run is an offline one: upload it with `wandb sync`")
                return run

        return init


def _outage(error: Exception) -> bool:
    return is_outage(error) and not _is(error, "UsageError")


def _is(error: Exception, name: str) -> bool:
    kind = getattr(sys.modules.get("wandb.errors"), name, None)
    return isinstance(kind, type) and isinstance(error, kind)


def _data(
    run: object, data: object, step: object = None, *_: object, **_more: object
) -> tuple[Iterable[tuple[str, object]], object]:
    if step is None:
        step = getattr(run, "step", None)  # wandb counts by itself
    return flat(data), step
