"""``ci.wrap``: an estimator like the one given, whose calls are recorded."""

from __future__ import annotations

import contextlib
import copy
import types
from typing import TYPE_CHECKING, Any, TypeVar

from cirron_otel._guard import logger
from cirron_otel.hooks.recording import Foreign
from cirron_otel.hooks.sklearn.classes import is_recorded, recorded_class
from cirron_otel.hooks.sklearn.notes import Note, notes

if TYPE_CHECKING:
    from collections.abc import Iterator

_T = TypeVar("_T")
_MAX_ITEMS = 1000
_MAX_DEPTH = 8
#: What the winner of a search is kept in; other learnt estimators are called as their parameter.
_WINNER = "best_estimator_"


def wrap(estimator: _T) -> _T:
    """An estimator of scikit-learn's kind whose calls are recorded; the one given stays as it is.

    ``fit``, ``partial_fit``, ``fit_transform``, ``fit_predict``, ``predict...``,
    ``decision_function``, ``transform``, ``inverse_transform`` and ``score`` become scopes of these
    names, with ``estimator`` (its class), ``samples`` (rows of the data) and, inside a pipeline,
    union or column transformer, ``step`` (its name there). What is returned is an instance of a
    subclass: ``isinstance``, ``clone``, ``get_params``, cross-validation, searches, pickle and
    joblib's workers go on working, and clones and copies in other processes are recorded as well.
    Estimators among the parameters (steps, candidates of a search) are wrapped with it. ``score``
    is marked; a search marks the mean of each candidate and ``best_score``; XGBoost and LightGBM
    have a mark for each metric after each round.

    Parameters are the objects given. What a fitted estimator has learnt is shared until the wrapped
    one is fitted again, and copied then. Anything that is no estimator is returned as it is, a
    wrapped one too. Before or after ``profile()``; never raises, opens nothing.
    """
    try:
        if not is_estimator(estimator) or is_recorded(type(estimator)):
            return estimator
        return _Copies().of(estimator, None)  # type: ignore[no-any-return]
    except Exception as error:  # noqa: BLE001 - see _guard
        logger.warning(
            "cirron-otel: this %s cannot be wrapped and is not recorded: %r",
            type(estimator).__name__, error,
        )  # fmt: skip
        return estimator


def is_estimator(found: object) -> bool:
    """Whether it is used as scikit-learn's estimators are: it fits, and knows its parameters."""
    kind = type(found)
    return kind is not type and all(
        callable(getattr(kind, name, None)) for name in ("fit", "get_params", "set_params")
    )


class _Copies:
    """Recorded copies of an estimator and of those it is made of; each is copied once."""

    def __init__(self) -> None:
        self._made: dict[int, Any] = {}

    def of(self, estimator: Foreign, step: str | None) -> Foreign:
        """The recorded copy of ``estimator``, called ``step`` where it is a part."""
        known = self._made.get(id(estimator))
        if known is not None:
            return known
        given = estimator.get_params(deep=False)
        made = _shallow(estimator)
        self._made[id(estimator)] = made
        state: dict[str, Any] = made.__dict__
        for name, value in list(state.items()):
            if name in given or name == _WINNER or (name[-1:] == "_" and name[:-1] in given):
                fresh = self._inside(value, 0)
            else:
                # It may be changed in place, by setting a parameter or an output format.
                fresh = copy.copy(value) if type(value) in (dict, list, set) else value
            if fresh is not value:
                state[name] = fresh
        note = Note(step)
        note.shares = any(name not in given for name in state)
        notes.keep(made, note)
        return made

    def _inside(self, value: Foreign, depth: int) -> Foreign:
        """``value`` with the estimators in it recorded; the same object where there are none."""
        if is_estimator(value):
            return self.of(value, None)
        kind = type(value)
        if kind not in (list, tuple, dict) or len(value) > _MAX_ITEMS or depth > _MAX_DEPTH:
            return value
        if kind is dict:
            items = {key: self._inside(item, depth + 1) for key, item in value.items()}
            return value if all(items[key] is value[key] for key in value) else items
        if kind is tuple and len(value) > 1 and type(value[0]) is str and is_estimator(value[1]):
            return (value[0], self.of(value[1], value[0]), *value[2:])
        inner = [self._inside(item, depth + 1) for item in value]
        same = all(one is other for one, other in zip(inner, value, strict=True))
        return value if same else kind(inner)


def _shallow(estimator: Foreign) -> Foreign:
    """A copy of the recorded class, with the very attributes of the estimator."""
    kind: Any = type(estimator)
    made: Any
    if kind.__new__ is object.__new__ and not hasattr(kind, "__copy__"):
        made = object.__new__(kind)
        vars(made).update(vars(estimator))
        for slot in _slots(kind):
            with contextlib.suppress(AttributeError):  # nothing is in it yet
                slot.__set__(made, slot.__get__(estimator))
    else:
        made = copy.copy(estimator)
    made.__class__ = recorded_class(kind)
    return made


def _slots(kind: type) -> Iterator[types.MemberDescriptorType]:
    """What holds the attributes of an instance that are not in its ``__dict__``."""
    for one in kind.__mro__:
        for found in vars(one).values():
            if isinstance(found, types.MemberDescriptorType):
                yield found
