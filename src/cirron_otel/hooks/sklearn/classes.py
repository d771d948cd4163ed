"""The class of a recorded estimator: a subclass of the user's, with the recorded methods.

So ``isinstance``, ``get_params``, ``available_if``, metadata routing, tags and reprs are the
estimator's own, and ``clone``, which calls the class, gives a recorded estimator again. The class
bears the name of the one it is made from. It stands in no module, so a pickle names the user's
class and has it made again where it is loaded; that needs cirron-otel there, and no ``wrap``.
"""

from __future__ import annotations

import copy
import sys
import threading
import weakref
from abc import ABCMeta
from typing import TYPE_CHECKING, Any, ClassVar

from cirron_otel import recorder
from cirron_otel._guard import logger
from cirron_otel.hooks.sklearn.calls import methods_of, recorded
from cirron_otel.hooks.sklearn.notes import Note, Place, cloned, packed, unpacked

if TYPE_CHECKING:
    from collections.abc import Callable


class _Quiet:
    """Stands in front of the user's class while a class is made from it.

    So its ``__init_subclass__`` is not called: what scikit-learn does to new classes was done to
    the user's. Done again it would wrap ``transform`` twice, and forget what a class has opted out
    of.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Leave it at that."""


def _sklearn_clone(self: Any) -> Any:  # noqa: ANN401 - a recorded estimator
    """A clone, which is recorded too and has the same name in its pipeline."""
    own: Callable[[], Any] | None = getattr(_above(self), "__sklearn_clone__", None)
    made = own() if own is not None else _plain_clone(self)
    try:
        cloned(self, made)
    except Exception as error:  # noqa: BLE001 - see _guard
        _swallow("sklearn.clone", error)
    return made


def _reduce_ex(self: Any, protocol: Any) -> Any:  # noqa: ANN401 - whatever a pickle takes
    """As the user's class has it, with the way back to this one."""
    found = _above(self).__reduce_ex__(protocol)
    kind = type(self)
    if not isinstance(found, tuple) or kind not in _Made.all:
        return found
    make, *args = (kind.__base__ if part is kind else part for part in (found[0], *found[1]))
    return (remade, (packed(self), make, *args), *found[2:])


def _above(estimator: object) -> Any:  # noqa: ANN401 - as `super()` inside the recorded class
    kind = next(one for one in type(estimator).__mro__ if one in _Made.all)
    return super(kind, estimator)


def is_recorded(kind: type) -> bool:
    """Whether estimators of this class are recorded."""
    return any(one in _Made.all for one in kind.__mro__)


def recorded_class(kind: type) -> type:
    """The class of recorded estimators of ``kind``; the same one as long as somebody has it."""
    if is_recorded(kind):
        return kind
    with _Made.lock:
        made = _Made.by_kind.get(kind)
        if made is None:
            made = _make(kind)
            _Made.by_kind[kind] = made
            _Made.all.add(made)
    return made


class _Made:
    """The classes that were made. A class holds on to the one it is made from, not this table."""

    lock = threading.Lock()
    by_kind: ClassVar[weakref.WeakValueDictionary[type, type]] = weakref.WeakValueDictionary()
    all: ClassVar[weakref.WeakSet[type]] = weakref.WeakSet()


def _make(kind: type) -> type:
    namespace = {
        "__slots__": (),  # an instance may change its class only where both begin alike
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
        "__doc__": kind.__doc__,
        "__sklearn_clone__": _sklearn_clone,
        "__reduce_ex__": _reduce_ex,
    }
    # Past a metaclass of the user's, for the same reason: one that keeps a list of its classes
    # would have this one in the place of theirs.
    meta: Any = type(kind)
    usual: Any = ABCMeta if issubclass(meta, ABCMeta) else type
    made: type = usual.__new__(meta, kind.__name__, (_Quiet, kind), namespace)
    # The user's class alone: some, such as XGBoost's, go from class to class by the first base.
    made.__bases__ = (kind,)
    for name, found in methods_of(kind, own=False):
        method = recorded(name, found, unshare=unshare)
        if method is not found:
            setattr(made, name, method)
    return made


def remade(note: tuple[str | None, Place | None], make: Callable[..., Any], *args: Any) -> Any:  # noqa: ANN401
    """A recorded estimator from a pickle, or from a copy; its attributes come afterwards."""
    made = make(*args)
    made.__class__ = recorded_class(type(made))
    unpacked(made, *note)
    return made


def unshare(estimator: object, note: Note) -> None:
    """What a wrapped estimator was made with becomes its own before it learns anything new.

    Until then it shares it with the user's estimator, which must not change with it.
    """
    note.shares = False
    try:
        given = estimator.get_params(deep=False)  # type: ignore[attr-defined]
        # Parameters stay the user's objects, also where something else refers to them.
        memo = {id(value): value for value in given.values()}
        state = vars(estimator)
        own = {name: value for name, value in state.items() if name not in given}
        state.update(copy.deepcopy(own, memo))
    except Exception as error:  # noqa: BLE001 - what it has learnt may refuse to be copied
        logger.warning(
            "cirron-otel: what a %s had learnt before ci.wrap() cannot be copied (%r): fitting it "
            "further may change the estimator it was made from", type(estimator).__name__, error,
        )  # fmt: skip


def _plain_clone(estimator: object) -> Any:  # noqa: ANN401 - an estimator
    """As scikit-learn clones what has no way of its own."""
    return sys.modules["sklearn.base"]._clone_parametrized(estimator)  # noqa: SLF001


def _swallow(place: str, error: BaseException) -> None:
    rec = recorder._current  # noqa: SLF001
    if rec is not None:
        rec.guard.swallow(place, error)
