"""A snapshot as a file of another kind: npz, safetensors, or a table of its statistics as csv."""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from cirron_otel.errors import CirronError
from cirron_otel.spool import disk_error
from cirron_otel.weights import containers, elements
from cirron_otel.weights.blobs import path_of
from cirron_otel.weights.containers import Container, Entry
from cirron_otel.weights.reading import Row

SUFFIXES = (".npz", ".safetensors", ".csv")
_STATS = ("mean", "std", "min", "max", "norm")
_T = TypeVar("_T")


def export(rows: Sequence[Row], path: Path, *, values: bool = False) -> int:
    """Write rows to ``path``, whose suffix says how; returns how many tensors are in it.

    ``.npz`` and ``.safetensors`` hold tensors, so these rows need files; ``.csv`` holds statistics,
    or with ``values`` each value of the tensors. Raises :class:`~cirron_otel.errors.CirronError`.
    """
    if path.suffix not in SUFFIXES:
        raise CirronError(f"--export {path}: the name must end with {', '.join(SUFFIXES)}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".csv":
            return _csv_of_values(rows, path) if values else _csv(rows, path)
        if path.suffix == ".npz":
            return _npz(rows, path)
        return _safetensors(rows, path)
    except OSError as exc:
        raise disk_error("write", path, exc) from exc


def with_files(rows: Sequence[Row]) -> list[Row]:
    """The rows whose tensors were written to a file that is here."""
    return [row for row in rows if row.blob_uri is not None and path_of(row.blob_uri) is not None]


def tensors(rows: Sequence[Row]) -> Iterator[tuple[Row, Entry, bytes]]:
    """Each row that has a file, with its bytes; a row at a time in memory."""
    opened: dict[Path, Container] = {}
    try:
        for row in with_files(rows):
            path = path_of(str(row.blob_uri))
            if path is None:
                continue
            if not path.exists():
                raise CirronError(
                    f"{path} is gone: the cap (snapshot_max_bytes) or somebody removed it; the "
                    "statistics are in the spool"
                )
            box = opened.get(path)
            if box is None:
                box = opened[path] = Container(path)
            entry = box.find(row.tensor_name)
            if entry is None:
                raise CirronError(f"{path} has no tensor {row.tensor_name!r}")
            yield row, entry, box.data(entry)
    finally:
        for box in opened.values():
            box.close()


def _needed(rows: Sequence[Row]) -> None:
    if not with_files(rows):
        raise CirronError(
            "this snapshot has statistics alone, and no tensors to export: "
            "profile(snapshots='full') or ci.snapshot(model, mode='full') writes them, and .csv "
            "exports the statistics"
        )


def _npz(rows: Sequence[Row], path: Path) -> int:
    _needed(rows)
    np = elements.numpy()
    arrays = {
        row.tensor_name: elements.as_array(data, entry.dtype, tuple(entry.shape))
        for row, entry, data in tensors(rows)
    }
    return _whole(path, lambda tmp: _saved(np, tmp, arrays))


def _saved(np: Any, tmp: Path, arrays: dict[str, Any]) -> int:  # noqa: ANN401 - the module numpy
    with tmp.open("wb") as file:
        np.savez(file, **arrays)
    return len(arrays)


def _safetensors(rows: Sequence[Row], path: Path) -> int:
    _needed(rows)
    parts = []
    for row, entry, _ in tensors(rows):
        # Read again when it is written: one tensor at a time in memory.
        load = partial(_loaded, row)
        parts.append(
            containers.Part(row.tensor_name, entry.code, entry.shape, entry.end - entry.start, load)
        )
    containers.write(path, parts, {"format": "pt"})
    return len(parts)


def _loaded(row: Row) -> tuple[memoryview, object]:
    data = next(data for _, _, data in tensors([row]))
    return memoryview(data), data


def _csv(rows: Sequence[Row], path: Path) -> int:
    head = ["tensor", "kind", "shape", "dtype", *_STATS, "nonfinite", "skipped"]
    head += [f"bin_{i}" for i in range(17)] + [f"count_{i}" for i in range(16)]

    def write(tmp: Path) -> int:
        with tmp.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow(head)
            for row in rows:
                bins, counts = row.histogram or ([], [])
                edges: list[float | None] = [*bins] or [None] * 17
                numbers: list[object] = [*counts] or [""] * 16
                out.writerow([
                    row.tensor_name, row.kind, "x".join(map(str, row.shape)), row.dtype,
                    *(_text(row.number(name)) for name in _STATS), row.nonfinite, row.skipped or "",
                    *map(_text, edges), *numbers,
                ])  # fmt: skip
        return len(rows)

    return _whole(path, write)


def _csv_of_values(rows: Sequence[Row], path: Path) -> int:
    _needed(rows)

    def write(tmp: Path) -> int:
        number = 0
        with tmp.open("w", encoding="utf-8", newline="") as file:
            out = csv.writer(file)
            out.writerow(["tensor", "index", "value"])
            for row, entry, data in tensors(rows):
                number += 1
                for i, one in enumerate(elements.values(data, entry.dtype)):
                    out.writerow([row.tensor_name, i, repr(one)])
        return number

    return _whole(path, write)


def _text(number: float | None) -> str:
    return "" if number is None else repr(number)


def _whole(path: Path, write: Callable[[Path], _T]) -> _T:
    """Write under another name first: a file of this name is always whole."""
    tmp = path.with_name(path.name + ".tmp")
    try:
        made = write(tmp)
        tmp.replace(path)
    finally:
        tmp.unlink(missing_ok=True)
    return made
