"""A tree of spans as lines of text: ``label   duration   marks   attributes``, aligned.

A line is a sequence of segments, each a text and the word for its style; who prints decides what
a style looks like. :func:`plain` prints without any. Every line says all it has to say without
colour, too.

Many equal siblings collapse: of an epoch's steps the first two and the last stand for all, with
those that failed or are open; one line tells how many there are between, how long they took on
average, and where their marks went.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from cirron_otel.reading.nodes import Node, label
from cirron_otel.reading.notes import (
    ASCII,
    UNICODE,
    Gap,
    Glyphs,
    Options,
    Segment,
    describe,
    describe_gap,
)
from cirron_otel.reading.values import clean, plural, width

__all__ = ["Options", "Segment", "lines", "plain"]

#: A group of siblings with one name is shown whole up to this size.
_WHOLE = 5
_FIRST, _LAST = 2, 1
#: So many failed or open members of a collapsed group are shown beside the first and last.
_NOTABLE = 3
#: So many children of one span are shown, whatever their names.
_CHILDREN = 60
#: Deeper than this, a line would be all guides.
_DEEPEST = 100
_LABEL_COLUMNS = 48


def plain(roots: Iterable[Node], options: Options | None = None) -> Iterator[str]:
    """The tree as lines without colour."""
    for line in lines(roots, options or Options()):
        yield "".join(piece for piece, _ in line).rstrip()


def lines(roots: Iterable[Node], options: Options) -> Iterator[list[Segment]]:
    """The tree as lines of segments. Walks the tree twice: once to measure, once to draw."""
    roots = list(roots)
    glyphs = ASCII if options.ascii_only else UNICODE
    columns = 0
    for place in _layout(roots, options, glyphs):
        columns = max(columns, width(place.guide) + _width(_label(place.item, glyphs)))
    columns = min(columns, _LABEL_COLUMNS)
    for place in _layout(roots, options, glyphs):
        named = _label(place.item, glyphs)
        padding = max(columns - width(place.guide) - _width(named), 0)
        line: list[Segment] = [(place.guide, "guide"), *named, (" " * (padding + 2), "plain")]
        if isinstance(place.item, Gap):
            shown, notes = describe_gap(place.item, glyphs, options)
        else:
            shown, notes = describe(place.item, place.above, glyphs, options, cut=place.cut)
        line.append((_aligned(shown), "time"))
        for note in notes:
            line.append(("  ", "plain"))
            line.extend(note)
        yield line


class _Place(NamedTuple):
    """One line to be: its guides, what it shows, and the node above."""

    guide: str
    item: Node | Gap
    above: Node | None
    #: What is below is not shown: it is too deep.
    cut: bool


def _layout(roots: Sequence[Node], options: Options, glyphs: Glyphs) -> Iterator[_Place]:
    """What to show, in the order of the lines."""
    deepest = _DEEPEST if options.depth is None else options.depth
    stack: list[tuple[Node | Gap, Node | None, str, str, int]] = [
        (item, None, "", "", 0) for item in reversed(_siblings(roots, options))
    ]
    while stack:
        item, above, guide, below, level = stack.pop()
        if isinstance(item, Gap):
            yield _Place(guide, item, above, cut=False)
            continue
        cut = level >= deepest and bool(item.children)
        yield _Place(guide, item, above, cut)
        if cut:
            continue
        for i, child in enumerate(reversed(_siblings(item.children, options))):
            fork, rest = (glyphs.branch, glyphs.bar) if i else (glyphs.corner, glyphs.blank)
            stack.append((child, item, below + fork, below + rest, level + 1))


def _siblings(children: Sequence[Node], options: Options) -> list[Node | Gap]:
    """The children to show, with gaps where the others would stand."""
    if options.everything or len(children) <= _WHOLE:
        return list(children)
    groups: dict[str, list[Node]] = {}
    for node in children:
        groups.setdefault(node.span.name, []).append(node)
    hidden: set[int] = set()
    gaps: dict[int, Gap] = {}
    for name, nodes in groups.items():
        if len(nodes) <= _WHOLE:
            continue
        middle = nodes[_FIRST:-_LAST]
        notable = [node for node in middle if node.notable][-_NOTABLE:]
        kept = {id(node) for node in notable}
        gap = [node for node in middle if id(node) not in kept]
        if len(gap) > 1:
            gaps[id(gap[0])] = Gap(name, gap)
            hidden.update(id(node) for node in gap)
    items: list[Node | Gap] = []
    for node in children:
        if id(node) in gaps:
            items.append(gaps[id(node)])
        elif id(node) not in hidden:
            items.append(node)
    if len(items) > _CHILDREN:
        rest = items[_CHILDREN // 2 : -_CHILDREN // 2]
        nodes = [n for item in rest for n in (item.nodes if isinstance(item, Gap) else [item])]
        items[_CHILDREN // 2 : -_CHILDREN // 2] = [Gap(None, nodes)]
    return items


def _label(item: Node | Gap, glyphs: Glyphs) -> list[Segment]:
    if isinstance(item, Gap):
        count = len(item.nodes)
        what = plural(clean(item.name or "span"), count)
        return [(f"{glyphs.dots} {count:,} more {what}", "dim")]
    span = item.span
    failed = "error" if item.failed and not item.recovered else "name"
    name = clean(span.name)
    if span.index is None:
        return [(name, failed)]
    return [(name, failed), (label(span)[len(span.name) :], "index")]


def _width(segments: Iterable[Segment]) -> int:
    return sum(width(piece) for piece, _ in segments)


def _aligned(shown: str) -> str:
    """Durations line up at the space between number and unit."""
    amount, _, unit = shown.partition(" ")
    return f"{amount:>6} {unit:<2}" if " " not in unit else f"{shown:>9}"
