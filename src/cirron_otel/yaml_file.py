"""The two files that settings may come from: the project's ``cirron.yaml`` and the user's toml.

The project file is looked for upwards from the working directory; in each directory
``cirron.yaml``, ``cirron.yml`` and ``cirron.json`` are tried in this order and the first that
exists is taken. Only its ``profiling:`` section is read here, so a file with nothing else counts.

Messages name the file and the place in it, never its text: a line that does not parse may hold a
secret. Every function blocks on reading at most one small file, on the calling thread.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import msgspec

from cirron_otel.errors import CirronDependencyError, ConfigurationError

PROJECT_FILES = ("cirron.yaml", "cirron.yml", "cirron.json")

_SECTION = "profiling"
_TABLE = "default"


def find_project_file(start: Path) -> Path | None:
    """The project file nearest to ``start``, looked for there and in every directory above.

    Directories that may not be searched are passed over. Raises nothing.
    """
    for directory in (start, *start.parents):
        for name in PROJECT_FILES:
            candidate = directory / name
            # os.path.isfile, because Path.is_file raises for a directory one may not search.
            if os.path.isfile(candidate):  # noqa: PTH113
                return candidate
    return None


def read_project_file(path: Path) -> dict[str, object]:
    """The ``profiling:`` section of a project file; empty if the file has none.

    Raises ``ConfigurationError`` if the file cannot be read or is not what it should be, and
    ``CirronDependencyError`` if it is yaml and PyYAML is not installed.
    """
    data = _read(path)
    document = _parse_json(data, path) if path.suffix == ".json" else _parse_yaml(data, path)
    if document is None:
        return {}
    section = _mapping(document, f"{path}: the file").get(_SECTION)
    if section is None:
        return {}
    return _mapping(section, f"{path}: {_SECTION!r}")


def read_user_file(home: Path) -> tuple[Path, dict[str, object]]:
    """The table ``[default]`` of ``.cirron/config.toml`` under ``home``; empty if there is none.

    Raises ``ConfigurationError`` if the file is there and cannot be read or parsed.
    """
    path = home / ".cirron" / "config.toml"
    if not os.path.isfile(path):  # noqa: PTH113 - as above
        return path, {}
    import tomllib  # noqa: PLC0415 - costs 5 ms, and most machines have no such file

    try:
        document = tomllib.loads(_read(path).decode("utf-8-sig"))
    except ValueError as exc:  # TOMLDecodeError and UnicodeDecodeError are both
        where = exc.reason if isinstance(exc, UnicodeDecodeError) else exc
        raise ConfigurationError(f"{path} is not valid TOML: {where}") from None
    return path, _mapping(document.get(_TABLE, {}), f"{path}: [{_TABLE}]")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except (OSError, ValueError) as exc:  # ValueError: a NUL in the path
        reason = exc.strerror if isinstance(exc, OSError) else str(exc)
        raise ConfigurationError(f"{path} cannot be read: {reason}") from exc


def _parse_json(data: bytes, path: Path) -> object:
    data = data.removeprefix(b"\xef\xbb\xbf")
    try:
        return msgspec.json.decode(data) if data.strip() else None
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        reason = "it is not UTF-8" if isinstance(exc, UnicodeDecodeError) else exc
        raise ConfigurationError(f"{path} is not valid JSON: {reason}") from None


def _parse_yaml(data: bytes, path: Path) -> object:
    try:
        yaml = importlib.import_module("yaml")
    except ImportError as exc:
        raise CirronDependencyError(
            f"reading {path} needs PyYAML: pip install 'cirron-otel[yaml]' (a cirron.json needs "
            "nothing)"
        ) from exc
    try:
        return cast("object", yaml.safe_load(data))
    except (yaml.YAMLError, ValueError, RecursionError) as exc:
        # The error's own text quotes the line, which may hold a secret.
        problem = getattr(exc, "problem", None) or type(exc).__name__
        mark = getattr(exc, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise ConfigurationError(f"{path} is not valid YAML: {problem}{place}") from None


def _mapping(value: object, what: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigurationError(f"{what} must hold keys and values, not {type(value).__name__}")
    return {str(key): item for key, item in value.items()}
