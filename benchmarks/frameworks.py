"""What the hooks add to a training that a framework runs: ``make bench-frameworks``.

    benchmarks/frameworks.py                        everything
    benchmarks/frameworks.py --quick                few and short blocks, to see that it runs
    benchmarks/frameworks.py --only keras,sklearn   some groups
    benchmarks/frameworks.py --check                ends with 1 when a "must" is missed

As in torch_hook.py the plain training is measured in the same process as the recorded one, in many
short blocks in turn, and what counts is CPU time: of all threads, so that it holds what the flush
thread does, and the writing of what is left at the end of a block is spread over its steps. A block
is one call of the framework's own training; what is timed is the steps after the first few, told by
the framework's own callbacks, which both sides have. A number is the median of the ratios of the
blocks, and the range after it is where that median lies with 95 % confidence. The losses of both
sides must be the same, bit for bit: a row is not measured where they are not.

Snapshots are off: what they take is measured by snapshots.py.
"""

from __future__ import annotations

import gc
import logging
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from groups import measure_groups
from harness import Bench, Result, Row, SideError, child, load, spool_rows

SCRIPT = Path(__file__).name


class Block(NamedTuple):
    """One training: microseconds per timed step, on the clock and of CPU, and its losses."""

    wall_us: float
    cpu_us: float
    losses: list[Any]


class Clock:
    """Times the steps of a block; ``tick`` is called at the end of each.

    The first are not timed: the interpreter specialises its code anew where a class has changed.
    """

    def __init__(self, warm_up: int) -> None:
        self.steps = 0
        self._warm_up = warm_up
        self._begun = self._ended = (0, 0)

    def tick(self) -> None:
        """A step has ended."""
        self.steps += 1
        now = time.perf_counter_ns(), time.process_time_ns()
        if self.steps == self._warm_up:
            self._begun = now
        self._ended = now

    def block(self, losses: list[Any]) -> Block:
        """What was timed."""
        count = self.steps - self._warm_up
        wall, cpu = (
            (end - begin) / count / 1e3 for begin, end in zip(self._begun, self._ended, strict=True)
        )
        return Block(wall, cpu, losses)


#: A training of so many steps, which tells the clock of each.
Train = Callable[[int, Clock], Block]


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
        def __init__(self, clock: Clock) -> None:
            self.clock = clock

        def on_step_end(self, *_args: Any, **_kwargs: Any) -> None:
            self.clock.tick()

    class Keeping(hf.Trainer):  # type: ignore[misc, name-defined]
        losses: list[Any]

        def training_step(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - a tensor
            loss = super().training_step(*args, **kwargs)
            self.losses.append(loss)
            return loss

    def train(count: int, clock: Clock) -> Block:
        hf.set_seed(0)
        trainer = Keeping(
            model=hf.GPT2LMHeadModel(config),
            args=hf.TrainingArguments(
                output_dir="out", max_steps=count, per_device_train_batch_size=8, report_to=[],
                save_strategy="no", logging_steps=10, use_cpu=True, disable_tqdm=True,
                dataloader_pin_memory=False,
            ),
            train_dataset=data,
            callbacks=[Ticking(clock)],
        )  # fmt: skip
        trainer.remove_callback(hf.trainer_callback.PrinterCallback)
        trainer.losses = []
        trainer.train()
        return clock.block([loss.item() for loss in trainer.losses])

    return train


def keras_fit() -> Train:
    """``fit`` of Keras on its torch backend: a small network, some milliseconds a step."""
    os.environ["KERAS_BACKEND"] = "torch"
    keras, np = load("keras"), load("numpy")

    class Ticking(keras.callbacks.Callback):  # type: ignore[misc, name-defined] # it comes by name
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.clock, self.losses = clock, []

        def on_train_batch_end(self, _batch: int, logs: Any = None) -> None:  # noqa: ANN401
            self.clock.tick()
            self.losses.append(logs["loss"])

    def train(count: int, clock: Clock) -> Block:
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
        ticking = Ticking(clock)
        model.fit(x, y, batch_size=64, verbose=0, callbacks=[ticking])
        return clock.block(ticking.losses)

    return train


def lightning_fit() -> Train:
    """``fit`` of Lightning: a small network that logs its loss, some milliseconds a step."""
    torch, lightning = load("torch"), load("lightning")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    nn = torch.nn

    class Module(lightning.LightningModule):  # type: ignore[misc, name-defined] # by name
        def __init__(self, clock: Clock) -> None:
            super().__init__()
            self.layers = nn.Sequential(
                nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 10)
            )
            self.clock, self.losses = clock, []

        def training_step(self, batch: Any, _index: int) -> Any:  # noqa: ANN401 - a tensor
            loss = nn.functional.cross_entropy(self.layers(batch[0]), batch[1])
            self.log("train_loss", loss)
            self.losses.append(loss.detach())
            return loss

        def on_train_batch_end(self, *_arguments: object) -> None:
            self.clock.tick()

        def configure_optimizers(self) -> Any:  # noqa: ANN401
            return torch.optim.Adam(self.parameters(), 1e-3)

    def train(count: int, clock: Clock) -> Block:
        torch.manual_seed(0)
        data = torch.utils.data.TensorDataset(
            torch.randn(64 * count, 64), torch.arange(64 * count) % 10
        )
        module = Module(clock)
        lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_checkpointing=False,
            enable_progress_bar=False, enable_model_summary=False,
        ).fit(module, torch.utils.data.DataLoader(data, 64))  # fmt: skip
        return clock.block([loss.item() for loss in module.losses])

    return train


