"""The way of accelerators, run on this machine: Triton's interpreter, and torch's operations."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from cirron_otel.weights import reductions, reductions_kernel
from cirron_otel.weights.statistics import TensorStats, tensor_stats
from weights.statistics_by_hand import check

TRITON = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed"
)
TESTS = Path(__file__).parents[1]

_INTERPRETED = """
import math, os, sys
import torch
from cirron_otel.weights import reductions, reductions_kernel, reductions_torch, reductions_triton
from cirron_otel.weights.statistics import tensor_stats
from weights.statistics_by_hand import check

reductions_kernel.COMPILED = False
reductions.FUSED_DEVICES = frozenset({"cpu"})
reductions_triton._LEAST_CHUNK = 1024  # several chunks of a small tensor
calls, copies = [], []
fused, coming = reductions_triton.launch, reductions.Coming
reductions_triton.launch = lambda some, **how: calls.append(len(some)) or fused(some, **how)
reductions.Coming = lambda table: copies.append(len(table)) or coming(table)
random = torch.Generator().manual_seed(0)
tensors = []
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for size in (1, 5, 511, 512, 2100):
        tensors.append((torch.randn(size, generator=random) * 3 + 1).to(dtype))
    tensors.append(torch.full((300,), 2.5, dtype=dtype))
    odd = torch.randn(1100, generator=random).to(dtype)
    odd[3], odd[700], odd[1099] = math.nan, math.inf, -math.inf
    tensors += [odd, torch.full((3,), math.nan, dtype=dtype), tensors[-3][1:]]
tensors += [torch.randn(9, 40, generator=random)[:, 3:], torch.arange(50), torch.ones(3).double()]
tensors.append(torch.randn(4, 6, generator=random).t())
for one, tensor in zip(tensor_stats(tensors), tensors, strict=True):
    check(one, tensor)
assert calls == [1, 10, 1, 9, 1, 9], calls  # a probe and a call for each dtype
assert copies == [1, 1, 1, 28], copies  # of all dtypes together
bare = tensor_stats(tensors, histogram=False)
assert all(one.histogram is None for one in bare)

# What `make gpu-check` times of the launches, in a shape of its own too.
sys.path.insert(0, os.path.join(os.environ["PYTHONPATH"], "gpu"))
import figures
from place import Place

place = Place("cpu")
work = [row.work for row in figures.resnet50(place, 1) + figures.tune(place, 1)]
assert "25.6 M: numbers alone, device" in work
assert any(one.startswith("1 G: blocks of ") for one in work)
print("agreed on", len(tensors))
"""

_COMPILED = """
import triton, triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from cirron_otel.weights import kernels_triton as ours

made = 0
for capability in (75, 90):
    for element in (tl.float32, tl.bfloat16):
        shape = {"CHUNK": 16384, "BLOCK": 512, "ELEMENT": element, "ALIGNED": True}
        table = {"work": "*i64", "tensors": "i32", "chunks": "i32", "rows": "*fp64"}
        bins = {**table, "means": "*fp64", "edges": "*fp32"}
        lines = {"rows": "*fp64", "first": "*i64", "count": "*i64", "out": "*fp64"}
        tile = {"WIDTH": 16, "LOW": -1, "HIGH": -1, "TILE": 64}
        for kernel, types, constants in (
            (ours.sum_chunk, table, shape),
            (ours.bin_chunk, bins, {**shape, "EDGES": True}),
            (ours.add_rows, lines, tile),
        ):
            signature = {**types, **dict.fromkeys(constants, "constexpr")}
            places = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
            ordered = {name: signature[name] for name in kernel.arg_names}
            target = GPUTarget("cuda", capability, 32)
            found = triton.compile(
                ASTSource(kernel, ordered, places), target, {"enable_fp_fusion": False}
            )
            made += len(found.asm["cubin"]) > 0
print("compiled", made)
"""


def _run(program: str, tmp_path: Path, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", program],
        cwd=tmp_path,
        env={
            **os.environ, "PYTHONPATH": str(TESTS), "TRITON_CACHE_DIR": str(tmp_path / "cache"),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.strip()


@TRITON
@pytest.mark.slow
def test_the_fused_kernels_give_what_numpy_says(tmp_path: Path) -> None:
    """Triton's interpreter runs the device's kernels on the host: every number is right.

    What ``make gpu-check`` asks them for is there too.
    """
    assert _run(_INTERPRETED, tmp_path, TRITON_INTERPRET="1") == "agreed on 31"


@TRITON
@pytest.mark.slow
def test_the_fused_kernels_compile_for_devices_that_are_not_here(tmp_path: Path) -> None:
    """Triton makes machine code of all kernels for an old and a new CUDA device."""
    assert _run(_COMPILED, tmp_path) == "compiled 12"


def test_without_triton_torch_does_it_and_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the fused kernels cannot be had the numbers are the same, and one warning says why."""
    monkeypatch.setattr(reductions_kernel, "COMPILED", False)
    monkeypatch.setattr(reductions, "FUSED_DEVICES", frozenset({"cpu"}))
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "cirron_otel.weights.reductions_triton", raising=False)
    reductions.fused_way.cache_clear()
    tensor = torch.randn(3000)
    with caplog.at_level(logging.WARNING, "cirron_otel"):
        (first,), (second,) = tensor_stats([tensor]), tensor_stats([tensor])
    reductions.fused_way.cache_clear()
    assert isinstance(first, TensorStats)
    check(first, tensor)
    assert first == second
    assert caplog.text.count("pip install triton") == 1
