"""Recomputing from ``metrics.jsonl`` what the diary must say, and comparing the two.

Diary and rows are read side by side. Events with a ``rule`` were written for a further reason and
are left out; every other alarm, loss, skip and channel event must be called for by the rows, and
every event the rows call for must be there.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping
from typing import Any

from cirron_otel.training_record.checking.findings import Findings, shown
from cirron_otel.training_record.checking.rows import Row, Rows
from cirron_otel.training_record.rules import NEAR, Decisions, Expected, Rules, number

REPLAYED = frozenset(
    {
        "alarm",
        "alarm_cleared",
        "channels",
        "channels_cleared",
        "loss_recovered",
        "loss_spike",
        "no_gradients",
        "nonfinite_gradient",
        "nonfinite_loss",
        "skipped_step",
    }
)
_CHANNELS = frozenset({"channels", "channels_cleared"})
#: What says which event is meant, where several of a type stand at one step.
_SUBJECT = frozenset({"layer", "diagnosis"})
_LOSS = frozenset({"loss_spike", "loss_recovered"})
_STUCK = ("n_certified", "n_flat", "n_observed", "n_decayed")
#: An honest diary leaves only a handful of events open at a time.
_MAX_OPEN = 10_000


def _is_this_platform(named: object) -> bool:
    here = os.uname()
    if not (isinstance(named, str) and named.startswith(here.sysname) and here.release in named):
        return False
    # platform() starts a process, which a record from elsewhere should not wait for.
    import platform  # noqa: PLC0415

    return named == platform.platform()


class Replay:
    """Walks the rows as the diary goes by. ``findings`` gets ``replay`` and ``rows`` kinds."""

    def __init__(self, rows: Rows, findings: Findings) -> None:
        self.rows = rows
        self.compared = 0
        #: Steps before the last row that events name and that have no row.
        self.rowless = 0
        self.why_not: str | None = "the diary has no run_start with a config"
        self.bit_for_bit = False
        self._findings = findings
        self._decisions: Decisions | None = None
        #: The events that the rows so far call for and the diary has not had yet, in order.
        self.expected: deque[Expected] = deque()
        #: Whether those of the row at hand are among them.
        self.evaluated = False
        self._rowless_step = -1
        self._levels: dict[str, str] = {}
        self._sizes: dict[str, int] = {}

    def start(self, run_start: Mapping[str, Any]) -> None:
        """Take the rules from ``run_start``."""
        try:
            self._decisions = Decisions(Rules.of(run_start.get("config")))
        except ValueError as exc:
            self.why_not = str(exc)
            return
        self.why_not = None
        self.bit_for_bit = _is_this_platform(run_start.get("platform"))

    def manifest(self, manifest: Mapping[str, Any]) -> None:
        """Take from ``manifest`` whether a scaler was on."""
        precision = manifest.get("precision")
        if self._decisions is not None and isinstance(precision, dict):
            self._decisions.scaler = precision.get("scaler_enabled") is True

    def event(self, step: int, event: Mapping[str, Any]) -> None:
        """An event of the diary that names its step."""
        row = self._row_at(step)
        if row is None and self.rows.last_step != step:
            self._without_row(step, f"{shown(event.get('event'))} at step {step}")
            return
        if event["event"] in REPLAYED and "rule" not in event and self.why_not is None:
            if row is not None:
                self._evaluate(row)
            self._match(step, event)

    def to_digest(self, digest: str, rows: int | None) -> int | None:
        """Go on until as many rows were passed as a line says, and compare the digest.

        Gives 0 where it fits, None where it does not, and otherwise how many rows there are too
        few. A line that does not say how many rows it knows is given all that fit.
        """
        if rows is None:
            while self.rows.digest != digest:
                if self.rows.row is None:
                    return None
                self._pop()
            return 0
        while self.rows.count < rows:
            if self.rows.row is None:
                return rows - self.rows.count
            self._pop()
        return 0 if self.rows.digest == digest else None

    def at_hand(self, most: int) -> tuple[int, deque[Expected] | None]:
        """The step whose events may be matched as they come, -1 for none, and what is expected.

        None instead of events where nothing is recomputed. Steps beyond ``most`` do not count.
        """
        row, expected = self.rows.row, self.expected if self.why_not is None else None
        if row is None or row.step >= most or not (self.evaluated or expected is None):
            return -1, expected
        return row.step, expected

    def finish(self) -> None:
        """Walk to the end; what is still open then is missing in the diary."""
        while self.rows.row is not None:
            self._pop()
        self._missing_before(None)
        if self.rows.broken and self.why_not is None:
            self.why_not = "some rows cannot be read"

    def _without_row(self, step: int, named: str) -> None:
        if step < self.rows.last_step:
            self._findings.add("rows", f"{named}, whose turn is over")
        elif self.rows.row is None:
            self._findings.add("behind rows", named)
        else:
            self._findings.add("no row", f"{named}, which has no row")
            self.rowless += step != self._rowless_step
            self._rowless_step = step

    def _row_at(self, step: int) -> Row | None:
        while (row := self.rows.row) is not None and row.step < step:
            self._pop()
        return row if row is not None and row.step == step else None

    def _pop(self) -> None:
        row = self.rows.row
        if row is not None:
            self._evaluate(row)
        self.rows.pop()
        self.evaluated = False

    def _evaluate(self, row: Row) -> None:
        if self.evaluated or self.why_not is not None or self._decisions is None:
            return
        self.evaluated = True
        self.expected += self._decisions.check(row.step, row.loss, row.grad)
        for layer, counts in row.stuck.items():
            total = sum(counts)
            level = self._levels.get(layer, "none")
            if total == 0 and level == "none":
                continue
            new = _level(total, self._sizes.get(layer))
            if new != level:
                self._levels[layer] = new
                exact = (("layer", layer), *zip(_STUCK, counts, strict=False))
                kind = "channels_cleared" if total == 0 else "channels"
                self.expected.append(Expected(row.step, kind, exact, (), near=False))
        while len(self.expected) > _MAX_OPEN:
            self._miss(self.expected.popleft())

    def _match(self, step: int, event: Mapping[str, Any]) -> None:
        still = self.expected
        if still and still[0].step < step:
            self._missing_before(step)
        self.compared += 1
        name = event["event"]
        for place, expected in enumerate(still):
            if expected.event == name and expected.step == step and _same_subject(expected, event):
                for _ in range(place):
                    self._miss(still.popleft())
                still.popleft()
                self._compare(expected, event)
                return
        near = self._decisions is not None and self._decisions.near(
            None if name in _LOSS else event.get("layer")
        )
        self._wrong(f"{_named(event)} is not borne out by the rows", near=near)

    def _compare(self, expected: Expected, event: Mapping[str, Any]) -> None:
        wrong: list[str] = []
        for name, value in expected.exact:
            if event.get(name) != value and not _may_lack(event, name):
                wrong.append(name)
        for name, value in expected.floats:
            found = number(event.get(name))
            if found != value and not self._close(found, value):
                wrong.append(name)
        if expected.event in _CHANNELS:
            wrong += self._take_level(expected, event)
        if wrong:
            text = f"{_named(event)}: {', '.join(wrong)} not as the rows say"
            self._wrong(text, near=expected.near)

    def _wrong(self, text: str, *, near: bool) -> None:
        # Behind a row that was lost, the baselines are not the writer's any more.
        self._findings.add("replay near" if near or self.rows.lost else "replay", text)

    def _take_level(self, expected: Expected, event: Mapping[str, Any]) -> list[str]:
        layer, size = str(expected.exact[0][1]), event.get("channels")
        if type(size) is not int:
            return ["channels"]
        total = sum(
            value for name, value in expected.exact if name in _STUCK and type(value) is int
        )
        wrong = [] if self._sizes.setdefault(layer, size) == size else ["channels"]
        self._levels[layer] = _level(total, size)
        return wrong if self._levels[layer] == event.get("level") else [*wrong, "level"]

    def _close(self, found: float | None, value: float) -> bool:
        if found is None or self.bit_for_bit:
            return False
        return abs(found - value) <= NEAR * max(abs(found), abs(value))

    def _missing_before(self, step: int | None) -> None:
        while self.expected and (step is None or self.expected[0].step < step):
            self._miss(self.expected.popleft())

    def _miss(self, expected: Expected) -> None:
        layer = dict(expected.exact).get("layer")
        name = f"{expected.event} at step {expected.step}" + (
            f" of {shown(layer)}" if layer else ""
        )
        near = expected.near or self.rows.lost > 0
        self._findings.add(
            "replay near" if near else "replay missing",
            f"the rows call for {name}, which the diary does not have",
        )


def _level(stuck: int, size: int | None) -> str:
    """The level of a layer; before its size is known, that some of it is stuck."""
    if stuck == 0:
        return "none"
    if size is None or 2 * stuck < size:
        return "some"
    return "most" if stuck < size else "all"


def _same_subject(expected: Expected, event: Mapping[str, Any]) -> bool:
    for name, value in expected.exact:
        if name not in _SUBJECT:
            break
        if event.get(name) != value:
            return False
    return True


def _may_lack(event: Mapping[str, Any], name: str) -> bool:
    """Records of 0.1 have no count of decayed channels; the schema sees to the rest."""
    return name == "n_decayed" and name not in event


def _named(event: Mapping[str, Any]) -> str:
    layer = event.get("layer")
    return f"{shown(event['event'])} at step {event['step']}" + (
        f" of {shown(layer)}" if layer else ""
    )
