"""What happens around each call of a function that ``@ci.inference`` decorates."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import CoroutineType
from typing import TYPE_CHECKING, Any, cast

from cirron_otel import recorder
from cirron_otel.context import SCOPE_KEY, get_current
from cirron_otel.scope_core import OPEN
from cirron_otel.scopes import _in_child
from cirron_otel.serving import gen_ai, streams, usage
from cirron_otel.serving.callers import NOBODY, Caller, Headers, request_id_of
from cirron_otel.serving.redaction import Content
from cirron_otel.serving.requests import Requests, requests_of
from cirron_otel.serving.sharing import Part, join, recorder_of, whole_of
from cirron_otel.serving.texts import AnswerText, Arguments, text_of

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder

_Function = Callable[..., Any]

#: Results of these types say nothing of tokens and are no streams.
_PLAIN = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, memoryview, range, set}
)
#: Results of these types say something of tokens at most.
_NO_STREAMS = frozenset({dict, list, tuple})


class Call:
    """What all calls of a decorated function have in common."""

    __slots__ = (
        "_attrs", "_content", "_made", "_maker", "config", "each_chunk", "headers", "is_plain",
        "name", "request_id", "token_counter",
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
        content: Content,
    ) -> None:
        self.name = name
        self._attrs = attrs
        self.config = config
        self.each_chunk = config.get("stream_chunk_timing") is True
        self.headers = headers
        self.request_id = request_id
        self.token_counter = token_counter
        #: What becomes of the texts; None: they are not asked for.
        self._content = content if content.record else None
        self.is_plain = headers is None and request_id is None
        #: The maker of the recorder of the last call, and what its requests bear.
        self._maker: Requests | None = None
        self._made: dict[str, Any] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        """For decorated functions that pickle by their parts: without the recorder."""
        content = self._content or Content(record=False, redact=None)
        return _again, (
            self.name, self._attrs, self.config, self.headers, self.request_id,
            self.token_counter, content,
        )  # fmt: skip

    # --- one call ----------------------------------------------------------------------------

    def opener(self, fn: _Function) -> Callable[..., Any]:
        """What opens the request of one call of ``fn``: :meth:`open`, or that and its text."""
        content = self._content
        if content is None:
            return self.open
        arguments = Arguments(fn)

        def open_with_text(
            args: tuple[Any, ...], kwargs: dict[str, Any], *, attach: bool = True
        ) -> Any:  # noqa: ANN401 - as open
            scope = self.open(args, kwargs, attach=attach)
            if scope is not None:
                try:
                    scope.state.content = content
                    # Now: the function may change what it was given.
                    content.say(whole_of(scope), "input", arguments.text(args, kwargs))
                except Exception as error:  # noqa: BLE001 - see _guard
                    recorder_of(scope).guard.swallow("request.text", error)
                except BaseException as error:
                    scope.__exit__(type(error), error, error.__traceback__)
                    raise
            return scope

        return open_with_text

    @property
    def plain(self) -> frozenset[type]:
        """Types of results that there is nothing to say of."""
        return _PLAIN if self._content is None else frozenset()

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
                part = join(current)
                if part is not None:
                    gen_ai.take_over(part.whole, self._attrs)
                    return part
            return self._open(rec, args, kwargs, attach=attach)
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("request.open", error)
            return None

    def _open(
        self, rec: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any], *, attach: bool
    ) -> Any:  # noqa: ANN401 - as above
        maker = requests_of(rec)
        if maker is not self._maker:
            self._made = {**maker.given, **self._attrs}
            self._maker = maker
        caller = NOBODY
        if self.headers is not None or self.request_id is not None:
            caller = self._caller(maker, rec, args, kwargs)
        scope = maker.new(self.name, self._made, caller)
        if attach:
            scope.__enter__()
        else:
            scope.open(attach=False)
        return scope if scope._state == OPEN else None  # noqa: SLF001 - a scope's own kind

    def _caller(
        self, maker: Requests, rec: Recorder, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Caller:
        caller = NOBODY
        try:
            if self.headers is not None:
                found = self.headers(*args, **kwargs)
                caller = NOBODY if found is None else maker.caller(found)
            if self.request_id is not None:
                given = request_id_of(self.request_id(*args, **kwargs))
                caller = Caller(given or caller.request_id, caller.span)
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
                if isinstance(result, CoroutineType):
                    return self.awaited(scope, result, args, kwargs)
            facts = usage.Facts()
            if usage.read(facts, result):
                scope.state.facts = facts
            if self._content is not None:
                self._content.say(whole_of(scope), "output", text_of(result))
        except Exception as error:  # noqa: BLE001 - see _guard
            recorder_of(scope).guard.swallow("request.result", error)
        except BaseException as error:
            scope.finish(error)
            raise
        scope.finish()
        return result

    def follow(self, scope: Any, stream: Any) -> Any:  # noqa: ANN401 - the stream, followed
        """The stream that a request answers with."""
        scope.release()
        state = scope.state
        state.count_tokens = self.token_counter
        state.each_chunk = self.each_chunk
        if self._content is not None:
            state.texts = AnswerText()
        return streams.follow(whole_of(scope), stream, owns=not isinstance(scope, Part))

    def awaited(
        self,
        scope: Any,  # noqa: ANN401 - a request, or a part of one
        coroutine: CoroutineType[Any, Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> CoroutineType[Any, Any, Any]:
        """The coroutine that a plain function returned; the request goes on while it runs."""
        scope.release()
        made: Any = self._await(scope, coroutine, args, kwargs)
        made.__name__, made.__qualname__ = coroutine.__name__, coroutine.__qualname__
        never = weakref.finalize(made, _never_awaited, scope, coroutine)
        never.atexit = False
        return cast("CoroutineType[Any, Any, Any]", made)

    async def _await(
        self,
        scope: Any,  # noqa: ANN401 - as above
        coroutine: CoroutineType[Any, Any, Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:  # noqa: ANN401 - the function's own
        try:
            with whole_of(scope).running():
                result = await coroutine
        except BaseException as error:
            scope.finish(error)
            raise
        return self.returned(scope, result, args, kwargs)


def _never_awaited(scope: Any, coroutine: CoroutineType[Any, Any, Any]) -> None:  # noqa: ANN401
    coroutine.close()  # Python says it of the one that the caller got
    scope.finish()


def _again(  # noqa: PLR0913, PLR0917 - as Call
    name: str,
    attrs: dict[str, Any],
    config: dict[str, Any],
    headers: Any,  # noqa: ANN401 - as Call
    request_id: Any,  # noqa: ANN401 - as Call
    token_counter: Any,  # noqa: ANN401 - as Call
    content: Content,
) -> Call:
    return Call(
        name, attrs, config,
        headers=headers, request_id=request_id, token_counter=token_counter, content=content,
    )  # fmt: skip
