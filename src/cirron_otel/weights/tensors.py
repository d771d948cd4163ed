"""What a model holds: its parameters, buffers and gradients, each with a name, as they lie there.

Known are torch modules, Keras models of any backend, and mappings from names to tensors or arrays
(a state dict). Nothing is copied or put anywhere; names are those of the framework.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from cirron_otel import semconv
from cirron_otel.values import clean_text
from cirron_otel.watching import WatchedModel
from cirron_otel.weights.kinds import GRADIENT_SUFFIX


class UnknownModelError(TypeError):
    """What was to be looked at is no model; the message says what would be one."""


class Named(NamedTuple):
    """One tensor of a model."""

    #: As in its row and as its key in the file.
    name: str
    tensor: Any
    #: Of the part that lies here, where it is distributed.
    shape: list[int]
    #: Attributes of its row.
    attrs: dict[str, Any]
    #: Another name of this tensor, which comes before it; its values stand there.
    tied_to: str | None = None
    #: Identity of the parameter, for the tensors an optimizer is about to change.
    owner: int = 0


def models_of(entries: Sequence[WatchedModel]) -> list[tuple[str, WatchedModel]]:
    """Each model with what its tensors' names begin with.

    That is ``<name>.`` where several are watched or a name was given, else nothing.
    """
    several = len(entries) > 1
    return [(f"{one.name}." if several or one.named else "", one) for one in entries]


def weights(model: object, prefix: str = "", *, buffers: bool = False) -> list[Named]:
    """The parameters of a model, and its buffers where asked for.

    Raises :class:`UnknownModelError` for what is no model.
    """
    return list(_named(_entries(model, buffers=buffers), prefix))


def gradients(model: object, prefix: str = "") -> list[Named]:
    """The gradients that a model's parameters have now."""
    found: list[Named] = []
    known: set[int] = set()
    for name, tensor, _ in _entries(model, buffers=False):
        value = _value(tensor)
        gradient = _gradient(value)
        if gradient is None or id(value) in known:
            continue
        known.add(id(value))
        full = prefix + name + GRADIENT_SUFFIX
        found.append(Named(full, gradient, _shape(gradient), {}, owner=id(value)))
    return found


def _gradient(value: Any) -> Any:  # noqa: ANN401
    try:
        return value.grad if _is_tensor(value) and value.is_leaf else None
    except Exception:  # noqa: BLE001 - a subclass may do anything; its own row says what
        return None


def distinct(tensors: Iterable[Named], taken: set[str]) -> list[Named]:
    """The same with names that no other has, and that a file can hold; notes them in ``taken``.

    Two may be one after another of their models' names: the second is called ``<name>_2``.
    """
    found = []
    for one in tensors:
        name = clean_text(one.name)
        if name in taken:
            name = _numbered(name, taken)
        taken.add(name)
        found.append(one if name == one.name else one._replace(name=name))
    return found


def _numbered(name: str, taken: set[str]) -> str:
    is_gradient = name.endswith(GRADIENT_SUFFIX)
    stem, suffix = name.removesuffix(GRADIENT_SUFFIX), GRADIENT_SUFFIX * is_gradient
    number = 2
    while (found := f"{stem}_{number}{suffix}") in taken:
        number += 1
    return found


def changed_by(optimizer: Any) -> set[int] | None:  # noqa: ANN401 - of any framework
    """The parameters that an optimizer changes, by identity; None where it does not say."""
    groups = getattr(optimizer, "param_groups", None)
    return None if groups is None else {id(one) for group in groups for one in group["params"]}


def dtype_name(tensor: Any) -> str:  # noqa: ANN401 - of any framework
    """``float32``, ``bfloat16``, ...; ``unknown`` where there is none."""
    try:
        return _text_of(tensor.dtype)
    except Exception:  # noqa: BLE001 - as above
        return "unknown"


@functools.lru_cache(maxsize=256)
def _text_of(dtype: Any) -> str:  # noqa: ANN401 - of any framework
    return str(dtype).rpartition(".")[2] or "unknown"


