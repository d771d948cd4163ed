"""The table of a safetensors file, read as what a stranger sent: every number is doubted.

The format's own readers refuse what is refused here (overlaps, gaps, bytes of nobody), so a file
that passes is one that they load.
"""

from __future__ import annotations

import json
import math
import mmap
from typing import Any, NamedTuple, NoReturn

from cirron_otel.weights.dtypes import dtype_name

#: Under this key is no tensor.
METADATA = "__metadata__"
#: The format's own limit.
_MAX_BYTES = 100_000_000
_LENGTH_BYTES = 8
_MOST_DIMENSIONS = 64
#: Bits of an element; of other types the size cannot be checked.
BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "I16": 16, "I8": 8,
    "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8, "C64": 64, "C128": 128,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class Entry(NamedTuple):
    """One tensor in a file."""

    name: str
    #: The format's name of its type.
    code: str
    shape: list[int]
    #: Where its bytes begin and end, in the file.
    start: int
    end: int

    @property
    def dtype(self) -> str:
        """The type as torch spells it."""
        return dtype_name(self.code)


def read_table(data: mmap.mmap, size: int) -> tuple[dict[str, Entry], dict[str, str]]:
    """The tensors of a mapped file of ``size`` bytes, by name, and its metadata.

    Raises ``ValueError`` for every file that is not whole and in order.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    begin = _LENGTH_BYTES + length
    if size < _LENGTH_BYTES or begin > size:
        raise ValueError("it ends within its table, so it is cut off or another kind")
    if length > _MAX_BYTES:
        raise ValueError(f"its table would have {length:,} bytes")
    table = read_json(data[_LENGTH_BYTES:begin])
    metadata = table.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("its metadata is not a table of texts")
    entries = {name: _entry(name, row, begin) for name, row in table.items()}
    _check_order(sorted((one.start, one.end, one.name) for one in entries.values()), begin, size)
    return entries, metadata


def read_json(text: bytes) -> dict[str, Any]:
    """A JSON object in which no key comes twice and no number is NaN; else ``ValueError``."""
    try:
        found = json.loads(
            text.decode("utf-8"), object_pairs_hook=_once, parse_constant=_no_constant
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError("it is no JSON object")  # noqa: TRY004 - of the file, not the caller
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


def _entry(name: str, row: object, begin: int) -> Entry:
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
    bits = BITS.get(code)
    if bits is not None and math.prod(shape) * bits != (last - first) * 8:
        raise ValueError(
            f"{short!r} has {last - first:,} bytes, and {code} of shape {shape} takes others"
        )
    return Entry(name, code, shape, begin + first, begin + last)


def _counts(found: object) -> bool:
    return isinstance(found, list) and all(type(one) is int and 0 <= one < 1 << 63 for one in found)


def _check_order(ranges: list[tuple[int, int, str]], at: int, size: int) -> None:
    """Whether ranges, in order, fill a file from ``at`` on."""
    for first, last, name in ranges:
        if last > size:
            raise ValueError(
                f"{name[:80]!r} ends {last - size:,} bytes behind the end of the file, which is "
                "cut off"
            )
        if first < at:
            raise ValueError(f"{name[:80]!r} lies over another tensor")
        if first > at:
            raise ValueError(f"{first - at:,} bytes before {name[:80]!r} are nobody's")
        at = last
    if at != size:
        raise ValueError(f"its last {size - at:,} bytes are nobody's")
