"""``ci.wrap``: estimators of scikit-learn that stay what they are, with their calls recorded."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import random
import re
import runpy
import warnings
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from helpers import Rows, RunProgram, finished, read_spool, tree_text

np: Any = pytest.importorskip("numpy")
pytest.importorskip("sklearn")

base: Any = importlib.import_module("sklearn.base")
compose: Any = importlib.import_module("sklearn.compose")
ensemble: Any = importlib.import_module("sklearn.ensemble")
linear_model: Any = importlib.import_module("sklearn.linear_model")
model_selection: Any = importlib.import_module("sklearn.model_selection")
pipeline: Any = importlib.import_module("sklearn.pipeline")
preprocessing: Any = importlib.import_module("sklearn.preprocessing")

X, Y = importlib.import_module("sklearn.datasets").load_iris(return_X_y=True)
X = preprocessing.scale(X)
ATTRS = ("estimator", "step")


def _pipeline() -> Any:
    """A pipeline with a column transformer and a union in it."""
    columns = compose.ColumnTransformer(
        [
            ("scale", preprocessing.StandardScaler(), [0, 1]),
            ("bound", preprocessing.MinMaxScaler(), [2, 3]),
        ]
    )
    union = pipeline.FeatureUnion(
        [("plain", "passthrough"), ("squares", preprocessing.PolynomialFeatures(2))]
    )
    return pipeline.Pipeline(
        [("columns", columns), ("union", union), ("classify", linear_model.LogisticRegression())]
    )


def _tree(rows: Rows) -> str:
    # A session that takes long has marks of its own.
    return re.sub(r"^cirron.session .*", "cirron.session", tree_text(rows, marks=True, attrs=ATTRS))


def test_a_pipeline_has_a_scope_for_each_step() -> None:
    """Fit, predict and score of nested composites: one scope for each step, under its name."""
    ci.profile(frameworks=[])
    model = ci.wrap(_pipeline())
    model.fit(X, Y)
    model.predict_proba(X)
    score = model.score(X, Y)
    rows = finished()
    called = """\
    {0} estimator="ColumnTransformer" step="columns"
      {0} estimator="StandardScaler" step="scale"
      {0} estimator="MinMaxScaler" step="bound"
    {0} estimator="FeatureUnion" step="union"
      {0} estimator="PolynomialFeatures" step="squares"
