"""The three ways to deliver: a thread, a helper process, and a program of its own."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

import cirron_otel as ci
from cirron_otel.cli.main import main
from cirron_otel.forward_process import ForwardProcess
from delivery.platform_server import PlatformServer
from delivery.receivers import record, until
from helpers import RunProgram, StartProgram, read_spool

MODES = ["thread", "process"]
PROGRAM = """
import sys, time
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=0.05)
for k in range(5):
    with ci.scope("step", index=k):
        ci.mark("loss", 1.0 / (k + 1))
"""


def environment(server: PlatformServer, mode: str, **more: str) -> dict[str, str]:
    """What a program needs to deliver to the server."""
    return {
        "CIRRON_API_KEY": server.key,
        "CIRRON_API_ENDPOINT": server.url,
        "CIRRON_FORWARD": mode,
        # A busy machine starts a helper slowly; a test of that limit sets it itself.
        "CIRRON_EXIT_BUDGET": "30",
        **more,
    }


def use(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]) -> None:
    """The same for this process."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize("mode", MODES)
def test_all_that_was_recorded_is_delivered_by_the_end(run_program: RunProgram, mode: str) -> None:
    """At the end of the program the receiver has every row of the spool, the session's too."""
    with PlatformServer() as server:
        run = run_program(PROGRAM, environment(server, mode))
        assert {row["id"] for row in server.spans} == {row.id for row in run.spans}
        assert {row["id"] for row in server.marks} == {row.id for row in run.marks}
        assert "cirron.session" in {row["name"] for row in server.spans}
        assert not server.repeats
    assert run.stderr == ""


@pytest.mark.parametrize("mode", MODES)
def test_health_tells_of_each_destination(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """While it runs and after its end, health() says where to, how much, and what waits."""
    with PlatformServer() as server:
        use(monkeypatch, environment(server, mode))
        profiler = ci.profile(frameworks=[], flush_interval=0.05)
        with ci.scope("step"):
            pass
        until(lambda: any(d["delivered"] for d in ci.health()["destinations"]))
        health = ci.health()
        assert (health["transport"], health["forward"]) == ("http", mode)
        [state] = health["destinations"]
        assert state["name"] == "platform"
        assert server.url in state["description"]
        assert state["last_error"] is None
        profiler.shutdown()
        [state] = profiler.health()["destinations"]
        assert state["queue_batches"] == 0
        assert state["delivered"] == len(server.committed)
    assert ci.health()["destinations"] == []


def test_without_a_destination_nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files only: no thread, no process, and health() says so."""
    monkeypatch.setenv("CIRRON_FORWARD", "process")
    profiler = ci.profile(frameworks=[])
    health = ci.health()
    assert (health["transport"], health["destinations"]) == ("file_only", [])
    assert not psutil.Process().children()
    profiler.shutdown()
    assert not Path(".cirron/cursors").exists()


def test_off_delivers_nothing_and_a_sidecar_does(
    run_program: RunProgram, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """With forward=off the program touches no network; `cirron-otel forward` beside it delivers."""
    with PlatformServer() as server:
        variables = environment(server, "off")
        run = run_program(PROGRAM, variables)
        assert not server.requests
        use(monkeypatch, variables)
        assert main(["forward", "--once", str(tmp_path)]) == 0
        assert {row["id"] for row in server.spans} == {row.id for row in run.spans}


def test_the_next_run_delivers_what_the_last_one_left(
    run_program: RunProgram,
) -> None:
    """A run without a receiver leaves its batches, says so in one line, and the next sends them."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    nowhere = {
        "CIRRON_API_KEY": "test-key",
        "CIRRON_API_ENDPOINT": f"http://127.0.0.1:{port}",
        "CIRRON_EXIT_BUDGET": "0.2",
    }
    first = run_program(PROGRAM, nowhere)
    lines = [line for line in first.stderr.splitlines() if "not delivered yet" in line]
    assert len(lines) == 1
    assert re.search(r"\d+ batch(es)? to platform http://", lines[0])
    assert f"cirron-otel spool flush --dir {first.output_dir}" in lines[0]
    with PlatformServer() as server:
        second = run_program(PROGRAM, environment(server, "thread"))
        delivered = {row["id"] for row in server.spans}
    assert {row.id for row in first.spans} < delivered
    assert {row.id for row in second.spans} == delivered


