"""The exporter in pipelines that are not ours: by name, by hand, forked, beside ``profile()``."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SimpleSpanProcessor,
    SpanExportResult,
)
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

import cirron_otel as ci
from cirron_otel.batch import SpanRecord
from cirron_otel.errors import ConfigurationError
from cirron_otel.exporter import CirronSpanExporter
from cirron_otel.spool import Spool
from delivery.platform_server import KEY, PlatformServer
from helpers import RunProgram, read_spool


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlatformServer]:
    """A platform on loopback, which the environment names."""
    with PlatformServer() as running:
        monkeypatch.setenv("CIRRON_API_KEY", KEY)
        monkeypatch.setenv("CIRRON_API_ENDPOINT", running.url)
        yield running


def _provider(exporter: CirronSpanExporter, **resource: Any) -> TracerProvider:
    provider = TracerProvider(resource=Resource.create(resource), shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider


def test_a_span_arrives_with_all_it_has(server: PlatformServer) -> None:
    """Ids, parent, times, kind, status, events, links, scope and resource are on the platform."""
    exporter = CirronSpanExporter()
    provider = _provider(exporter, **{"service.name": "shop"})
    tracer = provider.get_tracer("shop.http", "1.2")
    remote = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))
    with tracer.start_as_current_span("GET /", kind=SpanKind.SERVER) as outer:
        outer.set_attribute("http.route", "/")
        with tracer.start_as_current_span("query", links=[trace.Link(remote, {"a": 1})]) as inner:
            inner.add_event("row", {"n": 3}, timestamp=7)
            inner.set_status(Status(StatusCode.ERROR, "no such row"))
    assert exporter.force_flush()
    provider.shutdown()
    rows = {row["name"]: row for row in server.spans}
    made: Any = outer
    context = made.get_span_context()
    get, query = rows["GET /"], rows["query"]
    assert get["id"] == f"{context.span_id:016x}{context.trace_id & (1 << 64) - 1:016x}"
    assert get["otel"]["trace_id"] == f"{context.trace_id:032x}"[:16]
    assert (get["start_ns"], get["end_ns"]) == (made.start_time, made.end_time)
    assert (get["parent_id"], query["parent_id"]) == (None, get["id"])
    assert (get["otel"]["kind"], get["attrs"]) == ("server", {"http.route": "/"})
    assert get["pid"] == os.getpid()
    assert get["otel"]["scope"] == {"name": "shop.http", "version": "1.2"}
    assert query["otel"]["status"] == "error"
    assert query["otel"]["status_message"] == "no such row"
    assert query["otel"]["events"] == [{"name": "row", "ts_ns": 7, "attrs": {"n": 3}}]
    assert query["otel"]["links"] == [
        {"trace_id": f"{0xABC:032x}", "span_id": f"{0xDEF:016x}", "attrs": {"a": 1}}
    ]
    (request, *_) = server.requests
    assert request.batch["resource"]["service.name"] == "shop"
    assert request.batch["resource"]["process.pid"] == os.getpid()


def test_nothing_is_lost_while_the_platform_is_away(server: PlatformServer) -> None:
    """Exports go on at the speed of the disk, and what waited arrives once it is back."""
    server.default = "503"
    exporter = CirronSpanExporter()
    provider = _provider(exporter)
    for number in range(20):
        provider.get_tracer("x").start_span(f"s{number}").end()
    assert not exporter.force_flush(300)
    assert server.spans == []
    assert len(read_spool().spans) == 20
    server.default = "ok"
    assert exporter.force_flush()
    provider.shutdown()
    assert sorted(row["name"] for row in server.spans) == sorted(f"s{n}" for n in range(20))


def test_what_one_process_could_not_send_the_next_one_sends(server: PlatformServer) -> None:
    """The end takes no longer than the budget with a platform that hangs; the rest is on disk."""
    server.default = "hang"
    exporter = CirronSpanExporter(exit_budget=0.3)
    provider = _provider(exporter)
    provider.get_tracer("x").start_span("left behind").end()
    provider.shutdown()
    provider.shutdown()
    assert exporter.export([]) is SpanExportResult.FAILURE
    assert [span.name for span in read_spool().spans] == ["left behind"]
    server.closing.set()  # the hanging request ends
    server.default = "ok"
    server.closing.clear()
    again = CirronSpanExporter()
    provider = _provider(again)
    provider.get_tracer("x").start_span("new").end()
    assert again.force_flush()
    provider.shutdown()
    assert sorted({row["name"] for row in server.spans}) == ["left behind", "new"]


def test_without_a_key_spans_stay_on_disk(caplog: pytest.LogCaptureFixture) -> None:
    """No key is no error: it is said once where the spans are."""
    exporter = CirronSpanExporter()
    provider = _provider(exporter)
    provider.get_tracer("x").start_span("kept").end()
    assert exporter.force_flush()
    provider.shutdown()
    assert [span.name for span in read_spool().spans] == ["kept"]
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CIRRON_API_KEY" in caplog.text


def test_a_disk_that_refuses_is_gone_round(
    server: PlatformServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Without a spool the batch is posted at once; if that fails too it is counted and told."""
    blocked = tmp_path / "blocked"
    blocked.write_text("a file", encoding="utf-8")
    exporter = CirronSpanExporter(output_dir=blocked, forward="off")
    provider = _provider(exporter)
    span: Any = provider.get_tracer("x").start_span("straight")
    span.end()
    assert [row["name"] for row in server.spans] == ["straight"]
    server.default = "503"
    assert exporter.export([span]) is SpanExportResult.FAILURE
    assert exporter.health()["losses"] == {"exporter_disk_and_network": 1}
    provider.shutdown()
    assert "a part of the path is a file" in caplog.text


