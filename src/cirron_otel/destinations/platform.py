"""The Cirron platform, or a server of one's own that speaks its language: ``POST /v1/traces``.

The body is the batch file as it lies in the spool, always compressed. Files of snapshots go up
by their own route before the rows that name them.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import msgspec

from cirron_otel._guard import Guard
from cirron_otel.destinations.base import (
    Accepted,
    Answer,
    Parcel,
    Rejected,
    RetryAfter,
    TooLarge,
)
from cirron_otel.destinations.http import HttpAnswer, HttpClient
from cirron_otel.destinations.tls import Tls
from cirron_otel.version import VERSION

#: The name of the platform's cursor.
NAME = "platform"

#: Seconds that one request may take; a batch has at most 4 MB before compression.
TIMEOUT_S = 10.0

#: A key that was refused is tried again after this time even if it is still the same: rights may
#: have been given to it meanwhile.
REFUSED_KEY_PAUSE_S = 300.0
_KEY_CHECK_S = 30.0

_OK = range(200, 300)
_UNKNOWN_KEY = (401, 403)
_WRONG_BATCH = (400, 422)
_TOO_LARGE = 413
_GZIP = 31  # zlib's window bits for a gzip header, which then holds no time and no name
_LEVEL = 1
_FILE_URI = b'"file://'
_REMEMBERED = 1000
_LONGEST_ADDRESS = 2048


class Platform:
    """Delivers batches to ``<endpoint><ingest_path>``.

    ``key`` is asked for the API key whenever the last one was refused, so that a key that is
    changed in a file counts without a restart. ``output_dir`` is where snapshot files may lie:
    no other file is ever uploaded.
    """

    def __init__(  # noqa: PLR0913 - an address, a key, and what tests and servers of one's own set
        self,
        endpoint: str,
        ingest_path: str,
        key: Callable[[], str | None],
        *,
        output_dir: Path,
        guard: Guard | None = None,
        timeout: float = TIMEOUT_S,
        tls: Tls | None = None,
    ) -> None:
        """Makes no connection. Raises ``ConfigurationError``, see :class:`HttpClient`."""
        self.name = NAME
        self.url = f"{endpoint}{ingest_path}"
        self.description = f"platform {self.url}"
        self._read_key = key
        self._key = key()
        self._refused: tuple[str | None, float, RetryAfter] | None = None
        self.guard = guard or Guard()
        self._blobs = _Blobs(self, Path(output_dir))
        self.client = HttpClient(self.url, timeout=timeout, tls=tls)

    def send(self, parcel: Parcel) -> Answer:
        """Try once to deliver; blocks for a few times the timeout at most.

        With snapshot files it is one request for each that was not uploaded yet, and one for the
        rows; a large file takes as long as it makes progress.
        """
        if (refused := self._still_refused()) is not None:
            return refused
        data = parcel.data
        if _FILE_URI in data:
            uploaded = self._blobs.upload(data)
            if isinstance(uploaded, RetryAfter):
                return uploaded
            data = uploaded
        headers = {
            "Content-Type": "application/json",
            "Content-Encoding": "gzip",
            "X-Cirron-Batch-Id": parcel.batch_id,
        }
        answer = self.request("POST", self.url, headers, compressed(data))
        if isinstance(answer, RetryAfter):
            return answer
        return self._judge(answer)

    def request(
        self,
        method: str,
        url: str,
        headers: Mapping[str, str],
        body: Any,  # noqa: ANN401
    ) -> HttpAnswer | RetryAfter:
        """One request with what every one bears."""
        return self.client.request(
            method,
            url,
            headers={
                "Authorization": f"Bearer {self._key}",
                "User-Agent": f"cirron-otel/{VERSION}",
                "X-Cirron-SDK-Version": VERSION,
                **headers,
            },
            body=body,
        )

    def close(self) -> None:
        """Give up the connection."""
        self.client.close()

    # -- answers ---------------------------------------------------------------------------------

    def _judge(self, answer: HttpAnswer) -> Answer:
        status = answer.status
        if status in _OK:
            if answer.headers.get("content-type", "").startswith("text/html"):
                # A login page or a proxy: nobody took the batch.
                return RetryAfter(
                    None, f"{self.url} is answered by a web page; is api_endpoint right?", status
                )
            return Accepted()
        if status == _TOO_LARGE:
            return TooLarge(None, status, answer.text)
        if status in _WRONG_BATCH:
            return Rejected(status, answer.text)
        return self.postponed(answer)

    def postponed(self, answer: HttpAnswer) -> RetryAfter:
        """What an answer means that leaves the batch in the queue."""
        status = answer.status
        if status in _UNKNOWN_KEY:
            return self._refuse(status, answer.text)
        if "location" in answer.headers:
            reason = f"redirected to {_without_query(answer.headers['location'])}; set api_endpoint"
        elif status in {404, 405}:
            reason = f"HTTP {status}: is ingest_path right? {answer.text}"
        else:
            reason = f"HTTP {status}: {answer.text}"
        return RetryAfter(answer.retry_after, reason.rstrip(": "), status)

    # -- the key ---------------------------------------------------------------------------------

    def _refuse(self, status: int, text: str) -> RetryAfter:
        answer = RetryAfter(
            _KEY_CHECK_S, f"the API key is refused (HTTP {status}): {text}", status, told=True
        )
        if self._refused is None or self._refused[0] != self._key:
            self.guard.warn(
                f"{self.name} refuses {hash(self._key)}",
                f"{self.description} refuses the API key (HTTP {status}); what is recorded stays "
                "on disk and is sent when the key is changed where it came from",
            )
        self._refused = (self._key, time.monotonic(), answer)
        return answer

    def _still_refused(self) -> RetryAfter | None:
        """What to answer without asking, while the key is the one that was refused."""
        if self._refused is None:
            return None
        key, since, answer = self._refused
        self._key = self._read_key() or self._key
        if self._key == key and time.monotonic() - since < REFUSED_KEY_PAUSE_S:
            return answer
        if self._key != key:
            self._refused = None
        return None


def compressed(data: bytes) -> bytes:
    """The same bytes for the same data, always: no time in the header. Frees the GIL."""
    packer = zlib.compressobj(_LEVEL, zlib.DEFLATED, _GZIP)
    return packer.compress(data) + packer.flush()


def _without_query(url: str) -> str:
    parts = urlsplit(url)
    place = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{place}{parts.path}" if place else parts.path


# -- files of snapshots --------------------------------------------------------------------------


class _Blobs:
    """Uploads the files that snapshot rows name, once each, and puts their new addresses in."""

    def __init__(self, platform: Platform, output_dir: Path) -> None:
        self._platform = platform
        self._root = output_dir / "snapshots"
        #: Local URI to the address it has now; the same one where the server refused the file.
        self._uploaded: dict[str, str] = {}

    def upload(self, data: bytes) -> bytes | RetryAfter:
        """The batch with addresses that others can open.

        A file that is gone, lies elsewhere, or is refused for good keeps its local address; then
        the rows go all the same.
        """
        try:
            top = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
            rows = msgspec.json.decode(top.get("snapshots", b"[]"), type=list[dict[str, Any]])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return data
        changed = False
        for row in rows:
            uri = row.get("blob_uri")
            if not isinstance(uri, str) or (path := self._allowed(uri)) is None:
                continue
            address = self._uploaded.get(uri) or self._put(uri, path)
            if isinstance(address, RetryAfter):
                return address
            if address is not None and address != uri:
                row["blob_uri"] = address
                changed = True
        if not changed:
            return data
        return msgspec.json.encode({**top, "snapshots": rows})

    def _allowed(self, uri: str) -> Path | None:
        """The file of a URI, if it is one of this output directory's snapshots."""
        root = self._root
        try:
            parts = urlsplit(uri)
            if parts.scheme != "file" or parts.netloc not in {"", "localhost"}:
                return None
            path = Path(unquote(parts.path))
            inside = path.resolve().relative_to(root.resolve())
        except (ValueError, OSError, RuntimeError):
            return None
        # <span id>/<file>: what lies deeper or beside is nothing of ours.
        return path if len(inside.parts) == 2 else None  # noqa: PLR2004

    def _put(self, uri: str, path: Path) -> str | RetryAfter | None:
        key = f"snapshots/{path.parent.name}/{path.name}"
        url = f"{self._platform.url}/blobs/{quote(key)}"
        try:
            with path.open("rb") as file:
                size = file.seek(0, 2)
                file.seek(0)
                headers = {
                    "Content-Type": "application/octet-stream",
                    "Content-Length": str(size),
                    "X-Cirron-Blob-Key": key,
                }
                answer = self._platform.request("PUT", url, headers, file)
        except OSError:
            return None
        if isinstance(answer, RetryAfter):
            return answer
        if answer.status in _OK:
            self._remember(uri, _address(answer) or url)
        elif answer.status in {*_WRONG_BATCH, 404, 405, 409, _TOO_LARGE}:
            self._platform.guard.lost("blob_refused")
            self._remember(uri, uri)
        else:
            return self._platform.postponed(answer)
        return self._uploaded[uri]

    def _remember(self, uri: str, address: str) -> None:
        if len(self._uploaded) >= _REMEMBERED:
            self._uploaded.clear()  # the same file again is harmless
        self._uploaded[uri] = address


def _address(answer: HttpAnswer) -> str | None:
    """Where the server says that the file lies now."""
    for text in (answer.headers.get("location", ""), answer.text):
        if "://" in text and " " not in text and len(text) < _LONGEST_ADDRESS:
            return text
    return None
