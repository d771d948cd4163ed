"""Receivers to deliver to, on loopback: one that hangs, one that takes everything, a collector.

Run as a program it is the second: it answers every request at once, looks at none, and counts them.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import socketserver
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from harness import SideError, load

_START_S = 30
_ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: %s\r\nContent-Length: %d\r\n\r\n%s"


@contextlib.contextmanager
def hanging() -> Iterator[str]:
    """The URL of a server that takes connections and requests and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=1000) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def taking() -> contextlib.AbstractContextManager[str]:
    """The URL of a server, in a process of its own, that takes everything."""
    return served(__file__)


@contextlib.contextmanager
def served(script: str) -> Iterator[str]:
    """The URL of a server that is a program: it is told the port to listen on."""
    port = free_port()
    process = subprocess.Popen([sys.executable, script, str(port)])
    try:
        wait_for(port, process)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def collector() -> Iterator[str]:
    """The URL of a real collector (rotel) that takes spans over HTTP and forgets them."""
    agent = Path(load("rotel").__file__).parent / "rotel-agent"
    http, grpc = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        home = Path(name)
        command = [
            str(agent), "start",
            "--otlp-http-endpoint", f"127.0.0.1:{http}",
            "--otlp-grpc-endpoint", f"127.0.0.1:{grpc}",
            "--pid-file", str(home / "pid"), "--log-file", str(home / "log"),
        ]  # fmt: skip
        exporters = {
            "ROTEL_EXPORTERS": "none:blackhole",
            "ROTEL_EXPORTERS_TRACES": "none",
            "ROTEL_EXPORTERS_METRICS": "none",
            "ROTEL_EXPORTERS_LOGS": "none",
        }
        environment = {"PATH": os.environ["PATH"], "HOME": name, **exporters}
        out = subprocess.DEVNULL
        process = subprocess.Popen(command, env=environment, cwd=name, stdout=out, stderr=out)
        try:
            wait_for(http, process)
            yield f"http://127.0.0.1:{http}"
        finally:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
            process.kill()
            process.wait()


def free_port() -> int:
    """A port of the loopback that nobody listens on at the moment."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Until somebody listens on the port."""
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 0.2):
            return
        time.sleep(0.02)
    raise SideError(f"no receiver listens on {port}")


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    allow_reuse_address = True
    requests = 0
    bytes = 0


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while line := self.rfile.readline():
                self.answer(line)

    def answer(self, line: bytes) -> None:
        """One request: ``GET`` asks for the counts, anything else is taken."""
        length, kind = 0, b"application/x-protobuf"
        while (header := self.rfile.readline().strip()) != b"":
            name, _, value = header.partition(b":")
            if name.lower() == b"content-length":
                length = int(value)
            elif name.lower() == b"content-type":
                kind = value.strip()
        self.server.bytes += length
        while length:
            length -= len(self.rfile.read(min(length, 1 << 16)))
        if line.startswith(b"GET"):
            said = b"%d %d" % (self.server.requests, self.server.bytes)
        else:
            self.server.requests += 1
            said = b"{}" if kind == b"application/json" else b""
        self.wfile.write(_ANSWER % (kind, len(said), said))


def counts(url: str) -> tuple[int, int]:
    """The requests that a server of :func:`taking` had, and their bytes."""
    port = int(url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port), 5) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        connection.shutdown(socket.SHUT_WR)
        with connection.makefile("rb") as answer:
            requests, size = answer.read().rpartition(b"\r\n")[2].split()
    return int(requests), int(size)


if __name__ == "__main__":
    with _Server(("127.0.0.1", int(sys.argv[1])), _Handler) as server:
        server.serve_forever()
