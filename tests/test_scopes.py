"""Scopes in one thread: where they stand, what they bear, what ends them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import cirron_otel as ci
from cirron_otel import recorder
from helpers import Rows, read_spool, tree_text


@pytest.fixture(autouse=True)
def _recording() -> None:
    """Every test here records into its own directory."""
    ci.profile(frameworks=[])


def finished() -> Rows:
    """Everything that was recorded, after an orderly shutdown."""
    assert ci.shutdown()
    return read_spool()


def canonical(rows: Rows, **options: Any) -> str:
    """The tree below the session, as text."""
    first, _, rest = tree_text(rows, **options).partition("\n")
    assert first == "cirron.session"
    return "\n".join(line[2:] for line in rest.splitlines())


def test_a_scope_opens_when_it_is_entered_not_when_it_is_made() -> None:
    """A scope that is only made records nothing; its time starts at ``__enter__`` (§4.2)."""
    ci.scope("never entered")
    late = ci.scope("late")
    time.sleep(0.02)
    before = time.time_ns()
    with late:
        pass
    rows = finished()
    assert canonical(rows) == "late"
    assert rows.one("late").start_ns >= before - 2_000_000


def test_nested_scopes_keep_order_index_and_attributes() -> None:
    """Index and attributes arrive; children lie within their parents' time."""
    with ci.scope("outer", index=3, lr=0.1, tags=["a", "b"]):
        for number in range(2):
            with ci.scope("inner", number, deep={"k": (1, None)}):
                pass
    rows = finished()
    assert canonical(rows) == "outer[3]\n  inner[0]\n  inner[1]"
    outer, inner = rows.one("outer"), rows.named("inner")
    assert outer.attrs == {"lr": 0.1, "tags": ["a", "b"]}
    assert inner[0].attrs == {"deep": {"k": [1, None]}}
    for one in inner:
        assert outer.start_ns <= one.start_ns <= one.end_ns <= outer.end_ns


def test_every_keyword_is_an_attribute_whatever_its_name() -> None:
    """``name``, ``value``, ``self``, ``rec`` and Python's own words are legal attributes."""
    given = {"name": "n", "value": 1, "self": 2, "rec": 3, "attrs": 4, "class": 5, "id": 6}
    with ci.scope("x", **given):
        pass
    with ci.scope("indexed", index=1):
        pass
    rows = finished()
    assert rows.one("x").attrs == given
    assert rows.one("x").index is None
    assert rows.one("indexed").index == 1


def test_the_name_may_be_given_as_keyword() -> None:
    """``scope(name="x")`` names the scope, as with the SDK we follow."""
    with ci.scope(name="named", lr=1):
        pass
    assert finished().one("named").attrs == {"lr": 1}


def test_attributes_can_be_changed_until_the_scope_ends() -> None:
    """What stands in ``s.attrs`` when the scope ends is what is recorded."""
    with ci.scope("x", a=1) as s:
        s.attrs["b"] = 2
        del s.attrs["a"]
        s.set_attribute("c", 3)
        s.set_attributes({"d": 4})
        assert s.name == "x"
        assert s.is_open
    s.attrs["late"] = True
    assert not s.is_open
    assert finished().one("x").attrs == {"b": 2, "c": 3, "d": 4}


class _Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")

    __str__ = __repr__


def test_odd_attribute_values_never_lose_the_scope() -> None:
    """Objects, cycles, non-finite numbers, huge ints and hostile ones become text (E.47, E.49)."""
    cycle: list[object] = []
    cycle.append(cycle)
    with ci.scope(
        "odd", obj=_Hostile(), cycle=cycle, nan=float("nan"), inf=float("-inf"), big=2**80,
        data=b"\xff\x00", path=Path("/x"), surrogate="\ud83d\ude00 \ud800", keys={1: {2: 3}},
        none=None, flag=True,
    ) as s:  # fmt: skip
        s.attrs[5] = "five"
        s.attrs["\ud800"] = "bad key"
    attrs = finished().one("odd").attrs
    assert attrs["obj"] == "<unserializable>"
    assert attrs["cycle"] == ["<cycle>"]
    assert (attrs["nan"], attrs["inf"], attrs["big"]) == ("nan", "-inf", str(2**80))
    assert attrs["data"] == "\ufffd\ufffd"
    assert attrs["path"] == "/x"
    assert attrs["surrogate"] == "\U0001f600 \ufffd"
    assert attrs["keys"] == {"1": {"2": 3}}
    assert attrs["none"] is None
    assert attrs["flag"] is True
    assert attrs["5"] == "five"
    assert attrs["\ufffd"] == "bad key"


