"""Destinations in memory and spools to deliver, for the tests of the forwarder."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from cirron_otel.destinations.base import Accepted, Answer, Parcel
from spool_by_hand import Writer, span


class Receiver:
    """Takes parcels in memory; ``answers`` are given first, then every parcel is accepted.

    ``judge`` decides in place of the list where it is given. ``hold`` keeps every ``send``
    waiting while it is clear.
    """

    def __init__(
        self,
        name: str = "receiver",
        answers: Iterable[Answer] = (),
        judge: Callable[[Parcel], Answer | None] | None = None,
    ) -> None:
        self.name = name
        self.description = f"the {name}"
        self.answers = list(answers)
        self.judge = judge
        #: Batch ids in the order in which they were accepted.
        self.taken: list[str] = []
        #: Their bytes.
        self.data: dict[str, bytes] = {}
        #: Batch ids of every try.
        self.tries: list[str] = []
        self.times: list[float] = []
        self.closed = 0
        self.hold = threading.Event()
        self.hold.set()
        self.inside = threading.Event()

    def send(self, parcel: Parcel) -> Answer:
        """One try."""
        self.tries.append(parcel.batch_id)
        self.times.append(time.monotonic())
        self.inside.set()
        self.hold.wait()
        answer = self.judge(parcel) if self.judge is not None else None
        if answer is None:
            answer = self.answers.pop(0) if self.answers else Accepted()
        if isinstance(answer, Accepted):
            self.taken.append(parcel.batch_id)
            self.data[parcel.batch_id] = parcel.data
        return answer

    def close(self) -> None:
        """Count it."""
        self.closed += 1


def record(root: Path, count: int, *, first: int = 0, rows: int = 1) -> list[str]:
    """Write batches of ``rows`` spans each; returns their ids, oldest first."""
    writer = Writer(root, writer="host-100-1")
    paths = []
    for at in range(first, first + count):
        spans = [span(f"s{at}.{k}/t", "step", None, at, at + 1, index=k) for k in range(rows)]
        paths.append(writer.batch(float(at), spans))
    return [path.stem.rpartition("-")[2] for path in paths]


def until(condition: Callable[[], object], timeout: float = 20) -> None:
    """Wait for something that must become true; fails when it takes absurdly long."""
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.005)
