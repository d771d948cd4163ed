"""How far a training is: as numbers, as a line, as marks, and for Kubeflow's status server."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.driven import DrivenLoop
from cirron_otel.recorder import Recorder
from cirron_otel.run import operations, reporter
from cirron_otel.run.closing import clock, table
from cirron_otel.run.progress import Plan, Progress
from helpers import read_spool


@pytest.mark.parametrize(
    ("plan", "fraction", "left"),
    [
        (Plan(1, 5, epochs=4, steps=10), 0.375, 25),
        (Plan(0, 0, epochs=2, steps=5), 0.0, 10),
        (Plan(3, 12, epochs=4, steps=10), 1.0, 0),
        (Plan(9, 3, total=200, done=50), 0.25, 150),
        (Plan(0, 3, steps=10), None, None),
        (Plan(0, 3, epochs=10), None, None),
    ],
)
def test_a_plan(plan: Plan, fraction: float | None, left: int | None) -> None:
    """A share is only said where somebody said how much there is (C.107)."""
    assert (plan.fraction(), plan.left()) == (fraction, left)


def test_the_rate_is_that_of_this_attempt() -> None:
    """Resumed at iteration 10,000 a training is no faster than it is (A.104)."""
    progress = Progress()
    for second in range(10):
        progress.note(float(second), 10_000 + 5 * second)
    progress.plan = Plan(1, 0, epochs=2, steps=100)
    assert progress.rate() == 5
    assert progress.eta() == 20
    assert progress.line() == "epoch 2/2  step 0/100  50%  5 steps/s  20.0 s left"


def test_the_rate_is_the_latest() -> None:
    """What is longer ago than two minutes does not count."""
    progress = Progress()
    for second in range(400):
        progress.note(float(second), second if second < 200 else 200 + 10 * (second - 200))
    assert progress.rate() == pytest.approx(10)


def test_lengths_for_people() -> None:
    """Seconds below a minute, then a clock."""
    assert [clock(s) for s in (0.0123, 9.5, 59.94, 62, 12_310)] == [
        "0.0123 s", "9.5 s", "59.9 s", "1:02", "3:25:10",
    ]  # fmt: skip
    assert table({"compute": 0.0}, outcome="failed", steps=0)[0].startswith("this run: failed")


def recorder_of(profiler: Any) -> Recorder:
    """What a framework's hook is given."""
    rec: Recorder = profiler._rec
    return rec


class _Status(BaseHTTPRequestHandler):
    """Keeps what it is sent with the server."""

    def do_POST(self) -> None:
        """Take a status."""
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.got.append(  # type: ignore[attr-defined]
            (self.headers["Authorization"], json.loads(body)["trainerStatus"])
        )
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def status_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[list[tuple[str, dict[str, Any]]]]:
    """A status server as Kubeflow Trainer's environment names it, and what it has got."""
    server = HTTPServer(("127.0.0.1", 0), _Status)
    server.got = []  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    (tmp_path / "token").write_text("secret\n", encoding="utf-8")
    monkeypatch.setenv("KUBEFLOW_TRAINER_STATUS_URL", f"http://127.0.0.1:{server.server_port}/s")
    monkeypatch.setenv("KUBEFLOW_TRAINER_STATUS_TOKEN", str(tmp_path / "token"))
    yield server.got  # type: ignore[attr-defined]
    server.shutdown()
    server.server_close()
    thread.join()


def test_progress_everywhere(
    status_server: list[tuple[str, dict[str, Any]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Marks for the metrics, health, and Kubeflow's server get the same, the end included."""
    monkeypatch.setattr(operations, "MARKS_EVERY_S", 0.0)
    monkeypatch.setattr(reporter, "LINE_EVERY_S", 0.02)
    monkeypatch.setattr(reporter, "SEND_EVERY_S", 0.02)
    ci.profile(frameworks=[], otlp="none", flush_interval=0.02)
    seen = []
    for _ in ci.epochs(range(2)):
        for i in ci.batches([0] * 8):
            time.sleep(0.05)
            if i == 0:
                seen.append(ci.health()["run"]["progress"])
    ci.shutdown()
    assert not [one for one in threading.enumerate() if one.name == reporter.THREAD_NAME]
    marks = [mark for mark in read_spool().marks if mark.name == semconv.PROGRESS]
    values = [mark.value for mark in marks]
    assert values == sorted(values)  # type: ignore[type-var]
    assert values[-1] == 1.0
    assert any(value not in (0.0, 1.0) for value in values)
    assert seen[-1] is not None
    token, last = status_server[-1]
    assert token == "Bearer secret"  # noqa: S105 - the one written above
    assert last["progressPercentage"] == 100
    assert last["estimatedRemainingSeconds"] == 0
    assert {"name": "epoch", "value": "1"} in last["metrics"]
    assert all(0 <= one["progressPercentage"] <= 100 for _, one in status_server)


def test_a_framework_says_how_much_there_is() -> None:
    """Steps in all where it knows them, else epochs of so many steps; resumes count on."""
    rec = recorder_of(ci.profile(frameworks=[], otlp="none", flush_interval=60, start_iteration=40))
    for total, epochs, expected in ((80, None, 0.5125), (None, 4, 0.275)):
        loop = DrivenLoop(rec, "trainer")
        loop.begin_fit()
        loop.total_steps, loop.total_epochs = total, epochs
        loop.begin_epoch(1, steps=10)
        for iteration in (40, 41):
            loop.begin_step(iteration=iteration if total else None)
        ci.flush()
        assert ci.health()["run"]["progress"] == pytest.approx(expected)
        loop.end_fit()


def test_no_server_no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without anything to report to there is no thread; other ranks than the first have none."""
    ci.profile(frameworks=[], otlp="none")
    assert not [one for one in threading.enumerate() if one.name == reporter.THREAD_NAME]
    ci.shutdown()
    monkeypatch.setenv("KUBEFLOW_TRAINER_STATUS_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("KUBEFLOW_TRAINER_STATUS_TOKEN", "/nowhere")
    monkeypatch.setenv("RANK", "1")
    ci.profile(frameworks=[], otlp="none")
    assert not [one for one in threading.enumerate() if one.name == reporter.THREAD_NAME]


def test_a_server_that_is_gone_does_no_harm(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once in the log, and the training goes on and ends."""
    monkeypatch.setattr(reporter, "LINE_EVERY_S", 0.02)
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_URL", "http://127.0.0.1:9/")
    monkeypatch.setenv("KUBEFLOW_TRAINER_SERVER_TOKEN", "/nowhere")
    profiler = ci.profile(frameworks=[], otlp="none", flush_interval=0.02)
    for _ in ci.epochs(range(1)):
        for _ in ci.batches([0] * 5):
            time.sleep(0.03)
    ci.shutdown()
    assert profiler.health()["run"]["outcome"] == "completed"
    assert sum("progress cannot be reported" in one for one in caplog.messages) == 1
