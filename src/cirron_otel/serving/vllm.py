"""The hook into vLLM's ``AsyncLLM``: one trace with the engine, and its times on the request.

``generate`` and ``encode`` get the current request's trace as ``trace_headers``, where the caller
gave none, so that the engine's own span becomes its child; nothing of the process's environment is
ever used for that. What comes back says tokens, why it ended and, in ``metrics``, how long the
request waited, and how long prefill and decoding took.

Written against the interface of ``vllm.v1.engine.async_llm``; put in place when that is imported,
undone at shutdown.
"""

from __future__ import annotations

import inspect
import sys
from typing import TYPE_CHECKING, Any

import wrapt

from cirron_otel.hooks.patches import Patches
from cirron_otel.serving.request_batches import trace_headers
from cirron_otel.serving.requests import current_request
from cirron_otel.serving.usage import Facts, read

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.recorder import Recorder
    from cirron_otel.serving.state import RequestState

_HEADERS = "trace_headers"
_METHODS = ("generate", "encode")


def make(rec: Recorder) -> VllmHook:
    """The hook for one recorder, not in place yet."""
    return VllmHook(rec)


class VllmHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()
        self.active = False

    def instrument(self) -> None:
        """Wrap the methods of ``AsyncLLM`` that begin a request."""
        # It is imported by now. By its name: there is nothing to check the types against.
        engine: type[Any] = sys.modules["vllm.v1.engine.async_llm"].AsyncLLM
        self.active = True
        for name in _METHODS:
            original = vars(engine).get(name)
            if original is not None:
                takes = _HEADERS in inspect.signature(original).parameters
                self._patches.replace(engine, name, self._wrapped(original, takes=takes))

    def uninstrument(self) -> None:
        """Put them back. What somebody else has wrapped meanwhile does nothing."""
        self.active = False
        self._patches.undo()

    def _wrapped(self, original: Callable[..., Any], *, takes: bool) -> Any:  # noqa: ANN401 - wrapt's
        def ask(
            wrapped: Callable[..., Any],
            _instance: object,
            args: tuple[Any, ...],
            kwargs: dict[str, Any],
        ) -> Any:  # noqa: ANN401 - an async generator
            state = None
            if self.active:
                try:
                    state = current_request()
                    if state is not None and takes and kwargs.get(_HEADERS) is None:
                        headers = trace_headers()
                        if headers:
                            kwargs = {**kwargs, _HEADERS: headers}
                except Exception as error:  # noqa: BLE001 - see _guard
                    self._rec.guard.swallow("vllm", error)
            outputs = wrapped(*args, **kwargs)
            if state is None:
                return outputs
            params = args[1] if len(args) > 1 else kwargs.get("sampling_params")
            return _Outputs(outputs, _Reader(self._rec, state, params))

        return wrapt.FunctionWrapper(original, ask)


class _Reader:
    """Takes what one answer of the engine says over to its request, as it comes."""

    def __init__(self, rec: Recorder, state: RequestState, params: object) -> None:
        self._rec = rec
        self._state = state
        self._mine = Facts()
        kind = getattr(getattr(params, "output_kind", None), "name", None)
        if isinstance(kind, str):
            self._mine.in_parts = kind == "DELTA"
        self._said = [0, 0]

    def note(self, output: object) -> None:
        """Take one output. Never raises."""
        try:
            if read(self._mine, output):
                self._hand_on()
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("vllm.output", error)

    def _hand_on(self) -> None:
        mine, state = self._mine, self._state
        facts = state.facts
        if facts is None:
            facts = state.facts = Facts()
        facts.provider = mine.provider
        facts.operation = facts.operation or mine.operation
        facts.response_id = mine.response_id
        facts.finish_reasons = mine.finish_reasons
        facts.cache_read = mine.cache_read
        facts.engine.update(mine.engine)
        for is_input, count in ((False, mine.output_tokens), (True, mine.input_tokens)):
            if count is not None and (count != self._said[is_input] or not count):
                facts.add(count - self._said[is_input], is_input=is_input)
                self._said[is_input] = count


class _Outputs(wrapt.ObjectProxy):  # type: ignore[misc,type-arg,unused-ignore] # typed loosely
    """The engine's async generator, for ``isinstance`` too; its outputs are read as they pass."""

    def __init__(self, wrapped: Any, reader: _Reader) -> None:  # noqa: ANN401 - an async generator
        super().__init__(wrapped)
        self._self_reader = reader

    def __aiter__(self) -> Any:  # noqa: ANN401 - itself
        """Itself."""
        return self

    async def __anext__(self) -> Any:  # noqa: ANN401 - an output of the engine
        """The next output."""
        output = await self.__wrapped__.__anext__()
        self._self_reader.note(output)
        return output

    async def asend(self, value: Any) -> Any:  # noqa: ANN401 - an output of the engine
        """As the generator's own."""
        output = await self.__wrapped__.asend(value)
        self._self_reader.note(output)
        return output
