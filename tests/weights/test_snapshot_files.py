# mypy: disable-error-code="no-untyped-call"
"""The files of snapshots: readable by everybody, whole or not there, bounded, never in the way."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import cirron_otel as ci
from checkpoints_by_hand import packed
from cirron_otel import semconv
from cirron_otel.errors import SpoolFormatError
from cirron_otel.weights import containers
from cirron_otel.weights.blobs import path_of, uri_of
from cirron_otel.weights.tensors import dtype_name
from frameworks.torch_programs import Program
from helpers import RunProgram, read_spool
from weights.snapshots_by_hand import files, part, quantised

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.uint16,
    torch.uint32, torch.uint64, torch.bool, torch.complex64,
]  # fmt: skip


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


def framed(table: str) -> bytes:
    """A file with this table, and eight bytes of values."""
    return packed(table.encode(), bytes(8))


WHOLE: dict[str, object] = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}


def entry(**changed: object) -> bytes:
    """A file of one tensor, with something wrong in its line of the table."""
    return framed(json.dumps({"a": WHOLE | changed}))


BROKEN = {
    "empty": b"",
    "short": b"short",
    "length": b"\xff" * 16,
    "no JSON": framed("nope"),
    "array": framed("[]"),
    "nested": framed('{"a":' * 5000),
    "cut off": entry()[:-1],
    "wrong size": entry(shape=[3]),
    "no shape": framed('{"a":{"dtype":"F32","data_offsets":[0,8]}}'),
    "shape is a number": entry(shape=2),
    "shape of text": entry(shape=["2"]),
    "shape of halves": entry(shape=[2.5]),
    "negative": entry(dtype="F4", shape=[-2]),
    "one place": entry(data_offsets=[0]),
    "three places": entry(data_offsets=[0, 8, 16]),
    "halves of places": entry(data_offsets=[0.0, 8.0]),
    "backwards": entry(data_offsets=[8, 0]),
    "type is a list": entry(dtype=["F32"]),
    "a gap": entry(shape=[1], data_offsets=[4, 8]),
    "bytes of nobody": entry(shape=[1], data_offsets=[0, 4]),
    "over each other": framed(json.dumps(dict.fromkeys("ab", WHOLE))),
    "twice": framed(f'{{"a":{json.dumps(WHOLE)},"a":{json.dumps(WHOLE)}}}'),
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_a_file_that_is_none(content: bytes, tmp_path: Path) -> None:
    """A damaged file is named in one error, whatever is wrong with it."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(SpoolFormatError, match=r"x\.safetensors is no safetensors file"):
        containers.Container(path)


def test_the_part_of_a_distributed_tensor(run_program: RunProgram) -> None:
    """Every rank writes its part of a ``DTensor``, its row says so; of replicas rank 0 alone."""
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
        os.environ["RANK"] = "1"
        ci.profile(snapshots="full")
        ci.snapshot(model)
        inner = torch.nn.Linear(2, 1, bias=False)
        replica = torch.nn.parallel.DistributedDataParallel(inner)
        replica(torch.ones(1, 2)).sum().backward()
        ci.snapshot(replica)
        ci.snapshot(inner)
        print(ci.health()["swallowed_errors"], ci.health()["losses"])
        ci.shutdown()
        dist.destroy_process_group()
        """,
        timeout=150,
    )
    assert rows.stdout == "{} {}\n"
    row, *replicas = rows.snapshots
    assert (row.shape, row.mode, row.dtype) == ([2, 4], "full", "float32")
    assert [(one.tensor_name, one.mode) for one in replicas] == [
        (f"{prefix}weight{kind}", "stats") for prefix in ("module.", "") for kind in ("", ".grad")
    ]
    assert [2, 4] in row.attrs.values()
    assert any("Shard" in str(value) or "S(0)" in str(value) for value in row.attrs.values())
    (path,) = files()
    assert torch.equal(load_file(path)["weight"], torch.arange(8.0).reshape(2, 4))
