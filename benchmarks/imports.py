"""How long ``import cirron_otel`` takes beyond the interpreter's own start, and what it loads."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import Bench, Row, SideError, environment

FORBIDDEN = ("torch", "numpy", "requests", "grpc", "opentelemetry")
PROGRAMS = {
    "plain": "pass",
    "ours": "import cirron_otel",
    "ours-in-use": "import cirron_otel; cirron_otel.profile; cirron_otel.scope",
    "cirron-sdk": "import cirron",
}


def start(program: str, home: Path) -> float:
    """Milliseconds from starting the interpreter to its end."""
    begin = time.perf_counter_ns()
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        check=False,
    )
    took = (time.perf_counter_ns() - begin) / 1e6
    if done.returncode != 0:
        raise SideError(f"`{program}` failed: {done.stderr.strip().splitlines()[-1:]}")
    return took


def loaded(program: str, home: Path) -> list[str]:
    """The forbidden modules that are there after the program."""
    show = f"{program}; import json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", show],
        env=environment(home),
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    )
    modules = set(json.loads(done.stdout))
    return [name for name in FORBIDDEN if name in modules]


def measure(bench: Bench) -> list[Row]:
    """Import time net of the interpreter's start, and the forbidden modules."""
    rounds = bench.pick(15, 5)
    took: dict[str, list[float]] = {side: [] for side in PROGRAMS}
    names = list(PROGRAMS)
    with tempfile.TemporaryDirectory(prefix="bench-") as directory:
        home = Path(directory)
        for program in PROGRAMS.values():  # once for the compiled files and the disk's cache
            start(program, home)
        for number in range(rounds):
            turn = number % len(names)
            for side in [*names[turn:], *names[:turn]]:
                took[side].append(start(PROGRAMS[side], home))
        found = loaded(PROGRAMS["ours"], home)
    bench.say(f"  import: {rounds} rounds")
    bench.raw["import"] = [
        {side: {"ms": took[side][at]} for side in PROGRAMS} for at in range(rounds)
    ]
    net = {
        side: statistics.median(
            mine - plain for mine, plain in zip(took[side], took["plain"], strict=True)
        )
        for side in PROGRAMS
    }
    peer = f"cirron-sdk {net['cirron-sdk']:.0f} ms"
    return [
        Row("import, net", f"{net['ours']:.1f} ms", peer, net["ours"], "ms", 40, 15),
        Row(
            f"import: of {', '.join(FORBIDDEN)} loaded",
            ", ".join(found) or "none",
            "-",
            float(len(found)),
            "modules",
            0,
            0,
        ),
        Row(
            "import and first use of its names, net",
            f"{net['ours-in-use']:.0f} ms",
            peer,
            net["ours-in-use"],
            "ms",
            note="names load what they need when first used: OpenTelemetry's SDK, above all",
        ),
    ]


if __name__ == "__main__":
    sys.exit(os.EX_USAGE)
