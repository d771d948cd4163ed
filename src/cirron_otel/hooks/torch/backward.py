"""``backward``: a scope around ``Tensor.backward`` and ``torch.autograd.backward``.

The first calls the second: that is one scope. It stands on the calling thread; nothing of ours
runs on the threads of autograd. ``torch.autograd.grad`` is no backward of a training step.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch.compiler import is_dynamo_compiling

from cirron_otel import semconv
from cirron_otel.core import RecordedCall
from cirron_otel.hook_core import BACKWARD

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.torch.patches import Patches
    from cirron_otel.hooks.torch.phases import Phases


def patch_backward(phases: Phases, patches: Patches) -> None:
    """Replace both functions."""
    for owner in (torch.autograd, torch.Tensor):
        patches.replace(owner, "backward", _recorded(phases, vars(owner)["backward"]))


def _recorded(phases: Phases, original: Callable[..., Any]) -> Callable[..., Any]:
    recorded = RecordedCall(phases, BACKWARD, semconv.BACKWARD, original).packed

    @functools.wraps(original)
    def backward(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
        if is_dynamo_compiling():
            return original(*args, **kwargs)
        return recorded(args, kwargs)

    return backward
