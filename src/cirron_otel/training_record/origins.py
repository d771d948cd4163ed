"""What a run was made from, as fields for ``run_start``: the code and the data."""

from __future__ import annotations

import hashlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cirron_otel.errors import RecordError

_GIT_WAIT_S = 5.0
_CHUNK = 1 << 20


def code_identity(directory: str | Path = ".") -> dict[str, Any]:
    """The commit that is checked out around ``directory``, and whether files differ from it.

    ``{"commit": 40 or 64 hex, "changed": bool}``; files that git does not know count as changed,
    ignored ones do not. Empty where there is no git, no repository or no commit: a record is
    written all the same. Runs git twice, on the calling thread, at most 5 s each.
    """
    commit = _git(directory, "rev-parse", "--verify", "HEAD")
    if not commit:
        return {}
    status = _git(directory, "status", "--porcelain", "--untracked-files=normal")
    found: dict[str, Any] = {"commit": commit.strip()}
    if status is not None:
        found["changed"] = bool(status)
    return found


def data_identity(*paths: str | Path) -> dict[str, Any]:
    """The content of files and folders: ``{"files": n, "bytes": n, "sha256": hex}``.

    The digest is that of one line per file, in the order of the names: the file's own SHA-256 in
    hex, two spaces, its name relative to the path given, with ``/``; what ``sha256sum`` prints.
    Links are followed to files, not to folders. Reads everything, on the calling thread, in pieces
    of 1 MiB. Raises :class:`~cirron_otel.errors.RecordError` for what cannot be read.
    """
    lines: list[str] = []
    size = 0
    for given in paths:
        for name, path in sorted(_files(Path(given))):
            try:
                digest, length = _digest(path)
            except OSError as exc:
                raise RecordError(
                    f"cannot read {path} for the identity of the data: {exc.strerror}"
                ) from exc
            lines.append(f"{digest}  {name}\n")
            size += length
    whole = hashlib.sha256("".join(lines).encode("utf-8", "surrogateescape")).hexdigest()
    return {"files": len(lines), "bytes": size, "sha256": whole}


def _git(directory: str | Path, *words: str) -> str | None:
    try:
        done = subprocess.run(  # noqa: S603 - fixed words
            ["git", "-C", str(directory), *words],  # noqa: S607 - the user's own git
            stdin=subprocess.DEVNULL, capture_output=True, timeout=_GIT_WAIT_S, check=False,
            env={**os.environ, "GIT_OPTIONAL_LOCKS": "0"},
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None


def _files(path: Path) -> Iterator[tuple[str, Path]]:
    if not path.is_dir():
        yield path.name, path
        return
    for folder, _, names in os.walk(path):
        for name in names:
            found = Path(folder, name)
            yield found.relative_to(path).as_posix(), found


def _digest(path: Path) -> tuple[str, int]:
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return digest.hexdigest(), size