"""
    assert _tree(rows) == (
        "cirron.session\n"
        '  fit estimator="Pipeline"\n'
        + called.format("fit_transform")
        + '    fit estimator="LogisticRegression" step="classify"\n'
        '  predict_proba estimator="Pipeline"\n'
        + called.format("transform")
        + '    predict_proba estimator="LogisticRegression" step="classify"\n'
        '  score estimator="Pipeline" {score}\n'
        + called.format("transform")
        + '    score estimator="LogisticRegression" step="classify" {score}'
    )
    assert [mark.value for mark in rows.marks if mark.name == "score"] == [score, score]
    assert {span.attrs["samples"] for span in rows.spans if "samples" in span.attrs} == {150}


CALLS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "fit": (linear_model.SGDClassifier(random_state=0), (X, Y)),
    "partial_fit": (linear_model.SGDClassifier(random_state=0), (X, Y, [0, 1, 2])),
    "fit_transform": (preprocessing.StandardScaler(), (X,)),
    "fit_predict": (ensemble.IsolationForest(n_estimators=3, random_state=0), (X,)),
    "predict": (linear_model.LogisticRegression().fit(X, Y), (X,)),
    "predict_proba": (linear_model.LogisticRegression().fit(X, Y), (X,)),
    "predict_log_proba": (linear_model.LogisticRegression().fit(X, Y), (X,)),
    "decision_function": (linear_model.LogisticRegression().fit(X, Y), (X,)),
    "transform": (preprocessing.StandardScaler().fit(X), (X,)),
    "inverse_transform": (preprocessing.StandardScaler().fit(X), (X,)),
    "score": (linear_model.LogisticRegression().fit(X, Y), (X, Y)),
}


@pytest.mark.parametrize("name", CALLS)
def test_every_kind_of_call_is_one_scope(name: str) -> None:
    """Each method gives one scope and what the plain estimator returns, fitted before or not."""
    estimator, args = CALLS[name]
    expected = getattr(copy.deepcopy(estimator), name)(*args)
    ci.profile(frameworks=[])
    wrapped = ci.wrap(estimator)
    result = getattr(wrapped, name)(*args)
    if result is not wrapped:
        assert np.array_equal(result, expected)
    rows = finished()
    mark = " {score}" if name == "score" else ""
    label = f'  {name} estimator="{type(estimator).__name__}"{mark}'
    assert _tree(rows) == f"cirron.session\n{label}"


def test_a_wrapped_estimator_is_an_estimator() -> None:
    """Class, name, parameters, tags, repr, signatures and missing methods are the estimator's."""
    plain = _pipeline()
    wrapped = ci.wrap(plain)
    assert isinstance(wrapped, pipeline.Pipeline)
    assert type(wrapped).__name__ == "Pipeline"
    assert type(wrapped).__module__ == "sklearn.pipeline"
    assert repr(wrapped) == repr(plain)
    assert wrapped._repr_html_()
    assert base.is_classifier(wrapped)
    assert vars(wrapped).keys() == vars(plain).keys()
    assert wrapped.get_params().keys() == plain.get_params().keys()
    assert wrapped.get_params()["classify__C"] == 1.0
    assert inspect.signature(wrapped.fit) == inspect.signature(plain.fit)
    assert hasattr(wrapped, "predict_proba")
    assert wrapped.fit.__doc__ == plain.fit.__doc__
    wrapped.set_params(classify=linear_model.LinearRegression())
    assert not hasattr(wrapped, "predict_proba")
    assert isinstance(base.clone(wrapped), type(wrapped))
    svc = importlib.import_module("sklearn.svm").SVC
    assert hasattr(ci.wrap(svc(probability=False)), "predict_proba") is hasattr(
        svc(probability=False), "predict_proba"
    )
    scaled = ci.wrap(preprocessing.StandardScaler()).set_output(transform="default")
    assert not hasattr(scaled.fit(X), "feature_names_in_")


def test_the_estimator_given_never_changes() -> None:
    """Fitting, further fitting and setting parameters of the wrapped one leaves it as it was."""
    plain = _pipeline()
    parts = list(plain.steps)
    before = pickle.dumps(plain)
    wrapped = ci.wrap(plain)
    wrapped.fit(X, Y).set_params(classify__C=7.0)
    assert pickle.dumps(plain) == before
    assert all(one is other for one, other in zip(plain.steps, parts, strict=True))
    assert type(plain.named_steps["classify"]) is linear_model.LogisticRegression

    # partial_fit goes on in the arrays that are there.
    learnt = linear_model.SGDClassifier(random_state=0).fit(X, Y)
    state = pickle.dumps(learnt)
    further = ci.wrap(learnt)
    assert np.array_equal(further.predict(X), learnt.predict(X))
    for _ in range(3):
        further.partial_fit(X[::-1], Y[::-1])
    assert pickle.dumps(learnt) == state
    assert not np.array_equal(further.coef_, learnt.coef_)


def test_parameters_are_the_objects_given() -> None:
    """A random generator that estimators share goes on as it would have without ``wrap``."""
    generators = [np.random.RandomState(3), np.random.RandomState(3)]
    plain = linear_model.SGDClassifier(random_state=generators[0]).fit(X, Y)
    wrapped = ci.wrap(linear_model.SGDClassifier(random_state=generators[1])).fit(X, Y)
    assert wrapped.random_state is generators[1]
    assert np.array_equal(plain.coef_, wrapped.coef_)
    assert generators[0].randint(1 << 30) == generators[1].randint(1 << 30)


