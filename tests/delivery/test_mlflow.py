"""A real backend: what a run left in the spool is what MLflow shows, by every way to it.

MLflow lies in an environment of its own; `make counterparts` makes it, and without it these tests
fail.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cirron_otel.batch import encode
from cirron_otel.otlp.batches import read_batch, read_later
from cirron_otel.otlp.gathering import Gatherer
from cirron_otel.otlp.rows import OtlpSpan
from delivery.counterparts import Mlflow, free_port, running_mlflow, running_rotel
from helpers import RunProgram

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]

#: A run with everything a span may hold; where it goes is said by the environment.
PROGRAM = """
import cirron_otel as ci

ci.profile(frameworks=[], run_id="mlflow-test", trace_max_spans=30)
for epoch in ci.epochs(range(2)):
    for step in ci.batches(range(6)):
        with ci.scope("forward", shape=[2, 3], none=None, deep={"a": [1, None]}, flag=True):
            ci.mark("loss", 1.0 / (1 + step + 6 * epoch))
            ci.mark("bad", float("nan"))
    ci.mark("val_accuracy", 0.5 + epoch, kind="summary", split="val")
try:
    with ci.scope("checkpoint", index=3, lr=0.1, path="äöü/model.pt") as scope:
        scope.add_event("written", {"bytes": 2**40})
        raise ValueError("disk full")
except ValueError:
    pass
ci.shutdown()
"""
_names = itertools.count()


@pytest.fixture(scope="module")
def mlflow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mlflow]:
    """One server for all tests here: it needs long to start."""
    with running_mlflow(tmp_path_factory.mktemp("mlflow")) as server:
        yield server


@pytest.fixture
def experiment(mlflow: Mlflow) -> str:
    """The id of an experiment that is the test's own."""
    return mlflow.experiment(f"test {next(_names)}")


def expected(directory: Path) -> dict[str, dict[str, Any]]:
    """What is in a spool, in the form in which :class:`Mlflow` tells it."""
    files = sorted(directory.glob("spool/*.json"))
    batches = [read_batch(file.read_bytes()) for file in files]
    gatherer = Gatherer()
    return {
        span.span_id: _plain(span)
        for i, batch in enumerate(batches)
        for span in gatherer.spans(
            batch, lambda after=i + 1: (read_later(encode(one)) for one in batches[after:])
        )
    }


def _plain(span: OtlpSpan) -> dict[str, Any]:
    codes = {0: 0, 1: "STATUS_CODE_OK", 2: "STATUS_CODE_ERROR"}
    return {
        "trace_id": span.trace_id,
        "parent_id": span.parent_id,
        "name": span.name,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "attrs": span.attrs,
        "events": [
            (event.ts_ns, event.name, {key: _shown(value) for key, value in event.attrs.items()})
            for event in span.events
        ],
        "status": (codes[span.status], span.status_message),
    }


def _shown(value: Any) -> Any:
    return "NaN" if isinstance(value, float) and math.isnan(value) else value


def check(found: dict[str, dict[str, Any]], directory: Path) -> None:
    """Every span is there, and each is exact."""
    wanted = expected(directory)
    assert sorted(span["name"] for span in found.values()) == sorted(
        span["name"] for span in wanted.values()
    )
    for key, span in wanted.items():
        assert found[key] == span
    assert len({span["trace_id"] for span in wanted.values()}) >= 2


def replay(url: str, experiment: str, *arguments: str) -> None:
    """Send the test's run by hand."""
    subprocess.run(
        [sys.executable, "-m", "cirron_otel.cli.main", "traces", "replay", "--otlp", url,
         "--header", f"x-mlflow-experiment-id={experiment}", *arguments],
        check=True, capture_output=True, timeout=100,
    )  # fmt: skip


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json"])
def test_a_run_is_read_back_exactly(
    run_program: RunProgram, mlflow: Mlflow, experiment: str, protocol: str
) -> None:
    """A run that exports while it trains is in MLflow as it is in the spool, to the nanosecond."""
    run = run_program(
        PROGRAM,
        env={
            "OTEL_EXPORTER_OTLP_ENDPOINT": mlflow.url,
            "OTEL_EXPORTER_OTLP_HEADERS": f"x-mlflow-experiment-id={experiment}",
            "OTEL_EXPORTER_OTLP_PROTOCOL": protocol,
            "CIRRON_EXIT_BUDGET": "60",
        },
        timeout=120,
    )
    wanted = expected(run.output_dir)
    found = mlflow.wait_for(experiment, len(wanted))
    announced = [key for key, span in found.items() if span["attrs"].get("cirron.pending")]
    check({key: span for key, span in found.items() if key not in announced}, run.output_dir)


def test_through_a_collector(
    run_program: RunProgram, mlflow: Mlflow, experiment: str, tmp_path: Path
) -> None:
    """A collector in front of MLflow changes nothing, over gRPC."""
    run = run_program(PROGRAM)
    header = f"x-mlflow-experiment-id={experiment}"
    with running_rotel(tmp_path / "rotel", mlflow.url, header) as collector:
        replay(collector.grpc, experiment)
        collector.stop()
    check(mlflow.wait_for(experiment, len(expected(run.output_dir))), run.output_dir)


def test_replay_restores_what_a_collector_lost(
    run_program: RunProgram, mlflow: Mlflow, experiment: str, tmp_path: Path
) -> None:
    """A collector took the run, could not pass it on, and was killed; a replay brings it all."""
    run = run_program(PROGRAM)
    header = f"x-mlflow-experiment-id={experiment}"
    nowhere = f"http://127.0.0.1:{free_port()}"
    with running_rotel(tmp_path / "first", nowhere, header) as collector:
        replay(collector.http, experiment)
        collector.kill()
    assert mlflow.spans(experiment) == {}
    with running_rotel(tmp_path / "second", mlflow.url, header) as collector:
        replay(collector.http, experiment)
        collector.stop()
    check(mlflow.wait_for(experiment, len(expected(run.output_dir))), run.output_dir)
    # Once more: what is there already is there once.
    replay(mlflow.url, experiment)
    check(mlflow.spans(experiment), run.output_dir)
