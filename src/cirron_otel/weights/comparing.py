"""What changed between two snapshots: from their statistics, and from the values where both are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from cirron_otel.errors import CirronError
from cirron_otel.weights import elements, exporting
from cirron_otel.weights.distances import distance
from cirron_otel.weights.reading import Row


@dataclass(slots=True)
class Change:
    """One tensor before and after; either may be missing."""

    name: str
    before: Row | None
    after: Row | None
    #: Length of the difference over the norm before, where the values of both are there.
    moved: float | None = None

    @property
    def norm_ratio(self) -> float | None:
        """The norm after over the norm before."""
        old, new = self._both("norm")
        return new / old if old and new is not None else None

    @property
    def mean_shift(self) -> float | None:
        """The mean after minus the mean before."""
        old, new = self._both("mean")
        return new - old if old is not None and new is not None else None

    def _both(self, name: str) -> tuple[float | None, float | None]:
        return (
            None if self.before is None else self.before.number(name),
            None if self.after is None else self.after.number(name),
        )

    def as_dict(self) -> dict[str, Any]:
        """As plain values, for JSON."""
        return {
            "tensor_name": self.name,
            "before": None if self.before is None else self.before.stats,
            "after": None if self.after is None else self.after.stats,
            "norm_ratio": self.norm_ratio,
            "mean_shift": self.mean_shift,
            "moved": self.moved,
        }


def compare(before: Sequence[Row], after: Sequence[Row]) -> list[Change]:
    """Each tensor of both, in the order of ``after``; those that are gone come last.

    Reads the files of both where they are there and numpy is installed.
    """
    old = {row.tensor_name: row for row in before}
    changes = [Change(row.tensor_name, old.pop(row.tensor_name, None), row) for row in after]
    changes += [Change(name, row, None) for name, row in old.items()]
    with exporting.Files() as files:
        for change in changes:
            change.moved = _moved(change, files)
    return changes


def _moved(change: Change, files: exporting.Files) -> float | None:
    if change.before is None or change.after is None:
        return None
    if len(exporting.with_files([change.before, change.after])) < 2:  # noqa: PLR2004 - both
        return None
    try:
        elements.numpy()
        (old_box, old), (new_box, new) = files.find(change.before), files.find(change.after)
    except CirronError:  # no numpy, or a file is gone: the statistics have to do
        return None
    if old.shape != new.shape:
        return None
    length, norm = distance(old_box.data(old), old.dtype, new_box.data(new), new.dtype)
    return length / norm if length is not None and norm else None
