"""One bounded HTTP request: what the platform and OTLP over HTTP have in common.

The environment's proxies and certificates count: ``HTTPS_PROXY``, ``HTTP_PROXY``, ``ALL_PROXY``,
``NO_PROXY``; ``REQUESTS_CA_BUNDLE``, ``CURL_CA_BUNDLE``, ``SSL_CERT_FILE``, ``SSL_CERT_DIR``. Our
requests make no spans in a program that instruments urllib3.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import importlib
import io
import os
import socket
import ssl
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

import msgspec
import urllib3
from urllib3 import connection, connectionpool
from urllib3.exceptions import HTTPError

from cirron_otel.destinations.base import ANSWER_CHARS, RetryAfter
from cirron_otel.destinations.tls import Tls
from cirron_otel.errors import ConfigurationError
from cirron_otel.imports import untraced

if TYPE_CHECKING:
    from urllib3.response import BaseHTTPResponse

#: More of an answer is not read: it is for people, or a few fields of JSON or protobuf.
BODY_LIMIT = 64 * 1024

_CA_VARIABLES = ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE")
_KEEPS_METHOD = (307, 308)
_MAX_REDIRECTS = 3
_AT_ONCE = 64 * 1024
_GZIP = 31  # zlib's window bits for a gzip header


class HttpAnswer(msgspec.Struct, frozen=True):
    """What a server answered. Header names are in lower case; the body is cut, not compressed."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        """The body for people: one line, cut."""
        words = self.body[: 4 * ANSWER_CHARS].decode("utf-8", "replace").split()
        text = "".join(c if c.isprintable() else "?" for c in " ".join(words))
        return text if len(text) <= ANSWER_CHARS else f"{text[:ANSWER_CHARS]}..."

    @property
    def retry_after(self) -> float | None:
        """What ``Retry-After`` asks for in seconds, given as a number or as a date."""
        return retry_after(self.headers.get("retry-after"), self.headers.get("date"))


def retry_after(value: str | None, date: str | None = None) -> float | None:
    """Seconds to wait by a ``Retry-After`` header; ``None`` where it says nothing usable.

    A date counts from the answer's own ``Date`` where it has one: the clocks of two machines
    differ.
    """
    if value is None:
        return None
    value = value.strip()
    if value.isascii() and value.replace(".", "", 1).isdigit():
        return float(value)
    if (until := _date(value)) is None:
        return None
    now = _date(date) if date is not None else None
    return max(0.0, until - (time.time() if now is None else now))


def _date(text: str) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp()
    except (ValueError, OverflowError, IndexError, TypeError):
        return None


# -- an answer that has a deadline -------------------------------------------------------------


class _Deadline(io.RawIOBase):
    """A socket's bytes until a point in time: a server that trickles does not hold us for ever."""

    def __init__(self, sock: socket.socket, seconds: float) -> None:
        self._sock = sock
        self._until = time.monotonic() + seconds
        # As socket.makefile does: the socket is not closed under a reader.
        self._kept = sock.makefile("rb", buffering=0)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:  # noqa: ANN401 - anything with the buffer protocol
        left = self._until - time.monotonic()
        if left <= 0:
            raise TimeoutError("the answer took too long")
        self._sock.settimeout(left)
        return self._sock.recv_into(buffer)

    def close(self) -> None:
        if not self.closed:
            self._kept.close()
        super().close()


class _Response(http.client.HTTPResponse):
    def __init__(self, sock: socket.socket, *args: Any, **kwargs: Any) -> None:
        super().__init__(sock, *args, **kwargs)
        seconds = sock.gettimeout()
        if seconds is not None:
            self.fp.close()
            self.fp = io.BufferedReader(_Deadline(sock, seconds))


class _Connection(connection.HTTPConnection):
    response_class = _Response


class _TlsConnection(connection.HTTPSConnection):
    response_class = _Response


class _Pool(connectionpool.HTTPConnectionPool):
    ConnectionCls = _Connection


class _TlsPool(connectionpool.HTTPSConnectionPool):
    ConnectionCls = _TlsConnection


# -- the client --------------------------------------------------------------------------------


