"""XGBoost and LightGBM through ``ci.wrap``: a mark for each metric after each round."""

from __future__ import annotations

import importlib
import inspect
import pickle
import runpy
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel.batch import MarkRecord
from helpers import Rows, finished, tree_text

np: Any = pytest.importorskip("numpy")
pytest.importorskip("sklearn")

X, Y = importlib.import_module("sklearn.datasets").load_breast_cancer(return_X_y=True)
TRAIN, TEST = (X[:400], Y[:400]), (X[400:], Y[400:])


def _rounds(rows: Rows) -> list[MarkRecord]:
    return [m for m in rows.marks_of(rows.named("fit")[0]) if not m.name.startswith("cirron.")]


def _xgboost() -> Any:
    return pytest.importorskip("xgboost")


def _lightgbm() -> Any:
    return pytest.importorskip("lightgbm")


def _evaluation(fit: Any) -> dict[str, Any]:
    """The test data as this version of LightGBM takes it."""
    if "eval_X" in inspect.signature(fit).parameters:
        return {"eval_X": TEST[0], "eval_y": TEST[1]}
    return {"eval_set": [TEST]}


def test_rounds_of_xgboost() -> None:
    """Each round marks each metric of each set; user callbacks, results and the estimator stay."""
    xgboost = _xgboost()
    seen: list[int] = []

    class Own(xgboost.callback.TrainingCallback):  # type: ignore[misc, name-defined] # by name
        """A callback of the user's."""

        def after_iteration(self, model: Any, epoch: int, evals_log: Any) -> bool:  # noqa: ARG002
            """Remember the round."""
            seen.append(epoch)
            return False

    def estimator() -> Any:
        return xgboost.XGBClassifier(
            n_estimators=4,
            max_depth=2,
            eval_metric=["logloss", "error"],
            callbacks=[Own()],
            n_jobs=1,
        )

    plain = estimator().fit(*TRAIN, eval_set=[TRAIN, TEST], verbose=False)
    given = estimator()
    callbacks = given.callbacks
    ci.profile(frameworks=[])
    model = ci.wrap(given).fit(*TRAIN, eval_set=[TRAIN, TEST], verbose=False)
    assert given.callbacks is callbacks
    assert model.callbacks is callbacks
    assert seen == [0, 1, 2, 3] * 2
    assert not hasattr(given, "_Booster")
    assert model.evals_result() == plain.evals_result()
    assert np.array_equal(model.predict_proba(X), plain.predict_proba(X))
    model.callbacks = None  # of a class that no pickle finds
    again = pickle.loads(pickle.dumps(model))  # noqa: S301 - our own
    assert np.array_equal(again.predict_proba(X), plain.predict_proba(X))
    rows = finished()
    for number, data in enumerate(("validation_0", "validation_1")):
        for metric in ("logloss", "error"):
            values = [m.value for m in _rounds(rows) if m.name == f"{data}/{metric}"]
            assert values == plain.evals_result()[f"validation_{number}"][metric]
    assert len(_rounds(rows)) == 4 * 4


def test_rounds_of_xgboost_without_evaluation() -> None:
    """Without a set to evaluate on each round is counted; a forest, which has none, is trained."""
    xgboost = _xgboost()
    ci.profile(frameworks=[])
    ci.wrap(xgboost.XGBRegressor(n_estimators=3, max_depth=2, n_jobs=1)).fit(X, Y)
    ci.wrap(xgboost.XGBRFClassifier(n_estimators=3, max_depth=2, n_jobs=1)).fit(X, Y)
    rows = finished()
    assert [(mark.name, mark.value) for mark in _rounds(rows)] == [("round", n) for n in (1, 2, 3)]
    tree = tree_text(rows, attrs=("estimator",))
    assert tree == (
        'cirron.session\n  fit estimator="XGBRegressor"\n  fit estimator="XGBRFClassifier"'
    )


def test_rounds_of_lightgbm() -> None:
    """Rounds of LightGBM, up to and with the one that ends it early."""
    lightgbm = _lightgbm()

    def fit(model: Any) -> Any:
        early = lightgbm.early_stopping(2, verbose=False)
        return model.fit(*TRAIN, callbacks=[early], **_evaluation(model.fit))

    def estimator() -> Any:
        return lightgbm.LGBMClassifier(
            n_estimators=60, learning_rate=0.6, num_leaves=4, verbose=-1, n_jobs=1
        )

    plain = fit(estimator())
    given = estimator()
    ci.profile(frameworks=[])
    model = fit(ci.wrap(given))
    assert not hasattr(given, "_Booster") or given._Booster is None
    assert np.array_equal(model.predict_proba(X), plain.predict_proba(X))
    assert model.best_iteration_ == plain.best_iteration_ < 58
    rows = finished()
    values = [mark.value for mark in _rounds(rows)]
    assert {mark.name for mark in _rounds(rows)} == {"valid_0/binary_logloss"}
    assert len(values) == plain.best_iteration_ + 2
    assert values == plain.evals_result_["valid_0"]["binary_logloss"][: len(values)]


def test_boosting_in_a_pipeline() -> None:
    """As a step a boosted model has its name and its rounds; ``set_params`` stays its own."""
    lightgbm = _lightgbm()
    pipeline = importlib.import_module("sklearn.pipeline")
    scaler = importlib.import_module("sklearn.preprocessing").StandardScaler()
    given = lightgbm.LGBMClassifier(n_estimators=2, num_leaves=4, verbose=-1, n_jobs=1)
    model = ci.wrap(pipeline.Pipeline([("scale", scaler), ("boost", given)]))
    model.set_params(boost__extra_trees=True)
    assert "extra_trees" not in given.get_params()
    model.set_output(transform="pandas")  # LightGBM remembers names, and warns where they go
    ci.profile(frameworks=[])
    model.fit(X, Y)
    rows = finished()
    tree = tree_text(rows, marks=True, attrs=("estimator", "step"))
    assert tree.partition("\n")[2] == (
        '  fit estimator="Pipeline"\n'
        '    fit_transform estimator="StandardScaler" step="scale"\n'
        '    fit estimator="LGBMClassifier" step="boost" {round}'
    )


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """``examples/xgboost_rounds.py`` shows the metrics of the rounds."""
    _xgboost()
    example = Path(__file__).resolve().parents[2] / "examples" / "xgboost_rounds.py"
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert "validation_0/mlogloss" in shown
    assert "estimator=XGBClassifier" in shown
