"""The hash chain of a diary, the names of the four files of a record, the length of a line."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

from cirron_otel.training_record.canonical import canonical

DIARY = "diary.jsonl"
METRICS = "metrics.jsonl"
SEAL = "record.json"
SIGNATURE = "record.sig"

#: Bytes of a line, its end counted: readers pass over longer ones, so writers write none.
MAX_LINE = 16 * 1024 * 1024

#: ``prev`` of the first line.
GENESIS = "0" * 64


def line_hash(prev: str, body: Mapping[str, object]) -> str:
    """The ``hash`` of a line: SHA-256 of ``prev`` and the canonical form of ``body``, in hex.

    ``prev`` is the ``hash`` of the line before, or :data:`GENESIS`; ``body`` is the line without
    the keys ``prev`` and ``hash``. Raises what :data:`~cirron_otel.training_record.canonical.
    canonical` raises, and ``UnicodeEncodeError`` where ``prev`` is not ASCII.
    """
    return sha256((prev + canonical(body)).encode("ascii")).hexdigest()


def body_of(line: Mapping[str, object]) -> dict[str, object]:
    """What of a line is hashed: everything but ``prev`` and ``hash``."""
    return {key: value for key, value in line.items() if key not in {"prev", "hash"}}
