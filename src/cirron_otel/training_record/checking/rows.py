"""The rows of ``metrics.jsonl``, one at a time, with the digest of all bytes before each."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from hashlib import sha256
from typing import Any, NamedTuple

from cirron_otel.training_record.checking.findings import Findings, shown, shown_hash
from cirron_otel.training_record.checking.reader import Line, Readable, is_blank, read_lines
from cirron_otel.training_record.rules import number

_ALL_FLOATS = {float}


class Row(NamedTuple):
    """One check: numbers as floats, NaN and infinities where the row says so."""

    number: int
    step: int
    loss: float | None
    grad: dict[str, float]
    stuck: dict[str, list[int]]


class Rows:
    """The rows in order. ``findings`` collects what is wrong with them, under ``rows...`` kinds.

    ``wanted`` maps digests that somebody else knows (anchors) to what to do about them: each one
    that occurs is taken out. Reading blocks on the disk; ``OSError`` comes through.
    """

    def __init__(
        self, file: Readable | None, findings: Findings, wanted: MutableMapping[str, Any]
    ) -> None:
        self._file_hash = sha256()
        self._before = sha256()
        self._digest: str | None = None
        self._wanted = wanted
        self._findings = findings
        self._lines = (
            iter(()) if file is None else read_lines(file, self._file_hash.update, floats=True)
        )
        self._row: Row | None = None
        self._raw = b""
        self._last_step = -1
        self._ended = False
        self.count = 0
        self.without_gradients = 0
        #: Rows that the writer could not write, as later rows say.
        self.lost = 0
        self.broken = False
        self._read()

    @property
    def row(self) -> Row | None:
        """The row that comes next; None behind the last."""
        return self._row

    @property
    def last_step(self) -> int:
        """The step of the last row that was passed; -1 before the first."""
        return self._last_step

    @property
    def digest(self) -> str:
        """SHA-256 of all bytes before :attr:`row`."""
        if self._digest is None:
            self._digest = self._before.hexdigest()
        return self._digest

    @property
    def file_digest(self) -> str:
        """SHA-256 of the whole file, once the last row was passed."""
        return self._file_hash.hexdigest()

    def pop(self) -> None:
        """Go on to the next row."""
        row = self._row
        if row is None:
            return
        if row.step <= self._last_step:
            self._findings.add(
                "rows", f"row {row.number}: step {row.step} comes after step {self._last_step}"
            )
        self._last_step = max(self._last_step, row.step)
        self.count += 1
        self.without_gradients += not row.grad
        self._pass(self._raw)
        self._read()

    def _pass(self, raw: bytes) -> None:
        self._before.update(raw)
        self._digest = None
        if self._wanted:
            self._wanted.pop(self.digest, None)

    def _read(self) -> None:
        self._row = None
        if self._wanted and self.count == 0:
            self._wanted.pop(self.digest, None)
        for line in self._lines:
            unended = line.flaws is not None and line.flaws.unended
            self._raw = line.raw if unended else line.raw + b"\n"
            if self._flawed(line):
                self._pass(self._raw)
                continue
            row = self._made(line)
            if row is not None:
                self._row = row
                return
            self._pass(self._raw)

    def _flawed(self, line: Line) -> bool:
        """Record what is wrong with the line; True when there is no row on it."""
        flaws = line.flaws
        if flaws is None:
            return False
        where = f"row {line.number}"
        if flaws.error is not None:
            kind = "rows half" if flaws.unended else "rows"
            self._findings.add(kind, f"{where} {flaws.error}")
            self.broken = self.broken or not flaws.unended
            return True
        if flaws.duplicate is not None:
            self._findings.add(
                "duplicates", f"metrics {where}: {shown(flaws.duplicate)} stands there twice"
            )
        if flaws.spelling is not None:
            self._findings.add("spelling", f"metrics {where}: {flaws.spelling}")
        if flaws.portable is not None:
            self._findings.add("portable", f"metrics {where}: {flaws.portable}")
        return is_blank(line)

    def _made(self, line: Line) -> Row | None:
        value = line.value
        where = f"row {line.number}"
        step = value.get("step")
        grad, stuck = value.get("grad"), value.get("stuck")
        if type(step) is not int or step < 0 or type(grad) is not dict or type(stuck) is not dict:
            self._findings.add("rows", f"{where} lacks step, grad or stuck")
            self.broken = True
            return None
        digest = value.get("digest")
        if digest is not None and digest != self.digest:
            self._findings.add(
                "rows",
                f"{where}: the rows before it have SHA-256 {shown_hash(self.digest)}, "
                f"it says {shown_hash(digest)}",
            )
        lost = value.get("lost_before")
        if type(lost) is int and lost > 0:
            self.lost += lost
        special = value.get("nonfinite")
        try:
            loss, norms = _numbers(value, grad, special if type(special) is dict else {})
        except ValueError as exc:
            self._findings.add("rows", f"{where}: {exc}")
            self.broken = True
            return None
        counts = {
            name: item
            for name, item in stuck.items()
            if type(item) is list and all(type(count) is int for count in item)
        }
        if len(counts) != len(stuck):
            self._findings.add("rows", f"{where}: stuck holds more than lists of counts")
        return Row(line.number, step, loss, norms, counts)


def _numbers(
    value: Mapping[str, Any], grad: Mapping[str, Any], special: Mapping[str, Any]
) -> tuple[float | None, dict[str, float]]:
    nan = float("nan")
    loss = value.get("loss")
    if loss is None and "loss" in special:
        loss = special["loss"]
    found = None
    if loss is not None:
        found = number(loss)
        if found is None:
            raise ValueError("loss is no number")
    norms = dict(grad)
    # Nearly always all are floats and none is negative, and no loop of ours has to see to that. (A
    # NaN hides no negative number from min(), unless it is what min() gives.)
    if set(map(type, norms.values())) == _ALL_FLOATS and min(norms.values()) >= 0:
        return found, norms
    for name, norm in grad.items():
        if norm.__class__ is float and norm >= 0:
            continue
        read = number(special.get(f"grad.{name}", nan) if norm is None else norm)
        if read is None or -math.inf < read < 0:
            what = "no number" if read is None else "negative, which no norm is"
            raise ValueError(f"grad of {shown(name)} is {what}")
        norms[name] = read
    return found, norms
