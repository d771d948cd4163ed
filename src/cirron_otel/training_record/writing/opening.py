"""Beginning a record in a run directory: whole, or with nothing left behind."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from cirron_otel.errors import RecordError, RecordExistsError
from cirron_otel.training_record.chain import DIARY, METRICS
from cirron_otel.training_record.lock import RecordLock
from cirron_otel.training_record.recovering.recovery import recover_locked
from cirron_otel.training_record.recovering.scanning import peek, scan
from cirron_otel.training_record.writing import previous
from cirron_otel.training_record.writing.appending import create


class RecordFiles:
    """The two open files of a new record, and the lock of its directory."""

    def __init__(self, directory: Path, *, overwrite: bool, append: bool) -> None:
        """Make them. Raises :class:`~cirron_otel.errors.RecordError` and undoes what it did."""
        if overwrite and append:
            raise RecordError("overwrite and append exclude each other: say which one you mean")
        self._directory = directory
        self._made: list[Path] = []
        self._aside: Path | None = None
        self._fds: list[int] = []
        #: What ``run_start`` says of the record before this one.
        self.links: dict[str, Any] = {}
        self._lock: RecordLock | None = None
        try:
            self._make_directory()
            self._lock = RecordLock.acquire(directory)
            self._make_room(overwrite=overwrite, append=append)
            for name in (DIARY, METRICS):
                self._fds.append(create(directory / name))
        except (OSError, ValueError) as exc:  # the latter for a path with a NUL in it
            self.undo()
            why = getattr(exc, "strerror", None) or exc
            raise (
                exc
                if isinstance(exc, RecordError)
                else RecordError(f"cannot begin a record in {directory}: {why}")
            ) from exc
        except BaseException:
            self.undo()
            raise

    @property
    def diary(self) -> int:
        """Descriptor of the diary."""
        return self._fds[0]

    @property
    def metrics(self) -> int:
        """Descriptor of the metrics."""
        return self._fds[1]

    def close(self) -> None:
        """Close the files and let go of the lock. Never raises."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)
        self._fds = []
        if self._lock is not None:
            self._lock.release()
            self._lock = None

    def undo(self) -> None:
        """Leave the directory as it was. Never raises; what cannot be undone stays."""
        if self._fds:
            names = (DIARY, METRICS)[: len(self._fds)]
            for name in names:
                with contextlib.suppress(OSError):
                    (self._directory / name).unlink()
        if self._aside is not None:
            with contextlib.suppress(OSError):
                previous.put_back(self._directory, self._aside)
        self.close()
        for directory in reversed(self._made):
            with contextlib.suppress(OSError):
                directory.rmdir()

    def _make_directory(self) -> None:
        missing = [self._directory]
        while not missing[-1].exists() and missing[-1] != missing[-1].parent:
            missing.append(missing[-1].parent)
        for directory in reversed(missing[:-1]):
            with contextlib.suppress(FileExistsError):
                directory.mkdir()
                self._made.append(directory)
        if not self._directory.is_dir():
            raise RecordError(f"{self._directory} is no directory")

    def _make_room(self, *, overwrite: bool, append: bool) -> None:
        directory = self._directory
        half_moved = previous.is_half_moved(directory)
        if half_moved:
            previous.set_aside(directory)
        if previous.holds_record(directory):
            self._set_aside(overwrite=overwrite, append=append)
        if half_moved or overwrite or append:
            self._link(append=append)

    def _set_aside(self, *, overwrite: bool, append: bool) -> None:
        directory = self._directory
        if not (overwrite or append):
            raise RecordExistsError(
                f"{directory} holds a training record already; give another directory, "
                "overwrite=True (sets it aside) or append=True (goes on with it)"
            )
        if append:
            found = scan(directory)
            if found is not None and not found.ended:
                recover_locked(directory)
        self._aside = previous.set_aside(directory)

    def _link(self, *, append: bool) -> None:
        # A writer that died as it began has left a record without a line, or none at all.
        for place in previous.places(self._directory):
            first, last = peek(place)
            if first:
                break
        else:
            return
        links = {
            "previous_head": last.get("hash"),
            "previous_run_id": first.get("run_id"),
            "previous_directory": place.name,
        }
        self.links = {key: value for key, value in links.items() if value is not None}
        if append:
            segment = first.get("segment")
            self.links["segment"] = segment + 1 if type(segment) is int else 2
