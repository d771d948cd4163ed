"""The end of the program waits for destinations no longer than it may.

A request to a destination that hangs takes ten seconds, and retries go on for ever; the bounds
here lie well below, and well above the budget, because the machine that runs tests is busy.
"""

from __future__ import annotations

import pytest

from delivery.platform_server import PlatformServer
from helpers import RunProgram

MODES = ["thread", "process"]
BOUND_S = 6.0
PROGRAM = """
import sys, time
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=0.05)
with ci.scope("step"):
    ci.mark("loss", 0.5)
{before}
began = time.monotonic()
{end}
print(time.monotonic() - began)
"""


def environment(server: PlatformServer, mode: str, budget: str = "1") -> dict[str, str]:
    """A platform and two OTLP receivers that all hang, and a budget of one second."""
    return {
        "CIRRON_API_KEY": server.key,
        "CIRRON_API_ENDPOINT": server.url,
        "CIRRON_OTLP": f"{server.url}/a,{server.url}/b",
        "CIRRON_FORWARD": mode,
        "CIRRON_EXIT_BUDGET": budget,
    }


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("behaviour", ["hang", "slow", "503", "429:3600"])
def test_shutdown_keeps_to_the_budget(run_program: RunProgram, mode: str, behaviour: str) -> None:
    """With every destination hanging, trickling or refusing, shutdown() comes back in time."""
    with PlatformServer(default=behaviour) as server:
        run = run_program(
            PROGRAM.format(before="time.sleep(1)", end="assert ci.shutdown()"),
            environment(server, mode),
        )
    assert float(run.stdout) < BOUND_S
    assert run.stderr.count("not delivered yet") == 1
    assert "to platform" in run.stderr
    assert {row.name for row in run.spans} == {"cirron.session", "step"}


@pytest.mark.parametrize("mode", MODES)
def test_the_exit_of_the_interpreter_keeps_to_the_budget(
    run_program: RunProgram, mode: str
) -> None:
    """Without a shutdown() the exit handler does the same."""
    with PlatformServer(default="hang") as server:
        source = "import time; began = time.monotonic()\nimport atexit\n"
        source += "atexit.register(lambda: print(time.monotonic() - ended))\n"
        source += PROGRAM.format(before="", end="ended = time.monotonic()").strip()
        run = run_program(source, environment(server, mode))
    assert float(run.stdout.splitlines()[-1]) < BOUND_S
    assert run.stderr.count("not delivered yet") == 1
    assert {row.name for row in run.spans} == {"cirron.session", "step"}


@pytest.mark.parametrize("mode", MODES)
def test_no_budget_means_no_waiting(run_program: RunProgram, mode: str) -> None:
    """With a budget of 0 everything stays for the next run, and the line says so."""
    with PlatformServer(default="hang") as server:
        run = run_program(
            PROGRAM.format(before="time.sleep(1)", end="ci.shutdown()"),
            environment(server, mode, "0"),
        )
    assert float(run.stdout) < BOUND_S
    assert "not delivered yet" in run.stderr


def test_flush_waits_for_the_disk_alone(run_program: RunProgram) -> None:
    """flush() returns when everything is written, whatever destinations do."""
    with PlatformServer(default="hang") as server:
        run = run_program(
            PROGRAM.format(before="time.sleep(0.5)", end="assert ci.flush(30)"),
            environment(server, "thread", "0"),
        )
    assert float(run.stdout) < BOUND_S


def test_a_timeout_given_to_shutdown_counts_for_everything(run_program: RunProgram) -> None:
    """``shutdown(timeout=)`` bounds the delivery too, below the budget."""
    with PlatformServer(default="hang") as server:
        run = run_program(
            PROGRAM.format(before="time.sleep(0.5)", end="ci.shutdown(timeout=0.5)"),
            environment(server, "thread", "30"),
        )
    assert float(run.stdout) < BOUND_S


def test_sigterm_is_not_held_up(run_program: RunProgram) -> None:
    """A signal that ends the program ends it at once; what is left is on disk."""
    source = PROGRAM.format(
        before="", end="import os, signal; os.kill(os.getpid(), signal.SIGTERM); time.sleep(40)"
    )
    with PlatformServer(default="hang") as server:
        run = run_program(source, environment(server, "thread", "30"), expect=-15, timeout=30)
    assert {row.name for row in run.spans} == {"cirron.session", "step"}