def test_a_long_string_attribute_is_cut_and_named() -> None:
    """A string over 64 KiB is cut at a character, and ``attrs_truncated`` names it (decision 5)."""
    with ci.scope("long", text="\u00e9" * 50_000, short="s"):
        pass
    row = finished().one("long")
    assert row.attrs["text"] == "\u00e9" * 32_768
    assert row.attrs_truncated == ["text"]


@pytest.mark.parametrize("name", [5, None, "bad \ud800 name", "nul \0", "x" * 1_000_000, ""])
def test_odd_names_never_lose_the_scope(name: object) -> None:
    """Whatever the name is, the scope is recorded, and so is what is in it."""
    with ci.scope(name), ci.scope("inner"):
        assert ci.flush()
    rows = finished()
    outer = next(one for one in rows.spans if one.name not in ("inner", "cirron.session"))
    assert rows.one("inner").parent_id == outer.id
    assert len(outer.name.encode()) <= 1024
    assert "\0" not in outer.name
    assert ci.health()["swallowed_error_count"] == 0


@pytest.mark.parametrize(
    ("given", "expected"),
    [(True, 1), (7, 7), (-1, -1), ("a", None), (1.5, None), (2**70, None)],
)
def test_an_index_that_is_no_integer_becomes_an_attribute(
    given: object, expected: int | None
) -> None:
    """Only integers of 64 bits are indices; anything else is kept as the attribute ``index``."""
    with ci.scope("x", index=given), ci.scope("inner"):  # type: ignore[arg-type]
        assert ci.flush()
    rows = finished()
    assert rows.one("x").index == expected
    assert ("index" in rows.one("x").attrs) == (expected is None)
    assert rows.one("inner").parent_id == rows.one("x").id


def test_crossing_exits_close_themselves_only() -> None:
    """A entered, B entered, A left, B left: parents stay right after it (C-W1, C-W2)."""
    a, b = ci.scope("A"), ci.scope("B")
    a.__enter__()
    b.__enter__()
    a.__exit__(None, None, None)
    assert b.is_open
    with ci.scope("under B"):
        pass
    b.__exit__(None, None, None)
    with ci.scope("after"):
        pass
    assert canonical(finished()) == "A\n  B\n    under B\nafter"


def test_hundreds_of_crossings_lose_nothing() -> None:
    """The pattern that filled the SDK's stack until all was dropped leaves no trace (C-W1)."""
    for number in range(300):
        a, b = ci.scope("A", number), ci.scope("B", number)
        a.__enter__()
        b.__enter__()
        a.__exit__(None, None, None)
        b.__exit__(None, None, None)
    health = ci.health()
    assert (health["scope_drop_count"], health["scope_depth"]) == (0, 0)
    rows = finished()
    assert len(rows.named("A")) == len(rows.named("B")) == 300
    session = rows.one("cirron.session").id
    assert {one.parent_id for one in rows.named("A")} == {session}


def test_a_scope_held_across_a_yield_does_not_stay_current_after_its_end() -> None:
    """An undecorated generator leaks its scope only while the scope is open (decision 17)."""

    def held() -> Iterator[int]:
        with ci.scope("held"):
            yield 1

    with ci.scope("around"):
        generator = held()
        next(generator)
        generator.close()
        with ci.scope("sibling"):
            pass
    with ci.scope("after"):
        pass
    assert canonical(finished()) == "around\n  held\n  sibling\nafter"


