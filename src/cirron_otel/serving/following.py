"""One stream's request: current around each piece of work, ended once.

A stream ends by its last chunk, by an exception, closed or cancelled by whoever reads it, collected
without having been read to its end, or never started at all.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cirron_otel.context import attach_context, get_current
from cirron_otel.scope_core import OPEN
from cirron_otel.serving.state import RequestState

if TYPE_CHECKING:
    from opentelemetry.context import Context

    from cirron_otel.scope_base import BaseScope

COMPLETE, CLOSED, CANCELLED = "complete", "closed", "cancelled"
FAILED, ABANDONED, NOT_STARTED = "error", "abandoned", "not_started"


def end_by(error: BaseException | None) -> str:
    """How a stream ended out of which this came; None: its last chunk was read."""
    if error is None or isinstance(error, (StopIteration, StopAsyncIteration)):
        return COMPLETE
    if isinstance(error, asyncio.CancelledError):
        return CANCELLED
    return CLOSED if isinstance(error, GeneratorExit) else FAILED


class Following(RequestState):
    """What is known of a request that may be a stream: attached around each piece, ended once."""

    __slots__ = ("done", "inside", "owns", "started")

    def __init__(self, scope: BaseScope) -> None:
        super().__init__(scope)
        #: Whether the request ends with the stream; else somebody else ends it.
        self.owns = True
        self.started = self.done = False
        #: The stream's own context, where its body has changed it.
        self.inside: Context | None = None

    def attach(self) -> tuple[Context, Context] | None:
        """Make the request current; the context before, and the one in its place."""
        if self.done or self.scope._state != OPEN:  # noqa: SLF001 - a scope's own kind
            return None
        before = get_current()
        mine = self.inside
        if mine is None:
            mine = self.scope.attached(before)
        attach_context(mine)
        return before, mine

    def detach(self, attached: tuple[Context, Context] | None, *, leaving: bool = False) -> None:
        """Put the consumer's context back.

        ``leaving``: the piece of work was thrown away, perhaps in another context.
        """
        if attached is None:
            return
        before, mine = attached
        now = get_current()
        if now is mine:
            attach_context(before)
        elif not leaving:
            self.inside = now
            attach_context(before)

    def step(self, call: Callable[..., Any], alive: Callable[[], bool], *args: Any) -> Any:  # noqa: ANN401
        """One piece of the stream: ``call(*args)``, which gives a chunk or ends it."""
        attached = self.attach()
        self.started = True
        try:
            chunk = call(*args)
        except BaseException as error:
            self.detach(attached)
            self.ended_by(error, alive=alive())
            raise
        self.detach(attached)
        if attached is not None:
            self.note_chunk(chunk)
        return chunk

    async def async_step(
        self,
        call: Callable[..., Any],
        alive: Callable[[], bool],
        *args: Any,
    ) -> Any:  # noqa: ANN401 - a chunk
        """The same, where the chunk is awaited."""
        attached = self.attach()
        self.started = True
        try:
            chunk = await call(*args)
        except BaseException as error:
            self.detach(attached, leaving=isinstance(error, GeneratorExit))
            self.ended_by(error, alive=alive())
            raise
        self.detach(attached)
        if attached is not None:
            self.note_chunk(chunk)
        return chunk

    def ended_by(self, error: BaseException, *, alive: bool = False) -> None:
        """An exception came out of the stream; ``alive``: which can go on all the same."""
        if alive:
            return
        how = end_by(error)
        self.end(how, error if how in {CANCELLED, FAILED} else None)

    def end(self, how: str, error: BaseException | None = None) -> None:
        """End the request, once."""
        if self.done:
            return
        self.done = True
        self.inside = None
        if how in {CLOSED, ABANDONED} and not self.started:
            how = NOT_STARTED
        self.stream_end = how
        scope: Any = self.scope
        if not self.owns:
            # Whoever reads it may make a whole answer of it all the same.
            if error is not None:
                scope.note_inner(error)
            return
        error_type, message = None, ""
        if how == CLOSED:
            error_type, message = "GeneratorExit", "the stream was closed before its end"
        elif how == ABANDONED:
            error_type, message = ABANDONED, "the stream was dropped before its end"
        scope.finish(error, error_type=error_type, message=message)

    def dropped(self) -> None:
        """Nobody can read it any more. From a finalizer, on any thread: never raises."""
        try:
            self.end(ABANDONED)
        except Exception:  # noqa: BLE001 - in a finalizer there is nobody to raise to
            self.scope._rec.guard.swallowed["request.dropped"] += 1  # noqa: SLF001
