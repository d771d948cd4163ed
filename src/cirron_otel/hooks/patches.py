"""Replacing attributes of a framework, and putting them back as they were."""

from __future__ import annotations

from typing import Any


class Patches:
    """What was replaced, and by what. Used on one thread at a time."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, Any]] = []

    def replace(self, owner: Any, name: str, replacement: Any) -> None:  # noqa: ANN401 - any attribute
        """Set ``owner.name``; ``owner`` is a class or module that has the attribute itself."""
        self._done.append((owner, name, vars(owner)[name], replacement))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Put everything back, last first.

        Where somebody has patched on top of us, our function stays in the chain; its owner has to
        see to it that it does nothing.
        """
        while self._done:
            owner, name, original, replacement = self._done.pop()
            if vars(owner).get(name) is replacement:
                setattr(owner, name, original)
