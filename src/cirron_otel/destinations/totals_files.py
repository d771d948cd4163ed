"""Totals of metrics that outlast their process: one file for each writer, beside the cursor.

A file is replaced before its batch is settled, and holds the ids of the batches in it: after a
crash between the two the batch comes again, is in it already, and the same sums go out. The files
are described in ``docs/formats/cursors.md``.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from pathlib import Path

import msgspec
from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch
from cirron_otel.cursors import cursors_directory
from cirron_otel.destinations.base import Parcel
from cirron_otel.otlp.instruments import INSTRUMENTS
from cirron_otel.otlp.metrics import VERSION, Saved, Totals

#: Writers whose totals are in memory, and how long the file of one may lie.
_MAX_WRITERS = 64
_KEPT_S = 30 * 86_400

_decoder = msgspec.json.Decoder(Saved)
_encode = msgspec.json.Encoder().encode


class _Kept(msgspec.Struct):
    """The totals of a writer, and which state of their file they are."""

    totals: Totals
    mtime_ns: int


class TotalsFiles:
    """The totals of every writer, as one destination has them. One thread at a time.

    ``name`` is the destination's. ``lasting`` ones are read from disk and written there.
    """

    def __init__(
        self, name: str, *, exemplars: bool = True, exponential: bool = False, lasting: bool = True
    ) -> None:
        """Touch no file."""
        self._name = name
        self._exemplars = exemplars
        self._exponential = exponential
        self._lasting = lasting
        self._kept: dict[Path, _Kept] = {}

    def of(self, parcel: Parcel, batch: Batch) -> tuple[Totals, Path | None]:
        """The totals of a batch's writer, and the file to keep them in; None for none.

        Those in memory, unless another process went on with the file.
        """
        file = self._file(parcel, batch)
        kept = self._kept.pop(file, None)
        mtime_ns = _mtime_ns(file) if self._lasting else 0
        if kept is None or kept.mtime_ns != mtime_ns:
            kept = _Kept(self._read(file, batch), mtime_ns)
        self._kept[file] = kept
        if len(self._kept) > _MAX_WRITERS:
            del self._kept[next(iter(self._kept))]
        # What is no file of a spool, such as a run that is sent again, leaves the totals alone.
        lasts = self._lasting and parcel.path.parent.name == "spool"
        return kept.totals, file if lasts else None

    def keep(self, file: Path, totals: Totals) -> None:
        """Replace the file; where the disk refuses, a restart begins the sums anew."""
        temporary = file.with_suffix(".tmp")
        with contextlib.suppress(OSError):
            if not file.exists():
                file.parent.mkdir(parents=True, exist_ok=True)
                _remove_old(file.parent)
            temporary.write_bytes(_encode(totals.saved))
            temporary.replace(file)
        kept = self._kept.get(file)
        if kept is not None:
            kept.mtime_ns = _mtime_ns(file)

    def _file(self, parcel: Parcel, batch: Batch) -> Path:
        digest = hashlib.sha256(writer_of(batch).encode()).hexdigest()[:16]
        directory = cursors_directory(parcel.path.parent.parent)
        return directory / f"{self._name}.metrics" / f"{digest}.json"

    def _read(self, file: Path, batch: Batch) -> Totals:
        writer = writer_of(batch)
        options = {"exemplars": self._exemplars, "exponential": self._exponential}
        with contextlib.suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            saved = _decoder.decode(file.read_bytes() if self._lasting else b"")
            names = {*saved.gauges, *saved.sums, *saved.histograms, *saved.exponentials}
            known = names <= set(INSTRUMENTS)
            # With other buckets than before, the sums begin anew.
            other = saved.histograms if self._exponential else saved.exponentials
            if saved.version == VERSION and saved.writer == writer and known and not other:
                return Totals(saved, **options)
        return Totals.begin(batch, writer, **options)


def writer_of(batch: Batch) -> str:
    """The process whose batch it is; where the batch does not name it, the session."""
    if batch.writer is not UNSET:
        return batch.writer
    return "" if batch.resource is UNSET else str(batch.resource.get(semconv.SESSION_ID, ""))


def _mtime_ns(file: Path) -> int:
    try:
        return file.stat().st_mtime_ns
    except OSError:
        return 0


def _remove_old(directory: Path) -> None:
    """Remove the totals of writers that are long gone."""
    before = time.time() - _KEPT_S
    for file in directory.glob("*.json"):
        with contextlib.suppress(OSError):
            if file.stat().st_mtime < before:
                file.unlink()
