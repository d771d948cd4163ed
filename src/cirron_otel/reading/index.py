"""Which sessions a spool holds: one pass over its files that builds no tree.

Our own batches say whose they are (resource attribute ``cirron.session.id``), so their rows are
only counted. Batches that do not say it (written by other SDKs, or by a child process before it
knew) are joined by their rows' parents; only for those does memory grow with the number of spans.

Files are read newest first: parents close after their children, so a parent is nearly always met
before them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
from msgspec import UNSET

from cirron_otel import recovery, semconv
from cirron_otel.batch import SpanRecord
from cirron_otel.errors import SpoolError
from cirron_otel.reading.links import Linker, Sessions, Top
from cirron_otel.reading.rows import (
    Head,
    Links,
    OtelRow,
    ResourceKeys,
    Source,
    SpanRow,
    decode,
    is_session,
    is_window,
    read,
    session_rows,
)
from cirron_otel.spool import Spool, created_ns_of

#: Told of each file that cannot be read.
OnError = Callable[[Path, Exception], None]

#: A writer without a lock is taken for alive while its last batch is younger than this: ten
#: flush intervals of one second, the default.
LIVE_WITHOUT_LOCK_NS = 10_000_000_000

#: Id of the pseudo session that holds the spans and marks of no session.
ORPHANS = "_orphans"
_ID_LENGTH = 32


@dataclass(slots=True)
class SessionInfo:
    """What is known of a session without its tree. Times in ns since the epoch."""

    id: str
    started_ns: int = 0
    ended_ns: int | None = None
    live: bool = False
    #: Its process died; what was open was closed by a reader.
    recovered: bool = False
    #: Its root span is not in the spool (evicted, or never written).
    rootless: bool = False
    failed: bool = False
    #: How it says that it ended: ``completed``, ``failed``, ``interrupted``, ``preempted``.
    outcome: str | None = None
    run_id: str | None = None
    attempt: int | None = None
    service: str | None = None
    sdk_version: str = ""
    writers: set[str] = field(default_factory=set)
    ranks: set[int] = field(default_factory=set)
    spans: int = 0
    marks: int = 0
    snapshots: int = 0
    bytes: int = 0
    pid: int | None = None


@dataclass(slots=True)
class FileInfo:
    """One readable batch file."""

    path: Path
    created_ns: int
    source: Source


@dataclass(slots=True)
class OpenScopes:
    """What one writer had open when it was last heard of."""

    source: Source
    rows: list[SpanRow]
    #: The writer lives: the rows are open. Else they were closed here, at its last word.
    live: bool


def _closed(rows: list[SpanRow], end_ns: int) -> list[SpanRow]:
    """The scopes of a dead writer, closed as :func:`recovery.recover` would close them."""
    by_id = {row.id: row for row in rows}
    records = [SpanRecord(row.id, row.name, row.parent_id, row.index, row.start_ns) for row in rows]
    closed = []
    for record in recovery.close_in_memory(records, end_ns):
        row = by_id[record.id]
        otel = row.otel or OtelRow()
        if otel.status != "error":
            otel = OtelRow("error", recovery.DIED, otel.events)
        attrs = {**row.attrs, semconv.RECOVERED: True}
        end = None if record.end_ns is UNSET else record.end_ns
        closed.append(msgspec.structs.replace(row, end_ns=end, attrs=attrs, otel=otel))
    return closed


class Index:
    """The sessions of a spool (newest first), its files, and the scopes that are still open."""

    def __init__(
        self, spool: Spool, *, on_error: OnError | None = None, now_ns: int | None = None
    ) -> None:
        """Read the whole spool once. May take a second per few hundred megabytes."""
        self.spool = spool
        self.now_ns = time.time_ns() if now_ns is None else now_ns
        self.files: list[FileInfo] = []
        self.open: list[OpenScopes] = []
        self.orphans = SessionInfo(ORPHANS, rootless=True)
        self._on_error = on_error
        self._by_id: dict[str, SessionInfo] = {}
        self._roots: dict[str, SpanRow] = {}
        self._last_ns: dict[str, int] = {}
        self._open_rows: dict[str, tuple[Source, list[SpanRow]]] = {}
        self._batch_ids: set[str] = set()
        self._links = Linker()
        self._owners = Sessions()
        self._trace_halves: dict[str, str] = {}
        for path in reversed(spool.files()):
            try:
                self._file(path)
            except SpoolError as exc:
                self.report(path, exc)
        self._settle()
        self.sessions = sorted(
            self._by_id.values(), key=lambda info: (info.started_ns, info.id), reverse=True
        )

    def owner(
        self, parent_id: str | None, source: Source, at_ns: int, pid: int | None
    ) -> str | None:
        """The session of a row whose parent is not in the spool, or None.

        Ids of ours end with half of the trace id, which the spans of a session share; else see
        :meth:`Sessions.find`.
        """
        by_trace = self._trace_halves.get(parent_id[16:]) if parent_id else None
        return by_trace or self._owners.find(source, at_ns, pid)

    def report(self, path: Path, exc: Exception) -> None:
        """Say that a file could not be read."""
        if self._on_error is not None:
            self._on_error(path, exc)

    # -- one file ----------------------------------------------------------------------------------

    def _file(self, path: Path) -> None:
        data = read(path)
        if data is None:
            return
        head = decode(data, Head)
        roots = session_rows(data)
        links = None
        resource = head.resource or ResourceKeys()
        named = resource.session_id if isinstance(resource.session_id, str) else ""
        if not named:
            links = decode(data, Links)
        if head.batch_id and head.batch_id in self._batch_ids:
            return  # a copy
        self._batch_ids.add(head.batch_id)
        source = Source(named, head.writer)
        created_ns = created_ns_of(path)
        self.files.append(FileInfo(path, created_ns, source))
        self._last_ns.setdefault(head.writer, head.created_ns)
        if head.open is not None and head.writer not in self._open_rows:
            rows = [row for row in head.open if not is_window(row)]
            self._open_rows[head.writer] = (source, rows)
            for row in rows:
                if is_session(row):
                    self._root(row, source, resource, head)
        for row in roots:
            self._root(row, source, resource, head)
        if named:
            info = self._session(named)
            info.spans += len(head.spans)
            info.marks += len(head.marks)
            info.snapshots += len(head.snapshots)
            info.bytes += len(data)
            _describe(info, source, resource, head)
            info.started_ns = min(info.started_ns or created_ns, created_ns)
        elif links is not None:
            self._links.add(links, source, len(data))

    def _session(self, session_id: str) -> SessionInfo:
        info = self._by_id.get(session_id)
        if info is None:
            info = self._by_id[session_id] = SessionInfo(session_id, rootless=True)
        return info

    def _root(self, row: SpanRow, source: Source, resource: ResourceKeys, head: Head) -> None:
        known = self._roots.get(row.id)
        if known is not None and (known.end_ns is not None or row.end_ns is None):
            return
        self._roots[row.id] = row
        info = self._session(row.id)
        _describe(info, source, resource, head)
        info.ranks.add(row.rank)
        info.pid = row.pid
        run = row.attrs.get("cirron.run_id", row.attrs.get(semconv.RUN_ID))
        info.run_id = info.run_id or (None if run is None else str(run))
        info.recovered = bool(row.attrs.get(semconv.RECOVERED))
        outcome = row.attrs.get(semconv.RUN_OUTCOME)
        info.outcome = outcome if isinstance(outcome, str) else None
        info.failed = bool(row.attrs.get(semconv.ERROR)) or outcome == "failed"

    # -- after the last file -----------------------------------------------------------------------

    def _settle(self) -> None:
        for writer, (source, rows) in self._open_rows.items():
            if rows:
                self._settle_writer(writer, source, rows)
        for session_id, row in self._roots.items():
            info = self._by_id[session_id]
            info.rootless = False
            info.started_ns, info.ended_ns = row.start_ns, row.end_ns
        for info in self._by_id.values():
            if info.rootless:
                last = [self._last_ns[writer] for writer in info.writers]
                info.ended_ns = max(last, default=None)
            if len(info.id) == _ID_LENGTH:
                self._trace_halves[info.id[16:]] = info.id
            self._owners.add(
                info.id,
                started_ns=info.started_ns,
                ended_ns=info.ended_ns,
                writers=info.writers,
                pid=info.pid,
            )
        self._count_links()

    def _settle_writer(self, writer: str, source: Source, rows: list[SpanRow]) -> None:
        last_ns = self._last_ns[writer]
        state = recovery.writer_state(self.spool.run_directory, writer) if writer else "unknown"
        live = state == "alive" or (
            state == "unknown" and self.now_ns - last_ns < LIVE_WITHOUT_LOCK_NS
        )
        if not live:
            rows = _closed(rows, last_ns)
        self.open.append(OpenScopes(source, rows, live))
        for row in rows:
            if not is_session(row):
                continue
            info = self._by_id[row.id]
            root = self._roots[row.id]
            if root.end_ns is None:
                self._roots[row.id] = row
                info.live, info.recovered = live, not live
        if source.session_id:
            self._session(source.session_id).spans += len(rows)
        else:
            self._links.add_open(rows, source)

    def _count_links(self) -> None:
        for top, counts in self._links.totals():
            info = self._by_id.get(self._owner_of(top) or "", self.orphans)
            info.spans += counts.spans
            info.marks += counts.marks
            info.snapshots += counts.snapshots
            info.bytes += counts.bytes

    def _owner_of(self, top: Top) -> str | None:
        link = top.link
        for span_id in (link.id, link.parent_id):
            if span_id in self._by_id:
                return span_id
        return self.owner(link.parent_id, top.source, link.start_ns, link.pid)


def _describe(info: SessionInfo, source: Source, resource: ResourceKeys, head: Head) -> None:
    """Add what a batch says about its session. Newest batches come first."""
    if source.writer:
        info.writers.add(source.writer)
    if isinstance(resource.rank, int):
        info.ranks.add(resource.rank)
    if isinstance(resource.attempt, int) and info.attempt is None:
        info.attempt = resource.attempt
    if resource.run_id is not None:
        info.run_id = info.run_id or str(resource.run_id)
    if resource.service is not None:
        info.service = info.service or str(resource.service)
    info.sdk_version = info.sdk_version or head.sdk_version
