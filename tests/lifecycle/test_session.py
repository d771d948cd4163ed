"""From ``profile()`` to ``shutdown()``: what begins, what is put back, what is left."""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import logging
import os
import random
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import cirron_otel as ci
from cirron_otel import recorder, semconv
from helpers import RunProgram, read_spool, tree_text

#: Every key of both published lists, and what this library adds.
HEALTH_KEYS = {
    "enabled", "scope_drop_count", "mark_drop_count", "spool_drop_count", "swallowed_error_count",
    "status", "swallowed_errors", "spool_dir", "spool_bytes", "flush_mode", "flush_restart_count",
    "transport", "installed_hooks", "platform_context",
    "frameworks_installed", "scope_depth", "flush_latency_ns",
    "losses", "producer_assists", "queued_rows", "disk_refuses", "open_scopes", "run_id", "attempt",
    "snapshots", "otel", "provider", "pending_device_values",
}  # fmt: skip


def test_health_answers_every_key_in_every_state() -> None:
    """Before, while, after, and with recording switched off: one set of keys (§13)."""
    states = {"before": ci.health()}
    profiler = ci.profile(frameworks=[])
    with ci.scope("x"):
        ci.mark("m", 1)
        assert ci.flush()
        states["while"] = ci.health()
    assert ci.shutdown()
    states["after"] = ci.health()
    states["after, profiler"] = profiler.health()
    ci.profile(enabled=False)
    states["off"] = ci.health()
    for state, health in states.items():
        assert health.keys() >= HEALTH_KEYS, state
        json.dumps(health)
        assert health["enabled"] == (state == "while"), state
        assert health["snapshots"]["taken"] == 0
        assert health["transport"] in (None, "file_only")
    during = states["while"]
    assert during["flush_mode"] == "normal"
    assert (during["open_scopes"], during["scope_depth"]) == (2, 1)
    assert during["spool_dir"] == str(Path(".cirron/spool").absolute())
    assert during["spool_bytes"] > 0
    assert during["flush_latency_ns"] > 0
    assert during["losses"] == {}
    assert states["after"]["flush_mode"] == states["off"]["flush_mode"] == "stopped"


def test_profile_twice_goes_on_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """The second call returns the running profiler and changes nothing (D.36)."""
    first = ci.profile(frameworks=[], path="one")
    second = ci.profile(frameworks=[], path="two", run_id="other")
    assert second is first
    assert first.enabled
    assert sum("called again" in r.getMessage() for r in caplog.records) == 1
    assert ci.shutdown()
    assert len(read_spool("one").spans) == 1
    assert not Path("two").exists()


def test_shutdown_twice_and_flush_outside_are_harmless() -> None:
    """Each answers True where there is nothing to do, and writes nothing more."""
    assert ci.shutdown()
    assert ci.flush()
    profiler = ci.profile(frameworks=[])
    assert ci.shutdown()
    files = sorted(Path(".cirron/spool").iterdir())
    assert ci.shutdown()
    assert profiler.shutdown()
    assert profiler.flush()
    assert ci.flush()
    assert not profiler.enabled
    assert sorted(Path(".cirron/spool").iterdir()) == files


def test_a_profiler_is_a_context_manager() -> None:
    """Leaving it shuts down, and an exception flies on."""
    error = KeyError("k")
    with contextlib.suppress(KeyError), ci.profile(frameworks=[]) as profiler, ci.scope("x"):
        assert profiler.enabled
        raise error
    assert not ci.health()["enabled"]
    assert tree_text(read_spool()) == "cirron.session\n  x"


def test_a_second_recording_follows_the_first() -> None:
    """``profile()`` after ``shutdown()`` is a new session with nothing of the old one."""
    for name in ("one", "two"):
        ci.profile(frameworks=[])
        with ci.scope(name):
            ci.mark("m", 1)
        assert ci.shutdown()
    assert tree_text(read_spool()) == "cirron.session\n  one\ncirron.session\n  two"


def test_switched_off_it_does_nothing(run_program: RunProgram) -> None:
    """``enabled=False``: no row, no file, no thread, no memory; every call still works (C-W23)."""
    run = run_program(
        """
        import sys, threading
        from pathlib import Path
        import cirron_otel as ci
        before = threading.active_count()
        profiler = ci.profile(enabled=False)
        assert profiler.enabled is False
        for number in range(20_000):
            with ci.scope("x", number) as s:
                s.set_attribute("a", 1)
                ci.mark("m", number)
        for _ in ci.epochs(range(2)):
            for _ in ci.batches(range(2)):
                pass
        assert ci.flush() and ci.trace() is None and ci.shutdown()
        assert threading.active_count() == before
        assert not Path(".cirron").exists()
        assert ci.health()["queued_rows"] == 0
        from cirron_otel import recorder
        assert recorder._current is None
        """,
        env={"CIRRON_ENABLED": "false"},
    )
    assert run.batches == []


