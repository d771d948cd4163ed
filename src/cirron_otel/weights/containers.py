"""Safetensors files: writing them tensor by tensor, reading their tables and values.

The format is small and fixed (8 bytes of length, a JSON table, the bytes of the tensors): see
https://huggingface.co/docs/safetensors. It is written here rather than by its library because that
wants the bytes of all tensors in memory at once, a second copy of the model; here each tensor goes
to the disk from where it lies, and one on a device or not contiguous by a copy of itself alone.
The library reads what is written here (it is the tests' judge), and is not needed to.
"""

from __future__ import annotations

import ctypes
import errno
import math
import mmap
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from cirron_otel.errors import SpoolFormatError
from cirron_otel.spool import disk_error
from cirron_otel.weights.tensor_table import BITS, METADATA, Entry, read_table

#: torch's and numpy's names of types, and the format's.
_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
ITEM_BYTES = {code: BITS[code] // 8 for code in _CODES.values()}
_ALIGNMENT = 8
#: One call takes at most 2 GiB on Linux.
_PIECE = 1 << 30
_TMP_SUFFIX = ".tmp"


class UnreadablePartError(Exception):
    """The values of a tensor cannot be had; the cause is what was raised."""

    def __init__(self, part: Part) -> None:
        super().__init__(part.name)
        self.part = part


class Part(NamedTuple):
    """One tensor to be written."""

    name: str
    #: The format's name of its type.
    code: str
    shape: Sequence[int]
    size: int
    #: Gives the bytes and what has to live as long as they are used.
    load: Callable[[], tuple[memoryview, object]]


def code_of(dtype: str) -> str | None:
    """The format's name of a type; None for one it has no word for."""
    return _CODES.get(dtype)


def part_of(name: str, tensor: Any, dtype: str) -> Part | None:  # noqa: ANN401
    """A torch tensor or numpy array as a part; None for one that cannot be in such a file.

    May raise what a tensor of a program's own kind raises.
    """
    code = code_of(dtype)
    if code is None or name == METADATA:
        return None
    shape = [int(size) for size in tensor.shape]
    size = math.prod(shape) * ITEM_BYTES[code]
    if hasattr(tensor, "data_ptr"):
        if str(tensor.layout) != "torch.strided" or tensor.is_quantized or tensor.is_meta:
            return None
        return Part(name, code, shape, size, lambda: bytes_of(tensor, size))
    if not hasattr(tensor, "__array_interface__") or tensor.dtype.byteorder == ">":
        return None
    return Part(name, code, shape, size, lambda: _of_array(tensor))


def bytes_of(tensor: Any, size: int) -> tuple[memoryview, object]:  # noqa: ANN401
    """The ``size`` bytes of a torch tensor's values, and what has to live as long as they do.

    Its own memory where it lies on the host in one piece, else a copy.
    """
    here = _on_host(tensor)
    if size == 0:
        return memoryview(b""), here
    # Not numpy: it may not be there, and has no word for bfloat16 and float8.
    view = memoryview((ctypes.c_ubyte * size).from_address(here.data_ptr()))
    return view.cast("B"), here


def _on_host(tensor: Any) -> Any:  # noqa: ANN401
    """The values in the host's memory in one piece: the tensor's own, or a copy."""
    from cirron_otel.weights.readable import is_plain, undisturbed  # noqa: PLC0415 - needs torch

    with undisturbed() as torch:
        if not is_plain(tensor):  # its class knows its values, its memory may not
            return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
        here = tensor.detach()
        if here.is_conj() or here.is_neg():
            here = here.resolve_conj().resolve_neg()
        return here.cpu().contiguous()


def _of_array(array: Any) -> tuple[memoryview, object]:  # noqa: ANN401
    import numpy as np  # noqa: PLC0415 - the caller has it

    here = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(here.data), here


# -- writing -----------------------------------------------------------------------------------


def write(path: Path, parts: Iterable[Part], metadata: Mapping[str, str]) -> int:
    """Write a file whole or not at all; returns its size in bytes.

    It lies under another name (``.tmp`` behind it) until it is whole, so a reader never sees half
    a file, whatever becomes of the process. Blocks as long as the disk does, the interpreter being
    free meanwhile; does not wait for the platter (no fsync), as the spool does not. Memory: a copy
    of one tensor at a time where it does not lie on the host in one piece.

    Raises ``OSError``, and :class:`UnreadablePartError` where the values of a tensor cannot be had;
    nothing of the file is left then.
    """
    # Larger items first: so each tensor lies aligned for its type.
    ordered = sorted(parts, key=lambda part: -ITEM_BYTES[part.code])
    head = header(ordered, metadata)
    path.parent.mkdir(parents=True, exist_ok=True)
    tmp = path.with_name(path.name + _TMP_SUFFIX)
    fd = os.open(tmp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
    done = False
    try:
        try:
            written = _write_all(fd, memoryview(head))
            for part in ordered:
                try:
                    view, keeper = part.load()
                except Exception as error:
                    raise UnreadablePartError(part) from error
                written += _write_all(fd, view)
                del view, keeper
        finally:
            os.close(fd)
        tmp.replace(path)
        done = True
    finally:
        if not done:
            tmp.unlink(missing_ok=True)
    return written


def header(ordered: Sequence[Part], metadata: Mapping[str, str]) -> bytes:
    """The beginning of a file with these parts in this order."""
    table: dict[str, object] = {METADATA: dict(metadata)} if metadata else {}
    at = 0
    for part in ordered:
        table[part.name] = {
            "dtype": part.code,
            "shape": list(part.shape),
            "data_offsets": [at, at + part.size],
        }
        at += part.size
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _ALIGNMENT)
    return len(text).to_bytes(8, "little") + text


def _write_all(fd: int, view: memoryview) -> int:
    size = len(view)
    while view:
        count = os.write(fd, view[:_PIECE])
        if count == 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        view = view[count:]
    return size


# -- reading -----------------------------------------------------------------------------------


class Container:
    """A safetensors file, mapped: values are read when they are asked for. A context manager."""

    def __init__(self, path: Path) -> None:
        """Read the table.

        Raises :class:`~cirron_otel.errors.SpoolError` when the file cannot be read, and
        :class:`~cirron_otel.errors.SpoolFormatError` when it is no safetensors file.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < _ALIGNMENT:
                    raise SpoolFormatError(f"{path} is no safetensors file: it is too short")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as exc:
            raise disk_error("read", path, exc) from exc
        try:
            self.entries, self.metadata = read_table(self._map, size)
        except ValueError as exc:
            self._map.close()
            raise SpoolFormatError(f"{path} is no safetensors file: {exc}") from exc

    def find(self, name: str) -> Entry | None:
        """The tensor of a row: under its own name, or a gradient under its parameter's."""
        return self.entries.get(name) or self.entries.get(name.removesuffix(".grad"))

    def data(self, entry: Entry) -> bytes:
        """The bytes of a tensor, copied."""
        return self._map[entry.start : entry.end]

    def close(self) -> None:
        """Let go of the file."""
        self._map.close()

    def __enter__(self) -> Container:  # noqa: PYI034 - never subclassed
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
