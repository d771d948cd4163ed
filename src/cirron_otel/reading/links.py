"""Whose rows are these? For batches that do not name their session: join by parents and by time.

Holds one dictionary entry per span of such batches, and nothing per span of our own batches.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from cirron_otel.reading.rows import Links, Source, SpanLink, SpanRow

#: A span may be written with an end a little after its session's (exit handlers of other SDKs).
_PID_SLACK_NS = 1_000_000_000


@dataclass(slots=True)
class Counts:
    """How much hangs under one span."""

    spans: int = 0
    marks: int = 0
    snapshots: int = 0
    bytes: int = 0


@dataclass(slots=True)
class Top:
    """A span whose parent was not yet known when it was met, and what hangs under it."""

    link: SpanLink
    source: Source
    counts: Counts


class Sessions:
    """Finds the session a process had at a time. ``add`` all, then ask."""

    def __init__(self) -> None:
        """Know no session yet."""
        self._writers: dict[str, list[tuple[int, str]]] = defaultdict(list)
        self._pids: dict[int, list[tuple[int, int | None, str]]] = defaultdict(list)

    def add(
        self,
        session_id: str,
        *,
        started_ns: int,
        ended_ns: int | None,
        writers: Iterable[str],
        pid: int | None,
    ) -> None:
        """One session. Order does not matter."""
        for writer in writers:
            if writer:
                bisect.insort(self._writers[writer], (started_ns, session_id))
        if pid is not None:
            self._pids[pid].append((started_ns, ended_ns, session_id))

    def find(self, source: Source, at_ns: int, pid: int | None) -> str | None:
        """The session a row belongs to that no parent connects to one, or None.

        Its batch names it; else it is the session that the batch's writer had at the time; else,
        for batches that name no writer, the session of the same process at the time.
        """
        if source.session_id:
            return source.session_id
        if source.writer:
            sessions = self._writers.get(source.writer)
            if not sessions:
                return None
            at = bisect.bisect_right(sessions, (at_ns, "~"))
            return sessions[max(at - 1, 0)][1]
        if pid is None:
            return None
        for started_ns, ended_ns, session_id in self._pids.get(pid, ()):
            if started_ns <= at_ns and (ended_ns is None or at_ns <= ended_ns + _PID_SLACK_NS):
                return session_id
        return None


class Linker:
    """Groups the rows of batches without a session under their topmost known spans."""

    def __init__(self) -> None:
        """Know no row yet."""
        self._top_of: dict[str, str] = {}
        self._tops: dict[str, Top] = {}
        self._pending_marks: Counter[tuple[str, Source]] = Counter()
        self._pending_snapshots: Counter[tuple[str, Source]] = Counter()

    def add(self, links: Links, source: Source, size: int) -> None:
        """The rows of one file of ``size`` bytes. Newest files first keeps the groups few."""
        # Children are written before their parents: backwards, a parent is met first.
        for link in reversed(links.spans):
            self._span(link, source)
        for rows, pending in (
            (links.marks, self._pending_marks),
            (links.snapshots, self._pending_snapshots),
        ):
            for row in rows:
                top = self._tops.get(self._top_of.get(row.span_id, ""))
                if top is None:
                    pending[row.span_id, source] += 1
                elif pending is self._pending_marks:
                    top.counts.marks += 1
                else:
                    top.counts.snapshots += 1
        if links.spans:
            self._tops[self._top_of[links.spans[0].id]].counts.bytes += size

    def add_open(self, rows: Sequence[SpanRow], source: Source) -> None:
        """Scopes that are open; those that were met closed are known already."""
        for row in rows:
            self._span(SpanLink(row.id, row.parent_id, row.start_ns, row.pid), source)

    def _span(self, link: SpanLink, source: Source) -> None:
        if link.id in self._top_of:
            return
        top = self._top_of.get(link.parent_id or "")
        if top is None:
            top = link.id
            self._tops[top] = Top(link, source, Counts())
        self._top_of[link.id] = top
        self._tops[top].counts.spans += 1

    def totals(self) -> Iterator[tuple[Top, Counts]]:
        """Each group's counts with the span that is really topmost above it, for those met."""
        for top in self._tops.values():
            yield self._topmost(top), top.counts
        for pending, marks in ((self._pending_marks, 1), (self._pending_snapshots, 0)):
            for (span_id, source), count in pending.items():
                counts = Counts(marks=count * marks, snapshots=count * (1 - marks))
                known = self._tops.get(self._top_of.get(span_id, ""))
                if known is None:
                    yield Top(SpanLink(span_id), source, counts), counts
                else:
                    yield self._topmost(known), counts

    def _topmost(self, top: Top) -> Top:
        seen = {top.link.id}
        while True:
            above = self._tops.get(self._top_of.get(top.link.parent_id or "", ""))
            if above is None or above.link.id in seen:  # parents may form a ring in broken files
                return top
            seen.add(above.link.id)
            top = above
