"""What ``cirron-otel traces snapshots`` and ``snapshot`` print: tables, one tensor, a file."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from cirron_otel.cli.screen import Screen, print_json
from cirron_otel.errors import CirronError
from cirron_otel.reading.notes import Segment
from cirron_otel.reading.values import clean, local_time, number, plural, size, width
from cirron_otel.weights import elements, exporting
from cirron_otel.weights.blobs import path_of
from cirron_otel.weights.comparing import Change
from cirron_otel.weights.containers import Container
from cirron_otel.weights.histograms import bars, spark
from cirron_otel.weights.kinds import GRADIENTS, WEIGHTS
from cirron_otel.weights.reading import Row, Snapshot

_SHORT_ID = 12
_STATS = ("mean", "std", "min", "max", "norm")
_ROW_OF_VALUES = 8
#: Characters of a tensor's name in a table, and of a snapshot's.
_NAME, _LABEL = 120, 40


def snapshots(screen: Screen, found: Sequence[Snapshot]) -> None:
    """Print a line for each snapshot; sessions and ranks are named where there are several."""
    head = ("SNAPSHOT", "SESSION", "RANK", "TIME", "EPOCH", "STEP", "TAKEN", "NAN/INF", "WEIGHTS",
            "NORM", "GRADIENTS", "GRAD NORM", "MODE", "FILES")  # fmt: skip
    sessions = len({one.session_id for one in found}) > 1
    ranks = len({one.rank for one in found}) > 1
    lines = [_line(one, session=sessions, rank=ranks) for one in found]
    _table(screen, head, lines, "llrlrrlrrrrrlr", ("MODE", "STEP", "GRADIENTS", "WEIGHTS", "TIME"))


def _line(one: Snapshot, *, session: bool, rank: bool) -> list[Segment]:
    weights, gradients = one.of_kind(WEIGHTS), one.of_kind(GRADIENTS)
    bad = sum(row.nonfinite for row in one.rows)
    taken = _short(one.name, _LABEL) if one.name else clean(one.trigger.replace("_", " "))
    return [
        (one.span_id[:_SHORT_ID], "name"),
        (clean(one.session_id)[:_SHORT_ID] if session else "", "dim"),
        (str(one.rank) if rank else "", "plain"),
        (local_time(one.ts_ns), "plain"),
        ("" if one.epoch is None else str(one.epoch), "index"),
        ("" if one.iteration is None else f"{one.iteration:,}", "plain"),
        (taken, "plain"),
        (f"{bad:,}" if bad else "", "error"),
        (f"{len(weights):,}" if weights else "", "plain"),
        (_number(norm(weights)) if weights else "", "plain"),
        (f"{len(gradients):,}" if gradients else "", "plain"),
        (_number(norm(gradients)) if gradients else "", "plain"),
        (clean(one.mode), "plain"),
        (_file_size(one), "plain"),
    ]


def _file_size(one: Snapshot) -> str:
    paths = {path for row in one.rows if row.blob_uri and (path := path_of(row.blob_uri))}
    if not paths:
        return ""
    try:
        return size(sum(path.stat().st_size for path in paths))
    except OSError:
        return "gone"


def rows(screen: Screen, one: Snapshot, found: Sequence[Row]) -> None:
    """Print a line for each tensor of a snapshot."""
    _title(screen, one)
    head = ("TENSOR", "SHAPE", "DTYPE", "NAN/INF", *map(str.upper, _STATS), "HISTOGRAM")
    dtypes = {row.dtype for row in found}
    lines: list[list[Segment]] = [
        [
            (_short(row.tensor_name), "name"),
            (_shape(row.shape, screen), "plain"),
            (clean(row.dtype) if len(dtypes) > 1 else "", "dim"),
            (f"{row.nonfinite:,}" if row.nonfinite else "", "error"),
            *((_number(row.number(name)), "plain") for name in _STATS),
            _picture(screen, row),
        ]
        for row in found
    ]
    _table(screen, head, lines, "llrrrrrrrl", ("DTYPE", "MIN", "MAX", "SHAPE", "STD"))
    values = sum(math.prod(row.shape) for row in found if row.kind == WEIGHTS and row.is_own)
    of_type = f" of {clean(min(dtypes))}" if len(dtypes) == 1 else ""
    in_all = f", {values:,} weights" if values else ""
    screen.text("")
    screen.text(
        f"{len(found):,} {plural('tensor', len(found))}{of_type}{in_all}; a histogram has 16 bins "
        "from MIN to MAX",
        "dim",
    )


def _title(screen: Screen, one: Snapshot, before: str = "") -> None:
    parts = [f"{before}snapshot {one.span_id}", local_time(one.ts_ns)]
    if one.epoch is not None:
        parts.append(f"epoch {one.epoch}")
    if one.iteration is not None:
        parts.append(f"step {one.iteration:,}")
    if one.name:
        parts.append(_short(one.name, _LABEL))
    screen.text(", ".join(parts), "dim")


def changes(screen: Screen, before: Snapshot, after: Snapshot, found: Sequence[Change]) -> None:
    """Print a line for each tensor of two snapshots."""
    _title(screen, before, "before: ")
    _title(screen, after, "after:  ")
    head = ("TENSOR", "NORM", "CHANGE", "MOVED", "STD", "MEAN SHIFT", "BEFORE", "AFTER")
    lines = []
    for change in found:
        old, new = change.before, change.after
        line: list[Segment] = [
            (_short(change.name), "name"),
            (_both(screen, change, "norm"), "plain"),
            (_percent(change.norm_ratio), "value"),
            (_percent_of(change.moved), "value"),
            (_both(screen, change, "std"), "plain"),
            (_signed(change.mean_shift), "plain"),
            _picture(screen, old),
            _picture(screen, new),
        ]
        lines.append(line)
    _table(screen, head, lines, "lrrrrrll", ("MEAN SHIFT", "STD", "BEFORE", "NORM"))
    if any(change.moved is not None for change in found):
        screen.text("")
        screen.text("MOVED: length of the difference, as a share of the tensor's norm before",
                    "dim")  # fmt: skip


def tensor(screen: Screen, row: Row, preview: int | None, tail: int | None) -> None:
    """Print all that is known of one tensor, with its histogram and some values."""
    facts = f"  {_shape(row.shape, screen)} {clean(row.dtype)}"
    screen.line([(clean(row.tensor_name), "name"), (facts, "dim")])
    if row.stats is None:
        screen.text(f"no statistics: {clean(row.skipped or 'none were recorded')}", "lost")
    else:
        shown = "  ".join(f"{name} {_number(row.number(name))}" for name in _STATS)
        screen.text(shown)
        if row.nonfinite:
            screen.text(f"{row.nonfinite:,} values are NaN or infinite; the numbers are of the "
                        "others", "error")  # fmt: skip
        histogram = row.histogram
        if histogram is not None:
            for line in bars(*histogram, ascii_only=screen.ascii_only):
                screen.text("  " + line)
    if row.attrs:
        notes = ", ".join(f"{clean(str(k))} {clean(str(v))}" for k, v in row.attrs.items())
        screen.text(notes, "dim")
    if row.blob_uri is None:
        return
    screen.text(clean(row.blob_uri), "dim")
    path = path_of(row.blob_uri)
    if path is not None and not path.exists():
        screen.text("the file is gone", "lost")
    elif path is not None and (preview is None or preview or tail):
        for _, entry, data in exporting.tensors([row]):
            _values(screen, data, entry.dtype, preview, tail)


def _values(screen: Screen, data: bytes, dtype: str, preview: int | None, tail: int | None) -> None:
    try:
        count = elements.count(data, dtype)
    except CirronError as error:
        screen.text(str(error), "lost")
        return
    first = _ROW_OF_VALUES if preview is None else preview
    for title, start, stop in (
        ("first", 0, min(first, count)),
        ("last", max(count - (tail or 0), 0), count),
    ):
        values = elements.numbers(data, dtype, start, stop)
        for at in range(0, len(values), _ROW_OF_VALUES):
            part = values[at : at + _ROW_OF_VALUES]
            label = title if at == 0 else ""
            screen.text(f"{label:<6}" + " ".join(f"{_element(value):>11}" for value in part))


def file(  # noqa: PLR0913 - the options of a command
    screen: Screen,
    path: Path,
    name: str | None,
    preview: int | None,
    tail: int | None,
    *,
    as_json: bool,
) -> None:
    """Print what a safetensors file holds, or one tensor of it."""
    with Container(path) as box:
        entries = list(box.entries.values())
        if name is not None:
            entry = box.find(name)
            if entry is None:
                raise CirronError(
                    f"{path} has no tensor {name!r}: without a name the command lists them"
                )
            entries = [entry]
        if as_json:
            print_json({
                "file": str(path), "metadata": box.metadata,
                "tensors": [{"name": e.name, "dtype": e.dtype, "shape": e.shape} for e in entries],
            })  # fmt: skip
            return
        for key, value in box.metadata.items():
            screen.text(f"{clean(key)}: {clean(value)}", "dim")
        head = ("TENSOR", "SHAPE", "DTYPE", "SIZE")
        lines: list[list[Segment]] = [
            [(_short(e.name), "name"), (_shape(e.shape, screen), "plain"),
             (clean(e.dtype), "dim"), (size(e.end - e.start), "plain")]
            for e in entries
        ]  # fmt: skip
        _table(screen, head, lines, "lllr")
        if name is not None:
            _values(screen, box.data(entries[0]), entries[0].dtype, preview, tail)


def _table(
    screen: Screen,
    head: Sequence[str],
    lines: Sequence[Sequence[Segment]],
    right: str,
    spare: Sequence[str] = (),
) -> None:
    """A table without the columns that have nothing in them.

    On a terminal that is too narrow those of ``spare`` go, in this order, and it says so.
    """
    widths = [max((width(line[i][0]) for line in lines), default=0) for i in range(len(head))]
    kept = [i for i, found in enumerate(widths) if found]
    gone = []
    for name in spare:
        needed = sum(max(widths[i], width(head[i])) + 2 for i in kept) - 2
        if screen.columns is None or needed <= screen.columns:
            break
        if head.index(name) in kept:
            kept.remove(head.index(name))
            gone.append(name)
    screen.table(
        [head[i] for i in kept],
        [[line[i] for i in kept] for line in lines],
        "".join(right[i] for i in kept),
    )
    if gone:
        screen.text(
            f"{screen.columns} columns have no room for {', '.join(gone)}; a pipe gets them all",
            "dim",
        )


# -- cells ---------------------------------------------------------------------------------------


def norm(rows: Sequence[Row]) -> float | None:
    """The norm of all together; of tied ones once, and without buffers."""
    norms = [row.number("norm") for row in rows if row.is_own]
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if known else None


def _short(text: str, limit: int = _NAME) -> str:
    """A name without its middle where it is long; the JSON has it whole."""
    shown = clean(text)
    half = limit // 2 - 1
    return shown if len(shown) <= limit else f"{shown[:half]}...{shown[-half:]}"


def _both(screen: Screen, change: Change, name: str) -> str:
    """A statistic before and after."""
    found = [None if row is None else row.number(name) for row in (change.before, change.after)]
    arrow = "->" if screen.ascii_only else "\N{RIGHTWARDS ARROW}"
    return "" if found == [None, None] else f" {arrow} ".join(_number(value) for value in found)


def _picture(screen: Screen, row: Row | None) -> Segment:
    """The histogram of a tensor, or why there is none."""
    if row is None:
        return "not there", "lost"
    if row.stats is None:
        return clean(f"skipped: {row.skipped or 'no statistics'}"), "lost"
    histogram = row.histogram
    shown = "" if histogram is None else spark(histogram[1], ascii_only=screen.ascii_only)
    return shown, "value"


def _shape(shape: Sequence[int], screen: Screen) -> str:
    times = "x" if screen.ascii_only else "\N{MULTIPLICATION SIGN}"
    return times.join(map(str, shape)) or "scalar"


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _element(value: complex) -> str:
    """One value of a tensor."""
    if isinstance(value, (int, float)):
        return number(value)
    return f"{number(value.real)}{value.imag:+.4g}j"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{(ratio - 1) * 100:+.3g} %"


def _percent_of(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.3g} %"
