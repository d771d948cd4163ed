"""The one place that decides what a value may be.

Marks carry one scalar (:func:`mark_value`); attributes carry JSON-like data
(:func:`attribute_value`). Both take the scalars of numpy, torch, jax and TensorFlow without
importing any of them: a value of such a library can only exist once its module is loaded.

Nothing here synchronises an accelerator. A mark whose value still lies on a device comes back as
:class:`Deferred`; an attribute is described by its shape, type and device instead.
"""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

#: A mark's string value, in UTF-8 bytes.
MAX_MARK_BYTES = 256
#: A string attribute's value, in UTF-8 bytes.
MAX_ATTRIBUTE_BYTES = 64 * 1024
_MAX_DEPTH = 32
_MAX_ARRAY = 64
_INT_MIN, _INT_MAX = -(2**63), 2**63 - 1

PLAIN_TYPES = frozenset({str, int, bool, float, type(None)})


class MarkValue(NamedTuple):
    """A value as ``marks[]`` writes it. ``nonfinite`` is ``nan``, ``inf`` or ``-inf``, or None."""

    value_type: str
    value: float | int | str | bool | None
    nonfinite: str | None = None


class Deferred(NamedTuple):
    """A value that is not on the host yet.

    ``resolve`` runs on the flush thread and may wait for the one device event it is about;
    ``ready`` says without blocking whether it would have to wait.
    """

    resolve: Callable[[], object]
    ready: Callable[[], bool]


class UnsupportedValueError(TypeError):
    """The value is no scalar; the message says what to use instead."""


