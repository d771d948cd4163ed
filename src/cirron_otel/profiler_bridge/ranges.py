"""Scopes as ranges of ``record_function`` or of NVTX: ``profile(mirror=...)``.

Ranges of a thread nest, as viewers of such traces demand, whatever order scopes end in: one that
ends before what was opened inside it ends that too.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.scope_base import BaseScope

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder


class _Ranges(threading.local):
    """The scopes that are shown on one thread, outermost first, with what ends their ranges."""

    def __init__(self) -> None:
        self.open: list[tuple[BaseScope, Callable[[], object]]] = []


class Mirror:
    """Shows scopes as ranges while they are open. A :class:`~cirron_otel.listening.ScopeListener`.

    Where an event loop runs, tasks take turns on one thread and their scopes do not nest: there
    nothing is shown.
    """

    def __init__(self, rec: Recorder, kind: str) -> None:
        self._rec = rec
        self._begin = {"record_function": _record_function, "nvtx": _nvtx}[kind]
        self._here = _Ranges()
        #: Whether a step is shown in a range of the name that analysers of traces look for, too.
        self._names_steps = kind == "record_function"

    def opened(self, scope: BaseScope) -> None:
        """Begin a range, if there is a torch to show it."""
        torch: Any = sys.modules.get("torch")
        if getattr(torch, "profiler", None) is None or _in_event_loop():
            return
        self._drop_ended()
        label = scope.name if scope.index is None else f"{scope.name}[{scope.index}]"
        try:
            if self._names_steps and scope.name == semconv.STEP:
                number = scope.iteration if type(scope.iteration) is int else scope.index
                self._push(scope, self._begin(torch, f"ProfilerStep#{number}"))
            self._push(scope, self._begin(torch, label))
        except RuntimeError as error:  # a torch without NVTX
            self._rec.guard.warn("mirror", f"scopes are not mirrored: {error}")
            self._rec.listen_no_more(self)

    def closed(self, scope: BaseScope) -> None:
        """End the scope's range, and those that were begun inside it."""
        ranges = self._here.open
        if any(one is scope for one, _ in ranges):
            while ranges and any(one is scope for one, _ in ranges):
                ranges.pop()[1]()

    def end(self) -> None:
        """End all ranges of this thread."""
        while self._here.open:
            self._here.open.pop()[1]()

    def _drop_ended(self) -> None:
        """End the ranges of scopes that another thread has ended."""
        ranges = self._here.open
        while ranges and not ranges[-1][0].is_open:
            ranges.pop()[1]()

    def _push(self, scope: BaseScope, end: Callable[[], object]) -> None:
        self._here.open.append((scope, end))


def _record_function(torch: Any, label: str) -> Callable[[], object]:  # noqa: ANN401 - the module
    shown = torch.profiler.record_function(label)
    shown.__enter__()
    return functools.partial(shown.__exit__, None, None, None)


def _nvtx(torch: Any, label: str) -> Callable[[], object]:  # noqa: ANN401 - the module
    torch.cuda.nvtx.range_push(label)
    return torch.cuda.nvtx.range_pop  # type: ignore[no-any-return]


def _in_event_loop() -> bool:
    module: Any = sys.modules.get("asyncio")  # where it was not imported no loop runs
    if getattr(module, "get_running_loop", None) is None:
        return False
    try:
        module.get_running_loop()
    except RuntimeError:
        return False
    return True
