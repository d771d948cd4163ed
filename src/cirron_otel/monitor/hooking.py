"""Hooks on a model's modules that come and go, and vanish from copies and from compiled code.

A hook is there only while a check wants to see the forward pass; between checks the modules are as
the user made them. ``copy.deepcopy``, pickling and ``torch.save`` of a hooked model give a model
whose hooks do nothing, and which loads where this package is not installed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from cirron_otel._guard import Guard

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

See = Callable[..., object]


class Hook:
    """A hook that calls ``see`` and swallows what that raises; its copies do nothing.

    ``where`` is the name under which the guard counts what was swallowed.
    """

    __slots__ = ("_guard", "_see", "_where")

    def __init__(self, see: See, guard: Guard, where: str = "monitor.hook") -> None:
        self._see = see
        self._guard = guard
        self._where = where

    def __call__(self, *args: Any) -> None:
        """What torch calls. Returns None: nothing is changed."""
        # What it does would become part of the graph.
        if is_dynamo_compiling() or torch._C._is_tracing():  # noqa: SLF001 - torch.jit.is_tracing
            return
        try:
            self._see(*args)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._guard.swallow(self._where, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """A callable of the standard library that takes anything and gives None."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class Hooks:
    """Hooks that are put in place and taken away together."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._handles: list[RemovableHandle] = []

    def before(self, module: nn.Module, see: See) -> None:
        """Call ``see(module, args)`` before each forward of ``module``."""
        self._handles.append(module.register_forward_pre_hook(Hook(see, self._guard)))

    def after(self, module: nn.Module, see: See) -> None:
        """Call ``see(module, args, output)`` after each forward of ``module``."""
        self._handles.append(module.register_forward_hook(Hook(see, self._guard)))

    def remove(self) -> None:
        """Take all away."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __bool__(self) -> bool:
        """Whether any is in place."""
        return bool(self._handles)


def learns(module: nn.Module) -> bool:
    """Whether a forward pass of ``module`` is one to learn from.

    One that activation checkpointing makes again during the backward pass is none.
    """
    return module.training and makes_graph()


def makes_graph() -> bool:
    """Whether what runs now on this thread is a forward pass that gradients will come through."""
    if not torch.is_grad_enabled():
        return False
    ask = getattr(torch._C, "_current_graph_task_id", None)  # noqa: SLF001 - as torch's own checkpoint
    return ask is None or ask() == -1  # not in a backward pass


def tensors_in(found: object, depth: int = 4, width: int = 64) -> Iterable[torch.Tensor]:
    """The tensors in what a model returned: itself, or in nested sequences and mappings."""
    if isinstance(found, torch.Tensor):
        yield found
    elif depth and isinstance(found, dict):
        for item in list(found.values())[:width]:
            yield from tensors_in(item, depth - 1, width)
    elif depth and isinstance(found, (list, tuple)):
        for item in found[:width]:
            yield from tensors_in(item, depth - 1, width)
