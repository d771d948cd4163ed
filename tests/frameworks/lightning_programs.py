"""A small module of Lightning and its data, for the tests of the Lightning hook."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from helpers import finished, tree_text

BODY = """\
{0}data_load
{0}forward
{0}backward
{0}optimizer_step
"""
STEP = "    step[{}] {{log/train_loss, loss, learning_rate}}\n" + BODY.format(" " * 6)


def loader(batches: int = 3, **options: Any) -> DataLoader[Any]:
    """Batches of four; the same numbers every time."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(4 * batches, 4, generator=generator)
    y = torch.randint(0, 3, (4 * batches,), generator=generator)
    return DataLoader(TensorDataset(x, y), batch_size=4, **options)


def steps(count: int) -> str:
    """The lines of the steps of an epoch."""
    return "".join(STEP.format(n) for n in range(count))


def stage_steps(depth: int, count: int, marks: str) -> str:
    """The lines of the steps of an evaluation."""
    space = " " * depth
    return "".join(
        f"{space}step[{n}]{marks}\n{space}  data_load\n{space}  forward\n" for n in range(count)
    )


def trainer(package: str = "lightning.pytorch", **options: Any) -> Any:
    """A quiet Trainer on the CPU."""
    given = {
        "accelerator": "cpu",
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": 1,
        **options,
    }
    return importlib.import_module(package).Trainer(**given)


def module(package: str = "lightning.pytorch", **methods: Any) -> Any:
    """A module that is ready to train; ``methods`` take the place of its own."""
    base = importlib.import_module(package).LightningModule

    class Small(base):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            with torch.random.fork_rng():
                torch.manual_seed(11)
                self.layer = torch.nn.Linear(4, 3)
            self.returned: list[float] = []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x)  # type: ignore[no-any-return]

        def loss(self, batch: Any) -> torch.Tensor:
            x, y = batch
            return torch.nn.functional.cross_entropy(self(x), y)

        def training_step(self, batch: Any, _index: int) -> Any:
            loss = self.loss(batch)
            self.returned.append(loss.item())
            self.log("train_loss", loss)
            return loss

        def validation_step(self, batch: Any, _index: int) -> None:
            self.log("val_loss", self.loss(batch))

        def test_step(self, batch: Any, _index: int) -> None:  # noqa: PT019 - no test
            self.log("test_loss", self.loss(batch))

        def predict_step(self, batch: Any, _index: int) -> Any:
            return self(batch[0])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    return type("Made", (Small,), methods)()


def finished_tree(**options: Any) -> str:
    """Shut down, check that nothing was lost or swallowed, and show the trees in the spool."""
    return tree_text(finished(), **options) + "\n"
