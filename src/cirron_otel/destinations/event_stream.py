"""The event stream of a Cirron runtime: batches as lines of JSON on standard output.

Chosen where the runtime has set ``CIRRON_RUN_ID``. A line is::

    {"__cirron_event__":"trace_batch","schema_version":1,"sdk_version":"...","payload":{<batch>}}

The program prints to the same place, from other threads and other processes. So that no line is
torn: on a pipe a message has at most 4,096 bytes, which the system writes in one piece; it begins
with a line feed, because the program may have printed half a line; and it goes to the file
descriptor itself, past the program's own buffers and their locks.

A snapshot's file is told of by a line of its own before the rows that name it::

    {"__cirron_event__":"trace_blob",...,"payload":{"remote_key":"...","local_path":"..."}}
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import select
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any, TextIO
from urllib.parse import unquote, urlsplit

import msgspec

from cirron_otel.batch import SCHEMA_VERSION
from cirron_otel.destinations.base import Accepted, Answer, Parcel, Rejected, RetryAfter, part_id
from cirron_otel.version import VERSION

#: The name of the event stream's cursor.
NAME = "event_stream"

#: What one write puts into a pipe in one piece, on Linux; elsewhere a message may still be torn.
PIPE_BYTES = 4096

#: Seconds without any progress after which standard output counts as stuck.
STALL_S = 10.0

_LISTS = ("windows", "spans", "marks", "snapshots", "logs")
_FRAME_BYTES = 200  # what a line has around its payload, at most
_EMPTY = frozenset({"spans", "marks", "snapshots"})

_encode = msgspec.json.Encoder().encode


class EventStream:
    """Writes batches as event lines to ``stream``, by default ``sys.stdout`` as it is now.

    A real file or pipe is written to past the stream object; a stand-in (a notebook's, a test's)
    through its ``write``.
    """

    def __init__(self, stream: TextIO | None = None, *, stall: float = STALL_S) -> None:
        self.name = NAME
        self.description = "event stream on standard output"
        self._stall = stall
        stream = sys.stdout if stream is None else stream
        self._stream: TextIO | None = stream
        self._fd = _duplicate(stream)
        self._limit = 0 if self._fd is None or _is_file(self._fd) else PIPE_BYTES
        #: Which message of which parcel comes next, where a stall interrupted it.
        self._resume: tuple[str, int] = ("", 0)

    def send(self, parcel: Parcel) -> Answer:
        """Write the parcel's messages; blocks as long as they make progress.

        After a stall the next call for the same parcel goes on where it stopped.
        """
        try:
            messages = list(events(parcel, self._limit))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            return Rejected(None, f"not a batch: {exc}")
        this = f"{parcel.path} {parcel.batch_id}"
        done = self._resume[1] if self._resume[0] == this else 0
        for number in range(done, len(messages)):
            if (trouble := self._write(messages[number])) is not None:
                self._resume = (this, number)
                return RetryAfter(None, trouble)
        self._resume = ("", 0)
        return Accepted()

    def _write(self, message: bytes) -> str | None:
        """One message, whole; returns what kept it from that."""
        if self._fd is None:
            return self._write_text(message)
        rest = memoryview(message)
        until = time.monotonic() + self._stall
        while rest:
            try:
                if not _takes(self._fd, until - time.monotonic()):
                    return "standard output takes nothing more"
                # Larger pieces may block for good; with these the reader has room for them.
                written = os.write(self._fd, rest[: self._limit or len(rest)])
            except BlockingIOError:
                time.sleep(0.01)
                continue
            except OSError as exc:
                if exc.errno == errno.EPIPE:
                    return "nobody reads standard output"
                return f"standard output: {exc.strerror}"
            if written:
                until = time.monotonic() + self._stall
            rest = rest[written:]
        return None

    def _write_text(self, message: bytes) -> str | None:
        stream = self._stream
        if stream is None:
            return "there is no standard output"
        try:
            stream.write(message.decode())
            stream.flush()
        except Exception as exc:  # noqa: BLE001 - a foreign object's own
            return f"standard output: {exc!r}"
        return None

    def close(self) -> None:
        """Give up our descriptor; the program's own stays open."""
        fd, self._fd = self._fd, None
        self._stream = None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)


