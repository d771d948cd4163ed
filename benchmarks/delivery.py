"""Measure the delivery: ``make bench-delivery``.

    benchmarks/delivery.py                 everything
    benchmarks/delivery.py --quick         few and short rounds, to see that it runs
    benchmarks/delivery.py --only exit     some groups
    benchmarks/delivery.py --check         ends with 1 when a "must" is missed

The sides of a group are processes that take turns; see benchmarks/harness.py. All receivers are on
loopback, so the machine needs a core for them besides the one for the program. The whole takes
about half an hour and needs 5 GB of disk. ``make bench-drain`` and ``make bench-million`` are the
groups of those names alone: ``million`` is not among those that are measured unless named, and
needs 4 GB. BENCH_QUEUE_MB makes the queue of ``drain`` another size, BENCH_STEPS the run of
``million``.
"""

from __future__ import annotations

import sys
from importlib import metadata

import delivery_collector
import delivery_drain
import delivery_hang
import delivery_million
import delivery_step
from groups import Groups, measure_groups

GROUPS: Groups = {
    "calls": delivery_hang.measure_calls,
    "step-mlp": delivery_step.measure_mlp,
    "step-transformer": delivery_step.measure_transformer,
    "collector": delivery_collector.measure,
    "drain": delivery_drain.measure,
    "exit": delivery_hang.measure_exit,
    "million": delivery_million.measure,
}
PACKAGES = ("torch", "rotel", "opentelemetry-proto", "opentelemetry-exporter-otlp-proto-http")


def _is_missing(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return True
    return False


if __name__ == "__main__":
    missing = [name for name in PACKAGES if _is_missing(name)]
    if missing:
        sys.exit(f"{', '.join(missing)} not installed here; `make bench-delivery` brings them")
    usual = [name for name in GROUPS if name != "million"]
    sys.exit(measure_groups("Measure the delivery, sides in turn.", GROUPS, usual))
