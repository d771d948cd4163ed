"""Requests under real servers: preload and several workers, forks, green threads."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import cirron_otel as ci
from conftest import SRC
from helpers import Rows, RunProgram, read_spool

TRACE = "0af7651916cd43dd8448eb211c80319c"
CALLER = f"00-{TRACE}-b7ad6b7169203331-01"

WSGI = """
import os
import cirron_otel as ci

if {in_master}:
    ci.profile(frameworks=[], flush_interval=60)
else:
    import threading
    started = threading.Lock()

def environ_headers(environ, start_response):
    return {{key[5:].replace("_", "-"): value
            for key, value in environ.items() if key.startswith("HTTP_")}}

@ci.inference(headers=environ_headers)
def predict(environ, start_response):
    with ci.scope("model"):
        ci.mark("pid", os.getpid())
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [str(os.getpid()).encode()]

@ci.inference(headers=environ_headers)
def stream(environ, start_response):
    start_response("200 OK", [("Content-Type", "text/plain")])
    for number in range(5):
        ci.mark("made", number)
        yield b"%d;" % number

def ready(environ, start_response):
    import json
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps({{"status": ci.health()["status"], "pid": os.getpid()}}).encode()]

def app(environ, start_response):
    if not {in_master}:
        with started:
            if not ci.health()["enabled"]:
                ci.profile(frameworks=[], flush_interval=60)
    return {{"/predict": predict, "/stream": stream, "/ready": ready}}[environ["PATH_INFO"]](
        environ, start_response
    )
"""

ASGI = """
import os
import cirron_otel as ci

ci.profile(frameworks=[], flush_interval=60)

@ci.inference
async def predict():
    with ci.scope("model"):
        ci.mark("pid", os.getpid())
    return str(os.getpid()).encode()

@ci.inference
async def stream():
    for number in range(5):
        ci.mark("made", number)
        yield b"%d;" % number

async def app(scope, receive, send):
    if scope["type"] == "lifespan":
        while True:
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/stream":
        async for part in stream():
            await send({"type": "http.response.body", "body": part, "more_body": True})
        await send({"type": "http.response.body", "body": b""})
    else:
        await send({"type": "http.response.body", "body": await predict()})
