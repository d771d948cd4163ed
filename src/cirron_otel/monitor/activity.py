"""What the channels of a layer put out while somebody looks: the largest value of each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from cirron_otel._guard import Guard
from cirron_otel.monitor.hooking import Hooks, learns
from cirron_otel.monitor.kinds import channel_axis


class Site(NamedTuple):
    """Where the channels of a producer are seen: behind its BatchNorm, or behind itself."""

    producer: str
    module: nn.Module
    #: The producer itself; how often it runs is counted too.
    itself: nn.Module


class Activity:
    """Hooks on some modules for the windows that end in a check."""

    def __init__(self, model: nn.Module, sites: Sequence[Site], guard: Guard) -> None:
        self._model = model
        self._sites = sites
        self._hooks = Hooks(guard)
        self._peaks: dict[str, torch.Tensor] = {}
        #: Forward passes of the model, and runs of each site and of each producer behind it.
        self.passes = 0
        self.runs: Counter[str] = Counter()
        #: The node of autograd that made the last output of each site.
        self.nodes: dict[str, object] = {}
        self._own_runs: Counter[str] = Counter()
        self._paired = {site.producer for site in sites if site.itself is not site.module}
        #: Whether the whole window was seen.
        self.is_whole = False

    def begin(self) -> None:
        """Look from now on."""
        self._peaks = {}
        self.passes = 0
        self.runs.clear()
        self.nodes.clear()
        self._own_runs.clear()
        self.is_whole = True
        if self._hooks or not self._sites:
            return
        self._hooks.before(self._model, self._pass_begins)
        for site in self._sites:
            self._hooks.after(site.module, self._seen_at, site.producer)
            if site.itself is not site.module:
                self._hooks.after(site.itself, self._ran, site.producer)

    def counts(self, producer: str) -> dict[str, int]:
        """How often the producer ran in this window, and its BatchNorm where it has one."""
        if producer in self._paired:
            return {"producer": self._own_runs[producer], "batchnorm": self.runs[producer]}
        return {"producer": self.runs[producer]}

    def end(self) -> Mapping[str, torch.Tensor]:
        """The largest output by channel of each producer that ran, where it was computed."""
        return self._peaks

    def stop(self) -> None:
        """Look no more."""
        self._hooks.remove()
        self.nodes.clear()
        self._peaks = {}
        self.is_whole = False

    def _pass_begins(self, module: nn.Module, _args: object) -> None:
        self.passes += learns(module)

    def _seen_at(self, producer: str, module: nn.Module, _args: object, output: object) -> None:
        if not (learns(module) and isinstance(output, torch.Tensor) and output.numel()):
            return
        self.runs[producer] += 1
        self.nodes[producer] = output.grad_fn
        self.add(producer, channel_peaks(module, output.detach()))

    def _ran(self, producer: str, module: nn.Module, _args: object, _output: object) -> None:
        self._own_runs[producer] += learns(module)

    def add(self, producer: str, peak: torch.Tensor) -> None:
        """Take in the largest outputs of one run."""
        keep_largest(self._peaks, producer, peak)


def keep_largest(peaks: dict[str, torch.Tensor], name: str, peak: torch.Tensor) -> None:
    """Take the largest outputs of one more run into ``peaks``."""
    before = peaks.get(name)
    peaks[name] = peak if before is None else torch.maximum(before, peak)


def channel_peaks(module: nn.Module, output: torch.Tensor) -> torch.Tensor:
    """The largest value of each channel of what ``module`` put out."""
    channel = channel_axis(module, output.dim())
    others = [axis for axis in range(output.dim()) if axis != channel]
    return output.amax(dim=others) if others else output
