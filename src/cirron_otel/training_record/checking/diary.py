"""One pass over a diary: chain, order, schema, and what lines say of rows and of one another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from hashlib import sha256
from typing import Any, NamedTuple, Protocol

import msgspec

from cirron_otel.training_record.canonical import canonical
from cirron_otel.training_record.chain import GENESIS
from cirron_otel.training_record.checking.findings import Findings, shown
from cirron_otel.training_record.checking.reader import (
    Line,
    Readable,
    fast_canonical,
    is_blank,
    read_lines,
)
from cirron_otel.training_record.checking.replay import Replay
from cirron_otel.training_record.events import EVENTS, SEVERITIES, EventType, problems
from cirron_otel.training_record.rules import number

#: A clock that is set back by less is no news.
_BACK_S = 1.0
#: Nobody looks for numbers at deeper levels of a line.
_DEEPEST = 32
_TIMES = frozenset({int, float, msgspec.Raw})


class Watcher(Protocol):
    """Is told the hash of every line."""

    def line(self, index: int, event: Mapping[str, Any], digest: object) -> None:
        """Line ``index``, counted from 0; ``digest`` is its ``hash``."""


class _Quick(NamedTuple):
    """An event type's rules, ready to be looked at a hundred thousand times."""

    required: frozenset[str]
    fixed: tuple[tuple[str, object], ...]
    choices: tuple[tuple[str, frozenset[str]], ...]
    has_step: bool


def _quick(form: EventType) -> _Quick:
    fixed = tuple(form.fixed.items())
    return _Quick(form.required, fixed, tuple(form.choices.items()), "step" in form.required)


_QUICK = {name: _quick(form) for name, form in EVENTS.items()}


class Diary:
    """Reads all lines once, in constant memory; what was found is in the attributes afterwards.

    ``findings`` gets the kinds ``parse``, ``schema``, ``duplicates``, ``spelling``, ``portable``,
    ``unknown``, ``steps``, ``times`` and ``digests``.
    """

    def __init__(self, findings: Findings, replay: Replay | None, watcher: Watcher | None) -> None:
        self._findings = findings
        self._replay = replay
        self._watcher = watcher
        self._seen = sha256()
        self.count = 0
        self.head: str | None = None
        #: Number of the first line that could not be read, from 1.
        self.bad_line: int | None = None
        #: What a writer that died left of its last line.
        self.half_line: bytes | None = None
        self.unended = False
        self.bad_genesis: object = None
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
        #: Events that the writer could not write, as later lines say.
        self.lost_events = 0
        self.last_step = -1
        self._last_time = float("-inf")

    @property
    def file_digest(self) -> str:
        """SHA-256 of the whole file."""
        return self._seen.hexdigest()

    @property
    def finished(self) -> bool:
        """Whether the last event is ``run_end``."""
        return self.last.get("event") == "run_end"

    def read(self, file: Readable) -> None:
        """Read the file to its end. Blocks on the disk; raises ``OSError`` only."""
        self._take(read_lines(file, self._seen.update))

    def _take(self, lines: Iterable[Line]) -> None:
        chained: object = GENESIS
        for line in lines:
            flaws = line.flaws
            if flaws is not None and self._flawed(line):
                continue
            value = line.value
            index = self.count
            self.count = index + 1
            prev, digest = value.pop("prev", None), value.pop("hash", None)
            if index == 0:
                self.bad_genesis = None if prev == GENESIS else shown(prev)
                chained = prev
            if self.chain_break is None:
                self._check_link(line, index, prev, digest, chained)
            chained = digest
            self.head = digest if isinstance(digest, str) else None
            if self._watcher is not None:
                self._watcher.line(index, value, digest)
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

    def _check_link(
        self, line: Line, index: int, prev: object, digest: object, chained: object
    ) -> None:
        value = line.value
        made = None
        if type(prev) is str:
            try:
                body = (
                    fast_canonical(value)
                    if line.flaws is None
                    else canonical(value).encode("ascii")
                )
                made = sha256(prev.encode() + body).hexdigest()
            except (ValueError, RecursionError):
                made = None
        if made == digest and made is not None and prev == chained:
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
        form = _QUICK.get(kind) if type(kind) is str else None
        if (
            form is None
            or self.chain_break is not None
            or type(seq) is not int
            or not _in_order(value, form)
        ):
            self._check_fields(index, value, prev, digest)
        if form is not None:
            self._count(str(kind), value)
        if index == 0:
            self.first = _plain(value)
            if self._replay is not None:
                self._replay.start(self.first)
        self.last = value
        lost = value.get("lost_before")
        if type(lost) is int and lost > 0:
            self.lost_events += lost
        self._check_time(index, value)
        if self._replay is not None:
            self._check_rows(index, str(kind), value, self._replay)
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
        line = _plain(value)
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
        if time < self._last_time - _BACK_S:
            self._findings.add(
                "times", f"event {index} is {self._last_time - time:.3f} s before the one before it"
            )
        self._last_time = time

    def _check_rows(self, index: int, kind: str, value: Mapping[str, Any], replay: Replay) -> None:
        digest, rows = value.get("metrics_digest"), value.get("metrics_rows")
        if type(digest) is str:
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


def _in_order(value: Mapping[str, Any], form: _Quick) -> bool:
    """Whether a line is beyond doubt; where it is not, somebody looks more closely."""
    if not form.required <= value.keys() or type(value.get("time")) not in _TIMES:
        return False
    for name, wanted in form.fixed:
        found = value[name]
        if found is not wanted and (type(found) is not type(wanted) or found != wanted):
            return False
    for name, allowed in form.choices:
        found = value[name]
        if type(found) is not str or found not in allowed:
            return False
    if form.has_step:
        step = value["step"]
        if type(step) is not int or step < 0:
            return False
    if "severity" in value:
        found = value["severity"]
        return type(found) is str and found in SEVERITIES
    return True


def _plain(value: Mapping[str, Any]) -> dict[str, Any]:
    """A line's own fields as plain values; floats inside its objects too."""
    return {name: _float(item) for name, item in value.items()}


def _float(value: Any, depth: int = _DEEPEST) -> Any:  # noqa: ANN401 - any JSON value
    if type(value) is msgspec.Raw:
        return number(value)
    if depth == 0:
        return value
    if type(value) is dict:
        return {name: _float(item, depth - 1) for name, item in value.items()}
    if type(value) is list:
        return [_float(item, depth - 1) for item in value]
    return value


def _is_half(raw: bytes) -> bool:
    """Whether this is how a line begins that a writer did not get to the end of."""
    start = raw.rstrip(b"\0")
    return start in {b"", b"{"} or start.startswith(b'{"')