"""


def free_port() -> int:
    """A port of loopback that is free now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Server:
    """A server in a process group of its own, asked over loopback."""

    def __init__(self, command: Sequence[str], port: int, cwd: Path) -> None:
        self.port = port
        self.log = (cwd / "server.log").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(
            [sys.executable, "-m", *command], cwd=cwd, stdout=self.log, stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(SRC), str(cwd)])},
        )  # fmt: skip
        deadline = time.monotonic() + 30
        while True:
            try:
                self.get("/predict")
            except OSError:
                if self.process.poll() is not None or time.monotonic() > deadline:
                    pytest.fail(f"the server did not start:\n{self.output()}")
                time.sleep(0.05)
            else:
                return

    def get(self, path: str, **headers: str) -> str:
        """The body of an answer, over a connection of its own."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        try:
            connection.request("GET", path, headers=headers)
            return connection.getresponse().read().decode()
        finally:
            connection.close()

    def output(self) -> str:
        """What it wrote so far."""
        self.log.flush()
        self.log.seek(0)
        return self.log.read()

    def stop(self) -> str:
        """End it as an orchestrator does; what it wrote."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(30)
        return self.output()

    def kill(self) -> None:
        """End whatever is left."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
        self.log.close()


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """What is put here is ended with the test."""
    running: list[Server] = []
    yield running
    for server in running:
        server.kill()


def check(server: Server, tmp_path: Path, *, workers: int) -> Rows:
    """Ask until every worker has answered, stop the server, and look at what it leaves."""
    pids: set[str] = {server.get("/predict")}
    count = 1
    while len(pids) < workers or count < 8:
        pids.add(server.get("/predict"))
        count += 1
        assert count < 500, f"only {pids} of {workers} workers answer"
    for _ in range(3):
        assert server.get("/stream", traceparent=CALLER) == "0;1;2;3;4;"
    output = server.stop()
    assert "Traceback" not in output, output
    assert "cirron-otel" not in output, output
    rows = read_spool(tmp_path / ".cirron")
    requests = rows.named("request")
    streams = [row for row in requests if row.attrs.get("cirron.stream.end")]
    assert {row.attrs["cirron.stream.end"] for row in streams} == {"complete"}
    assert len(streams) == 3
    assert len(requests) - len(streams) >= count
    assert {str(row.pid) for row in requests} >= pids
    known = {row.id for row in (*rows.spans, *rows.open)}
    assert {row.parent_id for row in requests} <= known, "a request has no way up to a session"
    assert len({row.id for row in rows.spans}) == len(rows.spans)
    for row in streams:
        assert [m.value for m in rows.marks_of(row) if m.name == "made"] == [0, 1, 2, 3, 4]
    return rows


@pytest.mark.parametrize(
    ("preload", "worker"), [(True, "sync"), (False, "sync"), (True, "gthread")]
)
def test_gunicorn(servers: list[Server], tmp_path: Path, worker: str, *, preload: bool) -> None:
    """Two workers, forked after ``profile()`` or starting their own: nothing is lost."""
    (tmp_path / "service.py").write_text(WSGI.format(in_master=preload))
    port = free_port()
    options = ["--preload"] if preload else []
    command = [
        "gunicorn", "service:app", "-b", f"127.0.0.1:{port}", "-w", "2", "-k", worker,
        "--threads", "2" if worker == "gthread" else "1", "--log-level", "warning",
        "--no-control-socket", *options,
    ]  # fmt: skip
    server = Server(command, port, tmp_path)
    servers.append(server)
    ready = json.loads(server.get("/ready"))
    assert ready["status"] == "ok"
    rows = check(server, tmp_path, workers=2)
    streams = [row for row in rows.named("request") if row.attrs.get("cirron.stream.end")]
    assert {row.otel and f"{row.otel.trace_id}{row.id[16:]}" for row in streams} == {TRACE}
    sessions = rows.named("cirron.session")
    assert len(sessions) == (1 if preload else 2)


def test_gevent(servers: list[Server], tmp_path: Path) -> None:
    """Green threads, everything patched: requests at once do not wait for one another."""
    (tmp_path / "service.py").write_text(WSGI.format(in_master=False))
    port = free_port()
    command = [
        "gunicorn", "service:app", "-b", f"127.0.0.1:{port}", "-w", "1", "-k", "gevent",
        "--log-level", "warning", "--no-control-socket",
    ]  # fmt: skip
    server = Server(command, port, tmp_path)
    servers.append(server)
    check(server, tmp_path, workers=1)


def test_uvicorn(servers: list[Server], tmp_path: Path) -> None:
    """Two spawned workers, each with a session of its own; a stop loses nothing."""
    (tmp_path / "service.py").write_text(ASGI)
    port = free_port()
    command = [
        "uvicorn", "service:app", "--host", "127.0.0.1", "--port", str(port), "--workers", "2",
        "--log-level", "warning",
    ]  # fmt: skip
    server = Server(command, port, tmp_path)
    servers.append(server)
    rows = check(server, tmp_path, workers=2)
    assert {row.attrs["cirron.interrupted"] for row in rows.named("cirron.session")} == {"SIGTERM"}
    assert len(rows.named("cirron.session")) == 2
    assert not rows.open


GREEN = """
from gevent import monkey
monkey.patch_all()
import gevent, time
import cirron_otel as ci

@ci.inference
def predict(number):
    with ci.scope("part"):
        gevent.sleep(0.001)
        ci.mark("who", number)
    return number

@ci.inference
def stream(number):
    for _ in range(3):
        gevent.sleep(0)
        ci.mark("who", number)
        yield number

ci.profile(frameworks=[], flush_interval=0.05)
jobs = [gevent.spawn(predict, number) for number in range(200)]
jobs += [gevent.spawn(lambda n: list(stream(n)), number) for number in range(200, 300)]
done = gevent.joinall(jobs, timeout=30)
assert len(done) == 300, len(done)
assert ci.flush()
assert ci.shutdown()
print("done")
"""


def test_green_threads(run_program: RunProgram) -> None:
    """Under a patched standard library nothing deadlocks and each request keeps its own marks."""
    run = run_program(GREEN, measured=False)
    assert run.stdout == "done\n"
    requests = run.named("request")
    assert len(requests) == 300
    said: list[object] = []
    for row in requests:
        below = run.children(row)
        own = run.marks_of(below[0] if below else row)
        values = {mark.value for mark in own if mark.name == "who"}
        assert len(values) == 1
        said += values
    assert sorted(said) == list(range(300))  # type: ignore[type-var]


FORKS = """
import multiprocessing as mp, os
import cirron_otel as ci

