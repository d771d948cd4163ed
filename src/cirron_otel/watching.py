"""The models a user handed to ``ci.watch``, held weakly."""

from __future__ import annotations

import weakref
from collections.abc import Iterable


class Watched:
    """Watched models in the order they came. Thread-safe as far as its list is."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[object]] = []

    def add(self, models: Iterable[object]) -> None:
        """Watch more models; ``None`` forgets all before it."""
        for model in models:
            if model is None:
                self._references.clear()
            elif all(known() is not model for known in self._references):
                self._references.append(weakref.ref(model))

    @property
    def models(self) -> list[object]:
        """Those that still exist."""
        found = [reference() for reference in self._references]
        return [model for model in found if model is not None]


#: The process's watched models: ``watch()`` may come before ``profile()``.
watched = Watched()
