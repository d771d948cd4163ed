"""One pass over a diary: chain, order, schema, and what lines say of rows and of one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from hashlib import sha256
from typing import Any, Protocol

from cirron_otel.training_record.canonical import canonical
from cirron_otel.training_record.chain import GENESIS
from cirron_otel.training_record.checking.course import Course
from cirron_otel.training_record.checking.findings import Findings, shown
from cirron_otel.training_record.checking.reader import (
    Line,
    Readable,
    is_blank,
    read_lines,
)
from cirron_otel.training_record.checking.replay import Replay
from cirron_otel.training_record.compiled import compiled
from cirron_otel.training_record.events import EVENTS, QUICK, is_in_order, problems

#: A clock that is set back by less is no news.
_BACK_S = 1.0
_TIMES = frozenset({int, float})


class Watcher(Protocol):
    """Is told the hash of every line that it has an eye on."""

    @property
    def open(self) -> Container[int]:
        """The lines that it must be told of."""

    def passed(self, lines: int) -> None:
        """So many lines were there in all."""

    def line(self, index: int, event: Mapping[str, Any], digest: object) -> None:
        """Line ``index``, counted from 0; ``digest`` is its ``hash``."""


class Diary:
    """Reads all lines once, in constant memory; what was found is in the attributes afterwards.

    ``findings`` gets the kinds ``parse``, ``schema``, ``duplicates``, ``spelling``, ``portable``,
    ``unknown``, ``steps``, ``times`` and ``digests``.
    """

    def __init__(self, findings: Findings, replay: Replay | None, watcher: Watcher | None) -> None:
        self._findings = findings
        self.replay = replay
        self.watcher = watcher
        self._seen = sha256()
        self.count = 0
        #: Number of the first line that could not be read, from 1.
        self.bad_line: int | None = None
        #: What a writer that died left of its last line.
        self.half_line: bytes | None = None
        self.unended = False
        self.bad_genesis: object = None
        #: ``hash`` of the last line, which the next one's ``prev`` must be.
        self.chained: object = GENESIS
        self.chain_break: str | None = None
        self.seq_break: str | None = None
        self.first: Mapping[str, Any] = {}
        self.last: Mapping[str, Any] = {}
        self.starts = 0
        self.ends = 0
        self.kinds: Counter[str] = Counter()
        self.by_rule: Counter[str] = Counter()
        self.stuck_layers = 0
        self.channels_repaired = 0
        #: Rows that lines vouch for and the metrics file does not have.
        self.rows_missing = 0
        #: Whether lines say what the rows were.
        self.digested = False
        #: Events that the writer could not write, as later lines say.
        self.lost_events = 0
        self.last_step = -1
        self.last_time = float("-inf")

    @property
    def file_digest(self) -> str:
        """SHA-256 of the whole file."""
        return self._seen.hexdigest()

    @property
    def head(self) -> str | None:
        """The hash of the last line, where it is text."""
        return self.chained if self.count and isinstance(self.chained, str) else None

    @property
    def finished(self) -> bool:
        """Whether the last event is ``run_end``."""
        return self.last.get("event") == "run_end"

    def read(self, file: Readable) -> None:
        """Read the file to its end. Blocks on the disk; raises ``OSError`` only."""
        if compiled is None:
            for line in read_lines(file, self._seen.update):
                self.take(line)
        else:
            Course(self).read(file, self._seen.update)

    def take(self, line: Line) -> None:
        """The next line of the file, whatever is on it."""
        if line.flaws is not None and self._flawed(line):
            return
        value = line.value
        index = self.count
        self.count = index + 1
        prev, digest = value.pop("prev", None), value.pop("hash", None)
        if index == 0:
            self.bad_genesis = None if prev == GENESIS else shown(prev)
            self.chained = prev
        if self.chain_break is None:
            self._check_link(line, index, prev, digest)
        self.chained = digest
        if self.watcher is not None:
            self.watcher.line(index, value, digest)
        self._check_event(index, value, prev, digest)

    # --- lines and links --------------------------------------------------------------------------

    def _flawed(self, line: Line) -> bool:
        """Record what is wrong with the line's text; True when there is no event on it."""
        flaws = line.flaws
        if flaws is None:
            return False
        where = f"line {line.number}"
        self.unended = flaws.unended
        if flaws.error is not None:
            self.bad_line = self.bad_line or line.number
            if flaws.unended and _is_half(line.raw) and self.ends == 0:
                self.half_line = line.raw
                self._findings.add("parse", f"{where} is half-written ({len(line.raw)} bytes)")
            else:
                self._findings.add("parse", f"{where} {flaws.error}")
            return True
        if flaws.duplicate is not None:
            self._findings.add(
                "duplicates", f"{where}: {shown(flaws.duplicate)} stands there twice"
            )
        if flaws.spelling is not None:
            self._findings.add("spelling", f"{where}: {flaws.spelling}")
        if flaws.portable is not None:
            self._findings.add("portable", f"{where}: {flaws.portable}")
        return is_blank(line)

    def _check_link(self, line: Line, index: int, prev: object, digest: object) -> None:
        value = line.value
        made = None
        if type(prev) is str:
            try:
                body = line.body
                if body is None:
                    body = canonical(value).encode("ascii")
                made = sha256(prev.encode() + body).hexdigest()
            except (ValueError, RecursionError):
                made = None
        if made == digest and made is not None and prev == self.chained:
            return
        name = f"event {index} (seq {shown(value.get('seq'))}, {shown(value.get('event'))})"
        if made != digest or made is None:
            self.chain_break = f"{name} was edited: its content does not give its hash"
        else:
            self.chain_break = (
                f"{name} does not follow the line before it: lines were deleted, inserted or "
                "reordered there"
            )

    # --- events -----------------------------------------------------------------------------------

    def _check_event(self, index: int, value: dict[str, Any], prev: object, digest: object) -> None:
        kind, seq = value.get("event"), value.get("seq")
        if (type(seq) is not int or seq != index) and self.seq_break is None:
            self.seq_break = f"event {index} has seq {shown(seq)}"
        form = QUICK.get(kind) if type(kind) is str else None
        if (
            form is None
            or self.chain_break is not None
            or type(seq) is not int
            or type(value.get("time")) not in _TIMES
            or not is_in_order(value, form)
        ):
            self._check_fields(index, value, prev, digest)
        if form is not None:
            self._count(str(kind), value)
        if index == 0:
            self.first = dict(value)
            if self.replay is not None:
                self.replay.start(self.first)
        self.last = value
        lost = value.get("lost_before")
        if type(lost) is int and lost > 0:
            self.lost_events += lost
        self._check_time(index, value)
        if self.replay is not None:
            self._check_rows(index, str(kind), value, self.replay)
        step = value.get("step")
        if type(step) is int:
            if step < self.last_step:
                self._findings.add(
                    "steps", f"event {index} is of step {step}, after one of {self.last_step}"
                )
            else:
                self.last_step = step

    def _check_fields(
        self, index: int, value: Mapping[str, Any], prev: object, digest: object
    ) -> None:
        line = dict(value)
        line.update(
            {name: item for name, item in (("prev", prev), ("hash", digest)) if item is not None}
        )
        wrong = problems(line)
        kind = value.get("event")
        if "event type is unknown" in wrong:
            wrong.remove("event type is unknown")
            self._findings.add("unknown", f"event {index} ({shown(kind)})")
        if wrong:
            self._findings.add("schema", f"event {index} ({shown(kind)}): {', '.join(wrong)}")

    def _count(self, kind: str, value: Mapping[str, Any]) -> None:
        self.kinds[kind] += 1
        if "rule" in value:
            self.by_rule[kind] += 1
        if kind == "channels":
            self.stuck_layers += value.get("level") != "none"
        elif kind == "repair":
            count = value.get("count")
            self.channels_repaired += count if type(count) is int else 0
        elif kind == "run_start":
            self.starts += 1
        elif kind == "run_end":
            self.ends += 1

    def _check_time(self, index: int, value: Mapping[str, Any]) -> None:
        try:
            time = float(value["time"])
        except (KeyError, TypeError, ValueError, OverflowError):
            return
        if time < self.last_time - _BACK_S:
            self._findings.add(
                "times", f"event {index} is {self.last_time - time:.3f} s before the one before it"
            )
        self.last_time = time

    def _check_rows(self, index: int, kind: str, value: Mapping[str, Any], replay: Replay) -> None:
        digest, rows = value.get("metrics_digest"), value.get("metrics_rows")
        if type(digest) is str:
            self.digested = True
            missing = replay.to_digest(digest, rows if type(rows) is int else None)
            if missing:
                self.rows_missing = max(self.rows_missing, missing)
            elif missing is None:
                self._findings.add("digests", f"event {index} ({shown(kind)})")
        if kind == "manifest":
            replay.manifest(value)
        step = value.get("step")
        if type(step) is int and kind in EVENTS:
            replay.event(step, value)


def _is_half(raw: bytes) -> bool:
    """Whether this is how a line begins that a writer did not get to the end of."""
    start = raw.rstrip(b"\0")
    return start in {b"", b"{"} or start.startswith(b'{"')
