# mypy: disable-error-code="no-untyped-call"
"""The files of snapshots: readable by everybody, whole or not there, bounded, never in the way."""

from __future__ import annotations

import json
import os
import signal
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel._guard import Guard
from cirron_otel.cursors import Cursor
from cirron_otel.errors import SpoolFormatError
from cirron_otel.spool import Spool
from cirron_otel.weights import containers
from cirron_otel.weights.blobs import Blobs, path_of, uri_of
from cirron_otel.weights.tensors import dtype_name
from frameworks.torch_programs import Program
from helpers import RunProgram, read_spool

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


@pytest.fixture(autouse=True)
def _nothing_watched() -> Iterable[None]:
    """Each test begins and ends without a watched model."""
    ci.watch(None)
    yield
    ci.watch(None)


def files() -> list[Path]:
    """Every file under ``snapshots/``."""
    return sorted(path for path in Path(".cirron/snapshots").rglob("*") if path.is_file())


def part(name: str, tensor: torch.Tensor) -> containers.Part:
    """A tensor to be written."""
    made = containers.part_of(name, tensor, dtype_name(tensor))
    assert made is not None
    return made


def test_the_reader_of_the_documentation_reads_what_we_write() -> None:
    """The published snippet opens every row's file and finds its tensor by name (C-W6, C-W26)."""
    program = Program()
    ci.profile(snapshots="full")
    ci.watch(program.model)
    for batch in program.loader:
        program.loss(batch).backward()
        last = {
            f"{name}.grad": one.grad.clone()
            for name, one in program.model.named_parameters()
            if one.grad is not None
        }
        program.optimizer.step()
        program.optimizer.zero_grad()
    expected = {**last, **program.model.state_dict()}
    assert ci.health()["losses"] == {}
    ci.shutdown()
    found = {}
    for batch_file in sorted(Path("./.cirron/spool").glob("*.json")):
        batch = json.loads(batch_file.read_text())
        for span in batch["spans"]:
            assert span["end_ns"] - span["start_ns"] >= 0
        for snap in batch["snapshots"]:
            if snap["blob_uri"] is None:
                continue
            path = snap["blob_uri"].removeprefix("file://")
            assert Path(path).parent == Path.cwd() / ".cirron" / "snapshots" / snap["span_id"]
            with safe_open(path, framework="pt") as f:
                found[snap["tensor_name"]] = f.get_tensor(snap["tensor_name"])
                assert f.metadata() == {
                    "span": snap["span_id"], "step": "2", "format": "pt",
                    "sdk": f"cirron-otel {batch['sdk_version']}",
                }  # fmt: skip
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert [path.name for path in files()].count("gradients.safetensors") == 1
    assert {row.mode for row in read_spool().snapshots} == {"full"}


def test_sampled_writes_files_at_some_epochs() -> None:
    """The chosen epochs have files and say ``sampled``; the others stay ``stats`` without one."""
    model = nn.Linear(2, 1)
    ci.profile(snapshots="sampled", sample_rate=0.5, frameworks=[], run_id="the same as ever")
    ci.watch(model)
    for _ in ci.epochs(range(12)):
        pass
    ci.shutdown()
    rows = [row for row in read_spool().snapshots if row.tensor_name == "weight"]
    modes = [row.mode for row in rows]
    assert (modes.count("sampled"), modes.count("stats")) == (len(files()), 12 - len(files()))
    assert 0 < len(files()) < 12
    assert [row.blob_uri is None for row in rows] == [mode == "stats" for mode in modes]


