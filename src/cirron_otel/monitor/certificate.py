"""Certificates: which channels can never learn again, as far as can be proven.

The theorem, its premises and which condition here is about which premise: ``docs/certificate.md``.
What is found to break a premise refuses a certificate, or ends one that stands.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from cirron_otel.monitor import kinds
from cirron_otel.monitor.activity import Activity
from cirron_otel.monitor.checks.channels import Classes
from cirron_otel.monitor.modules import version_of
from cirron_otel.monitor.owners import Owners
from cirron_otel.monitor.producers import Producer, is_own_weight
from cirron_otel.monitor.reads import At, Read
from cirron_otel.monitor.structure import Consumers

STATEMENT = (
    "each of these channels puts out one number, at most zero, for every input (its filter is "
    "zero, or its BatchNorm scale is), so its ReLU is closed and no gradient comes through; the "
    "optimizer moves nothing here without one: the channel stays dead"
)
#: What the conditions cannot see, and what they were.
ASSUMES = [
    "inputs of the layer are finite",
    "a ReLU takes the output, and nothing else does, at every step as at the checked ones",
    "the loss has no term of its own in these weights at other steps",
    "BatchNorm normalises with the batch whenever a gradient flows through it",
    "every optimizer that moves these weights is a torch optimizer, in this process",
    "nothing writes them past torch's version counters (through .data, numpy or a foreign kernel)",
    "the optimizer's settings do not become such that weight decay carries the shift past zero",
    "at this check: no momentum, a gradient of exactly zero",
]
MOMENTUM = "the optimizer still holds momentum for these channels"
GRADIENT = "these channels have a gradient that is not zero"
MOVED = "its weights are no longer those of a dead channel"


class Evidence(NamedTuple):
    """What there is beyond the weights: boolean vectors over the channels, on the CPU."""

    #: Of past gradients: of the filter and the producer's bias under a BatchNorm, scale, shift.
    filter_moves: torch.Tensor
    scale_moves: torch.Tensor
    shift_moves: torch.Tensor
    #: Whether any gradient of the channel is not zero.
    gradient: torch.Tensor


class Verdict(NamedTuple):
    """What became of the candidates of one layer."""

    certified: torch.Tensor
    #: Reasons for a refusal, with the number of candidates.
    refused: list[tuple[str, int]]


class Window(NamedTuple):
    """What was seen of the forward passes before a check; None where this was the first one."""

    activity: Activity | None
    #: Steps since the check before; 0 at the first one.
    steps: int
    #: Whether a gradient scaler will skip this step, as gradients are no numbers.
    skips: bool
    #: The graph of the loss.
    consumers: Consumers

    def why_no_relu(self, layer: str) -> str | None:
        """Why a ReLU alone does not use what a layer put out last; None where nothing is known."""
        if self.activity is None:
            return None
        return self.consumers.why_no_relu(self.activity.nodes.get(layer))


class Certificates:
    """What has been refused for good, and the conditions of one check. The training thread."""

    def __init__(self, owners: Owners) -> None:
        self._owners = owners
        #: By producer, why nothing of it can ever be proven.
        self.never: dict[str, str] = {}
        self._batches: dict[str, int] = {}
        self._new_batches: dict[str, int] = {}
        self._searched = False

    def forbid(self, layer: str, why: str) -> None:
        """Refuse a layer from now on."""
        self.never.setdefault(layer, why)

    # --- evidence ---------------------------------------------------------------------------------

    def gather(self, producers: Iterable[Producer]) -> dict[str, Evidence]:
        """Look at momentum and gradients of some layers, in one read."""
        read = Read()
        places: dict[str, list[At]] = {}
        for one in producers:
            nothing = torch.zeros(one.channels, dtype=torch.bool, device=one.filters.device)
            paired = one.batchnorm is not None
            filters = [one.weight, one.bias if paired else None]
            vectors = [
                _any(nothing, one, self._moments(filters)),
                _any(nothing, one, self._moments([one.gamma])),
                _any(nothing, one, self._moments([one.shift])),
                _any(nothing, one, [t.grad for t in one.tensors().values() if t.is_leaf]),
            ]
            places[one.name] = [read.put(vector) for vector in vectors]
        read.now()
        return {
            name: Evidence(*(read.vector(at) != 0 for at in found))
            for name, found in places.items()
        }

    def _moments(self, tensors: Iterable[torch.Tensor | None]) -> list[torch.Tensor]:
        return [m for t in tensors if t is not None for m in self._owners.first_moments(t)]

    # --- one check --------------------------------------------------------------------------------

    def begin(self, producers: Iterable[Producer]) -> None:
        """Begin a check: how often each BatchNorm has normalised with a batch by now."""
        self._searched = False
        self._batches = self._new_batches
        self._new_batches = {
            one.name: count for one in producers if (count := _batches(one)) is not None
        }

    def why_not(self, producer: Producer, window: Window) -> str | None:
        """Why nothing can be certified in a layer at this check; None where something can."""
        return self.why_broken(producer, window) or _without_gradient(producer)

    def why_broken(self, producer: Producer, window: Window) -> str | None:
        """The premise about a layer that does not hold now, whatever its channels are."""
        return (
            self.never.get(producer.name)
            or self._mode(producer)
            or self._runs(producer, window)
            or self._optimizers(producer)
        )

    def _mode(self, producer: Producer) -> str | None:
        batchnorm = producer.batchnorm
        if batchnorm is None or batchnorm.training:
            return None
        return f"{producer.batchnorm_name!r} is in evaluation mode"

    def _runs(self, producer: Producer, window: Window) -> str | None:
        activity = window.activity
        if activity is None:
            return None
        if not activity.is_whole:
            return "its forward passes were not seen since the last check"
        expected = max(1, activity.passes)
        for name, count in activity.counts(producer.name).items():
            if count != expected:
                shown = repr(producer.name if name == "producer" else producer.batchnorm_name)
                why = (
                    f"{shown} ran {count} times in {expected} forward passes: it must run exactly "
                    "once in each"
                )
                self.forbid(producer.name, why)
                return why
        before, now = self._batches.get(producer.name), self._new_batches.get(producer.name)
        if before is not None and now is not None and 0 <= now - before < window.steps:
            return (
                f"{producer.batchnorm_name!r} has normalised {now - before} batches in "
                f"{window.steps} steps: at others it was in evaluation mode, or did not run"
            )
        return None

    def _optimizers(self, producer: Producer) -> str | None:
        """Why an optimizer may move the layer without a gradient."""
        shift = producer.shift
        for name, tensor in producer.tensors().items():
            if not tensor.requires_grad:
                continue
            owners = self._owners.of(tensor)
            if not owners:
                self._search()
                owners = self._owners.of(tensor)
            if not owners:
                return f"{name!r} is in no optimizer that was found"
            for owner in owners:
                why = self._owners.why_it_moves(
                    tensor, owner, shifts=tensor is shift or tensor is producer.gamma
                )
                if why is not None:
                    return why
        return None

    def _search(self) -> None:
        if not self._searched:
            self._searched = True
            self._owners.search()

    @staticmethod
    def judge(classes: Classes, why: str | None, evidence: Evidence) -> Verdict:
        """Say which candidates are certified, and why the others are not."""
        candidates = classes.candidate
        nowhere = torch.zeros_like(candidates)
        if why is not None:
            return Verdict(nowhere, [(why, int(candidates.sum()))])
        at_rest = (classes.zero_row & ~evidence.filter_moves & ~evidence.shift_moves) | (
            classes.zero_scale & ~evidence.scale_moves & ~evidence.shift_moves
        )
        moving, pulled = candidates & ~at_rest, candidates & evidence.gradient
        certified = candidates & at_rest & ~evidence.gradient
        refused = [
            (text, count)
            for text, mask in ((MOMENTUM, moving), (GRADIENT, pulled & at_rest))
            if (count := int(mask.sum()))
        ]
        return Verdict(certified, refused)

    def look_for_others(self, producer: Producer) -> bool:
        """Search for optimizers before a layer gets a new certificate; says if there are more."""
        before = sum(len(self._owners.of(t)) for t in producer.tensors().values())
        self._search()
        return sum(len(self._owners.of(t)) for t in producer.tensors().values()) > before

    def violations(
        self, producer: Producer, standing: torch.Tensor, classes: Classes | None,
        evidence: Evidence,
    ) -> list[tuple[str, torch.Tensor]]:  # fmt: skip
        """Which channels with a certificate are no longer what it says, and why."""
        if classes is None:
            return [(MOVED, standing)]
        moved = standing & ~classes.candidate
        rest = standing & ~moved
        moves = torch.where(classes.zero_row, evidence.filter_moves, evidence.scale_moves)
        shift = producer.shift
        if shift is None or not self._owners.decays_with_momentum(shift):
            moves = moves | evidence.shift_moves
        pulled = rest & evidence.gradient
        return [
            (why, mask)
            for why, mask in (
                (MOVED, moved), (GRADIENT, pulled), (MOMENTUM, rest & moves & ~pulled),
            )
            if bool(mask.any())
        ]  # fmt: skip


def why_never(  # noqa: PLR0911 - one premise after the other
    producer: Producer, optimizer: object, family: str | None, blocked: Mapping[str, str],
    shared: Collection[int],
) -> str | None:  # fmt: skip
    """Why nothing can ever be proven of a layer that has a ReLU behind it."""
    if optimizer is None:
        return "no optimizer was given"
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"{type(optimizer).__name__} is no torch optimizer"
    if family is None:
        return (
            f"it is not known that {type(optimizer).__name__} leaves weights without a gradient "
            "alone (name it in certify_optimizers if it does)"
        )
    why = blocked.get(producer.name)
    if why is not None:
        return why
    if kinds.has_forward_of_its_own(producer.module):
        return f"{type(producer.module).__name__} has a forward of its own: it may compute anything"
    tensors = producer.tensors().values()
    if not is_own_weight(producer.module) or any(
        not isinstance(tensor, torch.nn.Parameter) for tensor in tensors
    ):
        return "its weight is computed from others (weight norm, a mask)"
    if any(id(tensor) in shared for tensor in tensors):
        return "another module has the same weights"
    return None


def _without_gradient(producer: Producer) -> str | None:
    for name, tensor in producer.tensors().items():
        if tensor.requires_grad and tensor.grad is None:
            return f"{name!r} has no gradient at this check"
    return None


def _batches(producer: Producer) -> int | None:
    """How often the BatchNorm counted a batch, from the counter of changes: nothing is read."""
    counted: Any = getattr(producer.batchnorm, "num_batches_tracked", None)
    return None if counted is None else version_of(counted)


def _any(
    nothing: torch.Tensor, producer: Producer, tensors: Iterable[torch.Tensor | None]
) -> torch.Tensor:
    """For each channel whether anything in the tensors is not zero; NaN is not."""
    found = nothing
    for tensor in tensors:
        if tensor is None:
            continue
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        nonzero = producer.by_channel(dense.detach()) != 0
        found = found | (nonzero if nonzero.dim() == 1 else nonzero.flatten(1).any(1))
    return found
