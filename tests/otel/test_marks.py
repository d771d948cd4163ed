"""Marks as span events and attributes, in both ways."""

from __future__ import annotations

import math
import sys
from types import ModuleType
from typing import Any

import pytest

import cirron_otel as ci


@pytest.mark.parametrize(
    ("value", "shown", "value_type"),
    [(0.5, 0.5, "float"), (3, 3, "int"), (True, True, "bool"), ("text", "text", "string"),
     (2**70, float(2**70), "float")],
)  # fmt: skip
def test_the_event_of_a_mark(way: Any, named: Any, value: Any, shown: Any, value_type: str) -> None:
    """The event has the value in its own type and the mark's attributes, and tells its id."""
    way.start()
    with ci.scope("work"):
        ci.mark("m", value, note="hi")
    span = named(way.finish(), "work")
    (mark,) = way.marks()
    (event,) = span.events
    assert (event.name, event.timestamp) == ("m", mark.ts_ns)
    assert dict(event.attributes) == {"note": "hi", "value": shown}
    assert mark.id == f"{span.context.span_id:016x}{event.timestamp:016x}"
    assert type(event.attributes["value"]) is type(shown)
    assert mark.value_type == value_type
    assert span.attributes["cirron.mark.m"] == shown


def test_the_kind_is_said_where_it_is_not_point(way: Any, named: Any) -> None:
    """A summary says that it is one."""
    way.start()
    with ci.scope("work"):
        ci.mark("top", 1, kind="summary")
        ci.mark("low", 1)
    events = {event.name: event for event in named(way.finish(), "work").events}
    assert events["top"].attributes["cirron.mark.kind"] == "summary"
    assert "cirron.mark.kind" not in events["low"].attributes


@pytest.mark.parametrize(
    ("value", "name"), [(math.nan, "nan"), (math.inf, "inf"), (-math.inf, "-inf")]
)
def test_a_value_that_is_not_finite(way: Any, named: Any, value: float, name: str) -> None:
    """A NaN stays visible: as a double on the event, as its name on the span, null in the spool."""
    way.start()
    with ci.scope("work"):
        ci.mark("loss", 0.5)
        ci.mark("loss", value)
    span = named(way.finish(), "work")
    shown = span.events[1].attributes
    assert shown["value"] == value or math.isnan(shown["value"])
    assert shown["cirron.mark.value_nonfinite"] == name
    assert span.attributes["cirron.mark.loss"] == name
    mark = way.marks()[1]
    assert (mark.value, mark.value_nonfinite) == (None, name)


def test_the_last_value_of_each_name(way: Any, named: Any) -> None:
    """The span's attribute is the last value marked on it, not on its children."""
    way.start()
    with ci.scope("outer"):
        ci.mark("loss", 1.0)
        with ci.scope("inner"):
            ci.mark("loss", 7.0)
        ci.mark("loss", 2.0)
        ci.mark("acc", 0.1)
    spans = way.finish()
    outer = named(spans, "outer").attributes
    assert (outer["cirron.mark.loss"], outer["cirron.mark.acc"]) == (2.0, 0.1)
    assert named(spans, "inner").attributes["cirron.mark.loss"] == 7.0
    assert not way.rows().one("outer").otel.events


class Slow:
    """A one-element array that is on a device until somebody waits for it."""

    shape = ()

    def item(self) -> float:
        """The value."""
        return 0.75


@pytest.fixture
def _device_library(monkeypatch: pytest.MonkeyPatch) -> None:
    library = ModuleType("jax")
    library.Array = Slow  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jax", library)


@pytest.mark.usefixtures("_device_library")
def test_a_value_that_is_known_later(way: Any, named: Any) -> None:
    """A device value is in the spool; its event says that it is deferred and has no value."""
    way.start()
    with ci.scope("work"):
        ci.mark("loss", Slow())
    span = named(way.finish(), "work")
    (mark,) = way.marks()
    assert mark.value == 0.75
    assert dict(span.events[0].attributes) == {"cirron.mark.deferred": True}
    assert mark.id == f"{span.context.span_id:016x}{span.events[0].timestamp:016x}"
    assert "cirron.mark.loss" not in span.attributes