def test_every_type_of_tensor(tmp_path: Path) -> None:
    """The library reads back every type, shape and layout bit by bit; and we read the library's."""
    torch.manual_seed(0)
    tensors = {}
    for dtype in DTYPES:
        tensors[f"a.{dtype}"] = torch.randn(3, 5).mul(4).abs().to(dtype)
        tensors[f"empty.{dtype}"] = torch.empty(0, 2, dtype=dtype)
    tensors |= {
        "scalar": torch.tensor(2.5),
        "turned": torch.arange(12.0).reshape(3, 4).T,
        "part": torch.arange(10.0)[::3],
        "spread": torch.ones(1).expand(4),
        "turned round": torch.tensor([1 + 2j]).conj(),
        'odd \u00e9 "name"': torch.ones(2),
    }
    path = tmp_path / "a" / "b.safetensors"
    size = containers.write(path, [part(*one) for one in tensors.items()], {"k": "v"})
    assert size == path.stat().st_size
    read = load_file(path)
    assert read.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert read[name].dtype == tensor.dtype
        assert read[name].shape == tensor.shape
        same = read[name], tensor.resolve_conj().contiguous()
        assert torch.equal(*(one.reshape(-1).view(torch.uint8) for one in same))
    theirs = tmp_path / "theirs.safetensors"
    save_file({name: one.resolve_conj().contiguous() for name, one in tensors.items()}, theirs)
    with containers.Container(path) as ours, containers.Container(theirs) as other:
        assert ours.metadata == {"k": "v"}
        for name in tensors:
            entry, same = ours.find(name), other.find(name)
            assert entry is not None
            assert same is not None
            assert (entry.shape, entry.dtype) == (same.shape, same.dtype)
            assert ours.data(entry) == other.data(same)
        assert ours.find("scalar.grad") == ours.find("scalar")


def quantised() -> torch.Tensor:
    """A tensor of a kind that torch itself calls outdated."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(2, dtype=torch.complex128),
        lambda: torch.ones(2, device="meta"),
        lambda: torch.eye(2).to_sparse(),
        quantised,
    ],
    ids=["complex128", "meta", "sparse", "quantised"],
)
def test_what_no_such_file_can_hold(make: Callable[[], torch.Tensor]) -> None:
    """A tensor that the format has no word for is left out, and the others are written."""
    tensor = make()
    assert containers.part_of("x", tensor, dtype_name(tensor)) is None


def test_tied_weights_are_written_once() -> None:
    """One copy under the first name; the file's metadata and the row say where the other is."""
    model = nn.Module()
    model.one, model.two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    model.two.weight = model.one.weight
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot(model)
    ci.shutdown()
    (path,) = files()
    with safe_open(path, framework="pt") as f:
        assert list(f.keys()) == ["one.weight"]
        assert f.metadata()["two.weight"] == "one.weight"
    first, second = read_spool().snapshots
    assert (first.mode, second.mode, second.blob_uri) == ("full", "stats", None)
    assert second.attrs == {semconv.TIED_TO: "one.weight"}


def test_tensors_that_share_memory_are_written_each() -> None:
    """Views of one storage do not keep each other from the file (C-W26)."""
    whole = torch.arange(6.0)
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot({"whole": whole, "half": whole[:3]})
    ci.shutdown()
    (path,) = files()
    read = load_file(path)
    assert torch.equal(read["whole"], whole)
    assert torch.equal(read["half"], whole[:3])


@pytest.mark.parametrize("name", ["a b", "caf\u00e9", "100%25?#x"])
def test_addresses_of_odd_directories(name: str, tmp_path: Path) -> None:
    """A plain ``removeprefix`` reads most addresses; ours reads all of them back."""
    path = tmp_path / name / "weights.safetensors"
    path.parent.mkdir()
    path.touch()
    uri = uri_of(path)
    assert path_of(uri) == path
    if "%" not in name:
        assert uri == f"file://{path}"
    assert path_of("https://example.test/x") is None


# -- trouble -----------------------------------------------------------------------------------


def test_a_process_killed_while_it_writes_leaves_no_file(run_program: RunProgram) -> None:
    """After ``kill -9`` in the middle of a file there is no file of that name, and no row."""
    rows = run_program(
        """
        import os, signal
        import torch
        import cirron_otel as ci
        from cirron_otel.weights import containers

        ci.profile(snapshots="full", frameworks=[])
        ci.snapshot({"a": torch.ones(1000)})
        ci.flush()
        whole = containers._of_torch
        def dies(tensor, size):
            if tensor[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return whole(tensor, size)
        containers._of_torch = dies
        ci.snapshot({"a": torch.ones(1000), "b": torch.full((1000,), 2.0)})
        """,
        expect=-signal.SIGKILL,
    )
    (row,) = rows.snapshots
    whole = [path for path in files() if path.suffix == ".safetensors"]
    assert [uri_of(path.absolute()) for path in whole] == [row.blob_uri]
    assert [path.name for path in files() if path not in whole] == ["weights.safetensors.tmp"]


