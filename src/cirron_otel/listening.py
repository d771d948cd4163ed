"""Who else is called while a recording goes on: when scopes open, end or fail, and at its own end.

While somebody listens to scopes, every scope takes the general path (see
``Recorder.refresh_busy``); listening to errors costs the hot path nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from cirron_otel._guard import Guard
    from cirron_otel.scope_base import BaseScope


class ScopeListener(Protocol):
    """What is told of the scopes that become current. On the thread of the scope."""

    def opened(self, scope: BaseScope) -> None:
        """The scope is open and current."""

    def closed(self, scope: BaseScope) -> None:
        """The scope has ended. Also told of scopes whose opening was not seen."""


class Listening:
    """The listeners of a recorder, and telling them; whatever they raise stays here (see _guard).

    ``at_error`` and ``at_end`` are only ever changed in place.
    """

    __slots__ = ("_guard", "at_end", "at_error", "scopes")

    def __init__(self, guard: Guard) -> None:
        self._guard = guard
        #: Told of scopes; changed by :meth:`Recorder.listen` and ``Recorder.listen_no_more``.
        self.scopes: tuple[ScopeListener, ...] = ()
        #: Called with a scope and the exception that passes through its end, on its thread.
        self.at_error: list[Callable[[BaseScope, BaseException], object]] = []
        #: Called when the recording has ended, the last one first, on the thread that ends it.
        self.at_end: list[Callable[[], object]] = []

    def opened(self, scope: BaseScope) -> None:
        """Tell of a scope that was opened."""
        for listener in self.scopes:
            self._call("listening.opened", listener.opened, scope)

    def closed(self, scope: BaseScope) -> None:
        """Tell of a scope that has ended."""
        for listener in self.scopes:
            self._call("listening.closed", listener.closed, scope)

    def failed(self, scope: BaseScope, exc: BaseException) -> None:
        """Tell of an exception that ends a scope."""
        for call in tuple(self.at_error):
            self._call("listening.error", call, scope, exc)

    def ended(self) -> None:
        """Tell of the recording's end, once."""
        while self.at_end:
            self._call("listening.end", self.at_end.pop())

    def forget(self) -> None:
        """In a forked child nobody listens; what was patched is undone there too at its end."""
        self.scopes = ()
        self.at_error.clear()

    def _call(self, place: str, call: Callable[..., object], *args: object) -> None:
        try:
            call(*args)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._guard.swallow(place, error)
