"""Rounds of gradient boosting: one mark for each metric after each round, by their own callbacks.

XGBoost takes callbacks from a parameter of the estimator, LightGBM from an argument of ``fit``.
Ours is there for one call, behind those of the user, and gone after it.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from typing import TYPE_CHECKING, Any

from cirron_otel import semconv
from cirron_otel.hooks.recording import Foreign, mark

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from contextlib import AbstractContextManager

    from cirron_otel.recorder import Recorder

_CALLBACKS = "callbacks"
#: After LightGBM's own log (10), before its early stopping (30), which ends the last round.
_LIGHTGBM_ORDER = 15


def is_imported() -> bool:
    """Whether there may be an estimator to tell of."""
    return "xgboost" in sys.modules or "lightgbm" in sys.modules


def tell_rounds(
    rec: Recorder,
    original: Callable[..., Any],
    estimator: Foreign,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> AbstractContextManager[Mapping[str, Any]] | None:
    """What has to surround this ``fit``, and gives further arguments for it; None: nothing."""
    try:
        xgboost, lightgbm = sys.modules.get("xgboost"), sys.modules.get("lightgbm")
        if xgboost is not None and isinstance(estimator, _classes(xgboost, "XGBModel")):
            # A random forest is one round, and refuses callbacks.
            if isinstance(estimator, _classes(xgboost, "XGBRFClassifier", "XGBRFRegressor")):
                return None
            return _in_parameter(estimator, _xgboost_callback(xgboost, rec))
        if lightgbm is not None and isinstance(estimator, _classes(lightgbm, "LGBMModel")):
            # Those of dask train in other processes.
            if type(estimator).__name__.startswith("Dask"):
                return None
            return _in_arguments(original, estimator, args, kwargs, _LightGBMRounds(rec))
    except Exception as error:  # noqa: BLE001 - see _guard
        rec.guard.swallow("sklearn.boosting", error)
    return None


def _classes(module: object, *names: str) -> tuple[type, ...]:
    return tuple(found for name in names if isinstance(found := getattr(module, name, None), type))


@contextlib.contextmanager
def _in_parameter(estimator: Foreign, ours: object) -> Iterator[Mapping[str, Any]]:
    before = estimator.callbacks
    estimator.callbacks = with_ours = [*(before or ()), ours]
    try:
        yield {}
    finally:
        if estimator.callbacks is with_ours:
            estimator.callbacks = before


def _in_arguments(
    original: Callable[..., Any],
    estimator: Foreign,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    ours: object,
) -> AbstractContextManager[Mapping[str, Any]] | None:
    taken = inspect.signature(original).bind_partial(estimator, *args).arguments
    if _CALLBACKS in taken:
        return None  # given by position: there is no way in that does not move arguments
    return contextlib.nullcontext({_CALLBACKS: [*(kwargs.get(_CALLBACKS) or ()), ours]})


def _tell(rec: Recorder, number: int, metrics: list[tuple[str, object]]) -> None:
    """The marks of one round; without metrics how many rounds there were so far."""
    for name, value in metrics:
        mark(rec, name, value)
    if not metrics:
        mark(rec, semconv.ROUND, number)


def _xgboost_callback(xgboost: Foreign, rec: Recorder) -> object:
    base: Any = xgboost.callback.TrainingCallback

    class Rounds(base):  # type: ignore[misc] # XGBoost takes only its own kind
        def after_iteration(self, _model: Foreign, epoch: int, evals_log: Foreign) -> bool:
            try:
                metrics = [
                    (f"{data}/{metric}", values[-1])
                    for data, found in evals_log.items()
                    for metric, values in found.items()
                ]
                _tell(rec, epoch + 1, metrics)
            except Exception as error:  # noqa: BLE001 - see _guard
                rec.guard.swallow("sklearn.boosting", error)
            return False  # go on

    return Rounds()


class _LightGBMRounds:
    """LightGBM's kind of callback: called with an environment after each round."""

    order = _LIGHTGBM_ORDER
    before_iteration = False

    def __init__(self, rec: Recorder) -> None:
        self._rec = rec

    def __call__(self, env: Foreign) -> None:
        """Mark what was evaluated."""
        try:
            found = env.evaluation_result_list or ()
            metrics = [(f"{data}/{metric}", value) for data, metric, value, *_ in found]
            _tell(self._rec, env.iteration + 1, metrics)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._rec.guard.swallow("sklearn.boosting", error)
