"""``ci.scope`` and friends in code that ``torch.compile`` compiles: they vanish from the graph.

A compiled region has no time of its own in Python, so nothing inside it is recorded; the call of
the region as a whole is. Without this, opening a scope there would break the graph, and
``fullgraph=True`` would fail.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from cirron_otel import recorder, scopes
from cirron_otel._guard import Guard
from cirron_otel.core import if_not_stepping, in_compiled_code, inside_forward
from cirron_otel.imports import when_imported
from cirron_otel.weights import calls

_T = TypeVar("_T")

#: Whether this version of torch lets the compiler be told of stand-ins.
TAKES_STAND_INS = hasattr(torch.compiler, "substitute_in_graph")


class _Process:
    """What is done once in a process."""

    told = False


def vanish_when_compiled(guard: Guard) -> None:
    """Tell the compiler, as soon as it is loaded (which takes seconds: never because of us)."""
    if "torch._dynamo" in sys.modules:
        _tell(guard)
    else:
        when_imported("torch._dynamo", _loaded)


def _loaded(_module: object) -> None:
    rec = recorder._current  # noqa: SLF001 - the engine's
    if rec is not None:  # else the next recording finds the compiler loaded
        _tell(rec.guard)


def _tell(guard: Guard) -> None:
    """Register the stand-ins; once per process, for they cannot be taken back."""
    if not TAKES_STAND_INS or _Process.told:
        return
    _Process.told = True
    substitute = torch.compiler.substitute_in_graph
    try:
        for original, stand_in in (
            (scopes.scope, _scope),
            (scopes.mark, _mark),
            (scopes.epochs, _epochs),
            (scopes.batches, _batches),
            (calls.snapshot, _mark),
            (inside_forward, _yes),
            (in_compiled_code, _yes),
            (if_not_stepping, _mark),
        ):
            substitute(original, skip_signature_check=True)(stand_in)
    except Exception as error:  # noqa: BLE001 - see _guard
        guard.swallow("torch.compile", error)


def _scope(name: Any = "", /, index: Any = None, **attrs: Any) -> scopes.IdleScope:  # noqa: ANN401, ARG001
    return scopes.IdleScope("", None, {})


def _mark(*args: Any, **attrs: Any) -> None:
    pass


def _epochs(iterable: Iterable[_T]) -> Iterable[_T]:
    return iterable


def _batches(iterable: Iterable[_T], **options: Any) -> Iterable[_T]:  # noqa: ARG001
    return iterable


def _yes() -> bool:
    return True  # nothing in compiled code is recorded as a call of its own