def events(parcel: Parcel, limit: int) -> Iterator[bytes]:
    """The messages of a parcel, each at most ``limit`` bytes where its rows allow it (0: one).

    A message's payload is a whole batch; where there are several, each has an id derived from the
    parcel's, the same whenever the same parcel is written. A row that alone is longer than the
    limit makes a longer message. Raises ``msgspec.DecodeError`` for what is no batch.
    """
    data = parcel.data
    if b"\n" in data:  # foreign, and written for people: an event is one line
        data = _encode(msgspec.json.decode(data))
    top: dict[str, Any] = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    for blob in _blobs(top, data):
        yield _message(top, "trace_blob", blob)
    if not limit or len(data) + _FRAME_BYTES <= limit:
        yield _message(top, "trace_batch", top)
        return
    rows = [
        (key, row)
        for key in _LISTS
        if key in top
        for row in msgspec.json.decode(top[key], type=list[msgspec.Raw])
    ]
    frame = {key: value for key, value in top.items() if key not in _LISTS and key != "open"}
    if "open" in top:
        rows.append(("open", top["open"]))
    empty = {**frame, "spans": [], "marks": [], "snapshots": []}
    envelope = len(_message(top, "trace_batch", empty))
    packed: list[tuple[str, msgspec.Raw]] = []
    size, number = envelope, 0
    for key, row in rows:
        longer = len(bytes(row)) + len(key) + 8  # at worst it brings its list with it
        if packed and size + longer > limit:
            yield _message(top, "trace_batch", _pack(frame, packed, parcel, number))
            packed, size, number = [], envelope, number + 1
        packed.append((key, row))
        size += longer
    yield _message(top, "trace_batch", _pack(frame, packed, parcel, number))


def _pack(
    frame: Mapping[str, Any], rows: list[tuple[str, msgspec.Raw]], parcel: Parcel, number: int
) -> dict[str, object]:
    batch: dict[str, object] = {}
    for key, value in frame.items():
        batch[key] = part_id(f"{parcel.batch_id}/events", (number,)) if key == "batch_id" else value
    for key in _LISTS:
        found = [row for owner, row in rows if owner == key]
        if found or key in _EMPTY:
            batch[key] = found
    batch.update({key: row for key, row in rows if key == "open"})
    return batch


def _blobs(top: Mapping[str, Any], data: bytes) -> Iterator[dict[str, str]]:
    """The files that the snapshots of a batch name, each once."""
    if b'"file://' not in data or "snapshots" not in top:
        return
    rows = msgspec.json.decode(top["snapshots"], type=list[dict[str, Any]])
    uris = dict.fromkeys(row.get("blob_uri") for row in rows)
    for uri in uris:
        parts = None
        with contextlib.suppress(ValueError):  # a foreign writer's
            parts = urlsplit(uri) if isinstance(uri, str) else None
        if parts is not None and parts.scheme == "file":
            path = PurePath(unquote(parts.path))
            key = f"snapshots/{path.parent.name}/{path.name}"
            yield {"remote_key": key, "local_path": str(path)}


def _message(top: Mapping[str, Any], kind: str, payload: Mapping[str, Any]) -> bytes:
    event = {
        "__cirron_event__": kind,
        "schema_version": top.get("schema_version", SCHEMA_VERSION),
        "sdk_version": top.get("sdk_version", VERSION),
        "payload": payload,
    }
    return b"\n" + _encode(event) + b"\n"


def _duplicate(stream: object) -> int | None:
    """A descriptor of our own for the file behind a stream; None where there is none."""
    if not isinstance(stream, io.TextIOWrapper):
        return None  # a notebook's stream has a descriptor too, but it does not lead to the reader
    try:
        return os.dup(stream.fileno())
    except (OSError, ValueError):
        return None


def _is_file(fd: int) -> bool:
    return stat.S_ISREG(os.fstat(fd).st_mode)


def _takes(fd: int, seconds: float) -> bool:
    """Whether a write would not block, after waiting ``seconds`` for that at most."""
    poll = select.poll()
    poll.register(fd, select.POLLOUT)
    return bool(poll.poll(max(0.0, seconds) * 1000))
