"""The tees of one recorder: which are asked for, put in place when their library is imported."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel.imports import is_importable, refuse_missing, when_imported

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.tee.wrapping import Tee


class Library(NamedTuple):
    """What there is to know of a tracker's library without importing it."""

    install: str
    #: Top-level modules; one of them installed is enough.
    packages: tuple[str, ...]
    #: The module of its tee, and those whose import puts it in place.
    tee: str
    triggers: tuple[str, ...]


LIBRARIES = {
    "wandb": Library("pip install wandb", ("wandb",), "cirron_otel.tee.to_wandb", ("wandb",)),
    "tensorboard": Library(
        "pip install tensorboard",
        ("tensorboard", "tensorboardX"),
        "cirron_otel.tee.to_tensorboard",
        ("torch.utils.tensorboard.writer", "tensorboardX.writer"),
    ),
    "mlflow": Library("pip install mlflow", ("mlflow",), "cirron_otel.tee.to_mlflow", ("mlflow",)),
    "accelerate": Library(
        "pip install 'cirron-otel[accelerate]'",
        ("accelerate",),
        "cirron_otel.tee.to_accelerate",
        ("accelerate",),
    ),
}


class Tees:
    """What copies the values that a program gives to its trackers."""

    def __init__(self, wanted: Iterable[str]) -> None:
        self._wanted = tuple(wanted)
        self._rec: Recorder | None = None
        self._active: dict[str, Tee] = {}
        #: What waits for a library; it goes with these tees.
        self._waiting: list[Callable[[object], None]] = []

    @classmethod
    def choose(cls, wanted: Iterable[str]) -> Tees:
        """The tees for these libraries.

        Raises :class:`CirronDependencyError` for one that is not installed.
        """
        named = tuple(wanted)
        missing = [name for name in named if not any(map(is_importable, LIBRARIES[name].packages))]
        refuse_missing("profile(tee=...)", {name: LIBRARIES[name].install for name in missing})
        return cls(named)

    def install(self, rec: Recorder) -> None:
        """Put the tees in place, each as soon as its library is there."""
        if not self._wanted:
            return
        self._rec = rec
        rec.tee = self
        rec.listening.at_end.append(self.uninstall)
        for name in self._wanted:
            for trigger in LIBRARIES[name].triggers:
                waiting = functools.partial(self._instrument, name)
                self._waiting.append(waiting)
                when_imported(trigger, waiting)

    def _instrument(self, name: str, _library: object) -> None:
        rec = self._rec
        if rec is None:
            return
        try:
            tee: Any = self._active.get(name)
            if tee is None:
                tee = importlib.import_module(LIBRARIES[name].tee).make(rec)
                self._active[name] = tee
            tee.instrument()
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow(f"tee.{name}", error)

    def uninstall(self) -> None:
        """Put the libraries back as they were."""
        rec, self._rec = self._rec, None
        self._waiting.clear()
        for name, tee in reversed(list(self._active.items())):
            try:
                tee.uninstrument()
            except Exception as error:  # noqa: BLE001 - see _guard
                if rec is not None:
                    rec.guard.swallow(f"tee.{name}", error)

    def health(self) -> dict[str, Any]:
        """By library whose tee is in place: what was copied, what failed, what was skipped."""
        return {name: tee.health() for name, tee in self._active.items()}