def test_switched_off_is_off(server: PlatformServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """CIRRON_ENABLED=false writes and sends nothing, and the pipeline goes on."""
    monkeypatch.setenv("CIRRON_ENABLED", "false")
    exporter = CirronSpanExporter()
    span: Any = TracerProvider(shutdown_on_exit=False).get_tracer("x").start_span("s")
    span.end()
    assert exporter.export([span]) is SpanExportResult.SUCCESS
    exporter.shutdown()
    assert server.requests == []
    assert not Path(".cirron").exists()


def test_a_wrong_setting_is_told_when_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """The constructor names what cannot be used; the settings are those of ``Cirron()``."""
    with pytest.raises(ConfigurationError, match=r"api_endpoint = 'nowhere'"):
        CirronSpanExporter(api_key=KEY, api_endpoint="nowhere")
    with pytest.raises(ConfigurationError, match=r"no setting 'api_kex'; did you mean api_key"):
        CirronSpanExporter(api_kex=KEY)
    monkeypatch.setenv("http_proxy", "gopher://x")
    with pytest.raises(ConfigurationError, match="HTTP_PROXY"):
        CirronSpanExporter(api_key=KEY, api_endpoint="http://platform.invalid")


def test_odd_spans_take_no_other_with_them(
    server: PlatformServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Text that is no Unicode is mended, a span that is none is counted, the others arrive."""
    monkeypatch.delenv("CIRRON_OTEL_STRICT")
    exporter = CirronSpanExporter()
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("x")
    spans: list[Any] = [tracer.start_span(name) for name in ("good", "bad \ud800", "fine")]
    for span in spans:
        span.end()
    broken: Any = tracer.start_span("broken")
    broken.end()
    broken._context = None
    assert exporter.export([*spans, broken]) is SpanExportResult.SUCCESS
    assert exporter.force_flush()
    exporter.shutdown()
    assert sorted(row["name"] for row in server.spans) == ["bad \ufffd", "fine", "good"]
    assert exporter.health()["losses"]["not_encodable"] == 1
    assert exporter.health()["destinations"][0]["name"] == "platform"


def test_a_large_export_becomes_several_batches(server: PlatformServer) -> None:
    """No batch is larger than three megabytes, and every span is in one of them."""
    exporter = CirronSpanExporter()
    tracer = TracerProvider(shutdown_on_exit=False).get_tracer("x")
    spans: list[Any] = [
        tracer.start_span(f"s{n}", attributes={"text": f"{n}" * 30_000}) for n in range(100)
    ]
    for span in spans:
        span.end()
    assert exporter.export(spans) is SpanExportResult.SUCCESS
    assert exporter.force_flush()
    exporter.shutdown()
    assert len(server.committed) > 1
    for path, batch in Spool(Path(".cirron")).batches():
        assert path.name == f"{batch.created_ns:020d}-{batch.batch_id}.json"
    assert max(map(len, server.committed.values())) <= 3_000_000
    assert len(server.spans) == 100


# -- beside profile() ----------------------------------------------------------------------------


@pytest.mark.parametrize("spans", ["own", "all"])
def test_no_span_goes_up_twice_beside_profile(
    server: PlatformServer, monkeypatch: pytest.MonkeyPatch, spans: str
) -> None:
    """Scopes go by the recording alone, foreign spans by whichever of the two takes them."""
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", None)
    exporter = CirronSpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(BatchSpanProcessor(exporter))
    monkeypatch.setattr(trace, "_TRACER_PROVIDER", provider)
    ci.profile(frameworks=[], spans=spans)
    with ci.scope("work"), provider.get_tracer("library").start_as_current_span("foreign"):
        pass
    provider.force_flush()
    ci.shutdown()
    provider.shutdown()
    rows: list[SpanRecord] = read_spool().spans
    names = sorted(row.name for row in rows)
    assert names == ["cirron.session", "foreign", "work"]
    (foreign,) = [row for row in rows if row.name == "foreign"]
    (work,) = [row for row in rows if row.name == "work"]
    assert foreign.parent_id == work.id
    assert sorted(row["name"] for row in server.spans) == names


# -- processes -----------------------------------------------------------------------------------

FORKS = """
import os, sys
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from cirron_otel.exporter import CirronSpanExporter
provider = TracerProvider()
provider.add_span_processor(BatchSpanProcessor(CirronSpanExporter()))
provider.get_tracer("x").start_span("parent before").end()
provider.force_flush()
child = os.fork()
if child == 0:
    provider.get_tracer("x").start_span("child").end()
    provider.shutdown()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
provider.get_tracer("x").start_span("parent after").end()
provider.shutdown()
"""


def test_forked_workers_export_too(server: PlatformServer, run_program: RunProgram) -> None:
    """A pipeline made before the fork works in parent and child, each with its own pid."""
    run_program(FORKS)
    assert sorted(row["name"] for row in server.spans) == ["child", "parent after", "parent before"]
    pids = {row["name"]: row["pid"] for row in server.spans}
    assert pids["child"] != pids["parent before"] == pids["parent after"]


KILLED = """
import os, signal, sys
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from cirron_otel.exporter import CirronSpanExporter
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(CirronSpanExporter()))
for number in range(50):
    provider.get_tracer("x").start_span(f"s{number}").end()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_process_loses_nothing_that_was_exported(
    server: PlatformServer, run_program: RunProgram
) -> None:
    """Spans whose export returned are on disk, though the platform never took them."""
    server.default = "503"
    run = run_program(KILLED, expect=-9, measured=False)
    assert sorted(span.name for span in run.spans) == sorted(f"s{n}" for n in range(50))


SERVE = """
import http.server, threading, urllib.request
import urllib3

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *args):
        pass

server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
urllib3.PoolManager().request("GET", f"http://127.0.0.1:{server.server_port}/hello")
server.shutdown()
"""


def test_it_works_with_no_line_of_code(server: PlatformServer, tmp_path: Path) -> None:
    """opentelemetry-instrument takes it by name beside OTLP; its own requests are not traced."""
    (tmp_path / "serve.py").write_text(dedent(SERVE), encoding="utf-8")
    otlp = PlatformServer(default="200")
    done = subprocess.run(
        [str(Path(sys.executable).with_name("opentelemetry-instrument")), sys.executable,
         "serve.py"],
        cwd=tmp_path,
        env={
            **os.environ,
            "OTEL_TRACES_EXPORTER": "otlp,cirron",
            "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf",
            "OTEL_METRICS_EXPORTER": "none",
            "OTEL_LOGS_EXPORTER": "none",
            "OTEL_SERVICE_NAME": "serve",
            "OTEL_EXPORTER_OTLP_ENDPOINT": otlp.url,
        },
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    otlp.close()
    assert done.returncode == 0, done.stderr
    assert [row["name"] for row in server.spans] == ["GET"], done.stderr
    (request,) = [one for one in server.requests if one.batch["spans"]]
    assert request.batch["resource"]["service.name"] == "serve"
    assert [one.path for one in otlp.requests] == ["/v1/traces"]
    assert "Traceback" not in done.stderr


def test_it_waits_for_no_network(server: PlatformServer) -> None:
    """While the platform hangs, a hundred exports return and the SDK's queue drops nothing."""
    server.default = "hang"
    exporter = CirronSpanExporter(exit_budget=0.0)
    provider = _provider(exporter)
    done = threading.Event()

    def work() -> None:
        for number in range(100):
            provider.get_tracer("x").start_span(f"s{number}").end()
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(9), "an export waited for the platform"
    until = time.monotonic() + 5
    while not server.requests and time.monotonic() < until:
        time.sleep(0.01)
    assert len(server.requests) == 1
    provider.shutdown()
    assert len(read_spool().spans) == 100
