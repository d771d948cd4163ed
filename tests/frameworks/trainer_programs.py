"""A tiny GPT-2 and its Trainer, for the tests of the transformers hook. Nothing is downloaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
import transformers
from torch.utils.data import Dataset, IterableDataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from helpers import Rows, tree_text

transformers.utils.logging.set_verbosity_error()


_VOCABULARY, _LENGTH = 50, 8


class Texts(Dataset[Any]):
    """Sequences of random tokens, the same ones every time."""

    def __init__(self, count: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.tokens = torch.randint(0, _VOCABULARY, (count, _LENGTH), generator=generator)

    def __len__(self) -> int:
        """How many there are."""
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """One of them, to be predicted from itself; nothing comes before its first token."""
        labels = self.tokens[index].clone()
        labels[0] = -100
        return {"input_ids": self.tokens[index], "labels": labels}


class Stream(IterableDataset[Any]):
    """The same sequences, without a length."""

    def __init__(self, count: int) -> None:
        self.texts = Texts(count)

    def __iter__(self) -> Any:
        """One after the other."""
        for index in range(len(self.texts)):
            yield self.texts[index]


def make_model(**options: Any) -> GPT2LMHeadModel:
    """A GPT-2 of one layer with the same random weights every time."""
    with torch.random.fork_rng():
        torch.manual_seed(11)
        return GPT2LMHeadModel(
            GPT2Config(
                vocab_size=_VOCABULARY, n_positions=_LENGTH, n_embd=8, n_layer=1, n_head=1,
                bos_token_id=0, eos_token_id=0, loss_type="ForCausalLM", **options,
            )
        )  # fmt: skip


def make_arguments(**options: Any) -> TrainingArguments:
    """Two sequences a batch, one epoch, nothing written, nothing shown."""
    return TrainingArguments(
        **{
            "output_dir": str(Path("out").absolute()), "per_device_train_batch_size": 2,
            "per_device_eval_batch_size": 2, "num_train_epochs": 1, "logging_steps": 1000,
            "save_strategy": "no", "report_to": [], "use_cpu": True, "disable_tqdm": True,
            "dataloader_pin_memory": False, **options,
        }
    )  # fmt: skip


def make_trainer(kind: type[Trainer] = Trainer, *, texts: int = 6, **options: Any) -> Trainer:
    """A Trainer; ``options`` that it takes itself go there, the others into its arguments."""
    own = ("model", "train_dataset", "eval_dataset", "callbacks", "compute_metrics")
    given = {name: options.pop(name) for name in own if name in options}
    return kind(
        **{
            "model": make_model(), "args": make_arguments(**options),
            "train_dataset": Texts(texts), "eval_dataset": Texts(4), **given,
        }
    )  # fmt: skip


def tree(rows: Rows, **options: Any) -> str:
    """The span trees as text, without snapshots."""
    return tree_text(rows, without=("snapshot",), **options)
