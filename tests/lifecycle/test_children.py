"""Child processes: each writes its own rows, once, under the right parent."""

from __future__ import annotations

import pytest

from helpers import ProgramRun, RunProgram, tree_text


def assert_own_rows_only(run: ProgramRun) -> None:
    """No row is in two files, and each file has rows of the process that wrote it (C-W14)."""
    ids = [one.id for one in run.spans] + [m.id for m in run.marks]
    assert len(set(ids)) == len(ids), "a row was written twice"
    for batch in run.batches:
        assert isinstance(batch.writer, str)
        pid = int(batch.writer.rsplit("-", 2)[1])
        assert {one.pid for one in batch.spans} <= {pid}
        assert batch.resource["process.pid"] == pid
    assert not run.open


CHILDREN = """
import multiprocessing as mp, os, sys
import cirron_otel as ci

def work(number):
    with ci.scope("child", number, mine=True):
        ci.mark("m", number)
    if number == 2:
        os._exit(0)
    if number == 3:
        sys.exit(5)
    if number == 4:
        ci.scope("left open").__enter__()

if __name__ == "__main__":
    ci.profile(frameworks=[], flush_interval=60)
    with ci.scope("before"):
        ci.mark("of the parent", 1)
    context = mp.get_context({method!r})
    with ci.scope("outer"):
        with ci.scope("start"):
            children = [context.Process(target=work, args=(n,)) for n in range(5)]
            for child in children:
                child.start()
            for child in children:
                child.join()
    print([child.exitcode for child in children])
    with ci.scope("after"):
        pass
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_children_of_multiprocessing(run_program: RunProgram, method: str) -> None:
    """Whatever the start method: own rows, pid, parent and exit status (A.1, A.12)."""
    run = run_program(CHILDREN.format(method=method))
    assert run.stdout == "[0, 0, 0, 5, 0]\n"
    assert run.stderr == ""
    assert_own_rows_only(run)
    children = run.named("child")
    session = run.one("cirron.session")
    assert sorted(one.index for one in children) == [0, 1, 2, 3, 4]
    assert len({one.pid for one in children} | {session.pid}) == 6
    # A forked child stands where it was forked; others know the session of their parent.
    above = run.one("start") if method == "fork" else session
    assert {one.parent_id for one in children} == {above.id}
    assert [len(run.marks_of(one)) for one in children] == [1] * 5
    assert run.one("left open").attrs == {"cirron.truncated": True}
    assert len([m for m in run.marks if m.name == "of the parent"]) == 1
    assert {one.otel.trace_id for one in children} == {session.otel.trace_id}


def test_a_raw_fork_keeps_to_itself(run_program: RunProgram) -> None:
    """``os.fork`` with pending rows and open scopes: the child repeats and closes none of them."""
    run = run_program(
        """
        import os, sys
        import cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=60)
        outer = ci.scope("outer").__enter__()
        for number in range(500):
            with ci.scope("pending", number):
                ci.mark("m", number)
        status = []
        for way in ("os._exit", "sys.exit", "silent", "shutdown", "exits outer"):
            pid = os.fork()
            if not pid:
                if way != "silent":
                    with ci.scope("child", way=way):
                        with ci.scope("below"):
                            pass
                if way == "exits outer":
                    outer.__exit__(None, None, None)
                if way == "shutdown":
                    assert ci.shutdown()
                    with ci.scope("too late"):
                        pass
                if way == "os._exit":
                    os._exit(9)
                sys.exit(9)
            status.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
        outer.__exit__(None, None, None)
        print(status)
        """
    )
    assert run.stdout == "[9, 9, 9, 9, 9]\n"
    assert_own_rows_only(run)
    outer = run.one("outer")
    assert len(run.named("pending")) == 500
    assert [one.attrs["way"] for one in run.named("child")] == [
        "os._exit", "sys.exit", "shutdown", "exits outer",
    ]  # fmt: skip
    assert {one.parent_id for one in run.named("child")} == {outer.id}
    assert len({one.pid for one in run.named("child")}) == 4
    assert all(run.children(one)[0].name == "below" for one in run.named("child"))
    assert "cirron.truncated" not in outer.attrs
    assert len(run.named("cirron.session")) == 1
    assert not run.named("too late")


def test_a_grandchild_and_a_forking_thread(run_program: RunProgram) -> None:
    """A fork in a fork, and one from a thread inside a scope, find their parents."""
    run = run_program(
        """
        import os, threading
        import cirron_otel as ci
        ci.profile(frameworks=[])
        def fork(body):
            pid = os.fork()
            if not pid:
                body()
                os._exit(0)
            os.waitpid(pid, 0)
        def grandchild():
            with ci.scope("grandchild"):
                pass
        def child():
            with ci.scope("child"):
                fork(grandchild)
        def thread():
            with ci.scope("thread"):
                fork(lambda: ci.scope("of thread").__enter__().__exit__(None, None, None))
        with ci.scope("outer"):
            fork(child)
            one = threading.Thread(target=thread)
            one.start()
            one.join()
        """
    )
    assert tree_text(run) == (
        "cirron.session\n  outer\n    child\n      grandchild\n    thread\n      of thread"
    )
    assert_own_rows_only(run)


def test_a_subprocess_joins_by_the_environment(run_program: RunProgram) -> None:
    """A program started by the run records into it at its first scope, and not before (A.12)."""
    run = run_program(
        """
        import os, subprocess, sys
        import cirron_otel as ci
        if len(sys.argv) > 1:
            assert ci.health()["enabled"] is False
            if sys.argv[1] == "records":
                for number in range(2):
                    with ci.scope("sub", number):
                        ci.mark("m", number)
            sys.exit(0)
        ci.profile(frameworks=[], run_id="run-7")
        assert "CIRRON_OTEL_CARRIER" in os.environ
        for word in ("records", "silent"):
            subprocess.run([sys.executable, __file__, word], check=True)
        ci.shutdown()
        assert "CIRRON_OTEL_CARRIER" not in os.environ
        subprocess.run([sys.executable, __file__, "records"], check=True)
        """
    )
    assert tree_text(run) == "cirron.session\n  sub[0]\n  sub[1]"
    assert_own_rows_only(run)
    assert {batch.resource["cirron.run.id"] for batch in run.batches} == {"run-7"}


def test_fifty_forks_while_the_flush_thread_writes(run_program: RunProgram) -> None:
    """Forking at any moment of a flush: no child hangs, every row is there once (A.11, C-W30)."""
    run = run_program(
        """
        import os, signal, threading, time
        import cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=0.001)
        stop = threading.Event()
        def noise():
            number = 0
            while not stop.is_set():
                with ci.scope("noise", number):
                    ci.mark("n", number)
                number += 1
                if number % 20 == 0:
                    time.sleep(0.001)
        thread = threading.Thread(target=noise)
        thread.start()
        for number in range(50):
            pid = os.fork()
            if not pid:
                signal.alarm(20)  # a hang ends as SIGALRM, which the parent sees
                with ci.scope("child", number):
                    ci.mark("c", number)
                os._exit(0)
            status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            assert status == 0, (number, status)
        stop.set()
        thread.join()
        """
    )
    assert_own_rows_only(run)
    assert sorted(one.index for one in run.named("child")) == list(range(50))
    assert [one.index for one in run.named("noise")] == list(range(len(run.named("noise"))))
    assert sorted(m.value for m in run.marks if m.name == "c") == list(range(50))


def test_nothing_of_ours_runs_in_a_child_that_records_nothing(run_program: RunProgram) -> None:
    """No thread, no file, no descriptor of ours in a child that opens no scope (A.5, A.10)."""
    run = run_program(
        """
        import os, threading
        from pathlib import Path
        import cirron_otel as ci
        ci.profile(frameworks=[], flush_interval=0.01)
        with ci.scope("x"):
            pass
        assert ci.flush()
        before = sorted(Path(".cirron").rglob("*"))
        pid = os.fork()
        if not pid:
            held = [os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")
                    if os.path.lexists(f"/proc/self/fd/{fd}")]
            ours = [path for path in held if ".cirron" in path]
            threads = [t.name for t in threading.enumerate() if t is not threading.current_thread()]
            os._exit(1 if ours or threads else 0)
        assert os.waitpid(pid, 0)[1] == 0
        assert sorted(Path(".cirron").rglob("*")) == before
        """
    )
    assert len({batch.writer for batch in run.batches}) == 1


def test_a_worker_pool_records_every_task(run_program: RunProgram) -> None:
    """Tasks of a ``multiprocessing.Pool`` arrive, also when the pool is terminated (A.1, B.18)."""
    run = run_program(
        """
        import multiprocessing as mp
        import cirron_otel as ci
        def work(number):
            with ci.scope("task", number):
                return number
        if __name__ == "__main__":
            ci.profile(frameworks=[], flush_interval=0.05)
            with ci.scope("pool"):
                with mp.get_context("fork").Pool(2) as pool:
                    assert pool.map(work, range(20)) == list(range(20))
            print("end")
        """
    )
    assert run.stdout == "end\n"
    assert sorted(one.index for one in run.named("task")) == list(range(20))
    assert_own_rows_only(run)


def test_a_child_that_profiles_itself_has_a_session_of_its_own(run_program: RunProgram) -> None:
    """``ci.profile()`` in a spawned program is that program's own choice, carrier or not."""
    run = run_program(
        """
        import subprocess, sys
        import cirron_otel as ci
        ci.profile(frameworks=[])
        with ci.scope("x" if len(sys.argv) == 1 else "y"):
            if len(sys.argv) == 1:
                subprocess.run([sys.executable, __file__, "child"], check=True)
        """
    )
    assert sorted(tree_text(run).splitlines()) == ["  x", "  y", *["cirron.session"] * 2]
    assert_own_rows_only(run)
