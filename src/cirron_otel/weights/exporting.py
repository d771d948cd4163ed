"""A snapshot as a file of another kind: npz, safetensors, or a table of its statistics as csv."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from cirron_otel.errors import CirronError
from cirron_otel.spool import disk_error
from cirron_otel.weights import containers, elements
from cirron_otel.weights.blobs import path_of
from cirron_otel.weights.containers import Container
from cirron_otel.weights.reading import Row
from cirron_otel.weights.tensor_table import Entry

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


class Files:
    """The files of rows, each opened once. A context manager."""

    def __init__(self) -> None:
        """Open nothing."""
        self._opened: dict[Path, Container] = {}

    def find(self, row: Row) -> tuple[Container, Entry]:
        """The tensor of a row that has a file.

        Raises :class:`~cirron_otel.errors.CirronError` where it is not there any more.
        """
        path = path_of(str(row.blob_uri))
        if path is None or not path.exists():
            raise CirronError(
                f"{path or row.blob_uri} is gone: the cap (snapshot_max_bytes) or somebody removed "
                "it; the statistics are in the spool"
            )
        box = self._opened.get(path)
        if box is None:
            box = self._opened[path] = Container(path)
        entry = box.find(row.tensor_name)
        if entry is None:
            raise CirronError(f"{path} has no tensor {row.tensor_name!r}")
        return box, entry

    def __enter__(self) -> Files:  # noqa: PYI034 - never subclassed
        return self

    def __exit__(self, *_: object) -> None:
        for box in self._opened.values():
            box.close()


def tensors(rows: Sequence[Row]) -> Iterator[tuple[Row, Entry, bytes]]:
    """Each row that has a file, with its bytes; a row at a time in memory."""
    with Files() as files:
        for row in with_files(rows):
            box, entry = files.find(row)
            yield row, entry, box.data(entry)


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

    def write(tmp: Path) -> int:
        # As np.savez does, which wants all arrays in memory, and has names of its own for some.
        number = 0
        with zipfile.ZipFile(tmp, "w", allowZip64=True) as box:
            for row, entry, data in tensors(rows):
                array = elements.as_array(data, entry.dtype, tuple(entry.shape))
                with box.open(f"{row.tensor_name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
                number += 1
        return number

    return _whole(path, write)


def _safetensors(rows: Sequence[Row], path: Path) -> int:
    _needed(rows)
    parts = []
    with Files() as files:
        for row in with_files(rows):
            box, entry = files.find(row)
            # Read when it is written: one tensor at a time in memory.
            load = partial(_loaded, box, entry)
            size = entry.end - entry.start
            parts.append(containers.Part(row.tensor_name, entry.code, entry.shape, size, load))
        containers.write(path, parts, {"format": "pt"})
    return len(parts)


def _loaded(box: Container, entry: Entry) -> tuple[memoryview, object]:
    data = box.data(entry)
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
                for i, one in enumerate(elements.numbers(data, entry.dtype)):
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
