"""Everything that is promised of a GPU, checked and measured by one command: ``make gpu-check``.

    tests/gpu/check.py                       all checks, then all figures: some six minutes
    tests/gpu/check.py --only NAME ...       some checks or groups of figures
    tests/gpu/check.py --only tune           other shapes of the fused kernels, for who changes them
    tests/gpu/check.py --out FILE            also as JSON
    tests/gpu/check.py --device cpu          on the CPU, with small sizes: to try the script itself

Ends with 1 where a check failed or a figure could not be had, with 2 where there is no CUDA device
(nothing was checked then), else with 0; a figure that misses what was promised is only told of.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

os.environ["CIRRON_OTEL_STRICT"] = "1"

import correct
import described
import figures
import torch
from harness import quantity
from place import Place

import cirron_otel as ci
from cirron_otel.weights import reductions, reductions_kernel
from run import table

if TYPE_CHECKING:
    from harness import Row

CHECKS = {check.__name__: check for check in (*correct.CHECKS, *described.CHECKS)}
ROUNDS = 15


def main(argv: list[str] | None = None) -> int:
    """Check, measure, tell."""
    options = _parser().parse_args(argv)
    unknown = set(options.only) - {*CHECKS, *figures.GROUPS, *figures.FURTHER}
    if unknown:
        _say(f"no such check or group: {', '.join(sorted(unknown))}")
        return 1
    if options.device == "cuda" and not torch.cuda.is_available():
        _say(f"no CUDA device here: nothing was checked (torch {torch.__version__})")
        return 2
    place = Place(options.device)
    if not place.is_gpu and os.environ.get("TRITON_INTERPRET") == "1":
        # The device's kernels, run by Triton on the host, where a program's loop takes its time.
        reductions.FUSED_DEVICES = frozenset({"cpu"})
        reductions_kernel.COMPILED = False
        importlib.import_module("cirron_otel.weights.reductions_triton")._LEAST_CHUNK = 512
    about = {"device": str(place), "torch": torch.__version__, "cuda": torch.version.cuda}
    _say(f"on {about['device']}, torch {about['torch']}, CUDA {about['cuda']}")
    checks = _check(place, options.only)
    rows, errors = _measure(place, options.only)
    if rows:
        _say(f"\n{table(rows)}\n")
    if options.out is not None:
        shown = {
            **about, "checks": checks, "figures": [row.to_json() for row in rows], "errors": errors,
        }  # fmt: skip
        options.out.write_text(json.dumps(shown, indent=2) + "\n")
    failed = [name for name, error in checks.items() if error is not None]
    missed = [row.work for row in rows if row.verdict == "MISSED"]
    _say(f"{len(checks) - len(failed)} checks passed, {len(failed)} failed; {len(rows)} figures, "
         f"{len(missed)} MISSED, {len(errors)} groups could not be measured")  # fmt: skip
    return 1 if failed or errors else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Check and measure what is promised of a GPU.")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the results as JSON")
    names = ", ".join([*CHECKS, *figures.GROUPS, *figures.FURTHER])
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help=f"of {names}")
    return parser


def _check(place: Place, only: list[str]) -> dict[str, str | None]:
    """What went wrong with each check, None where nothing did; each in a directory of its own."""
    results: dict[str, str | None] = {}
    for name, check in CHECKS.items():
        if only and name not in only:
            continue
        begin = time.perf_counter()
        with tempfile.TemporaryDirectory() as directory:
            results[name] = _attempt(lambda: check(place, directory))  # noqa: B023 - called at once
        told = "PASS" if results[name] is None else "FAIL"
        _say(f"{told} {name} ({time.perf_counter() - begin:.1f} s) {results[name] or ''}".rstrip())
    return results


def _measure(place: Place, only: list[str]) -> tuple[list[Row], dict[str, str]]:
    """The rows of all groups, and why a group has none."""
    rows: list[Row] = []
    errors: dict[str, str] = {}
    groups = figures.GROUPS if not only else {**figures.GROUPS, **figures.FURTHER}
    for name, group in groups.items():
        if only and name not in only:
            continue
        made: list[Row] = []
        error = _attempt(lambda: made.extend(group(place, place.size(ROUNDS, 1))))  # noqa: B023 - as above
        if error is not None:
            errors[name] = error
            _say(f"NOT MEASURED {name}: {error}")
        if not place.is_gpu:
            made = [replace(row, must=None, goal=None) for row in made]
        for row in made:
            _say(f"{row.verdict}: {row.work}: {quantity(row.measured, row.unit)}")
        rows += made
    return rows, errors


def _attempt(call: Callable[[], object]) -> str | None:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever it is, the others still run
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}:{last.lineno}: {last.line}"
        return f"{type(error).__name__}: {error} ({where})"
    finally:
        ci.shutdown()
    return None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
