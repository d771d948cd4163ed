"""Measure against cirron-sdk and the OpenTelemetry SDK: ``make bench``.

    benchmarks/run.py                      everything; the table is kept in benchmarks/results/
    benchmarks/run.py --quick              few and short rounds, to see that it runs; keeps nothing
    benchmarks/run.py --only scope,mark    some groups; keeps nothing
    benchmarks/run.py --scorecard          as the first, and puts the table into docs/scorecard.md

The whole takes about 15 minutes and needs a quiet machine. Ends with 0 when everything could be
measured, else with 1; with ``--check`` also with 1 when a "must" is missed.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import platform
import re
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import flood
import hot_path
import imports
import joined
import stall
import torch_hook
from harness import HEAD, HERE, Bench, Row, SideError, not_measured

GROUPS: dict[str, Callable[[Bench], list[Row]]] = {
    "scope": hot_path.measure_scope,
    "mark": hot_path.measure_mark,
    "batches": hot_path.measure_batches,
    "joined-scope": joined.measure_scope,
    "joined-mark": joined.measure_mark,
    "flood": flood.measure,
    "torch-mlp": torch_hook.measure_mlp,
    "torch-transformer": torch_hook.measure_transformer,
    "nested": torch_hook.measure_nested,
    "import": imports.measure,
    "stall": stall.measure,
}
PACKAGES = ("cirron-sdk", "opentelemetry-sdk", "msgspec", "torch")
#: A load average above this says that somebody else is at work.
QUIET = 0.5
SCORECARD = HERE.parent / "docs" / "scorecard.md"
BEGIN, END = "<!-- bench: begin -->", "<!-- bench: end -->"
EXPLANATION = (
    "Sides take turns, a process each; medians of the rounds' ratios. The OTel SDK side is "
    "TracerProvider + BatchSpanProcessor with a queue that loses nothing and an exporter that "
    "discards its spans unserialised; ours and cirron-sdk write their spool within the time."
)


def machine() -> dict[str, Any]:
    """What a reader needs to judge the numbers; no names and no paths."""
    return {
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "python": platform.python_version(),
        **{name: _version(name) for name in ("cirron-otel", *PACKAGES)},
        "load_before": round(os.getloadavg()[0], 2),
    }


def cpu() -> str:
    """The processor's model name."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.machine()


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def measured(bench: Bench, names: list[str]) -> list[Row]:
    """The rows of these groups; what fails becomes a row that says so."""
    rows: list[Row] = []
    for name in names:
        bench.say(f"{name}:")
        begin = time.perf_counter()
        try:
            found = GROUPS[name](bench)
        except SideError as error:
            found = [not_measured(name, error)]
        rows += found
        bench.say(f"{table(found)}\n  took {time.perf_counter() - begin:.0f} s")
    return rows


def table(rows: list[Row]) -> str:
    """The rows as aligned text."""
    lines = [HEAD, *(row.cells() for row in rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(HEAD))]
    made = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]
    made.insert(1, "  ".join("-" * width for width in widths))
    notes = [f"* {row.work}: {row.note}" for row in rows if row.note]
    return "\n".join([*made, *notes])


def markdown(rows: list[Row], about: dict[str, Any], date: str) -> str:
    """The rows as docs/scorecard.md shows them."""
    lines = [HEAD, ["---"] * len(HEAD), *(row.cells() for row in rows)]
    shown = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    where = f"{about['cpu']}, {about['cores']} cores, Python {about['python']}"
    return f"{shown}\n\nMeasured on {date}: {where}. {EXPLANATION}"


def keep(rows: list[Row], bench: Bench, about: dict[str, Any], date: str) -> Path:
    """Write the run to benchmarks/results/, as JSON with every round and as text."""
    slug = re.sub(r"[^a-z0-9]+", "-", about["cpu"].lower()).strip("-")
    target = HERE / "results" / f"{date}-{slug}"
    target.parent.mkdir(exist_ok=True)
    whole = {
        "date": date,
        "machine": about,
        "method": EXPLANATION,
        "rows": [row.to_json() for row in rows],
        "rounds": bench.raw,
    }
    target.with_name(target.name + ".json").write_text(
        json.dumps(_rounded(whole), indent=1) + "\n", encoding="utf-8"
    )
    facts = "\n".join(f"{key}: {value}" for key, value in about.items())
    text = target.with_name(target.name + ".txt")
    text.write_text(f"{date}\n{facts}\n\n{EXPLANATION}\n\n{table(rows)}\n", encoding="utf-8")
    return text


def _rounded(value: Any) -> Any:  # noqa: ANN401 - whatever JSON can hold
    """Numbers to five digits after the point: more is noise."""
    if isinstance(value, float):
        return round(value, 5)
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return value


def update_scorecard(rows: list[Row], about: dict[str, Any], date: str) -> None:
    """Put the table between the two marks in docs/scorecard.md."""
    text = SCORECARD.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not end:
        sys.exit(f"{SCORECARD.name} has no {BEGIN} ... {END}")
    SCORECARD.write_text(
        f"{before}{BEGIN}\n{markdown(rows, about, date)}\n{END}{after}", encoding="utf-8"
    )


def main() -> int:
    """Measure, print, keep."""
    parser = argparse.ArgumentParser(description="Measure against the peers, in turn.")
    parser.add_argument("--quick", action="store_true", help="few and short rounds; kept nowhere")
    parser.add_argument("--only", metavar="GROUPS", help=f"some of {', '.join(GROUPS)}")
    parser.add_argument("--keep", action="store_true", help="keep the result of --only, too")
    parser.add_argument("--check", action="store_true", help="end with 1 if a must is missed")
    parser.add_argument("--scorecard", action="store_true", help="update docs/scorecard.md")
    options = parser.parse_args()
    names = options.only.split(",") if options.only else list(GROUPS)
    unknown = [name for name in names if name not in GROUPS]
    if unknown:
        parser.error(f"no such group: {', '.join(unknown)}; there are {', '.join(GROUPS)}")
    missing = [name for name in PACKAGES if _version(name) == "not installed"]
    if missing:
        parser.error(f"{', '.join(missing)} not installed here; `make bench` brings them")
    if options.quick and (options.keep or options.scorecard):
        parser.error("--quick is for trying; its numbers are not kept")
    if options.scorecard and options.only:
        parser.error("--scorecard needs every group")

    about = machine()
    date = dt.datetime.now(tz=dt.UTC).date().isoformat()
    bench = Bench(quick=options.quick, say=lambda text: print(text, file=sys.stderr, flush=True))
    if about["load_before"] > QUIET:
        bench.say(f"load is {about['load_before']}: the ratios will be as restless as the machine")
    rows = measured(bench, names)
    about["load_after"] = round(os.getloadavg()[0], 2)
    print(f"{about['cpu']}, {about['cores']} cores, Python {about['python']}. {EXPLANATION}\n")
    print(table(rows))
    if options.keep or not (options.quick or options.only):
        print(f"\nkept in {keep(rows, bench, about, date).relative_to(HERE.parent)}")
    if options.scorecard:
        update_scorecard(rows, about, date)
    verdicts = [row.verdict for row in rows]
    bad = "NOT MEASURED" in verdicts or (options.check and "MISSED" in verdicts)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
