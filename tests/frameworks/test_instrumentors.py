"""``opentelemetry-instrument`` and its instrumentors: a recording without a line of code."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel import instrumentors
from helpers import RunProgram, opentelemetry_instrument, read_spool, tree_text

#: What each instrumentor patches: modules and classes, as found from a module.
PATCHED: dict[str, tuple[str, ...]] = {
    "TorchInstrumentor": (
        "torch.nn.modules.module:Module", "torch.autograd", "torch:Tensor",
        "torch.optim.optimizer:Optimizer", "torch.optim:SGD", "torch.optim:Adam",
        "torch.utils.data:DataLoader", "torch.utils.data.dataloader:_BaseDataLoaderIter",
        "torch.distributed", "torch.nn.parallel:DistributedDataParallel",
    ),
    "SklearnInstrumentor": (
        "sklearn.base:BaseEstimator", "sklearn.base:TransformerMixin",
        "sklearn.base:ClassifierMixin",
        "sklearn.utils._set_output:_SetOutputMixin", "sklearn.linear_model:LogisticRegression",
        "sklearn.preprocessing:StandardScaler", "sklearn.pipeline:Pipeline",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _put_back() -> Iterator[None]:
    yield
    for name in dir(instrumentors):
        kind = getattr(instrumentors, name)
        if isinstance(kind, type) and name.endswith("Instrumentor") and hasattr(kind, "framework"):
            one = kind()
            if one.is_instrumented_by_opentelemetry:
                one.uninstrument()
    instrumentors._Automatic.profiler = None


def _owner(place: str) -> Any:
    module, _, name = place.partition(":")
    found = importlib.import_module(module)
    return getattr(found, name) if name else found


def _attributes(places: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {place: dict(vars(_owner(place))) for place in places}


def _changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> list[str]:
    """The attributes that are another object now, or are there or gone since."""
    return [
        f"{place}.{name}"
        for place in before
        for name in {*before[place], *after[place]}
        if name not in {"__abstractmethods__", "__warningregistry__"}
        and before[place].get(name) is not after[place].get(name)
    ]


@pytest.mark.parametrize("name", PATCHED)
def test_uninstrument_leaves_every_attribute_as_it_was(name: str) -> None:
    """While instrumented some attributes are ours; afterwards all are the objects of before."""
    for place in PATCHED[name]:
        pytest.importorskip(place.partition(":")[0])
    before = _attributes(PATCHED[name])
    one = getattr(instrumentors, name)()
    one.instrument()
    assert one.is_instrumented_by_opentelemetry
    assert _changed(before, _attributes(PATCHED[name]))
    one.uninstrument()
    assert not one.is_instrumented_by_opentelemetry
    assert _changed(before, _attributes(PATCHED[name])) == []
    assert ci.health()["flush_mode"] == "stopped"


def test_one_of_several_is_taken_away_alone() -> None:
    """Taking one framework away leaves the other's hook, and the recording, in place."""
    pytest.importorskip("sklearn")
    linear_model = importlib.import_module("sklearn.linear_model")
    plain = dict(vars(linear_model.LinearRegression))
    torch_one, sklearn_one = instrumentors.TorchInstrumentor(), instrumentors.SklearnInstrumentor()
    torch_one.instrument()
    sklearn_one.instrument()
    assert set(ci.health()["installed_hooks"]) == {"torch", "sklearn"}
    linear_model.LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])
    sklearn_one.uninstrument()
    assert ci.health()["installed_hooks"] == ["torch"]
    assert dict(vars(linear_model.LinearRegression)) == plain
    linear_model.LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])
    torch_one.uninstrument()
    assert tree_text(read_spool()) == "cirron.session\n  fit"


def test_a_recording_of_the_programs_own_stays(caplog: pytest.LogCaptureFixture) -> None:
    """Where ``profile()`` runs nothing is added to it; one that comes later takes over quietly."""
    one = instrumentors.TorchInstrumentor()
    ci.profile(frameworks=[], path="own")
    one.instrument()
    assert ci.health()["installed_hooks"] == []
    one.uninstrument()
    assert ci.health()["enabled"]
    ci.shutdown()

    one.instrument()
    assert ci.health()["installed_hooks"] == ["torch"]
    ci.profile(frameworks=[], path="later")
    assert ci.health()["installed_hooks"] == []
    with ci.scope("mine"):
        pass
    one.uninstrument()
    ci.shutdown()
    assert tree_text(read_spool("later")) == "cirron.session\n  mine"
    assert caplog.text == ""