@pytest.mark.parametrize(
    "thing",
    [3, "text", None, [1], {"a": 1}, len, base.BaseEstimator, linear_model.LinearRegression, X],
)
def test_what_is_no_estimator_comes_back_as_it_is(thing: object) -> None:
    """Numbers, functions, classes and arrays are returned unchanged; so is a wrapped estimator."""
    assert ci.wrap(thing) is thing
    wrapped = ci.wrap(linear_model.LinearRegression())
    assert ci.wrap(wrapped) is wrapped


def test_searches_and_validation_are_recorded() -> None:
    """Each fold and candidate of a search is a scope inside of it; its means are marks."""
    ci.profile(frameworks=[])
    search = ci.wrap(
        model_selection.GridSearchCV(
            pipeline.make_pipeline(
                preprocessing.StandardScaler(), linear_model.LogisticRegression()
            ),
            {"logisticregression__C": [0.1, 1.0]},
            cv=2,
        )
    )
    search.fit(X, Y)
    search.predict(X)
    scores = model_selection.cross_val_score(ci.wrap(linear_model.LogisticRegression()), X, Y, cv=2)
    rows = finished()
    whole = rows.named("fit")[0]
    assert whole.attrs["estimator"] == "GridSearchCV"
    assert [child.name for child in rows.children(whole)] == ["fit", "score"] * 4 + ["fit"]
    for child in rows.children(whole):
        if child.name == "fit":
            steps = [one.attrs["step"] for one in rows.children(child)]
            assert steps == ["standardscaler", "logisticregression"]
    marks = [(m.name, m.attrs.get("candidate"), m.kind) for m in rows.marks_of(whole)
             if not m.name.startswith("cirron.")]  # fmt: skip
    assert marks == [
        ("mean_test_score", 0, "point"),
        ("mean_test_score", 1, "point"),
        ("best_score", None, "summary"),
    ]
    top = [span for span in rows.spans if span.parent_id == rows.one("cirron.session").id]
    top.sort(key=lambda span: span.start_ns)
    assert [span.name for span in top] == ["fit", "predict", *["fit", "score"] * 2]
    assert [m.value for s in top[2:] for m in rows.marks_of(s) if m.name == "score"] == list(scores)


def test_candidates_of_a_search_may_be_estimators() -> None:
    """Estimators among the values of a search are recorded as well."""
    steps = [("classify", linear_model.LogisticRegression())]
    grid = {"classify": [linear_model.RidgeClassifier(), linear_model.LogisticRegression()]}
    ci.profile(frameworks=[])
    ci.wrap(model_selection.GridSearchCV(pipeline.Pipeline(steps), grid, cv=2)).fit(X, Y)
    assert all(type(one).__module__.startswith("sklearn.linear_model") for one in grid["classify"])
    rows = finished()
    found = [s.attrs["estimator"] for s in rows.named("fit") if s.attrs.get("step") == "classify"]
    assert found.count("RidgeClassifier") + found.count("LogisticRegression") == 5
    assert "RidgeClassifier" in found


def test_pickles_and_copies_are_recorded_too(run_program: RunProgram, tmp_path: Path) -> None:
    """A pickle is read where nobody wrapped anything, predicts the same, and is recorded there."""
    wrapped = ci.wrap(_pipeline()).fit(X, Y)
    expected = wrapped.predict(X)
    for again in (pickle.loads(pickle.dumps(wrapped)), copy.deepcopy(wrapped), copy.copy(wrapped)):  # noqa: S301
        assert type(again) is type(wrapped)
        assert np.array_equal(again.predict(X), expected)
    (tmp_path / "model.pkl").write_bytes(pickle.dumps(wrapped))
    run = run_program(
        """
        import pickle
        from sklearn.datasets import load_iris
        from sklearn.preprocessing import scale
        with open("model.pkl", "rb") as file:
            model = pickle.load(file)
        import cirron_otel as ci
        ci.profile(frameworks=[])
        print(",".join(map(str, model.predict(scale(load_iris().data)))))
        """,
        measured=False,
    )
    assert run.stdout.strip() == ",".join(map(str, expected))
    steps = [span.attrs.get("step") for span in run.children(run.named("predict")[0])]
    assert steps == ["columns", "union", "classify"]


