"""Watch the weights of a small network through three epochs, then look at what changed.

    python examples/snapshots.py

Needs torch and the extra ``cli``; writes into a temporary directory.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci


def train(directory: str) -> None:
    """Three epochs of a classifier of random points; its weights are looked at after each."""
    torch.manual_seed(0)
    points = torch.randn(256, 8)
    labels = (points[:, 0] * points[:, 1] > 0).long()
    loader = DataLoader(TensorDataset(points, labels), batch_size=32, shuffle=True)
    model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    with ci.profile(path=directory, snapshots="full"):
        ci.watch(model)
        ci.snapshot(name="before training")
        for _ in ci.epochs(range(3)):
            for x, y in ci.batches(loader):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()
                ci.mark("loss", loss)


def show(directory: str, *arguments: str) -> None:
    """Run a command of ``cirron-otel traces`` and say which."""
    print(f"\n$ cirron-otel traces {shlex.join(arguments)}", flush=True)
    subprocess.run(
        [sys.executable, "-m", "cirron_otel.cli.main", "traces", *arguments, "--spool", directory],
        check=True,
    )


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as output:
        train(output)
        show(output, "snapshots")
        show(output, "snapshot", "epoch:2", "--against", "before training", "--kind", "weights")
        show(output, "snapshot", "epoch:2", "0.weight")
