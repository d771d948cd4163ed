"""The hook into ``generate`` of transformers: a ``generate`` scope with the tokens of the call.

Put in place when transformers' generation is imported, undone at shutdown. Tokens are counted as
the model sees them: padding is none, and what follows the end of a sequence is none. The counts of
tensors on a device are copied in stream order and read when they have arrived; nothing waits.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
import wrapt
from transformers.generation.utils import GenerationMixin

from cirron_otel import semconv
from cirron_otel.context import get_current
from cirron_otel.hooks.patches import Patches
from cirron_otel.scope_base import current_scope
from cirron_otel.serving.requests import current_request
from cirron_otel.serving.usage import Facts
from cirron_otel.values import Deferred, mark_value

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.recorder import Recorder

PROVIDER = "huggingface"
OPERATION = "text_completion"
_SOURCE = {"source": "hf", "normalized": True}
_TOKEN_IDS_DIMENSIONS = 2
_EMBEDDINGS_DIMENSIONS = 3


def make(rec: Recorder) -> GenerateHook:
    """The hook for one recorder, not in place yet."""
    return GenerateHook(rec)


class GenerateHook:
    """See :class:`cirron_otel.hooks.Hook`."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        self._patches = Patches()
        self.active = False

    def instrument(self) -> None:
        """Replace ``GenerationMixin.generate``."""
        self.active = True
        self._patches.replace(
            GenerationMixin, "generate", self._recorded(vars(GenerationMixin)["generate"])
        )

    def uninstrument(self) -> None:
        """Put it back. What somebody else has wrapped meanwhile does nothing."""
        self.active = False
        self._patches.undo()

    def _recorded(self, original: Callable[..., Any]) -> Callable[..., Any]:
        hook = self

        @functools.wraps(original)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            if not hook.active or torch.compiler.is_compiling():
                return original(self, *args, **kwargs)
            call = _Call(hook._rec, self, args, kwargs)
            if call.streamer is not None:
                kwargs = {**kwargs, "streamer": call.streamer}
            with call.scope:
                result = original(self, *args, **kwargs)
                call.done(result)
            return result

        return generate


