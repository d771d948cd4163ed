"""The statistics of named tensors: one call for all, and none lost because of another."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel.batch import Late
from cirron_otel.weights.statistics import Skipped, buffer_stats, tensor_stats, to_record
from cirron_otel.weights.tensors import Named, dtype_name

if TYPE_CHECKING:
    from cirron_otel._guard import Guard
    from cirron_otel.weights.statistics import TensorStats


class LateStats(Late):
    """The ``stats`` of a row.

    The dicts and lists they become, five for each tensor, took the training's thread a third of the
    time of a snapshot, not counting the garbage collector, under whose eyes they lay until a flush.
    """

    __slots__ = ("_stats",)

    def __init__(self, stats: TensorStats) -> None:
        self._stats = stats

    def make(self) -> dict[str, Any]:
        """As the spool has them."""
        return to_record(self._stats)


class Measured(NamedTuple):
    """What is said of one tensor: the ``stats`` of its row, or why there are none."""

    stats: LateStats | None
    skipped: str | None
    attrs: dict[str, Any]


def measured(guard: Guard, tensors: Sequence[Named]) -> list[Measured]:
    """The statistics of each tensor, in order. Blocks until they are there; never raises."""
    torch = sys.modules.get("torch")
    is_torch = [torch is not None and isinstance(one.tensor, torch.Tensor) for one in tensors]
    ours = [one.tensor for one, yes in zip(tensors, is_torch, strict=True) if yes]
    found = iter(_all(guard, ours))
    return [
        _said(next(found) if yes else _of_array(guard, one.tensor))
        for one, yes in zip(tensors, is_torch, strict=True)
    ]


def _all(guard: Guard, tensors: list[Any]) -> list[TensorStats | Skipped]:
    if not tensors:
        return []
    try:
        return tensor_stats(tensors)
    except Exception as error:  # noqa: BLE001 - one by one all but the odd one are there
        why = error
    found: list[TensorStats | Skipped] = []
    for one in tensors:
        try:
            found += tensor_stats([one])
        except Exception as error:  # noqa: BLE001 - its row says so
            found.append(Skipped("error", repr(error)))
    guard.swallow("snapshot", why)
    return found


def _of_array(guard: Guard, array: Any) -> TensorStats | Skipped:  # noqa: ANN401
    """The statistics of an array that is not torch's."""
    numpy = sys.modules.get("numpy")
    if numpy is None or not isinstance(array, numpy.ndarray):
        return Skipped("not_a_tensor", f"a {type(array).__name__}")
    try:
        whole = numpy.ascontiguousarray(array)
        return buffer_stats(
            memoryview(whole.reshape(-1).view(numpy.uint8)), dtype_name(whole), array.shape
        )
    except Exception as error:  # noqa: BLE001 - its row says so
        guard.warn("snapshot_array", f"an array has no statistics: {error!r}")
        return Skipped("error", repr(error))


def _said(found: TensorStats | Skipped) -> Measured:
    if isinstance(found, Skipped):
        return Measured(None, found.reason, {})
    return Measured(LateStats(found), None, found.attrs)
