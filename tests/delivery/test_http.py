"""One bounded request: time, size, redirects, proxies, certificates, and no spans of our own."""

from __future__ import annotations

import contextlib
import email.utils
import gc
import os
import socket
import socketserver
import ssl
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

from cirron_otel.destinations.base import RetryAfter
from cirron_otel.destinations.http import (
    BODY_LIMIT,
    HttpAnswer,
    HttpClient,
    proxy_for,
    retry_after,
)
from cirron_otel.destinations.tls import Tls
from cirron_otel.errors import ConfigurationError
from delivery.platform_server import PlatformServer
from helpers import RunProgram

KEY = {"Authorization": "Bearer test-key"}


@pytest.fixture
def server() -> Iterator[PlatformServer]:
    """A platform on loopback."""
    with PlatformServer() as running:
        yield running


@pytest.fixture
def client(server: PlatformServer) -> Iterator[HttpClient]:
    """A client of it, impatient."""
    made = HttpClient(server.url, timeout=1.0)
    yield made
    made.close()


def _post(client: HttpClient, url: str, body: bytes = b"{}") -> HttpAnswer | RetryAfter:
    return client.request("POST", f"{url}/v1/traces", headers=KEY, body=body)


@pytest.mark.parametrize("behaviour", ["hang", "slow", "slow-body"])
def test_a_server_without_an_answer_is_given_up(
    server: PlatformServer, client: HttpClient, behaviour: str
) -> None:
    """Silence and trickling headers or bodies end with the timeout, not with the server's mood."""
    server.say([behaviour])
    assert _post(client, server.url) == RetryAfter(None, "no answer in time")


def test_trouble_is_an_answer(server: PlatformServer, client: HttpClient) -> None:
    """Resets, foreign protocols and closed ports are told in words, and the next request goes."""
    server.say(["reset", "garbage"])
    assert _post(client, server.url) == RetryAfter(None, "Connection reset by peer")
    assert _post(client, server.url) == RetryAfter(None, "the answer is no HTTP (BadStatusLine)")
    server.say(["200"])
    answer = _post(client, server.url)
    assert isinstance(answer, HttpAnswer)
    assert answer.text == "told to answer 200"
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    refused = client.request("POST", f"http://127.0.0.1:{port}/", headers={}, body=b"")
    assert refused == RetryAfter(None, "Connection refused")


def test_a_connection_is_used_again(server: PlatformServer, client: HttpClient) -> None:
    """Requests in a row come over one connection, also where an answer was an error."""
    ports = []
    for behaviour in ("200", "500", "404", "200"):
        server.say([behaviour])
        _post(client, server.url)
        ports.append(len(server._http.open_sockets))
    assert ports == [1, 1, 1, 1]


def test_an_answer_is_read_up_to_a_bound(server: PlatformServer, client: HttpClient) -> None:
    """A body without an end is cut, and the connection works no harm to the next request."""
    server.say(["endless", "200"])
    answer = _post(client, server.url)
    assert isinstance(answer, HttpAnswer)
    assert answer.status == 202
    assert len(answer.body) == BODY_LIMIT
    assert isinstance(_post(client, server.url), HttpAnswer)


def test_a_compressed_answer_is_not_unpacked_beyond_the_bound(server: PlatformServer) -> None:
    """200 MB of zeros in a small body become 64 kB."""
    server.say(["bomb"])
    client = HttpClient(server.url, timeout=20)
    answer = _post(client, server.url)
    client.close()
    assert isinstance(answer, HttpAnswer)
    assert answer.body == b"\0" * BODY_LIMIT


def test_a_redirect_keeps_the_key_at_home(server: PlatformServer, client: HttpClient) -> None:
    """A redirect on the same place is followed, one to another host or port or method is not."""
    server.say([f"redirect:{server.url}/other", "200"])
    answer = _post(client, server.url, b"body" * 50_000)
    assert isinstance(answer, HttpAnswer)
    assert answer.status == 200
    assert [request.path for request in server.requests] == ["/v1/traces", "/other"]
    assert server.requests[1].body == b"body" * 50_000

    with PlatformServer() as elsewhere:
        for behaviour in (
            f"redirect:{elsewhere.url}/",
            f"redirect:http://localhost:{server.port}/",
            f"found:{server.url}/other",
        ):
            server.say([behaviour])
            answer = _post(client, server.url)
            assert isinstance(answer, HttpAnswer)
            assert answer.status in {302, 307}
        assert elsewhere.requests == []


def test_endless_redirects_end(server: PlatformServer, client: HttpClient) -> None:
    """A server that redirects to itself is asked three times."""
    server.say([f"redirect:{server.url}/v1/traces"] * 10)
    answer = _post(client, server.url)
    assert isinstance(answer, HttpAnswer)
    assert answer.status == 307
    assert len(server.requests) == 3


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("3", 3.0), ("0.5", 0.5), ("-1", None), ("soon", None), ("", None), ("9" * 400, float("inf"))],
)
def test_retry_after_in_seconds(text: str, seconds: float | None) -> None:
    """A number is seconds; what is none says nothing."""
    assert retry_after(text) == seconds


