"""A training loop over what Accelerate has prepared, on real digits, and the run read back.

The one line with ``ci.`` is all there is to do: a step is one optimizer update, with a micro batch
for each batch whose gradients are accumulated. Under ``torchrun`` each rank records its own steps
into the same directory. Nothing is downloaded.
"""

from __future__ import annotations

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci


def main() -> None:
    """Train, then show what was recorded."""
    ci.profile(snapshots=None)
    torch.manual_seed(0)
    accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
    images, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(images, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model, optimizer, loader = accelerator.prepare(
        model,
        torch.optim.Adam(model.parameters(), lr=0.005),
        DataLoader(torch.utils.data.Subset(data, range(512)), batch_size=64, shuffle=True),
    )
    for _ in range(2):
        for x, y in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(x), y)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
    ci.trace(name="step", last=2)
    ci.shutdown()
    if accelerator.is_main_process:
        print("\nThe whole run: cirron-otel traces view")


if __name__ == "__main__":
    main()
