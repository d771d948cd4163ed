"""Handlers on the root logger that record, send or trace what they are given: no endless loop."""

from __future__ import annotations

import pytest

from helpers import RunProgram

#: Each handler makes something of a log line that we may log a line about.
PROGRAM = """
    import http.server
    import logging
    import sys
    import threading
    import warnings

    import urllib3
    from opentelemetry import trace
    from opentelemetry.instrumentation.urllib3 import URLLib3Instrumentor
    from opentelemetry.sdk._logs import LoggerProvider
    from opentelemetry.sdk._logs.export import LogRecordExportResult, SimpleLogRecordProcessor
    from opentelemetry.sdk.trace import TracerProvider

    import cirron_otel as ci

    warnings.simplefilter("ignore", DeprecationWarning)  # the SDK's own handler is one

    class Sink(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"] or 0))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *args):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}/"
    pool = urllib3.PoolManager()
    handled = []

    class Handler(logging.Handler):
        def emit(self, record):
            handled.append(record.name)
            if record.name == "exporter":
                return
            if "scope" in sys.argv:
                with ci.scope("handled", line=record.getMessage()[:20]):
                    ci.mark("unusable", object())
            if "http" in sys.argv:
                pool.request("POST", url, body=record.getMessage().encode())

    class Exporter:
        def export(self, batch):
            logging.getLogger("exporter").warning("cannot send %d records", len(batch))
            return LogRecordExportResult.FAILURE

        def shutdown(self):
            pass

        def force_flush(self, timeout_millis=0):
            return True

    root = logging.getLogger()
    root.setLevel(logging.INFO)
    root.addHandler(Handler())
    if "otel" in sys.argv:
        from opentelemetry.sdk._logs import LoggingHandler

        provider = LoggerProvider()
        provider.add_log_record_processor(SimpleLogRecordProcessor(Exporter()))
        root.addHandler(LoggingHandler(logger_provider=provider))
    if "http" in sys.argv:
        trace.set_tracer_provider(TracerProvider())
        URLLib3Instrumentor().instrument()
    ci.profile(frameworks=[], output=["log", "spool"], spans="all", otlp="http://127.0.0.1:9")
    with ci.scope("work"):
        ci.mark("unusable", object())
    for _ in range(10):  # what a line leads to is written by the next flush
        ci.flush()
    ci.shutdown()
    print(handled.count("cirron_otel.trace"), handled.count("cirron_otel"), len(handled))
"""


@pytest.mark.parametrize("handlers", [("scope", "otel"), ("http",)])
def test_a_log_handler_that_records_does_not_go_round(
    run_program: RunProgram, handlers: tuple[str, ...]
) -> None:
    """A line for each scope, of a handler's only where it was a warning's, and then quiet."""
    run = run_program(PROGRAM, args=handlers, env={"CIRRON_EXIT_BUDGET": "0.2"})
    spans, warnings, handled = map(int, run.stdout.split())
    assert 1 <= warnings <= 4
    assert 2 <= spans <= 2 + warnings
    assert handled <= 100
    assert run.stderr.count("RecursionError") == 0
    assert {span.name for span in run.spans} >= {"work", "cirron.session"}