class HttpClient:
    """Requests to one server, over a connection that is kept.

    ``timeout`` bounds, in seconds, connecting, each 16 kB of what is sent (so that a slow line
    gets a large body through), and the whole of the answer; the name server is waited for as long
    as the system does. The environment is read when the client is made. One thread uses it at a
    time; in a forked child it makes a connection of its own.

    Raises ``ConfigurationError`` for a proxy or a certificate that cannot be used.
    """

    def __init__(self, url: str, *, timeout: float = 10.0, tls: Tls | None = None) -> None:
        self.timeout = timeout
        self._tls = tls or Tls()
        self._proxy = proxy_for(url)
        self._secure = url.startswith("https:")
        self._ssl: ssl.SSLContext | None = None
        # Reading the system's certificates takes 50 ms and cannot be wrong: that may wait for the
        # first request, which is on another thread. What somebody has named is read now.
        if self._secure and (self._tls != Tls() or any(map(os.environ.get, _CA_VARIABLES))):
            self._ssl = ssl_context(self._tls)
        if self._proxy is not None:
            _through(self._proxy).clear()
        self._pid = os.getpid()
        self._manager: urllib3.PoolManager | None = None

    def _here(self) -> urllib3.PoolManager:
        """The connections of this process, made at the first request."""
        if self._manager is None or os.getpid() != self._pid:
            # After a fork the parent's sockets are not closed, only forgotten.
            self._pid = os.getpid()
            options: dict[str, Any] = {"num_pools": 2, "maxsize": 1, "retries": False}
            if self._secure:
                self._ssl = options["ssl_context"] = self._ssl or ssl_context(self._tls)
            if self._proxy is None:
                self._manager = urllib3.PoolManager(**options)
            else:
                self._manager = _through(self._proxy, **options)
            self._manager.pool_classes_by_scheme = {"http": _Pool, "https": _TlsPool}
        return self._manager

    def request(
        self,
        method: str,
        url: str,
        *,
        headers: Mapping[str, str],
        body: bytes | IO[bytes] | None = None,
    ) -> HttpAnswer | RetryAfter:
        """One request and the server's answer, or why there was none. Raises nothing for trouble.

        A redirect is followed where it keeps the method and stays on the host, or goes from http
        to https there; else it is the answer, because the headers hold a key.
        """
        try:
            with untraced():
                for _ in range(_MAX_REDIRECTS):
                    answer = self._once(method, url, headers, body)
                    target = answer.headers.get("location", "")
                    if answer.status not in _KEEPS_METHOD or not target:
                        break
                    target = urljoin(url, target)
                    if not _same_place(url, target) or not (body is None or _rewound(body)):
                        break
                    url = target
                return answer
        except (HTTPError, OSError, http.client.HTTPException, ValueError) as exc:
            return RetryAfter(None, _reason(exc))

    def _once(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: bytes | IO[bytes] | None,
    ) -> HttpAnswer:
        if isinstance(body, bytes) and len(body) > _AT_ONCE:
            headers = {**headers, "Content-Length": str(len(body))}
            body = io.BytesIO(body)
        response = self._here().request(
            method,
            url,
            body=body,
            headers=dict(headers),
            timeout=urllib3.Timeout(total=self.timeout),
            retries=False,
            redirect=False,
            preload_content=False,
            decode_content=False,
        )
        try:
            data = response.read(BODY_LIMIT + 1, decode_content=False)
            whole = len(data) <= BODY_LIMIT and not response.read(1, decode_content=False)
            if not whole:
                response.close()  # the rest is not read, so the connection cannot be used again
            found = {name.lower(): value for name, value in response.headers.items()}
            return HttpAnswer(response.status, found, _plain(response, data[:BODY_LIMIT]))
        except BaseException:
            response.close()
            raise
        finally:
            response.release_conn()

    def close(self) -> None:
        """Close the connections of this process."""
        if self._manager is not None and os.getpid() == self._pid:
            self._manager.clear()


def _through(proxy: str, **options: Any) -> urllib3.ProxyManager:
    try:
        parts = urlsplit(proxy)
        headers = None
        if parts.username is not None:
            login = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
            headers = urllib3.make_headers(proxy_basic_auth=login)
        return urllib3.ProxyManager(proxy, proxy_headers=headers, **options)
    except (HTTPError, ValueError) as exc:
        raise ConfigurationError(
            "the proxy in HTTP_PROXY, HTTPS_PROXY or ALL_PROXY cannot be used "
            f"({type(exc).__name__}): it must be a URL such as http://proxy.example:3128"
        ) from None