def test_retry_after_as_a_date() -> None:
    """A date counts from the server's own clock; one that has passed means now."""
    now = time.time()
    date = email.utils.formatdate(now + 3600, usegmt=True)
    later = email.utils.formatdate(now + 3690, usegmt=True)
    assert retry_after(later, date) == 90.0
    assert retry_after(email.utils.formatdate(now - 50, usegmt=True)) == 0.0
    alone = retry_after(email.utils.formatdate(now + 100, usegmt=True))
    assert alone is not None
    assert 90 < alone <= 100
    assert retry_after(None) is None


def test_the_environments_proxy_is_used(
    server: PlatformServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """HTTP_PROXY carries the request with the proxy's login, NO_PROXY names who is exempt."""
    monkeypatch.setenv("http_proxy", f"http://user:p%40ss@127.0.0.1:{server.port}")
    client = HttpClient("http://platform.invalid", timeout=2.0)
    answer = client.request("POST", "http://platform.invalid/v1/traces", headers=KEY, body=b"{}")
    client.close()
    assert isinstance(answer, HttpAnswer)
    (seen,) = server.requests
    assert seen.path == "http://platform.invalid/v1/traces"
    assert seen.headers["proxy-authorization"] == "Basic dXNlcjpwQHNz"
    monkeypatch.setenv("no_proxy", "platform.invalid, .example")
    assert proxy_for("http://platform.invalid/v1/traces") is None
    assert proxy_for("http://a.example:80") is None
    assert proxy_for("http://other.invalid") is not None


def test_a_proxy_that_cannot_be_used_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy of a kind that is not supported is an error before anything is sent."""
    monkeypatch.setenv("http_proxy", "gopher://user:secret@127.0.0.1:1")
    with pytest.raises(ConfigurationError, match=r"HTTP_PROXY.*http://proxy") as caught:
        HttpClient("http://platform.invalid")
    assert "secret" not in str(caught.value)


# -- TLS -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A certificate for 127.0.0.1 that signs itself, and its key."""
    directory = tmp_path_factory.mktemp("tls")
    cert, key = directory / "cert.pem", directory / "key.pem"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",  # noqa: S607
         "-nodes", "-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1",
         "-keyout", str(key), "-out", str(cert)],
        check=True, capture_output=True,
    )  # fmt: skip
    return cert, key


@pytest.fixture
def tls_server(certificate: tuple[Path, Path]) -> Iterator[PlatformServer]:
    """A platform over HTTPS that asks for a client's certificate and does without."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    context.load_verify_locations(certificate[0])
    context.verify_mode = ssl.CERT_OPTIONAL
    with PlatformServer(tls=context) as running:
        yield running


def test_a_certificate_has_to_be_trusted(tls_server: PlatformServer) -> None:
    """An unknown certificate is refused and the reason says so."""
    client = HttpClient(tls_server.url, timeout=5)
    answer = _post(client, tls_server.url)
    client.close()
    assert isinstance(answer, RetryAfter)
    assert answer.reason == "its certificate is not trusted: self-signed certificate"
    assert tls_server.requests == []


@pytest.mark.parametrize("variable", ["REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE", "SSL_CERT_FILE", ""])
def test_trust_comes_from_the_environment_or_the_settings(
    tls_server: PlatformServer,
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
) -> None:
    """Each of the usual variables, and our own setting, names what is trusted."""
    cert, key = certificate
    if variable:
        monkeypatch.setenv(variable, str(cert))
        tls = None
    else:
        tls = Tls(ca=str(cert), client_certificate=str(cert), client_key=str(key))
    client = HttpClient(tls_server.url, timeout=5, tls=tls)
    tls_server.say(["200", "slow"])
    assert isinstance(_post(client, tls_server.url), HttpAnswer)
    client.timeout = 1.0
    assert _post(client, tls_server.url) == RetryAfter(None, "no answer in time")
    client.close()


def test_certificates_that_cannot_be_read_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A missing bundle or client certificate is an error that names file and source."""
    with pytest.raises(ConfigurationError, match=r"absent\.pem.*PEM"):
        HttpClient("https://a.invalid", tls=Tls(client_certificate=str(tmp_path / "absent.pem")))
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(tmp_path / "nowhere.pem"))
    with pytest.raises(ConfigurationError, match=r"nowhere\.pem.*REQUESTS_CA_BUNDLE"):
        HttpClient("https://a.invalid")


