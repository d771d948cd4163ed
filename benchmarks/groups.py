"""The command of a benchmark that has groups: which of them to measure, and the table."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping

from harness import Bench, Row, SideError, not_measured

from run import machine, table

Groups = Mapping[str, Callable[[Bench], list[Row]]]


def measure_groups(description: str, groups: Groups, here: Iterable[str] | None = None) -> int:
    """Measure what the command line asks for (``here`` unless it names groups), and print it.

    Returns 1 when something could not be measured, or with ``--check`` when a "must" is missed.
    """
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few and short rounds")
    parser.add_argument("--only", metavar="GROUPS", help=f"some of {', '.join(groups)}")
    parser.add_argument("--check", action="store_true", help="end with 1 if a must is missed")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(groups if here is None else here)
    unknown = [name for name in names if name not in groups]
    if unknown:
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(groups)}")
    about = machine()
    bench = Bench(quick=options.quick, say=lambda text: print(text, file=sys.stderr, flush=True))
    rows: list[Row] = []
    for name in names:
        try:
            found = groups[name](bench)
        except (SideError, OSError, subprocess.SubprocessError) as error:
            found = [not_measured(name, error)]
        rows += found
        # At once: a run that is cut short keeps what it has.
        bench.say(table(found))
    print(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, ", end="")
    print(f"load {about['load_before']} before and {os.getloadavg()[0]:.2f} after\n")
    print(table(rows))
    verdicts = [row.verdict for row in rows]
    bad = "NOT MEASURED" in verdicts or (options.check and "MISSED" in verdicts)
    return 1 if bad else 0
