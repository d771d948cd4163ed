"""The size of what passes between the blocks of a deep model: its residual stream."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from cirron_otel._guard import Guard
from cirron_otel.findings import Finding
from cirron_otel.monitor.config import MonitorConfig
from cirron_otel.monitor.hooking import Hooks, learns, tensors_in

_FEWEST = 2
_RECENT = 10


class Residuals:
    """Hooks on blocks for the windows that end in a check, and what is remembered of each."""

    def __init__(self, model: nn.Module, config: MonitorConfig, guard: Guard) -> None:
        self._blocks = blocks_of(model)
        self._config = config
        self._hooks = Hooks(guard)
        self._sizes: dict[str, torch.Tensor] = {}
        self._recent: dict[str, deque[float]] = {}
        self._large: dict[str, int] = {}

    def begin(self) -> None:
        """Look from now on."""
        self._sizes = {}
        if not self._hooks:
            for name, block in self._blocks.items():
                self._hooks.after(block, self._seen_at, name)

    def stop(self) -> None:
        """Look no more."""
        self._hooks.remove()

    def _seen_at(self, name: str, module: nn.Module, _args: object, output: object) -> None:
        out = next(iter(tensors_in(output)), None)
        if learns(module) and out is not None and out.is_floating_point() and out.numel():
            norm = torch.linalg.vector_norm(out.detach(), dtype=torch.float32)
            self._sizes[name] = norm / math.sqrt(out.numel())

    def take(self) -> list[tuple[list[str], torch.Tensor]]:
        """Root mean square of the last output of each block, where it was computed."""
        sizes, self._sizes = self._sizes, {}
        return [([name], size) for name, size in sizes.items()]

    def look(self, step: int, sizes: Mapping[str, float]) -> Iterator[Finding]:
        """The findings of one check: the first block at which the stream has grown."""
        confirmations, cause = self._config.alarm_confirmations, None
        for name in self._blocks:
            size = sizes.get(name)
            if size is None or not (size > 0 and math.isfinite(size)):
                continue
            recent = self._recent.setdefault(name, deque(maxlen=_RECENT))
            level = math.log10(size)
            warm = len(recent) >= max(1, min(self._config.warmup, _RECENT))
            usual = statistics.median(recent) if warm else None
            is_large = usual is not None and level > usual + max(self._config.alarm_min_decades, 1)
            large = self._large[name] = self._large.get(name, 0) + 1 if is_large else 0
            if not is_large:
                recent.append(level)
            elif large == confirmations and cause is None and usual is not None:
                cause = name
                yield Finding(
                    "residual_exploding", "warning",
                    f"what block {name!r} puts out has grown to {size:.3g} from {10**usual:.3g} "
                    "(root mean square)",
                    name, step, {"rms": size, "usual": 10**usual},
                )  # fmt: skip


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks of a model: the members of lists of two and more that are all of one class."""
    found: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        kinds = {type(child) for child in module.children()}
        if len(module) < _FEWEST or len(kinds) != 1:
            continue
        if not any(True for child in module.children() for _ in child.children()):
            continue  # plain layers
        prefix = f"{name}." if name else ""
        found.update({f"{prefix}{key}": child for key, child in module.named_children()})
    return found
