"""Signals: the tree is whole, the exit status and the user's handlers are what they were."""

from __future__ import annotations

import signal
import subprocess

import pytest

from helpers import Rows, RunProgram, StartProgram, read_spool, tree_text

#: Waits inside two scopes for what the test sends.
WAITS = """
import os, signal, sys, time
import cirron_otel as ci
{before}
ci.profile(frameworks=[], flush_interval=60, signals={signals})
{after}
with ci.scope("outer"):
    with ci.scope("done"):
        ci.mark("m", 1)
    with ci.scope("inner"):
        print("ready", flush=True)
        {wait}
print("end", flush=True)
"""


def start(
    start_program: StartProgram,
    *,
    before: str = "",
    after: str = "",
    wait: str = "time.sleep(60)",
    signals: bool = True,
) -> subprocess.Popen[str]:
    """Start the program and wait until it waits."""
    process = start_program(WAITS.format(before=before, after=after, wait=wait, signals=signals))
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def ended(process: subprocess.Popen[str]) -> tuple[int, str, Rows]:
    """The program's exit status, the rest of its output, and what is on disk."""
    out, _ = process.communicate(timeout=30)
    return process.returncode, out, read_spool()


def assert_whole(rows: Rows) -> None:
    """Every scope is closed, under its parent."""
    assert tree_text(rows) == "cirron.session\n  outer\n    done\n    inner"
    assert not rows.open


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_deadly_signal(start_program: StartProgram, number: signal.Signals) -> None:
    """Everything is closed, marked and written; the process dies of the signal (B.18, D.126)."""
    process = start(start_program)
    process.send_signal(number)
    status, out, rows = ended(process)
    assert (status, out) == (-number, "")
    assert_whole(rows)
    session = rows.one("cirron.session")
    if number is signal.SIGTERM:
        assert session.attrs["cirron.interrupted"] == "SIGTERM"
        assert rows.one("inner").attrs == rows.one("outer").attrs == {"cirron.truncated": True}
        assert rows.one("inner").end_ns <= rows.one("outer").end_ns <= session.end_ns
    else:
        assert session.attrs["error"] == "KeyboardInterrupt"
        assert rows.one("inner").attrs["error"] == "KeyboardInterrupt"


