"""A receiver of OTLP that counts what it gets: which spans, in which traces, linked to what.

As a program it listens on a port of the loopback; ``GET`` says the counts so far, as JSON.
"""

from __future__ import annotations

import http.server
import json
import sys
import threading
import urllib.request
from array import array
from collections import Counter
from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any

from harness import load
from receivers import served


def counting() -> AbstractContextManager[str]:
    """The URL of such a receiver, in a process of its own."""
    return served(__file__)


def counted(url: str) -> dict[str, Any]:
    """What the receiver has by now; see :meth:`Counts.said`."""
    with urllib.request.urlopen(url, timeout=600) as answer:  # noqa: S310 - the loopback
        said: dict[str, Any] = json.load(answer)
    return said


def digest(ids: Iterable[int]) -> dict[str, int]:
    """How many different ids there are, and a number that two sets share only if they are one."""
    different, mixed = set(ids), 0
    for one in different:
        mixed ^= (one * 0x9E3779B97F4A7C15) & (2**64 - 1)
    return {"spans": len(different), "mixed": mixed}


class Counts:
    """What was received."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.ids: array[int] = array("Q")
        self.sizes: Counter[bytes] = Counter()
        self.names: Counter[str] = Counter()
        #: Traces that a root of a window is linked to, by the window's own.
        self.windows: dict[bytes, set[bytes]] = {}
        self.session: bytes = b""
        self.pending = self.requests = 0

    def add(self, path: str, body: bytes) -> None:
        """Take in one request."""
        with self.lock:
            self.requests += 1
            if path.endswith("/v1/traces"):
                self._add_spans(body)

    def _add_spans(self, body: bytes) -> None:
        proto = load("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        request = proto.ExportTraceServiceRequest.FromString(body)
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                for span in scope.spans:
                    self.sizes[span.trace_id] += 1
                    if span.name.endswith(" (open)"):
                        self.pending += 1
                        continue
                    self.ids.append(int.from_bytes(span.span_id))
                    if not span.parent_span_id and span.name != "cirron.session":
                        self.windows[span.trace_id] = {link.trace_id for link in span.links}
                        self.names["window"] += 1
                    else:
                        self.names[span.name] += 1
                    if span.name == "cirron.session":
                        self.session = span.trace_id

    def said(self) -> dict[str, Any]:
        """The counts: spans that are no announcements, the traces, the windows."""
        with self.lock:
            linked = sum(self.session in links for links in self.windows.values())
            return {
                **digest(self.ids),
                "received": len(self.ids),
                "announced": self.pending,
                "requests": self.requests,
                "names": dict(self.names),
                "traces": len(self.sizes),
                "largest": max(self.sizes.values(), default=0),
                "windows": len(self.windows),
                "linked_windows": linked,
                "in_session": self.sizes[self.session],
            }


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    counts: Counts

    def do_POST(self) -> None:
        """Take in a request."""
        self.counts.add(self.path, self.rfile.read(int(self.headers["Content-Length"])))
        self._answer(b"", "application/x-protobuf")

    def do_GET(self) -> None:
        """Say the counts."""
        self._answer(json.dumps(self.counts.said()).encode(), "application/json")

    def _answer(self, body: bytes, kind: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - http.server's name
        """Nothing."""


if __name__ == "__main__":
    _Handler.counts = Counts()
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), _Handler).serve_forever()
