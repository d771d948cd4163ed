"""Functions of every kind with a scope around each call.

Kind, signature, result and exceptions stay the function's own. A generator keeps its scope open
between its runs, but attached only while it runs: what the program does between two items is not
inside it.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

from cirron_otel.context import attach_context, get_current
from cirron_otel.scope_base import BaseScope

if TYPE_CHECKING:
    from types import TracebackType

    from opentelemetry.context import Context

_Make = Callable[[], Any]
_Function = Callable[..., Any]
_F = TypeVar("_F", bound=_Function)


def decorated(fn: _F, make: _Make) -> _F:
    """``fn`` in a scope: ``make()`` returns the one for a call."""
    if inspect.isasyncgenfunction(fn):
        kind = _async_generator
    elif inspect.iscoroutinefunction(fn):
        kind = _coroutine
    elif inspect.isgeneratorfunction(fn):
        kind = _generator
    else:
        kind = _function
    return cast("_F", kind(fn, make))


def _function(fn: _Function, make: _Make) -> _Function:
    @functools.wraps(fn)
    def function(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        with make():
            return fn(*args, **kwargs)

    return function


def _coroutine(fn: _Function, make: _Make) -> _Function:
    @functools.wraps(fn)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        with make():
            return await fn(*args, **kwargs)

    return coroutine


def _generator(fn: _Function, make: _Make) -> _Function:
    @functools.wraps(fn)
    def generator(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        inner = fn(*args, **kwargs)
        send: Any = None
        throw: BaseException | None = None
        with _Held(make()) as running:
            try:
                while True:
                    with running:
                        try:
                            item = inner.send(send) if throw is None else inner.throw(throw)
                        except StopIteration as stop:
                            return stop.value
                    throw = None
                    try:
                        send = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - it is the generator's
                        throw, send = error, None
            finally:
                with running:
                    inner.close()

    return generator


def _async_generator(fn: _Function, make: _Make) -> _Function:
    @functools.wraps(fn)
    async def generator(*args: Any, **kwargs: Any) -> AsyncIterator[Any]:
        inner = fn(*args, **kwargs)
        send: Any = None
        throw: BaseException | None = None
        with _Held(make()) as running:
            try:
                while True:
                    with running:
                        try:
                            item = await (
                                inner.asend(send) if throw is None else inner.athrow(throw)
                            )
                        except StopAsyncIteration:
                            return
                    throw = None
                    try:
                        send = yield item
                    except GeneratorExit:
                        raise
                    except BaseException as error:  # noqa: BLE001 - it is the generator's
                        throw, send = error, None
            finally:
                with running:
                    await inner.aclose()

    return generator


class _Held:
    """A scope held open by a generator: attached only while the generator runs."""

    __slots__ = ("_scope",)

    def __init__(self, held: Any) -> None:  # noqa: ANN401 - any kind of scope
        self._scope = held

    def __enter__(self) -> _Running:
        held = self._scope
        if isinstance(held, BaseScope):
            try:
                held.open(attach=False)
            except Exception as error:  # noqa: BLE001 - see _guard
                held._rec.guard.swallow("scope.enter", error)  # noqa: SLF001
        return _Running(held)

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        held = self._scope
        if isinstance(held, BaseScope) and held.is_open:
            try:
                held.close(exc=exc, restore=False)
            except Exception as error:  # noqa: BLE001 - see _guard
                held._rec.guard.swallow("scope.exit", error)  # noqa: SLF001


class _Running:
    """Attaches a held scope around each run of its generator."""

    __slots__ = ("_before", "_mine", "_scope")

    def __init__(self, held: Any) -> None:  # noqa: ANN401 - any kind of scope
        self._scope = held
        self._before: Context | None = None
        self._mine: Context | None = None

    def __enter__(self) -> None:
        held = self._scope
        if isinstance(held, BaseScope) and held.is_open:
            self._before = get_current()
            self._mine = held.attached(self._before)
            attach_context(self._mine)

    def __exit__(self, *exc_info: object) -> None:
        if self._before is not None and get_current() is self._mine:
            attach_context(self._before)
        self._before = None
