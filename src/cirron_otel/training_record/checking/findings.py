"""What a verifier found, a few examples of each kind and how many there were."""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

PASS = "pass"  # noqa: S105 - a verdict, not a secret
FAIL = "fail"
ABSENT = "absent"
UNCHECKED = "unchecked"
SKIPPED = "skipped"
#: Worth knowing, and not wrong. Only checks that the format's first verifier does not have say so.
NOTE = "note"

_SHOWN = 3
_MAX_SHOWN_TEXT = 60


class Check(NamedTuple):
    """One check: its short name, its name for people, its status, and a sentence."""

    name: str
    label: str
    status: str
    message: str


class Findings:
    """Examples and counts by kind. Constant memory."""

    def __init__(self) -> None:
        self._count: dict[str, int] = defaultdict(int)
        self._examples: dict[str, list[str]] = defaultdict(list)

    def add(self, kind: str, text: str) -> None:
        """Count one more of ``kind``; the first three texts are kept."""
        self._count[kind] += 1
        if len(self._examples[kind]) < _SHOWN:
            self._examples[kind].append(text)

    def __contains__(self, kind: str) -> bool:
        return kind in self._count

    def count(self, kind: str) -> int:
        """How many of ``kind`` there were."""
        return self._count.get(kind, 0)

    def first(self, kind: str) -> str:
        """The first of ``kind``."""
        return self._examples[kind][0]

    def text(self, kind: str) -> str:
        """The examples of ``kind`` in one line, and how many more there are."""
        shown = "; ".join(self._examples[kind])
        more = self._count[kind] - len(self._examples[kind])
        return f"{shown}; and {more} more" if more > 0 else shown


def shown(value: object, limit: int = _MAX_SHOWN_TEXT) -> str:
    """A value of the record as it may be shown on a terminal: short, and printable throughout."""
    if isinstance(value, int) and value.bit_length() > 4 * limit:
        return "a very long integer"
    if isinstance(value, (dict, list)):
        return "an object" if isinstance(value, dict) else "a list"
    text = value if isinstance(value, str) else str(value)
    cut = text[: limit + 1]
    clean = "".join(c if c.isprintable() else "\ufffd" for c in cut)
    return clean if len(text) <= limit else clean[:limit] + "..."


def shown_hash(value: object) -> str:
    """The beginning of a hash."""
    return shown(value, 12)
