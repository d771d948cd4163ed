"""What every destination is, what it is handed, and what it may answer.

The forwarder reads batch files and hands each to every destination as a :class:`Parcel`; the
destination tries once and says what became of it. It decides nothing about *when* to try again:
back-off, order and cursors are the forwarder's.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import msgspec

from cirron_otel.batch import Batch, decode

#: How much of an answer's text is kept for people to read.
ANSWER_CHARS = 2000

# In the order in which they stand in a file. `open` is no list of rows to cut: it is one statement
# about one moment, and the newest one replaces those before it.
_ROWS = ("windows", "spans", "marks", "snapshots", "logs")
_OPEN = "open"

_decode_top = msgspec.json.Decoder(dict[str, msgspec.Raw])
_decode_rows = msgspec.json.Decoder(list[msgspec.Raw])
_encode = msgspec.json.Encoder().encode


class Accepted(msgspec.Struct, frozen=True, tag=True):
    """The receiver has it.

    ``note`` is what the receiver complained of while taking it (OTLP's partial success), for a
    log line; ``refused_rows`` how many rows it threw away by its own account.
    """

    note: str = ""
    refused_rows: int = 0


class RetryAfter(msgspec.Struct, frozen=True, tag=True):
    """Not taken now: try again.

    ``seconds`` is what the receiver asked for, ``None`` leaves it to the forwarder's back-off.
    ``status`` is the HTTP status, ``None`` where there was no answer. ``told`` is true where the
    destination has told the user itself, once, and a warning a minute would only repeat it.
    ``moved`` is true where a part of the parcel was taken before this answer.
    """

    seconds: float | None
    reason: str
    status: int | None = None
    told: bool = False
    moved: bool = False


class Rejected(msgspec.Struct, frozen=True, tag=True):
    """This parcel will never be taken: set it aside, go on with the next."""

    status: int | None
    answer: str


class TooLarge(msgspec.Struct, frozen=True, tag=True):
    """Too many bytes for the receiver: halve it.

    ``limit`` is its limit in bytes where it is known. ``status`` and ``answer`` are what to set
    aside with a parcel that has no halves.
    """

    limit: int | None = None
    status: int | None = None
    answer: str = ""


Answer = Accepted | RetryAfter | Rejected | TooLarge


class Parcel:
    """One batch file, or a part of one, on its way to a destination.

    ``batch_id`` is the id to deliver under, ``path`` the file it came from, ``data`` the bytes
    of the batch as spool v1 JSON. ``part`` is empty for a whole file; the parts of a file are
    ``(0,)`` and ``(1,)``, their halves ``(0, 0)``, ``(0, 1)`` and so on. Not thread-safe.
    """

    def __init__(
        self,
        batch_id: str,
        path: Path,
        data: bytes,
        part: tuple[int, ...] = (),
        whole_id: str | None = None,
    ) -> None:
        self.batch_id = batch_id
        self.path = path
        self.data = data
        self.part = part
        #: The id of the file's batch: what the ids of its parts are derived from.
        self.whole_id = batch_id if whole_id is None else whole_id

    @classmethod
    def read(cls, path: Path) -> Parcel:
        """The whole batch in a file of the spool. Reads the file; raises ``OSError``."""
        return cls(path.name.removesuffix(".json").rpartition("-")[2], path, path.read_bytes())

    @cached_property
    def batch(self) -> Batch:
        """The rows, decoded at the first use. Raises ``SpoolFormatError``."""
        return decode(self.data)

    def halves(self) -> list[Parcel]:
        """The two halves by rows, each a whole batch under an id of its own.

        The ids are derived from the file's, so that the same halves made again, by whomever,
        repeat nothing at the receiver. Empty when there is only one row, or bytes that are no
        batch: such a parcel cannot be made smaller.
        """
        try:
            top = _decode_top.decode(self.data)
            rows = [
                (key, row) for key in _ROWS if key in top for row in _decode_rows.decode(top[key])
            ]
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return []
        if _OPEN in top:
            rows.append((_OPEN, top[_OPEN]))
        if len(rows) < 2:  # noqa: PLR2004 - what cannot be halved
            return []
        middle = len(rows) // 2
        return [self._half(top, rows[:middle], 0), self._half(top, rows[middle:], 1)]

    def _half(
        self, top: dict[str, msgspec.Raw], rows: Sequence[tuple[str, msgspec.Raw]], side: int
    ) -> Parcel:
        part = (*self.part, side)
        batch_id = part_id(self.whole_id, part)
        document: dict[str, object] = {}
        for key, value in top.items():
            if key == "batch_id":
                document[key] = batch_id
            elif key in _ROWS:
                document[key] = [row for owner, row in rows if owner == key]
            elif key != _OPEN or (rows and rows[-1][0] == _OPEN):
                document[key] = value
        for optional in ("windows", "logs"):
            if not document.get(optional, True):
                del document[optional]
        return Parcel(batch_id, self.path, _encode(document), part, self.whole_id)


def part_id(batch_id: str, part: tuple[int, ...]) -> str:
    """The id of a part of a batch: 32 hex, the same whenever the same part is made."""
    text = f"{batch_id}/{'.'.join(map(str, part))}"
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class DestinationSpec(msgspec.Struct, frozen=True, kw_only=True):
    """What is needed to make a destination, in this process or another: only JSON types.

    ``options`` may hold secrets; they are not shown.
    """

    kind: Literal["platform", "event_stream", "otlp", "prometheus"]
    #: As :attr:`Destination.name` and :attr:`Destination.description`.
    name: str
    description: str
    options: dict[str, Any] = {}

    def __rich_repr__(self) -> list[tuple[str, object]]:
        """What may be shown."""
        return [("kind", self.kind), ("name", self.name), ("description", self.description)]

    def __repr__(self) -> str:
        """Without the options."""
        shown = ", ".join(f"{key}={value!r}" for key, value in self.__rich_repr__())
        return f"DestinationSpec({shown})"


class Destination(Protocol):
    """A receiver of batches. One thread uses it at a time; it is made and used in one process."""

    #: Stable and safe as a file name: the name of its cursor, such as ``platform``.
    name: str
    #: For people; holds no secret.
    description: str

    def send(self, parcel: Parcel) -> Answer:
        """Try once to deliver; blocks at most its timeout.

        Trouble of the network, of the receiver and of the parcel is an answer, never raised.
        """
        ...

    def close(self) -> None:
        """Give up connections and files. From any thread; a ``send`` that runs may fail by it."""
        ...


@runtime_checkable
class Measured(Protocol):
    """A destination that tells its receiver how its own queue is.

    ``measure`` is set by whoever drains: it gives what ``health()`` says of this destination, and
    ``losses`` by their reason. Called on the thread of ``send``.
    """

    measure: Callable[[], Mapping[str, Any]] | None


@runtime_checkable
class Listening(Protocol):
    """A destination at whose port others ask."""

    def close_in_child(self) -> None:
        """In a forked child: let go of what is its parent's."""
        ...


@runtime_checkable
class Omitting(Protocol):
    """A destination that sends less than what is in the batches, on purpose or for want of it."""

    def omitted(self) -> Mapping[str, int]:
        """What it left out, by the keys of ``health()["destinations"]``. From any thread."""
        ...
