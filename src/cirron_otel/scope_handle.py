"""What ``ci.scope()`` returns, for type checkers: one shape, whether anything records or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.trace import SpanContext, Status, StatusCode
    from opentelemetry.util.types import Attributes

_F = TypeVar("_F", bound=Callable[..., Any])


class ScopeHandle(Protocol):
    """A scope as a program uses it: context manager, decorator, OpenTelemetry span.

    Nothing here raises or blocks. While nothing is recorded the methods do nothing.
    """

    @property
    def id(self) -> str | None:
        """Spool id, 32 hex, from the time the scope opens; None while nothing is recorded."""

    @property
    def name(self) -> str:
        """The name it is recorded under."""

    @property
    def index(self) -> int | None:
        """Its number among its siblings."""

    @property
    def attrs(self) -> dict[str, Any]:
        """Its attributes; may be changed until it ends."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
        /,
    ) -> None: ...

    def __call__(self, fn: _F, /) -> _F:
        """Decorate ``fn``: each call is a scope of its own."""

    def set_attribute(self, key: str, value: object) -> None:
        """Set one attribute."""

    def set_attributes(self, attributes: Mapping[str, object]) -> None:
        """Set several attributes."""

    def add_event(
        self, name: str, attributes: Attributes = None, timestamp: int | None = None
    ) -> None:
        """Add a span event; ``timestamp`` in ns since the epoch, default now."""

    def add_link(self, context: SpanContext, attributes: Attributes = None) -> None:
        """Add a link to another span."""

    def update_name(self, name: str) -> None:
        """Rename it."""

    def set_status(self, status: Status | StatusCode, description: str | None = None) -> None:
        """Set the status: OK is final."""

    def record_exception(
        self,
        exception: BaseException,
        attributes: Attributes = None,
        timestamp: int | None = None,
        escaped: bool = False,  # noqa: FBT001, FBT002 - OTel's signature
    ) -> None:
        """Record an exception as a span event."""

    def is_recording(self) -> bool:
        """Whether it takes attributes and events."""

    def get_span_context(self) -> SpanContext:
        """Trace id, span id and flags; the invalid context while nothing is recorded."""
