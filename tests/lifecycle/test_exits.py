"""However a process ends, its tree is whole on disk and its exit status is its own."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path

import pytest
from msgspec import UNSET

from helpers import Rows, RunProgram, StartProgram, read_spool, tree_text

#: A loop that is left in its second epoch, under a scope that nobody closes.
LOOP = """
import os, sys, time
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=60)
left = ci.scope("left").__enter__()
for epoch in ci.epochs(range(2)):
    for batch in ci.batches(range(2)):
        ci.mark("loss", 0.1)
    if epoch == 1:
        {end}
"""

TREE = """\
cirron.session
  left
    epoch[0]
      step[0] {loss}
        data_load
      step[1] {loss}
        data_load
    epoch[1]
      step[0] {loss}
        data_load
      step[1] {loss}
        data_load"""


def assert_whole(rows: Rows) -> None:
    """The tree is complete; what nobody closed is marked and lies within its parent."""
    assert tree_text(rows, marks=True) == TREE
    assert not rows.open
    by_id = {one.id: one for one in rows.spans}
    for one in rows.spans:
        above = by_id.get(one.parent_id or "")
        assert above is None or above.start_ns <= one.start_ns <= one.end_ns <= above.end_ns


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("raise RuntimeError('boom')", 1),
        ("os._exit(7)", 7),
        ("raise KeyboardInterrupt", -signal.SIGINT),
    ],
    ids=["normal", "sys.exit", "exception", "os._exit", "interrupt"],
)
def test_an_end_without_shutdown(run_program: RunProgram, end: str, status: int) -> None:
    """Session, epochs and the open scope are all there, truncated where they were cut (C-W3)."""
    run = run_program(LOOP.format(end=end), expect=status)
    assert_whole(run)
    left, session = run.one("left"), run.one("cirron.session")
    assert left.attrs["cirron.truncated"] is True
    assert "cirron.truncated" not in session.attrs
    assert (run.named("epoch")[1].attrs.get("cirron.truncated") is True) == (end == "os._exit(7)")
    if end.startswith("raise"):
        assert session.otel.status == "error"
        assert session.attrs["error"] in ("RuntimeError: boom", "KeyboardInterrupt")
        assert "Traceback" in run.stderr
    else:
        assert "error" not in session.attrs
        assert run.stderr == ""


def test_an_exception_flies_through_open_scopes_to_the_end(run_program: RunProgram) -> None:
    """The scopes it passes bear it, the session too; nothing is printed twice."""
    run = run_program(
        """
        import cirron_otel as ci
        ci.profile(frameworks=[])
        with ci.scope("outer"):
            with ci.scope("inner"):
                raise ValueError("boom")
        """,
        expect=1,
    )
    assert tree_text(run) == "cirron.session\n  outer\n    inner"
    assert [one.attrs["error"] for one in run.spans] == ["ValueError: boom"] * 3
    assert run.stderr.count("ValueError: boom") == 1


def test_what_runs_after_us_at_exit_does_no_harm(run_program: RunProgram) -> None:
    """Handlers registered before ``profile()`` run after our end; scopes there do nothing."""
    run = run_program(
        """
        import atexit
        import cirron_otel as ci
        def last():
            with ci.scope("too late"):
                ci.mark("m", 1)
            print("ran", ci.shutdown(), ci.flush())
        def earlier():
            with ci.scope("in time"):
                pass
        atexit.register(last)
        ci.profile(frameworks=[])
        atexit.register(earlier)
        """
    )
    assert run.stdout == "ran True True\n"
    assert tree_text(run) == "cirron.session\n  in time"


def test_threads_that_still_run_at_the_end_do_not_hold_it(run_program: RunProgram) -> None:
    """A daemon thread inside a scope is cut, marked, and the process ends at once."""
    began = time.monotonic()
    run = run_program(
        """
        import threading, time
        import cirron_otel as ci
        ci.profile(frameworks=[])
        entered = threading.Event()
        def work():
            with ci.scope("endless"):
                while True:
                    with ci.scope("turn"):
                        entered.set()
                        time.sleep(0.01)
        threading.Thread(target=work, daemon=True).start()
        entered.wait(10)
        """
    )
    assert time.monotonic() - began < 20
    assert run.one("endless").attrs["cirron.truncated"] is True
    assert run.one("endless").parent_id == run.one("cirron.session").id
    assert not run.open


KILLED = """
import os, sys, time
import cirron_otel as ci
ci.profile(frameworks=[], flush_interval=0.2)
with ci.scope("outer", lr=0.1):
    for number in range(100_000):
        with ci.scope("step", number):
            ci.mark("made", time.time_ns())
        if number == 300:
            print("ready", flush=True)
        time.sleep(0.002)