def test_what_is_patched_is_put_back() -> None:
    """By identity: ``Thread.start``, ``submit``, ``os._exit``; the carrier is gone, too."""
    pool = concurrent.futures.ThreadPoolExecutor
    before = (threading.Thread.start, pool.submit, os._exit)
    ci.profile(frameworks=[])
    during = (threading.Thread.start, pool.submit, os._exit)
    carrier = os.environ[semconv.CARRIER_VARIABLE]
    assert not any(a is b for a, b in zip(before, during, strict=True))
    assert "key" not in carrier.lower() or "api_key" not in carrier.lower()
    assert ci.shutdown()
    after = (threading.Thread.start, pool.submit, os._exit)
    assert all(a is b for a, b in zip(before, after, strict=True))
    assert semconv.CARRIER_VARIABLE not in os.environ


def test_somebody_elses_patch_on_top_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """A library that wrapped ``Thread.start`` after us keeps its wrapper, ours does nothing."""
    original = threading.Thread.start
    ci.profile(frameworks=[])
    ours = threading.Thread.start
    seen: list[str] = []

    def wrapper(thread: threading.Thread) -> None:
        seen.append(thread.name)
        ours(thread)

    monkeypatch.setattr(threading.Thread, "start", wrapper)
    assert ci.shutdown()
    assert threading.Thread.start is wrapper
    thread = threading.Thread(target=lambda: seen.append("ran"), name="mine")
    thread.start()
    thread.join()
    assert seen[-2:] == ["mine", "ran"]
    assert "run" not in vars(thread)
    monkeypatch.setattr(threading.Thread, "start", original)


def _descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.timeout(120)
def test_two_hundred_recordings_leak_nothing() -> None:
    """Profile and shut down in a loop: threads and descriptors stay constant (D.37)."""
    ci.profile(frameworks=[])
    ci.shutdown()
    threads, descriptors = threading.active_count(), _descriptors()
    for number in range(200):
        ci.profile(frameworks=[], run_id="again", flush_interval=60)
        with ci.scope("x", number):
            ci.mark("m", number)
        assert ci.shutdown()
        assert threading.active_count() == threads
    assert _descriptors() == descriptors
    assert not list(Path(".cirron/run").glob("*.lock"))
    rows = read_spool()
    assert [one.index for one in rows.named("x")] == list(range(200))
    assert len(rows.named("cirron.session")) == 201


def test_the_users_random_streams_are_untouched() -> None:
    """Seeding changes none of our ids; we draw nothing from the user's streams (D.43, C-W24)."""

    def run(seeded_run_id: str | None) -> tuple[list[float], set[str]]:
        random.seed(42)
        np.random.seed(42)  # noqa: NPY002 - the stream that training programs use
        torch.manual_seed(42)
        if seeded_run_id is not None:
            ci.profile(frameworks=[], run_id=seeded_run_id)
        for _ in range(100):
            with ci.scope("x"):
                ci.mark("m", 1)
        if seeded_run_id is not None:
            assert ci.shutdown()
        drawn = [random.random(), float(np.random.random()), float(torch.rand(()))]  # noqa: NPY002
        return drawn, {one.id for one in read_spool().spans}

    plain, _ = run(None)
    first, ids = run("a")
    second, more = run("b")
    assert plain == first == second
    assert len(ids) == 101
    assert len(more) == 202, "an id came twice"
    assert {one.otel.trace_id for one in read_spool().named("cirron.session")}.__len__() == 2


def test_flushes_come_at_the_interval() -> None:
    """What was recorded is on disk one interval later, without anybody asking."""
    ci.profile(frameworks=[], flush_interval=0.1)
    with ci.scope("x"):
        pass
    deadline = time.monotonic() + 10
    while not read_spool().named("x"):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_sessions_row_tells_the_run() -> None:
    """Its attributes name pid and rank; the batches' resource names run, attempt and session."""
    profiler = ci.profile(frameworks=[], run_id="run-1")
    assert profiler.platform_context == {"run_id": "run-1"}
    assert ci.shutdown()
    rows = read_spool()
    session = rows.one("cirron.session")
    assert (session.parent_id, session.pid, session.rank) == (None, os.getpid(), 0)
    assert (session.attrs["pid"], session.attrs["rank"]) == (os.getpid(), 0)
    resource = rows.batches[-1].resource
    assert resource["cirron.run.id"] == "run-1"
    assert resource["cirron.session.id"] == session.id
    assert resource["process.pid"] == os.getpid()


