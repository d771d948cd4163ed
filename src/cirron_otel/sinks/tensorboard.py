"""Marks as scalars in TensorBoard's event files: ``cirron_otel.sinks.tensorboard``.

A reader of the spool like any other, so it costs the training nothing and may run beside it, later,
or on another machine::

    from cirron_otel.sinks.tensorboard import TensorBoardSink

    with TensorBoardSink("runs") as sink:
        sink.update()

The command ``cirron-otel tensorboard runs --follow`` does the same while a training runs.
"""

from __future__ import annotations

import math
import os
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch, MarkRecord, decode
from cirron_otel.errors import CirronDependencyError, SpoolError
from cirron_otel.reading.rows import read
from cirron_otel.spool import Spool

if TYPE_CHECKING:
    from types import TracebackType

#: The end of the names of the files that we wrote: those we may replace.
_SUFFIX = ".cirron-otel"
_NONFINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class TensorBoardSink:
    """Writes marks with a number below ``log_dir``, a folder for each run, rank and attempt.

    The tag is the mark's name. The step is the one that the mark was given (``step=``), else the
    iteration of the run, else the count of such marks. Files that an earlier sink wrote for a run
    are replaced by whole new ones. Needs ``tensorboard``: raises
    :class:`~cirron_otel.errors.CirronDependencyError` without it. Not thread-safe; blocks on files.
    """

    def __init__(
        self,
        log_dir: str | os.PathLike[str],
        output_dir: str | os.PathLike[str] = ".cirron",
        *,
        on_error: Callable[[Path, Exception], None] | None = None,
    ) -> None:
        """Read from the spool of ``output_dir``; ``on_error`` hears of files that are none."""
        self._make = _writer_class()
        self._log_dir = Path(log_dir)
        self._spool = Spool(Path(output_dir))
        self._on_error = on_error
        self._seen: set[str] = set()
        self._writers: dict[str, Any] = {}
        self._counts: Counter[tuple[str, str]] = Counter()

    def update(self) -> int:
        """Write what has come since the last time; returns how many points.

        Raises :class:`~cirron_otel.errors.SpoolError` when the directory cannot be listed.
        """
        points = 0
        for path in self._spool.files():
            if path.name not in self._seen:
                self._seen.add(path.name)
                batch = self._batch(path)
                if batch is not None:
                    points += self._write(batch)
        for writer in self._writers.values():
            writer.flush()
        return points

    @property
    def folders(self) -> list[Path]:
        """Where points were written, one folder for each run, rank and attempt."""
        return [self._log_dir / name for name in sorted(self._writers)]

    def close(self) -> None:
        """End the files."""
        for writer in self._writers.values():
            writer.close()

    def __enter__(self) -> Self:
        """The sink itself."""
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        """End the files."""
        self.close()

    def _batch(self, path: Path) -> Batch | None:
        try:
            data = read(path)
            return None if data is None else decode(data)
        except SpoolError as error:
            if self._on_error is not None:
                self._on_error(path, error)
            return None

    def _write(self, batch: Batch) -> int:
        resource = {} if batch.resource is UNSET else batch.resource
        folder = _folder(resource)
        points = 0
        for mark, value in _numbers(batch.marks):
            category = mark.attrs.get(semconv.CATEGORY)
            tag = mark.name if category is None else f"{mark.name}/{category}"
            step, count = _step(mark), self._counts[folder, tag]
            self._counts[folder, tag] += 1
            self._writer(folder).add_scalar(
                tag, value, mark.ts_ns / 1e9, count if step is None else step
            )
            points += 1
        return points

    def _writer(self, folder: str) -> Any:  # noqa: ANN401 - see _writer_class
        known = self._writers.get(folder)
        if known is None:
            place = self._log_dir / folder
            if place.is_dir():
                for old in place.glob(f"events.out.tfevents.*{_SUFFIX}"):
                    old.unlink(missing_ok=True)
            known = self._writers[folder] = self._make(str(place))
        return known


def _folder(resource: dict[str, Any]) -> str:
    """The folder of a run, by what its batches say of it."""
    run = str(resource.get(semconv.RUN_ID, "run")).replace(os.sep, "_").lstrip(".") or "run"
    if resource.get(semconv.DL_WORLD_SIZE, 1) != 1:
        run = f"{run}/rank{resource.get(semconv.DL_RANK, 0)}"
    attempt = resource.get(semconv.RUN_ATTEMPT, 1)
    return run if attempt == 1 else f"{run}.attempt{attempt}"


def _numbers(marks: list[MarkRecord]) -> Iterator[tuple[MarkRecord, float]]:
    for mark in marks:
        if mark.name == semconv.OVERHEAD:
            continue
        if mark.value_nonfinite is not UNSET:
            yield mark, _NONFINITE.get(mark.value_nonfinite, math.nan)
        elif isinstance(mark.value, (int, float)):
            yield mark, float(mark.value)


def _step(mark: MarkRecord) -> int | None:
    own = mark.attrs.get(semconv.LOG_STEP)
    if isinstance(own, int):
        return own
    return None if mark.iteration is UNSET else mark.iteration


def _writer_class() -> Callable[[str], Any]:
    """What writes scalars to a folder."""
    try:
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415 - an extra
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import (  # noqa: PLC0415
            EventFileWriter,
        )
    except ImportError as error:
        raise CirronDependencyError(
            "writing TensorBoard's files needs tensorboard: pip install 'cirron-otel[tensorboard]'"
        ) from error

    class Writer:
        """One event file."""

        def __init__(self, folder: str) -> None:
            self._files = EventFileWriter(folder, filename_suffix=_SUFFIX)
            self.flush, self.close = self._files.flush, self._files.close

        def add_scalar(self, tag: str, value: float, wall_time: float, step: int) -> None:
            summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
            self._files.add_event(Event(wall_time=wall_time, step=step, summary=summary))

    return Writer
