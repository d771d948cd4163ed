"""What changed from one checkpoint to another: which tensors, by how much, and what died."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from cirron_otel.checkpoints.channels import MOST_LISTED, Channels
from cirron_otel.checkpoints.rules import Finding
from cirron_otel.checkpoints.tables import Tensor
from cirron_otel.reading.values import counted
from cirron_otel.weights.distances import distance

#: Bytes that are compared at a time.
_BYTES = 1 << 22
_EMBEDDING = re.compile(r"embed|wte|word_embeddings|token_emb|shared", re.IGNORECASE)


@dataclass(slots=True)
class Change:
    """By how much a tensor changed: the length of the difference, and that over the norm before."""

    tensor: str
    #: None where a value is not finite, or all were zero before.
    change: float | None
    abs_change: float | None


@dataclass(slots=True)
class Difference:
    """One checkpoint held against an earlier one."""

    #: The most changed first.
    changed: list[Change] = field(default_factory=list)
    unchanged: list[str] = field(default_factory=list)
    added: list[str] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    reshaped: list[dict[str, Any]] = field(default_factory=list)
    dtype_changed: list[dict[str, Any]] = field(default_factory=list)
    embedding_rows_unchanged: list[dict[str, Any]] = field(default_factory=list)
    newly_dead: list[dict[str, Any]] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def compare(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Difference:
    """Hold every tensor against the one of the same name. Blocks while it reads both files."""
    found = Difference(
        added=[name for name in after if name not in before],
        removed=[name for name in before if name not in after],
    )
    for name, new in after.items():
        old = before.get(name)
        if old is None:
            continue
        if old.dtype != new.dtype:
            found.dtype_changed.append({"tensor": name, "before": old.dtype, "after": new.dtype})
        if old.shape != new.shape:
            shapes = {"before": list(old.shape), "after": list(new.shape)}
            found.reshaped.append({"tensor": name, **shapes})
            continue
        same = old.dtype == new.dtype
        if same and _same_bytes(old, new):
            found.unchanged.append(name)
            continue
        length, norm = _length(old, new)
        if length == 0:
            found.unchanged.append(name)
            continue
        share = length / norm if length is not None and norm else None
        found.changed.append(Change(name, share, length))
        if same and len(new.shape) == 2 and new.is_float and _EMBEDDING.search(name):  # noqa: PLR2004 - a matrix
            kept = _same_rows(old, new)
            if kept:
                rows = {"tensor": name, "unchanged": kept, "rows": new.shape[0]}
                found.embedding_rows_unchanged.append(rows)
    found.changed.sort(key=lambda one: -math.inf if one.change is None else -one.change)
    return found


def newly_dead(before: Sequence[Channels], after: Sequence[Channels]) -> list[dict[str, Any]]:
    """Channels that are constant or decayed now and were not before, for each BatchNorm."""
    old = {one.batchnorm.name: one for one in before}
    found = []
    for one in after:
        was = old.get(one.batchnorm.name)
        if was is None or was.batchnorm.channels != one.batchnorm.channels:
            continue
        new = sorted({*one.dead, *one.flat} - {*was.dead, *was.flat})
        if new:
            name = one.batchnorm.name
            found.append({"batchnorm": name, "count": len(new), "channels": new[:MOST_LISTED]})
    return found


def of_difference(found: Difference) -> Iterator[Finding]:
    """The findings that come from comparing."""
    same = len(found.unchanged)
    if same and not (found.changed or found.added or found.removed or found.reshaped):
        yield Finding(
            "identical_weights",
            "warning",
            f"all {counted(same, 'tensor')} are what they were: nothing was trained",
        )
    elif same and found.changed:
        total = same + len(found.changed)
        yield Finding(
            "frozen_tensors",
            "info",
            f"{same:,} of {counted(total, 'tensor')} are what they were",
            None,
            {"count": same, "tensors": found.unchanged[:MOST_LISTED]},
        )
    for dead in found.newly_dead:
        count = dead["count"]
        yield Finding(
            "newly_dead",
            "warning",
            f"{counted(count, 'channel')} became constant since the other checkpoint",
            dead["batchnorm"],
            dead,
        )
    for rows in found.embedding_rows_unchanged:
        yield Finding(
            "embedding_rows_unchanged",
            "info",
            f"{rows['unchanged']:,} of {counted(rows['rows'], 'row')} are what they were",
            rows["tensor"],
            rows,
        )


def _same_bytes(old: Tensor, new: Tensor) -> bool:
    (first, keep), (second, keep_too) = old.load(), new.load()
    same = len(first) == len(second) and all(
        # As bytes they are compared at memory speed; views go byte by byte.
        bytes(first[at : at + _BYTES]) == bytes(second[at : at + _BYTES])
        for at in range(0, len(first), _BYTES)
    )
    del keep, keep_too
    return same


def _same_rows(old: Tensor, new: Tensor) -> int:
    (first, keep), (second, keep_too) = old.load(), new.load()
    rows = new.shape[0]
    step = len(first) // rows if rows else 0
    kept = sum(
        bytes(first[at : at + step]) == bytes(second[at : at + step])
        for at in range(0, len(first), step or 1)
    )
    del keep, keep_too
    return kept


def _length(old: Tensor, new: Tensor) -> tuple[float | None, float | None]:
    (first, keep), (second, keep_too) = old.load(), new.load()
    found = distance(first, old.dtype, second, new.dtype)
    del keep, keep_too
    return found
