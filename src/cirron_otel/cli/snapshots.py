"""``cirron-otel traces snapshots`` and ``snapshot``: the weights, and how they changed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from cirron_otel.cli.screen import Screen, Warnings, print_json
from cirron_otel.cli.where import find_spool
from cirron_otel.errors import CirronError
from cirron_otel.reading.notes import Segment
from cirron_otel.reading.values import clean, local_time, number, plural, size
from cirron_otel.weights import elements, exporting
from cirron_otel.weights.blobs import path_of
from cirron_otel.weights.comparing import Change, compare
from cirron_otel.weights.containers import Container
from cirron_otel.weights.histograms import bars, spark
from cirron_otel.weights.reading import (
    GRADIENTS,
    WEIGHTS,
    NoSuchSnapshotError,
    Row,
    Snapshot,
    find,
    load,
)

_SHORT_ID = 12
_STATS = ("mean", "std", "min", "max", "norm")
_ROW_OF_VALUES = 8

_spool_option = click.option(
    "--spool",
    "directory",
    metavar="DIR",
    help="The output directory or its spool folder [$CIRRON_OUTPUT_DIR, ./.cirron].",
)
_session_option = click.option("--session", metavar="ID", help="Of the session that ID begins.")
_json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
_no_color_option = click.option("--no-color", is_flag=True, help="Print without colours.")


@click.command()
@click.argument("span_id", metavar="[SPAN]", required=False)
@click.option("--span", "span_option", metavar="ID", help="The same as SPAN.")
@_session_option
@_spool_option
@_json_option
@_no_color_option
def snapshots(  # noqa: PLR0913 - the options of a command
    span_id: str | None,
    span_option: str | None,
    session: str | None,
    directory: str | None,
    *,
    as_json: bool,
    no_color: bool,
) -> None:
    """List the snapshots of weights and gradients, oldest first.

    SPAN is the beginning of a snapshot's or an epoch's id.
    """
    found = _load(directory, session)
    wanted = span_id or span_option
    if wanted is not None:
        found = [
            one
            for one in found
            if one.span_id.startswith(wanted) or (one.epoch_id or "").startswith(wanted)
        ]
        if not found:
            raise NoSuchSnapshotError(f"no snapshot's or epoch's id begins with {wanted!r}")
    if as_json:
        print_json({"snapshots": [_summary(one) for one in found]})
        return
    screen = Screen(color=not no_color)
    if not found:
        screen.text("no snapshots yet: give ci.watch(model) the model that is trained")
        return
    head = ("SNAPSHOT", "TIME", "EPOCH", "STEP", "TAKEN", "MODE", "WEIGHTS", "NORM", "GRADIENTS",
            "GRAD NORM", "NAN/INF", "FILES")  # fmt: skip
    screen.table(head, [_line(one) for one in found], "llrrllrrrrrr")


def _line(one: Snapshot) -> list[Segment]:
    weights, gradients = one.of_kind(WEIGHTS), one.of_kind(GRADIENTS)
    bad = sum(row.nonfinite for row in one.rows)
    taken = clean(one.name) if one.name else one.trigger.replace("_", " ")
    return [
        (one.span_id[:_SHORT_ID], "name"),
        (local_time(one.ts_ns), "plain"),
        ("" if one.epoch is None else str(one.epoch), "index"),
        ("" if one.iteration is None else f"{one.iteration:,}", "plain"),
        (taken, "plain"),
        (one.mode, "plain"),
        (f"{len(weights):,}" if weights else "", "plain"),
        (_number(_norm(weights)) if weights else "", "plain"),
        (f"{len(gradients):,}" if gradients else "", "plain"),
        (_number(_norm(gradients)) if gradients else "", "plain"),
        (f"{bad:,}" if bad else "", "error"),
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


def _summary(one: Snapshot) -> dict[str, Any]:
    return {
        "span_id": one.span_id,
        "session_id": one.session_id,
        "ts_ns": str(one.ts_ns),
        "epoch": one.epoch,
        "iteration": one.iteration,
        "trigger": one.trigger,
        "name": one.name,
        "mode": one.mode,
        "weights": len(one.of_kind(WEIGHTS)),
        "gradients": len(one.of_kind(GRADIENTS)),
        "weights_norm": _norm(one.of_kind(WEIGHTS)),
        "gradients_norm": _norm(one.of_kind(GRADIENTS)),
        "nonfinite": sum(row.nonfinite for row in one.rows),
        "blob_uris": sorted({row.blob_uri for row in one.rows if row.blob_uri is not None}),
    }


@click.command()
@click.argument("wanted", metavar="[SNAPSHOT]", required=False)
@click.argument("tensor", metavar="[TENSOR]", required=False)
@click.option("--against", metavar="SNAPSHOT", help="Show what changed since that one.")
@click.option("--kind", type=click.Choice([WEIGHTS, GRADIENTS]), help="These tensors alone.")
@click.option("--preview", type=click.IntRange(min=0), metavar="N", help="First N values [8].")
@click.option("--tail", type=click.IntRange(min=0), metavar="N", help="Last N values [0].")
@click.option("--export", "target", metavar="PATH", help="Write .npz, .safetensors or .csv.")
@click.option("--file", "file", metavar="PATH", help="Look into this safetensors file instead.")
@_session_option
@_spool_option
@_json_option
@_no_color_option
def snapshot(  # noqa: PLR0913, PLR0917 - the options of a command
    wanted: str | None,
    tensor: str | None,
    against: str | None,
    kind: str | None,
    preview: int | None,
    tail: int | None,
    target: str | None,
    file: str | None,
    session: str | None,
    directory: str | None,
    *,
    as_json: bool,
    no_color: bool,
) -> None:
    """Show a snapshot, tensor by tensor, or one of its tensors.

    SNAPSHOT is the beginning of its id (or of its epoch's), `epoch:N`, the name it was given, or
    `last`, the default. `--against epoch:N` shows what has changed since.
    """
    screen = Screen(color=not no_color)
    if file is not None:
        _show_file(
            screen, Path(file).expanduser(), tensor or wanted, preview, tail, as_json=as_json
        )
        return
    found = _load(directory, session)
    one = find(found, wanted or "last")
    rows = _chosen(one, kind, tensor)
    if target is not None:
        path = Path(target).expanduser()
        has_values = tensor is not None and bool(exporting.with_files(rows))
        count = exporting.export(rows, path, values=has_values)
        if not as_json:
            screen.text(f"wrote {count:,} {plural('tensor', count)} to {path}")
            return
    if against is not None:
        before = find(found, against)
        changes = compare(_chosen(before, kind, tensor), rows)
        if as_json:
            print_json({**_summary(one), "against": _summary(before),
                        "tensors": [change.as_dict() for change in changes]})  # fmt: skip
        else:
            _show_changes(screen, before, one, changes)
        return
    if as_json:
        print_json({**_summary(one), "tensors": [_as_dict(row) for row in rows]})
    elif tensor is not None and len(rows) == 1:
        _show_tensor(screen, rows[0], 8 if preview is None else preview, tail or 0)
    else:
        _show_rows(screen, one, rows)


def _load(directory: str | None, session: str | None) -> list[Snapshot]:
    spool = find_spool(directory, "--spool")
    warnings = Warnings()
    found = load(spool, session=session, on_error=warnings)
    warnings.close()
    return found


def _chosen(one: Snapshot, kind: str | None, tensor: str | None) -> list[Row]:
    rows = [*one.of_kind(WEIGHTS), *one.of_kind(GRADIENTS)] if kind is None else one.of_kind(kind)
    if tensor is None:
        return rows
    exact = [row for row in rows if row.tensor_name == tensor]
    found = exact or [row for row in rows if row.tensor_name.startswith(tensor)]
    if not found:
        names = ", ".join(row.tensor_name for row in rows[:6])
        more = f" and {len(rows) - 6:,} more" if len(rows) > 6 else ""  # noqa: PLR2004 - as above
        raise CirronError(f"no tensor of this snapshot begins with {tensor!r}: {names}{more}")
    return found


# -- tables --------------------------------------------------------------------------------------


def _show_rows(screen: Screen, one: Snapshot, rows: Sequence[Row]) -> None:
    _show_title(screen, one)
    head = ("TENSOR", "SHAPE", "DTYPE", *map(str.upper, _STATS), "NAN/INF", "HISTOGRAM")
    lines: list[list[Segment]] = []
    for row in rows:
        if row.stats is None:
            why = row.skipped or row.attrs.get("tied_to") or "no statistics"
            numbers: list[Segment] = [("", "dim")] * (len(_STATS) + 1)
            picture = (clean(f"skipped: {why}"), "lost")
        else:
            numbers = [(_number(row.number(name)), "plain") for name in _STATS]
            numbers.append((f"{row.nonfinite:,}" if row.nonfinite else "", "error"))
            picture = (_picture(screen, row), "value")
        lines.append([
            (clean(row.tensor_name), "name"),
            (_shape(row.shape, screen), "plain"),
            (clean(row.dtype), "dim"),
            *numbers,
            picture,
        ])  # fmt: skip
    screen.table(head, lines, "llrrrrrrrl")
    values = sum(math.prod(row.shape) for row in rows if row.kind == WEIGHTS and row.is_own)
    screen.text("")
    screen.text(
        f"{len(rows):,} {plural('tensor', len(rows))}, {values:,} weights; each histogram has 16 "
        "bins from MIN to MAX",
        "dim",
    )


def _show_title(screen: Screen, one: Snapshot) -> None:
    parts = [f"snapshot {one.span_id}", local_time(one.ts_ns)]
    if one.epoch is not None:
        parts.append(f"epoch {one.epoch}")
    if one.iteration is not None:
        parts.append(f"step {one.iteration:,}")
    if one.name:
        parts.append(clean(one.name))
    screen.text(", ".join(parts), "dim")


def _show_changes(
    screen: Screen, before: Snapshot, after: Snapshot, changes: Sequence[Change]
) -> None:
    screen.text("before", "dim")
    _show_title(screen, before)
    screen.text("after", "dim")
    _show_title(screen, after)
    measured = any(change.moved is not None for change in changes)
    head = ["TENSOR", "NORM", "AFTER", "CHANGE", "STD", "AFTER", "MEAN MOVED", "BEFORE", "AFTER"]
    right = "lrrrrrrll"
    if measured:
        head.insert(4, "MOVED")
        right = "lrrrrrrrll"
    lines = []
    for change in changes:
        old, new = change.before, change.after
        line: list[Segment] = [
            (clean(change.name), "name"),
            (_number(_stat(old, "norm")), "plain"),
            (_number(_stat(new, "norm")), "plain"),
            (_percent(change.norm_ratio), "value"),
            (_number(_stat(old, "std")), "plain"),
            (_number(_stat(new, "std")), "plain"),
            (_signed(change.mean_shift), "plain"),
            (_picture(screen, old) if old else "not there", "value" if old else "lost"),
            (_picture(screen, new) if new else "not there", "value" if new else "lost"),
        ]
        if measured:
            line.insert(4, (_percent_of(change.moved), "value"))
        lines.append(line)
    screen.table(tuple(head), lines, right)
    if measured:
        screen.text("")
        screen.text("MOVED: length of the difference, as a share of the tensor's norm before",
                    "dim")  # fmt: skip


def _show_tensor(screen: Screen, row: Row, preview: int, tail: int) -> None:
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
    elif path is not None and (preview or tail):
        for _, entry, data in exporting.tensors([row]):
            _show_values(screen, data, entry.dtype, preview, tail)


def _show_values(screen: Screen, data: bytes, dtype: str, preview: int, tail: int) -> None:
    count = elements.count(data, dtype)
    for title, start, stop in (
        ("first", 0, min(preview, count)),
        ("last", max(count - tail, 0), count),
    ):
        values = elements.values(data, dtype, start, stop)
        for at in range(0, len(values), _ROW_OF_VALUES):
            part = values[at : at + _ROW_OF_VALUES]
            label = title if at == 0 else ""
            screen.text(f"{label:<6}" + " ".join(f"{_number(value):>11}" for value in part))


def _show_file(  # noqa: PLR0913 - the options of a command
    screen: Screen,
    path: Path,
    tensor: str | None,
    preview: int | None,
    tail: int | None,
    *,
    as_json: bool,
) -> None:
    with Container(path) as box:
        entries = list(box.entries.values())
        if tensor is not None:
            entry = box.find(tensor)
            if entry is None:
                raise CirronError(f"{path} has no tensor {tensor!r}")
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
            [(clean(e.name), "name"), (_shape(e.shape, screen), "plain"),
             (e.dtype, "dim"), (size(e.end - e.start), "plain")]
            for e in entries
        ]  # fmt: skip
        screen.table(head, lines, "lllr")
        if tensor is not None:
            data = box.data(entries[0])
            _show_values(screen, data, entries[0].dtype, 8 if preview is None else preview,
                         tail or 0)  # fmt: skip


# -- cells ---------------------------------------------------------------------------------------


def _as_dict(row: Row) -> dict[str, Any]:
    return {
        "tensor_name": row.tensor_name,
        "kind": row.kind,
        "shape": row.shape,
        "dtype": row.dtype,
        "mode": row.mode,
        "stats": row.stats,
        "blob_uri": row.blob_uri,
        "ts_ns": str(row.ts_ns),
        "attrs": row.attrs,
    }


def _norm(rows: Sequence[Row]) -> float | None:
    """The norm of all together; of tied ones once, and without buffers."""
    norms = [row.number("norm") for row in rows if row.is_own]
    known = [norm for norm in norms if norm is not None]
    return math.hypot(*known) if known else None


def _stat(row: Row | None, name: str) -> float | None:
    return None if row is None else row.number(name)


def _picture(screen: Screen, row: Row) -> str:
    histogram = row.histogram
    return "" if histogram is None else spark(histogram[1], ascii_only=screen.ascii_only)


def _shape(shape: Sequence[int], screen: Screen) -> str:
    times = "x" if screen.ascii_only else "\N{MULTIPLICATION SIGN}"
    return times.join(map(str, shape)) or "scalar"


def _number(value: float | None) -> str:
    return "" if value is None else number(value)


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.3g}"


def _percent(ratio: float | None) -> str:
    return "" if ratio is None else f"{(ratio - 1) * 100:+.3g} %"


def _percent_of(share: float | None) -> str:
    return "" if share is None else f"{share * 100:.3g} %"
