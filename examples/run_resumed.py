"""A training that is killed twice and resumed from its checkpoint; then what it all cost.

Each attempt is a process of its own with the same run id. The first two are killed without a word,
between two checkpoints; what they had done since the last one is done again.

    python examples/run_resumed.py
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import cirron_otel as ci

HERE = Path("run-resumed")
CHECKPOINT = HERE / "checkpoint.txt"
STEPS = 60
#: The iterations at which the attempts are killed.
DEATHS = (25, 47)


def train(death: int | None) -> None:
    """One attempt, from the last checkpoint on; ``death`` is the iteration that it dies in."""
    start = int(CHECKPOINT.read_text()) if CHECKPOINT.exists() else 0
    ci.profile(path=HERE, run_id="example", start_iteration=start, otlp="none", frameworks=[])
    for iteration, _ in enumerate(ci.batches(range(start, STEPS)), start):
        time.sleep(0.02)  # the step
        if iteration == death:
            ci.flush()
            os.kill(os.getpid(), 9)
        if (iteration + 1) % 20 == 0:
            with ci.scope("checkpoint"):
                time.sleep(0.05)
                CHECKPOINT.write_text(str(iteration + 1))


def main() -> None:
    """Run the attempts, one after the other, and show the run."""
    HERE.mkdir(exist_ok=True)
    CHECKPOINT.unlink(missing_ok=True)
    for death in (*DEATHS, None):
        command = [sys.executable, __file__, "attempt", str(death)]
        status = subprocess.run(command, check=False).returncode
        print(f"an attempt ended with status {status}")
    command = [sys.executable, "-m", "cirron_otel.cli.main", "runs", "--spool", str(HERE)]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["attempt"]:
        train(None if sys.argv[2] == "None" else int(sys.argv[2]))
    else:
        main()
