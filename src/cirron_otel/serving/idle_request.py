"""A request while nothing is recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.scopes import IdleScope
from cirron_otel.serving.request_calls import each_call

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Self, TypeVar

    _F = TypeVar("_F", bound=Callable[..., Any])


class IdleRequest(IdleScope):
    """A request while nothing is recorded: it has its id, and everything else does nothing."""

    __slots__ = ()

    @property
    def request_id(self) -> str:
        """The caller's ``x-request-id``, or a new one."""
        return str(self.attrs.get(semconv.REQUEST_ID, ""))

    def mark(self, name: str, value: object, /, *, kind: str = "point", **attrs: Any) -> None:
        """Do nothing."""

    def chunk(self, value: object = None) -> None:
        """Do nothing."""

    def result(self, value: object) -> None:
        """Do nothing."""

    def fail(self, error_type: str, message: str = "") -> None:
        """Do nothing."""

    def finish(
        self,
        error: BaseException | None = None,
        *,
        error_type: str | None = None,
        message: str = "",
    ) -> None:
        """Do nothing."""

    def running(self) -> Self:
        """Itself: a ``with`` block that does nothing."""
        return self

    def release(self) -> None:
        """Do nothing."""

    def __call__(self, fn: _F) -> _F:
        """Each call of ``fn`` is a request of its own, once something is recorded."""
        return each_call(fn, self)