def test_what_a_dead_writer_left_is_swept(tmp_path: Path) -> None:
    """A ``.tmp`` that nobody has touched for an hour goes with its folder; a young one stays."""
    blobs = Blobs(Spool(tmp_path), Guard(), max_bytes=10_000)
    for name, age in (("a" * 32, 7200), ("b" * 32, 10)):
        tmp = tmp_path / "snapshots" / name / "weights.safetensors.tmp"
        tmp.parent.mkdir(parents=True)
        tmp.touch()
        then = tmp.stat().st_mtime - age
        os.utime(tmp, (then, then))
    assert blobs.write("c" * 32, "weights", [part("x", torch.ones(3))], {})
    assert sorted(path.name for path in (tmp_path / "snapshots").iterdir()) == [
        "a" * 32, "b" * 32, "c" * 32
    ]  # fmt: skip
    os.utime(tmp_path / "snapshots" / ("a" * 32), (0, 0))
    assert blobs.write("d" * 32, "weights", [part("x", torch.ones(3))], {})
    assert not (tmp_path / "snapshots" / ("a" * 32)).exists()


def test_a_disk_that_refuses_costs_the_file_alone(run_program: RunProgram) -> None:
    """A write that fails half way is counted; no part of it stays, and the numbers are there."""
    rows = run_program(
        """
        import resource
        import torch
        import cirron_otel as ci

        ci.profile(snapshots="full", frameworks=[])
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, resource.RLIM_INFINITY))
        ci.snapshot({"a": torch.ones(100_000), "b": torch.ones(10)})
        print(ci.health()["losses"])
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        ci.snapshot({"a": torch.ones(100_000)})
        """,
        measured=False,
    )
    assert rows.stdout == "{'snapshot_file_not_written': 1}\n"
    assert "ulimit -f" in rows.stderr
    assert [row.mode for row in rows.snapshots] == ["stats", "stats", "full"]
    assert all(row.stats is not None for row in rows.snapshots)
    assert len(files()) == 1


def test_a_directory_that_cannot_be_made(caplog: pytest.LogCaptureFixture) -> None:
    """Where ``snapshots`` is no directory, the statistics are recorded and the reason is logged."""
    Path(".cirron").mkdir()
    Path(".cirron/snapshots").write_text("in the way")
    ci.profile(snapshots="full", frameworks=[])
    ci.snapshot(nn.Linear(2, 1))
    assert ci.health()["losses"] == {"snapshot_file_not_written": 1}
    ci.shutdown()
    assert len(read_spool().snapshots) == 2
    assert "the statistics are recorded without the tensors" in caplog.text


def folder(root: Path, letter: str, at_s: int, size: int = 1000) -> Path:
    """A snapshot's folder with one file, of a certain age."""
    path = root / "snapshots" / (letter * 32) / "weights.safetensors"
    path.parent.mkdir(parents=True)
    path.write_bytes(bytes(size))
    os.utime(path, (at_s, at_s))
    return path.parent


def test_the_oldest_files_leave_first(tmp_path: Path) -> None:
    """Past the cap the oldest snapshots go, as many as needed; what is not ours stays."""
    guard = Guard()
    old, older, new = (folder(tmp_path, name, at) for name, at in (("b", 20), ("a", 10), ("c", 30)))
    (tmp_path / "snapshots" / "mine").mkdir()
    blobs = Blobs(Spool(tmp_path), guard, max_bytes=3000)
    assert blobs.write("d" * 32, "weights", [part("x", torch.ones(300))], {})
    assert [path.exists() for path in (older, old, new)] == [False, False, True]
    assert (tmp_path / "snapshots" / "mine").exists()
    assert blobs.evicted_files == 2
    assert blobs.write("e" * 32, "weights", [part("x", torch.ones(10_000))], {}) is None
    assert new.exists()
    assert guard.losses == {"snapshot_file_over_cap": 1}


