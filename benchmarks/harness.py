"""What every benchmark here shares: sides as processes, rounds in turn, rows with a verdict.

A *side* is one of the things compared (we, a peer, the plain program). Each runs in a process of
its own, because the libraries patch the process they live in and would disturb one another. The
sides of a comparison take turns within every round, the order rotating, so that a slow minute of
the machine falls on all of them; a ratio is the median of the ratios of the rounds.

A group of rows is one file: functions for its sides, which the parent starts by running the file
itself (:func:`child`), and ``measure(bench)``, which returns the rows.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SIDE_TIMEOUT_S = 600
_SAMPLE_S = 0.005
_ERROR_LINES = 6

Result = dict[str, Any]
Round = dict[str, Result]


class SideError(Exception):
    """A side did not run, or did not do what it is measured for."""


@dataclass(frozen=True)
class Row:
    """One line of the table: what was measured, what it must be, what it should become.

    ``measured``, ``must`` and ``goal`` are in ``unit``; smaller is better. Without a ``must`` the
    row only informs.
    """

    work: str
    ours: str
    peer: str
    measured: float | None
    unit: str
    must: float | None = None
    goal: float | None = None
    note: str = ""

    @property
    def verdict(self) -> str:
        """How the number stands to what is promised."""
        if self.measured is None:
            return "NOT MEASURED"
        if self.must is None:
            return "for information"
        if self.goal is not None and self.measured <= self.goal:
            return "met goal"
        return "met must" if self.measured <= self.must else "MISSED"

    def cells(self) -> list[str]:
        """The row as the table prints it."""
        return [
            self.work,
            self.ours,
            self.peer,
            quantity(self.measured, self.unit),
            quantity(self.must, self.unit, "<= "),
            quantity(self.goal, self.unit, "<= "),
            self.verdict,
        ]

    def to_json(self) -> Result:
        """The row for the file of the run."""
        return {**asdict(self), "verdict": self.verdict}


HEAD = ["work", "ours", "peer", "measured", "must", "goal", "verdict"]


def quantity(value: float | None, unit: str, before: str = "") -> str:
    """A number with its unit: three digits after the point where it is small, fewer above."""
    if value is None:
        return "-"
    size = abs(value)
    digits = 0 if value == int(value) or size >= 100 else 3 if size < 1 else 2  # noqa: PLR2004
    return f"{before}{value:.{digits}f} {unit}".rstrip()


def microseconds(value: float) -> str:
    """``2.13 us``."""
    return quantity(value, "us")


# --- running sides --------------------------------------------------------------------------------


@dataclass
class Bench:
    """One run: how thorough it is, and everything it measured."""

    quick: bool
    raw: dict[str, list[Round]] = field(default_factory=dict)
    say: Callable[[str], None] = print

    def pick(self, full: int, quick: int) -> int:
        """A number of repetitions."""
        return quick if self.quick else full

    def rounds(  # noqa: PLR0913, PLR0917 - what a comparison is made of
        self,
        name: str,
        script: str,
        sides: Sequence[str],
        rounds: int,
        params: Result,
        inspect: Callable[[Path], Result] | None = None,
        *,
        watch_memory: bool = False,
    ) -> list[Round]:
        """Run the sides in turn, ``rounds`` times; keeps every result under ``name``.

        ``inspect`` is given the directory a side ran in, after the side has ended; what it returns
        is added to the side's result. Raises :class:`SideError`.
        """
        done: list[Round] = []
        for number in range(rounds):
            turn = number % len(sides)
            taken: Round = {}
            for side in [*sides[turn:], *sides[:turn]]:
                taken[side] = run_side(script, side, params, inspect, watch_memory=watch_memory)
            done.append(taken)
            self.say(f"  {name}: round {number + 1} of {rounds}")
        self.raw[name] = done
        return done


def run_side(
    script: str,
    side: str,
    params: Result,
    inspect: Callable[[Path], Result] | None = None,
    *,
    watch_memory: bool = False,
) -> Result:
    """Run one side once, in a process and an empty directory of its own."""
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        directory = Path(name)
        process = subprocess.Popen(
            [sys.executable, str(HERE / script), side, json.dumps(params)],
            cwd=directory,
            env=environment(directory),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        limit = threading.Timer(SIDE_TIMEOUT_S, process.kill)
        limit.start()
        memory: Result = {}
        try:
            if watch_memory:
                memory = _start_watched(process)
            out, err = process.communicate()
        finally:
            limit.cancel()
            if process.poll() is None:
                process.kill()
                process.wait()
        if process.returncode != 0:
            last = " / ".join(err.strip().splitlines()[-_ERROR_LINES:])
            raise SideError(f"{script} {side} ended with {process.returncode}: {last}")
        result: Result = json.loads(out.strip().splitlines()[-1])
        if memory:
            result["growth_bytes"] = memory["peak"] - memory["base"]
        if inspect is not None:
            result.update(inspect(directory))
        return result


def environment(home: Path) -> dict[str, str]:
    """What a side sees: nothing that configures a library under comparison, no user's files."""
    kept = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH")
    out = {key: os.environ[key] for key in kept if key in os.environ}
    return {**out, "HOME": str(home), "PYTHONHASHSEED": "0"}


