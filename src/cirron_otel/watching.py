"""The models a user handed to ``ci.watch``, and those that a framework trains; held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import NamedTuple


class WatchedModel(NamedTuple):
    """One model: what it is called, and whether its buffers are looked at too."""

    model: object
    #: What ``watch(name=...)`` said, else its class; numbered where there are several of it.
    name: str
    #: Whether it was given a name.
    named: bool
    buffers: bool


class Watched:
    """Watched models in the order they came. Thread-safe as far as its list is."""

    def __init__(self) -> None:
        self._entries: list[tuple[weakref.ref[object], str | None, bool]] = []
        #: Called, on the thread of ``watch()``, when there is something new to watch.
        self.listeners: list[Callable[[], object]] = []
        self._optimizers: list[weakref.ref[object]] = []
        #: Models that a framework has begun to train, the last one last; each with the id of the
        #: epoch it was in.
        self._trained: list[tuple[weakref.ref[object], str | None]] = []
        #: What ``watch(monitor=...)`` said of some models.
        self._monitor: list[tuple[weakref.ref[object], object]] = []

    def add(
        self,
        models: Iterable[object],
        *,
        name: str | None = None,
        buffers: bool | None = None,
        monitor: object = None,
    ) -> None:
        """Watch more models; ``None`` forgets all before it. Optimizers among them are kept apart.

        A model that is watched already keeps its place and takes the new ``name`` and ``buffers``,
        where they are given. Raises TypeError for what cannot be held weakly.
        """
        for model in models:
            if model is None:
                self._entries.clear()
                self._optimizers.clear()
                self._trained.clear()
                self._monitor.clear()
                continue
            if _is_optimizer(model):
                alive = [known for known in self._optimizers if known() not in (None, model)]
                self._optimizers = [*alive, weakref.ref(model)]
                continue
            if monitor is not None:
                others = [one for one in self._monitor if one[0]() not in (None, model)]
                self._monitor = [*others, (weakref.ref(model), monitor)]
            found = weakref.ref(model), name, bool(buffers)
            for place, (known, old_name, old_buffers) in enumerate(self._entries):
                if known() is model:
                    kept = old_buffers if buffers is None else bool(buffers)
                    self._entries[place] = known, name or old_name, kept
                    break
            else:
                self._entries = [entry for entry in self._entries if entry[0]() is not None]
                self._entries.append(found)
        self._tell()

    def note_trained(self, model: object, epoch_id: str | None) -> None:
        """A framework begins to train a model; ``epoch_id`` is the id of the open epoch, if any.

        Raises TypeError for what cannot be held weakly.
        """
        one = weakref.ref(model), epoch_id
        others = [
            kept
            for kept in self._trained
            if (known := kept[0]()) is not None and known is not model
        ]
        self._trained = [*others, one]
        self._tell()

    def _tell(self) -> None:
        for listener in tuple(self.listeners):
            listener()

    def trained(self, epoch_id: str | None = None) -> list[object]:
        """The models that a framework trained and that still exist; those of one epoch alone."""
        return [
            model
            for reference, epoch in self._trained.copy()
            if (model := reference()) is not None and (epoch_id is None or epoch == epoch_id)
        ]

    @property
    def optimizers(self) -> list[object]:
        """The optimizers given beside models, that still exist."""
        return [found for one in self._optimizers.copy() if (found := one()) is not None]

    def monitor_option(self, model: object) -> object:
        """What ``watch(monitor=...)`` said of a model; None where it said nothing."""
        return next((option for one, option in self._monitor.copy() if one() is model), None)

    @property
    def models(self) -> list[object]:
        """Those that still exist."""
        return [model for entry in self._entries.copy() if (model := entry[0]()) is not None]

    @property
    def entries(self) -> list[WatchedModel]:
        """Those that still exist, each with a name of its own."""
        alive = [
            (model, name, buffers)
            for reference, name, buffers in self._entries.copy()
            if (model := reference()) is not None
        ]
        return named(alive)


def named(models: Iterable[tuple[object, str | None, bool]]) -> list[WatchedModel]:
    """Entries of models, each with a name of its own: from model, name or None, and ``buffers``.

    The second of a name is called ``<name>_2``. Names that were given go before made ones.
    """
    models = list(models)
    taken: set[str] = set()
    found: dict[int, WatchedModel] = {}
    for given in (True, False):
        for place, (model, name, buffers) in enumerate(models):
            if bool(name) is given:
                wanted = name or type(model).__name__
                made, number = wanted, 1
                while made in taken:
                    number += 1
                    made = f"{wanted}_{number}"
                taken.add(made)
                found[place] = WatchedModel(model, made, given, buffers)
    return [found[place] for place in range(len(models))]


def _is_optimizer(found: object) -> bool:
    return callable(getattr(found, "step", None)) and hasattr(found, "param_groups")


#: The process's watched models: ``watch()`` may come before ``profile()``.
watched = Watched()
