"""Setting an older record aside, whole, where a new one is to be written.

It goes into ``previous-<n>/`` inside the run directory. A process that dies while it moves the
files leaves ``previous-<n>.partial``; the next one goes on with that directory, so the files of one
record end up in one place.
"""

from __future__ import annotations

import re
from pathlib import Path

from cirron_otel.training_record.chain import DIARY, METRICS, SEAL, SIGNATURE

#: The diary goes last: while it is there, the directory is known to hold a record.
_FILES = ("report.html", "summary.html", "summary.md", SIGNATURE, SEAL, METRICS, DIARY)
_DAMAGED = re.compile(rf"({re.escape(DIARY)}|{re.escape(METRICS)})\.damaged-[0-9]+")
_PREVIOUS = re.compile(r"previous-([0-9]{1,9})")
_PARTIAL = ".partial"


def record_files(directory: Path) -> list[str]:
    """The files of the record in ``directory``, in the order in which they are moved."""
    names = _names(directory)
    damaged = sorted(name for name in names if _DAMAGED.fullmatch(name))
    return [*damaged, *(name for name in _FILES if name in names)]


def holds_record(directory: Path) -> bool:
    """Whether any of the four files is there, as whatever kind of file."""
    return any(name in {DIARY, METRICS, SEAL, SIGNATURE} for name in _names(directory))


def is_half_moved(directory: Path) -> bool:
    """Whether somebody died while setting a record aside; :func:`set_aside` goes on with it."""
    return any(map(_is_partial, _names(directory)))


def set_aside(directory: Path) -> Path:
    """Move the record of ``directory`` into ``previous-<n>/`` and return that directory.

    The caller holds the directory's lock. Raises ``OSError``; what was moved by then stays in
    ``previous-<n>.partial`` and the next call goes on.
    """
    partial = next((name for name in sorted(_names(directory)) if _is_partial(name)), None)
    if partial is None:
        last = max(_numbered(directory), default=0)
        partial = f"previous-{last + 1}{_PARTIAL}"
        (directory / partial).mkdir()
    place = directory / partial
    for name in record_files(directory):
        (directory / name).rename(place / name)
    final = place.with_name(partial.removesuffix(_PARTIAL))
    place.rename(final)
    return final


def places(directory: Path) -> list[Path]:
    """The directories of the records that were set aside, the newest first."""
    found = _numbered(directory)
    return [directory / found[number] for number in sorted(found, reverse=True)]


def put_back(directory: Path, place: Path) -> None:
    """Undo :func:`set_aside`, for a new record that could not be begun. Raises ``OSError``."""
    for name in reversed(record_files(place)):
        (place / name).rename(directory / name)
    place.rmdir()


def _is_partial(name: str) -> bool:
    return name.endswith(_PARTIAL) and _PREVIOUS.fullmatch(name.removesuffix(_PARTIAL)) is not None


def _numbered(directory: Path) -> dict[int, str]:
    found = map(_PREVIOUS.fullmatch, _names(directory))
    return {int(name[1]): name[0] for name in found if name}


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}
