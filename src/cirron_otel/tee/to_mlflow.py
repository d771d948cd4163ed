"""``mlflow.log_metric`` and ``log_metrics``, and ``log_metric`` and ``log_batch`` of its client.

What else a training logs is guarded only. Automatic logging goes through the client.
Where ``start_run`` fails, the program goes on with a run that nobody keeps; the first call that
gets through again makes MLflow begin one by itself.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from cirron_otel.tee.copying import flat, here
from cirron_otel.tee.guarding import is_outage
from cirron_otel.tee.wrapping import Given, Tee

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.recorder import Recorder

_FLUENT = "mlflow.tracking.fluent"
#: Functions of which nobody needs what they return.
_GUARDED = (
    "log_param", "log_params", "set_tag", "set_tags", "log_artifact", "log_artifacts", "log_text",
    "log_dict", "log_figure", "log_image", "set_experiment", "end_run",
)  # fmt: skip
#: Of the client; the functions above go through them.
_CLIENT = "mlflow.tracking.client"
_GUARDED_OF_CLIENT = (
    "log_param", "set_tag", "log_artifact", "log_artifacts", "log_text", "log_dict", "log_figure",
    "log_image", "set_terminated",
)  # fmt: skip
#: What MLflow says where the call was wrong, not the server.
_MISTAKES = frozenset({
    "BAD_REQUEST", "INVALID_PARAMETER_VALUE", "INVALID_STATE", "NOT_IMPLEMENTED",
    "RESOURCE_ALREADY_EXISTS",
})  # fmt: skip


def make(rec: Recorder) -> MlflowTee:
    """The tee for one recorder, not in place yet."""
    return MlflowTee(rec, "mlflow", _outage)


class MlflowTee(Tee):
    """See :class:`cirron_otel.tee.wrapping.Tee`."""

    def instrument(self) -> None:
        """Wrap the functions where programs find them, and where they are defined."""
        self._replace("log_metric", lambda one: self.wrapped(one, _metric))
        self._replace("log_metrics", lambda one: self.wrapped(one, _metrics))
        for name in _GUARDED:
            self._replace(name, lambda one: self.wrapped(one, None))
        self._replace("start_run", self._start_run)
        client: Any = sys.modules[_CLIENT].MlflowClient
        self.wrap(client, "log_metric", _client_metric)
        self.wrap(client, "log_batch", _client_batch)
        for name in _GUARDED_OF_CLIENT:
            self.wrap(client, name)

    def _replace(
        self, name: str, make_wrapped: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        owners = [sys.modules[module] for module in ("mlflow", _FLUENT)]
        original = vars(owners[0]).get(name)
        if callable(original):
            made = make_wrapped(original)
            for owner in owners:
                if vars(owner).get(name) is original:
                    self.patches.replace(owner, name, made)

    def _start_run(self, original: Callable[..., Any]) -> Callable[..., Any]:
        guarded = self.guarded

        @functools.wraps(original)
        def start_run(*args: Any, **kwargs: Any) -> Any:  # noqa: ANN401 - passed through
            # Called by another function of MLflow's it may fail: that one is guarded as a whole.
            if not guarded.active or here.depth:
                return original(*args, **kwargs)
            try:
                return original(*args, **kwargs)
            except Exception as error:
                run = _nobodys_run() if _outage(error) else None
                if run is None:
                    raise
                guarded.note(error, "this run is nobody's until a call gets through")
                return run

        return start_run


def _nobodys_run() -> Any:  # noqa: ANN401 - an mlflow.ActiveRun
    """A run that no server knows, fit for ``with``; None where this MLflow has another kind."""
    try:
        entities, fluent = sys.modules["mlflow.entities"], sys.modules[_FLUENT]
        now_ms = int(time.time() * 1000)
        info = entities.RunInfo(
            run_id="", experiment_id="", user_id="", status="RUNNING", start_time=now_ms,
            end_time=None, lifecycle_stage="active",
        )  # fmt: skip
        return fluent.ActiveRun(entities.Run(info, entities.RunData()))
    except Exception:  # noqa: BLE001 - as above
        return None


def _outage(error: Exception) -> bool:
    return is_outage(error) and getattr(error, "error_code", None) not in _MISTAKES


def _metric(
    key: str, value: object, step: object = None, *_: object, **_more: object
) -> tuple[Iterable[tuple[str, object]], object]:
    return [(str(key), value)], step


def _metrics(
    metrics: object, step: object = None, *_: object, **_more: object
) -> tuple[Iterable[tuple[str, object]], object]:
    return flat(metrics), step


def _client_metric(
    _client: object,
    run_id: object,  # noqa: ARG001 - as MLflow calls it
    key: str,
    value: object,
    timestamp: object = None,  # noqa: ARG001 - as MLflow calls it
    step: object = None,
    *_: object,
    **_more: object,
) -> Given:
    return [(str(key), value)], step


def _client_batch(
    _client: object,
    run_id: object,  # noqa: ARG001 - as MLflow calls it
    metrics: object = (),
    *_: object,
    **_more: object,
) -> list[Given]:
    several: Any = metrics if isinstance(metrics, (list, tuple)) else ()
    return [([(str(metric.key), metric.value)], metric.step) for metric in several]
