"""What ``check`` is pointed at: one file, an index with its shards, or a folder with either."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from cirron_otel.checkpoints.tables import (
    CheckpointError,
    Tensor,
    open_file,
    read_json,
    read_safetensors,
)

_FIRST = (
    "model.safetensors.index.json", "model.safetensors", "pytorch_model.bin.index.json",
    "pytorch_model.bin",
)  # fmt: skip
_THEN = (
    "*.safetensors.index.json", "*.bin.index.json", "*.safetensors", "*.bin", "*.pt", "*.pth",
    "*.ckpt",
)  # fmt: skip
_MAX_INDEX = 200_000_000
_MAX_CONFIG = 10_000_000
#: Put around modules by compilers and distributed training; no part of a tensor's name.
_WRAPPED = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\."
)
_PARALLEL = "module."
#: How files begin that are checkpoints of another kind.
_OTHERS = (
    (b"GGUF", "a GGUF file; check the safetensors it was made of"),
    (b"\x89HDF", "an HDF5 file (Keras); export its weights as safetensors"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself: run `git lfs pull`"),
    (b"\x93NUMPY", "a numpy array; only files with named tensors are checked"),
)


@dataclass(slots=True)
class Checkpoint:
    """The tensors of one checkpoint, and where they came from."""

    path: Path
    #: ``safetensors`` or ``torch``.
    format: str
    files: list[Path]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    #: Under which keys of a torch file the weights were.
    wrapper: str = ""
    #: Tensors that the index lists and that are in no shard, with the shard that should have them.
    missing: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: ``config.json`` beside it, as far as it can be read.
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def model_type(self) -> str:
        """What kind of model ``config.json`` says it is."""
        found = self.config.get("model_type")
        return found if isinstance(found, str) else ""


def open_checkpoint(path: Path) -> Checkpoint:
    """Find and open what a path means. Reads tables; values are read when they are asked for.

    Raises :class:`CheckpointError`, and
    :class:`~cirron_otel.errors.CirronDependencyError` for a file of torch where torch is missing.
    """
    target = _in_folder(path) if path.is_dir() else path
    if target.name.endswith(".index.json"):
        found = _sharded(path, target)
    else:
        kind, tensors, wrapper, notes = _one(target)
        found = Checkpoint(path, kind, [target], wrapper=wrapper, notes=notes)
        _take(found, tensors)
    if not found.tensors and not found.missing:
        raise CheckpointError(f"{target} holds no tensors")
    found.config = _config(target.parent)
    found.tensors = _plainly_named(found.tensors)
    return found


def _in_folder(folder: Path) -> Path:
    for name in _FIRST:
        if (folder / name).is_file():
            return folder / name
    try:
        for pattern in _THEN:
            fitting = sorted(one for one in folder.glob(pattern) if one.is_file())
            if len(fitting) == 1:
                return fitting[0]
            if fitting:
                names = ", ".join(one.name for one in fitting[:6])
                raise CheckpointError(
                    f"{folder} holds {len(fitting)} files that could be meant: name one ({names})"
                )
    except OSError as exc:
        raise CheckpointError(f"cannot read {folder}: {exc.strerror or exc}") from exc
    raise CheckpointError(
        f"{folder} holds no checkpoint: neither safetensors nor a file of torch, nor an index"
    )


def _one(path: Path) -> tuple[str, list[Tensor], str, list[str]]:
    """Format, tensors, wrapper and notes of one file; what it is, its first bytes say."""
    data, _ = open_file(path)
    head = data[:32]
    data.close()
    for mark, what in _OTHERS:
        if head.startswith(mark):
            raise CheckpointError(f"{path} is {what}")
    zipped = head.startswith(b"PK\x03\x04")
    if not zipped and not _is_pickle(head):
        return "safetensors", read_safetensors(path), "", []
    # Only here: a file of torch needs torch.
    from cirron_otel.checkpoints.pickled import read_pickled  # noqa: PLC0415

    tensors, wrapper, notes = read_pickled(path, zipped=zipped)
    return "torch", tensors, wrapper, notes


def _is_pickle(head: bytes) -> bool:
    # A table of safetensors that is 128 bytes and more long may begin with the same byte; the
    # eighth byte of its length is 0, and its ninth opens the table.
    return head[:1] == b"\x80" and head[8:9] != b"{"


def _take(found: Checkpoint, tensors: list[Tensor]) -> None:
    for one in tensors:
        found.tensors.setdefault(one.name, one)


def _sharded(path: Path, index: Path) -> Checkpoint:
    data, size = open_file(index)
    if size > _MAX_INDEX:
        raise CheckpointError(f"{index} is no index of shards: it has {size:,} bytes")
    listed = read_json(data[:], f"{index} is no index of shards").get("weight_map")
    if not isinstance(listed, dict) or not all(isinstance(v, str) for v in listed.values()):
        raise CheckpointError(f"{index} is no index of shards: it has no weight_map of file names")
    found = Checkpoint(path, "safetensors", [])
    unlisted = 0
    for shard in sorted(set(listed.values())):
        where = _shard(index.parent, shard)
        if not where.exists():
            continue
        kind, tensors, _, notes = _one(where)
        found.format = kind
        found.files.append(where)
        found.notes += notes
        mine = [one for one in tensors if listed.get(one.name) == shard]
        unlisted += len(tensors) - len(mine)
        _take(found, mine)
    found.missing = [(name, shard) for name, shard in listed.items() if name not in found.tensors]
    if not found.files:
        raise CheckpointError(f"none of the shards that {index} names is there")
    if unlisted:
        found.notes.append(f"{unlisted:,} tensors in the shards are not those of the index")
    return found


def _shard(folder: Path, name: str) -> Path:
    """Where a shard is. Refuses one that is elsewhere, also by way of a link."""
    parts = PurePosixPath(name)
    if not name or parts.is_absolute() or ".." in parts.parts or "\\" in name or "\0" in name:
        raise CheckpointError(f"the index in {folder} names {name[:80]!r}, which is outside of it")
    where = folder / name
    try:
        real, home = where.resolve(), folder.resolve()
    except (OSError, RuntimeError) as exc:
        raise CheckpointError(f"cannot read {where}: {exc}") from exc
    # The cache of Hugging Face: models--x/snapshots/<revision>/ with links to models--x/blobs/.
    blobs = home.parent.parent / "blobs" if home.parent.name == "snapshots" else None
    if real.is_relative_to(home) or (blobs is not None and real.parent == blobs):
        return where
    raise CheckpointError(f"the index in {folder} names {name[:80]!r}, a link that leads outside")


def _config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        if path.is_file() and path.stat().st_size <= _MAX_CONFIG:
            return read_json(path.read_bytes(), str(path))
    except (OSError, CheckpointError):  # it only helps
        pass
    return {}


def _plainly_named(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors under the names they have without wrappers; as they are where two would clash."""
    named = dict(_unwrapped(tensors))
    return named if len(named) == len(tensors) else tensors


def _unwrapped(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    parallel = all(name.startswith(_PARALLEL) for name in tensors)
    for name, tensor in tensors.items():
        plain = _WRAPPED.sub("", name)
        while parallel and plain.startswith(_PARALLEL):
            plain = plain.removeprefix(_PARALLEL)
        yield plain, tensor._replace(name=plain)
