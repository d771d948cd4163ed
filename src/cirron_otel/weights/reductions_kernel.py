"""Chooses the compiled kernel where it was built (``_weights.c``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from cirron_otel.weights.dtypes import BYTES_CODE, DTYPES, LITTLE_ENDIAN, byte_table
from cirron_otel.weights.numbers import Reduced

if TYPE_CHECKING:
    from types import ModuleType

#: One stretch of memory: its address or a buffer, how many elements of which type.
Stretch = tuple[int | memoryview, int, str]

#: Threads at most: a few read as fast as memory gives.
MAX_THREADS = 16


def _compiled() -> ModuleType | None:
    """The compiled module; None where it was not built or is not wanted."""
    if os.environ.get("CIRRON_OTEL_PURE") == "1" or not LITTLE_ENDIAN:
        return None
    try:
        from cirron_otel import _weights  # noqa: PLC0415 - it may not be there
    except ImportError:  # no compiler when it was installed, or another Python now
        return None
    return _weights


kernel: Any = _compiled()
#: Whether the kernel is there.
COMPILED = kernel is not None


def reduce_memory(stretches: Sequence[Stretch], *, histogram: bool, threads: int) -> list[Reduced]:
    """The numbers of each stretch, in order; only where :data:`COMPILED`.

    Releases the GIL and blocks. The caller keeps what is at an address in place: nothing here looks
    whether it is there. Starts up to ``threads - 1`` threads and has ended them when it returns.
    """
    items = []
    for where, count, name in stretches:
        dtype = DTYPES[name]
        table = byte_table(name) if dtype.code == BYTES_CODE else None
        items.append((where, count, dtype.code, table))
    return [Reduced(*one) for one in kernel.reduce(items, max(1, threads), histogram)]


def usable_threads(wanted: int) -> int:
    """How many threads to use where the program wants no more than ``wanted``."""
    try:
        here = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS
        here = os.cpu_count() or 1
    return max(1, min(wanted, here, MAX_THREADS))