def test_a_generator_that_outlives_its_caller_puts_nothing_in_the_wrong_place() -> None:
    """The parent ends while the generator's scope is open; what comes later hangs higher."""

    def held() -> Iterator[int]:
        with ci.scope("held"):
            yield 1
            yield 2

    with ci.scope("first"):
        generator = held()
        next(generator)
    next(generator)
    with pytest.raises(StopIteration):
        next(generator)
    with ci.scope("second"):
        pass
    assert canonical(finished()) == "first\n  held\nsecond"


class _MuteError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("boom"), "ValueError: boom"),
        (KeyboardInterrupt(), "KeyboardInterrupt"),
        (SystemExit(3), "SystemExit: 3"),
        (_MuteError(), "_MuteError: <no message: __str__ raised>"),
        (ValueError("\ud800\0"), "ValueError: \ufffd\ufffd"),
        (ValueError("y" * 100_000), "ValueError: " + "y" * 1012),
        (ExceptionGroup("several", [ValueError("a")]), "ExceptionGroup: several (1 sub-exception)"),
    ],
    ids=["error", "interrupt", "exit", "mute", "surrogate", "long", "group"],
)
def test_an_exception_is_recorded_and_flies_on(error: BaseException, text: str) -> None:
    """Status, ``exception`` event and attribute ``error``; the exception itself is unchanged."""
    with pytest.raises(type(error)) as caught, ci.scope("outer", kept=1), ci.scope("x"):
        raise error
    assert caught.value is error
    rows = finished()
    for name in ("x", "outer"):
        row = rows.one(name)
        assert row.attrs["error"] == text
        assert row.otel.status == "error"
        (event,) = row.otel.events
        assert event["name"] == "exception"
        assert event["attrs"]["exception.type"].endswith(type(error).__name__)
        assert "Traceback" in event["attrs"]["exception.stacktrace"]
    assert rows.one("outer").attrs["kept"] == 1
    assert "error" not in rows.one("cirron.session").attrs


def test_a_recursion_error_does_not_lose_the_scopes_it_flies_through() -> None:
    """Where hardly any stack is left to describe an exception, the scope's row still comes."""

    def deeper(left: int) -> None:
        if left % 100 == 0:
            with ci.scope("level", left):
                deeper(left + 1)
        deeper(left + 1)

    with pytest.raises(RecursionError):
        deeper(1)
    rows = finished()
    assert len(rows.named("level")) >= 8
    assert all("RecursionError" in one.attrs["error"] for one in rows.named("level"))


def test_leaving_a_generator_is_no_error() -> None:
    """``GeneratorExit`` ends a scope without an error."""
    with pytest.raises(GeneratorExit), ci.scope("x"):
        raise GeneratorExit
    row = finished().one("x")
    assert "error" not in row.attrs
    assert row.otel.status is msgspec.UNSET


def test_depth_is_limited_and_the_body_still_runs(caplog: pytest.LogCaptureFixture) -> None:
    """The 65th level is dropped with one warning that names it; its children hang higher (§4.3)."""
    ran: list[int] = []

    def descend(left: int) -> None:
        with ci.scope("level", 70 - left):
            ran.append(left)
            if left > 1:
                descend(left - 1)

    descend(70)
    with ci.scope("after"):
        pass
    health = ci.health()
    rows = finished()
    assert len(ran) == 70
    assert len(rows.named("level")) == 64
    assert health["scope_drop_count"] == 6
    assert rows.one("after").parent_id == rows.one("cirron.session").id
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "'level'" in warnings[0]


def test_a_scope_entered_twice_is_recorded_once(caplog: pytest.LogCaptureFixture) -> None:
    """Entering again, inside or after, opens nothing, ends nothing early and is said once."""
    again = ci.scope("again")
    with again:
        with again:
            pass
        assert again.is_open
        with ci.scope("inside"):
            pass
    with again, ci.scope("beside"):
        pass
    assert canonical(finished()) == "again\n  inside\nbeside"
    assert sum("second time" in r.getMessage() for r in caplog.records) == 1


