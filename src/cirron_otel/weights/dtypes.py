"""The element types of tensors: their names, sizes, and how the small ones are read."""

from __future__ import annotations

import math
import struct
import sys
from functools import cache
from typing import NamedTuple


class DType(NamedTuple):
    """One element type.

    ``code`` is that of the compiled kernel; ``letter`` the one of :mod:`array` and :mod:`struct`,
    or ``""`` where they have none. Types of one byte are read through :func:`byte_values`.
    """

    name: str
    size: int
    code: int
    letter: str = ""


BYTES_CODE = 10
#: Elements that are read at a time where Python does it: in double precision, half a megabyte.
PIECE = 1 << 16
_ALL = (
    DType("float32", 4, 0, "f"),
    DType("float64", 8, 1, "d"),
    DType("bfloat16", 2, 2),
    DType("float16", 2, 3, "e"),
    DType("int16", 2, 4, "h"),
    DType("uint16", 2, 5, "H"),
    DType("int32", 4, 6, "i"),
    DType("uint32", 4, 7, "I"),
    DType("int64", 8, 8, "q"),
    DType("uint64", 8, 9, "Q"),
    *(
        DType(name, 1, BYTES_CODE)
        for name in (
            "bool", "int8", "uint8", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2",
            "float8_e5m2fnuz", "float8_e8m0fnu",
        )
    ),
)  # fmt: skip
#: By name, as torch spells them.
DTYPES = {one.name: one for one in _ALL}

#: Complex numbers are pairs of these.
PARTS = {"complex32": "float16", "complex64": "float32", "complex128": "float64"}

#: The names of safetensors, in lower case, for the same.
_ALIASES = {
    "f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16",
    "i64": "int64", "i32": "int32", "i16": "int16", "i8": "int8",
    "u64": "uint64", "u32": "uint32", "u16": "uint16", "u8": "uint8",
    "f8_e4m3": "float8_e4m3fn", "f8_e5m2": "float8_e5m2", "f8_e8m0": "float8_e8m0fnu",
    "f8_e4m3fnuz": "float8_e4m3fnuz", "f8_e5m2fnuz": "float8_e5m2fnuz",
    "c64": "complex64", "c128": "complex128",
}  # fmt: skip


def dtype_name(text: str) -> str:
    """A dtype as torch spells it: of ``torch.float32``, ``float32``, ``F32``."""
    text = text.lower().removeprefix("torch.")
    return _ALIASES.get(text, text)


@cache
def byte_values(name: str) -> tuple[float, ...]:
    """What each of the 256 bytes means as an element of the type."""
    if name == "bool":
        return (0.0, *[1.0] * 255)
    if name == "uint8":
        return tuple(map(float, range(256)))
    if name == "int8":
        return tuple(float(byte - 256 if byte > 127 else byte) for byte in range(256))  # noqa: PLR2004
    if name == "float8_e8m0fnu":
        return (*(math.ldexp(1.0, byte - 127) for byte in range(255)), math.nan)
    exponent_bits = 4 if "e4m3" in name else 5
    return tuple(_float8(byte, exponent_bits, name) for byte in range(256))


def _float8(byte: int, exponent_bits: int, name: str) -> float:
    """OCP's 8-bit floating point (``fn`` and e5m2) and the variant with one NaN and one zero."""
    unsigned_zero = name.endswith("fnuz")
    mantissa_bits = 7 - exponent_bits
    bias = (1 << exponent_bits - 1) - (0 if unsigned_zero else 1)
    sign = -1.0 if byte & 0x80 else 1.0
    exponent = (byte & 0x7F) >> mantissa_bits
    mantissa = byte & ((1 << mantissa_bits) - 1)
    if unsigned_zero:
        if byte == 0x80:  # noqa: PLR2004 - what would be -0
            return math.nan
    elif name == "float8_e5m2":
        if exponent == 0x1F:  # noqa: PLR2004 - all ones, as in IEEE 754
            return math.nan if mantissa else sign * math.inf
    elif byte & 0x7F == 0x7F:  # noqa: PLR2004 - e4m3fn has no infinity
        return math.nan
    if exponent:
        mantissa |= 1 << mantissa_bits
    return sign * math.ldexp(mantissa, max(exponent, 1) - bias - mantissa_bits)


@cache
def byte_table(name: str) -> bytes:
    """:func:`byte_values` as doubles, for the compiled kernel."""
    return struct.pack("256d", *byte_values(name))


#: Buffers are little-endian, as safetensors are; what reads memory as it is needs this to be so.
LITTLE_ENDIAN = sys.byteorder == "little"
