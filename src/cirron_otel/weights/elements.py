"""The values in the bytes of a tensor, as Python numbers or as a numpy array."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from cirron_otel.errors import CirronDependencyError, CirronError
from cirron_otel.weights.dtypes import DTYPES, byte_values

_COMPLEX = {"complex64": "f", "complex128": "d"}


def values(data: bytes, dtype: str, start: int = 0, stop: int | None = None) -> list[float]:
    """Elements ``start`` to ``stop`` of little-endian bytes; of complex ones the real parts.

    Raises :class:`~cirron_otel.errors.CirronError` for a type whose values are not known.
    """
    return [one.real for one in _values(data, dtype, start, stop)]


def numbers(data: bytes, dtype: str, start: int = 0, stop: int | None = None) -> list[complex]:
    """The same with complex elements as they are."""
    return list(_values(data, dtype, start, stop))


def count(data: bytes, dtype: str) -> int:
    """How many elements there are."""
    return len(data) // _size(dtype)


def _size(dtype: str) -> int:
    if dtype in _COMPLEX:
        return struct.calcsize(_COMPLEX[dtype]) * 2
    known = DTYPES.get(dtype)
    if known is None:
        raise CirronError(f"values of type {dtype} cannot be shown")
    return known.size


def _values(data: bytes, dtype: str, start: int, stop: int | None) -> Iterator[complex]:
    size = _size(dtype)
    piece = data[start * size : None if stop is None else stop * size]
    if dtype in _COMPLEX:
        for parts in struct.iter_unpack(f"<2{_COMPLEX[dtype]}", piece):
            yield complex(*parts)
        return
    kind = DTYPES[dtype]
    if kind.letter:
        for (one,) in struct.iter_unpack(f"<{kind.letter}", piece):
            yield one
    elif dtype == "bfloat16":
        # The upper half of a float32.
        for (bits,) in struct.iter_unpack("<H", piece):
            yield struct.unpack("<f", struct.pack("<I", bits << 16))[0]
    else:
        meaning = byte_values(dtype)
        whole = dtype in {"int8", "uint8", "bool"}
        for byte in piece:
            yield int(meaning[byte]) if whole else meaning[byte]


def as_array(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:  # noqa: ANN401 - numpy's, which may not be there
    """A numpy array of the bytes; types that numpy has no word for become float32, exactly.

    Raises :class:`~cirron_otel.errors.CirronDependencyError` where numpy is not installed.
    """
    np = numpy()
    if dtype == "bfloat16":
        bits = np.frombuffer(data, "<u2").astype(np.uint32) << 16
        return bits.view(np.float32).reshape(shape)
    if dtype.startswith("float8"):
        table = np.array(byte_values(dtype), np.float32)
        return table[np.frombuffer(data, np.uint8)].reshape(shape)
    _size(dtype)
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).reshape(shape)


def numpy() -> Any:  # noqa: ANN401 - a module
    """The module numpy; :class:`~cirron_otel.errors.CirronDependencyError` without it."""
    try:
        import numpy as np  # noqa: PLC0415 - only who works with arrays needs it
    except ImportError as exc:
        raise CirronDependencyError(
            "this needs numpy, which is not installed: pip install 'cirron-otel[snapshots]'"
        ) from exc
    return np