class _Call:
    """One call of ``generate``. Never raises of its own."""

    def __init__(
        self,
        rec: Recorder,
        model: Any,  # noqa: ANN401 - any model that generates
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        self._rec = rec
        self._model = model
        self._args = args
        self._kwargs = kwargs
        self._state = current_request()
        self._said = False
        self.streamer: _Streamer | None = None
        attrs: dict[str, Any] = {}
        try:
            given = kwargs.get("streamer")
            if given is not None:
                self.streamer = _Streamer(given, self)
            attrs = {semconv.GEN_AI_PROVIDER: PROVIDER, semconv.GEN_AI_OPERATION: OPERATION}
            name = _model_name(model)
            if name is not None:
                attrs[semconv.GEN_AI_RESPONSE_MODEL] = name
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("generate", error)
        self.scope = rec.make_scope(semconv.GENERATE, None, attrs)

    def done(self, result: Any) -> None:  # noqa: ANN401 - what generate returns
        """The call has returned: count."""
        if self._said or not self.scope.is_open:
            return
        try:
            with torch.no_grad():
                given, made = count_tokens(self._model, self._args, self._kwargs, result)
            self.say(given, made)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("generate", error)

    def first_token(self) -> None:
        """The first new token has come, as a streamer sees it."""
        rec, scope = self._rec, self.scope
        if not scope.is_open:
            return
        now = rec.clock.now()
        self._mark(semconv.TIME_TO_FIRST_TOKEN_MS, (now - scope.start_ns) / 1e6)
        state = self._state
        if state is not None and not state.is_stream and state.first_ns is None:
            state.first_ns = now

    def say(self, given: Any, made: Any) -> None:  # noqa: ANN401 - numbers, or tensors with one
        """Leave the counts on the scope and on the request around it."""
        self._said = True
        numbers = {semconv.INPUT_TOKENS: given, semconv.OUTPUT_TOKENS: made}
        if given is not None and made is not None:
            numbers[semconv.TOTAL_TOKENS] = given + made
        for name, value in numbers.items():
            if value is not None:
                self._mark(name, value)
        state = self._state
        if state is None:
            return
        facts = state.facts
        if facts is None:
            facts = state.facts = Facts()
        facts.provider, facts.operation = PROVIDER, OPERATION
        facts.response_model = _model_name(self._model) or facts.response_model
        for is_input, value in ((True, given), (False, made)):
            if value is not None:
                facts.add(_read_later(value), is_input=is_input)

    def _mark(self, name: str, value: object) -> None:
        # The streamer's calls come on the same thread, where the scope is the current one, or one
        # of the user's own inside it.
        if current_scope(self._rec, get_current()) is self.scope:
            self._rec.mark(name, value, "summary", _SOURCE)


class _Streamer(wrapt.ObjectProxy):  # type: ignore[misc,type-arg,unused-ignore] # typed loosely
    """The user's streamer, and a count of what goes through it: the prompt first, then tokens."""

    def __init__(self, wrapped: Any, call: _Call) -> None:  # noqa: ANN401 - any streamer
        super().__init__(wrapped)
        self._self_call = call
        self._self_given: int | None = None
        self._self_made = 0

    def put(self, value: Any) -> Any:  # noqa: ANN401 - a tensor
        """As the streamer's own."""
        try:
            size = int(value.numel()) if hasattr(value, "numel") else 1
            if self._self_given is None:
                self._self_given = size
            else:
                if not self._self_made:
                    self._self_call.first_token()
                self._self_made += size
        except Exception as error:  # noqa: BLE001 - see _guard
            self._self_call._rec.guard.swallow("generate.streamer", error)  # noqa: SLF001
        return self.__wrapped__.put(value)

    def end(self) -> Any:  # noqa: ANN401 - the streamer's
        """As the streamer's own; said before, because whoever reads it may end the request then."""
        try:
            self._self_call.say(self._self_given, self._self_made)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._self_call._rec.guard.swallow("generate.streamer", error)  # noqa: SLF001
        return self.__wrapped__.end()


def count_tokens(
    model: Any,  # noqa: ANN401 - any model that generates
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    result: Any,  # noqa: ANN401 - ids, or an output that has them
) -> tuple[Any, Any]:
    """Tokens of all prompts and of all answers of a call, as numbers or tensors on its device.

    None for what cannot be told. Prompts count once, however many answers each is given. The
    arithmetic is queued on the device; nothing is read here.
    """
    config = kwargs.get("generation_config") or getattr(model, "generation_config", None)

    def setting(name: str) -> Any:  # noqa: ANN401 - a number, several, or None
        given = kwargs.get(name)
        return getattr(config, name, None) if given is None else given

    ends = _ids(setting("eos_token_id"))
    padding = next(iter(_ids(setting("pad_token_id"))), None)
    ids = args[0] if args else None
    for name in ("inputs", "input_ids"):
        ids = kwargs.get(name) if ids is None else ids
    given = _given(ids, kwargs, padding, ends)
    sequences = result if isinstance(result, torch.Tensor) else getattr(result, "sequences", None)
    if not isinstance(sequences, torch.Tensor) or sequences.dim() != _TOKEN_IDS_DIMENSIONS:
        return given, None
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        new = sequences[:, 1:]  # the first one is the decoder's start
    elif isinstance(ids, torch.Tensor) and ids.dim() == _TOKEN_IDS_DIMENSIONS:
        new = sequences[:, ids.shape[1] :]
    else:
        new = sequences
    return given, _made(new, padding, ends)


def _given(ids: Any, kwargs: dict[str, Any], padding: int | None, ends: list[int]) -> Any:  # noqa: ANN401
    mask = kwargs.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == _TOKEN_IDS_DIMENSIONS:
        return (mask != 0).sum()
    if isinstance(ids, torch.Tensor) and ids.dim() == _TOKEN_IDS_DIMENSIONS:
        if ids.is_floating_point():
            return None  # features of sound, say
        # As transformers makes the mask itself: padding that is an end, too, cannot be told.
        told = padding is not None and padding not in ends
        return torch.ne(ids, padding).sum() if told else ids.numel()  # type: ignore[arg-type]
    embeddings = kwargs.get("inputs_embeds")
    if isinstance(embeddings, torch.Tensor) and embeddings.dim() == _EMBEDDINGS_DIMENSIONS:
        return embeddings.shape[0] * embeddings.shape[1]
    return None


def _made(new: torch.Tensor, padding: int | None, ends: list[int]) -> Any:  # noqa: ANN401
    if not ends and padding is None:
        return new.numel()
    counted = torch.ones_like(new, dtype=torch.bool)
    if ends:
        is_end = torch.zeros_like(counted)
        for end in ends:
            is_end |= new == end
        # Up to the first end, that one included.
        counted = (is_end.cumsum(dim=1) - is_end.int()) == 0
    if padding is not None and padding not in ends:
        counted &= new != padding
    return counted.sum()


def _ids(value: Any) -> list[int]:  # noqa: ANN401 - a number, several, or None
    if isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            return []
        value = value.tolist()
    if type(value) is int:
        return [value]
    return [int(one) for one in value] if isinstance(value, (list, tuple)) else []


def _read_later(value: Any) -> int | Deferred:  # noqa: ANN401 - a number or a tensor
    if type(value) is int:
        return value
    made = mark_value(value)
    return made if isinstance(made, Deferred) else int(made.value)  # type: ignore[arg-type]


def _model_name(model: Any) -> str | None:  # noqa: ANN401 - any model that generates
    """What the model was loaded as; the last part of a path."""
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    if not isinstance(name, str) or not name:
        return None
    is_path = name.startswith(("/", ".", "~")) or "\\" in name
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2] if is_path else name