@pytest.mark.parametrize("mode", MODES)
def test_what_a_killed_program_left_open_is_closed_and_delivered(
    start_program: StartProgram, run_program: RunProgram, mode: str
) -> None:
    """After kill -9 the helper, or the next run, sends the open scopes closed as recovered."""
    source = PROGRAM + "ci.scope('outer').__enter__()\nci.flush()\nprint('open', flush=True)\n"
    with PlatformServer() as server:
        process = start_program(source + "time.sleep(60)\n", environment(server, mode))
        assert process.stdout is not None
        assert process.stdout.readline() == "open\n"
        if mode == "process":
            until(lambda: len(server.spans) >= 5)
        process.kill()
        process.wait()
        if mode == "thread":
            run_program(PROGRAM, environment(server, mode))
        until(lambda: any(row["name"] == "outer" for row in server.spans))
        [outer] = [row for row in server.spans if row["name"] == "outer"]
        assert outer["attrs"]["recovered"] is True
        assert outer["end_ns"] >= outer["start_ns"]


@pytest.mark.parametrize("mode", MODES)
def test_ranks_of_a_job_share_a_directory(start_program: StartProgram, mode: str) -> None:
    """When all ranks have ended everything is delivered, by whichever of them held the place."""
    with PlatformServer() as server:
        ranks = [
            start_program(PROGRAM, environment(server, mode, RANK=str(rank), WORLD_SIZE="3"))
            for rank in range(3)
        ]
        for process in ranks:
            _, stderr = process.communicate(timeout=50)
            assert process.returncode == 0
            assert stderr == ""
        rows = read_spool()
        assert {row.rank for row in rows.spans} == {0, 1, 2}
        assert {row["id"] for row in server.spans} == {row.id for row in rows.spans}


def test_the_helper_ends_with_its_parent(start_program: StartProgram) -> None:
    """After kill -9 of the program its helper is gone soon, also while a forked child lives on."""
    source = """
    import os, sys, time
    import cirron_otel as ci
    from cirron_otel import recorder
    ci.profile(frameworks=[], flush_interval=0.05)
    delivery = recorder._current.delivery
    while delivery.pid is None:
        time.sleep(0.01)
    child = os.fork()
    if child == 0:
        time.sleep(60)
        os._exit(0)
    print(delivery.pid, child, flush=True)
    time.sleep(60)
    """
    with PlatformServer(default="hang") as server:
        process = start_program(source, environment(server, "process", CIRRON_EXIT_BUDGET="0.5"))
        assert process.stdout is not None
        helper, child = map(int, process.stdout.readline().split())
        until(lambda: server.requests)
        assert psutil.pid_exists(helper)
        process.kill()
        process.wait()
        until(lambda: not psutil.pid_exists(helper))
        assert psutil.pid_exists(child)
        os.kill(child, signal.SIGKILL)


