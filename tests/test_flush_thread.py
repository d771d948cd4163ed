"""The flush thread: its beat, its deaths, its end."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from cirron_otel import flush_thread
from cirron_otel._guard import Guard
from cirron_otel.flush_thread import FlushThread
from helpers import RunProgram


class Flushes:
    """A flush function that counts, may wait and may fail."""

    def __init__(self) -> None:
        self.count = 0
        self.threads: set[int] = set()
        self.fail: BaseException | None = None
        self.hold: threading.Event | None = None
        self.entered = threading.Event()

    def __call__(self) -> None:
        """One flush."""
        self.count += 1
        self.threads.add(threading.get_ident())
        self.entered.set()
        if self.hold is not None:
            self.hold.wait(10)
        if self.fail is not None:
            raise self.fail


@pytest.fixture
def flushes() -> Flushes:
    """The flush function of a test."""
    return Flushes()


@pytest.fixture
def guard() -> Guard:
    """The guard of a test."""
    return Guard()


Make = Callable[[float], FlushThread]


@pytest.fixture
def make(flushes: Flushes, guard: Guard) -> Iterator[Make]:
    """Make a flush thread; it is stopped when the test ends."""
    made: list[FlushThread] = []

    def make(interval: float) -> FlushThread:
        made.append(FlushThread(interval, flushes, guard))
        return made[-1]

    yield make
    flushes.fail = None
    if flushes.hold is not None:
        flushes.hold.set()
    for one in made:
        one.stop(5)


def wait_for(condition: Callable[[], bool], timeout: float = 10) -> None:
    """Wait until a condition holds; fails the test when it never does."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it did not come about in time"
        time.sleep(0.005)


def test_it_starts_when_asked_and_beats_by_itself(make: Make, flushes: Flushes) -> None:
    """No thread before ``ensure()``; then a flush every interval, on a thread of its own."""
    one = make(0.02)
    assert not one.started
    assert not one.alive
    assert one.ensure()
    assert one.ensure()
    wait_for(lambda: flushes.count >= 3)
    assert threading.get_ident() not in flushes.threads
    assert len(flushes.threads) == 1
    assert one.last_duration_ns > 0
    names = [thread.name for thread in threading.enumerate()]
    assert names.count(flush_thread.THREAD_NAME) == 1


def test_a_request_is_done_at_once(make: Make, flushes: Flushes) -> None:
    """``request()`` does not wait for the interval, and returns after a whole flush."""
    one = make(3600)
    one.ensure()
    began = time.monotonic()
    for expected in range(1, 6):
        assert one.request(10)
        assert flushes.count == expected == one.done
    assert time.monotonic() - began < 5


def test_a_request_during_a_flush_waits_for_the_next_one(make: Make, flushes: Flushes) -> None:
    """What was queued after a flush began is in the flush that the request waits for."""
    one = make(3600)
    flushes.hold = threading.Event()
    one.ensure()
    one.ring()
    assert flushes.entered.wait(10)
    asked: list[bool] = []
    waiter = threading.Thread(target=lambda: asked.append(one.request(10)))
    waiter.start()
    wait_for(lambda: one.waited_for)
    flushes.hold.set()
    waiter.join(10)
    assert asked == [True]
    assert flushes.count == 2


