"""Train a small classifier with Keras's ``fit`` on real digits and read the run back.

The one line with ``ci.`` is all there is to do, on any backend: epochs, steps, evaluations,
checkpoints and logs are found by the hooks that ``ci.profile()`` installs. Nothing is downloaded.
"""

from __future__ import annotations

import os

os.environ.setdefault("KERAS_BACKEND", "torch")

import keras
from sklearn.datasets import load_digits

import cirron_otel as ci


def main() -> None:
    """Train, then show what was recorded."""
    ci.profile(snapshots=None)
    keras.utils.set_random_seed(0)
    images, labels = load_digits(return_X_y=True)
    model = keras.Sequential([
        keras.Input((64,)),
        keras.layers.Rescaling(1 / 16),
        keras.layers.Dense(32, "relu"),
        keras.layers.Dense(10),
    ])  # fmt: skip
    model.compile(
        optimizer=keras.optimizers.Adam(0.005),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    model.fit(
        images[:512], labels[:512], batch_size=64, epochs=2,
        validation_data=(images[512:640], labels[512:640]), verbose=0,
    )  # fmt: skip
    ci.trace(name="epoch", last=1)
    ci.shutdown()
    print("\nThe whole run: cirron-otel traces view")


if __name__ == "__main__":
    main()
