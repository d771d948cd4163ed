"""A small model of Keras on its torch backend, for the tests of the Keras hook."""

from __future__ import annotations

import os
from typing import Any

# Read when Keras is imported, here for the first time.
os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
import numpy as np

from helpers import finished, tree_text

RNG = np.random.default_rng(7)
X = RNG.normal(size=(12, 4)).astype("float32")
Y = RNG.integers(0, 3, 12)

STEP = """\
    step[{}] {{loss, log/loss, log/accuracy, learning_rate}}
      data_load
      forward
      backward
      optimizer_step
"""
EPOCH = "  epoch[{}] {{loss, accuracy, learning_rate}}\n"


def compiled(model: keras.Model) -> keras.Model:
    """The model, ready to train."""
    model.compile(
        optimizer=keras.optimizers.SGD(0.1),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    return model


def layers() -> list[Any]:
    """The layers of a small classification; the same numbers every time."""
    keras.utils.set_random_seed(11)
    return [keras.Input((4,)), keras.layers.Dense(8, "relu"), keras.layers.Dense(3)]


def small_model() -> keras.Model:
    """A model that is ready to train."""
    return compiled(keras.Sequential(layers()))


def finished_tree(*, losses: dict[str, int] | None = None, **options: Any) -> str:
    """Shut down, check that nothing was lost or swallowed, and show the trees in the spool."""
    return tree_text(finished(losses), **options) + "\n"


def steps(count: int) -> str:
    """The lines of the steps of an epoch."""
    return "".join(STEP.format(n) for n in range(count))
