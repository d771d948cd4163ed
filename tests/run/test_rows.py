"""Rows of scopes on their way to those who look at a run: each of them once, in small parts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from threading import RLock

import pytest

import cirron_otel as ci
from cirron_otel import recorder, semconv
from cirron_otel._guard import Guard
from cirron_otel.run import rows as rows_module
from cirron_otel.run.ledger import matters
from cirron_otel.run.rows import Row, RowFeed, parts, rows_of
from helpers import read_spool


def text(number: int, name: str = "step", **more: object) -> str:
    """A row as the spool writes it."""
    return json.dumps(
        {"id": f"{number:032x}", "name": name, "start_ns": 0, "end_ns": number, **more},
        separators=(",", ":"),
    )


def piece(*rows: str) -> bytes:
    """Rows as they lie in a batch."""
    return ",".join(rows).encode()


def feed(taken: list[Row], pauses: list[int] | None = None) -> RowFeed:
    """A feed whose first consumer keeps its rows."""
    seen = [] if pauses is None else pauses
    return RowFeed(
        Guard(), taken.extend, lock=RLock(), matters=matters, pause=lambda: seen.append(len(taken))
    )


def test_a_large_piece_is_parted_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts are whole rows, whatever the rows hold, and are worked on with a pause in between."""
    monkeypatch.setattr(rows_module, "MOST_BYTES", 700)
    odd = {"attrs": {"a": [{"b": 1}, {"id": "x"}, {"id": "y"}], "t": '},{"id":"' + "0" * 32}}
    rows = [text(number, **odd) for number in range(9)] + [text(9, attrs={"t": "y" * 5000})]
    whole = piece(*rows, text(10), text(11))
    found = list(parts(whole))
    assert b",".join(found) == whole
    assert len(found) > 4
    assert [row.end_ns for part in found for row in rows_of(part)] == list(range(12))
    assert list(parts(piece(text(1, attrs={"t": "y" * 5000})))) == [
        piece(text(1, attrs={"t": "y" * 5000}))
    ]

    taken: list[Row] = []
    pauses: list[int] = []
    one = feed(taken, pauses)
    one.seen.append(whole)
    one.take()
    assert [row.end_ns for row in taken] == list(range(12))
    assert len(pauses) > 4


def test_every_consumer_has_every_row_once() -> None:
    """Those that the first one took while the session ended come to the others, later."""
    taken: list[Row] = []
    others: list[Row] = []
    one = feed(taken)
    one.consumers.append(others.extend)
    one.seen.append(piece(text(1)))
    one.take()
    one.seen.append(piece(text(2)))
    one.take_now([piece(text(3))])
    assert [row.end_ns for row in taken] == [1, 2, 3]
    assert [row.end_ns for row in others] == [1]
    one.take()
    assert [row.end_ns for row in others] == [1, 2, 3]


def test_what_concerns_nobody_is_not_decoded() -> None:
    """Pieces without a scope that is charged are passed over, unless somebody wants all."""
    taken: list[Row] = []
    one = feed(taken)
    mine = piece(text(1, "mine"))
    one.seen.extend([mine, piece(text(2, "mine"), text(3, "data_load")), b"{broken"])
    one.take()
    assert [row.end_ns for row in taken] == [2, 3]
    one.wants_all = True
    one.seen.append(mine)
    one.take()
    assert [row.end_ns for row in taken] == [2, 3, 1]


def test_a_consumer_that_fails_keeps_rows_from_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its exception is counted, the others have their rows."""
    monkeypatch.delenv("CIRRON_OTEL_STRICT")

    def fails(_rows: Sequence[Row]) -> None:
        raise ValueError("no")

    taken: list[Row] = []
    guard = Guard()
    one = RowFeed(guard, fails, lock=RLock(), matters=matters, pause=lambda: None)
    one.consumers += [fails, taken.extend]
    one.seen.append(piece(text(1)))
    one.take()
    assert [row.end_ns for row in taken] == [1]
    assert guard.swallowed["rows"] == 2


def test_rows_that_are_written_one_by_one_count_too() -> None:
    """A slice that has to be cleaned row by row is in the account of the run as any other.

    Also where the session ends before anything was written.
    """
    ci.profile(frameworks=[], otlp="none", flush_interval=60)
    for number in ci.batches(range(10)):
        ci.mark("loss", number)
        with ci.scope("mine", text="a\0b", large="x" * 2_000_000 if number == 5 else ""):
            pass
        if number == 5:
            ci.flush()
    rec = recorder._current
    ci.shutdown()
    assert rec.run.ledger.steps == 10
    rows = read_spool()
    session = rows.one(semconv.SESSION)
    assert session.attrs[semconv.RUN_STEPS] == 10
    steps = sum(row.end_ns - row.start_ns for row in rows.named("step"))  # type: ignore[operator,misc]
    told = session.attrs[f"{semconv.RUN_TIME}.compute"] + session.attrs[f"{semconv.RUN_TIME}.data"]
    assert told == pytest.approx(steps / 1e9, abs=1e-5)
