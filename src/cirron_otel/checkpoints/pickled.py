"""Files of ``torch.save``: the weights in them, read without running what else they hold.

The only file here that needs torch. Its unpickler for weights is asked, which makes tensors and
containers and calls nothing else; a zip file is looked over first, so that none unfolds in memory.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cirron_otel.checkpoints.tables import CheckpointError, Tensor
from cirron_otel.errors import CirronDependencyError
from cirron_otel.weights.containers import bytes_of

if TYPE_CHECKING:
    import torch

#: The first that runs nothing whatever the file holds (CVE-2025-32434).
_SAFE = (2, 6)
#: Under which keys training programs put the weights, likeliest first.
WRAPPERS = ("state_dict", "model_state_dict", "model", "net", "module", "ema")
_LEVELS = 3
#: A tensor may show its memory several times over; past this it is not worth unfolding.
_MOST_UNFOLDED = 1 << 24
_MOST_KEYS = 8


def read_pickled(path: Path, *, zipped: bool) -> tuple[list[Tensor], str, list[str]]:
    """The tensors of a file, under which keys they were, and what of it was left aside.

    Raises :class:`CheckpointError` for what is not weights only, and
    :class:`~cirron_otel.errors.CirronDependencyError` where torch is missing or too old.
    """
    torch = _torch()
    if zipped:
        _look_over(path)
    try:
        found = torch.load(str(path), map_location="cpu", weights_only=True, mmap=zipped or None)
    except Exception as exc:
        raise CheckpointError(_refusal(path, exc)) from exc
    weights, keys = _unwrap(found)
    if weights is None:
        named = ", ".join(str(key)[:40] for key in list(found)[:_MOST_KEYS]) if isinstance(
            found, Mapping
        ) else type(found).__name__  # fmt: skip
        raise CheckpointError(
            f"{path} holds no tensors by name: neither itself nor under "
            f"{', '.join(WRAPPERS)} ({named or 'it is empty'})"
        )
    tensors: list[Tensor] = []
    notes: list[str] = []
    for name, value in weights.items():
        if isinstance(value, torch.Tensor):
            made = _tensor(str(name), value, torch)
            if isinstance(made, str):
                notes.append(made)
            else:
                tensors.append(made)
    return tensors, ".".join(keys), notes


def _torch() -> Any:  # noqa: ANN401 - the module
    try:
        import torch  # noqa: PLC0415 - only files of torch need it
    except ImportError as exc:
        raise CirronDependencyError(
            "this file was written by torch.save, and reading it needs torch: "
            "pip install 'cirron-otel[torch]', or save it as safetensors"
        ) from exc
    version = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if version < _SAFE:
        raise CirronDependencyError(
            f"torch {torch.__version__} can be made to run code by a file of weights "
            "(CVE-2025-32434): install torch 2.6 or newer, or save the file as safetensors"
        )
    return torch


def _look_over(path: Path) -> None:
    """Refuse a zip file that is larger inside than outside."""
    try:
        with zipfile.ZipFile(path) as box:
            entries = box.infolist()
            size = path.stat().st_size
    except (OSError, ValueError, zipfile.BadZipFile, NotImplementedError) as exc:
        raise CheckpointError(f"{path} is cut off or no file of torch: {exc}") from exc
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise CheckpointError(f"{path} is a compressed zip file; torch.save writes none")
    if sum(entry.file_size for entry in entries) > size:
        raise CheckpointError(f"{path} holds more bytes than it has: its parts lie over each other")
    if len({entry.filename for entry in entries}) != len(entries):
        raise CheckpointError(f"{path} holds two parts of one name")


def _refusal(path: Path, exc: Exception) -> str:
    said = str(exc).strip()
    if "weights_only" in said or "Unsupported" in said or "WeightsUnpickler" in said:
        line = next(
            (x.strip() for x in said.splitlines() if "GLOBAL" in x or "nsupported" in x), ""
        )
        return (
            f"{path} holds more than weights, and loading that could run code, so it is not "
            f"loaded. Save model.state_dict(), or as safetensors. {line[:200]}"
        ).rstrip()
    return f"{path} cannot be loaded: {said.splitlines()[0][:200] if said else type(exc).__name__}"


def _unwrap(found: object) -> tuple[Mapping[Any, Any] | None, list[str]]:
    keys: list[str] = []
    for _ in range(_LEVELS + 1):
        if not isinstance(found, Mapping):
            break
        inner = next((key for key in WRAPPERS if isinstance(found.get(key), Mapping)), None)
        if inner is None:
            has_tensors = any(hasattr(value, "data_ptr") for value in found.values())
            return (found, keys) if has_tensors else (None, keys)
        keys.append(inner)
        found = found[inner]
    return None, keys


def _tensor(name: str, value: torch.Tensor, torch: Any) -> Tensor | str:  # noqa: ANN401 - the module
    """The tensor, or a note of why it is not looked into."""
    short = name[:80]
    if value.layout is not torch.strided or value.is_quantized or value.is_meta or value.is_nested:
        return f"{short}: a {value.layout} {value.dtype} tensor is not looked into"
    size = value.numel() * value.element_size()
    if size > value.untyped_storage().nbytes() and size > _MOST_UNFOLDED:
        return f"{short}: shows a small memory {value.numel():,} times over, and is not looked into"
    dtype = str(value.dtype).removeprefix("torch.")
    return Tensor(name, dtype, tuple(value.shape), partial(bytes_of, value, size))
