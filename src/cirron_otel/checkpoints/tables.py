"""The tensors of a checkpoint, and the files of safetensors they lie in."""

from __future__ import annotations

import math
import mmap
import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from cirron_otel.errors import CirronError
from cirron_otel.weights import tensor_table


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
        return tensor_table.read_json(text)
    except ValueError as exc:
        raise CheckpointError(f"{what}: {exc}") from exc


def read_safetensors(path: Path) -> list[Tensor]:
    """The tensors of a file, mapped. Values are read when they are asked for.

    Raises :class:`CheckpointError` for every file that is not whole and in order.
    """
    data, size = open_file(path)
    try:
        entries, _ = tensor_table.read_table(data, size)
    except ValueError as exc:
        what = f"{path} is no safetensors file that can be trusted"
        raise CheckpointError(f"{what}: {exc}") from exc
    view = memoryview(data)
    return [
        Tensor(one.name, one.dtype, tuple(one.shape), partial(_bytes_of, view, one))
        for one in entries.values()
    ]


def _bytes_of(view: memoryview, entry: tensor_table.Entry) -> tuple[memoryview, object]:
    return view[entry.start : entry.end], view