def _start_watched(process: subprocess.Popen[str]) -> Result:
    """Let a side that called :func:`ready` go on, and sample its memory until it ends."""
    assert process.stdout is not None  # noqa: S101 - it was asked for
    assert process.stdin is not None  # noqa: S101 - as above
    line = process.stdout.readline()
    if line.strip() != "ready":
        return {}
    base = _resident_bytes(process.pid)
    memory = {"base": base, "peak": base}

    def sample() -> None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            while process.returncode is None:
                memory["peak"] = max(memory["peak"], _resident_bytes(process.pid))
                time.sleep(_SAMPLE_S)

    threading.Thread(target=sample, daemon=True).start()
    process.stdin.write("go\n")
    process.stdin.flush()
    return memory


def _resident_bytes(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


# --- inside a side --------------------------------------------------------------------------------


def child(sides: dict[str, Callable[..., Result]]) -> None:
    """What the file of a group does when it is run: one side, its result as the last line."""
    side, params = sys.argv[1], json.loads(sys.argv[2])
    result = sides[side](**params)
    sys.stdout.write(json.dumps(result) + "\n")


def ready() -> None:
    """Tell the parent, which watches the memory, that what is measured begins; waits for it."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.readline()


def load(name: str) -> Any:  # noqa: ANN401 - a library under comparison
    """Import a library that only one side may load."""
    return importlib.import_module(name)


# --- looking at what a side wrote -----------------------------------------------------------------


def spool_rows(directory: Path) -> Result:
    """How many spans and marks of each name are in the spool, and how many bytes that takes.

    ``ids`` counts the different span and mark ids, so that a row written twice does not make up
    for one that was lost; ``strays`` counts the marks whose span is not there.
    """
    decoder = load("msgspec").json.Decoder(_batch_type())
    spans: Counter[str] = Counter()
    marks: Counter[str] = Counter()
    span_ids: set[str] = set()
    mark_ids: set[str] = set()
    owners: set[str] = set()
    size = 0
    for path in sorted(directory.glob(".cirron/spool/*.json")):
        data = path.read_bytes()
        size += len(data)
        batch = decoder.decode(data)
        spans.update(one.name for one in batch.spans)
        marks.update(one.name for one in batch.marks)
        span_ids.update(one.id for one in batch.spans)
        mark_ids.update(one.id for one in batch.marks)
        owners.update(one.span_id for one in batch.marks)
    return {
        "spans": dict(spans),
        "marks": dict(marks),
        "ids": len(span_ids) + len(mark_ids),
        "strays": len(owners - span_ids),
        "spool_bytes": size,
    }


def _batch_type() -> Any:  # noqa: ANN401 - a class, made where msgspec is loaded
    """As much of a batch as is counted; a decoder passes over the rest."""
    make = load("msgspec").defstruct
    span = make("Span", [("id", str), ("name", str)], gc=False)
    mark = make("Mark", [("id", str), ("name", str), ("span_id", str)], gc=False)
    return make(
        "Batch",
        [("spans", types.GenericAlias(list, span)), ("marks", types.GenericAlias(list, mark))],
    )


def expect_rows(  # noqa: PLR0913 - five say which rows, one is an exception
    rounds: Iterable[Round], side: str, kind: str, name: str, count: int, *, may_lack: int = 0
) -> None:
    """Raise :class:`SideError` unless the side wrote ``count`` rows in every round.

    A library that is quick because it loses or skips what it is asked to record has no number.
    ``may_lack`` is for a peer that loses a row now and then, too few to make it any quicker.
    """
    for one in rounds:
        found = one[side][kind].get(name, 0)
        if not count - may_lack <= found <= count:
            raise SideError(f"{side} wrote {found} {kind} {name!r} instead of {count}")


# --- numbers --------------------------------------------------------------------------------------


def median_of(rounds: Iterable[Round], side: str, key: str = "us") -> float:
    """The median of one number of one side."""
    return statistics.median(float(one[side][key]) for one in rounds)


def median_ratio(rounds: Iterable[Round], side: str, peer: str, key: str = "us") -> float:
    """The median of the rounds' ratios."""
    return statistics.median(float(one[side][key] / one[peer][key]) for one in rounds)


def median_excess(rounds: Iterable[Round], side: str, peer: str, key: str = "us") -> float:
    """The median of the rounds' differences."""
    return statistics.median(float(one[side][key] - one[peer][key]) for one in rounds)


def not_measured(work: str, error: Exception) -> Row:
    """The row of something that could not be measured, with the reason."""
    return Row(work, "-", "-", None, "", note=str(error))