def test_requests_from_many_threads_are_all_answered(make: Make, flushes: Flushes) -> None:
    """Several callers at once share flushes; each is told the truth."""
    one = make(3600)
    one.ensure()
    answers: list[bool] = []
    threads = [
        threading.Thread(target=lambda: answers.extend(one.request(10) for _ in range(20)))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert answers == [True] * 80
    assert flushes.count <= 81


def test_a_request_gives_up_in_time(make: Make, flushes: Flushes) -> None:
    """A flush that hangs holds nobody longer than the timeout (B.15)."""
    one = make(3600)
    flushes.hold = threading.Event()
    one.ensure()
    began = time.monotonic()
    assert not one.request(0.1)
    assert 0.1 <= time.monotonic() - began < 3


def test_without_a_thread_the_caller_flushes(make: Make, flushes: Flushes) -> None:
    """Before the start, and where no thread can be started, ``request()`` flushes itself."""
    one = make(3600)
    assert one.request(1)
    assert flushes.threads == {threading.get_ident()}


def test_a_flush_may_ask_for_a_flush(make: Make, guard: Guard) -> None:
    """A request from the flush thread itself cannot wait for itself: it gives up in time."""
    answers: list[bool] = []
    one = make(3600)
    inner = FlushThread(3600, lambda: answers.append(inner.request(0.05)), guard)
    inner.ensure()
    assert inner.request(10)
    assert inner.stop(5)
    assert answers[0] is False
    assert one.request(1)


def test_a_flush_that_dies_is_started_again(make: Make, flushes: Flushes, guard: Guard) -> None:
    """One death: counted, said, and the next flush comes after the back-off of a second."""
    one = make(0.01)
    flushes.fail = OSError("broken")
    one.ensure()
    wait_for(lambda: one.restarts == 1)
    flushes.fail = None
    count = flushes.count
    began = time.monotonic()
    wait_for(lambda: flushes.count > count + 2)
    assert time.monotonic() - began < 5
    assert one.alive
    assert not one.degraded
    assert guard.swallowed["flush_thread"] == 1


def test_a_request_cuts_the_back_off_short(make: Make, flushes: Flushes) -> None:
    """Whoever asks for a flush after a death does not wait for the back-off."""
    one = make(3600)
    flushes.fail = MemoryError()
    one.ensure()
    assert not one.request(0.2)
    flushes.fail = None
    assert one.request(0.9)


def test_three_deaths_within_a_minute_degrade(make: Make, flushes: Flushes) -> None:
    """It goes on trying, and says ``degraded`` from the third death on, for good."""
    one = make(0.01)
    flushes.fail = RuntimeError("again")
    one.ensure()
    for deaths in range(1, 4):
        wait_for(lambda wanted=deaths: one.restarts >= wanted)  # type: ignore[misc]
        assert one.degraded == (deaths >= 3)
        one.ring()
    flushes.fail = None
    assert one.request(10)
    assert one.alive
    assert one.degraded


def test_stop_flushes_once_more_and_ends(make: Make, flushes: Flushes) -> None:
    """After ``stop()`` there is no thread, and none is started again."""
    one = make(3600)
    one.ensure()
    assert one.stop(10)
    assert flushes.count == 1
    assert not one.alive
    assert not one.ensure()
    assert one.request(1)
    assert flushes.count == 2


def test_stop_is_bounded(make: Make, flushes: Flushes) -> None:
    """A flush that hangs does not hold the end of the process (B.15, B.17)."""
    one = make(3600)
    flushes.hold = threading.Event()
    one.ensure()
    began = time.monotonic()
    assert not one.stop(0.2)
    assert time.monotonic() - began < 3
    flushes.hold.set()
    wait_for(lambda: not one.alive)


def test_a_dead_thread_is_not_waited_for(make: Make, flushes: Flushes) -> None:
    """Where the thread does not exist (any more), nobody waits for it (A.7)."""
    one = make(3600)
    one.ensure()
    assert one.stop(10)
    began = time.monotonic()
    assert one.request(30)
    assert time.monotonic() - began < 5
    assert threading.get_ident() in flushes.threads


def test_a_forked_child_has_no_thread_until_it_asks(run_program: RunProgram) -> None:
    """``reset()`` makes every lock new, also one held while the fork happened (A.1, A.5)."""
    run = run_program(
        """
        import os, threading, warnings
        warnings.simplefilter("ignore")
        from cirron_otel._guard import Guard
        from cirron_otel.flush_thread import FlushThread
        hold, entered, parent = threading.Event(), threading.Event(), os.getpid()
        def flush():
            entered.set()
            if os.getpid() == parent:
                hold.wait(20)
        one = FlushThread(3600, flush, Guard())
        one.ensure(); one.ring(); entered.wait(10)
        child = os.fork()
        if not child:
            one.reset()
            assert not one.started and not one.alive
            assert one.request(1)
            assert one.ensure() and one.request(5) and one.stop(5)
            os._exit(7)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        hold.set()
        assert one.stop(5)
        """,
        measured=False,
    )
    assert run.completed.returncode == 0
