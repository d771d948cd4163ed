"""Statistics on an accelerator: all tensors of one dtype in four launches.

The kernels are Triton's, which torch brings on Linux; it compiles each at its first use and keeps
them on disk. A first pass takes range, sum and what is not finite of every chunk; the ends of the
histogram are then known on the device, and a second pass takes squared distances from the mean and
how many values lie at or above each edge. No value of a tensor goes to the host, no atomic is used:
the same tensor gives the same bits. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import triton
import triton.language as tl

from cirron_otel.weights.devices import to_device
from cirron_otel.weights.kernels_triton import add_rows, bin_chunk, sum_chunk
from cirron_otel.weights.numbers import BINS, Reduced, finish
from cirron_otel.weights.reductions_torch import inner_edges

#: What the kernels read; the rest goes through torch's own operations.
DTYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

#: Elements that a program looks at together, and how many groups of 32 lanes do it.
_BLOCK = 512
_WARPS = 4
#: A chunk is one program's work: at least this many elements, and no more chunks than these.
_LEAST_CHUNK = 1 << 14
_MOST_CHUNKS = 1 << 12
#: Columns of a chunk's row in the first pass, of which LOW and HIGH are no sums.
_WIDTH = 8
_LOW, _HIGH = 5, 6


class _Work:
    """Which program reads which part of which tensor: one table, copied to the device once."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        sizes = [one.numel() for one in tensors]
        least = max(_LEAST_CHUNK, -(-sum(sizes) // _MOST_CHUNKS))
        self.chunk = triton.next_power_of_2(least)
        addresses = [one.data_ptr() for one in tensors]
        self.aligned = all(address % 16 == 0 for address in addresses)
        counts = [-(-size // self.chunk) for size in sizes]
        self.chunks, self.tensors = sum(counts), len(tensors)
        of_tensor = torch.tensor(counts, dtype=torch.int64, device="cpu")
        firsts = of_tensor.cumsum(0) - of_tensor
        owner = torch.repeat_interleave(of_tensor)
        place = torch.arange(self.chunks, device="cpu") - firsts[owner]
        head = torch.tensor([*addresses, *sizes], dtype=torch.int64, device="cpu")
        table = torch.cat([head, owner, place, firsts, of_tensor])
        self.table = to_device(table, tensors[0].device)
        self.firsts, self.counts = torch.split(self.table[-2 * self.tensors :], self.tensors)


def launch(tensors: Sequence[torch.Tensor], *, histogram: bool) -> torch.Tensor:
    """A row for each tensor, still on the device, for :func:`reduced`; on the current stream.

    Of tensors on one device, of one dtype of :data:`DTYPES`, not empty, without gaps. Raises
    whatever Triton raises where it cannot compile.
    """
    work = _Work(tensors)
    device = tensors[0].device
    shape: dict[str, Any] = {
        "CHUNK": work.chunk, "BLOCK": _BLOCK, "ELEMENT": DTYPES[tensors[0].dtype],
        "ALIGNED": work.aligned, "num_warps": _WARPS, "enable_fp_fusion": False,
    }  # fmt: skip
    every = (work.chunks,)

    def doubles(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.float64, device=device)

    def added(rows: torch.Tensor, low: int, high: int) -> torch.Tensor:
        out = doubles(work.tensors, rows.shape[1])
        add_rows[(work.tensors,)](
            rows, work.firsts, work.counts, out,
            WIDTH=rows.shape[1], LOW=low, HIGH=high, TILE=64, enable_fp_fusion=False,
        )  # fmt: skip
        return out

    rows = doubles(work.chunks, _WIDTH)
    sum_chunk[every](work.table, rows, work.tensors, work.chunks, **shape)
    sums = added(rows, _LOW, _HIGH)
    means = sums[:, 4] / sums[:, 0]
    edges = inner_edges(sums[:, _LOW, None], sums[:, _HIGH, None])
    at_least = edges.float()
    # The least float that is not below: a float is compared with it as with the double.
    further = at_least.nextafter(torch.full_like(at_least, torch.inf))
    at_least = torch.where(at_least.double() < edges, further, at_least)
    at_least = torch.nn.functional.pad(at_least, (0, 1))
    rows = doubles(work.chunks, BINS)
    bin_chunk[every](
        work.table, means, at_least, rows, work.tensors, work.chunks, **shape, EDGES=histogram
    )
    return torch.cat([sums, added(rows, -1, -1)], dim=1)


def reduced(row: list[float], *, histogram: bool) -> Reduced:
    """The numbers in a row of :func:`launch`, on the host."""
    count, nans, pos_infs, neg_infs = (int(one) for one in row[:4])
    counts = None
    if histogram:
        above = [count, *(int(one) for one in row[_WIDTH + 1 :]), 0]
        counts = [here - further for here, further in pairwise(above)]
    mean = row[4] / count if count else 0.0
    odd = (nans, pos_infs, neg_infs)
    return finish(odd, count, row[_LOW], row[_HIGH], mean, row[_WIDTH], 0, counts)
