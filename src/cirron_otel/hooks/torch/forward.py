"""``forward``: a scope around each outermost module call.

Every call of every module passes through here, so a nested one has to cost next to nothing: the
replacement of ``Module.__call__`` does what torch's own does, in the same frame, after one look at
a thread-local number. Nothing is kept on modules; they are saved, copied and scripted as ever.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling
from torch.nn import Module

from cirron_otel import semconv
from cirron_otel.core import RecordedCall, inside_forward
from cirron_otel.hook_core import FORWARD
from cirron_otel.hooks.torch.compiled import TAKES_STAND_INS
from cirron_otel.watching import watched

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.hooks.torch.phases import Phases

#: What torch's own ``Module.__call__`` looks up, and all it does: call one of these.
_USUAL = "_call_impl"
_KNOWN_NAMES = {"_compiled_call_impl", _USUAL}


class Forwards:
    """The hook on ``Module.__call__``, and what it tells about learning."""

    def __init__(self, phases: Phases) -> None:
        self._phases = phases

    def patch(self, patches: Patches) -> None:
        """Replace ``Module.__call__``."""
        original: Callable[..., Any] = vars(Module)["__call__"]
        outermost = RecordedCall(self._phases, FORWARD, semconv.FORWARD, original)
        if _is_known(original):
            usual = RecordedCall(self._phases, FORWARD, semconv.FORWARD, original, _USUAL)
            call = _inlined(original, usual.packed, outermost.packed)
        else:
            call = _wrapped(original, outermost.packed)
        patches.replace(Module, "__call__", call)

    def stage(self) -> str | None:
        """``evaluation`` if this thread is not learning now, else None.

        That is: gradients are off, or the model is in eval mode. The model is the last one that
        this thread called in order to learn (a frozen teacher beside it says nothing), else the
        last one called, else a watched one.
        """
        if not torch.is_grad_enabled():
            return semconv.EVALUATION
        here = self._phases.here
        for reference in (here.learner, here.seen):
            module = reference() if reference is not None else None
            if module is not None:
                return None if module.training else semconv.EVALUATION
        models = [model for model in watched.models if isinstance(model, Module)]
        if models and not any(model.training for model in models):
            return semconv.EVALUATION
        return None


def _is_known(original: Callable[..., Any]) -> bool:
    """Whether ``original`` is the ``Module.__call__`` whose body we know."""
    code = getattr(original, "__code__", None)
    return (
        original is vars(Module).get("_wrapped_call_impl")
        and code is not None
        and set(code.co_names) == _KNOWN_NAMES
        and code.co_varnames == ("self", "args", "kwargs")
    )


def _inlined(
    original: Callable[..., Any], usual: Callable[..., Any], outermost: Callable[..., Any]
) -> Callable[..., Any]:
    passes = _passes_on()

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module
        if passes():
            if self._compiled_call_impl is not None:
                return self._compiled_call_impl(*args, **kwargs)
            return self._call_impl(*args, **kwargs)
        if self._compiled_call_impl is not None:
            return outermost(self, args, kwargs)
        return usual(self, args, kwargs)

    return call


def _wrapped(original: Callable[..., Any], outermost: Callable[..., Any]) -> Callable[..., Any]:
    passes = _passes_on()

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - any module
        if passes():
            return original(self, *args, **kwargs)
        return outermost(self, args, kwargs)

    return call


def _passes_on() -> Callable[[], bool]:
    """What says that a call is none to record: inside another, or in code that is compiled.

    Where the compiler takes stand-ins (``compiled.py``), :func:`inside_forward` is a constant in
    such code; elsewhere it would become a guard there, so what is constant has to come first.
    """
    if TAKES_STAND_INS:
        return inside_forward
    return lambda: is_dynamo_compiling() or inside_forward()
