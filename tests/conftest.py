"""Fixtures of every test: a clean environment, a directory of its own, no scope left open."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from textwrap import dedent

import hypothesis
import pytest

from helpers import ProgramRun, RunProgram, StartProgram, read_batches

SRC = Path(__file__).resolve().parent.parent / "src"

_OURS = ("CIRRON_", "K8S_", "KUBEFLOW_", "OTEL_", "RAY_", "SLURM_", "TORCHELASTIC_")
_OTHERS = (
    "BAGGAGE",
    "COLUMNS",
    "FORCE_COLOR",
    "GROUP_RANK",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "NO_COLOR",
    "RANK",
    "TRACEPARENT",
    "TRACESTATE",
    "WORLD_SIZE",
)

# Where this stands in the environment, coverage measures a Python process from its start. A process
# of a test is measured only where the test says so: it costs time, loads modules, and writes files.
_COVERAGE = "COVERAGE_PROCESS_CONFIG"
_MEASURE = {_COVERAGE: os.environ[_COVERAGE]} if _COVERAGE in os.environ else {}

# Busy machines make single examples slow; that says nothing about the code under test.
hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture(autouse=True)
def _clean_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """No setting of the person or the job that runs the tests reaches the code under test.

    The working directory is the test's ``tmp_path``, so that the default output directory
    ``./.cirron`` is too; the home directory is empty; errors of our own are raised.
    """
    for name in list(os.environ):
        if name.startswith(_OURS) or name in (*_OTHERS, _COVERAGE):
            monkeypatch.delenv(name)
    monkeypatch.setenv("CIRRON_OTEL_STRICT", "1")
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.chdir(tmp_path)


@pytest.fixture(autouse=True)
def _no_scope_left_open(_clean_environment: None) -> Iterator[None]:
    """Shut the recorder down after each test, and fail the test that left a scope open.

    Only what is loaded is looked at: a test of the lower storeys loads no OpenTelemetry.
    """
    yield
    left = _current_span_name()
    shutdown = getattr(sys.modules.get("cirron_otel"), "shutdown", None)
    if shutdown is not None:
        shutdown()
    context = sys.modules.get("opentelemetry.context")
    if left is not None and context is not None:
        context.attach(context.Context())  # the next test starts without it
    assert left in (None, "cirron.session"), f"the scope {left!r} was left open"


def _current_span_name() -> str | None:
    """The name of the running span that is current in this thread, if there is one."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return None
    span = trace.get_current_span()
    return str(getattr(span, "name", span)) if span.is_recording() else None


def _environment(extra: Mapping[str, str] | None) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(SRC), os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **(extra or {})}


@pytest.fixture
def run_program(tmp_path: Path) -> RunProgram:
    """Run a program text as a process of its own, to its end, and read the spool it leaves.

    It is a real file, ``program.py`` in the test's directory, because children started by
    ``spawn`` import it again. ``expect`` is the exit status (negative: minus the signal's number);
    when it is another one the test fails with what the program wrote to stderr. Take
    ``measured=False`` for a program that looks at its own modules, limits or speed.
    """

    def run(
        source: str,
        env: Mapping[str, str] | None = None,
        *,
        args: Sequence[str] = (),
        expect: int | None = 0,
        timeout: float = 50,
        measured: bool = True,
    ) -> ProgramRun:
        program = tmp_path / "program.py"
        program.write_text(dedent(source), encoding="utf-8")
        environment = _environment({**(_MEASURE if measured else {}), **(env or {})})
        completed = subprocess.run(
            [sys.executable, str(program), *args],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        if expect is not None and completed.returncode != expect:
            pytest.fail(f"exit status {completed.returncode}, not {expect}:\n{completed.stderr}")
        output_dir = tmp_path / environment.get("CIRRON_OUTPUT_DIR", ".cirron")
        return ProgramRun(read_batches(output_dir), completed, output_dir)

    return run


@pytest.fixture
def start_program(tmp_path: Path) -> Iterator[StartProgram]:
    """Start a program text and leave it running, for tests that send signals to it.

    Its stdout and stderr are pipes; whatever still runs when the test ends is killed.
    """
    running: list[subprocess.Popen[str]] = []

    def start(source: str, env: Mapping[str, str] | None = None) -> subprocess.Popen[str]:
        program = tmp_path / f"program{len(running)}.py"
        program.write_text(dedent(source), encoding="utf-8")
        process = subprocess.Popen(
            [sys.executable, str(program)],
            cwd=tmp_path,
            env=_environment(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()
