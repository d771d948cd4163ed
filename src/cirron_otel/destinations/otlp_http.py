"""OTLP over HTTP, and what every way of sending OTLP does."""

from __future__ import annotations

import zlib
from typing import Protocol

from cirron_otel.destinations.base import Accepted, Answer, Rejected, RetryAfter, TooLarge
from cirron_otel.destinations.http import HttpAnswer, HttpClient
from cirron_otel.destinations.otlp_settings import Endpoint
from cirron_otel.otlp.wire import Wire
from cirron_otel.version import VERSION

_GZIP_WINDOW = 31
_OK, _BAD_REQUEST, _TOO_LARGE = range(200, 300), 400, 413


class Sender(Protocol):
    """One request at a time to one receiver."""

    def send(self, body: bytes) -> Answer:
        """Send a request's body once; blocks at most the timeout, raises nothing for trouble."""
        ...

    def close(self) -> None:
        """Give up connections; from any thread."""
        ...


class HttpSender:
    """Requests by HTTP POST."""

    def __init__(self, target: Endpoint, wire: Wire) -> None:
        self._target = target
        self._wire = wire
        self._client = HttpClient(target.url, timeout=target.timeout, tls=target.tls)
        self._headers = {
            "user-agent": f"cirron-otel/{VERSION}",
            **target.headers,
            "content-type": wire.content_type,
        }
        if target.compression != "none":
            self._headers["content-encoding"] = target.compression

    def send(self, body: bytes) -> Answer:
        """POST once. The answer as the destination's contract has it."""
        if self._target.compression != "none":
            window = _GZIP_WINDOW if self._target.compression == "gzip" else zlib.MAX_WBITS
            packer = zlib.compressobj(6, zlib.DEFLATED, window)
            body = packer.compress(body) + packer.flush()
        answer = self._client.request("POST", self._target.url, headers=self._headers, body=body)
        if isinstance(answer, RetryAfter):
            return answer
        if answer.status in _OK and "text/html" not in answer.headers.get("content-type", ""):
            refusal = self._wire.refusal(answer.body)
            return Accepted(refusal.message, refusal.rejected)
        said = "a web page, no OTLP" if answer.status in _OK else self._said(answer)
        if answer.status == _BAD_REQUEST:
            return Rejected(answer.status, said)
        if answer.status == _TOO_LARGE:
            return TooLarge(None, answer.status, said)
        # Anything else may be put right by somebody: a key, a path, a proxy, a full disk.
        reason = f"HTTP {answer.status}" + (f": {said[:200]}" if said else "")
        return RetryAfter(answer.retry_after, reason, answer.status)

    def _said(self, answer: HttpAnswer) -> str:
        return self._wire.reason(answer.body) or answer.text

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
