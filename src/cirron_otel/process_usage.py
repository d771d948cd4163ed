"""CPU time and memory of a scope, where ``profile(resources=[...])`` asks for them.

CPU time is the opening thread's (``time.thread_time_ns``), null if the scope ends on another
thread. The memory peak is the process's resident set: if the kernel's high-water mark rose while
the scope was open, that mark; else the larger of the resident sizes at its two ends.
"""

from __future__ import annotations

import os
import sys
import time
from threading import get_ident
from typing import TYPE_CHECKING

from cirron_otel.scope_base import Extra

if TYPE_CHECKING:
    from collections.abc import Collection

    from cirron_otel.scope_base import BaseScope

_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096


class ProcessUsage:
    """Reads the counters at both ends of a scope; two to four system calls per scope."""

    def __init__(self, *, cpu: bool, memory: bool) -> None:
        self._cpu = cpu
        self._memory = memory

    @classmethod
    def for_settings(cls, wanted: Collection[str]) -> ProcessUsage | None:
        """None when nothing is asked for."""
        if not wanted:
            return None
        return cls(cpu="cpu" in wanted, memory="memory" in wanted)

    def start(self, scope: BaseScope) -> None:
        """Note the counters at a scope's start."""
        extra = scope.extra = scope.extra or Extra()
        if self._memory:
            extra.memory_start = _memory()
        if self._cpu:
            extra.cpu_start = time.thread_time_ns()

    def stop(self, scope: BaseScope) -> None:
        """Fill in what the scope used."""
        extra = scope.extra
        if extra is None:
            return
        if extra.cpu_start is not None and scope.thread_id == get_ident():
            extra.cpu_ns = time.thread_time_ns() - extra.cpu_start
        if extra.memory_start is not None:
            now, peak = _memory()
            before, peak_before = extra.memory_start
            extra.memory_peak_bytes = peak if peak > peak_before else max(now, before)


def peak_bytes(ru_maxrss: int, platform: str) -> int:
    """The kernel's high-water mark in bytes: macOS counts bytes, every other system KiB."""
    return ru_maxrss if platform == "darwin" else ru_maxrss * 1024


def _memory() -> tuple[int, int]:
    """Resident bytes now, and the process's high-water mark."""
    import resource  # noqa: PLC0415 - POSIX only, and only when memory is asked for

    peak = peak_bytes(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, sys.platform)
    try:
        with open("/proc/self/statm", "rb") as file:  # noqa: PTH123 - hot enough to be plain
            return int(file.read().split()[1]) * _PAGE, peak
    except (OSError, IndexError, ValueError):
        return peak, peak