def test_the_same_pickle_twice_is_the_same_bytes() -> None:
    """Nothing of the recording is in a pickle, so joblib's cache finds what it has."""
    ci.profile(frameworks=[])
    model = ci.wrap(preprocessing.StandardScaler())
    with ci.scope("one"):
        first = pickle.dumps(base.clone(model))
    with ci.scope("two"):
        second = pickle.dumps(base.clone(model))
    assert first == second


def test_a_cached_pipeline_is_fitted_once(tmp_path: Path) -> None:
    """A pipeline with ``memory`` finds its fitted transformers again, as without ``wrap``."""
    steps = [("scale", preprocessing.StandardScaler()), ("fit", linear_model.LinearRegression())]
    model = ci.wrap(pipeline.Pipeline(steps, memory=str(tmp_path / "cache")))
    ci.profile(frameworks=[])
    for _ in range(2):
        with ci.scope("round"):
            model.fit(X, Y)
    rows = finished()
    scaled = [span for span in rows.spans if span.attrs.get("step") == "scale"]
    assert [span.name for span in scaled] == ["fit_transform"]


def test_exceptions_fly_on_and_are_recorded() -> None:
    """What an estimator raises is the very exception, and the scopes have it."""
    ci.profile(frameworks=[])
    model = ci.wrap(linear_model.LogisticRegression())
    with pytest.raises(ValueError, match="inconsistent numbers of samples"):
        model.fit(X, Y[:3])
    with pytest.raises(importlib.import_module("sklearn.exceptions").NotFittedError):
        model.predict(X)
    rows = finished()
    assert "inconsistent numbers" in str(rows.one("fit").attrs["error"])
    assert "NotFittedError" in str(rows.one("predict").attrs["error"])


class Opinionated(base.TransformerMixin, base.BaseEstimator, auto_wrap_output_keys=None):  # type: ignore[misc, name-defined] # by name
    """A transformer that has opted out of ``set_output`` and counts what is done to its class."""

    made: list[str] = []  # noqa: RUF012 - what is counted

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Count subclasses."""
        super().__init_subclass__(**kwargs)
        Opinionated.made.append(cls.__name__)

    def fit(self, x: Any, y: Any = None) -> Opinionated:  # noqa: ARG002 - scikit-learn's signature
        """Learn nothing."""
        self.n_features_in_ = x.shape[1]
        return self

    def transform(self, x: Any) -> Any:
        """Double it."""
        return x * 2


def test_classes_of_the_programs_own_are_left_alone() -> None:
    """Wrapping runs no ``__init_subclass__`` and turns nothing on that a class has opted out of."""
    wrapped = ci.wrap(Opinionated())
    assert Opinionated.made == []
    assert hasattr(wrapped, "set_output") is hasattr(Opinionated(), "set_output")
    ci.profile(frameworks=[])
    assert np.array_equal(wrapped.fit_transform(X), X * 2)
    assert _tree(finished()) == 'cirron.session\n  fit_transform estimator="Opinionated"'


class ByBases(base.BaseEstimator):  # type: ignore[misc, name-defined] # by name
    """Finds its parameters from class to class by the first base, as XGBoost's estimators did."""

    def __init__(self, power: int = 1) -> None:
        self.power = power

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: FBT001, FBT002
        """As XGBoost 2's."""
        params: dict[str, Any] = super().get_params(deep)
        above = copy.copy(self)
        above.__class__ = above.__class__.__bases__[0]
        if above.__class__ is not base.BaseEstimator:
            params.update(above.__class__.get_params(above, deep))
        return params

    def fit(self, x: Any, y: Any = None) -> ByBases:  # noqa: ARG002 - scikit-learn's signature
        """Learn nothing."""
        return self


def test_the_first_base_is_the_users_class() -> None:
    """An estimator that looks at the bases of its class finds its own, copied and cloned too."""
    wrapped = ci.wrap(ByBases(3))
    assert type(wrapped).__bases__ == (ByBases,)
    assert wrapped.get_params() == {"power": 3}
    assert base.clone(copy.deepcopy(wrapped)).get_params() == {"power": 3}