def sklearn_calls(make: Callable[[], Any], call: Callable[..., Any], rows: int) -> Train:
    """``call(estimator, rows, labels)`` again and again, of an estimator that is wrapped or not."""
    ci = load("cirron_otel")
    images, labels = load("sklearn.datasets").load_digits(return_X_y=True)
    images = images / 16

    def train(count: int, clock: Clock) -> Block:
        # The plain side has a plain estimator, as it would without us.
        model = make()
        if ci.health()["enabled"]:
            model = ci.wrap(model)
        results: list[Any] = []
        for step in range(count):
            here = slice(step * rows % 1600, step * rows % 1600 + rows)
            results.append(call(model, images[here], labels[here]))
            clock.tick()
        return clock.block([float(abs(one).sum()) for one in results])

    return train


def sklearn_further() -> Train:
    """A classifier that learns from 100 rows at a time."""
    linear_model, classes = load("sklearn.linear_model"), list(range(10))

    def call(model: Any, x: Any, y: Any) -> Any:  # noqa: ANN401 - scikit-learn's and numpy's
        return model.partial_fit(x, y, classes=classes).coef_

    return sklearn_calls(lambda: linear_model.SGDClassifier(random_state=0), call, 100)


def sklearn_clusters() -> Train:
    """Clusters of 100 rows, fitted anew each time."""
    cluster = load("sklearn.cluster")

    def call(model: Any, x: Any, _y: Any) -> Any:  # noqa: ANN401 - scikit-learn's and numpy's
        return model.fit(x).cluster_centers_

    return sklearn_calls(lambda: cluster.KMeans(8, n_init=1, random_state=0), call, 100)


def sklearn_scaler() -> Train:
    """Means and variances of 100 rows: next to nothing, so that what a call costs can be seen."""
    preprocessing = load("sklearn.preprocessing")

    def call(model: Any, x: Any, _y: Any) -> Any:  # noqa: ANN401 - scikit-learn's and numpy's
        return model.fit(x).mean_

    return sklearn_calls(preprocessing.StandardScaler, call, 100)


class Work(NamedTuple):
    """What is trained, and how much of it is a block."""

    make: Callable[[], Train]
    #: Steps of a block, and how many of them are not timed.
    steps: int
    warm_up: int
    #: Pairs of blocks in a process.
    pairs: int
    #: The scope of a step.
    scope: str = "step"


WORK = {
    "transformers": Work(transformers_trainer, 10, 3, 40),
    "keras": Work(keras_fit, 70, 20, 40),
    "lightning": Work(lightning_fit, 70, 20, 40),
    "further": Work(sklearn_further, 250, 50, 40, "partial_fit"),
    "clusters": Work(sklearn_clusters, 120, 20, 40, "fit"),
    "scaler": Work(sklearn_scaler, 1000, 100, 40, "fit"),
}


# --- sides ----------------------------------------------------------------------------------------


