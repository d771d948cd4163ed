"""Attempts: counted by the run directory, the same on all ranks whatever became of each before."""

from __future__ import annotations

import os
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from cirron_otel import run_state
from cirron_otel.recovery import WriterLock
from cirron_otel.run_state import RunState
from helpers import RunProgram

RUN = "a run/of mine"


class Rank:
    """A process of one rank, as far as the run directory knows of it."""

    def __init__(self, directory: Path, rank: int, world: int, *, locks: bool = True) -> None:
        self.state: RunState = run_state.begin(directory, RUN, rank, 0, world_size=world)
        self.lock: WriterLock | None = None
        if locks:
            self.lock = WriterLock.acquire(
                directory, host="node", pid=rank + 1, start_ns=time.time_ns()
            )
            self.state.holds(self.lock.name)

    @property
    def attempt(self) -> int:
        """Which attempt it takes itself for."""
        return self.state.attempt

    def die(self) -> None:
        """As by a signal: the lock is free, its file stays."""
        assert self.lock is not None
        self.lock.close_in_child()


def started(directory: Path, ranks: range, world: int) -> list[Rank]:
    """These ranks, one after the other."""
    return [Rank(directory, rank, world) for rank in ranks]


def attempts(ranks: list[Rank]) -> set[int]:
    """The attempts they take themselves for."""
    return {rank.attempt for rank in ranks}


def test_ranks_agree(tmp_path: Path) -> None:
    """All ranks of one start are of one attempt, in whatever order they come."""
    first = started(tmp_path, range(4), 4)
    assert attempts(first) == {1}
    for rank in first:
        rank.die()
    second = [Rank(tmp_path, rank, 4) for rank in (2, 0, 3, 1)]
    assert attempts(second) == {2}
    for rank in second:
        assert rank.lock is not None
        rank.lock.release()
    assert attempts(started(tmp_path, range(4), 4)) == {3}


def test_a_rank_that_was_missing_catches_up(tmp_path: Path) -> None:
    """A rank that never came as far as recording in one attempt is of the next one all the same."""
    for world in (2, 1):  # rank 1 is not there in the second attempt
        for rank in started(tmp_path, range(world), 2):
            rank.die()
    assert attempts(started(tmp_path, range(1, 2), 2)) == {3}
    assert attempts(started(tmp_path, range(1), 2)) == {3}


def test_a_rank_that_comes_when_others_are_done(tmp_path: Path) -> None:
    """A rank that begins when another has completed its part is of the same attempt."""
    first = Rank(tmp_path, 0, 2)
    first.state.save(7, "completed")
    first.die()
    assert Rank(tmp_path, 1, 2).attempt == 1
    first.state.save(7, "failed")
    assert Rank(tmp_path, 1, 2).attempt == 2


def test_more_ranks_than_before(tmp_path: Path) -> None:
    """An elastic run that goes on with more ranks is one attempt on all of them."""
    for rank in started(tmp_path, range(2), 2):
        rank.die()
    assert attempts([Rank(tmp_path, rank, 4) for rank in (3, 0, 2, 1)]) == {2}


def test_a_rank_that_is_still_dying(tmp_path: Path) -> None:
    """An old process that is about to be ended does not hold the new attempt back."""
    old = started(tmp_path, range(2), 2)
    old[0].die()
    assert Rank(tmp_path, 0, 2).attempt == 2  # rank 1 of the first attempt still lives
    old[1].die()
    assert Rank(tmp_path, 1, 2).attempt == 2


def test_without_locks_the_last_word_counts(tmp_path: Path) -> None:
    """Where no rank can hold a lock, one that has just spoken is taken to be there."""
    assert Rank(tmp_path, 0, 2, locks=False).attempt == 1
    assert Rank(tmp_path, 1, 2, locks=False).attempt == 1
    for path in tmp_path.glob("*.state"):
        os.utime(path, (1, 1))
    assert Rank(tmp_path, 1, 2, locks=False).attempt == 2
    assert Rank(tmp_path, 0, 2, locks=False).attempt == 2


def test_another_run_and_broken_files_say_nothing(tmp_path: Path) -> None:
    """What another run has left, or what cannot be read, counts for nothing."""
    run_state.state_file(tmp_path, RUN, 1).write_bytes(b"{")
    assert Rank(tmp_path, 0, 2).attempt == 1
    run_state.begin(tmp_path, "other", 0, 0)
    assert run_state.begin(tmp_path, "third", 0, 0, world_size=2).attempt == 1


def test_threads_of_a_rank_write_different_files_at_a_time(tmp_path: Path) -> None:
    """State and heartbeat are written side by side: neither takes the other's place, or fails."""
    paths = [run_state.state_file(tmp_path, RUN, 0, suffix) for suffix in (".state", ".beat")]

    def write(path: Path) -> bool:
        said = [run_state.replace(path, path.name.encode() * 100) for _ in range(300)]
        return all(said)

    with ThreadPoolExecutor(2) as pool:
        assert all(pool.map(write, paths))
    assert [path.read_bytes()[: len(path.name)] for path in paths] == [
        path.name.encode() for path in paths
    ]
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_an_outcome_that_could_not_be_written_is_written_later(tmp_path: Path) -> None:
    """Nothing is taken for saved that is not on the disk."""
    directory = tmp_path / "run"
    state = run_state.begin(directory, RUN, 0, 5)
    shutil.rmtree(directory)
    state.save(5, "completed")
    directory.mkdir()
    state.save(5, "completed")
    assert run_state.begin(directory, RUN, 1, 0, world_size=2).attempt == 1
    assert b'"outcome":"completed"' in run_state.state_file(directory, RUN, 0).read_bytes()


PROGRAM = """
    import os
    import subprocess
    import sys

    if len(sys.argv) > 1:
        import cirron_otel as ci
        profiler = ci.profile(frameworks=[], terminal="none")
        for _ in ci.batches(range(3)):
            pass
        ci.flush()
        print(profiler.health()["attempt"], flush=True)
        sys.stdin.read()
        os.kill(os.getpid(), 9)

    def attempt(counts):
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank"],
                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                     "TORCHELASTIC_RUN_ID": "shared", "TORCHELASTIC_RESTART_COUNT": str(count)},
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            )
            for rank, count in counts.items()
        ]
        said = [rank.stdout.readline().strip() for rank in ranks]
        for rank in ranks:
            rank.communicate("")
        print(*said)

    attempt({0: 0, 1: 0})
    attempt({0: 1})  # the other one is killed before it can record
    attempt({0: 1, 1: 0})
"""


@pytest.mark.slow
def test_launchers_counts_have_no_part_in_it(run_program: RunProgram) -> None:
    """Two ranks whose launcher counts their restarts differently are one attempt (D.115)."""
    run = run_program(PROGRAM)
    assert run.stdout.split() == ["1", "1", "2", "3", "3"]
    attempts = {
        (batch.resource["cirron.run.attempt"], batch.resource["dl.rank"])  # type: ignore[index]
        for batch in run.batches
    }
    assert attempts == {(1, 0), (1, 1), (2, 0), (3, 0), (3, 1)}
    assert {batch.resource["cirron.run.id"] for batch in run.batches} == {"shared"}  # type: ignore[index]
