"""From the spool to sessions: trees of spans with their marks, for the terminal and ``ci.trace()``.

Rows are joined over all batches and processes by ``parent_id``: a worker's scopes lie under the
scope they were started from. What has no way up is shown all the same: a span whose parent is not
in the spool hangs under the session of its batch, of its writer, or of its process at that time,
else in the pseudo session ``_orphans``. Ids are never trusted to form a tree: duplicates are
resolved (closed wins over open, newer over older) and rings are cut.

Nothing here recurses, so a tree may be as deep as it likes, and nothing imports a terminal
library. All functions block while they read files; they may be called on any thread.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from cirron_otel import semconv
from cirron_otel.batch import ROOT_SPAN_ID
from cirron_otel.errors import CirronError, SpoolError
from cirron_otel.reading.index import ORPHANS, FileInfo, Index, OnError, OpenScopes, SessionInfo
from cirron_otel.reading.nodes import Node, Session, select, to_dict, walk
from cirron_otel.reading.rows import (
    MarkRow,
    Rows,
    Source,
    SpanRow,
    decode,
    is_session,
    is_window,
    read,
)
from cirron_otel.spool import Spool

__all__ = [
    "ORPHANS",
    "Index",
    "NoSuchSessionError",
    "Node",
    "Session",
    "choose",
    "load",
    "select",
    "to_dict",
    "trees",
    "walk",
]

#: Files are skipped when they were written this long before the session began, not sooner: the
#: wall clocks of the machines that share a directory may disagree.
_CLOCK_SLACK_NS = 3_600_000_000_000


class NoSuchSessionError(CirronError, LookupError):
    """No session, or more than one, has the id asked for; the message lists what there is."""


def load(  # noqa: PLR0913 - all but the first are options
    spool: Spool,
    *,
    session: str | None = None,
    last: int | None = None,
    max_spans: int | None = None,
    on_error: OnError | None = None,
    now_ns: int | None = None,
) -> list[Session]:
    """Sessions with their trees, newest first.

    ``session`` is an id or the beginning of exactly one id; ``last`` takes the newest n. Above
    ``max_spans`` only the newest spans are read, and the direct children of each session; the
    others are counted in :attr:`Session.omitted`. Files that are no batches are passed over after
    ``on_error`` was told; files that vanish are passed over.

    Raises :class:`NoSuchSessionError`, and :class:`~cirron_otel.errors.SpoolError` when the
    directory cannot be listed. Memory: about 0.6 kB per span.
    """
    index = Index(spool, on_error=on_error, now_ns=now_ns)
    return trees(index, choose(index, session=session, last=last), max_spans=max_spans)


def choose(
    index: Index, *, session: str | None = None, last: int | None = None
) -> list[SessionInfo]:
    """The sessions asked for, newest first; the pseudo session only by name, or if it is all."""
    orphans = [index.orphans] if index.orphans.spans or index.orphans.marks else []
    if session is None:
        found = index.sessions or orphans
        return found if last is None else found[:last]
    everything = [*index.sessions, *orphans]
    exact = [info for info in everything if info.id == session]
    found = exact or [info for info in everything if info.id.startswith(session)]
    if len(found) == 1:
        return found
    if not found:
        raise NoSuchSessionError(f"no session begins with {session!r}")
    ids = ", ".join(info.id for info in found[:5])
    more = f" and {len(found) - 5} more" if len(found) > 5 else ""  # noqa: PLR2004 - as above
    raise NoSuchSessionError(f"{len(found)} sessions begin with {session!r}: {ids}{more}")


def trees(
    index: Index, chosen: Sequence[SessionInfo], *, max_spans: int | None = None
) -> list[Session]:
    """The trees of some sessions of an index, in the order given."""
    if not chosen:
        return []
    join = _Join(index, chosen, max_spans)
    for scopes in index.open:
        if join.wants(scopes.source):
            join.open_scopes(scopes)
    for file in index.files:
        data = join.bytes_of(file)
        if data is not None:
            try:
                join.rows(decode(data, Rows), file.source)
            except SpoolError as exc:
                index.report(file.path, exc)
    return join.finish()


class _Join:
    """Collects rows, newest batches first, and makes trees of them."""

    def __init__(self, index: Index, chosen: Sequence[SessionInfo], max_spans: int | None) -> None:
        self._index = index
        self._chosen = {info.id: info for info in chosen}
        self._earliest_ns = min(info.started_ns for info in chosen) - _CLOCK_SLACK_NS
        self._trace_halves = [info.id[16:].encode() for info in chosen if info.id != ORPHANS]
        self._orphans = ORPHANS in self._chosen
        self._max_spans = sys.maxsize if max_spans is None else max_spans
        self._nodes: dict[str, Node] = {}
        self._marks: list[tuple[MarkRow, Source]] = []
        self._snapshots: list[str] = []
        self._omitted = 0
        self._sources: dict[Source, Source] = {}

    def wants(self, source: Source) -> bool:
        """Whether rows from there may be of a chosen session, going by what the batch says."""
        return not source.session_id or source.session_id in self._chosen

    def bytes_of(self, file: FileInfo) -> bytes | None:
        """The bytes of a file, or None if it holds nothing of the chosen sessions."""
        named = file.source.session_id
        if named not in self._chosen and file.created_ns < self._earliest_ns:
            return None
        try:
            data = read(file.path)
        except SpoolError as exc:
            self._index.report(file.path, exc)
            return None
        if data is None or self.wants(file.source):
            return data
        # A row that closed after the next session had begun: its ids end with the half of the
        # trace id that all spans of its session share.
        return data if any(half in data for half in self._trace_halves) else None

    def open_scopes(self, scopes: OpenScopes) -> None:
        """The rows of one writer's ``open``; closed rows of the same ids replace them later."""
        for row in scopes.rows:
            self._nodes[row.id] = Node(row, scopes.source, live=scopes.live)

    def rows(self, batch: Rows, source: Source) -> None:
        """The rows of one batch, older than all before."""
        nodes = self._nodes
        source = self._sources.setdefault(source, source)
        room = self._max_spans - len(nodes)
        for row in reversed(batch.spans):
            known = nodes.get(row.id)
            if known is not None:
                # Rows closed in memory count as open here: what the process wrote itself wins.
                if row.end_ns is not None and (known.is_open or known.live or known.recovered):
                    known.span, known.live = row, False
                continue
            if is_window(row):
                continue
            parent = None if row.parent_id is None else nodes.get(row.parent_id)
            if room <= 0 and not (
                is_session(row) or (parent is not None and parent.span.parent_id is None)
            ):
                self._omitted += 1
                continue
            room -= 1
            # One string for each name and id, however many rows repeat them.
            row.name = sys.intern(row.name)
            if parent is not None:
                row.parent_id = parent.span.id
            nodes[row.id] = Node(row, source)
        self._attach(batch, source)

    def _attach(self, batch: Rows, source: Source) -> None:
        nodes = self._nodes
        for mark in batch.marks:
            node = nodes.get(mark.span_id)
            if node is None:
                if not self._omitted or mark.span_id == ROOT_SPAN_ID:
                    self._marks.append((mark, source))
            else:
                mark.name = sys.intern(mark.name)
                mark.span_id = node.span.id
                node.annotate(mark)
        for snapshot in batch.snapshots:
            node = nodes.get(snapshot.span_id)
            if node is None:
                self._snapshots.append(snapshot.span_id)
            else:
                node.snapshots += 1

    def finish(self) -> list[Session]:
        """The trees. Call once, after all rows."""
        for info in self._chosen.values():
            if info.id not in self._nodes:
                self._nodes[info.id] = _stand_in(info)
        for span_id in self._snapshots:
            if span_id in self._nodes:
                self._nodes[span_id].snapshots += 1
        loose = self._link()
        loose += self._cut_rings(loose)
        for node in loose:
            self._place(node)
        self._place_marks()
        self._finish_nodes()
        if self._orphans:
            _span_children(self._nodes[ORPHANS])
        return [
            Session(info, self._nodes[info.id], self._omitted) for info in self._chosen.values()
        ]

    def _link(self) -> list[Node]:
        loose = []
        for node in self._nodes.values():
            parent = self._nodes.get(node.span.parent_id or "")
            if parent is None:
                loose.append(node)
            else:
                parent.adopt(node)
        return loose

    def _cut_rings(self, loose: Sequence[Node]) -> list[Node]:
        """Nodes that no loose one leads to lie on or under a ring of parents: cut each ring."""
        reached = {id(node) for node in walk(loose)}
        if len(reached) == len(self._nodes):
            return []
        cut = []
        lost = [node for node in self._nodes.values() if id(node) not in reached]
        for node in sorted(lost, key=lambda node: (node.span.start_ns, node.span.id)):
            if id(node) in reached:
                continue
            parent = self._nodes[node.span.parent_id or ""]
            parent.children = [child for child in parent.children if child is not node]
            cut.append(node)
            reached.update(id(below) for below in walk([node]))
        return cut

    def _place(self, node: Node) -> None:
        """Hang a span without a parent in the spool under the session it belongs to."""
        span = node.span
        if span.id in self._chosen or is_session(span):
            return
        home = self._home(span.parent_id, node.source, span.start_ns, span.pid)
        if home is not None:
            home.adopt(node)

    def _home(
        self, parent_id: str | None, source: Source, at_ns: int, pid: int | None
    ) -> Node | None:
        """The root under which something without a known parent is shown; None: not here."""
        session_id = self._index.owner(parent_id, source, at_ns, pid)
        if session_id is None:
            session_id = ORPHANS
        return self._nodes[session_id] if session_id in self._chosen else None

    def _place_marks(self) -> None:
        """Marks made outside any scope, and marks whose span is not in the spool."""
        strays: dict[str, Node] = {}
        for mark, source in self._marks:
            node = self._nodes.get(mark.span_id)
            if node is not None:
                node.annotate(mark)
                continue
            home = self._home(mark.span_id, source, mark.ts_ns, None)
            if home is None:
                continue
            if mark.span_id == ROOT_SPAN_ID and home.span.id != ORPHANS:
                home.annotate(mark)
            else:
                stray = strays.get(home.span.id)
                if stray is None:
                    row = SpanRow("", "(marks without a span)", mark.ts_ns, end_ns=mark.ts_ns)
                    stray = strays[home.span.id] = Node(row, source)
                    home.adopt(stray)
                stray.annotate(mark)

    def _finish_nodes(self) -> None:
        for node in self._nodes.values():
            if len(node.children) > 1:
                node.children = sorted(
                    node.children, key=lambda child: (child.span.start_ns, child.span.index or 0)
                )
            if len(node.marks) > 1:
                node.marks = sorted(node.marks, key=lambda mark: mark.ts_ns)
            if node.is_open or node.failed or node.recovered or node.truncated:
                above: Node | None = node
                while above is not None and not above.notable:
                    above.notable = True
                    above = self._nodes.get(above.span.parent_id or "")


def _stand_in(info: SessionInfo) -> Node:
    """A root for what has none in the spool."""
    name = "(orphan spans)" if info.id == ORPHANS else semconv.SESSION
    row = SpanRow(info.id, name, info.started_ns, end_ns=info.ended_ns or info.started_ns)
    return Node(row, Source("", ""))


def _span_children(node: Node) -> None:
    """Make a stand-in last as long as what is below it."""
    spans = [child.span for child in node.children if child.span.id]
    if spans:
        node.span.start_ns = min(span.start_ns for span in spans)
        node.span.end_ns = max(span.end_ns or 0 for span in spans)