def clean_text(text: str) -> str:
    """``text`` as every store can keep it: lone surrogates and NUL become U+FFFD."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    try:
        text.encode()
    except UnicodeEncodeError:
        # Pairs of surrogates are real characters; what stays alone is not.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return str(text)


def cut_text(text: str, limit: int) -> str:
    """The longest beginning of ``text`` (already clean) that has at most ``limit`` UTF-8 bytes."""
    if len(text) * 4 <= limit:
        return text
    raw = text.encode()
    return text if len(raw) <= limit else raw[:limit].decode(errors="ignore")


def nonfinite_name(value: float) -> str | None:
    """``nan``, ``inf`` or ``-inf``; None for a finite number."""
    if math.isfinite(value):
        return None
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def mark_value(value: object) -> MarkValue | Deferred:
    """What a mark's value is.

    Takes bool, int, float, str, Decimal, Fraction and the 0-d and one-element scalars of numpy,
    torch, jax and TensorFlow, of any dtype on any device. Integers beyond 64 bits become float. A
    value of ours that comes later (:class:`Deferred`) is taken as it is.

    Raises :class:`UnsupportedValueError` for everything else. Never waits for a device.
    """
    if isinstance(value, bool):
        return MarkValue("bool", bool(value))
    if isinstance(value, int):
        return _integer(int(value))
    if isinstance(value, float):
        return _float(float(value))
    if isinstance(value, str):
        return MarkValue("string", cut_text(clean_text(str(value)), MAX_MARK_BYTES))
    if isinstance(value, Deferred):
        return value
    try:
        made = _foreign(value)
    except UnsupportedValueError:
        raise
    except Exception as error:
        raise UnsupportedValueError(
            f"a mark takes one number, string or bool; reading this {type(value).__name__} "
            f"raised {type(error).__name__}"
        ) from error
    if made is None:
        raise UnsupportedValueError(_advice(value))
    return made


def _foreign(value: object) -> MarkValue | Deferred | None:
    """A scalar of a library, or whatever else turns into a float; None for anything more."""
    scalar = _library_scalar(value)
    if isinstance(scalar, Deferred):
        return scalar
    if scalar is not None and type(scalar) in PLAIN_TYPES:
        return mark_value(scalar)
    if not _is_longdouble(scalar):
        scalar = value
        if not hasattr(type(value), "__float__") or hasattr(value, "shape"):
            return None
    try:
        return _float(float(scalar))  # type: ignore[arg-type]
    except OverflowError:
        return _float(math.inf if scalar > 0 else -math.inf)  # type: ignore[operator]
    except (TypeError, ValueError):
        return None


def _is_longdouble(value: object) -> bool:
    kind = _loaded("numpy", "longdouble")
    return kind is not None and isinstance(value, kind)


def _integer(value: int) -> MarkValue:
    if _INT_MIN <= value <= _INT_MAX:
        return MarkValue("int", value)
    try:
        return _float(float(value))
    except OverflowError:
        return _float(math.inf if value > 0 else -math.inf)


def _float(value: float) -> MarkValue:
    name = nonfinite_name(value)
    return MarkValue("float", None if name else value, name)


def _advice(value: object) -> str:
    what = type(value).__name__
    try:
        shape = tuple(value.shape)  # type: ignore[attr-defined]
        one, kind = math.prod(shape) == 1, str(value.dtype)  # type: ignore[attr-defined]
    except Exception:  # noqa: BLE001, S110 - no array, or a foreign object that raises anything
        pass
    else:
        if one:
            return f"a mark takes one real number that can be read, not {what} of {kind}"
        return f"a mark takes one number, not {what}{shape}: mark its .mean(), or take a snapshot"
    if value is None:
        return "a mark takes one number, string or bool, not None: leave the mark out instead"
    if isinstance(value, Mapping):
        return f"a mark takes one number, string or bool, not {what}: one mark per entry"
    return f"a mark takes one number, string or bool, not {what}: convert it with float() or str()"


def _loaded(module: str, name: str) -> Any:  # noqa: ANN401 - a class of a foreign library
    return getattr(sys.modules.get(module), name, None)


def _library_scalar(value: object) -> object | Deferred | None:
    """The Python scalar in a one-element array or tensor; None if it is not one."""
    tensor_type = _loaded("torch", "Tensor")
    if tensor_type is not None and isinstance(value, tensor_type):
        return _torch_scalar(value)
    generic, array = _loaded("numpy", "generic"), _loaded("numpy", "ndarray")
    if generic is not None and isinstance(value, (generic, array)):
        return value.item() if value.size == 1 else None
    for module, name in (("jax", "Array"), ("tensorflow", "Tensor")):
        kind = _loaded(module, name)
        if kind is not None and isinstance(value, kind):
            if math.prod(tuple(value.shape)) != 1:
                return None
            read = value.item if module == "jax" else lambda: value.numpy().item()
            return Deferred(read, lambda: True)
    return None


def _torch_scalar(tensor: Any) -> object | Deferred | None:  # noqa: ANN401
    if tensor.numel() != 1 or tensor.is_complex() or tensor.device.type == "meta":
        return None
    if tensor.device.type == "cpu":
        return tensor.detach().item()  # type: ignore[no-any-return]
    return defer_torch(tensor)


class CaptureGate:
    """Keeps the flush thread from asking for an event while a CUDA graph is captured.

    A capture forbids that in every thread of the process: the question would break it. ``lock`` is
    held for the length of one question; ``captures`` counts the captures under way.
    """

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.captures = 0

    def asks(self, question: Callable[[], bool]) -> bool:
        """The answer; False, without asking, while a graph is captured."""
        with self.lock:
            return not self.captures and question()


#: The process's gate; the torch hook tells it of captures.
capture_gate = CaptureGate()


def defer_torch(tensor: Any) -> Deferred:  # noqa: ANN401
    """Start copying a one-element device tensor to the host, in stream order.

    The copy is queued on the current stream, so a later in-place write does not change what is
    read; nobody waits here. Raises ``UnsupportedValueError`` while a CUDA graph is captured: the
    copy would become part of the graph.
    """
    torch = sys.modules["torch"]
    if tensor.device.type != "cuda":
        held = tensor.detach().clone()
        return Deferred(held.item, lambda: True)
    if capture_gate.captures or torch.cuda.is_current_stream_capturing():
        raise UnsupportedValueError("graph_capture")
    host = torch.empty((), dtype=tensor.dtype, pin_memory=True)
    host.copy_(tensor.detach().reshape(()), non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(tensor.device))

    def resolve() -> object:
        event.synchronize()
        return host.item()

    return Deferred(resolve, lambda: capture_gate.asks(event.query))


#: Text of this length is looked at in no other way, where it is ASCII.
_PLAIN = 4096


def attributes(attrs: Mapping[Any, object]) -> tuple[dict[str, Any], list[str]]:
    """Attributes as the spool writes them, and the names of those that had to be cut.

    Never raises: what cannot be written becomes its text, at worst ``"<unserializable>"``.
    """
    clean: dict[str, Any] = {}
    cut: list[str] = []
    for key, value in list(attrs.items()):
        plain = type(key) is str and key.isascii() and "\0" not in key
        name = key if plain else clean_text(_text(key))
        if type(value) in (int, bool, type(None)) and (
            type(value) is not int or _INT_MIN <= value <= _INT_MAX
        ):
            clean[name] = value
            continue
        if type(value) is str and len(value) <= _PLAIN and value.isascii() and "\0" not in value:
            clean[name] = value
            continue
        done = attribute_value(value)
        if isinstance(done, str) and len(done) * 4 > MAX_ATTRIBUTE_BYTES:
            short = cut_text(done, MAX_ATTRIBUTE_BYTES)
            if short is not done:
                cut.append(name)
                done = short
        clean[name] = done
    return clean, cut


def attribute_value(value: object) -> Any:  # noqa: ANN401 - JSON-like
    """One attribute's value as JSON-like data: non-finite floats become their names."""
    try:
        return _json_like(value, 0, ())
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return "<unserializable>"


