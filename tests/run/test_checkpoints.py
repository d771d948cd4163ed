"""``checkpoint`` scopes of plain torch: what was saved and loaded, how much, and how long."""

from __future__ import annotations

import msgspec
import pytest

from cirron_otel import semconv
from cirron_otel.batch import SpanRecord
from helpers import ProgramRun, RunProgram

PROGRAM = """
    import inspect
    import io
    import json
    import os
    import pickle
    import time

    import torch
    import cirron_otel as ci

    before = torch.save, torch.load
    ci.profile(snapshots=None, watchdog=False)
    import torch.distributed.checkpoint as dcp
    import safetensors.torch

    class Slow(dcp.FileSystemWriter):
        def write_data(self, *args, **kwargs):
            time.sleep(0.3)
            return super().write_data(*args, **kwargs)

    class Held:
        def state_dict(self):
            return {"w": torch.ones(7)}

        def load_state_dict(self, state):
            pass

    class Samples(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return torch.load("a.pt")["w"]

    model = torch.nn.Linear(64, 32)
    state = {"w": torch.ones(100, 10), "more": [torch.ones(3, dtype=torch.float64)], "epoch": 1}
    said = {}
    with ci.scope("plain"):
        torch.save(state, "a.pt")
        torch.load("a.pt")
        file = io.BytesIO(b"head")
        file.seek(4)
        torch.save(state, file)
        said["in_memory"] = file.tell() - 4
        try:
            torch.load("missing.pt")
        except FileNotFoundError as error:
            said["error"] = str(error)
    with ci.scope("sharded"):
        dcp.save(state, checkpoint_id="d1", no_dist=True)
        dcp.load(state, checkpoint_id="d1", no_dist=True)
        dcp.save({"app": Held()}, checkpoint_id="d2", no_dist=True)
    with ci.scope("behind"):
        future = dcp.async_save(state, storage_writer=Slow("d3"), no_dist=True)
    future.result()
    with ci.scope("safe"):
        safetensors.torch.save_model(model, "m.safetensors")
        safetensors.torch.load_file("m.safetensors")
    with ci.scope("mine"):
        with ci.scope("checkpoint"):
            torch.save(state, "b.pt")
            torch.save(state, "c.pt")
    for _ in torch.utils.data.DataLoader(Samples()):
        model(torch.ones(1, 64))
    said["pickles"] = pickle.loads(pickle.dumps(torch.save)) is torch.save
    said["signature"] = str(inspect.signature(torch.save)) == str(inspect.signature(before[0]))
    said["swallowed"] = ci.health()["swallowed_errors"]
    said["sizes"] = {name: os.path.getsize(name) for name in ("a.pt", "m.safetensors")}
    said["part"] = sum(e.stat().st_size for e in os.scandir("d2") if e.name.startswith("__0_"))
    patched = dcp.save, safetensors.torch.save_model
    ci.shutdown()
    said["restored"] = [
        torch.save is before[0], torch.load is before[1],
        dcp.save is patched[0].__wrapped__, dcp.save is dcp.state_dict_saver.save,
        safetensors.torch.save_model is patched[1].__wrapped__,
        torch.serialization.save is before[0],
    ]
    print(json.dumps(said))
"""


def under(run: ProgramRun, name: str) -> list[SpanRecord]:
    """The scopes directly in the one of this name, by their start."""
    place = run.one(name)
    inside = [span for span in run.spans if span.parent_id == place.id]
    return sorted(inside, key=lambda span: span.start_ns)


def facts(span: SpanRecord) -> tuple[object, ...]:
    """Operation, format, path and bytes of a checkpoint."""
    assert span.name in (semconv.CHECKPOINT, semconv.CHECKPOINT_BACKGROUND)
    names = (
        semconv.CHECKPOINT_OPERATION, semconv.CHECKPOINT_FORMAT, semconv.CHECKPOINT_PATH,
        semconv.CHECKPOINT_BYTES,
    )  # fmt: skip
    return tuple(span.attrs.get(name) for name in names)


STATE_BYTES = 100 * 10 * 4 + 3 * 8


@pytest.mark.slow
def test_saving_and_loading(run_program: RunProgram) -> None:
    """Each call is one scope with what it did, where, and how many bytes; samples are none.

    What goes on behind the training after an asynchronous save is told apart from what it waits.
    """
    run = run_program(PROGRAM, timeout=120)
    said = msgspec.json.decode(run.stdout.strip().splitlines()[-1])
    assert said["swallowed"] == {}
    assert said["restored"] == [True] * 6
    assert said["pickles"]
    assert said["signature"]
    sizes = said["sizes"]

    plain = under(run, "plain")
    assert [facts(span) for span in plain] == [
        ("save", "torch", "a.pt", sizes["a.pt"]),
        ("load", "torch", "a.pt", sizes["a.pt"]),
        ("save", "torch", None, said["in_memory"]),
        ("load", "torch", "missing.pt", None),
    ]
    assert plain[3].attrs["error"] == f"FileNotFoundError: {said['error']}"
    assert sizes["a.pt"] > STATE_BYTES

    assert [facts(span) for span in under(run, "sharded")] == [
        ("save", "distributed", "d1", STATE_BYTES),
        ("load", "distributed", "d1", STATE_BYTES),
        ("save", "distributed", "d2", said["part"]),  # asking the object would cost
    ]
    assert [facts(span) for span in under(run, "safe")] == [
        ("save", "safetensors", "m.safetensors", sizes["m.safetensors"]),
        ("load", "safetensors", "m.safetensors", sizes["m.safetensors"]),
    ]

    (waited,) = under(run, "behind")
    behind = run.one(semconv.CHECKPOINT_BACKGROUND)
    assert facts(waited) == facts(behind) == ("save", "distributed", None, STATE_BYTES)
    assert behind.parent_id == run.one(semconv.SESSION).id
    assert behind.end_ns is not msgspec.UNSET
    assert behind.end_ns - behind.start_ns >= 250_000_000
    assert behind.end_ns > waited.end_ns > behind.start_ns  # type: ignore[operator]

    (own,) = under(run, "mine")
    assert own.attrs[semconv.CHECKPOINT_BYTES] == 2 * sizes["a.pt"]
    assert len(run.named(semconv.CHECKPOINT)) == 11
