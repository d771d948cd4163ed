"""What the torch hook adds to a training step, and to a forward through nested modules.

Two processes do not run a step of torch at the same speed to one percent, and on a machine that
others use no two seconds are alike either. So the plain loop is measured in the same process as the
recorded one, in short blocks in turn, and what counts is CPU time: of all threads, so that it holds
what the flush thread does. Ours goes on recording all the while; for the plain blocks its hook is
taken out of torch. What was recorded is written between the blocks, about once a second as ever,
and that time is spread over the recorded steps. The steps after each change are not counted: the
interpreter specialises its code anew where a class has changed.

The peer cannot take its hooks away and go on, so it is started and shut down around each block, and
what it has recorded is written at the end of a block of about a second.
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
#: About how much recorded work there is to a flush, as with the interval it has by default.
FLUSH_S = 1.0
#: The hook itself is not free: one forward scope, spread over the nested modules.
NEXT_TO_NOTHING_US = 0.02

Work = Callable[[int], None]


# --- what is trained ------------------------------------------------------------------------------


def mlp(wrap: Callable[[Any], Any] = lambda model: model) -> Work:
    """A step of an MLP with three layers, about 0.3 ms on one core."""
    torch = load("torch")
    nn = torch.nn
    model = nn.Sequential(
        nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    return training(wrap(model), torch.randn(32, 64), torch.randint(0, 10, (32,)))


def replicated() -> Work:
    """The same under DDP, in a process group of one rank."""
    dist = load("torch.distributed")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return mlp(load("torch").nn.parallel.DistributedDataParallel)


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


WORK: dict[str, Callable[[], Work]] = {
    "mlp": mlp,
    "replicated": replicated,
    "transformer": transformer,
    "nested": nested,
}


# --- sides ----------------------------------------------------------------------------------------


def ours(work: str, block_s: float, pairs: int, settle: int, peer_pairs: int) -> Result:  # noqa: ARG001 - the peer's
    """Short blocks in turn of plain and recorded work: CPU time and time, us per turn.

    ``settle`` turns after each change are not counted; ``spread`` is what writing took.
    """
    torch, run, count, before = prepared(work, block_s)
    ci = load("cirron_otel")
    recorder = load("cirron_otel.recorder")
    # Written when we say so, and not in the middle of a plain block.
    hooks = ci.profile(frameworks=["torch"], flush_interval=3600)._hooks  # noqa: SLF001
    rec = recorder._current  # noqa: SLF001
    run(settle)
    ci.flush()
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    turns, waiting, writing = settle, 0, [0.0, 0.0]
    flush_at = max(settle + count, int(FLUSH_S / block_s * count))
    for pair in range(pairs):
        for recorded in (False, True) if pair % 2 == 0 else (True, False):
            if recorded and not hooks.names:
                hooks.install(rec)
            elif not recorded:
                hooks.uninstall()
            gc.collect()
            run(settle)
            taken[recorded].append(block(run, count, lambda: None))
            waiting += (settle + count) * recorded
        if waiting >= flush_at or pair + 1 == pairs:
            took = block(lambda _: None, 1, ci.flush)
            writing = [one + other for one, other in zip(writing, took, strict=True)]
            turns += waiting
            waiting = 0
    spread = [one / (turns - settle) for one in writing]
    ci.shutdown()
    return result(taken, turns, spread) | {"left_behind": left_behind(torch, before)}


def peer(work: str, block_s: float, pairs: int, settle: int, peer_pairs: int) -> Result:  # noqa: ARG001 - ours
    """Blocks of about a second in turn, each with a flush at its end."""
    torch, run, count, before = prepared(work, block_s)
    ci = load("cirron")
    count = int(max(1.0, FLUSH_S / block_s) * count)
    taken: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for pair in range(peer_pairs):
        for recorded in (False, True) if pair % 2 == 0 else (True, False):
            gc.collect()
            if recorded:
                ci.profile(frameworks=["torch"])
                taken[True].append(block(run, count, ci.flush))
                ci.shutdown()
            else:
                taken[False].append(block(run, count, lambda: None))
    return result(taken, count * peer_pairs, [0, 0]) | {"left_behind": left_behind(torch, before)}


def prepared(work: str, block_s: float) -> tuple[Any, Work, int, dict[str, object]]:
    """Torch, what is to be run, the turns of a block, and what hooks usually replace."""
    torch = load("torch")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    run = WORK[work]()
    return torch, run, max(1, int(block_s / warmed_up(run))), patched(torch)


def result(taken: dict[bool, list[tuple[float, float]]], turns: int, spread: list[float]) -> Result:
    """The pairs (plain, recorded with what writing takes), by the clock and in CPU time."""
    wall, cpu = (
        [
            [plain[which], recorded[which] + spread[which]]
            for plain, recorded in zip(taken[False], taken[True], strict=True)
        ]
        for which in (0, 1)
    )
    return {"count": turns, "pairs": wall, "cpu_pairs": cpu, "writing_us": spread[1]}


def left_behind(torch: Any, before: dict[str, object]) -> list[str]:  # noqa: ANN401 - the module
    """What is still replaced."""
    return [name for name, was in before.items() if patched(torch)[name] is not was]


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


SIDES = {"ours": ours, "cirron-sdk": peer}


# --- rows -----------------------------------------------------------------------------------------


Pairs = list[tuple[float, float]]


def _rounds(
    bench: Bench, work: str, names: list[str], block_s: float, settle: int
) -> dict[str, dict[str, Pairs]]:
    """The pairs of blocks (plain, recorded; us per turn) of each side, over all rounds.

    ``cpu`` in CPU time, ``wall`` by the clock, where a busy machine shows.
    """
    done = bench.rounds(
        f"torch-{work}",
        SCRIPT,
        ["ours", "cirron-sdk"],
        bench.pick(3, 1),
        {
            "work": work,
            "block_s": block_s,
            "pairs": bench.pick(40, 8),
            "settle": settle,
            "peer_pairs": bench.pick(8, 2),
        },
        _inspect,
    )
    for one in done:
        side = one["ours"]
        for name in names:
            if side["spans"].get(name, 0) != side["count"]:
                raise SideError(
                    f"the hook wrote {side['spans'].get(name, 0)} {name!r} scopes "
                    f"for {side['count']} turns"
                )
        if side["left_behind"]:
            raise SideError(f"after shutdown() still replaced: {', '.join(side['left_behind'])}")
    return {
        side: {
            "cpu": [pair for one in done for pair in one[side]["cpu_pairs"]],
            "wall": [pair for one in done for pair in one[side]["pairs"]],
        }
        for side in ("ours", "cirron-sdk")
    }


def _inspect(directory: Path) -> Result:
    return spool_rows(directory)


def _percent(pairs: Pairs) -> float:
    return (statistics.median(recorded / plain for plain, recorded in pairs) - 1) * 100


def _step(  # noqa: PLR0913, PLR0917 - what a row is made of
    bench: Bench, work: str, label: str, must: float, goal: float, block_s: float, settle: int
) -> Row:
    names = ["step", "data_load", "forward", "backward", "optimizer_step"]
    pairs = _rounds(bench, work, names, block_s, settle)
    plain = statistics.median(plain for plain, _ in pairs["ours"]["cpu"])
    ours, peer = _percent(pairs["ours"]["cpu"]), _percent(pairs["cirron-sdk"]["cpu"])
    return Row(
        f"torch hook, {label} step",
        f"{ours:+.2f} % of {plain:.0f} us",
        f"cirron-sdk {peer:+.2f} %",
        ours,
        "%",
        must,
        goal,
        note=f"CPU time, the flush thread's included; by the clock "
        f"{_percent(pairs['ours']['wall']):+.2f} %",
    )


def measure_mlp(bench: Bench) -> list[Row]:
    """The hook on a short step."""
    return [_step(bench, "mlp", "3-layer MLP", 6, 3, 0.1, 100)]


def measure_transformer(bench: Bench) -> list[Row]:
    """The hook on a longer step of many modules."""
    return [_step(bench, "transformer", "4-layer transformer", 1.5, 0.5, 0.25, 4)]


def measure_nested(bench: Bench) -> list[Row]:
    """What each nested module pays for the hook."""
    pairs = _rounds(bench, "nested", ["forward"], 0.1, 100)
    excess = {
        side: statistics.median(recorded - plain for plain, recorded in of["cpu"]) / NESTED
        for side, of in pairs.items()
    }
    plain = statistics.median(plain for plain, _ in pairs["ours"]["cpu"]) / NESTED
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