def test_what_is_not_installed_says_what_to_do(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By hand it is an error in the log with the command to run; under the command line nothing."""
    monkeypatch.setattr("cirron_otel.hooks.is_installed", lambda _: False)
    one = instrumentors.LightningInstrumentor()
    one.instrument(skip_dep_check=True)
    assert caplog.text == ""
    one.instrument()
    assert "pip install 'cirron-otel[lightning]'" in caplog.text
    assert not one.is_instrumented_by_opentelemetry


def test_the_classes_have_the_shape_of_opentelemetrys() -> None:
    """One instance each, with the methods and the property that OpenTelemetry's base class has."""
    theirs = importlib.import_module("opentelemetry.instrumentation.instrumentor").BaseInstrumentor
    public = {name for name in vars(theirs) if not name.startswith("_")}
    for name in PATCHED:
        kind = getattr(instrumentors, name)
        assert kind() is kind()
        assert all(hasattr(kind, one) for one in public)
        assert len(kind().instrumentation_dependencies()) == 1


def test_estimators_of_all_classes_are_recorded() -> None:
    """``frameworks=["sklearn"]``: also classes made meanwhile, with no double and no loss."""
    pytest.importorskip("sklearn")
    base = importlib.import_module("sklearn.base")
    pipeline = importlib.import_module("sklearn.pipeline")
    linear_model = importlib.import_module("sklearn.linear_model")
    scaler = importlib.import_module("sklearn.preprocessing").StandardScaler
    before = _attributes(PATCHED["SklearnInstrumentor"])
    ci.profile(frameworks=["sklearn"])

    class Twice(base.TransformerMixin, base.BaseEstimator):  # type: ignore[misc, name-defined]
        """Of the program's own, defined while the hook is there."""

        def fit(self, x: Any, y: Any = None) -> Twice:  # noqa: ARG002
            """Learn nothing."""
            self.n_features_in_ = 1
            return self

        def transform(self, x: Any) -> Any:
            """Double it."""
            return [[2 * value for value in row] for row in x]

    steps = [("twice", Twice()), ("scale", scaler()), ("fit", linear_model.LinearRegression())]
    pipeline.Pipeline(steps).fit([[0.0], [1.0]], [0.0, 1.0])
    ci.wrap(linear_model.LinearRegression()).fit([[0.0], [1.0]], [0.0, 1.0])
    ci.shutdown()
    assert tree_text(read_spool(), attrs=("estimator", "step")) == (
        "cirron.session\n"
        '  fit estimator="Pipeline"\n'
        '    fit_transform estimator="Twice" step="twice"\n'
        '    fit_transform estimator="StandardScaler" step="scale"\n'
        '    fit estimator="LinearRegression" step="fit"\n'
        '  fit estimator="LinearRegression"'
    )
    assert _changed(before, _attributes(PATCHED["SklearnInstrumentor"])) == []
    assert Twice().fit_transform([[1.0]]) == [[2.0]]


PROGRAM = """
    import torch
    from sklearn.linear_model import LinearRegression
    from torch.utils.data import DataLoader, TensorDataset

    data = DataLoader(TensorDataset(torch.ones(8, 2)), batch_size=4)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for (x,) in data:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    LinearRegression().fit([[0.0], [1.0]], [0.0, 1.0])
"""


@pytest.mark.slow
def test_opentelemetry_instrument_records_a_training(tmp_path: Path) -> None:
    """``opentelemetry-instrument python train.py``: no line of code, the canonical tree."""
    if not [one for one in entry_points(group="opentelemetry_instrumentor")
            if one.value.startswith("cirron_otel.")]:  # fmt: skip
        pytest.skip("this installation of the package has no entry points yet: install it again")
    program = tmp_path / "train.py"
    program.write_text("\n".join(line[4:] for line in PROGRAM.splitlines()))
    others = "fastapi,flask,asgi,wsgi,threading"
    done = opentelemetry_instrument(
        program, timeout=200, OTEL_PYTHON_DISABLED_INSTRUMENTATIONS=others
    )
    step = "      data_load\n      forward\n      backward\n      optimizer_step\n"
    tree = tree_text(read_spool()) + "\n"
    assert tree == f"cirron.session\n  epoch[0]\n    step[0]\n{step}    step[1]\n{step}    fit\n"
    assert '"name": "optimizer_step"' in done.stdout
    session = read_spool().one("cirron.session")
    assert set(session.attrs["framework"].split(",")) >= {"torch", "sklearn"}


def test_a_child_of_a_recording_starts_none(run_program: RunProgram) -> None:
    """In a child of a process that records the carrier decides; another rank begins its own."""
    run = run_program(
        """
        import os, subprocess, sys
        import cirron_otel as ci

        CHILD = (
            "from cirron_otel import children; print(children.is_recorded_by_parent())"
        )
        ci.profile(frameworks=[])
        for more in ({}, {"RANK": "1", "WORLD_SIZE": "2"}):
            out = subprocess.run(
                [sys.executable, "-c", CHILD], env={**os.environ, **more},
                capture_output=True, text=True, check=True,
            )
            print(out.stdout.strip())
        """,
        measured=False,
    )
    assert run.stdout.split() == ["True", "False"]
