"""What a line of a tree says behind the duration: how it ended, its marks, its attributes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.reading.nodes import Node, walk
from cirron_otel.reading.rows import MarkRow
from cirron_otel.reading.values import clean, duration, plural, size, text

#: A piece of text, and the style of it: one of :data:`STYLES`.
Segment: TypeAlias = tuple[str, str]
STYLES = (
    "guide", "name", "index", "time", "mark", "value", "final", "attr", "error", "open", "lost",
    "dim", "plain",
)  # fmt: skip

#: So many names of marks a line shows, of a span and of a group of spans.
_MARKS = 8
_GAP_MARKS = 4

#: Attributes that say where a span ran or how it ended: shown in other ways, or where they change.
_QUIET = frozenset({
    "pid", "rank", "thread_id", "tid", semconv.ERROR, semconv.RECOVERED, semconv.TRUNCATED,
    semconv.ERROR_TYPE,
})  # fmt: skip
#: Attributes of ours begin so; the user did not write them.
_OURS = "cirron."
#: ... but these, which lead somewhere.
_SHOWN = frozenset({semconv.PROFILE_FILE})
#: Marks that are for machines: what they say stands elsewhere in words.
_HIDDEN = semconv.FOR_METRICS


@dataclass(frozen=True, slots=True)
class Options:
    """What to show of a tree."""

    #: Levels below the roots; None for all.
    depth: int | None = None
    #: Show every sibling, every mark, and our own attributes.
    everything: bool = False
    #: Show the marks that say what our own instrumentation cost.
    overhead: bool = False
    #: For how long an open scope has been open.
    now_ns: int = 0
    #: Draw with ASCII alone.
    ascii_only: bool = False
    #: What to say of a root, by its id: the name of the run.
    titles: Mapping[str, str] = field(default_factory=dict)


class Gap(NamedTuple):
    """Siblings that are not shown; ``name`` is None where they have several."""

    name: str | None
    nodes: list[Node]


class Glyphs(NamedTuple):
    """What a tree is drawn with."""

    branch: str
    corner: str
    bar: str
    blank: str
    dots: str
    arrow: str


UNICODE = Glyphs("├─ ", "└─ ", "│  ", "   ", "…", "→")
ASCII = Glyphs("|- ", "`- ", "|  ", "   ", "...", "->")


def describe(
    node: Node, above: Node | None, glyphs: Glyphs, options: Options, *, cut: bool
) -> tuple[str, list[list[Segment]]]:
    """A span's duration and notes; ``cut`` says that what is below it is not shown."""
    span = node.span
    length = node.duration_ns
    if length is None:
        length = max(options.now_ns - span.start_ns, 0)
    notes = _state_notes(node, options)
    notes += _mark_notes(node.marks, glyphs, options)
    if cut:
        notes += _trends(walk(node.children), glyphs, options)
    notes += _attribute_notes(node, above, options)
    notes += [
        [(f"{word} {duration(value)}", "dim")]
        for value, word in ((span.gpu_ns, "gpu"), (span.cpu_ns, "cpu"))
        if value is not None
    ]
    if span.memory_peak_bytes is not None:
        notes.append([(f"peak {size(span.memory_peak_bytes)}", "dim")])
    if node.snapshots:
        notes.append([(f"{node.snapshots:,} {plural('snapshot', node.snapshots)}", "dim")])
    if cut:
        below = sum(1 for _ in walk(node.children))
        notes.append([(f"+{below:,} {plural('span', below)}", "dim")])
    # A row that stands for others has no id, and no length of its own.
    return duration(length) if span.id else "", notes


def _state_notes(node: Node, options: Options) -> list[list[Segment]]:
    notes: list[list[Segment]] = []
    if node.span.id in options.titles:
        notes.append([(clean(options.titles[node.span.id]), "final")])
    if node.is_open:
        notes.append([("open", "open")])
    if node.recovered:
        notes.append([("recovered: the process died", "lost")])
    elif node.failed:
        notes.append([(f"ERROR {failure(node)}", "error")])
    if node.truncated:
        notes.append([("closed at exit", "lost")])
    return notes


def failure(node: Node) -> str:
    """``Type: message`` of what ended a span, as far as it was written down."""
    said = node.span.attrs.get(semconv.ERROR)
    if isinstance(said, str) and said:
        return clean(said[:200])
    otel = node.span.otel
    kind = node.span.attrs.get(semconv.ERROR_TYPE)
    message = otel.status_message if otel is not None else None
    for event in (otel.events if otel is not None else None) or ():
        attributes = event.get("attributes")
        if event.get("name") == semconv.EXCEPTION_EVENT and isinstance(attributes, dict):
            kind = kind or attributes.get(semconv.EXCEPTION_TYPE)
            message = message or attributes.get(semconv.EXCEPTION_MESSAGE)
    words = [str(word) for word in (kind, message) if word]
    if len(words) > 1 and words[1].startswith(words[0]):
        del words[0]
    return clean(": ".join(words)[:200]) or "failed"


