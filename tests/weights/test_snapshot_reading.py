# mypy: disable-error-code="no-untyped-call"
"""Snapshots read back: by the commands, as a table, as other files, and at the platform."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import cirron_otel as ci
from cirron_otel.errors import CirronDependencyError, SpoolError
from cirron_otel.spool import Spool
from cirron_otel.weights import elements
from cirron_otel.weights.histograms import bars, spark
from cirron_otel.weights.reading import NoSuchSnapshotError, Row, find, load
from delivery.platform_server import KEY, PlatformServer
from helpers import RunProgram, read_spool
from weights.snapshots_by_hand import as_json, shown


@pytest.fixture
def weights(tmp_path: Path) -> dict[str, torch.Tensor]:
    """A recording with two epochs of two tensors and a gradient, all with files."""
    assert tmp_path == Path.cwd()
    model = nn.Linear(4, 2, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.linspace(-1, 1, 8).reshape(2, 4))
    model.register_buffer("tiny", torch.ones(3, dtype=torch.bfloat16))
    ci.profile(snapshots="full", frameworks=[])
    ci.watch(model, buffers=True)
    for epoch in ci.epochs(range(2)):
        with torch.no_grad():
            model.weight.mul_(1 + epoch)
        model.weight.grad = torch.full((2, 4), float(epoch))
    ci.snapshot({"alone": torch.arange(4)}, name="by hand", mode="stats")
    ci.shutdown()
    return {"weight": model.weight.detach(), "tiny": torch.ones(3, dtype=torch.bfloat16)}


@pytest.mark.usefixtures("weights")
def test_the_list_has_every_snapshot() -> None:
    """One line for each, with its epoch, its norms and the size of its files."""
    lines = shown("snapshots").splitlines()
    assert lines[0].split() == [
        "SNAPSHOT", "TIME", "EPOCH", "TAKEN", "WEIGHTS", "NORM", "GRADIENTS", "GRAD", "NORM",
        "MODE", "FILES",
    ]  # fmt: skip
    assert len(lines) == 4
    assert [lines[n].split()[-3] for n in (1, 2)] == ["full", "full"]
    assert "by hand " in lines[3]
    assert lines[3].endswith("stats")
    rows = as_json("snapshots")["snapshots"]
    assert [(row["epoch"], row["weights"], row["gradients"], row["mode"]) for row in rows] == [
        (0, 2, 1, "full"), (1, 2, 1, "full"), (None, 1, 0, "stats")
    ]  # fmt: skip
    assert rows[1]["weights_norm"] == pytest.approx(2 * rows[0]["weights_norm"])
    assert rows[0]["blob_uris"] == [
        f"file://{Path.cwd()}/.cirron/snapshots/{rows[0]['span_id']}/{kind}.safetensors"
        for kind in ("gradients", "weights")
    ]
    epoch = read_spool().named("epoch")[1]
    assert as_json("snapshots", epoch.id[:12])["snapshots"] == [rows[1]]
    assert as_json("snapshots", "--span", rows[2]["span_id"])["snapshots"] == [rows[2]]
    assert "begins with 'zz'" in shown("snapshots", "zz", status=1)


@pytest.mark.usefixtures("weights")
def test_a_snapshot_is_a_table_of_its_tensors() -> None:
    """Each tensor with its numbers and its histogram as sixteen characters."""
    text = shown("snapshot", "epoch:1")
    line = next(line for line in text.splitlines() if line.startswith("weight "))
    assert line.split()[1:] == [
        "2\N{MULTIPLICATION SIGN}4", "float32", "0", "1.309", "-2", "2", "3.703", "█", "█", "█",
        "█", "█", "█", "█", "█",
    ] or "█ █" in line  # fmt: skip
    assert "tiny" in text
    assert "weight.grad" in text
    assert "3 tensors, 8 weights" in text
    last = shown("snapshot")
    assert "alone" in last
    assert shown("snapshot", "by hand") == last
    chosen = as_json("snapshot", "epoch:0", "--kind", "gradients")["tensors"]
    assert [row["tensor_name"] for row in chosen] == ["weight.grad"]
    assert "epoch 7; there are: 0, 1" in shown("snapshot", "epoch:7", status=1)
    assert "no tensor of this snapshot" in shown("snapshot", "epoch:1", "missing", status=1)


@pytest.mark.usefixtures("weights")
def test_one_tensor_has_its_histogram_and_values() -> None:
    """A single tensor shows sixteen bars, and the first and last values from its file."""
    text = shown("snapshot", "epoch:1", "weight", "--preview", "2", "--tail", "1")
    lines = text.splitlines()
    assert sum(line.startswith("  [") for line in lines) == 16
    assert lines[-2].split() == ["first", "-2", "-1.429"]
    assert lines[-1].split() == ["last", "2"]
    assert "1  12.50%" in text
    tiny = shown("snapshot", "epoch:1", "tiny")
    assert tiny.splitlines()[-1].split() == ["first", "1", "1", "1"]


@pytest.mark.usefixtures("weights")
def test_what_changed_between_two_epochs() -> None:
    """Norms before and after, and from the files how far each tensor moved."""
    text = shown("snapshot", "epoch:1", "--against", "epoch:0")
    line = next(line for line in text.splitlines() if line.startswith("weight "))
    assert line.split()[1:7] == ["1.852", "\u2192", "3.703", "+100", "%", "100"]
    found = {row["tensor_name"]: row for row in as_json(
        "snapshot", "epoch:1", "--against", "epoch:0")["tensors"]}  # fmt: skip
    assert found["weight"]["moved"] == pytest.approx(1.0)
    assert found["tiny"]["moved"] == 0.0
    assert (found["weight.grad"]["norm_ratio"], found["weight.grad"]["moved"]) == (None, None)
    other = shown("snapshot", "last", "--against", "epoch:0")
    assert other.count("not there") == 4


def test_exports_hold_the_same_values(weights: dict[str, torch.Tensor]) -> None:
    """npz, safetensors and csv of a snapshot, read back by other programs."""
    assert shown("snapshot", "epoch:1", "--export", "out/a.npz") == "wrote 3 tensors to out/a.npz\n"
    with np.load("out/a.npz") as arrays:
        assert set(arrays) == {"weight", "tiny", "weight.grad"}
        assert arrays["weight"].tolist() == weights["weight"].tolist()
        assert arrays["tiny"].dtype == np.float32
    shown("snapshot", "epoch:1", "--kind", "weights", "--export", "b.safetensors")
    read = load_file("b.safetensors")
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], one) for name, one in weights.items())
    shown("snapshot", "epoch:1", "--export", "c.csv")
    with Path("c.csv").open(newline="") as file:
        rows = {row["tensor"]: row for row in csv.DictReader(file)}
    assert float(rows["weight"]["norm"]) == pytest.approx(weights["weight"].norm().item())
    assert sum(int(rows["weight"][f"count_{i}"]) for i in range(16)) == 8
    shown("snapshot", "epoch:1", "weight", "--export", "d.csv")
    assert pd.read_csv("d.csv")["value"].tolist()[:8] == weights["weight"].flatten().tolist()
    assert "must end with" in shown("snapshot", "epoch:1", "--export", "e.txt", status=1)
    assert "statistics alone" in shown("snapshot", "by hand", "--export", "e.npz", status=1)
    assert not Path("e.npz").exists()


@pytest.mark.usefixtures("weights")
def test_a_file_can_be_looked_into_without_a_spool() -> None:
    """``--file`` shows any safetensors file: its table, its metadata, a tensor's values."""
    uri = as_json("snapshots")["snapshots"][1]["blob_uris"][1]
    path = uri.removeprefix("file://")
    Path(path).rename("copy.safetensors")
    text = shown("snapshot", "--file", "copy.safetensors")
    assert "sdk: cirron-otel" in text
    assert "bfloat16" in text
    values = shown("snapshot", "weight", "--file", "copy.safetensors").splitlines()[-1]
    assert values.split()[:2] == ["first", "-2"]
    assert shown("snapshot", "epoch:1", "weight").endswith("the file is gone\n")
    assert "is gone" in shown("snapshot", "epoch:1", "--export", "x.npz", status=1)


