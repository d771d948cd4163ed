"""A platform that takes batches over HTTP and misbehaves as it is told to.

In a test it runs in a thread (:class:`PlatformServer`); where it has to be killed it runs as a
process: ``python platform_server.py --store DIR [--port N] [--key K] [--chaos SEED]`` prints its
URL on the first line. What it commits lies in memory and, with a store, as one file per batch,
written before the answer is sent.

A *behaviour* is a word that says what becomes of one request:

=================  ===========================================================================
``ok``             check it like the real one, commit, answer 202
``STATUS``         answer this status without committing, such as ``500``
``429:S``          429 with ``Retry-After`` of S seconds; ``429@S`` the same as a date
``413>N``          413 for a body of more than N bytes (uncompressed), else ``ok``
``commit-500``     commit, then answer 500; ``commit-reset``: commit, then reset
``reset``          reset the connection without an answer
``hang``           never answer
``slow``           trickle the headers, a byte every tenth of a second
``slow-body``      the same with the body
``garbage``        answer with bytes that are no HTTP
``html``           200 with a web page, as a proxy's login does
``endless``        202 with a body that does not end
``bomb``           202 with a small body that unpacks to 200 MB
``redirect:URL``   307 to URL; ``found:URL`` 302
=================  ===========================================================================
"""

from __future__ import annotations

import argparse
import contextlib
import email.utils
import gzip
import json
import os
import random
import socket
import ssl
import struct
import sys
import threading
import time
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

KEY = "test-key"
_CHAOS = (
    "ok", "ok", "ok", "ok", "500", "503", "429:0.1", "reset", "commit-reset", "commit-500",
    "garbage", "slow",
)  # fmt: skip


