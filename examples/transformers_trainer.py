"""Train a small GPT-2 with the Trainer of transformers and read the run back.

It learns to write the digits of numbers in order, from random weights: nothing is downloaded. The
one line with ``ci.`` is all there is to do; steps, micro-batches, losses, evaluations and
checkpoints are found by the hooks that ``ci.profile()`` installs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

import cirron_otel as ci

LENGTH = 16


class Counting(Dataset[Mapping[str, torch.Tensor]]):
    """Sequences that count up from a digit: 7 8 9 0 1 ..."""

    def __init__(self, size: int) -> None:
        first = torch.arange(size) % 10
        self.tokens = (first[:, None] + torch.arange(LENGTH)) % 10

    def __len__(self) -> int:
        """How many sequences there are."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> Mapping[str, torch.Tensor]:
        """One of them, to be predicted token by token."""
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def main() -> None:
    """Train, then show what was recorded."""
    ci.profile(snapshots=None)
    set_seed(0)
    config = GPT2Config(
        vocab_size=10, n_positions=LENGTH, n_embd=32, n_layer=2, n_head=2,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as directory:
        arguments = TrainingArguments(
            output_dir=directory,
            num_train_epochs=3,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2,
            eval_strategy="epoch",
            save_strategy="epoch",
            logging_steps=4,
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=GPT2LMHeadModel(config),
            args=arguments,
            train_dataset=Counting(64),
            eval_dataset=Counting(10),
        )
        trainer.train()
    ci.shutdown()
    print("\nThe run: cirron-otel traces view")


if __name__ == "__main__":
    main()