def test_files_that_a_destination_lacks_leave_last(tmp_path: Path) -> None:
    """A file whose rows are not delivered yet stays as long as a delivered one can go."""
    guard = Guard()
    spool = Spool(tmp_path)
    second = 1_000_000_000
    for at, batch_id in ((11, "1" * 32), (2001, "2" * 32)):
        spool.write([b"{}"], created_ns=at * second, batch_id=batch_id)
    cursor = Cursor(tmp_path, "platform")
    assert cursor.take()
    cursor.settle(spool.files()[1].name, "sent")
    undelivered, delivered = folder(tmp_path, "a", 10), folder(tmp_path, "b", 2000)
    blobs = Blobs(spool, guard, max_bytes=2500, uploads_to=["platform"])
    assert blobs.write("d" * 32, "weights", [part("x", torch.ones(50))], {})
    assert (undelivered.exists(), delivered.exists()) == (True, True)
    assert blobs.write("e" * 32, "weights", [part("x", torch.ones(200))], {})
    assert (undelivered.exists(), delivered.exists()) == (True, False)
    assert guard.losses == {}
    assert blobs.write("f" * 32, "weights", [part("x", torch.ones(400))], {})
    assert not undelivered.exists()
    assert guard.losses == {"evicted_undelivered_blobs": 1}
    cursor.release()


def test_a_large_snapshot_is_announced(caplog: pytest.LogCaptureFixture) -> None:
    """Before the first file of a large model the log says how much each snapshot takes."""
    model = {"w": torch.zeros(30_000_000)}
    ci.profile(snapshots="full", frameworks=[], snapshot_max_bytes=300_000_000)
    ci.snapshot(model)
    ci.snapshot(model)
    ci.shutdown()
    told = [record.message for record in caplog.records if "120 MB" in record.message]
    assert len(told) == 1
    assert "the newest 2 of them are kept" in told[0]
    assert len(files()) == 2


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 16,
        (2).to_bytes(8, "little") + b"[]",
        (4).to_bytes(8, "little") + b"nope",
        (64).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(64),
        (64).to_bytes(8, "little")
        + b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'.ljust(64)
        + bytes(8),
    ],
    ids=["empty", "short", "length", "array", "no JSON", "cut off", "wrong size"],
)
def test_a_file_that_is_none(content: bytes, tmp_path: Path) -> None:
    """A damaged file is named in one error, whatever is wrong with it."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SpoolFormatError, match=r"x\.safetensors is no safetensors file"):
        containers.Container(path)


def test_the_part_of_a_distributed_tensor(run_program: RunProgram) -> None:
    """Of a ``DTensor`` the part in this process is described and written; its row says so."""
    rows = run_program(
        """
        import os
        import torch
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Shard, distribute_tensor
        import cirron_otel as ci

        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = init_device_mesh("cpu", (1,))
        model = torch.nn.Linear(4, 2, bias=False)
        part = distribute_tensor(torch.arange(8.0).reshape(2, 4), mesh, [Shard(0)])
        model.weight = torch.nn.Parameter(part)
        ci.profile(snapshots="full", frameworks=[])
        ci.snapshot(model)
        print(ci.health()["swallowed_errors"], ci.health()["losses"])
        ci.shutdown()
        dist.destroy_process_group()
        """,
        timeout=150,
    )
    assert rows.stdout == "{} {}\n"
    (row,) = rows.snapshots
    assert (row.shape, row.mode, row.dtype) == ([2, 4], "full", "float32")
    assert [2, 4] in row.attrs.values()
    assert any("Shard" in str(value) or "S(0)" in str(value) for value in row.attrs.values())
    (path,) = files()
    assert torch.equal(load_file(path)["weight"], torch.arange(8.0).reshape(2, 4))
