"""``torch.jit.script`` of a model with our hooks on it.

TorchScript compiles the hooks of a module with it, and fails at ours. So while any are in place it
sees the model without them. Patched is the function through which every way into scripting goes.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn
from torch.jit import _recursive

_NAME = "create_script_module"


class Scripting:
    """Counts who has hooks in place; the patch is there as long as somebody has."""

    def __init__(self, is_ours: Callable[[object], bool]) -> None:
        self._is_ours = is_ours
        self._count = 0
        self._original: Callable[..., Any] | None = None
        self._patched: Callable[..., Any] | None = None

    def hold(self) -> None:
        """Somebody has hooks in place."""
        self._count += 1
        original = getattr(_recursive, _NAME, None)
        if self._patched is None and callable(original):
            self._original, self._patched = original, self._around(original)
            setattr(_recursive, _NAME, self._patched)

    def release(self) -> None:
        """They are gone again."""
        self._count -= 1
        # Where somebody has patched on top meanwhile ours stays, and does what it has to.
        if self._count == 0 and getattr(_recursive, _NAME, None) is self._patched:
            setattr(_recursive, _NAME, self._original)
            self._original = self._patched = None

    def _around(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def create_script_module(nn_module: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401
            with self._without_ours(nn_module):
                return original(nn_module, *args, **kwargs)

        return create_script_module

    @contextlib.contextmanager
    def _without_ours(self, model: object) -> Iterator[None]:
        """Inside, no module of the model has a hook of ours; behind it all stand where they did."""
        kept: list[tuple[Any, list[tuple[int, object]]]] = []
        for module in model.modules() if isinstance(model, nn.Module) else ():
            both = (vars(module).get(name) for name in ("_forward_hooks", "_forward_pre_hooks"))
            kept += [
                (hooks, list(hooks.items()))
                for hooks in both
                if hooks and any(map(self._is_ours, hooks.values()))
            ]
        for hooks, items in kept:
            for key, hook in items:
                if self._is_ours(hook):
                    del hooks[key]
        try:
            yield
        finally:
            for hooks, items in kept:
                new = [item for item in hooks.items() if item not in items]
                hooks.clear()
                hooks.update([*items, *new])
