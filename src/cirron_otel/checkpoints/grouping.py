"""Layers found in the names of tensors: BatchNorms with what feeds them, and other norms.

A file of weights does not say how layers are connected. Names say it for most models, never for
certain; what follows from a guess is worded as one and is no warning.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from cirron_otel.checkpoints.tables import Tensor

_PARTS = frozenset({"weight", "bias", "running_mean", "running_var"})
#: A BatchNorm's name and that of what comes before it, in the same module.
_PAIRS = (
    (re.compile(r"^bn(\d*)$"), ("conv{}", "fc{}", "linear{}", "proj{}", "conv{}d")),
    (re.compile(r"^batch_?norm(\d*)$"), ("conv{}", "fc{}", "linear{}", "dense{}")),
    (re.compile(r"^normalization$"), ("convolution",)),
    (re.compile(r"^norm$"), ("conv",)),
)
_TRANSPOSED = re.compile(r"transpose|deconv|upconv|up_conv", re.IGNORECASE)
#: What a BatchNorm of such a name makes goes into a sum, not into a ReLU.
_SHORTCUT = re.compile(r"downsample|shortcut|skip|residual", re.IGNORECASE)
_BLOCK = re.compile(r"^(.*\.\d+)\.bn(\d+)$")
_NORM_NAME = re.compile(r"norm|^(ln|ln_|ln\d+|ln_\d+|lnf|ln_f)$", re.IGNORECASE)
_SCALES = frozenset({"weight", "scale", "gamma"})

STATED, GUESSED = "stated", "guessed"


@dataclass(slots=True)
class BatchNorm:
    """One BatchNorm with learned scale and shift."""

    name: str
    weight: Tensor
    bias: Tensor
    running_var: Tensor
    #: The convolution or linear layer whose output it takes, as far as names tell.
    producer: str | None
    #: Whether a ReLU takes its output, and whether somebody said so.
    feeds_relu: bool
    wiring: str

    @property
    def channels(self) -> int:
        """How many channels it has."""
        return self.weight.numel


def batchnorms(tensors: Mapping[str, Tensor], *, relu_after: Sequence[str] = ()) -> list[BatchNorm]:
    """The BatchNorms. ``relu_after`` are patterns of names after which a ReLU is known to come."""
    leaves: dict[str, set[str]] = {}
    for name in tensors:
        parent, _, leaf = name.rpartition(".")
        leaves.setdefault(parent, set()).add(leaf)
    names = [name for name, found in leaves.items() if found >= _PARTS and _is_whole(name, tensors)]
    producers = {name: _producer(name, tensors) for name in names}
    if _norms_come_first(producers, tensors):
        producers = {name: None if _by_name(name) else found for name, found in producers.items()}
    last = _last_of_blocks(names)
    made = []
    for name in names:
        stated = any(fnmatchcase(name, pattern) for pattern in relu_after)
        found = producers[name]
        if found is not None and _rows(tensors[f"{found}.weight"]) != _rows(
            tensors[f"{name}.weight"]
        ):
            found = None
        made.append(
            BatchNorm(
                name,
                tensors[f"{name}.weight"],
                tensors[f"{name}.bias"],
                tensors[f"{name}.running_var"],
                found,
                feeds_relu=stated or not (_SHORTCUT.search(name) or name in last),
                wiring=STATED if stated else GUESSED,
            )
        )
    return made


def _is_whole(name: str, tensors: Mapping[str, Tensor]) -> bool:
    found = [tensors[f"{name}.{part}"] for part in sorted(_PARTS)]
    return len({one.shape for one in found}) == 1 and all(
        len(one.shape) == 1 and one.numel and one.is_float for one in found
    )


def _rows(tensor: Tensor) -> int:
    return tensor.shape[0] if tensor.shape else 0


def _join(parent: str, leaf: str) -> str:
    return f"{parent}.{leaf}" if parent else leaf


def _by_name(name: str) -> bool:
    return any(pattern.match(name.rpartition(".")[2]) for pattern, _ in _PAIRS)


def _producer(name: str, tensors: Mapping[str, Tensor]) -> str | None:
    """What feeds it, by name alone; the sizes may not fit."""
    parent, _, leaf = name.rpartition(".")
    candidates = []
    for pattern, befores in _PAIRS:
        found = pattern.match(leaf)
        if found:
            number = found[1] if pattern.groups else ""
            candidates = [_join(parent, before.format(number)) for before in befores]
    if leaf.isdecimal() and int(leaf) > 0 and len(leaf) < 5:  # noqa: PLR2004 - no layer has more
        candidates = [_join(parent, str(int(leaf) - 1))]
    for one in candidates:
        weight = tensors.get(f"{one}.weight")
        if weight is not None and len(weight.shape) > 1 and not _TRANSPOSED.search(one):
            return one
    return None


def _norms_come_first(producers: Mapping[str, str | None], tensors: Mapping[str, Tensor]) -> bool:
    """Whether ``bn1`` comes before ``conv1`` in this model.

    A model of that kind shows it wherever a convolution has more outputs than inputs: its
    BatchNorm has the size of the inputs.
    """
    for name, before in producers.items():
        if before is None or not _by_name(name):
            continue
        weight, size = tensors[f"{before}.weight"], tensors[f"{name}.weight"].numel
        if weight.shape[0] != size and weight.shape[1] == size:
            return True
    return False


def _last_of_blocks(names: Sequence[str]) -> set[str]:
    """The last BatchNorm of each numbered block with several: a residual block adds its output."""
    highest: dict[str, tuple[int, str]] = {}
    counted: dict[str, int] = {}
    for name in names:
        found = _BLOCK.match(name)
        if found and len(found[2]) < 5:  # noqa: PLR2004 - no block has more
            block, number = found[1], int(found[2])
            counted[block] = counted.get(block, 0) + 1
            highest[block] = max(highest.get(block, (-1, "")), (number, name))
    return {name for block, (_, name) in highest.items() if counted[block] > 1}


def norm_scales(tensors: Mapping[str, Tensor], taken: Sequence[BatchNorm]) -> list[Tensor]:
    """The scales of LayerNorms, RMSNorms, GroupNorms."""
    known = {one.name for one in taken}
    found = []
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if (
            leaf in _SCALES
            and module not in known
            and len(tensor.shape) == 1
            and tensor.is_float
            and _NORM_NAME.search(module.rpartition(".")[2])
            and f"{module}.running_mean" not in tensors
        ):
            found.append(tensor)
    return found
