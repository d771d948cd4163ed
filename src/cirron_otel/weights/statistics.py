"""Statistics of tensors: one call for all tensors of a snapshot, right for every dtype.

On the CPU a small compiled kernel reads each tensor once, or twice from the cache, on as many
threads as torch may use; where it was not built torch's own operations do the same, more slowly. On
an accelerator the numbers are made there, and only they come to the host. docs/snapshots.md, "How
the numbers are made and what limits them", tells of speed and exactness.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cirron_otel.weights.numbers import (
    Finite,
    Histogram,
    Skipped,
    TensorStats,
    describe,
    describe_empty,
    to_record,
)
from cirron_otel.weights.reductions_buffer import buffer_stats

if TYPE_CHECKING:
    import torch

__all__ = [
    "Finite", "Histogram", "Skipped", "TensorStats", "buffer_stats", "tensor_stats", "to_record",
]  # fmt: skip


def tensor_stats(
    tensors: Sequence[torch.Tensor], *, histogram: bool = True
) -> list[TensorStats | Skipped]:
    """The numbers of each tensor, or why there are none, in order.

    Reads the values as they are now and blocks until all numbers are there: call it on the thread
    that changes the tensors. Needs at most 4 MB besides, whatever their size; keeps no reference,
    makes no gradient, takes no random number. A tensor that cannot be read does not keep the others
    from being described; never raises for what a tensor holds.

    Args:
        tensors: Tensors of any dtype, layout and device. Of a sharded one (``DTensor``) the part
            that lies in this process is described, its placement is in ``attrs``.
        histogram: False leaves histograms out, which saves half of the work.
    """
    # Only who has imported torch can have tensors.
    from cirron_otel.weights.readable import Readable, readable, undisturbed  # noqa: PLC0415
    from cirron_otel.weights.reductions import reduce_all  # noqa: PLC0415

    with undisturbed():
        found: list[Readable | Skipped] = [readable(one) for one in tensors]
        full = [one for one in found if isinstance(one, Readable) and one.tensor.numel()]
        reduced = dict(zip(map(id, full), reduce_all(full, histogram=histogram), strict=True))
    out: list[TensorStats | Skipped] = []
    for one in found:
        if isinstance(one, Skipped):
            out.append(one)
            continue
        numbers = reduced.get(id(one))
        if numbers is None:
            out.append(describe_empty(one.dtype, one.shape, one.attrs, histogram=histogram))
        elif isinstance(numbers, Skipped):
            out.append(numbers)
        else:
            out.append(describe(numbers, one.dtype, one.shape, one.attrs))
    return out
