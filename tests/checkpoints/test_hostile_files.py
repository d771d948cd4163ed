"""Files that are damaged or made to harm: one clear line and status 2, never a traceback."""

from __future__ import annotations

import json
import os
import pickle
import struct
import zipfile
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from checkpoints_by_hand import changed, f32, network, packed, write
from cirron_otel.checkpoints.checking import check
from cirron_otel.checkpoints.tables import CheckpointError
from cirron_otel.cli.app import cli, run

ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
TEXT = json.dumps(ENTRY).encode()
EIGHT = bytes(8)
TWELVE = bytes(12)

HOSTILE = {
    "empty": (b"", "is empty"),
    "too short": (b"\1\0\0", "cut off or another kind"),
    "huge header": (struct.pack("<Q", 1 << 62) + b"{}", "cut off or another kind"),
    "text": (b"once upon a time there was a model", "cut off or another kind"),
    "no object": (packed([1, 2], EIGHT), "no JSON object"),
    "cut off": (packed({"a": ENTRY}, b"1234"), "cut off"),
    "trailing bytes": (packed({"a": ENTRY}, TWELVE), "last 4 bytes are nobody's"),
    "overlap": (
        packed({"a": ENTRY, "b": {**ENTRY, "data_offsets": [4, 12]}}, TWELVE),
        "lies over another tensor",
    ),
    "hole": (packed({"a": {**ENTRY, "data_offsets": [4, 12]}}, TWELVE), "4 bytes before 'a'"),
    "wrong size": (packed({"a": {**ENTRY, "shape": [3]}}, EIGHT), "takes others"),
    "negative": (packed({"a": {**ENTRY, "shape": [-2]}}, EIGHT), "no list of a few sizes"),
    "backwards": (packed({"a": {**ENTRY, "data_offsets": [8, 0]}}, EIGHT), "no range of bytes"),
    "many dimensions": (packed({"a": {**ENTRY, "shape": [1] * 500}}, EIGHT), "a few sizes"),
    "fractions": (packed({"a": {**ENTRY, "data_offsets": [0.0, 8.0]}}, EIGHT), "no range of bytes"),
    "no shape": (packed({"a": {"dtype": "F32"}}, EIGHT), "has not dtype, shape"),
    "odd dtype": (packed({"a": {**ENTRY, "dtype": 7}}, EIGHT), "dtype of 'a' is no text"),
    "odd metadata": (packed({"__metadata__": [1], "a": ENTRY}, EIGHT), "metadata"),
    "nan in the header": (packed(b'{"a": NaN}', EIGHT), "NaN is no JSON number"),
    "twice": (packed(b'{"a":%b,"a":%b}' % (TEXT, TEXT), EIGHT), "the key 'a' is there twice"),
    "deep": (packed(b"[" * 100_000, EIGHT), "nested too deeply"),
    "no utf-8": (packed(b'{"\xff": 1}', EIGHT), "utf-8"),
    "huge number": (packed(b'{"a": {"shape": [' + b"9" * 5000 + b"]}}", EIGHT), "digits"),
    "no tensors": (packed({}, b""), "holds no tensors"),
    "gguf": (b"GGUF" + bytes(40), "a GGUF file"),
    "lfs": (b"version https://git-lfs.github.com/spec/v1\n", "git lfs pull"),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_refused_with_one_line(kind: str, tmp_path: Path) -> None:
    """Each kind of damage ends with status 2 and says what is wrong."""
    data, expected = HOSTILE[kind]
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        check(path)
    done = CliRunner().invoke(cli, ["check", str(path)])
    assert done.exit_code == 2
    assert expected in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


def test_every_beginning_of_a_file_is_refused(tmp_path: Path) -> None:
    """Wherever a download stopped, the rest is no checkpoint."""
    whole = write(tmp_path / "whole.safetensors", network()).read_bytes()
    part = tmp_path / "part.safetensors"
    for size in [*range(1, 64), *range(64, len(whole), 97)]:
        part.write_bytes(whole[:size])
        with pytest.raises(CheckpointError):
            check(part)


def test_any_byte_of_a_table_may_be_wrong(tmp_path: Path) -> None:
    """With one byte of the table replaced a file is read or refused, and nothing else happens."""
    whole = write(tmp_path / "model.safetensors", {"a.weight": f32([1.0, 2.0], 1, 2)}).read_bytes()
    path = tmp_path / "other.safetensors"
    refused = []
    for at in range(len(whole) - 8):
        for byte in (0x00, 0x22, 0x39, 0x7B, 0xFF):
            path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1 :])
            try:
                check(path)
            except CheckpointError as exc:
                refused.append(str(exc))
    assert len(refused) > 100
    assert all("other.safetensors" in said for said in refused)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "a\\b", "", "x/../../y"])
