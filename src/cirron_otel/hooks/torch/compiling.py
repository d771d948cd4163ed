"""``compile``: when ``torch.compile`` works, seen through the callbacks of its own.

What was compiled in a step makes it no measure of the others: it is tagged ``warmup``. A later
compilation, of other shapes say, is seen the same way.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.imports import when_imported
from cirron_otel.scope_base import BaseScope, current_scope

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

_MODULE = "torch._dynamo.callback"
#: Where a backward is compiled on a thread of autograd's: the scope that waits for it.
_PLACES = (semconv.BACKWARD, semconv.FORWARD, semconv.STEP)


class Compiles:
    """The callbacks of one recording. They run on the thread that compiles, and never raise."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._active = False
        self._handler: Any = None
        self._began_ns = 0

    def begin(self) -> None:
        """Listen to the compiler, as soon as it is loaded: that takes seconds, never because of us.

        Where a version of torch has no such callbacks there is nothing to listen to.
        """
        self._active = True
        when_imported(_MODULE, self._listen)

    def end(self) -> None:
        """Listen no more."""
        self._active = False
        handler, self._handler = self._handler, None
        if handler is not None:
            for callbacks, ours in (
                (handler.start_callbacks, self._started),
                (handler.end_callbacks, self._ended),
            ):
                if ours in callbacks:
                    callbacks.remove(ours)

    def _listen(self, module: Any) -> None:  # noqa: ANN401 - a module
        handler = getattr(module, "callback_handler", None)
        if not self._active or self._handler is not None or handler is None:
            return
        try:
            handler.register_start_callback(self._started)
            handler.register_end_callback(self._ended)
            self._handler = handler
        except Exception as error:  # noqa: BLE001 - another version's handler
            self._rec.guard.swallow("torch.compile", error)

    def _started(self, *_: object) -> None:
        try:
            self._began_ns = self._rec.clock.now()
            scope = self._place()
            while scope is not None and scope.name != semconv.STEP:
                scope = scope.above
            if scope is not None:
                scope.attrs = {**scope.attrs, semconv.WARMUP: True}
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.compile", error)

    def _ended(self, *_: object) -> None:
        try:
            began_ns, self._began_ns = self._began_ns, 0
            scope = self._place()
            if began_ns and scope is not None and self._rec.active:
                scope.add_closed(semconv.COMPILE, began_ns, max(began_ns, self._rec.clock.now()))
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.compile", error)

    def _place(self) -> BaseScope | None:
        rec = self._rec
        scope = current_scope(rec, get_current())
        if scope is not None and scope is not rec.session:
            return scope
        waiting = [one for one in list(rec.open.values()) if one.name in _PLACES]
        return max(waiting, key=lambda one: one.depth, default=scope)