def _plain(response: BaseHTTPResponse, data: bytes) -> bytes:
    """The body without its compression, cut at the limit; as it is where that cannot be done."""
    encoding = response.headers.get("content-encoding", "").strip().lower()
    if encoding not in {"gzip", "x-gzip", "deflate"}:
        return data
    try:
        unpack = zlib.decompressobj(_GZIP if "gzip" in encoding else zlib.MAX_WBITS)
        return unpack.decompress(data, BODY_LIMIT)
    except zlib.error:
        return data


def _rewound(body: bytes | IO[bytes]) -> bool:
    if isinstance(body, bytes):
        return True
    body.seek(0)
    return True


def _same_place(one: str, other: str) -> bool:
    """Whether a redirect stays where the key may go: same host, not from https to http."""
    a, b = urlsplit(one), urlsplit(other)
    if b.scheme not in {"http", "https"} or a.hostname != b.hostname:
        return False
    if a.scheme == b.scheme:
        return a.port == b.port
    return b.scheme == "https" and a.port in {None, 80} and b.port in {None, 443}


def _reason(exc: BaseException) -> str:
    """What went wrong, for people, without addresses of objects or headers."""
    kinds = (OSError, HTTPError, http.client.HTTPException)
    where = ""
    while isinstance(inner := exc.__cause__ or exc.__context__, kinds):
        if isinstance(exc, urllib3.exceptions.ProxyError):
            where = "the proxy: "
        exc = inner
    return where + _innermost_reason(exc)


def _innermost_reason(exc: BaseException) -> str:
    if isinstance(exc, (TimeoutError, urllib3.exceptions.TimeoutError)):
        return "no answer in time"
    if isinstance(exc, ssl.SSLCertVerificationError):
        return f"its certificate is not trusted: {exc.verify_message}"
    if isinstance(exc, ssl.SSLError) and exc.reason == "WRONG_VERSION_NUMBER":
        return "it speaks no TLS (is it http://, or another port?)"
    if isinstance(exc, OSError) and exc.strerror:
        return exc.strerror
    if isinstance(exc, http.client.HTTPException) and not isinstance(exc, OSError):
        return f"the answer is no HTTP ({type(exc).__name__})"
    text = str(exc).rpartition(">: ")[2] or type(exc).__name__
    return text[:200]


# -- the environment ---------------------------------------------------------------------------


def proxy_for(url: str) -> str | None:
    """The proxy that the environment names for ``url``; ``None`` for a direct connection."""
    parts = urlsplit(url)
    if proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    proxies = getproxies()
    found = proxies.get(parts.scheme) or proxies.get("all")
    if not found:
        return None
    return found if "://" in found else f"http://{found}"


def ssl_context(tls: Tls) -> ssl.SSLContext:
    """What to trust: ``tls.ca``, else the environment's bundle, else the system's.

    Raises ``ConfigurationError`` naming the file, and who named it, for one that cannot be read.
    """
    named = [(tls.ca, "the settings"), *((os.environ.get(v), v) for v in _CA_VARIABLES)]
    ca, source = next(((path, source) for path, source in named if path), (None, ""))
    try:
        if ca is None:
            context = ssl.create_default_context()  # OpenSSL reads SSL_CERT_FILE and _DIR itself
            _fill_empty_store(context)
        elif Path(ca).is_dir():
            context = ssl.create_default_context(capath=ca)
        else:
            context = ssl.create_default_context(cafile=ca)
    except (OSError, ValueError) as exc:  # ssl.SSLError is an OSError
        raise ConfigurationError(
            f"the certificates in {ca} (from {source}) cannot be read: {_reason(exc)}; "
            "it must be a file in PEM format, or a directory that c_rehash prepared"
        ) from None
    if tls.client_certificate is not None:
        try:
            # The empty password: without one OpenSSL asks at the terminal and waits.
            context.load_cert_chain(tls.client_certificate, tls.client_key, password="")
        except (OSError, ValueError) as exc:
            raise ConfigurationError(
                f"the client certificate {tls.client_certificate} or its key "
                f"{tls.client_key or '(in the same file)'} cannot be used: {_reason(exc)}; "
                "both must be PEM files, the key without a password"
            ) from None
    return context


def _fill_empty_store(context: ssl.SSLContext) -> None:
    """Trust certifi's authorities where the system has none, as in slim container images."""
    if context.cert_store_stats()["x509_ca"] or os.environ.get("SSL_CERT_FILE"):
        return
    with contextlib.suppress(ImportError):
        context.load_verify_locations(importlib.import_module("certifi").where())
