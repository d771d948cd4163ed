"""What the hooks add to a training that a framework runs: ``make bench-frameworks``.

As in torch_hook.py the plain training is measured in the same process as the recorded one, block
by block in turn. A block is one call of the framework's own training; what is timed is the steps
after the first few, told by the framework's own callbacks, which both sides have. The losses of
both sides must be the same, bit for bit: a row is not measured where they are not.
"""

from __future__ import annotations

import gc
import logging
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from groups import measure_groups
from harness import Bench, Result, Row, SideError, child, load, spool_rows

SCRIPT = "frameworks.py"
#: Steps at the beginning of a block that are not timed.
WARM_UP_STEPS = 3


class Block(NamedTuple):
    """One training: microseconds per timed step, on the clock and of CPU, and its losses."""

    wall_us: float
    cpu_us: float
    losses: list[Any]


#: A training of so many steps.
Train = Callable[[int], Block]


class Clock:
    """Times the steps of a block; ``tick`` is called at the end of each."""

    def __init__(self) -> None:
        self.steps = 0
        self._begun = self._ended = (0, 0)

    def tick(self) -> None:
        """A step has ended."""
        self.steps += 1
        now = time.perf_counter_ns(), time.process_time_ns()
        if self.steps == WARM_UP_STEPS:
            self._begun = now
        self._ended = now

    def block(self, losses: list[Any]) -> Block:
        """What was timed."""
        count = self.steps - WARM_UP_STEPS
        wall, cpu = (
            (end - begin) / count / 1e3 for begin, end in zip(self._begun, self._ended, strict=True)
        )
        return Block(wall, cpu, losses)


# --- what is trained ------------------------------------------------------------------------------