def compare(work: str, steps: int, pairs: int) -> Result:
    """Blocks of plain and recorded training in turn: us a step, on the clock and of CPU."""
    load("torch").set_num_threads(1)
    ci = load("cirron_otel")
    warm_up = WORK[work].warm_up
    train = WORK[work].make()
    train(warm_up + 1, Clock(warm_up))
    taken: dict[bool, list[Block]] = {False: [], True: []}
    for pair in range(pairs):
        for recorded in (False, True) if pair % 2 == 0 else (True, False):
            gc.collect()
            if recorded:
                ci.profile(snapshots=None, terminal="none")
            block = train(steps, Clock(warm_up))
            if recorded:
                begun = time.process_time_ns()
                ci.flush()
                left_us = (time.process_time_ns() - begun) / steps / 1e3
                block = block._replace(cpu_us=block.cpu_us + left_us)
                ci.shutdown()
            taken[recorded].append(block)
    plain, ours = taken[False], taken[True]
    return {
        "steps": steps * pairs,
        "wall": [[a.wall_us, b.wall_us] for a, b in zip(plain, ours, strict=True)],
        "cpu": [[a.cpu_us, b.cpu_us] for a, b in zip(plain, ours, strict=True)],
        "same": all(block.losses == plain[0].losses for block in (*plain, *ours)),
    }


SIDES = {"ours": compare}


# --- rows -----------------------------------------------------------------------------------------


class Excess(NamedTuple):
    """What is added, in per cent: the median of the pairs' ratios, and where it may lie."""

    percent: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: list[list[float]]) -> Excess:
        """From pairs (plain, recorded). The range is between two of the ratios, by their ranks."""
        found = sorted((recorded / plain - 1) * 100 for plain, recorded in pairs)
        rank = max(0, int(len(found) / 2 - 0.98 * math.sqrt(len(found))))
        return cls(statistics.median(found), found[rank], found[-1 - rank])

    def __str__(self) -> str:
        """With its range."""
        return f"{self.percent:+.2f} % ({self.low:+.2f} to {self.high:+.2f})"


def _inspect(directory: Path) -> Result:
    return spool_rows(directory)


def step_row(
    bench: Bench, name: str, label: str, must: float | None = None, goal: float | None = None
) -> Row:
    """What the hooks add to one step of a framework's training, in per cent."""
    work = WORK[name]
    params = {"work": name, "steps": work.steps, "pairs": bench.pick(work.pairs, 4)}
    done = bench.rounds(name, SCRIPT, ["ours"], bench.pick(3, 1), params, _inspect)
    for one in done:
        ours = one["ours"]
        if not ours["same"]:
            raise SideError("the recorded training has other losses than the plain one")
        found = ours["spans"].get(work.scope, 0)
        if found != ours["steps"]:
            raise SideError(f"{found} {work.scope} scopes, not {ours['steps']}")
    wall = [pair for one in done for pair in one["ours"]["wall"]]
    cpu = [pair for one in done for pair in one["ours"]["cpu"]]
    plain = statistics.median(plain for plain, _ in cpu)
    added = statistics.median(recorded - plain for plain, recorded in cpu)
    excess = Excess.of(cpu)
    row = Row(
        label,
        f"{excess} of {plain:.0f} us: {added:+.0f} us",
        "no profiling",
        excess.percent,
        "%",
        must,
        goal,
        note=f"CPU time, the flush thread's included; by the clock {Excess.of(wall)}; "
        "losses the same",
    )
    bench.say(f"  {row.work}: {row.ours}; by the clock {Excess.of(wall)}: {row.verdict}")
    return row


def measure_transformers(bench: Bench) -> list[Row]:
    """The Trainer of transformers on a small GPT-2."""
    return [step_row(bench, "transformers", "HF Trainer, 4-layer GPT-2, step", 1, 0)]


def measure_keras(bench: Bench) -> list[Row]:
    """``fit`` of Keras on the torch backend."""
    return [step_row(bench, "keras", "keras fit, 3 layers, torch backend, step", 3, 1)]


def measure_lightning(bench: Bench) -> list[Row]:
    """``fit`` of Lightning."""
    return [step_row(bench, "lightning", "Lightning fit, 3 layers, step", 3, 1)]


def measure_sklearn(bench: Bench) -> list[Row]:
    """Small calls of wrapped estimators of scikit-learn."""
    return [
        step_row(bench, "further", "SGDClassifier.partial_fit, 100 rows", 3, 1),
        step_row(bench, "clusters", "KMeans.fit, 100 rows", 3, 1),
        step_row(bench, "scaler", "StandardScaler.fit, 100 rows"),
    ]


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
