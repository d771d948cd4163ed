"""``profile(tee=...)``: what programs log to their trackers, copied, and their outages survived."""

from __future__ import annotations

import json
import sys

import pytest

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.errors import CirronDependencyError, ConfigurationError
from cirron_otel.tee.copying import MOST_VALUES, Copier, flat
from cirron_otel.tee.guarding import Guarded, is_outage
from cirron_otel.tee.wrapping import Tee
from helpers import ProgramRun, RunProgram, read_spool


def told(run: ProgramRun) -> list[tuple[str, object, object, object]]:
    """Name, value, step and library of each copied mark, in order."""
    return [
        (mark.name, mark.value, mark.attrs.get("step"), mark.attrs["tee"])
        for mark in run.marks
        if "tee" in mark.attrs
    ]


# --- the libraries themselves -------------------------------------------------------------------


def test_tensorboard_and_accelerate(run_program: RunProgram) -> None:
    """Scalars reach the tracker's file and our marks, once, with their steps; then all is back."""
    run = run_program(
        """
        import json
        import torch
        from accelerate import Accelerator
        from torch.utils.tensorboard import SummaryWriter
        import cirron_otel as ci

        before = SummaryWriter.add_scalar, SummaryWriter.add_scalars, Accelerator.log
        ci.profile(frameworks=[])
        assert (SummaryWriter.add_scalar, SummaryWriter.add_scalars, Accelerator.log) == before
        ci.shutdown()

        ci.profile(frameworks=[], tee=["tensorboard", "accelerate"], output="spool")
        writer = SummaryWriter("plain")
        for number in ci.batches(range(2)):
            writer.add_scalar("loss", torch.tensor(0.5 + number), number * 10)
            writer.add_scalars("accuracy", {"train": 0.25, "held_out": 0.125}, global_step=number)
            writer.add_scalar(tag="rate", scalar_value=0.1)
        writer.close()
        accelerator = Accelerator(log_with="tensorboard", project_dir="tracked")
        accelerator.init_trackers("project")
        accelerator.log({"acc": 0.75, "note": "text"}, step=7)
        accelerator.end_training()
        ci.shutdown()
        assert (SummaryWriter.add_scalar, SummaryWriter.add_scalars, Accelerator.log) == before

        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
        found = {}
        for folder, tag in (("plain", "loss"), ("tracked/project", "acc")):
            events = EventAccumulator(folder)
            events.Reload()
            found[tag] = [(one.step, round(one.value, 6)) for one in events.Scalars(tag)]
        print(json.dumps(found))
        """
    )
    assert told(run) == [
        ("loss", 0.5, 0, "tensorboard"),
        ("accuracy/train", 0.25, 0, "tensorboard"),
        ("accuracy/held_out", 0.125, 0, "tensorboard"),
        ("rate", 0.1, None, "tensorboard"),
        ("loss", 1.5, 10, "tensorboard"),
        ("accuracy/train", 0.25, 1, "tensorboard"),
        ("accuracy/held_out", 0.125, 1, "tensorboard"),
        ("rate", 0.1, None, "tensorboard"),
        ("acc", 0.75, 7, "accelerate"),
    ]
    steps = {span.id for span in run.named("step")}
    assert {mark.span_id for mark in run.marks if mark.name == "loss"} == steps
    assert json.loads(run.stdout) == {"loss": [[0, 0.5], [10, 1.5]], "acc": [[7, 0.75]]}