def _entries(model: object, *, buffers: bool) -> Iterable[tuple[str, Any, bool]]:
    """Name, tensor, and whether it is a buffer; a shared one once under each name."""
    if isinstance(model, Mapping):
        return [(str(name), value, False) for name, value in model.items() if _has_values(value)]
    if hasattr(type(model), "trainable_weights"):  # Keras, also on torch, where it is a Module too
        return _keras(model, buffers=buffers)
    if hasattr(model, "named_parameters"):
        return _torch(model, buffers=buffers)
    raise UnknownModelError(
        f"snapshots know no model of type {type(model).__name__}: give a torch module, a Keras "
        "model, or a mapping from names to tensors"
    )


def _torch(model: Any, *, buffers: bool) -> Iterator[tuple[str, Any, bool]]:  # noqa: ANN401
    for name, tensor in _duplicates_too(model.named_parameters):
        yield name, tensor, False
    if buffers:
        for name, tensor in _duplicates_too(model.named_buffers):
            yield name, tensor, True


def _duplicates_too(method: Callable[..., Iterable[tuple[str, Any]]]) -> Iterable[tuple[str, Any]]:
    """Names and tensors, a tied one under each; a model's own method may not know that."""
    try:
        return method(remove_duplicate=False)
    except TypeError:
        return method()


def _keras(model: Any, *, buffers: bool) -> Iterator[tuple[str, Any, bool]]:  # noqa: ANN401
    trained = {id(one) for one in model.trainable_weights}
    for i, one in enumerate(model.weights):
        frozen = id(one) not in trained
        # Running means and the like are no parameters; a frozen layer's kernel is one.
        is_buffer = frozen and not getattr(one, "trainable", True)
        if buffers or not is_buffer:
            name = getattr(one, "path", None) or getattr(one, "name", None) or f"weight_{i}"
            yield str(name), one, is_buffer


def _named(entries: Iterable[tuple[str, Any, bool]], prefix: str) -> Iterator[Named]:
    known: dict[int, str] = {}
    for name, holder, is_buffer in entries:
        value = _value(holder)
        first = known.setdefault(id(value), prefix + name)
        attrs: dict[str, Any] = {semconv.BUFFER: True} if is_buffer else {}
        tied_to = None if first == prefix + name else first
        if tied_to is not None:
            attrs[semconv.TIED_TO] = tied_to
        yield Named(prefix + name, value, _shape(value), attrs, tied_to, id(value))


def _value(holder: Any) -> Any:  # noqa: ANN401
    """The tensor or array in a framework's variable."""
    if _is_tensor(holder):
        return holder
    try:
        value = getattr(holder, "value", holder)
        value = value() if callable(value) else value  # TensorFlow's
    except Exception:  # noqa: BLE001 - its row says that it is no tensor
        return holder
    return value if _is_tensor(value) else _array(value)


def _array(value: Any) -> Any:  # noqa: ANN401
    """A numpy array of a foreign array's values, where it has any."""
    numpy = sys.modules.get("numpy")
    if numpy is None or isinstance(value, numpy.ndarray):
        return value
    read = getattr(value, "numpy", None)
    try:
        return numpy.asarray(read() if callable(read) else value)
    except Exception:  # noqa: BLE001 - then it has no statistics, and its row says so
        return value


def local(tensor: Any) -> Any:  # noqa: ANN401
    """The part of a distributed tensor that lies in this process; any other tensor itself."""
    part = getattr(tensor, "_local_tensor", None)
    return tensor if part is None or not hasattr(tensor, "placements") else part


def _shape(tensor: Any) -> list[int]:  # noqa: ANN401
    try:
        return [int(size) for size in local(tensor).shape]
    except Exception:  # noqa: BLE001 - a lazy module's parameter has none yet
        return []


def _has_values(value: object) -> bool:
    try:
        return hasattr(value, "shape") and hasattr(value, "dtype")
    except Exception:  # noqa: BLE001 - a tensor of a program's own kind: its row says what
        return True


def _is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)
