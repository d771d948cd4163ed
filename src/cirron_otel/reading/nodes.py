"""Spans in their places, and choosing among them.

Nothing here reads a file or recurses: a tree may be as deep as it likes.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.reading.index import SessionInfo
from cirron_otel.reading.rows import MarkRow, Source, SpanRow


class Node(msgspec.Struct, gc=False, eq=False):
    """One span in its place. ``children`` are in the order they started.

    Out of the garbage collector's sight, as rows are: nodes refer downwards only, and a million of
    them would slow down every collection of the program that looks at its own tree.
    """

    span: SpanRow
    source: Source
    #: Open in a process that lives.
    live: bool = False
    marks: Sequence[MarkRow] = ()
    children: Sequence[Node] = ()
    snapshots: int = 0
    #: It, or a span below it, failed, was recovered, or is open.
    notable: bool = False

    @property
    def is_open(self) -> bool:
        """Whether the scope had not ended when its process was last heard of."""
        return self.span.end_ns is None

    @property
    def duration_ns(self) -> int | None:
        """Its length; None while it is open."""
        end_ns = self.span.end_ns
        return None if end_ns is None else end_ns - self.span.start_ns

    @property
    def recovered(self) -> bool:
        """Whether its process died while it was open; its end is then the last sign of life."""
        return bool(self.span.attrs.get(semconv.RECOVERED))

    @property
    def truncated(self) -> bool:
        """Whether it was closed because its process ended, not because it was done."""
        return bool(self.span.attrs.get(semconv.TRUNCATED))

    @property
    def failed(self) -> bool:
        """Whether an exception ended it, or the process died in it."""
        otel = self.span.otel
        return bool(self.span.attrs.get(semconv.ERROR)) or (
            otel is not None and otel.status == "error"
        )

    def with_children(self, children: Sequence[Node]) -> Node:
        """The same span with other children."""
        copy = Node(self.span, self.source, live=self.live)
        copy.marks, copy.snapshots, copy.notable = self.marks, self.snapshots, self.notable
        copy.children = children
        return copy

    def adopt(self, child: Node) -> None:
        """Hang a node below this one."""
        if isinstance(self.children, list):
            self.children.append(child)
        else:
            self.children = [child]

    def annotate(self, mark: MarkRow) -> None:
        """Put a mark on this node."""
        if isinstance(self.marks, list):
            self.marks.append(mark)
        else:
            self.marks = [mark]


@dataclass(slots=True)
class Session:
    """One session with its tree."""

    info: SessionInfo
    root: Node
    #: Spans that were not read because of ``max_spans``.
    omitted: int = 0

    @property
    def id(self) -> str:
        """The id of its root span, or ``_orphans``."""
        return self.info.id


def walk(roots: Iterable[Node]) -> Iterator[Node]:
    """Every node, parents before children."""
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        yield node
        stack.extend(reversed(node.children))


def label(span: SpanRow) -> str:
    """How a span is called: ``name``, or ``name[index]``."""
    return span.name if span.index is None else f"{span.name}[{span.index}]"


def select(
    roots: Iterable[Node], *, name: str | None = None, last: int | None = None
) -> list[Node]:
    """The spans called ``name`` with all below them; of these the ``last`` n that closed.

    ``name`` is a span's name or its label (``step``, ``step[3]``). A match below another match
    stays where it is. Without ``name``, ``last`` takes the n newest closed spans: those below one
    another stay a tree, the others become roots. The given nodes are not changed.
    """
    if name is None:
        found = list(roots) if last is None else list(walk(roots))
        if last is None:
            return found
        newest = heapq.nlargest(last, _closed(found), key=lambda node: node.span.end_ns or 0)
        kept = {id(node) for node in newest}
        return prune(roots, lambda node: id(node) in kept, lift=True)
    found = []
    stack = list(roots)[::-1]
    while stack:
        node = stack.pop()
        if name in (node.span.name, label(node.span)):
            found.append(node)
        else:
            stack.extend(reversed(node.children))
    if last is None:
        return found
    newest = heapq.nlargest(last, _closed(found), key=lambda node: node.span.end_ns or 0)
    return sorted(newest, key=lambda node: node.span.start_ns)


def _closed(nodes: Iterable[Node]) -> Iterator[Node]:
    return (node for node in nodes if not node.is_open)


def prune(
    roots: Iterable[Node],
    keep: Callable[[Node], bool],
    *,
    lift: bool = False,
    whole: bool = False,
) -> list[Node]:
    """Copies of the trees without the nodes that are not to be kept.

    A node that is not kept stays when something below it is, or with ``lift`` leaves its children
    to the node above. With ``whole`` all below a kept node is kept.
    """
    ordered = list(walk(roots))
    copies: dict[int, list[Node]] = {}
    inside: set[int] = set()
    if whole:
        for node in ordered:
            if id(node) in inside or keep(node):
                inside.update(id(child) for child in node.children)
    for node in reversed(ordered):  # children come before their parents
        below = [copy for child in node.children for copy in copies.pop(id(child))]
        if id(node) in inside or keep(node) or (below and not lift):
            copies[id(node)] = [node.with_children(below)]
        else:
            copies[id(node)] = below
    return [copy for root in roots for copy in copies.get(id(root), ())]


def to_dict(roots: Iterable[Node]) -> dict[str, Any]:
    """The trees as plain values: ``{"roots": [...], "span_count": n}``. Times are ints in ns."""
    roots = list(roots)
    made: dict[int, dict[str, Any]] = {}
    count = 0
    ordered = list(walk(roots))
    for node in reversed(ordered):
        count += 1
        made[id(node)] = _as_dict(node, [made.pop(id(child)) for child in node.children])
    return {"roots": [made[id(root)] for root in roots], "span_count": count}


def _as_dict(node: Node, children: list[dict[str, Any]]) -> dict[str, Any]:
    span = node.span
    length = node.duration_ns
    return {
        "id": span.id,
        "parent_id": span.parent_id,
        "name": span.name,
        "index": span.index,
        "start_ns": span.start_ns,
        "end_ns": span.end_ns,
        "wall_us": None if length is None else length / 1000,
        "cpu_ns": span.cpu_ns,
        "gpu_ns": span.gpu_ns,
        "memory_peak_bytes": span.memory_peak_bytes,
        "attrs": dict(span.attrs),
        "marks": [mark_dict(mark) for mark in node.marks],
        "children": children,
    }


def mark_dict(mark: MarkRow) -> dict[str, Any]:
    """A mark as plain values."""
    out: dict[str, Any] = {"name": mark.name, "value": mark.value, "kind": mark.kind}
    if mark.value_nonfinite is not UNSET:
        out["value_nonfinite"] = mark.value_nonfinite
    return out