def test_wandb_that_cannot_be_reached(run_program: RunProgram) -> None:
    """An outage at ``wandb.init`` makes an offline run, and what is logged is copied."""
    run = run_program(
        """
        import json, os, sys
        os.environ.update(
            WANDB_API_KEY="a" * 40, WANDB_BASE_URL="http://127.0.0.1:9", WANDB_SILENT="true",
            WANDB_INIT_TIMEOUT="0.5", WANDB_ERROR_REPORTING="false",
        )
        import cirron_otel as ci
        profiler = ci.profile(frameworks=[], tee="wandb")
        import wandb
        init, log = wandb.init.__wrapped__, wandb.sdk.wandb_run.Run.log.__wrapped__
        run = wandb.init(project="project")
        for number in ci.batches(range(2)):
            wandb.log({"loss": 0.5, "eval": {"acc": 0.25}, "note": "text"})
        run.log({"late": 1}, step=9)
        try:
            run.log(17)
        except Exception as error:
            print(type(error).__name__)
        run.finish()
        health = profiler.health()["tee"]["wandb"]
        ci.shutdown()
        assert wandb.init is init and wandb.sdk.wandb_run.Run.log is log
        print(json.dumps([run.offline, health["copied"], health["failed"]]))
        """
    )
    assert run.stdout.splitlines() == ["TypeError", "[true, 5, 1]"]
    assert "wandb failed and your program goes on" in run.stderr
    assert "wandb sync" in run.stderr
    assert told(run) == [
        ("loss", 0.5, 0, "wandb"),
        ("eval.acc", 0.25, 0, "wandb"),
        ("loss", 0.5, 1, "wandb"),
        ("eval.acc", 0.25, 1, "wandb"),
        ("late", 1, 9, "wandb"),
    ]


def test_mlflow_whose_server_is_away(run_program: RunProgram) -> None:
    """A training whose MLflow server cannot be reached, from its start on, goes to its end.

    What it gives to the functions and to a client of its own is copied once, each with its step.
    """
    program = """
        import json, os, sys
        os.environ.update(MLFLOW_HTTP_REQUEST_MAX_RETRIES="0", MLFLOW_DISABLE_TELEMETRY="true")
        import mlflow
        import cirron_otel as ci
        from mlflow.entities import Metric
        before = {name: getattr(mlflow, name) for name in dir(mlflow) if name.startswith("log_")}
        methods = dict(vars(mlflow.MlflowClient))
        profiler = ci.profile(frameworks=[], tee=sys.argv[1])
        mlflow.set_tracking_uri("http://127.0.0.1:9")
        mlflow.set_experiment("experiment")
        with mlflow.start_run() as run:
            mlflow.log_params({"lr": 0.1})
            for number in ci.batches(range(2)):
                mlflow.log_metric("loss", 0.5, step=number)
                mlflow.log_metrics({"acc": 0.25, "f1": 0.125}, step=number)
        client = mlflow.MlflowClient()
        assert client.log_metric(run_id="r", key="auc", value=0.75, step=3) is None
        assert client.log_batch("r", [Metric("a", 2.0, 0, 4), Metric("b", 3.0, 0, 5)]) is None
        client.log_batch("r", params=[])
        client.set_terminated("r")
        health = profiler.health()["tee"]["mlflow"]
        ci.shutdown()
        assert before == {name: getattr(mlflow, name) for name in before}
        assert methods == dict(vars(mlflow.MlflowClient))
        print(json.dumps([health["copied"], health["failed"] > 0, health["skipped"] > 0]))
        """
    run = run_program(program, args=["mlflow"])
    assert json.loads(run.stdout) == [9, True, True]
    assert told(run) == [
        (name, value, step, "mlflow")
        for step in range(2)
        for name, value in (("loss", 0.5), ("acc", 0.25), ("f1", 0.125))
    ] + [("auc", 0.75, 3, "mlflow"), ("a", 2.0, 4, "mlflow"), ("b", 3.0, 5, "mlflow")]


# --- asking for it ------------------------------------------------------------------------------


