"""Whether weight decay alone can lift a shift that is at most zero above zero.

With a gradient of zero and no momentum a covered optimizer changes a parameter by its weight decay
and by nothing else. Decay pulls towards zero; it must not pull past it. Numbers only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any


def sgd_keeps_sign(
    lr: float, weight_decay: float, momentum: float, dampening: float, *, nesterov: bool
) -> bool:
    """Whether SGD with these settings and no gradient never takes a number past zero.

    Written for the number p and q = lr times its momentum buffer, a step is linear: with
    a = lr * weight_decay and k = (1 - dampening) * a the buffer becomes momentum * q + k * p and is
    taken from p (Nesterov: a * p + momentum times it). If both eigenvalues of that matrix are real
    and positive, p is a sum of two decaying powers, and stays on its side of zero if its share of
    the slower one is on that side. That is asked of both states in which it may start: with a
    buffer of zero, and with the one that the first step leaves, which is not dampened.
    """
    a = lr * weight_decay
    if a == 0:
        return True
    if momentum == 0:
        return a < 1
    k = (1 - dampening) * a
    if nesterov:
        to_p, from_q, first = 1 - a - momentum * k, -momentum * momentum, 1 - a * (1 + momentum)
    else:
        to_p, from_q, first = 1 - k, -momentum, 1 - a
    trace, det = to_p + momentum, to_p * momentum - from_q * k
    spread = trace * trace - 4 * det
    if trace <= 0 or det <= 0 or spread <= 0:
        return False
    faster = (trace - math.sqrt(spread)) / 2
    return all(
        p >= 0 and to_p * p + from_q * q - faster * p > 0 for p, q in ((first, a), (1.0, 0.0))
    )


def why_it_may_lift(family: str, kind: str, group: Mapping[str, Any]) -> str | None:
    """Why the decay of a parameter group may take a shift past zero; None where it cannot.

    ``family`` is ``sgd``, ``adam`` or ``opt-in``, ``kind`` the optimizer's class name. A setting
    that is a tensor is read: that may wait for a device.
    """
    weight_decay, lr = float(group.get("weight_decay", 0.0) or 0.0), float(group.get("lr", 0.0))
    if weight_decay == 0:
        return None
    if family == "sgd":
        momentum, dampening = float(group.get("momentum", 0)), float(group.get("dampening", 0))
        nesterov = bool(group.get("nesterov", False))
        if sgd_keeps_sign(lr, weight_decay, momentum, dampening, nesterov=nesterov):
            return None
        return (
            f"weight decay {weight_decay:g} at lr {lr:g} and momentum {momentum:g} can carry the "
            "shift past zero"
        )
    if kind != "AdamW" and not group.get("decoupled_weight_decay", False):
        return (
            f"{kind} adds its weight decay to the gradient, which then is not zero: its steps can "
            "carry the shift past zero"
        )
    if lr * weight_decay >= 1:
        return f"weight decay {weight_decay:g} at lr {lr:g} carries the shift past zero in one step"
    return None