@pytest.mark.usefixtures("weights")
def test_the_table_for_pandas() -> None:
    """``ci.snapshots()`` has a row for each tensor and snapshot, with types to work with."""
    frame = ci.snapshots()
    assert len(frame) == 7
    weight = frame[frame["tensor"] == "weight"].set_index("epoch")
    assert weight.loc[1, "norm"] == pytest.approx(2 * weight.loc[0, "norm"])
    assert str(frame["epoch"].dtype) == "Int64"
    assert str(frame["time"].dtype).startswith("datetime64[ns, UTC")
    assert sum(weight.loc[0, "counts"]) == 8
    assert weight.loc[0, "kind"] == "weights"
    assert len(ci.snapshots(".cirron/spool")) == len(ci.snapshots(".cirron")) == 7
    assert len(ci.snapshots(session="none such")) == 0
    with pytest.raises(SpoolError, match="nothing was recorded there"):
        ci.snapshots("elsewhere")


def test_a_running_recording_is_flushed_first() -> None:
    """What was taken a moment ago is in the table."""
    ci.profile(frameworks=[])
    ci.snapshot({"a": torch.ones(2)})
    assert ci.snapshots()["tensor"].tolist() == ["a"]


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message names the extra, and the command that needs none."""
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(CirronDependencyError, match=r"cirron-otel\[snapshots\]"):
        ci.snapshots()


def test_reading_needs_neither_torch_nor_numpy(run_program: RunProgram) -> None:
    """The list and the table of a snapshot load no framework, no numpy and no OpenTelemetry."""
    ci.profile(frameworks=[])
    ci.snapshot({"a": torch.ones(2)})
    ci.shutdown()
    rows = run_program(
        """
        import sys
        from cirron_otel.cli.app import run
        assert run(["traces", "snapshots"]) == 0
        assert run(["traces", "snapshot"]) == 0
        print({"torch", "numpy", "pandas", "opentelemetry", "safetensors"} & set(sys.modules))
        """,
        measured=False,
    )
    assert rows.stdout.endswith("set()\n")


def test_rows_of_other_writers() -> None:
    """Rows that hang at an epoch itself, as cirron-sdk writes them, are a snapshot of it."""
    span = {
        "id": "e" * 32, "name": "epoch", "parent_id": None, "index": 4, "start_ns": 1, "end_ns": 9,
    }  # fmt: skip
    row = {
        "id": "1" * 32, "span_id": "e" * 32, "tensor_name": "w", "shape": [1], "dtype": "float32",
        "mode": "stats", "stats": {"mean": None, "nonfinite": {"mean": "nan"}}, "blob_uri": None,
        "ts_ns": 5, "attrs": {},
    }  # fmt: skip
    batch = {
        "schema_version": 1, "batch_id": "2" * 32, "created_ns": 1, "spans": [span], "marks": [],
        "snapshots": [row], "sdk_version": "0.3.0",
    }  # fmt: skip
    spool = Spool(Path(".cirron"))
    spool.write([json.dumps(batch).encode()], created_ns=1, batch_id="2" * 32)
    spool.write([b"no batch, but tensor_name"], created_ns=2, batch_id="3" * 32)
    spool.write([b'{"tensor_name": 1}'.replace(b" ", b"")], created_ns=3, batch_id="4" * 32)
    told: list[Path] = []
    (one,) = load(spool, on_error=lambda path, _: told.append(path))
    assert (one.epoch, one.trigger, one.rows[0].number("mean")) == (4, "epoch_end", None)
    assert len(told) == 1
    assert find([one], "epoch:4").rows == one.rows
    assert find([one], "eee").span_id == one.span_id
    with pytest.raises(NoSuchSnapshotError, match="there are no snapshots"):
        find([], "last")


@pytest.mark.parametrize(
    "stats",
    [
        {"mean": "x", "std": [], "min": 10**400, "nonfinite_count": "many", "finite": "no"},
        {"finite": {"histogram": {"bins": ["a"] * 17, "counts": [1] * 16}}},
        {"histogram": {"bins": [0] * 17, "counts": ["a"] * 16}},
        {"histogram": {"bins": [0] * 17, "counts": [-1] * 16}},
        {"histogram": {"bins": [10**400] * 17, "counts": [1] * 16}},
        {"histogram": {"bins": [0, 1], "counts": [0.5]}},
        {"histogram": {"bins": None, "counts": {}}},
    ],
)
def test_statistics_of_a_foreign_writer_may_be_anything(stats: dict[str, Any]) -> None:
    """What is no number or no histogram is left out; the rest of the row is shown."""
    row = Row("e" * 32, tensor_name="w", shape=[1], stats=stats)
    assert row.histogram is None
    assert [row.number(name) for name in ("mean", "std", "min")] == [None] * 3
    assert row.nonfinite == 0


def test_histograms_as_text() -> None:
    """Heights against the highest bin, never blank for a value, and all of it in ASCII too."""
    assert spark([0, 1, 8, 1000]) == " ▁▁█"
    assert spark([0, 1, 8, 1000], ascii_only=True) == " ..#"
    assert spark([0] * 16) == " " * 16
    assert list(bars([0.0, 0.5, 1.0], [1, 3], columns=6)) == [
        "[  0, 0.5) ██     1  25.00%",
        "[0.5,   1] ██████ 3  75.00%",
    ]
    assert all(line.isascii() for line in bars([0.0, 0.5, 1.0], [1, 3], ascii_only=True))


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
     torch.float8_e5m2, torch.int64, torch.int8, torch.uint16, torch.bool],
    ids=str,
)  # fmt: skip
def test_values_of_every_type(dtype: torch.dtype) -> None:
    """Bytes read back as Python numbers and as an array are what torch says they are."""
    tensor = torch.tensor([0.0, 1.0, 0.5, 3.0, 240.0]).to(dtype)
    data = bytes(tensor.view(torch.uint8).tolist())
    name = str(dtype).removeprefix("torch.")
    expected = tensor.double().tolist()
    assert elements.values(data, name) == expected
    assert elements.values(data, name, 1, 3) == expected[1:3]
    assert elements.as_array(data, name, (5,)).astype(float).tolist() == expected


def test_the_platform_gets_the_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a key the files go up under their own names, and the rows there name the uploads."""
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with PlatformServer() as server:
        monkeypatch.setenv("CIRRON_API_KEY", KEY)
        monkeypatch.setenv("CIRRON_API_ENDPOINT", server.url)
        ci.profile(snapshots="full", frameworks=[], exit_budget=20)
        span = ci.snapshot(nn.Linear(2, 1))
        ci.shutdown()
    key = f"snapshots/{span}/weights.safetensors"
    assert server.blobs == {f"/v1/traces/blobs/{key}": Path(f".cirron/{key}").read_bytes()}
    rows = [row for data in server.committed.values() for row in json.loads(data)["snapshots"]]
    assert [row["tensor_name"] for row in rows] == ["weight", "bias"]
    assert {row["blob_uri"] for row in rows} == {f"s3://bucket/v1/traces/blobs/{key}"}


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.two = nn.Conv2d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The input and what the convolutions add to it."""
        return torch.relu(x + self.two(torch.relu(self.norm(self.one(x)))))


def test_two_epochs_of_a_residual_network() -> None:
    """A real training: the histograms are those of numpy, and show weights that have moved."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), Block(8), Block(8), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(8, 4),
    )  # fmt: skip
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = TensorDataset(torch.randn(24, 3, 8, 8), torch.randint(0, 4, (24,)))
    ci.profile(snapshots="full")
    ci.watch(model, buffers=True)
    for _ in range(2):
        for x, y in DataLoader(data, batch_size=8, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
    ci.shutdown()
    snapshots = load(Spool(Path(".cirron")))
    assert [(one.epoch, len(one.rows)) for one in snapshots] == [(0, 12), (0, 18), (1, 12), (1, 18)]
    compared = 0
    for one in snapshots:
        for row in one.rows:
            assert row.blob_uri is not None
            tensor = load_file(row.blob_uri.removeprefix("file://"))[row.tensor_name].double()
            assert row.histogram is not None
            bins, counts = row.histogram
            assert sum(counts) == tensor.numel()
            values = tensor.flatten().numpy()
            if values.min() < values.max():
                expected, edges = np.histogram(values, 16, (values.min(), values.max()))
                assert bins == pytest.approx(edges.tolist(), rel=1e-12)
                # Where a value lies on an edge to the last bit, numpy may round the other way.
                assert np.abs(np.cumsum(expected - np.array(counts))).max() <= 1
                compared += 1
            assert row.number("std") == pytest.approx(values.std(), rel=1e-9)
    assert compared > 40
    before, after = (find(snapshots, f"epoch:{n}") for n in range(2))
    moved = [row.number("norm") for one in (before, after) for row in one.rows
             if row.tensor_name == "1.one.weight"]  # fmt: skip
    assert moved[0] != moved[1]
    lines = [line for line in shown("snapshot", "epoch:1").splitlines() if ".weight " in line]
    assert len(lines) == 8
    assert all(any(c in line for c in "▁▂▃▄▅▆▇█") for line in lines)
