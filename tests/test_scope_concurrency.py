"""Scopes in threads, pools and tasks: parents come with the context, nothing is lost."""

from __future__ import annotations

import _thread
import asyncio
import contextvars
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from opentelemetry import trace

import cirron_otel as ci
from helpers import Rows, read_spool, tree_text


@pytest.fixture(autouse=True)
def _recording() -> None:
    """Every test here records into its own directory."""
    ci.profile(frameworks=[])


def finished() -> Rows:
    """Everything that was recorded, after an orderly shutdown."""
    assert ci.shutdown()
    return read_spool()


def canonical(rows: Rows) -> str:
    """The tree below the session, as text."""
    return "\n".join(line[2:] for line in tree_text(rows).splitlines()[1:])


def in_thread(target: object, *args: object) -> None:
    """Run to its end in a thread of its own."""
    thread = threading.Thread(target=target, args=args)  # type: ignore[arg-type]
    thread.start()
    thread.join()


def test_a_thread_started_inside_a_scope_records_under_it() -> None:
    """Threads carry the context they were started in, and their own ident (C-W17)."""

    def work() -> None:
        with ci.scope("work"):
            ci.mark("m", 1)

    with ci.scope("outer"):
        in_thread(work)
    rows = finished()
    assert canonical(rows) == "outer\n  work"
    assert rows.one("work").thread_id != rows.one("outer").thread_id == threading.get_ident()
    assert [m.name for m in rows.marks_of(rows.one("work"))] == ["m"]


def test_a_subclass_with_its_own_run_records_under_its_starter() -> None:
    """Overridden ``run`` and ``threading.Timer`` are carried too, and stay themselves."""

    class Worker(threading.Thread):
        def run(self) -> None:
            with ci.scope("worker"):
                pass

    with ci.scope("outer"):
        worker = Worker()
        worker.start()
        worker.join()
        assert "run" not in vars(worker)
        timer = threading.Timer(0.01, ci.scope("timer")(int))
        timer.start()
        timer.join()
    assert canonical(finished()) == "outer\n  worker\n  timer"


def test_a_raw_thread_without_context_hangs_under_the_session() -> None:
    """No context means the session, never a null parent (C-W17)."""
    done = threading.Event()

    def work() -> None:
        with ci.scope("raw"):
            ci.mark("m", 1)
        ci.mark("on session", 2)
        done.set()

    with ci.scope("elsewhere"):
        _thread.start_new_thread(work, ())
        assert done.wait(10)
    rows = finished()
    assert canonical(rows) == "elsewhere\nraw"
    names = [m.name for m in rows.marks_of(rows.one("cirron.session"))]
    assert "on session" in names


def test_a_pool_records_under_the_scope_that_submitted() -> None:
    """Each job of a ``ThreadPoolExecutor`` has its submitter's scope as parent (C.27)."""

    def work(number: int) -> int:
        with ci.scope("job", number):
            return number

    with ThreadPoolExecutor(2) as pool:
        with ci.scope("first"):
            assert list(pool.map(work, range(3))) == [0, 1, 2]
        with ci.scope("second"):
            assert pool.submit(work, 9).result() == 9
        outside = pool.submit(work, 5)
        assert outside.result() == 5
    rows = finished()
    for name, indices in (("first", {0, 1, 2}), ("second", {9}), ("cirron.session", {5})):
        found = {one.index for one in rows.children(rows.one(name)) if one.name == "job"}
        assert found == indices


def test_a_job_that_outlives_its_submitter_hangs_higher() -> None:
    """An ended scope takes no children; its parent does (C.27, decision 17)."""
    go = threading.Event()

    def work() -> None:
        assert go.wait(10)
        with ci.scope("late"):
            pass

    with ci.scope("outer"):
        with ci.scope("inner"):
            thread = threading.Thread(target=work)
            thread.start()
        go.set()
        thread.join()
    assert canonical(finished()) == "outer\n  inner\n  late"


def test_fifty_threads_one_after_the_other_lose_nothing() -> None:
    """Recycled thread idents replace nobody's rows (C-W5)."""
    idents: set[int] = set()

    def work(number: int) -> None:
        idents.add(threading.get_ident())
        with ci.scope("work", number):
            ci.mark("m", number)

    for number in range(50):
        in_thread(work, number)
    rows = finished()
    assert len(idents) < 50, "no ident was used twice, the test proves nothing"
    assert [one.index for one in rows.named("work")] == list(range(50))
    assert sorted(m.value for m in rows.marks if m.name == "m") == list(range(50))


