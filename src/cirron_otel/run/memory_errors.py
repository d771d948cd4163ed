"""Memory that ran out: where in the training, and what holds the rest, as a finding.

Looked at while the exception passes the innermost scope, when what the program holds is still held.
The exception is not touched and not kept.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel import semconv
from cirron_otel.findings import Finding, report
from cirron_otel.run.memory_reading import in_use, resident_bytes, text_of
from cirron_otel.watching import watched

if TYPE_CHECKING:
    from cirron_otel.recorder import Recorder
    from cirron_otel.scope_base import BaseScope

KIND = "out_of_memory"
#: Blocks that a finding names.
MOST_BLOCKS = 10
#: What torch says on the CPU, where it has no class for it.
_CPU_WORDS = (
    "DefaultCPUAllocator: can't allocate memory",
    "DefaultCPUAllocator: not enough memory",
)


class Block(NamedTuple):
    """A piece of memory that is in use: bytes, and whose it is as far as that is known."""

    size: int
    owner: str

    def __str__(self) -> str:
        """As a finding lists it."""
        return f"{text_of(self.size)} {self.owner}".strip()


class MemoryErrors:
    """Called with each exception that passes the end of a scope, on the scope's thread."""

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec
        #: The last one: its id, and how deep the scope was that it was first seen in.
        self._last = (0, 0)

    def __call__(self, scope: BaseScope, exc: BaseException) -> None:
        """Report memory that ran out, once for each time it did."""
        if not is_memory_error(exc):
            return
        identity, depth = self._last
        self._last = (id(exc), scope.depth)
        if identity == id(exc) and scope.depth < depth:
            return  # the same one on its way out
        report(self._rec, _finding(self._rec, scope, exc))


def is_memory_error(exc: BaseException) -> bool:
    """Whether an exception says that memory ran out, on a device or on the host."""
    kind = getattr(sys.modules.get("torch"), "OutOfMemoryError", None) or getattr(
        getattr(sys.modules.get("torch"), "cuda", None), "OutOfMemoryError", None
    )
    if isinstance(exc, MemoryError) or (kind is not None and isinstance(exc, kind)):
        return True
    return isinstance(exc, RuntimeError) and any(word in str(exc) for word in _CPU_WORDS)


def _finding(rec: Recorder, scope: BaseScope, exc: BaseException) -> Finding:
    on_host = isinstance(exc, MemoryError) or "DefaultCPUAllocator" in str(exc)
    attributes: dict[str, Any] = {}
    parts = [f"out of memory in {_where(scope)}"]
    blocks: list[Block] = []
    if not on_host:
        for found in sorted(in_use(), key=lambda one: -one.reserved)[:1]:
            module: Any = getattr(sys.modules["torch"], found.kind)
            total = int(module.get_device_properties(found.device).total_memory)
            attributes[semconv.MEMORY_ALLOCATED] = found.allocated
            attributes[semconv.MEMORY_RESERVED] = found.reserved
            attributes[semconv.MEMORY_PEAK] = found.peak
            attributes[semconv.MEMORY_DEVICE] = f"{found.kind}:{found.device}"
            parts.append(
                f"{text_of(found.allocated)} allocated and {text_of(found.reserved)} reserved of "
                f"{text_of(total)} on {found.kind}:{found.device}"
            )
            blocks = largest(device_blocks(rec, module, found.device))
    if on_host:
        blocks = largest(Block(size, name) for _, size, name in _tensors(rec))
    resident = resident_bytes()
    if resident is not None:
        attributes[semconv.PROCESS_MEMORY] = resident
        if on_host:
            parts.append(f"the process holds {text_of(resident)}")
    if blocks:
        attributes[semconv.MEMORY_BLOCKS] = [str(block) for block in blocks]
        parts.append(f"the largest live blocks: {', '.join(map(str, blocks[:5]))}")
    step = scope.iteration if type(scope.iteration) is int else None
    return Finding(KIND, "critical", "; ".join(parts), step=step, attributes=attributes)


def _where(scope: BaseScope) -> str:
    path = []
    above: BaseScope | None = scope
    while above is not None and above.name != semconv.SESSION:
        path.append(above.name if above.index is None else f"{above.name}[{above.index}]")
        above = above.above
    return " of ".join(path) or "no scope"


def largest(blocks: Iterator[Block]) -> list[Block]:
    """The largest of them, the largest first."""
    return sorted(blocks, key=lambda block: -block.size)[:MOST_BLOCKS]


def device_blocks(rec: Recorder, module: Any, device: int) -> Iterator[Block]:  # noqa: ANN401
    """The blocks of torch's allocator that are in use on a device.

    Whose they are is known of parameters, gradients, buffers and the state of optimizers; where
    the program had torch record its allocations, of all by the line that made them.
    """
    owners = sorted((address, name) for address, _, name in _tensors(rec))
    found = []
    for segment in module.memory_snapshot():
        if segment.get("device") != device:
            continue
        address = int(segment.get("address", 0))
        for block in segment.get("blocks", ()):
            start = int(block.get("address", address))
            address = start + int(block["size"])
            if block.get("state") == "active_allocated":
                found.append((int(block["size"]), start, block.get("frames") or ()))
    found.sort(key=lambda one: -one[0])
    for size, start, frames in found[:MOST_BLOCKS]:
        names = [name for address, name in owners if start <= address < start + size]
        yield Block(size, names[0] if names else _line(frames))


def _line(frames: Any) -> str:  # noqa: ANN401 - torch's
    """The innermost line of the program's own in a stack."""
    for frame in frames:
        name = str(frame.get("filename", ""))
        if name.endswith(".py") and "/torch/" not in name:
            return f"made in {name}:{frame.get('line')}"
    return ""


def _tensors(rec: Recorder) -> Iterator[tuple[int, int, str]]:
    """Address, bytes and name of what is known of the model: weights, gradients, states."""
    models: list[tuple[Any, str]] = [(entry.model, f"{entry.name}.") for entry in watched.entries]
    here = getattr(rec.torch_phases, "here", None)
    learner = here.learner() if here is not None and here.learner is not None else None
    if learner is not None and not any(model is learner for model, _ in models):
        models.append((learner, ""))
    parameters: dict[int, str] = {}
    for model, prefix in models:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            parameters[id(tensor)] = f"{prefix}{name}"
            yield from _one(tensor, f"{prefix}{name}")
            yield from _one(getattr(tensor, "grad", None), f"{prefix}{name}.grad")
    for optimizer in watched.optimizers:
        for parameter, state in list(getattr(optimizer, "state", {}).items()):
            owner = parameters.get(id(parameter), "parameter")
            for key, tensor in list(state.items()):
                yield from _one(tensor, f"{owner} {key}")


def _one(tensor: Any, name: str) -> Iterator[tuple[int, int, str]]:  # noqa: ANN401
    try:
        yield tensor.data_ptr(), tensor.numel() * tensor.element_size(), name
    except Exception:  # noqa: BLE001 - no tensor, or one of a kind that lies nowhere
        return