def test_a_deadly_signal_right_after_profile(start_program: StartProgram) -> None:
    """Before anything else was recorded the session is closed and written, too."""
    process = start_program(
        """
        import time, cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=60)
        print("ready", flush=True)
        time.sleep(60)
        """
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.terminate()
    status, _, rows = ended(process)
    assert status == -signal.SIGTERM
    assert rows.one("cirron.session").attrs["cirron.interrupted"] == "SIGTERM"


def test_the_users_handler_runs_and_decides(start_program: StartProgram) -> None:
    """A handler installed before ``profile()`` is called with what it expects; its exit counts."""
    before = (
        "signal.signal(signal.SIGTERM, lambda n, f: sys.exit(40 + (n == 15) + (f is not None)))"
    )
    process = start(start_program, before=before)
    process.terminate()
    status, _, rows = ended(process)
    assert status == 42
    assert_whole(rows)
    assert rows.one("inner").attrs["error"] == "SystemExit: 42"
    assert "cirron.interrupted" not in rows.one("cirron.session").attrs


def test_a_handler_that_goes_on_finds_everything_as_it_was(start_program: StartProgram) -> None:
    """The signal makes a flush, closes nothing, and the program runs to its own end."""
    process = start(
        start_program,
        before="import threading; handled = threading.Event(); signal.signal("
        "signal.SIGTERM, lambda *_: (print('handled', flush=True), handled.set()))",
        wait="handled.wait(20)",
    )
    process.terminate()
    status, out, rows = ended(process)
    assert (status, out) == (0, "handled\nend\n")
    assert_whole(rows)
    assert rows.one("inner").attrs == {}
    assert len(rows.batches) >= 2, "the signal made no flush"


def test_an_interrupt_that_is_caught_stops_nothing(run_program: RunProgram) -> None:
    """After a caught Ctrl-C the flush thread goes on by itself (C-W15)."""
    run = run_program(
        """
        import os, signal, time
        from pathlib import Path
        import cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=0.05)
        for attempt in range(2):
            try:
                with ci.scope("cell", attempt):
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(10)
            except KeyboardInterrupt:
                pass
        with ci.scope("after"):
            ci.mark("m", 1)
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            if any('"after"' in f.read_text() for f in Path(".cirron/spool").glob("*.json")):
                break
            time.sleep(0.02)
        else:
            raise SystemExit("the flush thread does not write any more")
        assert ci.health()["flush_mode"] == "normal"
        """
    )
    assert tree_text(run) == "cirron.session\n  cell[0]\n  cell[1]\n  after"
    assert {one.attrs["error"] for one in run.named("cell")} == {"KeyboardInterrupt"}
    assert "error" not in run.one("cirron.session").attrs


def test_an_ignored_signal_stays_ignored(start_program: StartProgram) -> None:
    """``SIG_IGN`` (nohup) is left alone."""
    process = start(
        start_program,
        before="signal.signal(signal.SIGTERM, signal.SIG_IGN)",
        after="assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN",
        wait="time.sleep(0.5)",
    )
    process.terminate()
    status, out, rows = ended(process)
    assert (status, out) == (0, "end\n")
    assert_whole(rows)


def test_signals_can_be_left_alone(start_program: StartProgram) -> None:
    """``signals=False`` touches no disposition; the signal does what it always did."""
    process = start(
        start_program,
        signals=False,
        after="assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL;"
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler; ci.flush()",
    )
    process.terminate()
    status, _, rows = ended(process)
    assert status == -signal.SIGTERM
    assert "cirron.session" in {one.name for one in rows.open}


def test_shutdown_puts_the_handlers_back(run_program: RunProgram) -> None:
    """Ours are gone after ``shutdown()``; one that the user put on top meanwhile stays."""
    run_program(
        """
        import signal
        import cirron_otel as ci
        mine = lambda *_: None
        before = signal.signal(signal.SIGTERM, mine), signal.getsignal(signal.SIGINT)
        ci.profile(frameworks=[])
        assert signal.getsignal(signal.SIGTERM) is not mine
        ci.shutdown()
        assert signal.getsignal(signal.SIGTERM) is mine
        assert signal.getsignal(signal.SIGINT) is before[1]
        ci.profile(frameworks=[])
        later = lambda *_: None
        signal.signal(signal.SIGTERM, later)
        ci.shutdown()
        assert signal.getsignal(signal.SIGTERM) is later
        """
    )


def test_a_signal_while_locks_are_held_does_not_hang(run_program: RunProgram) -> None:
    """The handler takes no lock that the interrupted code may hold (C-W30)."""
    run = run_program(
        """
        import signal, threading, time
        import cirron_otel as ci
        from cirron_otel import recorder
        count = 0
        def handler(*_):
            global count
            count += 1
        signal.signal(signal.SIGTERM, handler)
        ci.profile(frameworks=[], flush_interval=0.01)
        rec = recorder._current
        signal.setitimer(signal.ITIMER_REAL, 0)
        main = threading.main_thread().ident
        stop = threading.Event()
        def shoot():
            while not stop.wait(0.005):
                signal.pthread_kill(main, signal.SIGTERM)
        thread = threading.Thread(target=shoot)
        thread.start()
        deadline = time.monotonic() + 1.5
        number = 0
        while time.monotonic() < deadline:
            with ci.scope("x", number):
                ci.mark("m", number)
            number += 1
            if number % 50 == 0:
                ci.flush(), ci.health(), rec.batcher.relieve()
        stop.set(); thread.join()
        with rec.batcher._lock:
            signal.raise_signal(signal.SIGTERM)
        assert count > 10, count
        print(number)
        """,
        timeout=40,
    )
    assert len(run.named("x")) == int(run.stdout)


def test_signals_are_left_alone_off_the_main_thread(run_program: RunProgram) -> None:
    """``profile()`` on another thread cannot install handlers, and does not try."""
    run = run_program(
        """
        import signal, threading
        import cirron_otel as ci
        thread = threading.Thread(target=lambda: ci.profile(frameworks=[]))
        thread.start(); thread.join()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        with ci.scope("x"):
            pass
        """
    )
    assert tree_text(run) == "cirron.session\n  x"
    assert run.stderr == ""
