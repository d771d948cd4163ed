"""``cirron-otel traces snapshots`` and ``snapshot``: the weights, and how they changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from cirron_otel.cli import snapshot_tables as tables
from cirron_otel.cli.screen import Screen, Warnings, json_option, no_color_option, print_json
from cirron_otel.cli.where import find_spool, spool_option
from cirron_otel.errors import CirronError
from cirron_otel.reading.values import clean, plural
from cirron_otel.weights import exporting
from cirron_otel.weights.comparing import compare
from cirron_otel.weights.kinds import GRADIENTS, WEIGHTS
from cirron_otel.weights.reading import (
    NoSuchSnapshotError,
    Row,
    Snapshot,
    find,
    load,
)

_NAMES_IN_ERROR = 6

_session_option = click.option("--session", metavar="ID", help="Of the session that ID begins.")


@click.command()
@click.argument("span_id", metavar="[SPAN]", required=False)
@click.option("--span", "span_option", metavar="ID", help="The same as SPAN.")
@_session_option
@spool_option
@json_option
@no_color_option
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
    tables.snapshots(screen, found)


def _summary(one: Snapshot) -> dict[str, Any]:
    return {
        "span_id": one.span_id,
        "session_id": one.session_id,
        "rank": one.rank,
        "ts_ns": str(one.ts_ns),
        "epoch": one.epoch,
        "iteration": one.iteration,
        "trigger": one.trigger,
        "name": one.name,
        "mode": one.mode,
        "weights": len(one.of_kind(WEIGHTS)),
        "gradients": len(one.of_kind(GRADIENTS)),
        "weights_norm": tables.norm(one.of_kind(WEIGHTS)),
        "gradients_norm": tables.norm(one.of_kind(GRADIENTS)),
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
@spool_option
@json_option
@no_color_option
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
        tables.file(
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
            tables.changes(screen, before, one, changes)
        return
    if as_json:
        print_json({**_summary(one), "tensors": [_as_dict(row) for row in rows]})
    elif tensor is not None and len(rows) == 1:
        tables.tensor(screen, rows[0], preview, tail)
    else:
        tables.rows(screen, one, rows)


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
        names = ", ".join(clean(row.tensor_name) for row in rows[:_NAMES_IN_ERROR])
        more = len(rows) - _NAMES_IN_ERROR
        names += f" and {more:,} more" if more > 0 else ""
        raise CirronError(f"no tensor of this snapshot begins with {tensor!r}; it has {names}")
    return found


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