def test_the_rank_is_the_one_when_profile_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    """``RANK`` set after the import counts, on the session and on every scope (C-W14)."""
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    ci.profile(frameworks=[])
    with ci.scope("x"):
        pass
    assert ci.shutdown()
    rows = read_spool()
    assert {one.rank for one in rows.spans} == {3}
    assert rows.one("cirron.session").attrs["rank"] == 3
    assert rows.batches[-1].resource["dl.world_size"] == 4


def test_the_session_links_to_what_it_came_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """``TRACEPARENT`` becomes a link of a trace of our own; a malformed one is ignored (C.35)."""
    for value, links in (
        ("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01", 1),
        ("nonsense", 0),
        ("00-" + "0" * 32 + "-" + "cd" * 8 + "-01", 0),
    ):
        monkeypatch.setenv("TRACEPARENT", value)
        ci.profile(frameworks=[])
        assert ci.shutdown()
        session = read_spool().named("cirron.session")[-1]
        assert len(session.otel.links or []) == links
        if links:
            assert session.otel.links[0]["trace_id"] == "ab" * 16
            assert session.otel.links[0]["span_id"] == "cd" * 8
        assert session.id[16:] != "ab" * 8


def test_a_flush_thread_that_keeps_dying_degrades(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Health tells of restarts and of the third death; what was recorded is not lost."""
    monkeypatch.setenv("CIRRON_OTEL_STRICT", "0")
    ci.profile(frameworks=[], flush_interval=60)
    rec = recorder._current
    assert rec is not None
    assert ci.flush()
    real, deaths = rec.flushes._flush, iter(range(3))

    def dying() -> None:
        if next(deaths, None) is not None:
            raise MemoryError
        real()

    rec.flushes._flush = dying
    with ci.scope("x"):
        ci.mark("m", 1)
    deadline = time.monotonic() + 20
    while ci.health()["flush_restart_count"] < 3:
        assert time.monotonic() < deadline
        rec.flushes.ring()
        time.sleep(0.01)
    assert ci.health()["flush_mode"] == "spool_only"
    assert ci.health()["swallowed_errors"]["flush_thread"] == 3
    assert ci.shutdown()
    assert tree_text(read_spool()) == "cirron.session\n  x"
    warnings = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1


def test_a_child_from_the_carrier_can_shut_down(run_program: RunProgram) -> None:
    """``shutdown()`` in a spawned child writes, undoes everything and ends recording there."""
    run = run_program(
        """
        import os, subprocess, sys, threading
        import cirron_otel as ci
        if len(sys.argv) > 1:
            before = threading.Thread.start, os._exit, threading.active_count()
            for attempt in range(3):
                with ci.scope("sub", attempt):
                    pass
                assert ci.shutdown()
                after = threading.Thread.start, os._exit, threading.active_count()
                assert before == after, (before, after)
            assert ci.health()["enabled"] is False
            sys.exit(0)
        ci.profile(frameworks=[])
        subprocess.run([sys.executable, __file__, "child"], check=True)
        """
    )
    assert tree_text(run) == "cirron.session\n  sub[0]"


def test_a_shutdown_on_another_thread_leaves_nothing_behind() -> None:
    """The next session is no continuation of the old one, though its span is still in context."""
    ci.profile(frameworks=[])
    thread = threading.Thread(target=ci.shutdown)
    thread.start()
    thread.join()
    with ci.scope("between"):
        pass
    ci.profile(frameworks=[])
    with ci.scope("x"):
        pass
    assert ci.shutdown()
    rows = read_spool()
    assert tree_text(rows) == "cirron.session\ncirron.session\n  x"
    assert not any(one.otel.links for one in rows.named("cirron.session"))


def test_a_thread_that_lives_through_two_recordings() -> None:
    """Its context holds scopes of the first; in the second it hangs under the new session."""
    go, done = threading.Event(), threading.Event()

    def work() -> None:
        with ci.scope("first"):
            assert go.wait(10)
            with ci.scope("second"):
                pass
        done.set()

    ci.profile(frameworks=[])
    with ci.scope("outer"):
        thread = threading.Thread(target=work)
        thread.start()
    assert ci.shutdown()
    ci.profile(frameworks=[])
    go.set()
    assert done.wait(10)
    thread.join()
    assert ci.shutdown()
    assert tree_text(read_spool()) == (
        "cirron.session\n  outer\n    first\ncirron.session\n  second"
    )


def test_a_scope_entered_before_profile_is_not_recorded() -> None:
    """It does nothing, also when it is left while a recording runs."""
    with ci.scope("early") as early:
        ci.profile(frameworks=[])
        assert early.id is None
        with ci.scope("in time"):
            pass
    assert ci.shutdown()
    assert tree_text(read_spool()) == "cirron.session\n  in time"
