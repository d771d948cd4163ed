# mypy: disable-error-code="no-untyped-call"
"""A small training program of torch, whole and in parts, for the tests of the torch hook."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci
from helpers import finished, tree_text

Wrap = Callable[[Iterable[Any]], Iterable[Any]]


def plain(iterable: Iterable[Any]) -> Iterable[Any]:
    """Leave a loop as it is: the hook alone has to see it."""
    return iterable


#: How the two loops of a program may be written: (around the epochs, around the batches).
FORMS: dict[str, tuple[Wrap, Wrap]] = {
    "hook alone": (plain, plain),
    "epochs": (ci.epochs, plain),
    "batches": (plain, ci.batches),
    "epochs and batches": (ci.epochs, ci.batches),
}


class Program:
    """Model, optimizer and loaders of a small classification; the same numbers every time."""

    def __init__(self, batches: int = 3, **loading: Any) -> None:
        generator = torch.Generator().manual_seed(7)
        size = 4
        x = torch.randn(size * batches, 4, generator=generator)
        y = torch.randint(0, 3, (size * batches,), generator=generator)
        with torch.random.fork_rng():
            torch.manual_seed(11)
            self.model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        self.optimizer: torch.optim.Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.loader: DataLoader[Any] = DataLoader(TensorDataset(x, y), batch_size=size, **loading)
        self.validation: DataLoader[Any] = DataLoader(TensorDataset(x, y), batch_size=2 * size)

    def loss(self, batch: Any) -> torch.Tensor:
        """The loss of one batch."""
        x, y = batch
        return nn.functional.cross_entropy(self.model(x), y)

    def train_step(self, batch: Any) -> torch.Tensor:
        """Forward, backward, optimizer step and the loss as a mark."""
        self.optimizer.zero_grad()
        loss = self.loss(batch)
        loss.backward()
        self.optimizer.step()
        ci.mark("loss", loss)
        return loss

    def validate(self, batches: Wrap = plain) -> None:
        """A pass over the validation data without learning."""
        self.model.eval()
        with torch.no_grad():
            for batch in batches(self.validation):
                self.loss(batch)
        self.model.train()


def finished_tree(**options: Any) -> str:
    """Shut down, check that nothing was lost or swallowed, and show the trees in the spool."""
    return tree_text(finished(), **options)


STEP_BODY = """\
      data_load
      forward
      backward
      optimizer_step
"""


def steps(count: int, first: int = 0, body: str = STEP_BODY) -> str:
    """The lines of ``count`` training steps under an epoch, each with its loss."""
    return "".join(f"    step[{index}] {{loss}}\n{body}" for index in range(first, first + count))