@dataclass
class Request:
    """One request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    behaviour: str
    at: float = field(default_factory=time.monotonic)

    @property
    def batch_id(self) -> str:
        """The header that names the batch."""
        return self.headers.get("x-cirron-batch-id", "")

    @property
    def plain(self) -> bytes:
        """The body, uncompressed."""
        encoded = self.headers.get("content-encoding") == "gzip"
        return gzip.decompress(self.body) if encoded else self.body

    @property
    def batch(self) -> dict[str, Any]:
        """The body as the batch it is."""
        found: dict[str, Any] = json.loads(self.plain)
        return found


class PlatformServer:
    """The server in a thread, on a free port of the loopback.

    ``script`` holds the behaviours of the next requests, then ``default`` counts. ``requests``
    has everything that came, ``committed`` the batches by id (repeats are counted in
    ``repeats``), ``blobs`` what was put.
    """

    def __init__(
        self,
        *,
        port: int = 0,
        key: str = KEY,
        default: str = "ok",
        store: Path | None = None,
        tls: ssl.SSLContext | None = None,
        path: str = "/v1/traces",
    ) -> None:
        self.key = key
        self.default = default
        self.path = path
        self.store = store
        self.script: list[str] = []
        self.requests: list[Request] = []
        self.committed: dict[str, bytes] = {}
        self.repeats: dict[str, int] = {}
        self.blobs: dict[str, bytes] = {}
        self.closing = threading.Event()
        self.lock = threading.Lock()
        self._http = _Http(("127.0.0.1", port), _Handler)
        self._http.platform = self
        if tls is not None:
            self._http.socket = tls.wrap_socket(self._http.socket, server_side=True)
        self.port: int = self._http.server_address[1]
        self.url = f"{'http' if tls is None else 'https'}://127.0.0.1:{self.port}"
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        """The server itself; it runs."""
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop: connections are reset, the port is free."""
        self.closing.set()
        self._http.shutdown()
        self._http.reset_connections()
        self._http.server_close()
        self._thread.join()

    # -- what the tests read ---------------------------------------------------------------------

    @property
    def spans(self) -> list[dict[str, Any]]:
        """The span rows of all committed batches."""
        return [row for data in self.committed.values() for row in json.loads(data)["spans"]]

    @property
    def marks(self) -> list[dict[str, Any]]:
        """The mark rows of all committed batches."""
        return [row for data in self.committed.values() for row in json.loads(data)["marks"]]

    def say(self, behaviours: Iterable[str]) -> None:
        """Add to the script."""
        with self.lock:
            self.script += behaviours

    def wait_for(self, count: int, timeout: float = 20) -> None:
        """Wait until so many batches are committed; fails when that takes too long."""
        until = time.monotonic() + timeout
        while len(self.committed) < count:
            assert time.monotonic() < until, f"{len(self.committed)} of {count} batches came"
            time.sleep(0.01)

    # -- what the handler calls ------------------------------------------------------------------

    def next_behaviour(self) -> str:
        """The behaviour of the next request."""
        with self.lock:
            return self.script.pop(0) if self.script else self.default

    def commit(self, batch_id: str, data: bytes) -> None:
        """Keep a batch, on disk before anything else."""
        if self.store is not None:
            target = self.store / f"{batch_id}.json"
            temporary = self.store / f"{batch_id}.{threading.get_ident()}.tmp"
            temporary.write_bytes(data)
            temporary.replace(target)
        with self.lock:
            if batch_id in self.committed:
                self.repeats[batch_id] = self.repeats.get(batch_id, 0) + 1
            self.committed.setdefault(batch_id, data)

    def wrong(self, request: Request) -> tuple[int, str] | None:
        """What the real platform would find wrong with a batch; None if it is right."""
        headers = request.headers
        checks: list[tuple[bool, int, str]] = [
            (headers.get("authorization") == f"Bearer {self.key}", 401, "the key is not known"),
            (request.path == self.path, 404, "no such route"),
            (headers.get("content-type") == "application/json", 400, "content type"),
            (headers.get("content-encoding") == "gzip", 400, "content encoding"),
            (bool(headers.get("x-cirron-sdk-version")), 400, "no version"),
        ]
        try:
            batch = request.batch
            same = batch["schema_version"] == 1 and batch["batch_id"] == request.batch_id
            checks.append((same, 422, "not a batch"))
        except (ValueError, KeyError, OSError, EOFError, zlib.error) as exc:
            checks.append((False, 400, f"body: {exc}"))
        return next(((status, why) for right, status, why in checks if not right), None)


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    allow_reuse_address = True
    request_queue_size = 64
    platform: PlatformServer

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.open_sockets: set[socket.socket] = set()

    def process_request(self, request: Any, client_address: Any) -> None:
        self.open_sockets.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self.open_sockets.discard(request)
        super().shutdown_request(request)

    def reset_connections(self) -> None:
        for sock in list(self.open_sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)

    def handle_error(self, *_: object) -> None:
        """A client that went away is what these tests are about."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Http

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        platform = self.server.platform
        body = self._body()
        request = Request(
            self.command, self.path, {k.lower(): v for k, v in self.headers.items()}, body, "?"
        )
        request.behaviour = platform.next_behaviour()
        with platform.lock:
            platform.requests.append(request)
        self._behave(request.behaviour, request)

    do_PUT = do_GET = do_POST  # noqa: N815 - http.server's names

    def _body(self) -> bytes:
        if self.headers.get("transfer-encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("content-length") or 0))
        data = b""
        while size := int(self.rfile.readline().strip() or b"0", 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def _behave(self, behaviour: str, request: Request) -> None:  # noqa: C901, PLR0912 - a list
        if behaviour.startswith("413>"):
            over = len(request.plain) > int(behaviour[4:])
            self._behave("413" if over else "ok", request)
        elif behaviour == "ok":
            self._ok(request)
        elif behaviour.isdigit():
            self._answer(int(behaviour), f"told to answer {behaviour}")
        elif behaviour[:4] == "429:":
            self._answer(429, "slower", {"Retry-After": behaviour[4:]})
        elif behaviour[:4] == "429@":
            when = email.utils.formatdate(time.time() + float(behaviour[4:]), usegmt=True)
            self._answer(429, "slower", {"Retry-After": when})
        elif behaviour.startswith("commit-"):
            self.server.platform.commit(request.batch_id, request.plain)
            self._behave(behaviour.removeprefix("commit-"), request)
        elif behaviour == "reset":
            self._reset()
        elif behaviour == "hang":
            self.server.platform.closing.wait(120)
            self.close_connection = True
        elif behaviour in {"slow", "slow-body"}:
            self._trickle(in_body=behaviour == "slow-body")
        elif behaviour == "garbage":
            self.connection.sendall(b"\x00\xff this is no HTTP\r\n\r\n")
            self.close_connection = True
        elif behaviour == "html":
            self._answer(200, "<html><body>please log in</body></html>", kind="text/html")
        elif behaviour == "endless":
            self._endless()
        elif behaviour == "bomb":
            packed = gzip.compress(b"\0" * 200_000_000, 1)
            self._answer(202, packed, {"Content-Encoding": "gzip"})
        elif behaviour.startswith(("redirect:", "found:")):
            word, _, url = behaviour.partition(":")
            self._answer(307 if word == "redirect" else 302, "", {"Location": url})
        else:
            raise AssertionError(behaviour)

    def _ok(self, request: Request) -> None:
        platform = self.server.platform
        if request.method == "PUT":
            with platform.lock:
                platform.blobs[request.path] = request.body
            self._answer(201, "", {"Location": f"s3://bucket{request.path}"})
            return
        if (wrong := platform.wrong(request)) is not None:
            self._answer(*wrong)
            return
        platform.commit(request.batch_id, request.plain)
        self._answer(202, json.dumps({"batch_id": request.batch_id}), kind="application/json")

    def _answer(
        self,
        status: int,
        body: str | bytes,
        headers: dict[str, str] | None = None,
        kind: str = "text/plain",
    ) -> None:
        data = body if isinstance(body, bytes) else body.encode()
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def _trickle(self, *, in_body: bool) -> None:
        self.close_connection = True
        head = b"HTTP/1.1 202 Accepted\r\nContent-Length: 100\r\nX-Padding: "
        if in_body:
            self.connection.sendall(head + b"x\r\n\r\n")
        rest = b"x" * 100 if in_body else head + b"x" * 100
        for at in range(len(rest)):
            if self.server.platform.closing.wait(0.1):
                return
            self.connection.sendall(rest[at : at + 1])

    def _endless(self) -> None:
        self.close_connection = True
        self.connection.sendall(b"HTTP/1.1 202 Accepted\r\nConnection: close\r\n\r\n")
        while not self.server.platform.closing.is_set():
            self.connection.sendall(b"x" * 65536)

    def _reset(self) -> None:
        self.close_connection = True
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.connection.close()


def main() -> None:
    """Run until killed; with ``--chaos`` each request meets a random behaviour."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--store", type=Path, required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key", default=KEY)
    parser.add_argument("--default", default="ok")
    parser.add_argument("--chaos", type=int)
    given = parser.parse_args()
    given.store.mkdir(parents=True, exist_ok=True)
    server = PlatformServer(
        port=given.port, key=given.key, default=given.default, store=given.store
    )
    if given.chaos is not None:
        rng = random.Random(given.chaos)
        server.next_behaviour = lambda: rng.choice(_CHAOS)  # type: ignore[method-assign]
    sys.stdout.write(f"{server.url}\n")
    sys.stdout.flush()
    parent = os.getppid()
    while os.getppid() == parent:  # an orphan of a test that was killed does not stay
        time.sleep(0.2)


if __name__ == "__main__":
    main()
