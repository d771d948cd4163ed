"""``ci.wrap``: estimators and data of odd kinds, and what calls estimators from elsewhere."""

from __future__ import annotations

import importlib
import pickle
import warnings
from typing import Any, ClassVar

import pytest

import cirron_otel as ci
from helpers import ProgramRun, RunProgram, finished, tree_text

np: Any = pytest.importorskip("numpy")
pytest.importorskip("sklearn")

base: Any = importlib.import_module("sklearn.base")
linear_model: Any = importlib.import_module("sklearn.linear_model")
model_selection: Any = importlib.import_module("sklearn.model_selection")
pipeline: Any = importlib.import_module("sklearn.pipeline")
preprocessing: Any = importlib.import_module("sklearn.preprocessing")

X, Y = importlib.import_module("sklearn.datasets").load_iris(return_X_y=True)
X = preprocessing.scale(X)


class Slotted(base.BaseEstimator):  # type: ignore[misc, name-defined] # by name
    """Keeps what it has in slots, its parameter too."""

    __slots__ = ("alpha", "rows_")

    def __init__(self, alpha: int = 1) -> None:
        self.alpha = alpha

    def fit(self, x: Any, y: Any = None) -> Slotted:  # noqa: ARG002 - scikit-learn's signature
        """Count the rows."""
        self.rows_ = len(x)
        return self


def test_attributes_in_slots_come_along() -> None:
    """Parameters and what was learnt are there where they lie in slots, and the given one stays."""
    plain = Slotted(3)
    wrapped = ci.wrap(plain)
    assert wrapped.alpha == 3
    assert wrapped.fit(X).rows_ == len(X)
    assert not hasattr(plain, "rows_")
    assert ci.wrap(wrapped.fit(X)).rows_ == len(X)
    assert base.clone(wrapped).alpha == 3


class Listed(type):
    """A metaclass that keeps its classes by name, as plug-ins are found."""

    known: ClassVar[dict[str, type]] = {}

    def __new__(cls, name: str, bases: tuple[type, ...], namespace: dict[str, Any]) -> Listed:
        """Make a class and remember it."""
        made = super().__new__(cls, name, bases, namespace)
        cls.known[name] = made
        return made


class PlugIn(base.BaseEstimator, metaclass=Listed):  # type: ignore[misc, name-defined] # by name
    """Found by its name."""

    def fit(self, x: Any, y: Any = None) -> PlugIn:  # noqa: ARG002 - scikit-learn's signature
        """Learn nothing."""
        return self


def test_a_metaclass_does_not_see_ours() -> None:
    """A list of classes that a metaclass keeps has the program's class in it, and it alone."""
    wrapped = ci.wrap(PlugIn())
    assert isinstance(wrapped.fit(X), PlugIn)
    assert Listed.known == {"PlugIn": PlugIn}
    assert type(type(wrapped)) is Listed


class Forwarding(base.BaseEstimator):  # type: ignore[misc, name-defined] # by name
    """Has what it has not itself from the estimator inside."""

    def __init__(self, inner: Any = None) -> None:
        self.inner = inner

    def fit(self, x: Any, y: Any) -> Forwarding:
        """Fit a clone."""
        self.inner_ = base.clone(self.inner).fit(x, y)
        return self

    def __getattr__(self, name: str) -> Any:
        """The inner one's."""
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(vars(self).get("inner_", vars(self).get("inner")), name)


def test_attributes_of_an_inner_estimator() -> None:
    """An estimator that forwards what it has not is wrapped, pickled and used as ever."""
    ci.profile(frameworks=[])
    wrapped = ci.wrap(Forwarding(linear_model.LogisticRegression())).fit(X, Y)
    again = pickle.loads(pickle.dumps(wrapped))  # noqa: S301
    assert np.array_equal(again.predict(X), wrapped.predict(X))
    label = 'estimator="LogisticRegression"'
    assert tree_text(finished(), attrs=("estimator",)) == (
        f'cirron.session\n  fit estimator="Forwarding"\n    fit {label}\n'
        f"  predict {label}\n  predict {label}"
    )


class OwnWay(base.BaseEstimator):  # type: ignore[misc, name-defined] # by name
    """Has signatures of its own."""

    def fit(self, data: Any, *, target: Any, rounds: int = 3) -> OwnWay:  # noqa: ARG002
        """Count rounds."""
        self.rounds_ = rounds
        return self

    def predict(self, *, rows: Any) -> Any:
        """Zeros."""
        return np.zeros(len(rows))


class Lazy:
    """Data that cannot tell its shape."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Not yet."""
        raise RuntimeError("not yet")


def test_signatures_and_data_of_ones_own() -> None:
    """Keywords of any name go through, errors say the method's name, data may be anything."""
    ci.profile(frameworks=[])
    wrapped = ci.wrap(OwnWay())
    assert wrapped.fit(Lazy(), target=Y, rounds=5).rounds_ == 5
    assert len(wrapped.predict(rows=X)) == len(X)
    with pytest.raises(TypeError, match=r"fit\(\) missing 1 required positional argument: 'data'"):
        wrapped.fit(target=Y)
    rows = finished()
    assert [span.name for span in rows.spans if span.name in {"fit", "predict"}] == [
        "fit", "predict", "fit",
    ]  # fmt: skip


