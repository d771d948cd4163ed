"""What the torch hook adds to a training step, and to a forward through nested modules.

Two processes do not run a step of torch at the same speed to one percent, so here the plain loop
is measured in the same process as the recorded one, block by block in turn: each library puts its
hooks in place before its block and takes them away after it. Ours and the peer's still have a
process each. A block lasts about a second, so that it holds what the flush thread does once a
second; it ends with a flush.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import (
    Bench,
    Result,
    Row,
    SideError,
    child,
    load,
    spool_rows,
)

SCRIPT = "torch_hook.py"
NESTED = 200
WARM_UP_S = 0.3
#: The hook itself is not free: one forward scope, spread over the nested modules.
NEXT_TO_NOTHING_US = 0.02

Work = Callable[[int], None]


# --- what is trained ------------------------------------------------------------------------------


def mlp() -> Work:
    """A step of an MLP with three layers, about 0.3 ms on one core."""
    torch = load("torch")
    nn = torch.nn
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return training(model, torch.randn(32, 64), torch.randint(0, 10, (32,)))


def transformer() -> Work:
    """A step of an encoder with four layers, about 20 ms on one core."""
    torch = load("torch")
    nn = torch.nn

    class Classifier(nn.Module):  # type: ignore[misc, name-defined] # torch comes by name
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(128, 4, 256, dropout=0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
            self.head = nn.Linear(128, 10)

        def forward(self, x: Any) -> Any:  # noqa: ANN401 - tensors
            return self.head(self.encoder(x).mean(1))

    return training(Classifier(), torch.randn(16, 32, 128), torch.randint(0, 10, (16,)))


def training(model: Any, x: Any, y: Any) -> Work:  # noqa: ANN401 - torch's own types
    """The loop everyone writes, over a loader that costs next to nothing."""
    torch = load("torch")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    # A function, not a module: called by itself a loss module is a forward of its own.
    loss_of = torch.nn.functional.cross_entropy
    batch = (x, y)

    def steps(count: int) -> None:
        for inputs, targets in torch.utils.data.DataLoader([batch] * count, batch_size=None):
            optimizer.zero_grad()
            loss = loss_of(model(inputs), targets)
            loss.backward()
            optimizer.step()

    return steps


def nested() -> Work:
    """Forwards through 200 modules that do nothing, inside one."""
    torch = load("torch")
    model = torch.nn.Sequential(*(torch.nn.Identity() for _ in range(NESTED)))
    x = torch.zeros(1)

    def forwards(count: int) -> None:
        for _ in range(count):
            model(x)

    return forwards


WORK = {"mlp": mlp, "transformer": transformer, "nested": nested}


# --- sides ----------------------------------------------------------------------------------------


def compare(library: str, work: str, block_s: float, pairs: int) -> Result:
    """Blocks of plain and recorded work in turn; the ratios and differences of the pairs."""
    torch = load("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    ci = load(library)
    run = WORK[work]()
    before = patched(torch)
    count = max(1, int(block_s / warmed_up(run)))
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(pairs):
        for recorded in (False, True) if pair % 2 == 0 else (True, False):
            gc.collect()
            if recorded:
                ci.profile(frameworks=["torch"])
                taken[True].append(block(run, count, ci.flush))
                ci.shutdown()
            else:
                taken[False].append(block(run, count, lambda: None))
    return {
        "count": count * pairs,
        "pairs": [
            [plain[0], recorded[0]]
            for plain, recorded in zip(taken[False], taken[True], strict=True)
        ],
        "cpu_pairs": [
            [plain[1], recorded[1]]
            for plain, recorded in zip(taken[False], taken[True], strict=True)
        ],
        "left_behind": [name for name, was in before.items() if patched(torch)[name] is not was],
    }


def warmed_up(run: Work) -> float:
    """Seconds per turn, after enough of them for caches and allocators to be filled."""
    turns, begin = 1, time.perf_counter()
    run(1)
    while time.perf_counter() - begin < WARM_UP_S:
        turns *= 2
        begin = time.perf_counter()
        run(turns)
    return (time.perf_counter() - begin) / turns


def block(run: Work, count: int, flush: Callable[[], object]) -> tuple[float, float]:
    """Microseconds per turn, with the flush at the end: on the clock, and of CPU in all threads."""
    cpu, begin = time.process_time_ns(), time.perf_counter_ns()
    run(count)
    flush()
    end = time.perf_counter_ns()
    return (end - begin) / count / 1e3, (time.process_time_ns() - cpu) / count / 1e3


def patched(torch: Any) -> dict[str, object]:  # noqa: ANN401 - the module
    """What hooks of torch usually replace; after a block it must be what it was."""
    return {
        "Module.__call__": torch.nn.Module.__call__,
        "DataLoader.__iter__": torch.utils.data.DataLoader.__iter__,
        "Optimizer.step": torch.optim.SGD.step,
        "Tensor.backward": torch.Tensor.backward,
    }


SIDES = {
    "ours": lambda **params: compare("cirron_otel", **params),
    "cirron-sdk": lambda **params: compare("cirron", **params),
}


# --- rows -----------------------------------------------------------------------------------------


Pairs = list[tuple[float, float]]


def _rounds(bench: Bench, work: str, names: list[str]) -> dict[str, Pairs]:
    """The pairs of blocks (plain, recorded; us per turn) of each side, over all rounds.

    Under ``ours-cpu`` those of CPU time: they tell what is ours where the machine is busy.
    """
    done = bench.rounds(
        f"torch-{work}",
        SCRIPT,
        ["ours", "cirron-sdk"],
        bench.pick(3, 1),
        {"work": work, "block_s": 1.0 if not bench.quick else 0.3, "pairs": bench.pick(8, 3)},
        _inspect,
    )
    for one in done:
        ours = one["ours"]
        for name in names:
            if ours["spans"].get(name, 0) != ours["count"]:
                raise SideError(
                    f"the hook wrote {ours['spans'].get(name, 0)} {name!r} scopes "
                    f"for {ours['count']} turns"
                )
        if ours["left_behind"]:
            raise SideError(f"after shutdown() still replaced: {', '.join(ours['left_behind'])}")
    return {
        "ours": [pair for one in done for pair in one["ours"]["pairs"]],
        "ours-cpu": [pair for one in done for pair in one["ours"]["cpu_pairs"]],
        "cirron-sdk": [pair for one in done for pair in one["cirron-sdk"]["pairs"]],
    }


def _inspect(directory: Path) -> Result:
    return spool_rows(directory)


def _percent(pairs: Pairs) -> float:
    return (statistics.median(recorded / plain for plain, recorded in pairs) - 1) * 100


def _step(bench: Bench, work: str, label: str, must: float, goal: float) -> Row:
    names = ["step", "data_load", "forward", "backward", "optimizer_step"]
    pairs = _rounds(bench, work, names)
    plain = statistics.median(plain for plain, _ in pairs["ours"])
    ours, peer = _percent(pairs["ours"]), _percent(pairs["cirron-sdk"])
    return Row(
        f"torch hook, {label} step",
        f"{ours:+.2f} % of {plain:.0f} us",
        f"cirron-sdk {peer:+.2f} %",
        ours,
        "%",
        must,
        goal,
        note=f"in CPU time, the flush thread's included: {_percent(pairs['ours-cpu']):+.2f} %",
    )


def measure_mlp(bench: Bench) -> list[Row]:
    """The hook on a short step."""
    return [_step(bench, "mlp", "3-layer MLP", 6, 3)]


def measure_transformer(bench: Bench) -> list[Row]:
    """The hook on a longer step of many modules."""
    return [_step(bench, "transformer", "4-layer transformer", 1.5, 0.5)]


def measure_nested(bench: Bench) -> list[Row]:
    """What each nested module pays for the hook."""
    pairs = _rounds(bench, "nested", ["forward"])
    excess = {
        side: statistics.median(recorded - plain for plain, recorded in of) / NESTED
        for side, of in pairs.items()
        if side != "ours-cpu"
    }
    plain = statistics.median(plain for plain, _ in pairs["ours"]) / NESTED
    return [
        Row(
            f"forward through {NESTED} modules, over plain, each",
            f"{excess['ours']:+.3f} us on {plain:.3f} us",
            f"cirron-sdk {excess['cirron-sdk']:+.3f} us",
            excess["ours"],
            "us",
            0.3,
            NEXT_TO_NOTHING_US,
            note="the goal is 0; below 0.02 us is the outermost module's own scope, spread",
        )
    ]


if __name__ == "__main__":
    child(SIDES)