def test_many_threads_at_once_lose_nothing() -> None:
    """Eight threads at full speed: every row is there once, under its own parent."""

    def work(number: int) -> None:
        with ci.scope("thread", number):
            for step in range(500):
                with ci.scope("step", step):
                    ci.mark("m", step)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    rows = finished()
    assert len({one.id for one in rows.spans}) == len(rows.spans) == 8 + 4000 + 1
    assert len({m.id for m in rows.marks}) == len(rows.marks)
    for one in rows.named("thread"):
        below = rows.children(one)
        assert [step.index for step in below] == list(range(500))
        assert {step.thread_id for step in below} == {one.thread_id}


def test_a_scope_may_be_left_on_another_thread() -> None:
    """Opened here, closed there: it ends, and the closing thread's context is left alone."""
    scope = ci.scope("moved")
    scope.__enter__()

    def leave() -> None:
        with ci.scope("other thread"):
            scope.__exit__(None, None, None)
            with ci.scope("still inside"):
                pass

    done = threading.Event()
    _thread.start_new_thread(lambda: (leave(), done.set()), ())
    assert done.wait(10)
    with ci.scope("after"):
        pass
    assert canonical(finished()) == "moved\nother thread\n  still inside\nafter"


def test_overlapping_tasks_keep_their_own_scopes() -> None:
    """Tasks of one loop interleave; each one's scopes hang under its own parent (p7 of §18)."""

    async def task(number: int) -> None:
        async with ci.scope("task", number):
            for step in range(3):
                with ci.scope("step", number * 10 + step):
                    await asyncio.sleep(0.002 * (3 - number))

    async def main() -> None:
        with ci.scope("main"):
            await asyncio.gather(*(task(number) for number in range(3)))

    asyncio.run(main())
    rows = finished()
    main_row = rows.one("main")
    assert {one.parent_id for one in rows.named("task")} == {main_row.id}
    for one in rows.named("task"):
        assert [step.index // 10 for step in rows.children(one)] == [one.index] * 3


def test_a_task_that_outlives_the_scope_it_was_made_in() -> None:
    """The parent has ended meanwhile: later scopes of the task hang under what is still open."""

    async def late(go: asyncio.Event) -> None:
        await go.wait()
        with ci.scope("late"):
            pass

    async def main() -> None:
        go = asyncio.Event()
        with ci.scope("outer"):
            with ci.scope("inner"):
                task = asyncio.create_task(late(go))
            go.set()
            await task

    asyncio.run(main())
    assert canonical(finished()) == "outer\n  inner\n  late"


def test_to_thread_and_executors_of_a_loop_carry_the_scope() -> None:
    """``asyncio.to_thread`` runs under the awaiting scope."""

    def work() -> None:
        with ci.scope("work"):
            pass

    async def main() -> None:
        async with ci.scope("outer"):
            await asyncio.to_thread(work)
            await asyncio.get_running_loop().run_in_executor(None, work)

    asyncio.run(main())
    assert canonical(finished()) == "outer\n  work\n  work"


def test_an_exception_in_a_task_group_reaches_each_scope() -> None:
    """The failing task's scope bears its error, the cancelled ones' ``CancelledError``."""

    async def task(number: int) -> None:
        async with ci.scope("task", number):
            await asyncio.sleep(0.01)
            if number == 0:
                raise ValueError("zero")
            await asyncio.sleep(60)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(3):
                group.create_task(task(number))

    with pytest.raises(ExceptionGroup):
        asyncio.run(main())
    errors = {one.index: one.attrs["error"] for one in finished().named("task")}
    assert errors == {0: "ValueError: zero", 1: "CancelledError", 2: "CancelledError"}


def test_a_copied_context_carries_the_scope() -> None:
    """``contextvars.copy_context().run`` is enough, as for any OpenTelemetry span."""

    def work() -> None:
        assert trace.get_current_span().is_recording()
        with ci.scope("work"):
            pass

    with ci.scope("outer"):
        context = contextvars.copy_context()
    with ci.scope("kept") as kept:
        held = contextvars.copy_context()
        held.run(work)
        assert kept.is_open
    context.run(lambda: ci.scope("late").__enter__().__exit__(None, None, None))
    assert canonical(finished()) == "outer\nkept\n  work\nlate"


def test_profile_on_another_thread_serves_all() -> None:
    """A session opened in a thread that has ended is still everybody's root."""
    ci.shutdown()
    first = len(read_spool().spans)
    in_thread(lambda: ci.profile(frameworks=[]))
    with ci.scope("main thread"):
        time.sleep(0.001)
    rows = finished()
    session = rows.named("cirron.session")[-1]
    assert first == 1
    assert rows.one("main thread").parent_id == session.id
    assert Path(".cirron/spool").is_dir()
