"""The attempts of a run, read back from its spool: how each ended, and what its hours went into.

What no attempt can say of itself is said here: that it is ``lost``, because its process is gone
without a word, and what of it was lost, because a later attempt began at an earlier iteration than
it had reached. Blocks while it reads; any thread; OpenTelemetry is not needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from cirron_otel import recovery, semconv
from cirron_otel.errors import SpoolError, SpoolFormatError
from cirron_otel.reading.index import LIVE_WITHOUT_LOCK_NS
from cirron_otel.reading.rows import ResourceKeys, read
from cirron_otel.run.ledger import CATEGORIES, Ledger
from cirron_otel.run.outcome import COMPLETED, FAILED, LOST, RUNNING
from cirron_otel.run.rows import Row
from cirron_otel.spool import Spool, created_ns_of

#: From which categories the time of steps that were done again is taken.
_OF_STEPS = ("compute", "data", "collective_wait", "compile")


class _Span(Row, gc=False):
    attrs: dict[str, Any] = msgspec.field(default_factory=dict)


class _Resource(ResourceKeys, gc=False):
    host: Any = msgspec.field(default=None, name=semconv.HOST_NAME)


class _Batch(msgspec.Struct, gc=False):
    schema_version: int
    batch_id: str = ""
    created_ns: int = 0
    writer: str = ""
    resource: _Resource | None = None
    spans: list[_Span] = []
    open: list[_Span] = []


_decoder = msgspec.json.Decoder(_Batch)


class Attempt(msgspec.Struct):
    """One session of one rank. Times in ns since the Unix epoch, ``times`` in s by category."""

    run_id: str
    attempt: int
    rank: int
    session_id: str
    host: str = ""
    started_ns: int = 0
    ended_ns: int = 0
    outcome: str = RUNNING
    error_type: str | None = None
    signal: str | None = None
    steps: int = 0
    first_iteration: int | None = None
    last_iteration: int | None = None
    #: Of its steps, those that a later attempt made again.
    lost_steps: int = 0
    times: dict[str, float] = msgspec.field(default_factory=dict)

    @property
    def wall(self) -> float:
        """How long it ran, in s."""
        return sum(self.times.values())

    @property
    def goodput(self) -> float:
        """Training steps that were not done again, as a share of the wall time."""
        return self.times.get("compute", 0.0) / self.wall if self.wall else 0.0


class _Session:
    """One session while its batches are read, oldest first."""

    def __init__(self, facts: _Resource) -> None:
        rank = facts.rank if isinstance(facts.rank, int) else 0
        attempt = facts.attempt if isinstance(facts.attempt, int) else 1
        self.attempt = Attempt(
            str(facts.run_id or ""), attempt, rank, str(facts.session_id), str(facts.host or "")
        )
        self.root: _Span | None = None
        self.ledger: Ledger | None = None
        self.writer = ""
        self.last_ns = 0
        self.lengths: dict[int, int] = {}
        self._early: list[_Span] = []

    def feed(self, batch: _Batch) -> None:
        self.writer = self.writer or batch.writer
        if batch.writer == self.writer:
            self.last_ns = max(self.last_ns, batch.created_ns)
        for row in (*batch.open, *batch.spans):
            if row.name == semconv.SESSION and row.id == self.attempt.session_id:
                self.root = row
        if self.ledger is None and self.root is not None:
            before = self.root.attrs.get(semconv.RUN_BEFORE_PROFILE, 0.0)
            began_ns = self.root.start_ns - round(before * 1e9)
            self.ledger = Ledger(began_ns, self.root.thread_id or 0, self.root.id)
        rows = self._early + batch.spans
        if self.ledger is None:
            self._early = rows
            return
        self._early = []
        self.ledger.tops.update(row.id for row in batch.open if row.name == semconv.EPOCH)
        for row in rows:
            if row.name == semconv.STEP and row.iteration is not None and row.end_ns is not None:
                # Of an evaluation inside the step it comes first, and is overwritten.
                self.lengths[row.iteration] = row.end_ns - row.start_ns
        self.ledger.add(rows)

    def finish(self, *, live: bool) -> Attempt:
        found, root = self.attempt, self.root
        attrs = {} if root is None else root.attrs
        recovered = bool(attrs.get(semconv.RECOVERED))
        ended = root is not None and root.end_ns is not None and not recovered
        found.started_ns = self.last_ns if root is None else root.start_ns
        found.ended_ns = (root.end_ns if root is not None and root.end_ns else 0) or self.last_ns
        if ended:
            failed = FAILED if attrs.get(semconv.ERROR) else COMPLETED
            found.outcome = str(attrs.get(semconv.RUN_OUTCOME, failed))
        else:
            found.outcome = RUNNING if live and not recovered else LOST
        found.error_type = _text(attrs.get(semconv.ERROR_TYPE))
        found.signal = _text(attrs.get(semconv.RUN_SIGNAL))
        found.steps = len(self.lengths)
        found.first_iteration = min(self.lengths, default=None)
        found.last_iteration = max(self.lengths, default=None)
        prefix = f"{semconv.RUN_TIME}."
        said = {name: attrs.get(prefix + name, 0.0) for name in CATEGORIES}
        if ended and any(said.values()):
            found.times = said
        elif self.ledger is not None:
            times = self.ledger.times(found.ended_ns)
            found.times = {name: length / 1e9 for name, length in times.items()}
        return found


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def load(
    spool: Spool, now_ns: int, on_error: Callable[[Path, Exception], None] | None = None
) -> list[Attempt]:
    """Every attempt in a spool: the newest run first, in it by attempt and rank.

    Files that are no batches are passed over after ``on_error`` was told. Reads the whole spool:
    a second per 100 MB or so. Raises :class:`~cirron_otel.errors.SpoolError` when the directory
    cannot be listed.
    """
    sessions: dict[str, _Session] = {}
    seen: set[str] = set()
    for path in sorted(spool.files(), key=created_ns_of):
        batch = _batch(path, on_error)
        facts = None if batch is None else batch.resource
        if batch is None or facts is None or facts.session_id is None or batch.batch_id in seen:
            continue
        seen.add(batch.batch_id)
        session = sessions.get(str(facts.session_id))
        if session is None:
            session = sessions[str(facts.session_id)] = _Session(facts)
        session.feed(batch)
    found = [
        one.finish(live=_is_live(spool, one.writer, one.last_ns, now_ns))
        for one in sessions.values()
    ]
    lengths = {one.attempt.session_id: one.lengths for one in sessions.values()}
    began: dict[str, int] = {}
    for one in found:
        began[one.run_id] = min(one.started_ns, began.get(one.run_id, one.started_ns))
    return sorted(
        _with_losses(found, lengths),
        key=lambda one: (-began[one.run_id], one.run_id, one.attempt, one.rank, one.started_ns),
    )


def _batch(path: Path, on_error: Callable[[Path, Exception], None] | None) -> _Batch | None:
    try:
        data = read(path)
        return None if data is None else _decoder.decode(data)
    except SpoolError as error:
        failed: Exception = error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        failed = SpoolFormatError(str(error))
    if on_error is not None:
        on_error(path, failed)
    return None


def _is_live(spool: Spool, writer: str, last_ns: int, now_ns: int) -> bool:
    state = recovery.writer_state(spool.run_directory, writer) if writer else "unknown"
    return state == "alive" or (state == "unknown" and now_ns - last_ns < LIVE_WITHOUT_LOCK_NS)


def _with_losses(
    attempts: Iterable[Attempt], lengths: dict[str, dict[int, int]]
) -> Sequence[Attempt]:
    """The same, with what a later attempt of the same run and rank made again.

    An attempt that is still running has lost nothing: two programs are one run by mistake.
    """
    # Clocks may be set between attempts; their numbers only rise.
    found = sorted(attempts, key=lambda one: (-one.attempt, -one.started_ns))
    earliest: dict[tuple[str, int], int] = {}
    for one in found:
        again = earliest.get((one.run_id, one.rank))
        if again is not None and one.outcome != RUNNING:
            lost = [length for number, length in lengths[one.session_id].items() if number >= again]
            one.lost_steps = len(lost)
            one.times = _moved(one.times, sum(lost) / 1e9)
        if one.first_iteration is not None:
            first = one.first_iteration if again is None else min(again, one.first_iteration)
            earliest[one.run_id, one.rank] = first
    return found


def _moved(times: dict[str, float], lost: float) -> dict[str, float]:
    """Times with ``lost`` seconds of the steps in their own category."""
    found = dict(times)
    for name in _OF_STEPS:
        taken = min(lost, found.get(name, 0.0))
        found[name] = found.get(name, 0.0) - taken
        found["lost"] = found.get("lost", 0.0) + taken
        lost -= taken
    return found
