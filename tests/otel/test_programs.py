"""Whole programs: a real collector, real instrumentations, forks, and ends without shutdown."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import rotel

from helpers import RunProgram, opentelemetry_instrument, read_spool

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


def free_port() -> int:
    """A port of the loopback interface that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Collector:
    """A collector that prints every span it receives."""

    def __init__(self, directory: Path) -> None:
        self.port = free_port()
        self.output = directory / "collector.txt"
        binary = Path(rotel.__file__).parent / "rotel-agent"
        with self.output.open("wb") as out:
            self.process = subprocess.Popen(
                [
                    binary, "start", "--otlp-grpc-endpoint", f"127.0.0.1:{free_port()}",
                    "--otlp-http-endpoint", f"127.0.0.1:{self.port}",
                ],
                cwd=directory, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env={
                    **os.environ, "ROTEL_DEBUG_LOG": "traces",
                    "ROTEL_DEBUG_LOG_VERBOSITY": "detailed", "ROTEL_EXPORTER": "blackhole",
                },
            )  # fmt: skip

    def wait_ready(self) -> None:
        """Wait until it takes connections; fails the test when it does not."""
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                socket.create_connection(("127.0.0.1", self.port), 1).close()
            except OSError:
                time.sleep(0.05)
            else:
                return
        pytest.fail(f"the collector does not listen:\n{self.output.read_text()}")

    def wait_for(self, text: str) -> str:
        """Everything it printed, once ``text`` is there (or after ten seconds)."""
        deadline = time.monotonic() + 10
        while True:
            printed = _ANSI.sub("", self.output.read_text(errors="replace"))
            if text in printed or time.monotonic() > deadline:
                return printed
            time.sleep(0.05)


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    """A running collector."""
    started = Collector(tmp_path)
    started.wait_ready()
    yield started
    started.process.terminate()
    started.process.wait(10)


def printed_spans(text: str) -> dict[str, dict[str, str]]:
    """The spans the collector printed, by name: their id, parent and what follows."""
    spans: dict[str, dict[str, str]] = {}
    for part in re.split(r"(?m)^\s*Span #\d+", text)[1:]:
        fields = dict(re.findall(r"(?m)^ {4}([A-Z][A-Za-z ]*?) *: *(.*?) *$", part))
        spans[fields["Name"]] = {**fields, "text": part}
    return spans


EXPORTING = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
import cirron_otel as ci

way, endpoint = sys.argv[1:]
exporting = BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint))
if way == "joined":
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    provider.add_span_processor(exporting)
profiler = ci.profile(frameworks=[])
if way == "own":
    profiler.tracer_provider.add_span_processor(exporting)
with ci.scope("outer", lr=0.5):
    with ci.scope("inner"):
        ci.mark("loss", 0.25)
    try:
        with ci.scope("failing"):
            raise ValueError("what went wrong")
    except ValueError:
        pass
assert ci.shutdown()
if way == "joined":
    provider.shutdown()
"""


@pytest.mark.parametrize("way", ["own", "joined"])
def test_a_real_collector_takes_it(collector: Collector, run_program: RunProgram, way: str) -> None:
    """A stock OTLP exporter delivers our spans to a real collector, with parents and events."""
    run = run_program(EXPORTING, args=[way, f"http://127.0.0.1:{collector.port}/v1/traces"])
    spans = printed_spans(collector.wait_for("cirron.session\n"))
    assert set(spans) == {"cirron.session", "outer", "inner", "failing"}
    for name, span in spans.items():
        row = run.one(name)
        assert span["ID"] == row.id[:16]
        assert span["Parent ID"] == ("" if row.parent_id is None else row.parent_id[:16])
        assert span["Trace ID"] == row.otel.trace_id + row.id[16:]
    assert "loss" in spans["inner"]["text"]
    assert str(run.marks[0].ts_ns) in spans["inner"]["text"]
    assert "what went wrong" in spans["failing"]["text"]


INSTRUMENTED = """
import http.server, sys, threading
import urllib3
from opentelemetry import trace
from opentelemetry.instrumentation.threading import ThreadingInstrumentor
from opentelemetry.instrumentation.urllib3 import URLLib3Instrumentor
from opentelemetry.sdk.trace import TracerProvider
import cirron_otel as ci

class Handler(http.server.BaseHTTPRequestHandler):
    seen = []
    def do_GET(self):
        self.seen.append(self.headers["traceparent"])
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass

way = sys.argv[1]
if way == "joined":
    trace.set_tracer_provider(TracerProvider())
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
ThreadingInstrumentor().instrument()
URLLib3Instrumentor().instrument()
ci.profile(frameworks=[], spans="all", set_global=way == "own")
with ci.scope("request") as request:
    urllib3.PoolManager().request("GET", f"http://127.0.0.1:{server.server_port}/")
    def work():
        with ci.scope("in thread"):
            pass
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
ThreadingInstrumentor().uninstrument()
assert ci.shutdown()
print(Handler.seen[0])
server.shutdown()
"""


@pytest.mark.parametrize("way", ["own", "joined"])
def test_instrumentations_inside_a_scope(run_program: RunProgram, way: str) -> None:
    """An HTTP client's span is the scope's child, its header names it, and threads keep parents."""
    run = run_program(INSTRUMENTED, args=[way])
    get = run.one("GET")
    assert get.parent_id == run.one("request").id
    assert get.otel.kind == "client"
    assert get.attrs["http.method"] == "GET"
    assert run.stdout.split("-")[1:3] == [get.otel.trace_id + get.id[16:], get.id[:16]]
    assert run.one("in thread").parent_id == run.one("request").id


def test_under_opentelemetry_instrument(tmp_path: Path) -> None:
    """``opentelemetry-instrument`` sets a provider up; our scopes go through it, unchanged."""
    program = tmp_path / "program.py"
    program.write_text(
        "import cirron_otel as ci\n"
        "ci.profile(frameworks=[])\n"
        "with ci.scope('outer'), ci.scope('inner'):\n"
        "    ci.mark('loss', 0.5)\n"
        "print('provider', ci.health()['provider'])\n"
    )
    done = opentelemetry_instrument(program, timeout=50, OTEL_SERVICE_NAME="instrumented")
    assert "provider joined" in done.stdout
    for name in ("cirron.session", "outer", "inner"):
        assert f'"name": "{name}"' in done.stdout
    assert '"service.name": "instrumented"' in done.stdout
    rows = read_spool()
    assert rows.one("inner").id[:16] in done.stdout
    assert rows.one("inner").parent_id == rows.one("outer").id


ENDING = """
import sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
import cirron_otel as ci

printing = ConsoleSpanExporter(formatter=lambda span: "exported " + span.name + "\\n")
exporting = BatchSpanProcessor(printing)
if sys.argv[1] == "joined":
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    provider.add_span_processor(exporting)
profiler = ci.profile(frameworks=[])
if sys.argv[1] == "own":
    profiler.tracer_provider.add_span_processor(exporting)
with ci.scope("work"):
    pass
open_scope = ci.scope("left open").__enter__()
"""


@pytest.mark.parametrize("way", ["own", "joined"])
def test_a_program_that_just_ends(run_program: RunProgram, way: str) -> None:
    """Without a shutdown everything is exported and spooled at the end of the process."""
    run = run_program(ENDING, args=[way])
    exported = sorted(line.split(" ", 1)[1] for line in run.stdout.splitlines())
    assert exported == ["cirron.session", "left open", "work"]
    assert sorted(row.name for row in run.spans) == exported
    assert run.one("left open").attrs["cirron.truncated"] is True
    assert run.stderr == ""


FORKING = """
import os, sys, warnings
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter
import cirron_otel as ci

printing = ConsoleSpanExporter(formatter=lambda s: f"exported {s.name} {os.getpid()}\\n")
exporting = BatchSpanProcessor(printing)
if sys.argv[1] == "joined":
    provider = TracerProvider()
    trace.set_tracer_provider(provider)
    provider.add_span_processor(exporting)
profiler = ci.profile(frameworks=[])
if sys.argv[1] == "own":
    profiler.tracer_provider.add_span_processor(exporting)
with ci.scope("parent's"):
    with ci.scope("before"):
        pass
    child = os.fork()
    if child == 0:
        with ci.scope("child's"):
            ci.mark("m", 1)
        exporting.force_flush()
        ci.flush()
        sys.stdout.flush()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
print("child", child)
print("parent", os.getpid())
ci.shutdown()
"""


@pytest.mark.parametrize("way", ["own", "joined"])
def test_a_forked_child_exports_its_own(run_program: RunProgram, way: str) -> None:
    """With a stock batch processor each process exports and spools its own spans, once."""
    run = run_program(FORKING, args=[way])
    pids = dict(re.findall(r"(?m)^(child|parent) (\d+)$", run.stdout))
    exported = re.findall(r"(?m)^exported (.*) (\d+)$", run.stdout)
    assert sorted(exported) == sorted([
        ("before", pids["parent"]), ("parent's", pids["parent"]),
        ("cirron.session", pids["parent"]), ("child's", pids["child"]),
    ])  # fmt: skip
    assert run.one("child's").parent_id == run.one("parent's").id
    assert run.one("child's").pid == int(pids["child"])
    assert len({row.id for row in run.spans}) == len(run.spans) == 4


def test_no_tracer_at_all(run_program: RunProgram) -> None:
    """An application whose tracers are switched off still has a whole tree in the spool."""
    run = run_program(
        """
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        import cirron_otel as ci

        class Off(TracerProvider):
            def get_tracer(self, *args, **more):
                return trace.NoOpTracer()

        trace.set_tracer_provider(Off())
        ci.profile(frameworks=[])
        for i in range(3):
            with ci.scope("outer", index=i), ci.scope("inner", index=i):
                pass
        ci.shutdown()
        """
    )
    outer: dict[Any, str] = {row.id: row.name for row in run.named("outer")}
    assert len(outer) == 3
    assert {row.parent_id for row in run.named("inner")} == set(outer)
    assert {row.parent_id for row in run.named("outer")} == {run.one("cirron.session").id}
