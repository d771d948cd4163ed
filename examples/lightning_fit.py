"""Train a small classifier with Lightning's Trainer on real digits and read the run back.

The one line with ``ci.`` is all there is to do: no callback is added. Epochs, steps (here of two
batches each), validation, the sanity check, losses and checkpoints are found by the hooks that
``ci.profile()`` installs. Nothing is downloaded.
"""

from __future__ import annotations

import tempfile
from typing import Any

import lightning
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci


class Digits(lightning.LightningModule):
    """Two layers for images of 8 by 8 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))

    def loss(self, batch: Any) -> torch.Tensor:  # noqa: ANN401 - as the loader gives it
        """The loss of one batch."""
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def training_step(self, batch: Any, _index: int) -> torch.Tensor:  # noqa: ANN401
        """What is learned from."""
        return self.loss(batch)

    def validation_step(self, batch: Any, _index: int) -> None:  # noqa: ANN401
        """What is logged stands in the run."""
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """One optimizer."""
        return torch.optim.Adam(self.parameters(), lr=0.005)


def main() -> None:
    """Train, then show what was recorded."""
    ci.profile(snapshots=None)
    lightning.seed_everything(0, verbose=False)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    train, validation, _ = torch.utils.data.random_split(data, [512, 128, len(data) - 640])
    with tempfile.TemporaryDirectory() as directory:
        trainer = lightning.Trainer(
            default_root_dir=directory,
            accelerator="cpu",
            max_epochs=2,
            accumulate_grad_batches=2,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Digits(), DataLoader(train, 64, shuffle=True), DataLoader(validation, 64))
    ci.trace(name="epoch", last=1)
    ci.shutdown()
    print("\nThe whole run: cirron-otel traces view")


if __name__ == "__main__":
    main()
