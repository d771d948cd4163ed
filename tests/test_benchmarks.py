"""The benchmarks and the script for GPUs: what each takes from another of them is there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]


def _names(file: Path) -> set[str]:
    """What a module has at its top level."""
    found: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            found |= {one.asname or one.name for one in node.names}
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            found |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
    return found


def _missing(file: Path, siblings: dict[str, Path]) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module in siblings:
            for one in node.names:
                if one.name not in _names(siblings[node.module]):
                    yield f"{file.relative_to(ROOT)}: {node.module}.{one.name}"


def test_what_a_benchmark_takes_from_another_is_there() -> None:
    """Most of them run rarely, and on other machines: a name that has moved would be found late."""
    benchmarks = {file.stem: file for file in (ROOT / "benchmarks").glob("*.py")}
    on_gpu = {file.stem: file for file in (ROOT / "tests" / "gpu").glob("*.py")}
    missing = [one for file in benchmarks.values() for one in _missing(file, benchmarks)]
    missing += [one for file in on_gpu.values() for one in _missing(file, {**benchmarks, **on_gpu})]
    assert missing == []
