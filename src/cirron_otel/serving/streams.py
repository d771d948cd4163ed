"""Streams that a request answers with: followed to their end, wherever that comes.

What the caller gets is a proxy of the very stream: ``isinstance`` and every attribute are the
stream's own. The request stays open between two chunks and is current only while the next one is
being made, in whatever thread or task asks for it; the consumer's context is never changed
(:mod:`cirron_otel.serving.following`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import AsyncGeneratorType, GeneratorType, TracebackType
from typing import TYPE_CHECKING, Any

import wrapt

from cirron_otel.serving.following import CLOSED, FAILED, Following

if TYPE_CHECKING:
    from cirron_otel.serving.requests import RequestMethods

#: Classes of libraries whose objects are streams of chunks: first part of the module, name.
_SHAPES = frozenset(
    {
        ("openai", "Stream"),
        ("openai", "AsyncStream"),
        ("anthropic", "Stream"),
        ("anthropic", "AsyncStream"),
        ("anthropic", "MessageStream"),
        ("anthropic", "AsyncMessageStream"),
        ("litellm", "CustomStreamWrapper"),
        ("transformers", "TextIteratorStreamer"),
        ("transformers", "AsyncTextIteratorStreamer"),
    }
)


def is_generator(value: object) -> bool:
    """Whether it is a generator, sync or async, that has not ended."""
    if isinstance(value, GeneratorType):
        return value.gi_frame is not None
    return isinstance(value, AsyncGeneratorType) and value.ag_frame is not None


def is_stream(value: object) -> bool:
    """Whether it is a stream of a library that is known to give such; any other iterator is not."""
    for base in type(value).__mro__:
        if (base.__module__.partition(".")[0], base.__name__) in _SHAPES:
            return hasattr(type(value), "__next__") or hasattr(type(value), "__anext__")
    return False


def is_response(value: object) -> bool:
    """Whether it is a response of Starlette's (or FastAPI's) whose body is yet to be made.

    Its ``body_iterator`` is a public attribute, and meant to be replaced.
    """
    found = vars(value).get("body_iterator") if hasattr(value, "__dict__") else None
    return hasattr(type(found), "__anext__") and any(
        base.__name__ == "Response" and base.__module__.startswith("starlette.")
        for base in type(value).__mro__
    )


def follow(scope: RequestMethods, stream: Any, *, owns: bool = True) -> Any:  # noqa: ANN401
    """``stream`` as its consumer gets it. The request is not current any more.

    ``owns``: the request ends with the stream; else somebody else ends it.
    """
    following = scope.state
    following.is_stream = True
    following.owns = owns
    if isinstance(stream, GeneratorType):
        return GeneratorProxy(stream, following)
    if isinstance(stream, AsyncGeneratorType):
        return AsyncGeneratorProxy(stream, following)
    if hasattr(type(stream), "__anext__"):
        return AsyncStreamProxy(stream, following)
    return StreamProxy(stream, following)


def _never() -> bool:
    return False


class _Proxy(wrapt.ObjectProxy):  # type: ignore[misc,type-arg,unused-ignore] # typed loosely
    """What every proxy of a stream has."""

    __slots__ = ("_self_following",)

    def __init__(self, stream: Any, following: Following) -> None:  # noqa: ANN401
        super().__init__(stream)
        self._self_following = following

    def __copy__(self) -> Any:  # noqa: ANN401 - as the stream's own
        """As the stream's own, which most refuse."""
        return copy.copy(self.__wrapped__)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:  # noqa: ANN401 - as above
        """As the stream's own."""
        return copy.deepcopy(self.__wrapped__, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - as above
        """As the stream's own."""
        return self.__wrapped__.__reduce_ex__(protocol)

    def __del__(self) -> None:
        self._self_following.dropped()


class StreamProxy(_Proxy):
    """An iterator of a library's: the object itself, followed."""

    __slots__ = ()

    def __iter__(self) -> Any:  # noqa: ANN401 - itself
        """The same stream."""
        return self

    def __next__(self) -> Any:  # noqa: ANN401 - a chunk
        """The next chunk."""
        return self._self_following.step(self.__wrapped__.__next__, _never)

    def __enter__(self) -> Any:  # noqa: ANN401 - itself
        """As the stream's own, but the caller keeps what is followed."""
        self.__wrapped__.__enter__()
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> Any:  # noqa: ANN401 - the stream's own answer
        """As the stream's own; one that is left before its end was closed."""
        try:
            return self.__wrapped__.__exit__(exc_type, exc, tb)
        finally:
            self._self_following.end(CLOSED)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the stream's own attribute
        """The stream's own attributes; its ``close`` ends the request, too."""
        found = getattr(self.__wrapped__, name)
        return self._closing(found) if name == "close" else found

    def _closing(self, close: Callable[..., Any]) -> Callable[..., Any]:
        following = self._self_following

        def closing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - its own answer
            try:
                return close(*args, **kwargs)
            finally:
                following.end(CLOSED)

        return closing


class AsyncStreamProxy(_Proxy):
    """An async iterator of a library's: the object itself, followed."""

    __slots__ = ()

    def __aiter__(self) -> Any:  # noqa: ANN401 - itself
        """The same stream."""
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401 - a chunk
        """The next chunk."""
        return await self._self_following.async_step(self.__wrapped__.__anext__, _never)

    async def __aenter__(self) -> Any:  # noqa: ANN401 - itself
        """As the stream's own, but the caller keeps what is followed."""
        await self.__wrapped__.__aenter__()
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> Any:  # noqa: ANN401 - the stream's own answer
        """As the stream's own; one that is left before its end was closed."""
        try:
            return await self.__wrapped__.__aexit__(exc_type, exc, tb)
        finally:
            self._self_following.end(CLOSED)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401 - the stream's own attribute
        """The stream's own attributes; its ``close`` ends the request, too."""
        found = getattr(self.__wrapped__, name)
        return self._closing(found) if name in {"close", "aclose"} else found

    def _closing(self, close: Callable[..., Any]) -> Callable[..., Any]:
        following = self._self_following

        async def closing(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - its own answer
            try:
                return await close(*args, **kwargs)
            finally:
                following.end(CLOSED)

        return closing


class GeneratorProxy(_Proxy):
    """A generator, followed."""

    __slots__ = ()

    def __iter__(self) -> Any:  # noqa: ANN401 - itself
        """The same generator."""
        return self

    def _self_alive(self) -> bool:
        return self.__wrapped__.gi_frame is not None

    def __next__(self) -> Any:  # noqa: ANN401 - a chunk
        """The next chunk."""
        return self._self_following.step(self.__wrapped__.__next__, self._self_alive)

    def send(self, value: Any) -> Any:  # noqa: ANN401 - as a generator's
        """As a generator's."""
        return self._self_following.step(self.__wrapped__.send, self._self_alive, value)

    def throw(self, *error: Any) -> Any:  # noqa: ANN401 - as a generator's
        """As a generator's."""
        return self._self_following.step(self.__wrapped__.throw, self._self_alive, *error)

    def close(self) -> Any:  # noqa: ANN401 - as a generator's
        """As a generator's; one that is closed before its end says so."""
        following = self._self_following
        if following.done:
            return self.__wrapped__.close()
        attached = following.attach()
        try:
            answer = self.__wrapped__.close()
        except BaseException as error:
            following.detach(attached)
            following.end(FAILED, error)
            raise
        following.detach(attached)
        following.end(CLOSED)
        return answer

    def __del__(self) -> None:
        following = self._self_following
        if following.done:
            return
        attached = following.attach()
        try:
            self.__wrapped__.close()  # what is left of its body belongs to the request
        finally:
            following.detach(attached, leaving=True)
            following.dropped()


class AsyncGeneratorProxy(_Proxy):
    """An async generator, followed."""

    __slots__ = ()

    def __aiter__(self) -> Any:  # noqa: ANN401 - itself
        """The same generator."""
        return self

    def _self_alive(self) -> bool:
        return self.__wrapped__.ag_frame is not None

    async def __anext__(self) -> Any:  # noqa: ANN401 - a chunk
        """The next chunk."""
        return await self._self_following.async_step(self.__wrapped__.__anext__, self._self_alive)

    async def asend(self, value: Any) -> Any:  # noqa: ANN401 - as a generator's
        """As an async generator's."""
        return await self._self_following.async_step(
            self.__wrapped__.asend, self._self_alive, value
        )

    async def athrow(self, *error: Any) -> Any:  # noqa: ANN401 - as a generator's
        """As an async generator's."""
        return await self._self_following.async_step(
            self.__wrapped__.athrow, self._self_alive, *error
        )

    async def aclose(self) -> Any:  # noqa: ANN401 - as a generator's
        """As an async generator's; one that is closed before its end says so."""
        following = self._self_following
        if following.done:
            return await self.__wrapped__.aclose()
        attached = following.attach()
        try:
            answer = await self.__wrapped__.aclose()
        except BaseException as error:
            following.detach(attached, leaving=isinstance(error, GeneratorExit))
            if not self._self_alive():
                following.end(FAILED, error)
            raise
        following.detach(attached)
        following.end(CLOSED)
        return answer
