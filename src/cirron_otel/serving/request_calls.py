"""What a request decorates: each call of it is a request of its own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.decorators import decorated

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TypeVar

    from cirron_otel.serving.idle_request import IdleRequest
    from cirron_otel.serving.request_scope import RequestMethods

    _F = TypeVar("_F", bound=Callable[..., Any])


class _Again:
    """How another request is made: :mod:`cirron_otel.serving.requests` says it."""

    make: Callable[[str, Mapping[str, Any]], Any]


def made_by(make: Callable[[str, Mapping[str, Any]], Any]) -> None:
    """Have ``make(name, attrs)`` make the requests of what a request decorates."""
    _Again.make = make


def each_call(fn: _F, like: RequestMethods | IdleRequest) -> _F:
    """``fn``, each call of it a request like this one."""
    given = {key: value for key, value in like.attrs.items() if key != semconv.REQUEST_ID}
    name, make = like.name, _Again.make
    return decorated(fn, lambda: make(name, given))
