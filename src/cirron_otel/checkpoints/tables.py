"""Safetensors files as one reads what a stranger sent: every number of the table is doubted.

The format's own readers refuse what is refused here (overlaps, gaps, bytes of nobody), so a file
that passes is one that they load. ``weights/containers.py`` reads the files that we wrote.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from cirron_otel.errors import CirronError
from cirron_otel.weights.dtypes import dtype_name

#: The format's own limit.
MAX_HEADER = 100_000_000
_METADATA = "__metadata__"
_MOST_DIMENSIONS = 64
#: Bits of an element; of other types the size cannot be checked, and they are not looked into.
_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "C128": 128,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class CheckpointError(CirronError, ValueError):
    """A file is no checkpoint that can be read; the message says which, why and what to do."""


class Tensor(NamedTuple):
    """One tensor of a checkpoint. ``load`` gives its bytes and what must live while they do."""

    name: str
    #: As torch spells it.
    dtype: str
    shape: tuple[int, ...]
    load: Callable[[], tuple[memoryview, object]]

    @property
    def numel(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        """Whether its values are floating-point or complex numbers."""
        return self.dtype.startswith(("float", "bfloat", "complex"))


def open_file(path: Path) -> tuple[mmap.mmap, int]:
    """Map an ordinary file for reading; its size. Raises :class:`CheckpointError`."""
    try:
        # Not waiting: a pipe may have nobody at its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise CheckpointError(f"{path} is no file")
            if not found.st_size:
                raise CheckpointError(f"{path} is empty")
            return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ), found.st_size
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as exc:
        if isinstance(exc, CheckpointError):
            raise
        raise CheckpointError(f"cannot read {path}: {getattr(exc, 'strerror', '') or exc}") from exc


def read_json(text: bytes, what: str) -> dict[str, Any]:
    """A JSON object in which no key comes twice and no number is NaN.

    Raises :class:`CheckpointError`, whose message begins with ``what``.
    """
    try:
        found = json.loads(
            text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as exc:
        why = "it is nested too deeply" if isinstance(exc, RecursionError) else exc
        raise CheckpointError(f"{what}: {why}") from exc
    if not isinstance(found, dict):
        raise CheckpointError(f"{what}: it is no JSON object")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON number")


def read_safetensors(path: Path) -> tuple[list[Tensor], dict[str, str]]:
    """The tensors of a file, mapped, and its metadata. Values are read when they are asked for.

    Raises :class:`CheckpointError` for every file that is not whole and in order.
    """
    data, size = open_file(path)
    what = f"{path} is no safetensors file that can be trusted"
    length = int.from_bytes(data[:8], "little")
    begin = 8 + length
    if size < 8 or begin > size:  # noqa: PLR2004 - bytes of the length
        raise CheckpointError(f"{what}: it ends within its table, so it is cut off or another kind")
    if length > MAX_HEADER:
        raise CheckpointError(f"{what}: its table would have {length:,} bytes")
    table = read_json(data[8:begin], what)
    metadata = table.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise CheckpointError(f"{what}: its metadata is not a table of texts")
    view = memoryview(data)[begin:]
    try:
        rows = [(*_row(name, row), name) for name, row in table.items()]
    except (KeyError, TypeError, ValueError) as exc:
        raise CheckpointError(f"{what}: {exc}") from exc
    _check_order([(first, last, name) for first, last, *_, name in rows], size - begin, what)
    return [
        Tensor(name, dtype, shape, _loader(view, first, last))
        for first, last, dtype, shape, name in rows
    ], metadata


def _loader(view: memoryview, first: int, last: int) -> Callable[[], tuple[memoryview, object]]:
    return lambda: (view[first:last], view)


def _row(name: str, row: object) -> tuple[int, int, str, tuple[int, ...]]:
    short = name[:80]
    if not isinstance(row, dict) or not {"dtype", "shape", "data_offsets"} <= row.keys():
        raise ValueError(f"the entry of {short!r} has not dtype, shape and data_offsets")
    code, shape, offsets = row["dtype"], row["shape"], row["data_offsets"]
    if not isinstance(code, str):
        raise ValueError(f"the dtype of {short!r} is no text")  # noqa: TRY004 - of the file, not the caller
    if not _counts(shape) or len(shape) > _MOST_DIMENSIONS:
        raise ValueError(f"the shape of {short!r} is no list of a few sizes")
    if not _counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:  # noqa: PLR2004 - both ends
        raise ValueError(f"the data_offsets of {short!r} are no range of bytes")
    first, last = offsets
    bits = _BITS.get(code)
    if bits is not None and math.prod(shape) * bits != (last - first) * 8:
        raise ValueError(
            f"{short!r} has {last - first:,} bytes, and {code} of shape {list(shape)} takes others"
        )
    return first, last, dtype_name(code), tuple(shape)


def _counts(found: object) -> bool:
    return isinstance(found, list) and all(type(one) is int and 0 <= one < 1 << 63 for one in found)


def _check_order(ranges: list[tuple[int, int, str]], size: int, what: str) -> None:
    at = 0
    for first, last, name in sorted(ranges):
        if last > size:
            raise CheckpointError(
                f"{what}: {name[:80]!r} ends {last - size:,} bytes behind the end of the file, "
                "which is cut off"
            )
        if first < at:
            raise CheckpointError(f"{what}: {name[:80]!r} lies over another tensor")
        if first > at:
            raise CheckpointError(f"{what}: {first - at:,} bytes before {name[:80]!r} are nobody's")
        at = last
    if at != size:
        raise CheckpointError(f"{what}: its last {size - at:,} bytes are nobody's")
