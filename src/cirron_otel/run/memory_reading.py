"""What torch's allocators and the system say of this process's memory. Starts nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
#: Kinds of accelerators whose module in torch tells of its allocator.
KINDS = ("cuda", "xpu")
_UNITS = ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB"))


class DeviceMemory(NamedTuple):
    """What torch's allocator holds of one device, in bytes."""

    kind: str
    device: int
    allocated: int
    reserved: int
    peak: int


def in_use() -> Iterator[DeviceMemory]:
    """The accelerators on which this process holds memory. Starts none, waits for none."""
    torch = sys.modules.get("torch")
    for kind in KINDS:
        module: Any = getattr(torch, kind, None)
        if module is None or not module.is_initialized():
            continue
        for device in range(module.device_count()):
            found = device_memory(module, kind, device)
            if found is not None:
                yield found


def device_memory(module: Any, kind: str, device: int) -> DeviceMemory | None:  # noqa: ANN401
    """What the allocator holds of one device; None where that is nothing."""
    # One call into torch; its functions for single numbers make a sorted table of a hundred each.
    stats = module.memory.memory_stats_as_nested_dict(device)
    if not stats:
        return None
    allocated, reserved = stats["allocated_bytes"]["all"], stats["reserved_bytes"]["all"]
    if not reserved["current"]:
        return None
    return DeviceMemory(kind, device, allocated["current"], reserved["current"], allocated["peak"])


def resident_bytes() -> int | None:
    """The resident set of this process; None where the system does not tell."""
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - hot enough to be plain
            return int(file.read().split()[1]) * _PAGE
    except (OSError, IndexError, ValueError):
        return None


def text_of(size: int) -> str:
    """A number of bytes for people."""
    for unit, name in _UNITS:
        if size >= unit:
            return f"{size / unit:.1f} {name}"
    return f"{size} B"