"""


def kill(process: subprocess.Popen[str]) -> int:
    """Kill a program once it is ready; the time of its death."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.kill()
    died = time.time_ns()
    process.wait(10)
    return died


def test_after_a_kill_the_next_run_makes_the_tree_whole(
    start_program: StartProgram, run_program: RunProgram
) -> None:
    """At most one interval is missing, no file is broken; ``profile()`` recovers (decision 16)."""
    died = kill(start_program(KILLED))
    rows = read_spool()  # decodes every file: none is broken
    newest = max(m.value for m in rows.marks if m.name == "made")
    # One interval, and what a busy machine adds to it.
    assert died - newest < 200_000_000 + 800_000_000
    assert {one.name for one in rows.open} >= {"cirron.session", "outer"}
    steps = [one.index for one in rows.named("step")]
    assert steps == list(range(len(steps)))

    run_program("import cirron_otel as ci; ci.profile(frameworks=[]); assert ci.flush()")
    rows = read_spool()
    assert not rows.open
    dead = rows.named("cirron.session")[0]
    outer = rows.one("outer")
    assert dead.attrs["recovered"] is True
    assert outer.attrs == {"lr": 0.1, "recovered": True}
    assert outer.parent_id == dead.id
    assert all(one.parent_id == outer.id for one in rows.named("step"))
    assert len(rows.named("cirron.session")) == 2
    assert "recovered" not in rows.named("cirron.session")[1].attrs


def test_a_long_scope_is_known_before_anything_ends(start_program: StartProgram) -> None:
    """Killed in its first scope, a run is still there: open scopes are announced by themselves."""
    process = start_program(
        """
        import time
        import cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=0.1)
        with ci.scope("long"):
            time.sleep(1)
            print("ready", flush=True)
            time.sleep(60)
        """
    )
    kill(process)
    assert tree_text(read_spool()) == "cirron.session (open)\n  long (open)"


def test_a_child_killed_in_its_first_scope_is_known(start_program: StartProgram) -> None:
    """The same in a forked child, whose thread starts with its first scope (A.1)."""
    process = start_program(
        """
        import os, signal, time
        import cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=0.1)
        with ci.scope("outer"):
            child = os.fork()
            if not child:
                with ci.scope("in child"):
                    time.sleep(60)
            time.sleep(1)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            print("ready", flush=True)
            time.sleep(60)
        """
    )
    kill(process)
    rows = read_spool()
    (row,) = [one for one in rows.open if one.name == "in child"]
    (outer,) = [one for one in rows.open if one.name == "outer"]
    assert row.parent_id == outer.id
    assert row.pid != outer.pid


def test_the_lock_of_a_live_run_keeps_its_scopes_open(
    start_program: StartProgram, run_program: RunProgram
) -> None:
    """A second run in the same directory recovers the dead only."""
    process = start_program(KILLED)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    run_program("import cirron_otel as ci; ci.profile(frameworks=[]); assert ci.flush()")
    assert process.poll() is None
    rows = read_spool()
    assert "outer" in {one.name for one in rows.open}
    assert not any(one.attrs.get("recovered") for one in rows.spans)
    assert all(one.end_ns is UNSET for one in rows.open)
    assert len(list(Path(".cirron/run").glob("*.lock"))) == 1
