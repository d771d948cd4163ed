"""A recorded call of an estimator: its scope, what is said on it, and what follows from it."""

from __future__ import annotations

import functools
import inspect
import threading
from typing import TYPE_CHECKING, Any, Protocol

from cirron_otel import recorder, semconv
from cirron_otel.hooks.recording import Foreign, mark
from cirron_otel.hooks.sklearn import boosting
from cirron_otel.hooks.sklearn.notes import Note, asked_for, notes, place_in
from cirron_otel.scope_base import BaseScope, RemoteScope
from cirron_otel.scopes import _in_child

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cirron_otel.recorder import Recorder

#: The methods of scikit-learn's that are recorded; and whatever begins with ``predict``.
NAMES = (
    "fit", "partial_fit", "fit_transform", "fit_predict", "predict", "predict_proba",
    "predict_log_proba", "decision_function", "transform", "inverse_transform", "score",
)  # fmt: skip
_PREFIX = "predict"
_FIT = ("fit", "partial_fit", "fit_transform", "fit_predict")
#: Where composite estimators of scikit-learn's keep their parts.
_PARTS = ("steps", "transformer_list", "transformers", "estimators")
#: Candidates of a search that get a mark each.
_MAX_CANDIDATES = 1000
#: Longer lists of an estimator are its own business.
_MAX_PARTS = 100


class Switch(Protocol):
    """What says whether a method still records."""

    active: bool


class _Here(threading.local):
    """The estimator whose recorded call this thread is in, the innermost."""

    def __init__(self) -> None:
        self.running: object = None


_here = _Here()


def methods_of(kind: type, *, own: bool) -> Iterator[tuple[str, Any]]:
    """The methods of a class that are to be recorded, as they lie there; ``own``: only its own."""
    names = vars(kind) if own else dir(kind)
    for name in names:
        if name in NAMES or name.startswith(_PREFIX):
            found = inspect.getattr_static(kind, name, None)
            if found is not None and not isinstance(found, (property, staticmethod, classmethod)):
                yield name, found


def recorded(
    name: str,
    found: Any,  # noqa: ANN401 - a function, or a descriptor that gives one
    switch: Switch | None = None,
    unshare: Callable[[object, Note], None] | None = None,
) -> Any:  # noqa: ANN401 - the same kind of thing
    """What takes the place of method ``found``: a function for a function.

    scikit-learn's ``available_if``, which hides a method from an estimator that has no use for it,
    keeps its condition. ``unshare`` is called before a fit of what shares what it has learnt.
    """
    if inspect.isfunction(found):
        return _function(name, found, switch, unshare if name in _FIT else None)
    inner = getattr(found, "fn", None)
    if inspect.isfunction(inner) and hasattr(found, "check") and hasattr(found, "attribute_name"):
        made = _function(name, inner, switch, unshare if name in _FIT else None)
        return type(found)(made, found.check, found.attribute_name)
    return found


def _function(
    name: str,
    original: Callable[..., Any],
    switch: Switch | None,
    unshare: Callable[[object, Note], None] | None,
) -> Callable[..., Any]:
    known = notes.of

    @functools.wraps(original)
    def method(estimator: Foreign, /, *args: Any, **kwargs: Any) -> Foreign:
        note = known(estimator)
        if unshare is not None and note is not None and note.shares:
            unshare(estimator, note)
        if _here.running is estimator or (switch is not None and not switch.active):
            return original(estimator, *args, **kwargs)
        rec = recorder._current or _in_child()  # noqa: SLF001
        if rec is None or not rec.active:
            return original(estimator, *args, **kwargs)
        return _in_scope(rec, name, original, estimator, note, args, kwargs)

    return method


def _in_scope(  # noqa: PLR0913, PLR0917 - a call, taken apart
    rec: Recorder,
    name: str,
    original: Callable[..., Any],
    estimator: Foreign,
    note: Note | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Foreign:
    outer = _here.running
    scope = _open(rec, name, estimator, note, outer, args[0] if args else kwargs.get("X"))
    told = None
    if name == "fit" and boosting.is_imported():
        told = boosting.tell_rounds(rec, original, estimator, args, kwargs)
    _here.running = estimator
    try:
        if told is None:
            result = original(estimator, *args, **kwargs)
        else:
            with told as extra:
                result = original(estimator, *args, **{**kwargs, **extra})
    except BaseException as error:
        if scope is not None:
            scope.__exit__(type(error), error, error.__traceback__)
        raise
    finally:
        _here.running = outer
    if scope is not None:
        if name == "score" or name in _FIT:
            _tell_scores(rec, name, estimator, result)
        scope.__exit__(None, None, None)
    return result


def _open(  # noqa: PLR0913, PLR0917 - a call, taken apart
    rec: Recorder,
    name: str,
    estimator: Foreign,
    note: Note | None,
    outer: object,
    data: object,
) -> BaseScope | None:
    try:
        attrs: dict[str, Any] = {semconv.ESTIMATOR: type(estimator).__name__}
        step = None if note is None else note.step
        if step is None and outer is not None:
            step = _step(estimator, outer)
        if step is not None:
            attrs[semconv.ESTIMATOR_STEP] = step
        samples = _samples(data)
        if samples is not None:
            attrs[semconv.SAMPLES] = samples
        scope = rec.make_scope(name, None, attrs)
        place = place_in(rec, note) if rec.is_child else None
        if place is None:
            scope.__enter__()
        else:
            scope.open(parent=RemoteScope(rec, place))
        state = getattr(estimator, "__dict__", {})
        jobs = state.get("n_jobs", 1)
        if jobs != 1 and (jobs is not None or any(one in state for one in _PARTS)):
            _lend(state, scope)
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("sklearn", error)
        return None
    return scope


def _lend(state: dict[str, Any], scope: BaseScope) -> None:
    """The parts of an estimator may be called by other threads and processes, in its name."""
    for value in state.values():
        for one in value if type(value) in (list, tuple) and len(value) <= _MAX_PARTS else (value,):
            part = one[1] if type(one) is tuple and len(one) > 1 else one
            if notes.of(part) is not None:
                asked_for(part, scope)


def _step(estimator: object, outer: object) -> str | None:
    """The estimator's name in what it runs as a part of."""
    for place in _PARTS:
        parts = getattr(outer, "__dict__", {}).get(place)
        if isinstance(parts, (list, tuple)):
            for part in parts:
                if type(part) is tuple and len(part) > 1 and part[1] is estimator:
                    return str(part[0])
    return None


def _samples(data: object) -> int | None:
    """How many rows, where that is known without asking for anything."""
    if type(data) in (list, tuple):
        return len(data)  # type: ignore[arg-type]
    try:
        shape = getattr(data, "shape", None)
    except Exception:  # noqa: BLE001 - data of the program's own kind
        return None
    if type(shape) is tuple and shape and type(shape[0]) is int:
        return shape[0]
    return None


def _tell_scores(rec: Recorder, name: str, estimator: Foreign, result: object) -> None:
    """Mark what ``score`` returned, or what a search has found out of each candidate."""
    try:
        if name == "score":
            mark(rec, semconv.SCORE, result)
            return
        state = getattr(estimator, "__dict__", {})
        found = state.get("cv_results_")
        if not isinstance(found, dict):
            return
        for key, means in found.items():
            if key.startswith("mean_test_"):
                for number, mean in enumerate(means[:_MAX_CANDIDATES]):
                    rec.mark(key, mean, "point", {semconv.CANDIDATE: number})
        best = state.get("best_score_")
        if best is not None:
            rec.mark(semconv.BEST_SCORE, best, "summary", {})
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("sklearn.score", error)
