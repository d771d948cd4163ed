"""The 19 event types: what real lines have, and what is wrong with others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cirron_otel.training_record.events import EVENTS, field_problems, problems

RECORDS = Path(__file__).resolve().parent.parent / "formats/records"
LINES = [
    json.loads(line)
    for path in sorted(RECORDS.glob("*/diary.jsonl"))
    for line in path.read_text().splitlines()
]


def line(kind: str, **changes: Any) -> dict[str, Any]:
    """A real line of a type, changed."""
    return {**next(line for line in LINES if line["event"] == kind), **changes}


def test_there_are_nineteen_types() -> None:
    """The table has the types of the format, no more and no fewer."""
    assert len(EVENTS) == 19


def test_every_real_line_is_in_order() -> None:
    """The schema finds nothing wrong with any line of the real records."""
    assert [found for line in LINES if (found := problems(line))] == []


@pytest.mark.parametrize("kind", sorted({line["event"] for line in LINES}))
def test_every_required_field_is_missed(kind: str) -> None:
    """A line that lacks one of its type's fields, or a common one, is told which."""
    for name in [*EVENTS[kind].required, "seq", "time", "event", "prev", "hash"]:
        bad = line(kind)
        del bad[name]
        assert f"{name} is missing" in problems(bad)


@pytest.mark.parametrize("kind", sorted(EVENTS))
def test_fixed_values_are_looked_at_with_their_type(kind: str) -> None:
    """Another value, or an equal one of another type, where the format fixes it is a problem."""
    for name in EVENTS[kind].fixed:
        found = field_problems({"event": kind, name: "x"})
        assert any(text.startswith(f"{name} is not") for text in found)
    assert "record_version is not 1" in field_problems(
        {"event": "run_start", "record_version": True}
    )


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"seq": -1}, "seq is not a whole number from 0 on"),
        ({"seq": True}, "seq is not a whole number from 0 on"),
        ({"seq": 1.0}, "seq is not a whole number from 0 on"),
        ({"time": "now"}, "time is not a number"),
        ({"time": False}, "time is not a number"),
        ({"prev": "0" * 63}, "prev is not 64 lower-case hex digits"),
        ({"hash": "A" * 64}, "hash is not 64 lower-case hex digits"),
        ({"hash": "0" * 64 + "\n"}, "hash is not 64 lower-case hex digits"),
        ({"hash": 7}, "hash is not 64 lower-case hex digits"),
        ({"event": "weather"}, "event type is unknown"),
        ({"event": 3}, "event is not text"),
        ({"step": -1}, "step is not a whole number from 0 on"),
        ({"step": 1.0}, "step is not a whole number from 0 on"),
        ({"diagnosis": "tired"}, "diagnosis is none of exploding, no_gradient, vanishing"),
        ({"diagnosis": ["vanishing"]}, "diagnosis is none of exploding, no_gradient, vanishing"),
    ],
)
def test_a_wrong_field_is_named(changes: dict[str, Any], problem: str) -> None:
    """Each field that has a form is held to it."""
    assert problem in problems(line("alarm", **changes))


def test_a_severity_is_looked_at_wherever_it_stands() -> None:
    """Also an event that need not have a severity must have a known one."""
    known = "action, critical, info, proof, warning"
    found = field_problems({"event": "structure", "severity": "loud", "step": 1})
    assert f"severity is none of {known}" in found


def test_more_fields_and_unknown_types_are_welcome_to_readers() -> None:
    """Further fields are no problem, and an unknown type has no fields to miss."""
    assert problems(line("alarm", rule="warm_up", caused_by="conv1")) == []
    assert field_problems({"event": "weather", "step": -1}) == []
