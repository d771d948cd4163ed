"""``checkpoint``: saving and loading of weights in plain torch, with how much and how long.

``torch.save`` and ``torch.load``; ``save``, ``async_save`` and ``load`` of
``torch.distributed.checkpoint``; the functions of ``safetensors.torch`` that have to do with
files. The scope takes as long as the call, which is what the training waits; what ``async_save``
goes on with in the background is a ``checkpoint_background`` of its own, in the session. Where a
framework's hook has opened a ``checkpoint`` already, its parts only add their bytes to it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.compiler import is_dynamo_compiling

from cirron_otel import semconv
from cirron_otel.context import SCOPE_KEY, get_current
from cirron_otel.imports import when_imported
from cirron_otel.scope_base import BaseScope

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.hooks.patches import Patches
    from cirron_otel.hooks.torch.phases import Phases

_SAVE, _LOAD = "save", "load"
#: Containers in a state are looked through so deep, and so many values of it.
_MAX_DEPTH, _MAX_VALUES = 16, 1_000_000


class _Kind(NamedTuple):
    """A function that saves or loads."""

    name: str
    operation: str
    format: str
    #: The position and the name of the argument that says where to.
    place: tuple[int, str]
    #: The position and the name of the argument that is saved, where the bytes are told from it.
    state: tuple[int, str] | None = None


_TORCH = (
    _Kind("save", _SAVE, "torch", (1, "f")),
    _Kind("load", _LOAD, "torch", (0, "f")),
)
_DISTRIBUTED = (
    _Kind("save", _SAVE, "distributed", (99, "checkpoint_id"), (0, "state_dict")),
    _Kind("async_save", _SAVE, "distributed", (99, "checkpoint_id"), (0, "state_dict")),
    _Kind("load", _LOAD, "distributed", (99, "checkpoint_id"), (0, "state_dict")),
)
_SAFETENSORS = (
    _Kind("save_file", _SAVE, "safetensors", (1, "filename")),
    _Kind("load_file", _LOAD, "safetensors", (0, "filename")),
    _Kind("save_model", _SAVE, "safetensors", (1, "filename")),
    _Kind("load_model", _LOAD, "safetensors", (1, "filename")),
)


class _Here(threading.local):
    """What one thread is in the middle of."""

    def __init__(self) -> None:
        #: A call that saves or loads: what it calls is a part of it.
        self.busy = False


class Checkpoints:
    """The hooks on functions that save and load."""

    def __init__(self, phases: Phases, patches: Patches) -> None:
        self._phases = phases
        self._rec = phases.rec
        self._patches = patches
        self._here = _Here()

    def patch(self) -> None:
        """Replace what is loaded, and the rest when it is."""
        self._patch(torch.serialization, _TORCH, (torch,))
        when_imported("torch.distributed.checkpoint", self._distributed)
        when_imported("safetensors.torch", self._safetensors)

    def _distributed(self, package: Any) -> None:  # noqa: ANN401 - a module
        if self._phases.active:
            for home, kinds in (("state_dict_saver", _DISTRIBUTED[:2]),
                                ("state_dict_loader", _DISTRIBUTED[2:])):  # fmt: skip
                module = sys.modules.get(f"{package.__name__}.{home}")
                if module is not None:
                    self._patch(module, kinds, (package,))

    def _safetensors(self, module: Any) -> None:  # noqa: ANN401 - a module
        if self._phases.active:
            self._patch(module, _SAFETENSORS, ())

    def _patch(self, home: Any, kinds: tuple[_Kind, ...], others: tuple[Any, ...]) -> None:  # noqa: ANN401 - modules
        """Replace functions where they live, and under the same name where they are shown."""
        for kind in kinds:
            original = vars(home).get(kind.name)
            if original is None:
                continue
            recorded = self._recorded(original, kind)
            for owner in (home, *others):
                if vars(owner).get(kind.name) is original:
                    self._patches.replace(owner, kind.name, recorded)

    def _recorded(self, original: Callable[..., Any], kind: _Kind) -> Callable[..., Any]:
        here = self._here

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            if here.busy or is_dynamo_compiling() or self._is_silent():
                return original(*args, **kwargs)
            here.busy = True
            one = self._begin(kind, args, kwargs)
            try:
                result = original(*args, **kwargs)
            except BaseException as error:
                self._end(one, None, error)
                raise
            finally:
                here.busy = False
            self._end(one, result, None)
            return result

        return call

    def _is_silent(self) -> bool:
        """Whether this is none to record: the hook is gone, or it is a sample that is loaded."""
        rec = self._rec
        return (
            self._phases.silent()
            or bool(rec.loops.here.fetching)
            or (rec.is_child and rec.worker_id() is not None)
        )

    def _begin(self, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Call | None:
        try:
            return _Call(self._phases, kind, args, kwargs)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.checkpoint", error)
            return None

    def _end(self, one: _Call | None, result: object, error: BaseException | None) -> None:
        if one is None:
            return
        try:
            one.end(result, error)
        except Exception as failure:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("torch.checkpoint", failure)


class _Call:
    """One call that saves or loads: its scope, and what is known of it at its end."""

    def __init__(
        self, phases: Phases, kind: _Kind, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self._phases = phases
        self._rec = rec = phases.rec
        self._kind = kind
        self._place = _argument(kind.place, args, kwargs)
        self._state = None if kind.state is None else _argument(kind.state, args, kwargs)
        self._begun_at = _position(self._place)
        self._attrs: dict[str, Any] = {
            semconv.CHECKPOINT_OPERATION: kind.operation,
            semconv.CHECKPOINT_FORMAT: kind.format,
        }
        if isinstance(self._place, (str, os.PathLike)):
            self._attrs[semconv.CHECKPOINT_PATH] = os.fspath(self._place)
        self._outer = _outer_checkpoint()
        self._scope: BaseScope | None = None
        if self._outer is None:
            self._scope = rec.make_scope(semconv.CHECKPOINT, None, dict(self._attrs))
            self._scope.__enter__()

    def end(self, result: object, error: BaseException | None) -> None:
        """The call is over."""
        size = None if error is not None else self._size()
        scope, outer = self._scope, self._outer
        if size is not None and outer is not None and outer.is_open:
            known = outer.attrs.get(semconv.CHECKPOINT_BYTES, 0)
            outer.attrs = {**outer.attrs, semconv.CHECKPOINT_BYTES: known + size}
        if scope is None:
            return
        if size is not None:
            self._attrs[semconv.CHECKPOINT_BYTES] = size
            scope.attrs = {**scope.attrs, semconv.CHECKPOINT_BYTES: size}
        if error is None and self._kind.name == "async_save":
            self._follow(result)
        scope.__exit__(type(error) if error is not None else None, error,
                       error.__traceback__ if error is not None else None)  # fmt: skip

    def _size(self) -> int | None:
        """Bytes: of this rank's tensors, of its files, or what a file object has moved on by."""
        if self._kind.state is not None:
            size = _state_bytes(self._state)
            if size is None and self._kind.operation == _SAVE:
                size = _rank_files(self._place, self._rec.rank)
            return size
        if isinstance(self._place, (str, os.PathLike)):
            with contextlib.suppress(OSError):
                return Path(self._place).stat().st_size
            return None
        now = _position(self._place)
        if now is None or self._begun_at is None:
            return None
        return max(0, now - self._begun_at)

    def _follow(self, result: object) -> None:
        """Have what goes on behind the training recorded until it is done."""
        future: Any = getattr(result, "upload_completion", result)
        if not hasattr(future, "add_done_callback"):
            return
        rec = self._rec
        background = rec.make_scope(semconv.CHECKPOINT_BACKGROUND, None, dict(self._attrs))
        if not background.open(parent=rec.session, attach=False):
            return

        def done(future: Any) -> None:  # noqa: ANN401 - of concurrent.futures
            try:
                size = _rank_files(self._place, rec.rank)
                if size is not None:
                    background.attrs = {**background.attrs, semconv.CHECKPOINT_BYTES: size}
                failed = None if future.cancelled() else future.exception()
                background.close(exc=failed, restore=False)
            except Exception as error:  # noqa: BLE001 - see _guard
                rec.guard.swallow("torch.checkpoint", error)

        future.add_done_callback(done)


