"""Requests that are computed together: one ``batch`` scope, linked to each of them.

A service that gathers requests and runs the model once has one piece of work with many causes, so
it can be the child of none. Its scope stands under the session, or where it is opened, links to
the span of every request in it, and every request that is still open gets a link back.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from opentelemetry import propagate
from opentelemetry import trace as otel_trace
from opentelemetry.trace import Link, SpanContext

from cirron_otel import semconv
from cirron_otel.scope_base import BaseScope, Extra
from cirron_otel.scopes import scope
from cirron_otel.serving.callers import read_caller
from cirron_otel.serving.state import RequestState

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Self

    from cirron_otel.scope_handle import ScopeHandle

_MAX_LINKS = 1024


class RequestBatch:
    """What :func:`request_batch` returns: a context manager, sync and async."""

    __slots__ = ("_members", "_scope")

    def __init__(self, made: ScopeHandle, members: list[object]) -> None:
        self._scope = made
        self._members = members

    def __enter__(self) -> ScopeHandle:
        """Open the scope; it becomes current."""
        made: Any = self._scope
        if isinstance(made, BaseScope):
            rec = made._rec  # noqa: SLF001 - a scope's own kind
            try:
                self._link(made)
            except Exception as error:  # noqa: BLE001 - see _guard
                rec.guard.swallow("request_batch", error)
        return made  # type: ignore[no-any-return]

    def _link(self, made: Any) -> None:  # noqa: ANN401 - one of our scopes
        links = []
        opened = []
        for member in self._members[:_MAX_LINKS]:
            span = span_context(member)
            if span is not None and span.is_valid:
                links.append(Link(span))
            if isinstance(member, RequestState):
                opened.append(member.scope)
            elif isinstance(member, BaseScope):
                opened.append(member)
        extra = made.extra = made.extra or Extra()
        extra.links = [*extra.links, *links]
        extra.dropped_links += max(0, len(self._members) - _MAX_LINKS)
        made.__enter__()
        back = made.get_span_context()
        for one in opened if back.is_valid else ():
            if one.is_open:
                one.add_link(back)  # type: ignore[attr-defined] # every scope is a span

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the scope; an exception is recorded and flies on."""
        made: Any = self._scope
        made.__exit__(exc_type, exc, tb)

    async def __aenter__(self) -> Self | ScopeHandle:
        """As :meth:`__enter__`."""
        return self.__enter__()

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """As :meth:`__exit__`."""
        self.__exit__(exc_type, exc, tb)


def request_batch(requests: Iterable[object], **attrs: Any) -> RequestBatch:
    """One computation for several requests: ``with ci.request_batch(requests): model(inputs)``.

    ``requests`` are what ``ci.current_request()`` gave in each of them, or what ``ci.request()``
    did, or span contexts, or headers with a ``traceparent``; what is none of these counts, but is
    not linked. The scope is named ``batch`` and says their number as ``dl.batch_size``; other
    keywords are its attributes. At most 1,024 are linked. Never raises, never blocks, any thread.
    """
    members = list(requests)
    return RequestBatch(
        scope(semconv.BATCH, **{semconv.BATCH_SIZE: len(members), **attrs}), members
    )


def trace_headers() -> dict[str, str]:
    """The headers that carry the current request's trace to whoever is asked next.

    ``traceparent`` and what else the application's propagator writes; empty where no span is
    current. For engines and services that no instrumentation passes them to.
    """
    headers: dict[str, str] = {}
    propagate.inject(headers)
    return headers


def span_context(member: object) -> SpanContext | None:
    """The span that stands for a request, however it is given; None where nothing does."""
    if isinstance(member, SpanContext):
        return member
    if isinstance(member, RequestState):
        return _of(member.scope)
    if isinstance(member, (BaseScope, otel_trace.Span)):
        return _of(member)
    if isinstance(member, (dict, list, tuple)):
        return read_caller(member).span
    return None


def _of(span: Any) -> SpanContext | None:  # noqa: ANN401 - a scope or a span
    found = span.get_span_context()
    return found if isinstance(found, SpanContext) else None