def test_a_frozen_estimator_stays_frozen() -> None:
    """``FrozenEstimator``: its clone is itself, and nothing that it has learnt is lost."""
    frozen = pytest.importorskip("sklearn.frozen").FrozenEstimator
    inside = linear_model.LogisticRegression().fit(X, Y)
    wrapped = ci.wrap(frozen(inside))
    assert base.clone(wrapped) is wrapped
    assert np.array_equal(wrapped.fit(X, Y[::-1]).predict(X), inside.predict(X))


def test_frames_stay_frames() -> None:
    """Feature names and ``set_output(transform="pandas")`` are as without ``wrap``, sliced too."""
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame(X, columns=list("abcd"))
    model = ci.wrap(
        pipeline.make_pipeline(preprocessing.StandardScaler(), linear_model.LogisticRegression())
    ).set_output(transform="pandas")
    model.fit(frame, Y)
    assert list(model.feature_names_in_) == list("abcd")
    scaled = model[:-1].transform(frame)
    assert isinstance(scaled, pandas.DataFrame)
    assert list(scaled.columns) == list("abcd")
    assert list(model[0].get_feature_names_out()) == list("abcd")


class Picky(linear_model.LogisticRegression):  # type: ignore[misc, name-defined] # by name
    """Fails for some of its candidates."""

    def fit(self, x: Any, y: Any) -> Picky:
        """Fit, unless it is asked for too much."""
        if self.C > 1:
            raise ValueError("too much")
        super().fit(x, y)
        return self


def test_a_search_goes_on_where_some_fits_fail() -> None:
    """The fits that fail have their error, the search its result, and a mean that is NaN."""
    ci.profile(frameworks=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        search = ci.wrap(model_selection.GridSearchCV(Picky(), {"C": [1.0, 2.0]}, cv=2)).fit(X, Y)
    assert search.best_params_ == {"C": 1.0}
    rows = finished()
    failed = [span for span in rows.named("fit") if "error" in span.attrs]
    assert len(failed) == 2
    means = [mark for mark in rows.marks if mark.name == "mean_test_score"]
    assert means[1].value_nonfinite == "nan"


WORKERS = """
    import cirron_otel as ci
    import joblib
    from sklearn.datasets import load_iris
    from sklearn.linear_model import LogisticRegression
    from sklearn.model_selection import GridSearchCV, cross_val_score
    from sklearn.pipeline import FeatureUnion
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    class Mine(LogisticRegression):
        "Of the program itself: workers get its class by value."

    if __name__ == "__main__":
        X, y = load_iris(return_X_y=True)
        ci.profile(frameworks=[])
        for number in range(2):
            with ci.scope("search", number):
                grid = {"C": [0.1, 0.3, 1.0, 3.0]}
                ci.wrap(GridSearchCV(Mine(), grid, cv=2, n_jobs=2)).fit(X, y)
            with ci.scope("validation", number):
                cross_val_score(ci.wrap(LogisticRegression()), X, y, cv=8, n_jobs=2)
            with ci.scope("union", number):
                parts = [("scale", StandardScaler()), ("bound", MinMaxScaler())]
                ci.wrap(FeatureUnion(parts, n_jobs=2)).fit(X, y)
        with joblib.parallel_config("threading", n_jobs=2), ci.scope("threads"):
            cross_val_score(ci.wrap(LogisticRegression()), X, y, cv=8)
        ci.shutdown()
"""


@pytest.mark.slow
def test_what_workers_do_arrives(run_program: RunProgram) -> None:
    """All that joblib's processes and threads do stands where it was asked for.

    That is also true of what they get when the first of it is done, of a second search with the
    processes of the first, and of the parts of a union, which are not cloned.
    """
    run: ProgramRun = run_program(WORKERS, timeout=200, measured=False)
    main = run.one("cirron.session").pid
    for number in range(2):
        scopes = {
            span.name: run.children(span)
            for span in run.spans
            if span.name in {"search", "validation", "union"} and span.index == number
        }
        (whole,) = scopes["search"]
        inside = run.children(whole)
        far = [span for span in inside if span.pid != main]
        assert sorted(span.name for span in far) == ["fit"] * 8 + ["score"] * 8
        assert {span.attrs["estimator"] for span in far} == {"Mine"}
        assert [span.name for span in inside if span.pid == main] == ["fit"]
        folds = scopes["validation"]
        assert sorted(span.name for span in folds) == ["fit"] * 8 + ["score"] * 8
        assert all(span.pid != main for span in folds)
        (union,) = scopes["union"]
        parts = run.children(union)
        assert {span.attrs["step"] for span in parts} == {"scale", "bound"}
        assert all(span.pid != main for span in parts)
    folds = run.children(run.one("threads"))
    assert sorted(span.name for span in folds) == ["fit"] * 8 + ["score"] * 8
    assert run.open == []
