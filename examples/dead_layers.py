"""Two layers of a CNN are zeroed in the middle of a training: watched, and repaired.

The same training twice, with the same seed, on scikit-learn's real handwritten digits. After some
epochs every parameter of two stages becomes zero, as a bad restore may do it. Nothing brings such
layers back: their ReLUs are closed, so no gradient comes through. The monitor names them, proves
that they stay dead, and with ``repair=True`` begins them anew.

Some seconds on one core. ``--open`` shows the report in a browser.
"""

from __future__ import annotations

import argparse
import webbrowser
from pathlib import Path
from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from torch import nn

import cirron_otel as ci

EPOCHS, LESION_AFTER = 12, 5
BATCH_SIZE = 32
SEED = 0
OUT = Path(".cirron", "demo_monitor")
STAGES = {"conv2": 3, "conv3": 6}
WIDTH = 24


class Digits(NamedTuple):
    """Images of 8 x 8 pixels, and what they show."""

    images: torch.Tensor
    labels: torch.Tensor


def main() -> None:
    """Train twice and draw both curves."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--open", action="store_true", help="open the report in a browser")
    asked = parser.parse_args()
    torch.set_num_threads(1)  # it is a small model: a second one would wait for the first
    train_set, test_set = load_data()
    curves, reports = {}, {}
    for name, repair in (("watch", False), ("repair", True)):
        print(f"\n--- {name}: Monitor(model, optimizer, repair={repair})")
        curves[name], reports[name] = train(name, train_set, test_set, repair=repair)
    draw(curves)
    print(f"\nThe reports: {reports['watch']}\n             {reports['repair']}")
    print(f"What happened, in text: cirron-otel record show {OUT / 'repair'}")
    if asked.open:
        webbrowser.open(Path(reports["repair"]).resolve().as_uri())


def load_data() -> tuple[Digits, Digits]:
    """The digits in an order by chance, four fifths for training."""
    found = load_digits()
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(found.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(SEED))
    split = len(labels) * 4 // 5
    first, rest = order[:split], order[split:]
    return Digits(images[first], labels[first]), Digits(images[rest], labels[rest])


def build_model() -> nn.Sequential:
    """Three stages of Conv, BatchNorm and ReLU, and a linear layer."""
    torch.manual_seed(SEED)
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.MaxPool2d(2), nn.Flatten(), nn.Linear(512, 10),
    )  # fmt: skip


def train(
    name: str, train_set: Digits, test_set: Digits, *, repair: bool
) -> tuple[list[float], str]:
    """One training; returns the accuracy after each epoch, and the path of the report."""
    model = build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    shuffle = torch.Generator().manual_seed(SEED)
    curve: list[float] = []
    with ci.Monitor(
        model, optimizer, out=OUT / name, overwrite=True, check_every=10, repair=repair
    ) as monitor:
        for epoch in range(EPOCHS):
            if epoch == LESION_AFTER:
                print(f"    epoch {epoch}: {' and '.join(STAGES)} are set to zero")
                for stage in STAGES.values():
                    lesion(model[stage : stage + 2], optimizer)
            model.train()
            for rows in torch.randperm(len(train_set.labels), generator=shuffle).split(BATCH_SIZE):
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(
                    model(train_set.images[rows]), train_set.labels[rows]
                )
                loss.backward()
                monitor.step(loss)
                optimizer.step()
            curve.append(evaluate(model, test_set))
        report = monitor.close()
    return curve, str(report)


def lesion(stage: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Set every parameter of a stage to zero, and forget what the optimizer knows of them."""
    with torch.no_grad():
        for parameter in stage.parameters():
            parameter.zero_()
            optimizer.state.pop(parameter, None)


def evaluate(model: nn.Module, test_set: Digits) -> float:
    """The share of digits the model has not seen that it gets right."""
    model.eval()
    with torch.no_grad():
        right = model(test_set.images).argmax(dim=1) == test_set.labels
    return float(right.float().mean())


def draw(curves: dict[str, list[float]]) -> None:
    """Both curves, an epoch a line."""
    print("\nAccuracy on digits that were not trained on, after each epoch\n")
    print("epoch  " + "".join(f"{name:<{WIDTH + 10}}" for name in curves))
    for epoch in range(EPOCHS):
        cells = [
            f"{'#' * round(curve[epoch] * WIDTH):<{WIDTH}} {curve[epoch]:6.1%}  "
            for curve in curves.values()
        ]
        mark = "  <- two layers zeroed" if epoch == LESION_AFTER else ""
        print(f"{epoch:>5}  {' '.join(cells)}{mark}")


if __name__ == "__main__":
    main()
