"""Which run a process belongs to, which attempt and rank it is, and what its scopes used."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cirron_otel as ci
from helpers import RunProgram, read_spool

#: What every rank of a job knows of the others.
GROUP = {"WORLD_SIZE": "4", "RANK": "1", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}
GIVEN: list[tuple[dict[str, str], str | None]] = [
    ({}, None),
    ({"SLURM_JOB_ID": "77"}, "77"),
    ({"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "elastic"}, "elastic"),
    ({"SLURM_JOB_ID": "77", "TORCHELASTIC_RUN_ID": "none"}, "77"),
    ({"TORCHELASTIC_RUN_ID": "elastic", "CIRRON_RUN_ID": "mine"}, "mine"),
    ({"KUBEFLOW_TRAINING_JOB_ID": "kf", "K8S_JOB_UID": "uid"}, "kf"),
    ({"K8S_JOB_UID": "uid", "K8S_JOB_NAME": "train"}, "uid"),
    ({"K8S_JOB_NAME": "train"}, "train"),
    ({"RAY_JOB_ID": "02000000"}, None),
    ({"RAY_JOB_ID": "02000000", **GROUP}, "ray-02000000-10.0.0.1-29500"),
    (GROUP, f"10.0.0.1-29500-{os.getppid()}"),
    ({**GROUP, "LOCAL_WORLD_SIZE": "4"}, f"10.0.0.1-29500-{os.getppid()}"),
    ({**GROUP, "LOCAL_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}, "10.0.0.1-29500"),
]


@pytest.mark.parametrize(("environment", "expected"), GIVEN)
def test_the_runs_id(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str | None
) -> None:
    """The id that is given counts, then the launcher's, then what ranks share; else a new one."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = []
    for _ in range(2):
        profiler = ci.profile(frameworks=[])
        found.append(profiler.health()["run_id"])
        ci.shutdown()
    if expected is None:
        assert found[0] != found[1]
    else:
        assert found == [expected, expected]
    assert {batch.resource["cirron.run.id"] for batch in read_spool().batches} == set(found)


def test_what_the_scheduler_says_is_on_the_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's and a pod's variables are resource attributes; those that are not set are absent."""
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NAME", "train")
    monkeypatch.setenv("K8S_POD_NAME", "train-0")
    ci.profile(frameworks=[])
    ci.shutdown()
    resource = read_spool().batches[-1].resource
    found = {key: value for key, value in resource.items() if key.startswith(("slurm.", "k8s."))}
    assert found == {
        "slurm.job.id": "77", "slurm.job.name": "train", "k8s.pod.name": "train-0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, "program"),
        ({"OTEL_RESOURCE_ATTRIBUTES": "service.name=attributes,a=b"}, "attributes"),
        (
            {"OTEL_SERVICE_NAME": "named", "OTEL_RESOURCE_ATTRIBUTES": "service.name=attributes"},
            "named",
        ),
    ],
)
def test_the_services_name(
    run_program: RunProgram, environment: dict[str, str], expected: str
) -> None:
    """The program's name, unless OpenTelemetry's own variables give another."""
    run = run_program(
        "import cirron_otel as ci\nci.profile(frameworks=[])\nci.shutdown()\n", env=environment
    )
    assert {batch.resource["service.name"] for batch in run.batches} == {expected}


def test_attempts_count_up_and_steps_go_on() -> None:
    """Report 111: a run that starts again is the next attempt; its steps go on where it says."""
    for start in (0, 5):
        profiler = ci.profile(frameworks=[], run_id="again", start_iteration=start)
        for _ in ci.batches(range(10 - start)):
            pass
        assert profiler.health()["attempt"] == (1 if start == 0 else 2)
        ci.shutdown()
    batches = read_spool().batches
    steps = [
        (batch.resource["cirron.run.attempt"], span.iteration)
        for batch in batches
        for span in batch.spans
        if span.name == "step"
    ]
    assert sorted(steps) == [(1, n) for n in range(10)] + [(2, n) for n in range(5, 10)]
    (state,) = Path(".cirron/run").glob("*.state")
    saved = json.loads(state.read_text())
    assert (saved["run_id"], saved["attempt"], saved["iteration"]) == ("again", 2, 10)


def test_another_run_or_a_broken_state_is_attempt_one() -> None:
    """Attempts are counted per run id; a state file nobody can read is passed over."""
    for run_id in ("a", "b"):
        profiler = ci.profile(frameworks=[], run_id=run_id)
        assert profiler.health()["attempt"] == 1
        ci.shutdown()
    for state in Path(".cirron/run").glob("*.state"):
        state.write_text("{")
    profiler = ci.profile(frameworks=[], run_id="a")
    assert profiler.health()["attempt"] == 1


def test_what_scopes_used() -> None:
    """``resources`` fills CPU time and memory on every scope, the session included."""
    ci.profile(frameworks=[], resources=["cpu", "memory"])
    with ci.scope("work"):
        kept = bytearray(b"x" * 50_000_000)
        total = sum(range(1_000_000))
    ci.shutdown()
    assert (len(kept), total > 0) == (50_000_000, True)
    rows = read_spool()
    work, session = rows.one("work"), rows.one("cirron.session")
    for span in (work, session):
        assert 0 < (span.cpu_ns or 0) <= span.end_ns - span.start_ns + 20_000_000
        assert (span.memory_peak_bytes or 0) > 50_000_000
    assert (session.cpu_ns or 0) >= (work.cpu_ns or 0)


def test_what_scopes_used_is_not_asked_unless_wanted() -> None:
    """Without ``resources`` both are null; with one, the other is."""
    ci.profile(frameworks=[], resources=["cpu"])
    with ci.scope("work"):
        pass
    ci.shutdown()
    work = read_spool().one("work")
    assert (work.cpu_ns is not None, work.memory_peak_bytes) == (True, None)


RANK = """
    import cirron_otel as ci

    ci.profile(frameworks=[])
    for _ in ci.batches(range(3)):
        with ci.scope("work"):
            ci.mark("loss", 0.5)
    ci.shutdown()