@ci.inference
def predict(number):
    with ci.scope("part"):
        return number

@ci.inference
def stream(number):
    yield number
    yield number

def work(number):
    if {own}:
        ci.profile(frameworks=[], flush_interval=60)
    assert predict(number) == number
    assert list(stream(number)) == [number, number]

if __name__ == "__main__":
    ci.profile(frameworks=[], flush_interval=60)
    before = stream(7)
    assert next(before) == 7
    predict(-1)
    context = mp.get_context({method!r})
    children = [context.Process(target=work, args=(number,)) for number in range(3)]
    for child in children:
        child.start()
    for child in children:
        child.join()
        assert child.exitcode == 0, child.exitcode
    assert list(before) == [7]
    ci.shutdown()
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
@pytest.mark.parametrize("own", [False, True])
def test_child_processes(run_program: RunProgram, method: str, *, own: bool) -> None:
    """Each process writes its own requests, once; one that was open at the fork stays its own."""
    run = run_program(FORKS.format(method=method, own=own))
    requests = run.named("request")
    assert len(requests) == 2 + 3 * 2
    assert len({row.id for row in requests}) == 8
    assert len({row.pid for row in requests}) == 4
    known = {row.id for row in run.spans}
    assert {row.parent_id for row in requests} <= known
    ends = [row.attrs.get("cirron.stream.end") for row in requests]
    assert sorted(filter(None, ends)) == ["complete"] * 4
    assert not run.open


def test_status_is_the_state_in_one_word(tmp_path: Path) -> None:
    """``off``, ``ok``, and ``degraded`` while the disk refuses what is recorded."""
    assert ci.health()["status"] == "off"
    ci.profile(frameworks=[], flush_interval=60)
    assert ci.health()["status"] == "ok"
    with ci.request():
        pass
    ci.flush()
    spool = tmp_path / ".cirron" / "spool"
    spool.rename(tmp_path / ".cirron" / "aside")
    spool.write_text("in the way")
    with ci.request():
        pass
    assert not ci.flush()
    assert ci.health()["status"] == "degraded"
    spool.unlink()
    assert ci.flush()
    assert ci.health()["status"] == "ok"
    ci.shutdown()
    assert ci.health()["status"] == "off"


def test_health_needs_no_disk() -> None:
    """Once something was written, asking for the health opens no file and lists no directory."""
    ci.profile(frameworks=[], flush_interval=60)
    with ci.request():
        pass
    assert ci.flush()
    watched: list[str] = []
    armed = [True]

    def hook(event: str, args: tuple[object, ...]) -> None:
        if armed[0] and event in {"open", "os.scandir", "os.listdir"}:
            watched.append(f"{event} {args}")

    sys.addaudithook(hook)
    try:
        health = ci.health()
    finally:
        armed[0] = False
    assert health["spool_bytes"] > 0
    assert not [one for one in watched if ".cirron" in one]
    ci.shutdown()


RAISED = """
import signal
import cirron_otel as ci

ci.profile(frameworks=[], flush_interval=60)
with ci.request():
    pass
signal.raise_signal(signal.SIGTERM)
"""


def test_a_signal_raised_again_comes_after_the_last_flush(run_program: RunProgram) -> None:
    """A server that is done raises the signal it was sent: the session is whole, the status is
    the signal's.
    """  # noqa: D205 - one sentence
    run = run_program(
        RAISED.replace(
            "raise_signal(", "signal(signal.SIGTERM, signal.SIG_DFL)\nsignal.raise_signal("
        ),
        expect=-signal.SIGTERM,
    )
    run.one("request")
    assert run.one("cirron.session").attrs["cirron.interrupted"] == "SIGTERM"
    assert not run.open


def test_what_raises_signals_is_as_it_was_after_the_end() -> None:
    """``signal.raise_signal`` is the very same function again."""
    before = signal.raise_signal
    ci.profile(frameworks=[])
    ci.shutdown()
    assert signal.raise_signal is before
