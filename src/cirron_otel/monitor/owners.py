"""Which optimizers move a parameter, and whether they leave one alone that has no gradient.

An optimizer is found if it was given, if it has stepped while somebody looked, or if it is alive in
this process when a certificate is about to be issued.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from cirron_otel.monitor.decay import why_it_may_lift
from cirron_otel.monitor.modules import is_optimizer
from cirron_otel.monitor.stepping import Listening

if TYPE_CHECKING:
    from cirron_otel._guard import Guard

#: Exact types: a subclass may do anything in its step.
_FAMILIES: dict[type, str] = {
    torch.optim.SGD: "sgd",
    torch.optim.Adam: "adam",
    torch.optim.AdamW: "adam",
    torch.optim.NAdam: "adam",
    torch.optim.RAdam: "adam",
    torch.optim.Adamax: "adam",
}
_FIRST_MOMENT = {"sgd": "momentum_buffer", "adam": "exp_avg"}


def family_of(optimizer: object, opted_in: Sequence[str] = ()) -> str | None:
    """``sgd``, ``adam``, ``opt-in``, or None for one of which it is not known what it does."""
    kind = type(optimizer)
    found = _FAMILIES.get(kind)
    if found is None and {kind.__name__, f"{kind.__module__}.{kind.__qualname__}"} & {*opted_in}:
        return "opt-in"
    return found


class Owner(NamedTuple):
    """An optimizer that holds a parameter, and the group it is in."""

    optimizer: Optimizer
    group: dict[str, Any]


class Owners:
    """The optimizers that are known. The training thread."""

    def __init__(self, given: object, opted_in: Sequence[str], guard: Guard) -> None:
        self._opted_in = opted_in
        self._known: list[weakref.ref[Optimizer]] = []
        self._steps: Listening | None = None
        if is_optimizer(given):
            self._known.append(weakref.ref(given))
            self._steps = Listening(guard, "monitor.owners", self._stepping, None)

    def stop(self) -> None:
        """Look no more who steps."""
        if self._steps is not None:
            self._steps.stop()

    def _stepping(self, optimizer: Optimizer) -> None:
        if is_optimizer(optimizer):
            self.note(optimizer)

    def note(self, optimizer: Optimizer) -> None:
        """Take in one that was seen."""
        if all(known() is not optimizer for known in self._known):
            self._known.append(weakref.ref(optimizer))

    def search(self) -> None:
        """Take in every optimizer that is alive in this process. Takes some milliseconds."""
        for found in gc.get_objects():
            # By type(): asking the object itself may run code of its own.
            if issubclass(type(found), Optimizer) and is_optimizer(found):
                self.note(found)

    def of(self, parameter: torch.Tensor) -> list[Owner]:
        """Those that hold a parameter."""
        return [
            Owner(optimizer, group)
            for optimizer in self._alive()
            for group in getattr(optimizer, "param_groups", ())
            if any(one is parameter for one in group["params"])
        ]

    def held(self) -> set[int]:
        """The ids of all parameters that any of them holds."""
        return {
            id(parameter)
            for optimizer in self._alive()
            for group in getattr(optimizer, "param_groups", ())
            for parameter in group["params"]
        }

    def _alive(self) -> Iterator[Optimizer]:
        for reference in self._known:
            optimizer = reference()
            if optimizer is not None:
                yield optimizer

    def family(self, optimizer: object) -> str | None:
        """See :func:`family_of`."""
        return family_of(optimizer, self._opted_in)

    def why_it_moves(self, parameter: torch.Tensor, owner: Owner, *, shifts: bool) -> str | None:
        """Why an owner may move a parameter that has no gradient; None where it does not.

        ``shifts``: of this one only the sign has to stay, so decay is allowed that keeps it.
        """
        optimizer, group = owner
        kind, family = type(optimizer).__name__, self.family(optimizer)
        if family is None:
            return f"it is not known that {kind} leaves weights without a gradient alone"
        if family == "adam" and not float(group.get("eps", 1.0)) > 0:
            return f"{kind} with eps = 0 divides zero by zero"
        if not shifts:
            return None
        others = self.of(parameter)
        if len(others) > 1 and any(
            one.group.get("momentum") and one.group.get("weight_decay") for one in others
        ):
            return "several optimizers decay the shift, one of them with momentum"
        return why_it_may_lift(family, kind, group)

    def first_moments(self, parameter: torch.Tensor) -> list[torch.Tensor]:
        """What the owners remember of past gradients of a parameter, of its shape."""
        found: list[torch.Tensor] = []
        for optimizer, _ in self.of(parameter):
            state = optimizer.state.get(parameter)
            if not state:
                continue
            name = _FIRST_MOMENT.get(self.family(optimizer) or "")
            values: Iterable[Any] = (state.get(name),) if name else tuple(state.values())
            found += [
                value
                for value in values
                if isinstance(value, torch.Tensor) and value.shape == parameter.shape
            ]
        return found

    def decays_with_momentum(self, parameter: torch.Tensor) -> bool:
        """Whether decay itself leaves a momentum: then one of the shift proves nothing."""
        return any(
            self.family(optimizer) == "sgd" and group.get("weight_decay") and group.get("momentum")
            for optimizer, group in self.of(parameter)
        )
