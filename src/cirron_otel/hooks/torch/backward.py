"""``backward``: a scope around ``Tensor.backward`` and ``torch.autograd.backward``.

The first calls the second: that is one scope. It stands on the calling thread; nothing of ours
runs on the threads of autograd. ``torch.autograd.grad`` is no backward of a training step.

What stands in their places is no function of Python, which would be one more frame each. The
compiler does not look there: it knows both by their names.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from cirron_otel import semconv
from cirron_otel.core import RecordedCall
from cirron_otel.hook_core import BACKWARD

if TYPE_CHECKING:
    from cirron_otel.hooks.patches import Patches
    from cirron_otel.hooks.torch.phases import Phases


def patch_backward(phases: Phases, patches: Patches) -> None:
    """Replace both functions."""
    for owner in (torch.autograd, torch.Tensor):
        original = vars(owner)["backward"]
        recorded = RecordedCall(phases, BACKWARD, semconv.BACKWARD, original)
        patches.replace(owner, "backward", functools.update_wrapper(recorded, original))