def test_leaving_a_scope_that_was_not_entered_does_nothing() -> None:
    """A stray ``__exit__`` touches neither the context nor the spool."""
    with ci.scope("around"):
        ci.scope("stray").__exit__(None, None, None)
        with ci.scope("inside"):
            pass
    assert canonical(finished()) == "around\n  inside"


def test_scopes_outside_a_recording_do_nothing() -> None:
    """Made before ``shutdown()`` or after it, a scope entered afterwards records nothing."""
    made_before = ci.scope("made before")
    rows = finished()
    with made_before as one, ci.scope("after", x=1) as two:
        two.set_attribute("y", 2)
        assert one.attrs == {}
    assert len(rows.spans) == len(read_spool().spans) == 1


def test_a_scope_that_is_open_at_shutdown_is_closed_and_marked() -> None:
    """Shutdown closes children first and marks what nobody closed; leaving it then is harmless."""
    outer = ci.scope("outer").__enter__()
    inner = ci.scope("inner").__enter__()
    rows = finished()
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert canonical(rows) == "outer\n  inner"
    assert rows.one("inner").end_ns <= rows.one("outer").end_ns
    assert rows.one("inner").attrs == rows.one("outer").attrs == {"cirron.truncated": True}
    assert "cirron.truncated" not in rows.one("cirron.session").attrs
    assert len(read_spool().spans) == 3


def test_a_clock_that_steps_back_makes_no_negative_or_wrong_length() -> None:
    """Lengths are monotonic differences, whatever the wall clock does (C-W31, decision 7)."""
    rec = recorder._current
    assert rec is not None
    with ci.scope("across"):
        with ci.scope("before"):
            time.sleep(0.01)
        rec.clock.wall_ns = lambda: time.time_ns() - 3_600_000_000_000
        assert ci.flush()
        with ci.scope("after"):
            time.sleep(0.01)
    rows = finished()
    lengths = {one.name: one.end_ns - one.start_ns for one in rows.spans}
    assert 10_000_000 <= lengths["before"] < 5_000_000_000
    assert 10_000_000 <= lengths["after"] < 5_000_000_000
    assert 20_000_000 <= lengths["across"] < 5_000_000_000
    assert rows.one("after").start_ns < rows.one("before").start_ns - 3_000_000_000_000


def test_a_clock_step_during_a_fetch_changes_no_length() -> None:
    """Data loading, step, epoch and session last as long as they did (C-W31, decision 7)."""
    rec = recorder._current
    assert rec is not None
    steps = iter([3_600_000_000_000, -7_200_000_000_000, 0])

    def source() -> Iterator[int]:
        for number, step in enumerate(steps):
            rec.clock.wall_ns = lambda step=step: time.time_ns() + step  # type: ignore[misc]
            assert ci.flush()
            yield number

    for _ in ci.epochs(range(1)):
        for _ in ci.batches(source()):
            time.sleep(0.01)
    rows = finished()
    assert len(rows.named("data_load")) == 3
    for one in rows.spans:
        assert 0 < one.end_ns - one.start_ns < 5_000_000_000, one.name
    for one in rows.named("step"):
        assert one.end_ns - one.start_ns >= 10_000_000


def test_the_cost_of_recording_stands_on_scopes_with_children() -> None:
    """``cirron.overhead_ns`` is marked, estimated, where a scope has children (decision 13)."""
    for _ in range(4):
        with ci.scope("parent"):
            for _ in range(100):
                with ci.scope("child"):
                    pass
    rows = finished()
    cost = [m for m in rows.marks if m.name == "cirron.overhead_ns"]
    bearing = {m.span_id for m in cost}
    assert rows.named("parent")[-1].id in bearing
    assert not bearing & {one.id for one in rows.named("child")}
    assert all(m.attrs == {"estimated": True} and m.value > 0 for m in cost)
    last = rows.named("parent")[-1]
    (mark,) = rows.marks_of(last)
    assert mark.value <= last.end_ns - last.start_ns
    assert last.mark_ids == (mark.id,)
