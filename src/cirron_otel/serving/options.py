"""What both middlewares are told, and what any function that a user gives has to be."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.errors import ConfigurationError
from cirron_otel.serving import gen_ai
from cirron_otel.serving.callers import header_of, text_of_header
from cirron_otel.serving.redaction import Content, Redact

if TYPE_CHECKING:
    from cirron_otel.serving.requests import JoinedRequest, RequestSpan

#: Who a request is answered for: the name of a header, or a function of the server's request.
Tenant = str | Callable[[Any], str | None]

_MAX_TENANT = 256


def checked_function(what: str, value: Any) -> Any:  # noqa: ANN401 - a function or None
    """A function that is called in passing; ``what`` is how it was given, ``"redact=..."``.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for what cannot be called, or would have
    to be awaited.
    """
    if value is None:
        return None
    if not callable(value):
        raise ConfigurationError(f"{what} takes a function, not {type(value).__name__}")
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__):
        raise ConfigurationError(
            f"{what} takes a plain function: its answer is needed at once, and an `async def` "
            "would never be awaited"
        )
    return value


class Options:
    """What both middlewares are told; see :class:`~cirron_otel.CirronMiddleware`."""

    def __init__(  # noqa: PLR0913 - each has its own name
        self,
        *,
        exclude: Iterable[str] = (),
        operation: str | None = None,
        provider: str | None = None,
        model: str | None = None,
        tenant: Tenant | None = None,
        token_counter: Callable[[Any], int] | None = None,
        record_content: bool = False,
        redact: Redact | None = None,
    ) -> None:
        if isinstance(exclude, str):
            raise ConfigurationError(f"exclude= must be a list of paths: exclude=[{exclude!r}]")
        paths = [str(path) for path in exclude]
        self._paths = frozenset(path for path in paths if not path.endswith("*"))
        self._prefixes = tuple(path[:-1] for path in paths if path.endswith("*"))
        self.attrs = gen_ai.start_attributes(model=model, operation=operation, provider=provider)
        if isinstance(tenant, str):
            self.tenant: Tenant | None = tenant.lower()
        else:
            self.tenant = checked_function("tenant=... (or the name of a header)", tenant)
        self.token_counter = checked_function("token_counter=...", token_counter)
        self.content = Content(record=record_content, redact=checked_function("redact=...", redact))

    def leaves_out(self, path: str) -> bool:
        """Whether requests for a path are none of ours."""
        return path in self._paths or bool(self._prefixes and path.startswith(self._prefixes))

    def note_tenant(
        self,
        request: RequestSpan | JoinedRequest,
        asked: object,
        headers: Iterable[tuple[Any, Any]],
    ) -> None:
        """Say on a request for whom it is answered. Never raises.

        ``asked`` is what a function given as ``tenant`` gets.
        """
        tenant = self.tenant
        if tenant is None:
            return
        try:
            found = header_of(headers, tenant) if isinstance(tenant, str) else tenant(asked)
            if found is not None and found not in {"", b""}:
                request.clean = None
                said = text_of_header(found)[:_MAX_TENANT]
                request.attrs = {**request.attrs, semconv.TENANT: said}
        except Exception as error:  # noqa: BLE001 - the function is the user's
            guard = request._rec.guard  # noqa: SLF001 - a scope's own kind
            guard.repeat_warning("tenant", f"tenant= raised {error!r}; the request has no tenant")
