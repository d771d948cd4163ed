"""One check of a checkpoint, from a path to what is said of it."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cirron_otel.checkpoints import rules
from cirron_otel.checkpoints.channels import Channels, classify
from cirron_otel.checkpoints.grouping import batchnorms, norm_scales
from cirron_otel.checkpoints.measuring import Facts, measure
from cirron_otel.checkpoints.opening import Checkpoint, open_checkpoint
from cirron_otel.reading.values import counted

if TYPE_CHECKING:
    from cirron_otel.checkpoints.comparing import Difference

_STATISTICS = ("running_mean", "running_var")
GATES = ("critical", "warning", "never")


@dataclass(slots=True)
class Result:
    """What a check found."""

    checkpoint: Checkpoint
    facts: dict[str, Facts]
    layers: list[Channels]
    norms: int
    findings: list[rules.Finding]
    seconds: float
    against: Path | None = None
    diff: Difference | None = None
    dtypes: Counter[str] = field(default_factory=Counter)

    @property
    def parameters(self) -> int:
        """How many values are learned, as far as names tell: running statistics are not."""
        return sum(
            one.numel
            for name, one in self.checkpoint.tensors.items()
            if one.is_float and not name.endswith(_STATISTICS)
        )

    @property
    def bytes(self) -> int:
        """The size of all files."""
        return sum(path.stat().st_size for path in self.checkpoint.files)

    def counts(self) -> dict[str, int]:
        """How many findings there are of each severity."""
        found = Counter(one.severity for one in self.findings)
        return {name: found[name] for name in rules.SEVERITIES}

    def fails(self, gate: str) -> bool:
        """Whether a finding is at or above the gate: ``critical``, ``warning`` or ``never``."""
        counts = self.counts()
        return (gate != "never" and counts["critical"] > 0) or (
            gate == "warning" and counts["warning"] > 0
        )

    def verdict(self) -> str:
        """One sentence."""
        counts = self.counts()
        if counts["critical"]:
            return "BROKEN: this checkpoint should not be used as it is."
        if counts["warning"]:
            return "SUSPICIOUS: it can be used, and something in it is not as it should be."
        if counts["info"]:
            return "No problem found; some facts are worth knowing."
        return "No problem found."

    def to_dict(self) -> dict[str, Any]:
        """For JSON: only plain values, and no number that JSON has not."""
        one = self.checkpoint
        found: dict[str, Any] = {
            "file": str(one.path),
            "format": one.format,
            "files": [str(path) for path in one.files],
            "wrapper": one.wrapper or None,
            "model_type": one.model_type or None,
            "tensors": len(one.tensors),
            "parameters": self.parameters,
            "dtypes": dict(self.dtypes),
            "batchnorm_layers": len(self.layers),
            "norm_layers": self.norms,
            "verdict": self.verdict(),
            "severity_counts": self.counts(),
            "findings": [
                {
                    "kind": each.kind,
                    "severity": each.severity,
                    "layer": each.layer,
                    "message": each.message,
                    "attributes": each.attributes,
                }
                for each in self.findings
            ],
            "layers": [layer.to_dict() for layer in self.layers],
            "notes": one.notes,
            "seconds": round(self.seconds, 6),
        }
        if self.diff is not None:
            found["against"] = str(self.against)
            found["diff"] = self.diff.to_dict()
        return found


def check(path: Path, *, against: Path | None = None, relu_after: Sequence[str] = ()) -> Result:
    """Look into a checkpoint, and hold it against another one. Blocks while it reads them.

    Trains nothing, runs nothing of what the files hold, and imports torch only for files of torch.

    Args:
        path: A file, an index of shards, or a folder with either.
        against: Another one, such as what the training began with.
        relu_after: Patterns of names of BatchNorms that a ReLU follows directly. What rests on
            that is a warning there, and a mere fact elsewhere.

    Raises:
        CheckpointError: A file cannot be read, or not be trusted.
        CirronDependencyError: It is a file of torch, and torch is missing or too old.
    """
    start = time.perf_counter()
    one = open_checkpoint(path)
    base = None if against is None else open_checkpoint(against)
    facts = measure(one.tensors.values())
    layers = _layers(one, facts, relu_after)
    norms = norm_scales(one.tensors, [layer.batchnorm for layer in layers])
    findings = list(rules.of_values(one, facts, layers, norms))
    diff = None
    if base is not None:
        from cirron_otel.checkpoints import comparing  # noqa: PLC0415 - only who compares waits

        diff = comparing.compare(base.tensors, one.tensors)
        if layers:
            old = _layers(base, measure(base.tensors.values()), relu_after)
            diff.newly_dead = comparing.newly_dead(old, layers)
        findings += comparing.of_difference(diff)
    unread = sum(each.is_float and name not in facts for name, each in one.tensors.items())
    if unread:
        one.notes.append(f"{counted(unread, 'tensor')} of a type that is not looked into")
    return Result(
        one, facts, layers, len(norms), rules.ranked(findings), time.perf_counter() - start,
        against, diff, Counter(each.dtype for each in one.tensors.values()),
    )  # fmt: skip


def _layers(one: Checkpoint, facts: dict[str, Facts], relu_after: Sequence[str]) -> list[Channels]:
    return [classify(norm, facts) for norm in batchnorms(one.tensors, relu_after=relu_after)]
