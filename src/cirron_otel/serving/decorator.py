"""``@ci.inference``: each call of a function is a request.

Kind, signature, result and exceptions stay the function's own. A result that is a stream, a
generator that the function made or a stream of a known library, is followed to its end; every other
result is returned as it is, files and iterators included. Decorating imports nothing.
"""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import wrapt

from cirron_otel import semconv
from cirron_otel._guard import logger
from cirron_otel.errors import ConfigurationError
from cirron_otel.serving import gen_ai
from cirron_otel.serving.callers import Headers
from cirron_otel.serving.calls import Call
from cirron_otel.serving.options import checked_function
from cirron_otel.serving.redaction import Content, Redact

_F = TypeVar("_F", bound=Callable[..., Any])
_Function = Callable[..., Any]

_CONFIG = frozenset({"stream_chunk_timing"})


@overload
def inference(fn: _F, /) -> _F: ...
@overload
def inference(
    *,
    config: Mapping[str, Any] | None = None,
    name: str = semconv.REQUEST,
    model: str | None = None,
    operation: str | None = None,
    provider: str | None = None,
    headers: Callable[..., Headers | None] | None = None,
    request_id: Callable[..., str | None] | None = None,
    token_counter: Callable[[Any], int] | None = None,
    record_content: bool = False,
    redact: Redact | None = None,
    **attrs: Any,
) -> Callable[[_F], _F]: ...
def inference(  # noqa: PLR0913 - what a request is
    fn: Any = None,
    /,
    *,
    config: Mapping[str, Any] | None = None,
    name: str = semconv.REQUEST,
    model: str | None = None,
    operation: str | None = None,
    provider: str | None = None,
    headers: Callable[..., Headers | None] | None = None,
    request_id: Callable[..., str | None] | None = None,
    token_counter: Callable[[Any], int] | None = None,
    record_content: bool = False,
    redact: Redact | None = None,
    **attrs: Any,
) -> Any:
    """Make each call of a function a ``request``: ``@ci.inference`` or ``@ci.inference(...)``.

    For functions, coroutine functions, generators and async generators, methods of every kind.
    A generator's request begins with the call and ends with its last chunk, and so does that of a
    function that returns a stream.

    ``config``: ``{"stream_chunk_timing": True}`` leaves a mark ``chunk_ms`` for each chunk.
    ``model``, ``operation`` and ``provider`` become the ``gen_ai.*`` attributes of those names.
    ``headers`` and ``request_id`` are called with the call's arguments and return the headers of
    the caller (its trace and its ``x-request-id``), and an id. ``token_counter`` is called with
    each chunk of a stream and returns its tokens, for streams that do not say. With
    ``record_content`` what the call was given and what it gave, the first 64 KiB of each, become
    attributes, after ``redact("input" or "output", text)``. Every other keyword is an attribute.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for what cannot be decorated, when it is
    decorated; a decorated call raises and blocks exactly as the function does.
    """
    call = Call(
        name,
        {**gen_ai.start_attributes(model=model, operation=operation, provider=provider), **attrs},
        dict(_checked(config)),
        headers=checked_function("ci.inference(headers=...)", headers),
        request_id=checked_function("ci.inference(request_id=...)", request_id),
        token_counter=checked_function("ci.inference(token_counter=...)", token_counter),
        content=Content(
            record=record_content, redact=checked_function("ci.inference(redact=...)", redact)
        ),
    )
    return functools.partial(_decorated, call) if fn is None else _decorated(call, fn)


def _checked(config: object) -> Mapping[str, Any]:
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise ConfigurationError(
            f"ci.inference(config=...) takes a mapping such as {{'stream_chunk_timing': True}}, "
            f"not {type(config).__name__}"
        )
    unknown = sorted(str(key) for key in config if key not in _CONFIG)
    if unknown:
        logger.warning(
            "cirron-otel: ci.inference(config=...) does not know %s; it knows %s",
            ", ".join(unknown), ", ".join(sorted(_CONFIG)),
        )  # fmt: skip
    return config


