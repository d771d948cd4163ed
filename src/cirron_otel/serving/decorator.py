"""``@ci.inference``: each call of a function is a request.

Kind, signature, result and exceptions stay the function's own. A result that is a stream, a
generator that the function made or a stream of a known library, is followed to its end; every other
result is returned as it is, files and iterators included. Decorating imports nothing.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, cast, overload

import wrapt

from cirron_otel import recorder, semconv
from cirron_otel._guard import logger
from cirron_otel.context import SCOPE_KEY, get_current
from cirron_otel.errors import ConfigurationError
from cirron_otel.scope_core import OPEN
from cirron_otel.scopes import _in_child
from cirron_otel.serving import gen_ai, streams, usage
from cirron_otel.serving.places import NOBODY, Caller, Headers, read_caller
from cirron_otel.serving.requests import RequestMethods, Requests, requests_of

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

_F = TypeVar("_F", bound=Callable[..., Any])
_Function = Callable[..., Any]

#: Results of these types say nothing of tokens and are no streams.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, set}
)
#: Results of these types say something of tokens at most.
_NO_STREAMS = frozenset({dict, list, tuple})
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
    each chunk of a stream and returns its tokens, for streams that do not say. Every other keyword
    is an attribute.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for what cannot be decorated, when it is
    decorated; a decorated call raises and blocks exactly as the function does.
    """
    call = _Call(
        name,
        {**gen_ai.start_attributes(model=model, operation=operation, provider=provider), **attrs},
        dict(_checked(config)),
        headers=_callable("headers", headers),
        request_id=_callable("request_id", request_id),
        token_counter=_callable("token_counter", token_counter),
    )
    return call.decorate if fn is None else call.decorate(fn)


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


def _callable(what: str, value: Any) -> Any:  # noqa: ANN401 - a function or None
    if value is not None and not callable(value):
        raise ConfigurationError(
            f"ci.inference({what}=...) takes a function, not {type(value).__name__}"
        )
    return value


