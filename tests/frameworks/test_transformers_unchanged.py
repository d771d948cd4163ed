"""With the hook in place a training of transformers is, bit for bit, what it was."""

from __future__ import annotations

import inspect
import random
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainerCallback, set_seed

import cirron_otel as ci
from frameworks.trainer_programs import make_trainer
from helpers import finished


class Kept(TrainerCallback):  # type: ignore[misc]
    """Keeps what the Trainer logs, but for the clock's part in it."""

    def __init__(self) -> None:
        self.logs: list[dict[str, Any]] = []

    def on_log(self, *_args: Any, logs: dict[str, Any], **_kwargs: Any) -> None:
        """Keep one log."""
        timed = ("runtime", "per_second")
        self.logs.append({k: v for k, v in logs.items() if not any(t in k for t in timed)})


def train(accumulate: int) -> tuple[Any, ...]:
    """Train with dropout and shuffling; the losses, weights and states of all random streams."""
    set_seed(5)
    kept = Kept()
    trainer = make_trainer(
        texts=12,
        num_train_epochs=2,
        gradient_accumulation_steps=accumulate,
        logging_steps=1,
        eval_strategy="epoch",
        callbacks=[kept],
    )
    result = trainer.train()
    weights = [p.detach().numpy().tobytes() for p in trainer.model.parameters()]
    streams = (
        random.getstate(),
        tuple(map(str, np.random.get_state())),  # noqa: NPY002 - the global stream is the point
        torch.get_rng_state().numpy().tobytes(),
    )
    return kept.logs, result.training_loss, weights, streams


@pytest.mark.parametrize("accumulate", [1, 2])
def test_losses_weights_and_random_streams_are_untouched(accumulate: int) -> None:
    """The same seed gives the same bits with and without the hooks, and after them (C-W24)."""
    before = train(accumulate)
    ci.profile()
    hooked = train(accumulate)
    finished()
    after = train(accumulate)
    assert hooked == before
    assert after == before


def test_signatures_and_names_stay() -> None:
    """What looks at the Trainer's methods sees what it saw."""
    names = ("train", "evaluate", "training_step", "get_batch_samples", "__init__")
    before = [(inspect.signature(getattr(Trainer, n)), getattr(Trainer, n).__doc__) for n in names]
    ci.profile(snapshots=None)
    now = [(inspect.signature(getattr(Trainer, n)), getattr(Trainer, n).__doc__) for n in names]
    assert now == before
    finished()