def _outer_checkpoint() -> BaseScope | None:
    """The ``checkpoint`` that this is a part of: a framework's, the program's own, or one of ours.

    It may have ended: in the thread of an asynchronous save its parent's context lives on.
    """
    scope = get_current().get(SCOPE_KEY)
    while isinstance(scope, BaseScope):
        if scope.name == semconv.CHECKPOINT:
            return scope
        scope = scope.above
    return None


def _argument(where: tuple[int, str], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:  # noqa: ANN401 - any argument
    position, name = where
    return args[position] if position < len(args) else kwargs.get(name)


def _position(place: object) -> int | None:
    """Where a file object stands; None for what is none, or cannot tell."""
    tell = None if isinstance(place, (str, os.PathLike)) else getattr(place, "tell", None)
    if tell is None:
        return None
    try:
        return int(tell())
    except Exception:  # noqa: BLE001 - a pipe, or a file object of the program's
        return None


def _state_bytes(state: object) -> int | None:
    """Bytes of the tensors in a state, of sharded ones this rank's part. Waits for no device.

    None where an object of the program's has the state: asking it would cost, and may have all
    ranks exchange something.
    """
    stack: list[tuple[object, int]] = [(state, 0)]
    total = looked = 0
    while stack and looked < _MAX_VALUES:
        value, depth = stack.pop()
        looked += 1
        if isinstance(value, torch.Tensor):
            local = getattr(value, "_local_tensor", value)
            total += int(local.numel()) * int(local.element_size())
        elif hasattr(value, "state_dict"):
            return None
        elif depth < _MAX_DEPTH and isinstance(value, dict):
            stack += [(one, depth + 1) for one in value.values()]
        elif depth < _MAX_DEPTH and isinstance(value, (list, tuple)):
            stack += [(one, depth + 1) for one in value]
    return total


def _rank_files(place: object, rank: int) -> int | None:
    """Bytes of the files that this rank has put into the directory of a checkpoint."""
    if not isinstance(place, (str, os.PathLike)):
        return None
    try:
        with os.scandir(os.fsdecode(place)) as entries:
            sizes = [e.stat().st_size for e in entries if e.name.startswith(f"__{rank}_")]
    except OSError:
        return None
    return sum(sizes) if sizes else None