"""


def test_two_ranks_write_into_one_directory(tmp_path: Path, run_program: RunProgram) -> None:
    """Reports 113 and 115: one run, two sessions in the list, the rank on every span."""
    for rank in range(2):
        run = run_program(
            RANK,
            env={
                "RANK": str(rank),
                "WORLD_SIZE": "2",
                "TORCHELASTIC_RUN_ID": "both",
                "TORCHELASTIC_RESTART_COUNT": str(rank),
            },
        )
    by_pid: dict[int | None, set[int]] = {}
    for span in run.spans:
        by_pid.setdefault(span.pid, set()).add(span.rank)
    assert sorted(by_pid.values()) == [{0}, {1}]
    assert len(run.spans) == 2 * (1 + 1 + 3 * 3)
    resources = [batch.resource for batch in run.batches]
    assert {found["cirron.run.id"] for found in resources} == {"both"}
    assert {found["cirron.run.attempt"] for found in resources} == {1}
    assert {found["service.instance.id"] for found in resources} == {"both-rank0", "both-rank1"}
    listed = subprocess.run(
        [sys.executable, "-m", "cirron_otel.cli.main", "traces", "list", "--json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=30, check=True,
    )  # fmt: skip
    assert len(json.loads(listed.stdout)["sessions"]) == 2


def test_no_file_passes_four_megabytes() -> None:
    """Report 53: closed rows, and open scopes that are large together, stay under the limit."""
    large = {f"key{n}": "x" * 60_000 for n in range(11)}
    ci.profile(frameworks=[])
    scopes = [ci.scope("large", **large) for _ in range(12)]
    for scope in scopes:
        scope.__enter__()
    assert ci.flush()
    assert len(read_spool().open) == 13
    for scope in reversed(scopes):
        scope.__exit__(None, None, None)
    ci.shutdown()
    sizes = [file.stat().st_size for file in Path(".cirron/spool").iterdir()]
    assert len(sizes) > 2
    assert max(sizes) < 4_000_000
    closed = read_spool().named("large")
    assert len(closed) == 12
    assert all(span.attrs == large for span in closed)
