"""Sessions as JSON. Times in ns are strings: many readers of JSON round large integers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from cirron_otel.reading.index import SessionInfo
from cirron_otel.reading.nodes import mark_dict
from cirron_otel.reading.sessions import Node, Session, walk

#: Deeper levels are not indented further.
_DEEPEST_INDENT = 40


def session_summary(info: SessionInfo) -> dict[str, Any]:
    """One element of ``traces list --json``."""
    return {
        "id": info.id,
        "started_ns": str(info.started_ns),
        "ended_ns": _text(info.ended_ns),
        "live": info.live,
        "recovered": info.recovered,
        "spans": info.spans,
        "marks": info.marks,
        "snapshots": info.snapshots,
        "bytes": info.bytes,
        "sdk_version": info.sdk_version,
        "run_id": info.run_id,
        "attempt": info.attempt,
        "ranks": sorted(info.ranks),
        "writers": sorted(info.writers),
    }


def write_sessions(
    shown: Sequence[tuple[Session, list[Node]]], *, depth: int | None, as_list: bool
) -> None:
    """Print sessions with their trees piece by piece; without recursion, however deep they are.

    ``tree`` is the session's span, or null when nothing of it is left.
    """
    write = sys.stdout.write
    if as_list:
        write("[")
    for i, (session, roots) in enumerate(shown):
        info = session.info
        head = {
            "session_id": info.id,
            "sdk_version": info.sdk_version,
            "run_id": info.run_id,
            "started_ns": str(info.started_ns),
            "ended_ns": _text(info.ended_ns),
            "live": info.live,
            "recovered": info.recovered,
        }
        write((",\n" if i else "") + _encode(head)[:-1] + ',"tree":\n')
        if roots:
            _write_tree(roots[0], depth, write)
        else:
            write("null")
        write("}")
    write("]\n" if as_list else "\n")


def _write_tree(root: Node, depth: int | None, write: Callable[[str], object]) -> None:
    """One line a node. The stack holds nodes with their level, and what closes them."""
    stack: list[tuple[Node, int, bool] | str] = [(root, 0, True)]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            write(item)
            continue
        node, level, first = item
        below = node.children if depth is None or level < depth else ()
        fields = _node(node)
        if node.children and not below:
            fields["collapsed_spans"] = sum(1 for _ in walk(node.children))
        indent = "" if level == 0 else "\n" + "  " * min(level, _DEEPEST_INDENT)
        write(("" if first else ",") + indent + _encode(fields)[:-1] + ',"children":[')
        stack.append("]}")
        last = len(below) - 1
        stack.extend((child, level + 1, i == last) for i, child in enumerate(reversed(below)))


def _node(node: Node) -> dict[str, Any]:
    span = node.span
    return {
        "id": span.id,
        "parent_id": span.parent_id,
        "name": span.name,
        "index": span.index,
        "start_ns": str(span.start_ns),
        "end_ns": _text(span.end_ns),
        "duration_ns": _text(node.duration_ns),
        "cpu_ns": _text(span.cpu_ns),
        "gpu_ns": _text(span.gpu_ns),
        "memory_peak_bytes": span.memory_peak_bytes,
        "pid": span.pid,
        "rank": span.rank,
        "snapshots": node.snapshots,
        "recovered": node.recovered,
        "attrs": span.attrs,
        "marks": [{**mark_dict(mark), "ts_ns": str(mark.ts_ns)} for mark in node.marks],
    }


def _text(ns: int | None) -> str | None:
    return None if ns is None else str(ns)


def _encode(value: object) -> str:
    return msgspec.json.encode(value).decode()
