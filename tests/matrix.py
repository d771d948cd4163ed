"""The hooks on the oldest and the newest version of each framework: ``make test-matrix``.

Each version gets an environment of its own under ``.venv-matrix`` (or ``--directory``), and the
tests of its framework run there. torch stays the one that the Makefile names: a version that wants
another one, or that cannot be installed beside it, is a row that says so. Not a part of CI: it
downloads some gigabytes and takes minutes for each row.

``python tests/matrix.py [framework ...]``; ``--keep`` leaves the environments. Exits with 1 where a
version that was installed fails its tests.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENTS = ".venv-matrix"
TORCH = os.environ.get("TORCH", "torch==2.13.0")
#: What the tests themselves need, whatever they test.
TOOLS = ("pytest>=8.3", "pytest-timeout>=2.3", "inline-snapshot>=0.20", "hypothesis>=6.100")
#: As the tests of the newest versions have it; what an old one warns of is not ours.
PYTEST = ("-q", "-p", "no:cacheprovider", "-W", "ignore", "-m", "not slow")
_NEWEST = "newest"


class Framework(NamedTuple):
    """What is installed for a row, and which tests look at it."""

    tests: tuple[str, ...]
    #: Requirements of the oldest version, with the newest of what works beside it.
    oldest: tuple[str, ...]
    newest: tuple[str, ...]
    #: What every version needs beside it.
    beside: tuple[str, ...] = ("numpy", "scikit-learn")


FRAMEWORKS: dict[str, Framework] = {
    "transformers": Framework(
        ("test_transformers.py", "test_transformers_losses.py", "test_transformers_unchanged.py"),
        ("transformers==4.46.0", "accelerate==1.0.0"),
        ("transformers", "accelerate"),
    ),
    "keras": Framework(("test_keras.py",), ("keras==3.0.0", "numpy<2"), ("keras",)),
    "lightning": Framework(
        ("test_lightning.py",),
        ("lightning==2.0.0", "pytorch-lightning==2.0.0", "numpy<2"),
        ("lightning", "pytorch-lightning"),
    ),
    "accelerate": Framework(("test_accelerate.py",), ("accelerate==1.0.0",), ("accelerate",)),
    "sklearn": Framework(
        ("test_sklearn.py", "test_instrumentors.py"),
        ("scikit-learn==1.3.0", "numpy<2", "opentelemetry-instrumentation>=0.66b0"),
        ("scikit-learn", "opentelemetry-instrumentation>=0.66b0"),
        (),
    ),
    "boosting": Framework(
        ("test_boosting.py",),
        ("xgboost==2.0.0", "lightgbm==4.0.0", "scikit-learn==1.3.0", "numpy<2", "pandas<3"),
        ("xgboost-cpu", "lightgbm", "scikit-learn", "pandas"),
        (),
    ),
    "torchdata": Framework(("test_torch_scale.py",), ("torchdata==0.8.0",), ("torchdata",)),
}


class Row(NamedTuple):
    """What came of one version."""

    framework: str
    version: str
    result: str
    seconds: float
    failed: bool = False


def main() -> int:
    """Test what the command line names, or all."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("frameworks", nargs="*", metavar="FRAMEWORK", help=", ".join(FRAMEWORKS))
    parser.add_argument(
        "--keep", action="store_true", help="leave the environments for the next time"
    )
    parser.add_argument("--only", choices=("oldest", _NEWEST), help="one of the two versions")
    parser.add_argument(
        "--directory", type=Path, default=ROOT / ENVIRONMENTS, help="where the environments are"
    )
    options = parser.parse_args()
    unknown = [name for name in options.frameworks if name not in FRAMEWORKS]
    if unknown:
        parser.error(f"no such framework: {', '.join(unknown)}; there are {', '.join(FRAMEWORKS)}")
    rows = [
        _test(name, age, options.directory.absolute() / f"{name}-{age}", keep=options.keep)
        for name in options.frameworks or FRAMEWORKS
        for age in ("oldest", _NEWEST)
        if options.only in (None, age)
    ]
    print(f"\nPython {sys.version.split()[0]}, {TORCH}\n")
    print("| framework | version | result | took |\n|---|---|---|---|")
    for row in rows:
        print(f"| {row.framework} | {row.version} | {row.result} | {row.seconds:.0f} s |")
    return int(any(row.failed for row in rows))


def _test(name: str, age: str, place: Path, *, keep: bool) -> Row:
    """Make the environment of one version at ``place`` and run its framework's tests there."""
    framework = FRAMEWORKS[name]
    began = time.monotonic()
    print(f"{name}, {age} ...", file=sys.stderr, flush=True)
    wanted = framework.newest if age == _NEWEST else framework.oldest
    try:
        problem = _install(place, [*wanted, *framework.beside])
        if problem is not None:
            return Row(
                name,
                ", ".join(wanted),
                f"not installed: {problem}",
                time.monotonic() - began,
            )
        tests = [str(ROOT / "tests" / "frameworks" / test) for test in framework.tests]
        done = _run([place / "bin" / "python", "-m", "pytest", *PYTEST, *tests])
        lines = done.stdout.strip().splitlines() or ["nothing was said"]
        if done.returncode:
            print(done.stdout[-6000:], file=sys.stderr)
        return Row(
            name, _versions(place, wanted), lines[-1].strip("= "), time.monotonic() - began,
            done.returncode != 0,
        )  # fmt: skip
    finally:
        if not keep:
            shutil.rmtree(place, ignore_errors=True)


def _install(place: Path, wanted: Sequence[str]) -> str | None:
    """Install into a new environment; returns pip's reason where it cannot be done."""
    python = place / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", place], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # The package itself is the one that stands here: only what it needs is installed. One call for
    # all, so that nothing brings another torch along.
    own = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    done = _run([*pip, TORCH, *TOOLS, *own["dependencies"], "click>=8.1", "rich>=13", *wanted])
    if done.returncode == 0:
        return None
    reasons = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
    return (reasons or ["pip failed"])[0].removeprefix("ERROR: ")[:160]


def _versions(place: Path, wanted: Sequence[str]) -> str:
    """The versions that were installed of what a row asks for."""
    names = [one.split("=")[0].split("<")[0].split(">")[0] for one in wanted]
    program = (
        "import importlib.metadata as found, sys\n"
        "print(', '.join(f'{name} {found.version(name)}' for name in sys.argv[1:]))"
    )
    return _run([place / "bin" / "python", "-c", program, *names]).stdout.strip()


def _run(command: Sequence[str | Path], *, check: bool = False) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
        capture_output=True,
        text=True,
        check=check,
    )


if __name__ == "__main__":
    sys.exit(main())
