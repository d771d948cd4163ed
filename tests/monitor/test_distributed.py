"""Two processes that train one model: who looks, who writes, and what the norms are of."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cirron_otel.training_record.checking.verify import verify
from monitor.trainings import diary, events, rows

_PROGRAM = """
import json, os, sys
import torch
import torch.distributed as dist
from torch import nn
import cirron_otel as ci

mode, rank = sys.argv[1], int(sys.argv[2])
if mode != "alone":
    dist.init_process_group("gloo", init_method=sys.argv[3], rank=rank, world_size=2)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
if mode == "ddp":
    model = nn.parallel.DistributedDataParallel(model)
elif mode == "fsdp":
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = ci.Monitor(model, optimizer, out="run", check_every=1, reduce_norms=mode == "fsdp")
for step in range(3):
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    monitor.step(loss)
    optimizer.step()
closed = monitor.close() is None
repaired = None
if mode == "ddp":
    torch.manual_seed(0)
    inner = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    model = nn.parallel.DistributedDataParallel(inner)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    second = ci.Monitor(
        model, optimizer, out="repaired", check_every=1, repair=True, patience=2, verbose=False
    )
    for step in range(8):
        # Each rank has data of its own.
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + rank))
        optimizer.zero_grad()
        model(x).square().mean().backward()
        if step == 2:
            with torch.no_grad():
                for found in (inner[0].weight, inner[0].bias, inner[1].bias):
                    found[:5] = 0.0
                    found.grad[:5] = 0.0
        second.step()
        optimizer.step()
    second.close()
    weights = torch.cat([p.detach().flatten() for p in inner.parameters()])
    repaired = [weights.double().sum().item(), weights.double().square().sum().item(),
                bool(inner[0].weight[:5].any())]
print(json.dumps([monitor.rank, monitor.world_size, monitor.dist_mode, closed, repaired]))
if mode != "alone":
    dist.destroy_process_group()
"""


def _run(mode: str, directory: Path, ranks: int) -> list[Any]:
    directory.mkdir()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _PROGRAM, mode, str(rank), f"tcp://127.0.0.1:{port}"],
            cwd=directory,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    answers = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks
    return [json.loads(answer.splitlines()[-1]) for answer in answers]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_rank_0_writes_the_norms_of_the_whole_gradient(tmp_path: Path, mode: str) -> None:
    """The record is that of one process with the same data, and both ranks repair alike."""
    assert _run("alone", tmp_path / "alone", 1) == [[0, 1, "none", False, None]]
    *ranks, first, second = zip(*_run(mode, tmp_path / mode, 2), strict=True)
    assert [*ranks, first] == [(0, 1), (2, 2), (mode, mode), (False, True)]
    if mode == "ddp":
        assert second[0] == second[1]
        assert second[0][2]
        (repair,) = events(tmp_path / mode / "repaired", "repair")
        assert (repair["channels"], repair["step"]) == ([0, 1, 2, 3, 4], 3)
        assert verify(tmp_path / mode / "repaired").ok
    run = tmp_path / mode / "run"
    assert verify(run).ok
    alone = rows(tmp_path / "alone" / "run")
    assert [row["loss"] for row in rows(run)] == pytest.approx([row["loss"] for row in alone])
    for found, expected in zip(rows(run), alone, strict=True):
        assert found["grad"] == pytest.approx(expected["grad"], rel=1e-5)
    manifest = next(event for event in diary(run) if event["event"] == "manifest")
    assert manifest["distributed"]["mode"] == mode
    assert manifest["channel_checks"] is (mode == "ddp")