def test_a_helper_that_dies_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill -9 of the helper loses nothing: another one goes on where it was."""
    with PlatformServer() as server:
        use(monkeypatch, environment(server, "process"))
        profiler = ci.profile(frameworks=[], flush_interval=0.05)
        delivery = profiler._rec.delivery  # type: ignore[union-attr]
        assert isinstance(delivery, ForwardProcess)
        with ci.scope("first"):
            pass
        until(lambda: any(row["name"] == "first" for row in server.spans))
        first = delivery.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        with ci.scope("second"):
            pass
        until(lambda: any(row["name"] == "second" for row in server.spans))
        assert delivery.pid != first
        assert ci.health()["forward_restart_count"] == 1
        profiler.shutdown()
        assert {row["id"] for row in server.spans} == {row.id for row in read_spool().spans}


def test_the_helper_loads_no_framework(monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs in the helper imports neither torch nor OpenTelemetry nor a command line."""
    with PlatformServer() as server:
        use(monkeypatch, environment(server, "process"))
        profiler = ci.profile(frameworks=[], flush_interval=0.05)
        until(lambda: server.committed)
        delivery = profiler._rec.delivery  # type: ignore[union-attr]
        assert isinstance(delivery, ForwardProcess)
        maps = Path(f"/proc/{delivery.pid}/maps").read_text()
        profiler.shutdown()
    assert "torch" not in maps
    loaded = subprocess.run(
        [sys.executable, "-c", "import sys, cirron_otel.forward_process; print(*sys.modules)"],
        check=True, capture_output=True, text=True,
    ).stdout.split()  # fmt: skip
    assert not {"torch", "numpy", "opentelemetry", "click", "rich"} & set(loaded)


