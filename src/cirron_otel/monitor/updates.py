"""How far one optimizer step moves the weights of each layer, beside their size.

A few rows of each weight are kept at a check and compared right after the step that follows; the
numbers are read by the next check, so that nothing waits for a device.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from cirron_otel._guard import Guard
from cirron_otel.findings import Finding
from cirron_otel.monitor.config import MonitorConfig
from cirron_otel.monitor.modules import Layer, is_optimizer
from cirron_otel.monitor.owners import Owners
from cirron_otel.monitor.stepping import Listening

if TYPE_CHECKING:
    from torch.optim.optimizer import Optimizer

#: Rows of a weight that are looked at; of long ones, parts of at least so many numbers.
_ROWS, _SHORT = 4, 64
#: A step of half the size of the weights replaces them; weights that begin as zeros may take such.
_LARGE, _GROWING = 0.5, 4
#: Rows of these move only where their token is in the batch.
_SPARSE = frozenset({"Embedding", "EmbeddingBag"})


class _Sample(NamedTuple):
    weight: torch.Tensor
    rows: torch.Tensor


class Updates:
    """The samples of one check, and what is remembered of each layer. The training thread."""

    def __init__(self, config: MonitorConfig, owners: Owners, guard: Guard) -> None:
        self._config = config
        self._owners = owners
        self._guard = guard
        self._waiting: dict[str, _Sample] = {}
        self._ratios: list[tuple[list[str], torch.Tensor]] = []
        self._large: dict[str, int] = {}
        self._still: dict[str, int] = {}
        self._checks = 0
        self._told_unowned = False
        self._steps: Listening | None = None

    def stop(self) -> None:
        """Look at steps no more."""
        self._waiting.clear()
        if self._steps is not None:
            self._steps.stop()
            self._steps = None

    def sample(self, layers: Iterable[Layer]) -> None:
        """Keep some rows of each weight that has a gradient: the optimizer is about to step."""
        self._waiting.clear()
        for layer in layers:
            weight = layer.parameters.get("weight")
            if (
                weight is None
                or weight.grad is None
                or not weight.numel()
                or weight.dim() < 2  # noqa: PLR2004 - scales and shifts may begin as zeros
                or layer.kind in _SPARSE
                or hasattr(weight, "_local_tensor")
            ):
                continue
            self._waiting[layer.name] = _Sample(weight, _some_rows(weight).clone())
        if self._steps is None:
            self._steps = Listening(self._guard, "monitor.updates", None, self._stepped)

    def _stepped(self, optimizer: Optimizer) -> None:
        if self._waiting and is_optimizer(optimizer):
            self._compare(optimizer)

    @torch.no_grad()
    def _compare(self, optimizer: Optimizer) -> None:
        rates = {
            id(parameter): group.get("lr")
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        moved = [name for name, one in self._waiting.items() if id(one.weight) in rates]
        names: list[str] = []
        now: list[torch.Tensor] = []
        old: list[torch.Tensor] = []
        for name in moved:
            before = self._waiting.pop(name)
            rate: Any = rates[id(before.weight)]
            if isinstance(rate, torch.Tensor) or not rate:  # it is not to move
                continue
            names.append(name)
            now.append(_some_rows(before.weight))
            old.append(before.rows)
        if names:
            changes = torch._foreach_norm(torch._foreach_sub(now, old))  # noqa: SLF001 - public names
            ratios = torch._foreach_div(changes, torch._foreach_norm(old))  # noqa: SLF001
            alike: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[torch.Tensor]]] = {}
            for name, ratio in zip(names, ratios, strict=True):
                some = alike.setdefault((ratio.device, ratio.dtype), ([], []))
                some[0].append(name)
                some[1].append(ratio)
            self._ratios += [(some, torch.stack(found)) for some, found in alike.values()]

    def take(self) -> list[tuple[list[str], torch.Tensor]]:
        """Step over size by layer, of the step after the last check, where they were computed."""
        ratios, self._ratios = self._ratios, []
        return ratios

    def look(
        self, step: int, ratios: Mapping[str, float], grad: Mapping[str, float],
        layers: Iterable[Layer],
    ) -> Iterator[Finding]:  # fmt: skip
        """The findings of one check."""
        self._checks += 1
        for name, ratio in ratios.items():
            large = self._large.get(name, 0) + 1 if ratio > _LARGE else 0
            if not math.isfinite(ratio):  # the weights were zero
                large = -_GROWING
            self._large[name] = large
            if large == self._config.alarm_confirmations:
                yield Finding(
                    "update_too_large", "warning",
                    f"one step of the optimizer moves the weights of layer {name!r} by "
                    f"{ratio:.3g} times their size: the learning rate is too high for it",
                    name, step, {"ratio": ratio},
                )  # fmt: skip
            is_still = ratio == 0 and grad.get(name, 0.0) > 0
            still = self._still[name] = self._still.get(name, 0) + 1 if is_still else 0
            if still == self._config.patience:
                yield Finding(
                    "weights_do_not_move", "warning",
                    f"the weights of layer {name!r} do not move though they have a gradient: its "
                    "steps are too small for their number type, or a hook holds them",
                    name, step,
                )  # fmt: skip
        yield from self._without_optimizer(step, layers)

    def _without_optimizer(self, step: int, layers: Iterable[Layer]) -> Iterator[Finding]:
        if self._told_unowned or self._checks != self._config.patience:
            return
        self._told_unowned = True
        if not self._unowned(layers):
            return
        self._owners.search()
        for layer in self._unowned(layers):
            yield Finding(
                "not_in_optimizer", "warning",
                f"layer {layer.name!r} has a gradient, but its weights are in no optimizer: it "
                "does not learn",
                layer.name, step,
            )  # fmt: skip

    def _unowned(self, layers: Iterable[Layer]) -> list[Layer]:
        """The layers with a gradient of which no known optimizer holds anything that has one."""
        held = self._owners.held()
        found: list[Layer] = []
        for layer in layers:
            own = [p for p in layer.parameters.values() if p.grad is not None and p.requires_grad]
            if own and held.isdisjoint(map(id, own)):
                found.append(layer)
        return found


def _some_rows(weight: torch.Tensor) -> torch.Tensor:
    """Parts of some rows of a weight, another part of each: together they see every input."""
    weight = weight.detach()
    every, width = max(1, weight.shape[0] // _ROWS), weight.stride(0)
    rows = -(-weight.shape[0] // every)
    part = width // rows
    if part < _SHORT or width * weight.shape[0] != weight.numel():
        return weight[::every]  # short rows, or such as do not lie one behind the other
    return weight.as_strided((rows, part), (every * width + part, 1))
