"""What a program does with torch before its first step: see :mod:`cirron_otel.run.startup`.

A process group that is set up, data loaders that start their workers, and modules that are made:
these tell of each parameter that they get, through torch's own hook for that, at a time when
nothing is trained yet. Once the first step was made all of it only passes on.
"""

from __future__ import annotations

import functools
import sys
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.data import dataloader

from cirron_otel import semconv

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import FrameType

    from torch.utils.hooks import RemovableHandle

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.recorder import Recorder

_GROUP, _MADE = "init_process_group", "__init__"


class StartupParts:
    """The hooks of one recording; they never raise. Any thread."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._handle: RemovableHandle | None = None
        #: The outermost constructor that runs, how far it and those inside it were, and when it
        #: was first seen.
        self._constructor = 0
        self._reached: list[int] = []
        self._since_ns = 0

    def patch(self, patches: Patches) -> None:
        """Put the hooks in place, where there is a run that starts up."""
        if self._rec.run is None or not self._rec.run.startup.is_going_on:
            return
        workers: Any = dataloader._MultiProcessingDataLoaderIter  # noqa: SLF001 - nothing public has it
        patches.replace(workers, _MADE, self._timed(vars(workers)[_MADE], semconv.LOADER))
        if torch.distributed.is_available():
            c10d = sys.modules["torch.distributed.distributed_c10d"]
            original = vars(c10d)[_GROUP]
            timed = self._timed(original, semconv.INIT)
            for owner in (c10d, torch.distributed):
                if vars(owner).get(_GROUP) is original:
                    patches.replace(owner, _GROUP, timed)
        self._handle = register_module_parameter_registration_hook(self._registered)

    def remove(self) -> None:
        """Take torch's hook away; the patches are the caller's to undo."""
        handle, self._handle = self._handle, None
        if handle is not None:
            handle.remove()

    def _timed(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        rec = self._rec

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            run = rec.run
            if run is None or not run.startup.is_going_on:
                return original(*args, **kwargs)
            start_ns = rec.clock.now()
            try:
                return original(*args, **kwargs)
            finally:
                run.startup.saw(name, start_ns, rec.clock.now())

        return call

    def _registered(self, _module: nn.Module, _name: str, _parameter: object) -> None:
        """A module gets a parameter: inside the constructor of the model, mostly."""
        run = self._rec.run
        if run is None or not run.startup.is_going_on:
            return
        try:
            now = self._rec.clock.now()
            constructor, reached = _constructors()
            # Frames use the memory of others again: what has not gone on is another one.
            if constructor != self._constructor or reached <= self._reached:
                self._since_ns = now
            self._constructor, self._reached = constructor, reached
            run.startup.saw(semconv.MODEL, self._since_ns, now)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.startup", error)


def _constructors() -> tuple[int, list[int]]:
    """The outermost constructor of a module that this thread is in, by the address of its frame.

    And how far it and those inside it are. Nobody asks for the locals of a frame: it would keep
    them until it ends.
    """
    outermost, reached = 0, []
    frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 - documented
    while frame is not None:
        if frame.f_code.co_name == _MADE and _may_be_a_module(frame):
            outermost = id(frame)
            reached.append(frame.f_lasti)
        frame = frame.f_back
    reached.reverse()
    return outermost, reached


def _may_be_a_module(frame: FrameType) -> bool:
    """Whether a constructor is that of a module, as far as its name says: not where it is local."""
    name = frame.f_code.co_qualname.rpartition(".")[0]
    made = frame.f_globals.get(name)
    return not isinstance(made, type) or issubclass(made, nn.Module)
