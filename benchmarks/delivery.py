"""Measure the delivery: ``make bench-delivery``.

    benchmarks/delivery.py                 everything; the table is kept in benchmarks/results/
    benchmarks/delivery.py --quick         few and short rounds, to see that it runs; keeps nothing
    benchmarks/delivery.py --only exit     some groups; keeps nothing
    benchmarks/delivery.py --check         ends with 1 when a "must" is missed

The sides of a group are processes that take turns; see benchmarks/harness.py. All receivers are on
loopback, so the machine needs a core for them besides the one for the program. The whole takes
about half an hour and needs 5 GB of disk; BENCH_QUEUE_MB makes the queue of `drain` another size.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import re
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import delivery_collector
import delivery_drain
import delivery_hang
import delivery_step
from harness import HERE, Bench, Row, SideError, not_measured

from run import QUIET, machine, table

GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "calls": delivery_hang.measure_calls,
    "step-mlp": delivery_step.measure_mlp,
    "step-transformer": delivery_step.measure_transformer,
    "collector": delivery_collector.measure,
    "drain": delivery_drain.measure,
    "exit": delivery_hang.measure_exit,
}
PACKAGES = ("torch", "rotel", "opentelemetry-proto", "opentelemetry-exporter-otlp-proto-http")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def keep(rows: list[Row], bench: Bench, about: dict[str, Any], date: str) -> Path:
    """Write the run to benchmarks/results/, as JSON with every round and as text."""
    slug = re.sub(r"[^a-z0-9]+", "-", about["cpu"].lower()).strip("-")
    target = HERE / "results" / f"delivery-{date}-{slug}.txt"
    target.parent.mkdir(exist_ok=True)
    whole = {
        "date": date,
        "machine": about,
        "rows": [row.to_json() for row in rows],
        "rounds": bench.raw,
    }
    target.with_suffix(".json").write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    facts = "\n".join(f"{key}: {value}" for key, value in about.items())
    target.write_text(f"{date}\n{facts}\n\n{table(rows)}\n", encoding="utf-8")
    return target


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="Measure the delivery, sides in turn.")
    parser.add_argument("--quick", action="store_true", help="few and short rounds; kept nowhere")
    parser.add_argument("--only", metavar="GROUPS", help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--keep", action="store_true", help="keep the result of --only, too")
    parser.add_argument("--check", action="store_true", help="end with 1 if a must is missed")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(GROUPS)
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    missing = [name for name in PACKAGES if _version(name) is None]
    if missing:
        parser.error(f"{', '.join(missing)} not installed here; `make bench-delivery` brings them")
    if options.quick and options.keep:
        parser.error("--quick is for trying; its numbers are not kept")
    about = {**machine(), **{name: _version(name) for name in PACKAGES}}
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    bench = Bench(quick=options.quick, say=lambda text: print(text, file=sys.stderr, flush=True))
    if about["load_before"] > QUIET:
        bench.say(f"load is {about['load_before']}: the ratios will be as restless as the machine")
    rows: list[Row] = []
    for name in names:
        bench.say(f"{name}:")
        try:
            rows += GROUPS[name](bench)
        except SideError as error:
            rows.append(not_measured(name, error))
    about["load_after"] = round(os.getloadavg()[0], 2)
    print(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}, ", end="")
    print(f"load {about['load_before']} before and {about['load_after']} after\n")
    print(table(rows))
    if options.keep or not (options.quick or options.only):
        print(f"\nkept in {keep(rows, bench, about, date).relative_to(HERE.parent)}")
    verdicts = [row.verdict for row in rows]
    bad = "NOT MEASURED" in verdicts or (options.check and "MISSED" in verdicts)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
