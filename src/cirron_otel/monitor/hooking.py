"""Hooks on a model's modules that come and go, and vanish from copies and from compiled code.

A hook is there only while a check wants to see the forward pass; between checks the modules are as
the user made them. ``copy.deepcopy``, pickling and ``torch.save`` of a hooked model give a model
whose hooks do nothing, and which loads where this package is not installed. A hook keeps nobody
alive: a monitor that is dropped goes, and its hooks with it, though the model stays.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling

from cirron_otel._guard import Guard
from cirron_otel.monitor.scripting import Scripting

if TYPE_CHECKING:
    from torch.utils.hooks import RemovableHandle

See = Callable[..., object]


class Hook:
    """A hook that calls ``see`` and swallows what that raises; its copies do nothing.

    ``see`` is a bound method, whose object is held weakly; ``more`` are arguments that come before
    torch's. ``where`` is the name under which the guard counts what was swallowed.
    """

    __slots__ = ("_guard", "_more", "_see", "_where")

    def __init__(
        self, see: See, guard: Guard, where: str = "monitor.hook", more: tuple[Any, ...] = ()
    ) -> None:
        self._see = weakref.WeakMethod(see)
        self._guard = guard
        self._where = where
        self._more = more

    def __call__(self, *args: Any) -> None:
        """What torch calls. Returns None: nothing is changed."""
        # What it does would become part of the graph.
        if is_dynamo_compiling() or torch._C._is_tracing():  # noqa: SLF001 - torch.jit.is_tracing
            return
        see = self._see()
        if see is None:
            return
        try:
            see(*self._more, *args)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._guard.swallow(self._where, error)

    def __reduce__(self) -> tuple[Any, ...]:
        """A callable of the standard library that takes anything and gives None."""
        return getattr, (contextlib.nullcontext(), "__exit__")


class Hooks:
    """Hooks that are put in place and taken away together, at the latest with this object."""

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        self._handles: list[RemovableHandle] = []
        weakref.finalize(self, _remove, self._handles).atexit = False

    def before(self, module: nn.Module, see: See, *more: object) -> None:
        """Call ``see(*more, module, args)`` before each forward of ``module``."""
        hook = Hook(see, self._guard, more=more)
        self._add(module.register_forward_pre_hook(hook))

    def after(self, module: nn.Module, see: See, *more: object) -> None:
        """Call ``see(*more, module, args, output)`` after each forward of ``module``."""
        hook = Hook(see, self._guard, more=more)
        self._add(module.register_forward_hook(hook))

    def _add(self, handle: RemovableHandle) -> None:
        if not self._handles:
            scripting.hold()
        self._handles.append(handle)

    def remove(self) -> None:
        """Take all away."""
        _remove(self._handles)

    def __bool__(self) -> bool:
        """Whether any is in place."""
        return bool(self._handles)


def _remove(handles: list[RemovableHandle]) -> None:
    if handles:
        scripting.release()
    for handle in handles:
        handle.remove()
    handles.clear()


#: Of this process: see there.
scripting = Scripting(lambda hook: isinstance(hook, Hook))


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