def transformers_trainer() -> Train:
    """A Trainer on a GPT-2 with four layers and random weights."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    torch, hf = load("torch"), load("transformers")
    hf.utils.logging.set_verbosity_error()
    tokens = torch.randint(0, 512, (64, 64), generator=torch.Generator().manual_seed(1))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    config = hf.GPT2Config(
        vocab_size=512, n_positions=64, n_embd=128, n_layer=4, n_head=4,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip

    class Ticking(hf.TrainerCallback):  # type: ignore[misc, name-defined] # it comes by name
        def __init__(self) -> None:
            self.clock = Clock()

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            self.clock.tick()

    class Keeping(hf.Trainer):  # type: ignore[misc, name-defined]
        losses: list[Any]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a tensor
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss)
            return loss

    def train(count: int) -> Block:
        hf.set_seed(0)
        ticking = Ticking()
        trainer = Keeping(
            model=hf.GPT2LMHeadModel(config),
            args=hf.TrainingArguments(
                output_dir="out", max_steps=count, per_device_train_batch_size=8, report_to=[],
                save_strategy="no", logging_steps=10, use_cpu=True, disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=data,
            callbacks=[ticking],
        )  # fmt: skip
        trainer.remove_callback(hf.trainer_callback.PrinterCallback)
        trainer.losses = []
        trainer.train()
        return ticking.clock.block([loss.item() for loss in trainer.losses])

    return train


def keras_fit() -> Train:
    """``fit`` of Keras on its torch backend: a small network, some milliseconds a step."""
    os.environ["KERAS_BACKEND"] = "torch"
    keras, np = load("keras"), load("numpy")

    class Ticking(keras.callbacks.Callback):  # type: ignore[misc, name-defined] # it comes by name
        def __init__(self) -> None:
            super().__init__()
            self.clock, self.losses = Clock(), []

        def on_train_batch_end(self, _batch: int, logs: Any = None) -> None:  # noqa: ANN401
            self.clock.tick()
            self.losses.append(logs["loss"])

    def train(count: int) -> Block:
        keras.utils.set_random_seed(0)
        x = np.random.default_rng(1).random((64 * count, 64), "float32")
        y = np.arange(64 * count) % 10
        model = keras.Sequential(
            [
                keras.layers.Dense(512, "relu"),
                keras.layers.Dense(512, "relu"),
                keras.layers.Dense(10),
            ]
        )
        model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        ticking = Ticking()
        model.fit(x, y, batch_size=64, verbose=0, callbacks=[ticking])
        return ticking.clock.block(ticking.losses)

    return train


def lightning_fit() -> Train:
    """``fit`` of Lightning: a small network that logs its loss, some milliseconds a step."""
    torch, lightning = load("torch"), load("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    nn = torch.nn

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined] # by name
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
            )
            self.clock, self.losses = Clock(), []

        def training_step(self, batch: Any, _index: int) -> Any:  # noqa: ANN401 - a tensor
            loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss)
            self.losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, *_arguments: object) -> None:
            self.clock.tick()

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            return torch.optim.Adam(self.parameters(), 1e-3)

    def train(count: int) -> Block:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(
            torch.randn(64 * count, 64), torch.arange(64 * count) % 10
        )
        module = Module()
        lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, torch.utils.data.DataLoader(data, 64))  # fmt: skip
        return module.clock.block([loss.item() for loss in module.losses])

    return train


def sklearn_calls() -> Train:
    """Small calls of a wrapped estimator: a further fit and a prediction are one step."""
    np, datasets = load("numpy"), load("sklearn.datasets")
    linear_model, ci = load("sklearn.linear_model"), load("cirron_otel")
    images, labels = datasets.load_digits(return_X_y=True)
    images = images / 16
    classes = np.unique(labels)

    def train(count: int) -> Block:
        # The plain side has a plain estimator, as it would without us.
        given = linear_model.SGDClassifier(random_state=0)
        recorded = ci.health()["enabled"]
        model = ci.wrap(given) if recorded else given
        clock, results = Clock(), []
        for step in range(count):
            here = slice(step * 16 % 1600, step * 16 % 1600 + 16)
            model.partial_fit(images[here], labels[here], classes=classes)
            results.append(int(model.predict(images[here]).sum()))
            clock.tick()
        return clock.block([*results, *model.coef_.ravel().tolist()])

    return train


WORK: dict[str, Callable[[], Train]] = {
    "keras": keras_fit,
    "lightning": lightning_fit,
    "sklearn": sklearn_calls,
    "transformers": transformers_trainer,
}
#: What is counted as steps in the spool, where they are none.
SCOPES = {"sklearn": "partial_fit"}


# --- sides ----------------------------------------------------------------------------------------


def compare(work: str, steps: int, pairs: int) -> Result:
    """Blocks of plain and recorded training in turn."""
    load("torch").set_num_threads(1)
    ci = load("cirron_otel")
    train = WORK[work]()
    train(WARM_UP_STEPS + 1)
    taken: dict[bool, list[Block]] = {False: [], True: []}
    for pair in range(pairs):
        for recorded in (False, True) if pair % 2 == 0 else (True, False):
            gc.collect()
            if recorded:
                ci.profile(snapshots=None)
            taken[recorded].append(train(steps))
            if recorded:
                ci.shutdown()
    plain, ours = taken[False], taken[True]
    return {
        "steps": steps * pairs,
        "wall": [[a.wall_us, b.wall_us] for a, b in zip(plain, ours, strict=True)],
        "cpu": [[a.cpu_us, b.cpu_us] for a, b in zip(plain, ours, strict=True)],
        "same": all(block.losses == plain[0].losses for block in (*plain, *ours)),
    }


SIDES = {"ours": compare}


# --- rows -----------------------------------------------------------------------------------------


def _percent(pairs: list[tuple[float, float]]) -> float:
    return (statistics.median(recorded / plain for plain, recorded in pairs) - 1) * 100


def _inspect(directory: Path) -> Result:
    return spool_rows(directory)


def step_row(bench: Bench, work: str, label: str, must: float, goal: float) -> Row:
    """What the hooks add to one step of a framework's training, in per cent."""
    count = bench.pick(500, 60) if work in SCOPES else bench.pick(60, 15)
    params = {"work": work, "steps": count, "pairs": bench.pick(8, 2)}
    done = bench.rounds(f"{work}-step", SCRIPT, ["ours"], bench.pick(3, 1), params, _inspect)
    for one in done:
        ours = one["ours"]
        if not ours["same"]:
            raise SideError("the recorded training has other losses than the plain one")
        name = SCOPES.get(work, "step")
        if ours["spans"].get(name, 0) != ours["steps"]:
            raise SideError(f"{ours['spans'].get(name, 0)} {name} scopes, not {ours['steps']}")
    wall = [tuple(pair) for one in done for pair in one["ours"]["wall"]]
    cpu = [tuple(pair) for one in done for pair in one["ours"]["cpu"]]
    plain = statistics.median(plain for plain, _ in wall)
    return Row(
        f"{label}, step",
        f"{_percent(wall):+.2f} % of {plain / 1e3:.1f} ms",
        "no profiling",
        _percent(wall),
        "%",
        must,
        goal,
        note=f"in CPU time, the flush thread's included: {_percent(cpu):+.2f} %; losses the same",
    )


def measure_transformers(bench: Bench) -> list[Row]:
    """The Trainer of transformers on a small GPT-2."""
    return [step_row(bench, "transformers", "HF Trainer, 4-layer GPT-2", 1, 0)]


def measure_keras(bench: Bench) -> list[Row]:
    """``fit`` of Keras on the torch backend."""
    return [step_row(bench, "keras", "keras fit, 3 layers, torch backend", 3, 1)]


def measure_lightning(bench: Bench) -> list[Row]:
    """``fit`` of Lightning."""
    return [step_row(bench, "lightning", "Lightning fit, 3 layers", 3, 1)]


def measure_sklearn(bench: Bench) -> list[Row]:
    """Small calls of an estimator of scikit-learn."""
    return [step_row(bench, "sklearn", "sklearn partial_fit and predict, 16 rows", 3, 1)]


GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "transformers": measure_transformers,
    "keras": measure_keras,
    "lightning": measure_lightning,
    "sklearn": measure_sklearn,
}


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] in SIDES:
        child(SIDES)
    else:
        sys.exit(measure_groups("Measure the hooks of frameworks.", GROUPS))
