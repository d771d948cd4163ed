"""What a model is made of at one check, and whether that is still so at the next one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


class Making:
    """Every module and parameter of a model, where each hangs. Compared by identity, quickly."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._holders: list[tuple[Mapping[str, object], int]] = []
        self._held: list[tuple[Mapping[str, object], str, object]] = []
        self._parameters: list[nn.Parameter] = []
        self.take()

    def take(self) -> None:
        """Take it in as it is now."""
        self._holders = [
            (holder, len(holder)) for module in self._model.modules() for holder in _of(module)
        ]
        self._held = [
            (holder, name, one) for holder, _ in self._holders for name, one in holder.items()
        ]
        self._parameters = list(self._model.parameters())

    @property
    def is_the_same(self) -> bool:
        """Whether each module and each parameter is the very same as before."""
        for holder, size in self._holders:
            if len(holder) != size:
                return False
        for holder, name, one in self._held:  # noqa: SIM110 - all() takes twice as long
            if holder.get(name) is not one:
                return False
        return True

    @property
    def learning(self) -> int:
        """How many parameters learn."""
        return sum(parameter.requires_grad for parameter in self._parameters)


def _of(module: nn.Module) -> Iterator[Mapping[str, object]]:
    yield module._parameters  # noqa: SLF001 - torch's own use of it
    yield module._modules  # noqa: SLF001