class _Tunnel(socketserver.StreamRequestHandler):
    """A proxy that opens a tunnel to wherever it is asked, if ``opens`` says so."""

    opens = True
    asked: ClassVar[list[str]] = []

    def handle(self) -> None:
        request = self.rfile.readline().decode()
        lines = [request.strip(), *iter(lambda: self.rfile.readline().decode().strip(), "")]
        self.asked.append("; ".join(lines))
        if not self.opens:
            self.wfile.write(b"HTTP/1.1 407 Login needed\r\nContent-Length: 0\r\n\r\n")
            return
        host, _, port = request.split()[1].rpartition(":")
        with socket.create_connection((host, int(port))) as target:
            self.wfile.write(b"HTTP/1.1 200 Tunnel\r\n\r\n")
            back = threading.Thread(target=self._copy, args=(target, self.connection))
            back.start()
            self._copy(self.connection, target)
            back.join()

    @staticmethod
    def _copy(source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("opens", [True, False])
def test_https_goes_through_a_tunnel_of_the_proxy(
    tls_server: PlatformServer,
    certificate: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    opens: bool,  # noqa: FBT001 - a column
) -> None:
    """The proxy sees host and port and no key; what it refuses is told."""
    monkeypatch.setattr(_Tunnel, "opens", opens)
    monkeypatch.setattr(_Tunnel, "asked", [])
    tls_server.default = "200"
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), _Tunnel) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, args=(0.02,))
        thread.start()
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{proxy.server_address[1]}")
        client = HttpClient(tls_server.url, timeout=5, tls=Tls(ca=str(certificate[0])))
        answers = [_post(client, tls_server.url) for _ in range(2)]
        client.close()
        proxy.shutdown()
        thread.join()
    if opens:
        assert [getattr(answer, "status", None) for answer in answers] == [200, 200]
        assert len(_Tunnel.asked) == 1
    else:
        reason = "the proxy: Tunnel connection failed: 407 Login needed"
        assert answers == [RetryAfter(None, reason)] * 2
        assert tls_server.requests == []
    assert _Tunnel.asked[0].startswith(f"CONNECT 127.0.0.1:{tls_server.port} HTTP/1.")
    assert "test-key" not in str(_Tunnel.asked)


SLIM = """
import ssl, sys, types
from cirron_otel.destinations.http import _fill_empty_store
certifi = types.ModuleType("certifi")
certifi.where = lambda: sys.argv[1]
sys.modules["certifi"] = certifi
context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
_fill_empty_store(context)
print(context.cert_store_stats()["x509_ca"])
"""


def test_a_system_without_authorities_borrows_certifis(
    certificate: tuple[Path, Path], run_program: RunProgram
) -> None:
    """Where there is nothing to trust certifi's bundle counts, unless the user named a file."""
    bundle = [str(certificate[0])]
    assert run_program(SLIM, args=bundle).stdout == "1\n"
    named = {"SSL_CERT_FILE": str(certificate[1])}
    assert run_program(SLIM, env=named, args=bundle).stdout == "0\n"


# -- the process we live in ----------------------------------------------------------------------


def test_no_socket_is_left_behind(server: PlatformServer) -> None:
    """A hundred clients that were closed hold no descriptor, whatever they were answered."""
    server.default = "200"
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208 - a count
    for number in range(100):
        if number % 3 == 0:
            server.say(["reset"])
        client = HttpClient(server.url, timeout=2)
        _post(client, server.url)
        client.close()
    gc.collect()
    until = time.monotonic() + 5
    while server._http.open_sockets and time.monotonic() < until:
        time.sleep(0.01)
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # noqa: PTH208 - a count


def test_a_forked_child_uses_a_connection_of_its_own(
    server: PlatformServer, client: HttpClient
) -> None:
    """A child's request neither travels on its parent's connection nor closes it."""
    server.default = "200"
    _post(client, server.url)
    child = os.fork()
    if child == 0:
        answer = _post(client, server.url)
        os._exit(0 if isinstance(answer, HttpAnswer) and answer.status == 200 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert isinstance(_post(client, server.url), HttpAnswer)
    assert len(server.requests) == 3


PROGRAM = """
import sys, urllib3
from opentelemetry.instrumentation.urllib3 import URLLib3Instrumentor
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from cirron_otel.destinations.http import HttpClient

seen = InMemorySpanExporter()
provider = TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(seen))
URLLib3Instrumentor().instrument(tracer_provider=provider)
urllib3.PoolManager().request("GET", sys.argv[1])
client = HttpClient(sys.argv[1])
print(client.request("POST", sys.argv[1], headers={}, body=b"x").status)
print([span.name for span in seen.get_finished_spans()])
urllib3.PoolManager().request("GET", sys.argv[1])
print(len(seen.get_finished_spans()))
"""


def test_our_requests_make_no_spans(server: PlatformServer, run_program: RunProgram) -> None:
    """Where urllib3 is instrumented the program's requests are traced and ours are not."""
    server.default = "200"
    run = run_program(PROGRAM, args=[server.url])
    assert run.stdout.splitlines() == ["200", "['GET']", "2"]
    assert ["traceparent" in request.headers for request in server.requests] == [True, False, True]


def test_a_server_that_reads_nothing_is_given_up() -> None:
    """A receiver that accepts the connection and never reads holds a large body no longer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = HttpClient(url, timeout=0.5)
        answers: list[object] = []
        thread = threading.Thread(
            target=lambda: answers.append(_post(client, url, os.urandom(20_000_000)))
        )
        thread.start()
        thread.join(20)
        client.close()
    assert answers == [RetryAfter(None, "no answer in time")]