def _decorated(call: Call, fn: Any) -> Any:  # noqa: ANN401 - the function's own kind
    """``fn``, each call of it a request."""
    if isinstance(fn, (staticmethod, classmethod)):
        return type(fn)(_decorated(call, fn.__func__))
    if isinstance(fn, type) or not callable(fn):
        what = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
        raise ConfigurationError(
            f"ci.inference decorates a function or a method, not {what}; "
            "options are given by name: @ci.inference(model='m')"
        )
    inner = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else fn.__call__
    if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
        return _StreamFunction(fn, call)
    made: Any = (_coroutine if inspect.iscoroutinefunction(inner) else _function)(fn, call)
    made._cirron_config = call.config  # noqa: SLF001 - its documented name in cirron-sdk
    return made


def _function(fn: _Function, call: Call) -> _Function:
    begin, returned, plain = call.opener(fn), call.returned, call.plain

    @functools.wraps(fn)
    def function(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        scope = begin(args, kwargs)
        if scope is None:
            return fn(*args, **kwargs)
        try:
            result = fn(*args, **kwargs)
        except BaseException as error:
            scope.__exit__(type(error), error, error.__traceback__)
            raise
        if type(result) in plain:
            scope.__exit__(None, None, None)
            return result
        return returned(scope, result, args, kwargs)

    return function


def _coroutine(fn: _Function, call: Call) -> _Function:
    begin, returned, plain = call.opener(fn), call.returned, call.plain

    @functools.wraps(fn)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - the function's own
        scope = begin(args, kwargs)
        if scope is None:
            return await fn(*args, **kwargs)
        try:
            result = await fn(*args, **kwargs)
        except BaseException as error:
            scope.__exit__(type(error), error, error.__traceback__)
            raise
        if type(result) in plain:
            scope.__exit__(None, None, None)
            return result
        return returned(scope, result, args, kwargs)

    return coroutine


class _StreamMethod(wrapt.BoundFunctionWrapper):  # type: ignore[misc,type-arg,unused-ignore]
    """The same as the method of an object; it is copied and pickled as methods are."""

    @property
    def _cirron_config(self) -> Any:  # noqa: ANN401 - a dict
        return self._self_parent._cirron_config  # noqa: SLF001 - as below

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as pickle has it
        """The object, and the name of its method; of a class as the function."""
        held = getattr(self.__wrapped__, "__self__", None)
        if held is None:
            return self._self_parent.__reduce_ex__(protocol)
        return getattr, (held, self.__wrapped__.__name__)

    def __copy__(self) -> _StreamMethod:
        """Itself, as of any method."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - the method of the copy
        """The method of a copy of its object."""
        held = getattr(self.__wrapped__, "__self__", None)
        if held is None:
            return self
        return getattr(copy.deepcopy(held, memo), self.__wrapped__.__name__)


class _StreamFunction(wrapt.FunctionWrapper):  # type: ignore[misc,type-arg,unused-ignore]
    """A generator function that is one still for whoever asks, and whose request begins at once."""

    __bound_function_wrapper__ = _StreamMethod

    def __init__(self, fn: _Function, call: Call) -> None:
        self._self_call = call
        begin, is_bound = call.opener(fn), inspect.ismethod(fn)

        def stream(
            wrapped: _Function,
            instance: object,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Any:  # noqa: ANN401 - the generator, followed
            given = args if instance is None or is_bound else (instance, *args)
            scope = begin(given, kwargs, attach=False)
            if scope is None:
                return wrapped(*args, **kwargs)
            try:
                made = wrapped(*args, **kwargs)
            except BaseException as error:
                scope.finish(error)
                raise
            return call.follow(scope, made)

        super().__init__(fn, stream)

    @property
    def _cirron_config(self) -> dict[str, Any]:
        # Not set as an attribute: that would be the user's function's.
        return self._self_call.config

    def __copy__(self) -> _StreamFunction:
        """Itself, as of any function."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> _StreamFunction:
        """Itself, as of any function."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as pickle has it
        """By name, as any function; where there is no such name, by its parts."""
        found = _named(self.__module__, self.__qualname__)
        if found is self:
            return self.__qualname__
        if isinstance(found, _StreamMethod) and found._self_parent is self:  # noqa: SLF001 - wrapt's
            return _named, (self.__module__, self.__qualname__)
        return _StreamFunction, (self.__wrapped__, self._self_call)


def _named(module: str, path: str) -> Any:  # noqa: ANN401 - whatever has the name
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found