def test_an_index_cannot_name_files_outside(name: str, tmp_path: Path) -> None:
    """Shards lie in the folder of their index."""
    write(tmp_path / "model.safetensors", network())
    folder = tmp_path / "folder"
    folder.mkdir()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": name}}))
    with pytest.raises(CheckpointError, match="outside of it"):
        check(folder)


def test_a_link_out_of_the_folder_is_refused(tmp_path: Path) -> None:
    """Neither does a link lead a shard elsewhere; the cache of Hugging Face is made of links."""
    blobs = tmp_path / "models--x" / "blobs"
    folder = tmp_path / "models--x" / "snapshots" / "abc"
    blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    write(blobs / "123", network())
    (folder / "model-1.safetensors").symlink_to(blobs / "123")
    index = {"weight_map": dict.fromkeys(network(), "model-1.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert check(folder).findings == []
    elsewhere = write(tmp_path / "secret.safetensors", network())
    (folder / "model-1.safetensors").unlink()
    (folder / "model-1.safetensors").symlink_to(elsewhere)
    with pytest.raises(CheckpointError, match="a link that leads outside"):
        check(folder)


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    """What is no file is refused at once."""
    os.mkfifo(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match="is no file"):
        check(tmp_path / "model.safetensors")


class _Harm:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("harm-was-done",)


@pytest.mark.parametrize("zipped", [True, False])
def test_no_code_of_a_torch_file_runs(
    *, zipped: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that would run something when it is unpickled is refused, and nothing ran."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.pt"
    torch.save({"a": _Harm()}, path, _use_new_zipfile_serialization=zipped)
    with pytest.raises(CheckpointError, match="could run code"):
        check(path)
    plain = tmp_path / "plain.pt"
    plain.write_bytes(pickle.dumps({"a": _Harm()}))
    with pytest.raises(CheckpointError):
        check(plain)
    assert not (tmp_path / "harm-was-done").exists()


def test_a_zip_bomb_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    """Compressed parts, and the beginning of a file, are not what torch writes."""
    path = tmp_path / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as box:
        box.writestr("model/data.pkl", b"\0" * 50_000_000)
    with pytest.raises(CheckpointError, match="compressed"):
        check(path)
    path.write_bytes(path.read_bytes()[:60])
    with pytest.raises(CheckpointError, match="cut off"):
        check(path)


def test_a_tensor_that_shows_its_memory_over_and_over_is_left_out(tmp_path: Path) -> None:
    """An expanded tensor of a terabyte in a file of a kilobyte is noted, not unfolded."""
    path = tmp_path / "model.pt"
    torch.save({"a": torch.ones(1).expand(1 << 38), "b": torch.ones(2, 2)}, path)
    found = check(path)
    assert list(found.checkpoint.tensors) == ["b"]
    assert "is not looked into" in found.checkpoint.notes[0]


def test_names_cannot_write_to_the_terminal(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Control characters in names are spelled out, in text and in the page."""
    name = "\x1b[2J<script>alert(1)</script>.weight"
    tensors = changed({name: f32([1.0] * 4, 2, 2)}, name, {0: float("nan")})
    path = write(tmp_path / "model.safetensors", tensors)
    assert run(["check", str(path), "--out", str(tmp_path / "page.html")]) == 1
    out = capfd.readouterr().out
    assert "\x1b" not in out
    assert "\\x1b[2J" in out
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert "&lt;script" in page


def test_a_page_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    """A directory that is not there gives status 2, not a traceback."""
    path = write(tmp_path / "model.safetensors", network())
    done = CliRunner().invoke(cli, ["check", str(path), "--out", str(tmp_path / "no" / "x.html")])
    assert done.exit_code == 2
    assert "cannot write" in done.stderr
