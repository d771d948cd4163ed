"""A run that was killed twice and resumed: what each attempt was, and what of it was lost."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from cirron_otel.run.attempts import load
from cirron_otel.spool import Spool
from helpers import RunProgram

#: From the iteration given on; the checkpoint is written every 10, the process dies where told.
ATTEMPT = """
import os, sys, time
import cirron_otel as ci
start, death = int(sys.argv[1]), int(sys.argv[2])
ci.profile(frameworks=[], otlp="none", run_id="resumed", start_iteration=start)
for iteration, _ in enumerate(ci.batches(range(start, 30)), start):
    time.sleep(0.002)
    if iteration == death:
        ci.flush()
        os.kill(os.getpid(), 9)
"""


def test_a_run_killed_twice(run_program: RunProgram) -> None:
    """The reader says `lost`, and counts what was done again (B.111, D.126)."""
    for start, death, status in ((0, 14, -9), (10, 17, -9), (10, -1, 0)):
        arguments = (str(start), str(death))
        run = run_program(ATTEMPT, args=arguments, expect=status, measured=False)
    spool = Spool(run.output_dir, max_bytes=10**9)
    attempts = load(spool, now_ns=0)
    shown = [
        (one.attempt, one.outcome, one.first_iteration, one.last_iteration, one.lost_steps)
        for one in attempts
    ]
    # The step in which a process died was closed by the reader, and its time is lost, too.
    assert shown == [
        (1, "lost", 0, 14, 5),
        (2, "lost", 10, 17, 8),
        (3, "completed", 10, 29, 0),
    ]
    for one in attempts:
        assert sum(one.times.values()) == pytest.approx(one.wall)
        assert (one.times["lost"] > 0) == (one.lost_steps > 0)
    made = attempts[1]
    assert made.times["compute"] + made.times["data"] == pytest.approx(0, abs=1e-6)

    command = [sys.executable, "-m", "cirron_otel.cli.main", "runs", "--spool", str(run.output_dir)]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert text.splitlines()[0] == "run resumed"
    assert "3 attempts: completed after" in text
    assert "done again by a later attempt" in text
    answer = subprocess.run(
        [*command, "res", "--json"], capture_output=True, text=True, check=True
    ).stdout
    assert [one["outcome"] for one in json.loads(answer)["attempts"]] == [
        "lost", "lost", "completed",
    ]  # fmt: skip
    wrong = subprocess.run([*command, "x"], capture_output=True, text=True, check=False)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (1, 1)
