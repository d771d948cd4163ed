"""Train a small CNN on scikit-learn's digits and read the run back.

1,797 real handwritten digits of 8x8 pixels, five epochs, a few seconds on two cores. The lines with
``ci.`` are all there is to do: forward, backward, optimizer step and data loading are found by the
torch hook that ``ci.profile()`` installs.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split

import cirron_otel as ci

EPOCHS = 5
BATCH_SIZE = 32
SEED = 0

Loader = DataLoader[tuple[torch.Tensor, ...]]


def main() -> None:
    """Train, then show what was recorded."""
    torch.manual_seed(SEED)
    torch.set_num_threads(2)
    train_loader, val_loader = load_data()
    accuracy = train(build_model(), train_loader, val_loader)
    print(f"\nAccuracy on digits the network has not seen: {accuracy:.1%}\n")
    show_run()


def load_data() -> tuple[Loader, Loader]:
    """The digits, four fifths for training (shuffled each epoch), one fifth for validation."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target)
    train_set, val_set = random_split(TensorDataset(images, labels), [0.8, 0.2])
    return (
        DataLoader(train_set, batch_size=BATCH_SIZE, shuffle=True),
        DataLoader(val_set, batch_size=BATCH_SIZE),
    )


def build_model() -> nn.Module:
    """Two convolutions and a linear layer, about six thousand weights."""
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 2 * 2, 10),
    )


def train(model: nn.Module, train_loader: Loader, val_loader: Loader) -> float:
    """The loop everyone writes. Returns the last epoch's accuracy on the validation set."""
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    accuracy = 0.0

    ci.profile()
    for epoch in ci.epochs(range(EPOCHS)):
        model.train()
        for images, labels in ci.batches(train_loader):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            ci.mark("loss", loss)

        accuracy = evaluate(model, val_loader)
        ci.mark("val_accuracy", accuracy, kind="summary")
        print(f"epoch {epoch}   loss {loss.item():.3f}   validation accuracy {accuracy:.1%}")
    ci.shutdown()

    return accuracy


def evaluate(model: nn.Module, val_loader: Loader) -> float:
    """The share of the validation set that the model gets right."""
    model.eval()
    right = total = 0
    with torch.no_grad():
        for images, labels in ci.batches(val_loader, stage="evaluation"):
            right += int((model(images).argmax(dim=1) == labels).sum())
            total += len(labels)
    return right / total


def show_run() -> None:
    """Print the run's tree with the command a person would use, and where to go from there."""
    script = Path(sysconfig.get_path("scripts"), "cirron-otel")
    near = script.is_relative_to(Path.cwd())
    command = shlex.quote(os.path.relpath(script) if near else str(script))
    output_dir = Path(os.environ.get("CIRRON_OUTPUT_DIR") or ".cirron")

    print(f"$ {command} traces view --depth 2", flush=True)
    shown = subprocess.run([script, "traces", "view", "--depth", "2"], check=False)
    if shown.returncode:
        sys.exit(shown.returncode)
    print(f"""
The run is in {output_dir}/spool, one JSON file per batch of rows. Try next:

  {command} traces view                      down to forward and backward
  {command} traces view --name evaluation    the validation passes alone
  {command} spool inspect                    the files and their sizes""")


if __name__ == "__main__":
    main()
