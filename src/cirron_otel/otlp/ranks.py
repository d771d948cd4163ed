"""Ranks of one run: which of them an OTLP receiver gets, and how their sessions find each other.

Both are told from the rows, by whoever delivers: the ranks themselves say nothing to one another
and wait for nothing. Pure functions and memory, no I/O.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch, SpanRecord
from cirron_otel.otlp.rows import Link, trace_id

ALL, RANK0, FIRST_PER_NODE, SAMPLED = "all", "rank0", "first_per_node", "sampled"
#: ``sampled`` takes at most so many ranks of a job.
SAMPLED_RANKS = 16
#: Runs whose rank 0 is remembered.
_MAX_RUNS = 1000


class _Who(msgspec.Struct, gc=False):
    """As much of a batch as tells whose it is."""

    resource: dict[str, Any] = {}


_decoder = msgspec.json.Decoder(_Who)


def leaves_out(strategy: str, data: bytes) -> bool:
    """Whether the batch with these bytes is of a rank that ``strategy`` leaves out.

    What says nothing of a rank, or is no batch, is not left out.
    """
    if strategy == ALL:
        return False
    try:
        resource = _decoder.decode(data).resource
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return not takes(strategy, resource)


def takes(strategy: str, resource: Mapping[str, Any]) -> bool:
    """Whether ``strategy`` takes the rank whose resource this is.

    ``sampled`` takes one of every so many neighbours, at most :data:`SAMPLED_RANKS` in all, rank 0
    first, and each time one further along: a fixed step would only ever see the same place of each
    node.
    """
    rank, local = _number(resource, semconv.DL_RANK), _number(resource, semconv.DL_LOCAL_RANK)
    if strategy == RANK0:
        return rank == 0
    if strategy == FIRST_PER_NODE:
        return local == 0
    if strategy == SAMPLED:
        size = max(rank + 1, _number(resource, semconv.DL_WORLD_SIZE))
        group, place = divmod(rank, -(-size // SAMPLED_RANKS))
        return place == group % -(-size // SAMPLED_RANKS)
    return True


def _number(resource: Mapping[str, Any], name: str) -> int:
    value = resource.get(name)
    return value if isinstance(value, int) else 0


class RankLinks:
    """Rank 0's session of each run and attempt, as far as it was seen; the others link to it."""

    def __init__(self) -> None:
        self._first: dict[tuple[str, object], Link] = {}

    def note(self, batch: Batch) -> None:
        """Remember the session that a batch shows, if it is of rank 0."""
        run = _run(batch)
        if run is None or _rank(batch) != 0 or run in self._first:
            return
        for row in (*batch.spans, *(() if batch.open is UNSET else batch.open)):
            if is_session(row):
                self._first[run] = Link(trace_id(row), row.id[:16], {semconv.DL_RANK: 0})
                if len(self._first) > _MAX_RUNS:
                    del self._first[next(iter(self._first))]
                return

    def lacks(self, batch: Batch) -> bool:
        """Whether a batch is of another rank, whose session has nothing to link to yet."""
        return _rank(batch) != 0 and self.link_of(batch) is None

    def link_of(self, batch: Batch) -> Link | None:
        """What the session of another rank links to; None where rank 0 was not seen yet."""
        run = _run(batch)
        return None if run is None or _rank(batch) == 0 else self._first.get(run)


def is_session(row: SpanRecord) -> bool:
    """Whether a row is the root of what one rank records."""
    return row.parent_id is None and row.name == semconv.SESSION


def _run(batch: Batch) -> tuple[str, object] | None:
    if batch.resource is UNSET:
        return None
    run = batch.resource.get(semconv.RUN_ID)
    if not isinstance(run, str):
        return None
    return run, batch.resource.get(semconv.RUN_ATTEMPT)


def _rank(batch: Batch) -> int:
    return 0 if batch.resource is UNSET else _number(batch.resource, semconv.DL_RANK)