def _json_like(value: object, depth: int, above: tuple[int, ...]) -> Any:  # noqa: ANN401, PLR0911
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return clean_text(str(value))
    if isinstance(value, int):
        return int(value) if _INT_MIN <= value <= _INT_MAX else str(int(value))
    if isinstance(value, float):
        return nonfinite_name(value) or float(value)
    if isinstance(value, (bytes, bytearray)):
        return clean_text(bytes(value).decode(errors="replace"))
    if isinstance(value, (Mapping, list, tuple, set, frozenset)):
        if depth >= _MAX_DEPTH or id(value) in above:
            return clean_text(_text(value) if depth >= _MAX_DEPTH else "<cycle>")
        inside = (*above, id(value))
        if isinstance(value, Mapping):
            return {
                clean_text(_text(key)): _json_like(item, depth + 1, inside)
                for key, item in list(value.items())
            }
        return [_json_like(item, depth + 1, inside) for item in list(value)]
    return _library_value(value, depth, above)


def _library_value(value: object, depth: int, above: tuple[int, ...]) -> Any:  # noqa: ANN401
    if hasattr(value, "dtype") and hasattr(value, "shape"):
        array = _loaded("numpy", "ndarray")
        generic = _loaded("numpy", "generic")
        if generic is not None and isinstance(value, generic):
            return _json_like(value.item(), depth, above)
        if array is not None and isinstance(value, array) and value.size <= _MAX_ARRAY:
            return _json_like(value.tolist(), depth, above)
        device = getattr(value, "device", None)
        if getattr(device, "type", None) == "cpu" and value.numel() <= _MAX_ARRAY:  # type: ignore[attr-defined]
            return _json_like(value.detach().tolist(), depth, above)  # type: ignore[attr-defined]
        where = "" if device is None else f", device={device}"
        return f"{type(value).__name__}(shape={tuple(value.shape)}, dtype={value.dtype}{where})"
    return clean_text(str(value))


def _text(value: object) -> str:
    try:
        return str(value)
    except Exception:  # noqa: BLE001 - a user's __str__ may raise anything
        return "<unserializable>"