def test_the_key_stands_in_no_argument_of_the_helper(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that was given as an argument reaches the helper by its pipe alone."""
    with PlatformServer(key="very-secret-key") as server:
        use(monkeypatch, {"CIRRON_API_ENDPOINT": server.url, "CIRRON_EXIT_BUDGET": "30"})
        cirron = ci.Cirron(api_key="very-secret-key")
        profiler = cirron.profile(frameworks=[], flush_interval=0.05, forward="process")
        until(lambda: server.committed)
        delivery = profiler._rec.delivery  # type: ignore[union-attr]
        assert isinstance(delivery, ForwardProcess)
        seen = Path(f"/proc/{delivery.pid}/cmdline").read_bytes()
        seen += Path(f"/proc/{delivery.pid}/environ").read_bytes()
        profiler.shutdown()
    assert b"very-secret-key" not in seen


def test_the_helper_s_warnings_are_the_program_s(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What goes wrong in the helper is said by the program's own logging."""
    with PlatformServer(default="503") as server:
        use(monkeypatch, environment(server, "process", CIRRON_EXIT_BUDGET="0.2"))
        profiler = ci.profile(frameworks=[], flush_interval=0.05)
        until(lambda: any("503" in message for message in caplog.messages))
        profiler.shutdown()


@pytest.mark.parametrize("mode", MODES)
def test_a_forked_child_runs_no_delivery(run_program: RunProgram, mode: str) -> None:
    """What a child records is delivered by its parent; the child starts no thread or process."""
    source = """
    import os, sys, threading
    import cirron_otel as ci
    ci.profile(frameworks=[], flush_interval=0.05)
    pid = os.fork()
    if pid == 0:
        with ci.scope("in_child"):
            pass
        names = sorted(thread.name for thread in threading.enumerate())
        assert names == ["MainThread", "cirron-otel-flush"], names
        assert ci.health()["forward"] == "off"
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    ci.shutdown()
    """
    with PlatformServer() as server:
        run_program(source, environment(server, mode))
        assert "in_child" in {row["name"] for row in server.spans}


@pytest.mark.timeout(240)
@pytest.mark.parametrize(("mode", "times"), [("thread", 500), ("process", 8)])
def test_recording_again_and_again_leaks_nothing(
    run_program: RunProgram, mode: str, times: int
) -> None:
    """profile() and shutdown(), many times, leave no thread, process, socket or file behind."""
    source = """
    import sys, time, psutil
    import cirron_otel as ci
    process = psutil.Process()
    def once():
        ci.profile(frameworks=[], flush_interval=60)
        ci.shutdown()
    def counts():
        return process.num_threads(), process.num_fds(), len(process.children())
    for _ in range(3):
        once()
    time.sleep(0.5)  # a thread is gone a little later than it says so
    before = counts()
    for _ in range(int(sys.argv[1])):
        once()
    deadline = time.monotonic() + 5
    def more():
        return [now - then for now, then in zip(counts(), before) if now > then]
    while more() and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not more(), (before, counts())
    """
    with PlatformServer() as server:
        run = run_program(source, environment(server, mode), args=[str(times)], timeout=200)
        assert {row["id"] for row in server.spans} == {row.id for row in run.spans}


class TestCommands:
    """``cirron-otel spool flush`` and ``cirron-otel forward``."""

    def test_flush_delivers_what_is_left(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It sends everything, says how much and where to, and ends with 0."""
        ids = record(tmp_path / "out", 7)
        with PlatformServer() as server:
            use(monkeypatch, environment(server, "thread"))
            assert main(["spool", "flush", "--dir", str(tmp_path / "out")]) == 0
            assert list(server.committed) == ids
        assert f"7 batches delivered to platform {server.url}" in capsys.readouterr().out

    def test_flush_says_what_it_could_not_deliver(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """It gives up when nothing moves, names the trouble, and ends with 1."""
        record(tmp_path / "out", 3)
        with PlatformServer(default="503") as server:
            use(monkeypatch, environment(server, "thread"))
            arguments = ["spool", "flush", "--dir", str(tmp_path / "out"), "--patience", "0.3"]
            assert main(arguments) == 1
        assert "not delivered: 3 batches to platform" in capsys.readouterr().err

    def test_flush_says_what_was_refused(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A batch that the receiver will never take is set aside; the status is 1."""
        record(tmp_path / "out", 3)
        with PlatformServer() as server:
            server.say(["ok", "422"])
            use(monkeypatch, environment(server, "thread"))
            assert main(["spool", "flush", "--dir", str(tmp_path / "out")]) == 1
        assert "2 batches delivered" in (out := capsys.readouterr().out)
        assert "1 refused and set aside" in out

    def test_without_a_destination_it_says_what_to_set(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """Nothing is configured: a clear error, not a success."""
        record(tmp_path / "out", 1)
        assert main(["spool", "flush", "--dir", str(tmp_path / "out")]) == 1
        assert "CIRRON_API_KEY" in capsys.readouterr().err

    def test_forward_once_says_when_there_is_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        """A directory without any spool is no success."""
        monkeypatch.setenv("CIRRON_API_KEY", "test-key")
        assert main(["forward", "--once", str(tmp_path / "nowhere")]) == 1
        assert "no spool in" in capsys.readouterr().err

    def test_flush_shows_a_bar_on_a_terminal(self, tmp_path: Path) -> None:
        """On a terminal the progress is drawn there, and the result is a line of text."""
        record(tmp_path / "out", 5)
        master, slave = os.openpty()
        with PlatformServer() as server:
            process = subprocess.Popen(
                [sys.executable, "-m", "cirron_otel.cli.main", "spool", "flush", "--dir", "out"],
                cwd=tmp_path,
                env={**os.environ, **environment(server, "thread"), "TERM": "xterm"},
                stdout=subprocess.PIPE,
                stderr=slave,
                text=True,
            )
            os.close(slave)
            out, _ = process.communicate(timeout=50)
            assert process.returncode == 0
        drawn = os.read(master, 65536).decode()
        os.close(master)
        assert "sending" in drawn
        assert out == f"5 batches delivered to platform {server.url}/v1/traces\n"

    def test_forward_watches_many_directories_until_it_is_told_to_stop(
        self, tmp_path: Path
    ) -> None:
        """It delivers from those that are there and those that come, and ends with 0 on SIGTERM."""
        with PlatformServer() as server:
            ids = record(tmp_path / "jobs" / "one" / ".cirron", 2)
            process = subprocess.Popen(
                [sys.executable, "-m", "cirron_otel.cli.main", "forward", str(tmp_path / "jobs")],
                env={**os.environ, **environment(server, "off")},
                stderr=subprocess.PIPE,
                text=True,
            )
            try:
                server.wait_for(2)
                ids += record(tmp_path / "jobs" / "two", 2, first=5)
                server.wait_for(4, timeout=40)
                process.send_signal(signal.SIGTERM)
                assert process.wait(40) == 0
            finally:
                process.kill()
                _, told = process.communicate()
            assert list(server.committed) == ids
        assert told.count("forwarding ") == 2