def _mark_notes(marks: Sequence[MarkRow], glyphs: Glyphs, options: Options) -> list[list[Segment]]:
    """Summary marks, then point marks: the last value, or the way from the first to the last."""
    summaries: dict[str, list[MarkRow]] = {}
    points: dict[str, list[MarkRow]] = {}
    for mark in marks:
        if mark.name not in _HIDDEN or options.overhead:
            (summaries if mark.kind == "summary" else points).setdefault(mark.name, []).append(mark)
    notes: list[list[Segment]] = []
    for name, found in summaries.items():
        notes.append([(clean(name), "mark"), (" ", "plain"), _value(found[-1], "final"),
                      (" (summary)", "dim")])  # fmt: skip
    for name, found in points.items():
        note: list[Segment] = [(clean(name), "mark"), (" ", "plain")]
        if len(found) > 1:
            note += [_value(found[0]), (f" {glyphs.arrow} ", "dim")]
        note.append(_value(found[-1]))
        if len(found) > 1:
            note.append((f" ({len(found):,} marks)", "dim"))
        notes.append(note)
    return _shortened(notes, _MARKS, glyphs, options)


def _shortened(
    notes: list[list[Segment]], limit: int, glyphs: Glyphs, options: Options
) -> list[list[Segment]]:
    if options.everything or len(notes) <= limit:
        return notes
    return [*notes[:limit], [(f"{glyphs.dots} {len(notes) - limit} more marks", "dim")]]


def _value(mark: MarkRow, style: str = "value") -> Segment:
    if mark.value_nonfinite is not UNSET:
        return clean(mark.value_nonfinite), "error"
    if mark.name == semconv.OVERHEAD and isinstance(mark.value, (int, float)):
        return duration(mark.value), style
    return text(mark.value), style


def _attribute_notes(node: Node, above: Node | None, options: Options) -> list[list[Segment]]:
    span = node.span
    notes: list[list[Segment]] = []
    if span.rank != (0 if above is None else above.span.rank):
        notes.append([(f"rank {span.rank}", "dim")])
    if above is not None and None not in (span.pid, above.span.pid) and span.pid != above.span.pid:
        notes.append([(f"pid {span.pid}", "dim")])
    if span.parent_id is not None and above is not None and span.parent_id != above.span.id:
        notes.append([("parent not in the spool", "dim")])
    for key, value in span.attrs.items():
        if options.everything or key in _SHOWN or not (key in _QUIET or key.startswith(_OURS)):
            notes.append([(f"{clean(key)}={text(value)}", "attr")])
    return notes


def describe_gap(gap: Gap, glyphs: Glyphs, options: Options) -> tuple[str, list[list[Segment]]]:
    """The mean duration of spans that are not shown, and where their marks went."""
    lengths = [node.duration_ns for node in gap.nodes]
    known = [length for length in lengths if length is not None]
    notes: list[list[Segment]] = [[("mean", "dim")]] if known else []
    notes += _trends(walk(gap.nodes), glyphs, options)
    return duration(sum(known) / len(known)) if known else "", notes


def _trends(nodes: Iterable[Node], glyphs: Glyphs, options: Options) -> list[list[Segment]]:
    """The first and the last value of each mark of spans that are not shown."""
    ends: dict[str, tuple[MarkRow, MarkRow]] = {}
    for mark in _numbers(nodes, options):
        first, _ = ends.get(mark.name, (mark, mark))
        ends[mark.name] = (first, mark)
    trends: list[list[Segment]] = []
    for name, (first, last) in ends.items():
        trend: list[Segment] = [(clean(name), "mark"), (" ", "plain"), _value(first)]
        if first is not last:
            trend += [(f" {glyphs.arrow} ", "dim"), _value(last)]
        trends.append(trend)
    return _shortened(trends, _GAP_MARKS, glyphs, options)


def _numbers(nodes: Iterable[Node], options: Options) -> Iterable[MarkRow]:
    for node in nodes:
        for mark in node.marks:
            if mark.name in _HIDDEN and not options.overhead:
                continue
            if mark.kind == "summary" or isinstance(mark.value, bool):
                continue
            if isinstance(mark.value, (int, float)) or mark.value_nonfinite is not UNSET:
                yield mark