class Duck:
    """An estimator by its shape alone, with attributes in slots."""

    __slots__ = ("__weakref__", "power", "seen_")

    def __init__(self, power: int = 1) -> None:
        self.power = power

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002, FBT001, FBT002
        """As scikit-learn's."""
        return {"power": self.power}

    def set_params(self, **params: Any) -> Duck:
        """As scikit-learn's."""
        self.power = params["power"]
        return self

    def fit(self, x: Any, y: Any = None) -> Duck:  # noqa: ARG002
        """Count the rows."""
        self.seen_ = len(x)
        return self


def test_what_cannot_be_wrapped_is_returned_and_said(caplog: pytest.LogCaptureFixture) -> None:
    """An estimator that no subclass can stand in for comes back as it is, and the log says so."""
    duck = Duck()
    assert ci.wrap(duck) is duck
    assert "this Duck cannot be wrapped" in caplog.text


def test_metadata_routing_works() -> None:
    """Requests for metadata are kept, cloned and routed as without ``wrap``."""
    weights = np.ones(len(X))
    with importlib.import_module("sklearn").config_context(enable_metadata_routing=True):
        plain = pipeline.make_pipeline(
            preprocessing.StandardScaler().set_fit_request(sample_weight=True),
            linear_model.LogisticRegression().set_fit_request(sample_weight=False),
        )
        try:
            base.clone(plain).fit(X, Y, sample_weight=weights)
        except ValueError:
            pytest.skip("this scikit-learn routes nothing through pipelines")
        model = ci.wrap(plain)
        model.fit(X, Y, sample_weight=weights)
        base.clone(model).fit(X, Y, sample_weight=weights)
        assert model.get_metadata_routing()


@pytest.mark.slow
def test_scikit_learn_finds_nothing_wrong() -> None:
    """scikit-learn's own checks of estimators fail where they fail on a plain one."""
    checks = importlib.import_module("sklearn.utils.estimator_checks")
    ci.profile(frameworks=[])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plain = preprocessing.StandardScaler()
        failed = [
            {one["check_name"] for one in checks.check_estimator(model, on_fail=None)
             if one["status"] not in {"passed", "skipped"}}
            for model in (plain, ci.wrap(plain))
        ]  # fmt: skip
    assert failed[0] == failed[1]
    assert ci.health()["swallowed_errors"] == {}


def test_training_is_what_it_was() -> None:
    """The same bits come out, and the global random streams stand where they stood."""

    def train(model: Any) -> tuple[Any, Any, float]:
        random.seed(0)
        np.random.seed(0)
        model.fit(X, Y)
        return model.predict_proba(X), np.random.get_state()[1], random.random()

    plain = train(ensemble.RandomForestClassifier(n_estimators=5))
    ci.profile(frameworks=[])
    wrapped = train(ci.wrap(ensemble.RandomForestClassifier(n_estimators=5)))
    assert all(np.array_equal(one, other) for one, other in zip(plain, wrapped, strict=True))
    rows = finished()
    assert _tree(rows).count("\n") == 2  # trees of a forest are its own business


def test_nothing_is_recorded_without_a_recording() -> None:
    """Before ``profile()`` and after ``shutdown()`` a wrapped estimator is a plain one."""
    model = ci.wrap(linear_model.LogisticRegression()).fit(X, Y)
    ci.profile(frameworks=[])
    model.predict(X)
    ci.shutdown()
    model.predict(X)
    assert _tree(read_spool()) == 'cirron.session\n  predict estimator="LogisticRegression"'


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """``examples/sklearn_wrap.py`` shows a search over a pipeline."""
    example = Path(__file__).resolve().parents[2] / "examples" / "sklearn_wrap.py"
    runpy.run_path(str(example), run_name="__main__")
    shown = capsys.readouterr().out
    assert "step=scale" in shown
    assert "best_score" in shown