def test_a_library_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tracker that is named and missing is an error that says how to get it."""
    ci.profile(frameworks=[])
    ci.shutdown()
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(CirronDependencyError, match="pip install mlflow"):
        ci.profile(frameworks=[], tee=["mlflow"])
    assert ci.health()["enabled"] is False


def test_a_name_that_is_none() -> None:
    """Another word is refused with those that there are."""
    with pytest.raises(ConfigurationError, match="wandb, tensorboard, mlflow, accelerate"):
        ci.profile(frameworks=[], tee="comet")


# --- guarding -----------------------------------------------------------------------------------


class TrackerError(Exception):
    """An error of a tracker's own kind."""


@pytest.mark.parametrize(
    ("error", "outage"),
    [
        (ConnectionResetError("gone"), True),
        (TimeoutError(), True),
        (OSError(28, "disk full"), True),
        (TrackerError("500"), True),
        (TypeError("log() missing 1 argument"), False),
        (ValueError("step must be a number"), False),
        (RuntimeError("CUDA error: device-side assert triggered"), False),
        (MemoryError(), False),
    ],
)
def test_what_an_outage_is(error: Exception, outage: bool) -> None:  # noqa: FBT001
    """Errors of network, disk and tracker are; mistakes of the program are not."""
    assert is_outage(error) is outage


def test_a_tracker_that_is_out_is_left_alone_as_long_as_it_took() -> None:
    """After a call that took 40 s in vain the next ones return at once, for 40 s."""
    ci.profile(frameworks=[])
    now = [0.0]
    guarded = Guarded(recorder._current, "tracker", clock=lambda: now[0])
    calls = []

    def log(seconds: float) -> str:
        calls.append(now[0])
        now[0] += seconds
        if seconds:
            raise TrackerError("504")
        return "logged"

    assert guarded.call(log, (40.0,), {}) is None
    now[0] = 79.0
    assert guarded.call(log, (0.0,), {}) is None
    now[0] = 81.0
    assert guarded.call(log, (0.0,), {}) == "logged"
    assert calls == [0.0, 81.0]
    assert (guarded.failed, guarded.skipped) == (1, 1)
    with pytest.raises(TypeError):
        guarded.call(log, (), {})
    guarded.active = False
    with pytest.raises(TrackerError):
        guarded.call(log, (1.0,), {})


def test_a_wrapped_function_is_the_same_to_its_caller() -> None:
    """Result, exceptions and signature stay; a value that cannot be read breaks nothing."""

    class Library:
        """A tracker."""

        def log(self, name: str, value: float = 1.0) -> str:
            """Log."""
            if value < 0:
                raise ValueError(name)
            return f"{name}={value}"

    original = Library.log
    ci.profile(frameworks=[])
    tee = Tee(recorder._current, "tracker")
    tee.wrap(Library, "log", lambda _self, name, value=1.0: ([(name, value)], None))
    assert Library().log("a", 2.0) == "a=2.0"
    assert Library.log.__doc__ == "Log."
    with pytest.raises(ValueError, match="b"):
        Library().log("b", -1.0)
    with pytest.raises(TypeError):
        Library().log()
    tee.uninstrument()
    assert Library.log is original
    ci.shutdown()
    assert [(mark.name, mark.value) for mark in read_spool().marks] == [("a", 2.0), ("b", -1.0)]


def test_values_that_are_no_numbers_are_passed_over() -> None:
    """Text, images and empty mappings are the tracker's alone; a flood is cut and counted."""
    ci.profile(frameworks=[])
    copier = Copier(recorder._current, "tracker")
    copier.copy(flat({"a": 1, "b": {"c": True, "d": {}}, "e": "text", "f": None, "g": [1, 2]}), "7")
    copier.copy(((f"n{i}", i) for i in range(MOST_VALUES + 5)), object())
    losses = ci.health()["losses"]
    ci.shutdown()
    marks = read_spool().marks
    assert [(m.name, m.value) for m in marks[:2]] == [("a", 1), ("b.c", True)]
    assert [m.attrs["step"] for m in marks if "step" in m.attrs] == [7, 7]
    assert len(marks) == 2 + MOST_VALUES
    assert losses == {"tee_values": 5}
