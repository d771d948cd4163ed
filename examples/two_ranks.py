"""A training on two ranks of which one is slow, found while it runs, and named afterwards.

    torchrun --nproc-per-node 2 examples/two_ranks.py --slow-rank 1 --phase backward

All ranks end a step together, so the length of a step says nothing of who is slow. What a rank
did itself does: rank 0 compares the ranks' local times, without what they waited for each other,
and reports the straggler. It runs on CPUs, over gloo.
"""

from __future__ import annotations

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci


class Delayed(torch.autograd.Function):
    """The identity, whose backward takes a while."""

    seconds = 0.0

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Pass on the activations."""
        return x.view_as(x)

    @staticmethod
    def backward(ctx: object, gradient: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        """Pass on the gradient, later."""
        time.sleep(Delayed.seconds)
        return gradient


class Model(nn.Module):
    """A few layers, with a place in the middle for what is slow."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(64, 256), nn.ReLU())
        self.second = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Classify."""
        time.sleep(self.seconds)
        return self.second(Delayed.apply(self.first(x)))


def main() -> None:
    """Train on every rank; rank 0 tells what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--slow-rank", type=int, default=1)
    parser.add_argument("--phase", default="backward",
                        choices=["data", "forward", "backward", "optimizer", "none"])  # fmt: skip
    parser.add_argument("--delay", type=float, default=0.02, help="seconds a step")
    parser.add_argument("--steps", type=int, default=100)
    arguments = parser.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ci.profile(snapshots=None)
    delay = arguments.delay if dist.get_rank() == arguments.slow_rank else 0.0
    slow = {arguments.phase: delay}

    Delayed.seconds = slow.get("backward", 0.0)
    model = DistributedDataParallel(Model(slow.get("forward", 0.0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if slow.get("optimizer"):
        optimizer.register_step_pre_hook(lambda *_: time.sleep(delay))
    data = TensorDataset(torch.randn(32 * arguments.steps, 64))

    def collate(items: list[tuple[torch.Tensor]]) -> torch.Tensor:
        time.sleep(slow.get("data", 0.0))
        return torch.stack([item for (item,) in items])

    for x in DataLoader(data, batch_size=32, collate_fn=collate):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    ci.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