class _Call:
    """What all calls of a decorated function have in common."""

    __slots__ = (
        "_attrs", "_made", "_maker", "config", "each_chunk", "headers", "is_plain", "name",
        "request_id", "token_counter",
    )  # fmt: skip

    def __init__(  # noqa: PLR0913 - what ``inference`` is given
        self,
        name: str,
        attrs: dict[str, Any],
        config: dict[str, Any],
        *,
        headers: Callable[..., Headers | None] | None,
        request_id: Callable[..., str | None] | None,
        token_counter: Callable[[Any], int] | None,
    ) -> None:
        self.name = name
        self._attrs = attrs
        self.config = config
        self.each_chunk = config.get("stream_chunk_timing") is True
        self.headers = headers
        self.request_id = request_id
        self.token_counter = token_counter
        self.is_plain = headers is None and request_id is None
        #: The maker of the recorder of the last call, and what its requests bear.
        self._maker: Requests | None = None
        self._made: dict[str, Any] = {}

    def decorate(self, fn: Any) -> Any:  # noqa: ANN401 - the function's own kind
        """``fn``, each call of it a request."""
        if isinstance(fn, (staticmethod, classmethod)):
            return type(fn)(self.decorate(fn.__func__))
        if isinstance(fn, type) or not callable(fn):
            what = f"the class {fn.__name__}" if isinstance(fn, type) else type(fn).__name__
            raise ConfigurationError(
                f"ci.inference decorates a function or a method, not {what}; "
                "options are given by name: @ci.inference(model='m')"
            )
        inner = fn if inspect.isroutine(fn) or isinstance(fn, functools.partial) else fn.__call__
        if inspect.isgeneratorfunction(inner) or inspect.isasyncgenfunction(inner):
            made: Any = _StreamFunction(fn, self)
        elif inspect.iscoroutinefunction(inner):
            made = _coroutine(fn, self)
        else:
            made = _function(fn, self)
        made._cirron_config = self.config  # noqa: SLF001 - its documented name in cirron-sdk
        return made

    # --- one call ----------------------------------------------------------------------------

    def open(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, attach: bool = True) -> Any:  # noqa: ANN401 - a request, a part of one, or None
        """The request of one call, open; None where nothing is recorded. Never raises."""
        rec = recorder._current or _in_child()  # noqa: SLF001
        if rec is None or not rec.active:
            return None
        try:
            maker = self._maker
            if self.is_plain and maker is not None and maker is rec.requests:
                scope = maker.begin(self.name, self._made, attach=attach)
                if scope is not None:
                    return scope
            current: Any = get_current().get(SCOPE_KEY)
            if current is not None and current is not rec.session:
                shared = _to_join(current)
                if shared is not None:
                    gen_ai.take_over(shared, self._attrs)
                    return _Part(shared)
            return self._open(rec, args, kwargs, attach=attach)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("request.open", error)
            return None

    def _open(
        self, rec: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], *, attach: bool
    ) -> Any:  # noqa: ANN401 - as above
        maker = rec.requests
        if maker is None:
            maker = requests_of(rec)
        if maker is not self._maker:
            self._made = {**maker.given, **self._attrs}
            self._maker = maker
        caller = NOBODY
        if self.headers is not None or self.request_id is not None:
            caller = self._caller(rec, args, kwargs)
        ids = rec.mark_ids
        scope = maker.scope_class(
            rec, self.name, None,
            {
                **self._made,
                semconv.REQUEST_ID:
                    caller.request_id or (ids.pop() if ids else rec.next_mark_id()),
            },
        )  # fmt: skip
        if caller.span is not None:
            scope._caller = caller.span  # noqa: SLF001 - it is made here
        if attach:
            scope.__enter__()
        else:
            scope.open(attach=False)
        return scope if scope._state == OPEN else None  # noqa: SLF001 - a scope's own kind

    def _caller(self, rec: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Caller:
        caller = NOBODY
        try:
            if self.headers is not None:
                found = self.headers(*args, **kwargs)
                caller = NOBODY if found is None else read_caller(found)
            if self.request_id is not None:
                given = self.request_id(*args, **kwargs)
                caller = Caller(caller.request_id if given is None else str(given), caller.span)
        except Exception as error:  # noqa: BLE001 - the function is the user's
            rec.guard.repeat_warning("request.headers", f"headers= or request_id= raised {error!r}")
        return caller

    def returned(
        self,
        scope: Any,  # noqa: ANN401 - a request, or a part of one
        result: Any,  # noqa: ANN401 - the function's own
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - the result, or the stream that it is
        """End the request of a call that returned, unless what it returned is yet to come."""
        try:
            if type(result) not in _NO_STREAMS and not any(
                result is one for one in (*args, *kwargs.values())
            ):
                if streams.is_generator(result) or streams.is_stream(result):
                    return self.follow(scope, result)
                if streams.is_response(result):
                    result.body_iterator = self.follow(scope, result.body_iterator)
                    return result
            facts = usage.Facts()
            if usage.read(facts, result):
                scope.state.facts = facts
        except Exception as error:  # noqa: BLE001 - see _guard
            recorder_of(scope).guard.swallow("request.result", error)
        scope.__exit__(None, None, None)
        return result

    def follow(self, scope: Any, stream: Any) -> Any:  # noqa: ANN401 - the stream, followed
        """The stream that a request answers with."""
        scope.release()
        state = scope.state
        state.count_tokens = self.token_counter
        state.each_chunk = self.each_chunk
        if isinstance(scope, _Part):
            return streams.follow(scope.scope, stream, owns=False)
        return streams.follow(scope, stream)


class _Part:
    """A call inside a request that a middleware opened, which is its own: it ends there."""

    __slots__ = ("scope", "state")

    def __init__(self, scope: RequestMethods) -> None:
        self.scope = scope
        self.state = scope.state

    def __exit__(self, _type: object, error: BaseException | None, _tb: object) -> None:
        if error is not None and self.scope.is_open and not isinstance(error, GeneratorExit):
            self.scope.note_exception(error)

    def release(self) -> None:
        """It is not current by this call's doing."""

    def finish(self, error: BaseException | None = None) -> None:
        """Say how the call ended."""
        self.__exit__(None, error, None)


def recorder_of(scope: Any) -> Recorder:  # noqa: ANN401 - a request or a part of one
    """The recorder of a request."""
    whole = scope.scope if isinstance(scope, _Part) else scope
    return cast("Recorder", whole._rec)  # noqa: SLF001 - a scope's own kind


def _to_join(scope: Any) -> RequestMethods | None:  # noqa: ANN401 - any scope
    """The open request of a middleware above, if no call has taken it yet; it is taken now."""
    while scope is not None:
        if isinstance(scope, RequestMethods):
            state = scope.known_state
            if state is None or not state.shared or state.joined or not scope.is_open:
                return None
            state.joined = True
            return scope
        scope = getattr(scope, "above", None)
    return None


def _function(fn: _Function, call: _Call) -> _Function:
    begin, returned, plain = call.open, call.returned, _PLAIN

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


def _coroutine(fn: _Function, call: _Call) -> _Function:
    begin, returned, plain = call.open, call.returned, _PLAIN

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


class _StreamFunction(wrapt.FunctionWrapper):  # type: ignore[misc,type-arg,unused-ignore]
    """A generator function that is one still for whoever asks, and whose request begins at once."""

    def __init__(self, fn: _Function, call: _Call) -> None:
        self._self_call = call

        def stream(
            wrapped: _Function,
            instance: object,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Any:  # noqa: ANN401 - the generator, followed
            given = args if instance is None or isinstance(instance, type) else (instance, *args)
            scope = call.open(given, kwargs, attach=False)
            if scope is None:
                return wrapped(*args, **kwargs)
            try:
                made = wrapped(*args, **kwargs)
            except BaseException as error:
                scope.finish(error)
                raise
            return call.follow(scope, made)

        super().__init__(fn, stream)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as pickle has it
        """By name, as any function; where there is no such name, by its parts."""
        found: Any = sys.modules.get(self.__module__)
        for part in self.__qualname__.split("."):
            found = getattr(found, part, None)
        if found is self:
            return self.__qualname__
        return _StreamFunction, (self.__wrapped__, self._self_call)
