"""What the hours went into: wall time by category, added up from closed scopes.

Rows come as they are written, children before their parents. A scope is charged with its own time:
its length without what was charged inside it. Only the thread that trains is looked at, where no
two things happen at once, so the categories add up to the wall time; what no scope accounts for is
``startup`` before the first training step and ``other`` after it. Pure: no I/O, no OpenTelemetry.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from cirron_otel import semconv
from cirron_otel.run.rows import Row

#: In the order in which they are shown. ``lost`` is known to readers only: what a later attempt had
#: to do again.
CATEGORIES: Final = (
    "startup", "compile", "data", "compute", "collective_wait", "checkpoint", "evaluation",
    "stalled", "lost", "other",
)  # fmt: skip
_STARTUP, _COMPILE, _DATA, _COMPUTE, _WAIT, _CHECKPOINT, _EVALUATION, _STALLED = range(8)
_LOST, _OTHER = 8, 9
_PHASE = -1
_KIND: Final[Mapping[str, int]] = {
    semconv.STEP: _COMPUTE,
    semconv.DATA_LOAD: _DATA,
    semconv.RESUME_SKIP: _DATA,
    semconv.COMPILE: _COMPILE,
    semconv.COLLECTIVE_WAIT: _WAIT,
    semconv.CHECKPOINT: _CHECKPOINT,
    semconv.EVALUATION: _EVALUATION,
    semconv.PREDICTION: _EVALUATION,
    semconv.SANITY_CHECK: _EVALUATION,
    # Of a loop that nobody tells us the steps of; inside a step they are part of it.
    semconv.FORWARD: _PHASE,
    semconv.BACKWARD: _PHASE,
    semconv.OPTIMIZER_STEP: _PHASE,
    semconv.MICRO_BATCH: _PHASE,
}
#: Names of the scopes that are charged, and so keep what is inside them until they end.
CHARGED: Final = frozenset(_KIND)
#: What is inside such a scope is part of it, whatever it is.
_ABSORBING = (_CHECKPOINT, _EVALUATION)
_STEP = b'"name":"%b"' % semconv.STEP.encode()
_WORDS = re.compile(
    b'"name":"(?:%b)"' % b"|".join(re.escape(name.encode()) for name in sorted(_KIND))
)


def matters(piece: bytes) -> bool:
    """Whether a piece of a batch has a scope in it that is charged, seen without decoding it."""
    return _STEP in piece or _WORDS.search(piece) is not None


class Ledger:
    """The categories of one process. Not thread-safe. Times in ns since the Unix epoch."""

    def __init__(self, begin_ns: int, thread_id: int, session_id: str) -> None:
        self.begin_ns = begin_ns
        #: What a time of a row is on the clock that the session began with.
        self.in_time: Callable[[int], int] = lambda time_ns: time_ns
        self.thread_id = thread_id
        #: Scopes in which a forward and the like is charged by itself: the session and its epochs.
        self.tops: set[str] = {session_id}
        self.first_step_ns = 0
        self.steps = 0
        self._last_iteration = -1
        #: Until when everything on the training thread is known.
        self.last_ns = begin_ns
        self._latest_ns = 0
        #: When the silence began that the watchdog has found (0: there is none), and when it did.
        self.stalled_ns = self._found_ns = 0
        self._totals = [0] * len(CATEGORIES)
        #: What was charged inside scopes that are still open, by their ids.
        self._inside: dict[str | None, dict[int, int]] = {}
        #: Those of them that had ended at the last settlement, their rows still on the way.
        self._ended: set[str | None] = set()

    def add(self, rows: Iterable[Row]) -> None:
        """Take in closed scopes, children before their parents."""
        inside, tops, kinds = self._inside, self.tops, _KIND
        thread = self.thread_id
        self._latest_ns = 0
        for row in rows:
            end = row.end_ns
            if end is None:
                continue
            kind = kinds.get(row.name)
            if row.thread_id != thread:
                if kind != _COMPUTE or self.steps or row.iteration is None:
                    continue
                # The first training step lies on another thread than the session: that one counts.
                thread = self.thread_id = row.thread_id or thread
            below = inside.pop(row.id, None) if inside else None
            if kind is None or (kind == _PHASE and row.parent_id not in tops):
                if self.stalled_ns and row.start_ns <= self._found_ns <= end:
                    below = below or {}
                    own = end - row.start_ns - sum(below.values())
                    silent = self._silent(row.start_ns, end, own)
                    below[_STALLED] = below.get(_STALLED, 0) + silent
                if below is not None:
                    _merge(inside, row.parent_id, below)
                continue
            self._charge(row, end, _COMPUTE if kind == _PHASE else kind, below)
        if self._latest_ns:
            self.last_ns = max(self.last_ns, self.in_time(self._latest_ns))

    def _charge(self, row: Row, end: int, kind: int, below: dict[int, int] | None) -> None:
        own = end - row.start_ns
        self._latest_ns = max(self._latest_ns, end)
        if kind == _WAIT and row.gpu_ns is not None:
            own = row.gpu_ns
        elif below is not None:
            if kind in _ABSORBING:
                below = {_STALLED: below.get(_STALLED, 0)}
            own -= sum(below.values())
        if kind == _COMPUTE and row.name == semconv.STEP and row.iteration is not None:
            # A step of an evaluation has no iteration, or that of the training step around it.
            self.steps += row.iteration != self._last_iteration
            self._last_iteration = row.iteration
            if not self.first_step_ns:
                self._begin(self.in_time(row.start_ns))
        mine = {} if below is None else below
        if self.stalled_ns and row.start_ns <= self._found_ns <= end:
            silent = self._silent(row.start_ns, end, own)
            mine[_STALLED] = mine.get(_STALLED, 0) + silent
            own -= silent
        mine[kind] = mine.get(kind, 0) + own
        _merge(self._inside, row.parent_id, mine)

    def _begin(self, start_ns: int) -> None:
        """Training begins: what was not charged until now was the startup."""
        self.first_step_ns = start_ns
        inside = sum(sum(found.values()) for found in self._inside.values())
        before = sum(self._totals) + inside
        self._totals[_STARTUP] += max(0, start_ns - self.begin_ns - before)

    def stalled(self, since_ns: int, now_ns: int) -> None:
        """Nothing has moved since then, and that is too long."""
        self.stalled_ns, self._found_ns = since_ns, now_ns

    def _silent(self, start_ns: int, end_ns: int, own: int) -> int:
        """How long it was silent inside a scope that spans the moment when that was found.

        The innermost one comes first, and its end is the end of the silence. It may begin later:
        some scopes are made when they are over.
        """
        since_ns, self.stalled_ns = self.stalled_ns, 0
        return max(0, min(own, end_ns - max(since_ns, start_ns)))

    def moved(self, now_ns: int) -> None:
        """The training goes on after a silence that no scope spanned."""
        if self.stalled_ns:
            self._totals[_STALLED] += max(0, now_ns - self.stalled_ns)
            self.stalled_ns = 0

    def settle(self, place: Callable[[str | None], str]) -> None:
        """Count what stands in no charged scope that is open.

        ``place`` says of a scope's id whether it is ``"inside"`` one that will be charged,
        ``"outside"`` of all, or ``"gone"``.
        """
        ended, self._ended = self._ended, set()
        for scope_id in list(self._inside):
            where = place(scope_id)
            if where == "gone" and scope_id not in ended:
                self._ended.add(scope_id)
                continue
            if where == "inside":
                continue
            found = self._inside.pop(scope_id)
            for at, length in found.items():
                self._totals[at] += length
            if where == "gone" and self.steps:
                # A row that waited for the device: the step it lies in has been charged for it.
                self._totals[_COMPUTE] -= sum(found.values())

    def times(self, until_ns: int | None = None) -> dict[str, int]:
        """Each category in ns, until the last moment that is known or the one given.

        What was charged inside a scope that is still open is not in it, unless ``until_ns`` says
        that nothing more will come.
        """
        found = self._totals.copy()
        until = self.last_ns if until_ns is None else until_ns
        if until_ns is not None:
            for below in self._inside.values():
                for at, length in below.items():
                    found[at] += length
        found[_COMPUTE] = max(0, found[_COMPUTE])
        if self.stalled_ns and until_ns is not None:
            found[_STALLED] += max(0, until - self.stalled_ns)
        rest = max(0, until - self.begin_ns - sum(found))
        found[_OTHER if self.first_step_ns else _STARTUP] += rest
        return dict(zip(CATEGORIES, found, strict=True))


def _merge(inside: dict[str | None, dict[int, int]], to: str | None, below: dict[int, int]) -> None:
    known = inside.get(to)
    if known is None:
        inside[to] = below
        return
    for at, length in below.items():
        known[at] = known.get(at, 0) + length
