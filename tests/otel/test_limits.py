"""Sampling and span limits decide what exporters see, never what the spool keeps."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.trace import SpanContext, TraceFlags

import cirron_otel as ci

REMOTE = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))
UNSAMPLED = SpanContext(0xABD, 0xDEF, is_remote=True, trace_flags=TraceFlags(0))


def record() -> None:
    """Two scopes, an event set through the current span, and a mark."""
    with ci.scope("outer"), ci.scope("inner", a=1) as inner:
        ci.mark("loss", 0.5)
        span = trace.get_current_span()
        assert span.is_recording()
        span.set_attribute("direct", 2)
        span.add_event("ev", {"b": 1})
        span.update_name("renamed")
        span.set_status(trace.StatusCode.ERROR, "why")
        span.record_exception(ValueError("v"))
        span.add_link(REMOTE)
        assert inner.is_recording()


@pytest.mark.parametrize(
    ("sampler", "argument"),
    [("always_off", ""), ("parentbased_always_off", ""), ("traceidratio", "0"),
     ("parentbased_traceidratio", "0.0")],
)  # fmt: skip
def test_dropped_spans_are_in_the_spool(
    way: Any, monkeypatch: pytest.MonkeyPatch, sampler: str, argument: str
) -> None:
    """A sampler that drops everything leaves the exporter empty and the spool whole."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", argument)
    way.start()
    with way.tracer().start_as_current_span("theirs") as theirs:
        assert not theirs.get_span_context().trace_flags.sampled
    record()
    assert way.finish() == []
    rows = way.rows()
    row = rows.one("renamed")
    assert row.parent_id == rows.one("outer").id
    assert row.attrs == {"a": 1, "direct": 2}
    assert {event["name"] for event in row.otel.events} == {"ev", "exception"}
    assert (row.otel.status, row.otel.status_message) == ("error", "why")
    assert len(row.otel.links) == 1
    assert [mark.value for mark in rows.marks_of(row)] == [0.5]
    assert row.otel.sampled is False
    assert len({span.id for span in rows.spans}) == len(rows.spans) == 3


@pytest.mark.parametrize("sampler", ["", "always_on", "parentbased_always_on", "traceidratio"])
def test_kept_spans_are_in_both(way: Any, monkeypatch: pytest.MonkeyPatch, sampler: str) -> None:
    """A sampler that keeps everything leaves exporter and spool with the same spans."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    way.start()
    record()
    names = sorted(span.name for span in way.finish())
    assert names == sorted(row.name for row in way.rows().spans)
    assert names == ["cirron.session", "outer", "renamed"]


@pytest.mark.parametrize(
    ("sampler", "parent", "kept"),
    [("parentbased_always_on", UNSAMPLED, False), ("always_on", UNSAMPLED, True),
     ("parentbased_always_off", REMOTE, True), ("always_off", REMOTE, False)],
)  # fmt: skip
def test_the_sampler_is_asked_under_a_remote_parent(
    way: Any,
    monkeypatch: pytest.MonkeyPatch,
    sampler: str,
    parent: SpanContext,
    kept: bool,  # noqa: FBT001 - a column
) -> None:
    """Under a remote parent a parent-based sampler follows its flag, another one does not."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    way.start()
    with trace.use_span(trace.NonRecordingSpan(parent)):
        with ci.scope("request"):
            pass
        way.tracer().start_span("theirs").end()
    names = [span.name for span in way.finish()]
    assert ("request" in names, "theirs" in names) == (kept, kept)
    assert (way.rows().one("request").otel.sampled is False) is (not kept)


def test_a_ratio_is_near_the_ratio(monkeypatch: pytest.MonkeyPatch, way: Any) -> None:
    """Half of the traces are exported with a ratio of one half; all of them are in the spool."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.5")
    way.start(trace_max_spans=10)
    with ci.scope("epoch"):
        for _ in range(2000):
            with ci.scope("work"):
                pass
    exported = [span for span in way.finish() if span.name == "work"]
    assert 500 < len(exported) < 1500
    assert len(way.rows().named("work")) == 2000


def test_a_sampler_that_is_not_known(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An unknown sampler or a bad ratio is said in the log, and everything is sampled."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "nonsense")
    profiler = ci.profile(frameworks=[])
    assert profiler.tracer_provider is not None
    with ci.scope("x") as scope:
        assert scope.get_span_context().trace_flags.sampled
    ci.shutdown()
    assert "nonsense" in caplog.text
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "traceidratio")
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "7")
    ci.profile(frameworks=[])
    with ci.scope("x") as scope:
        assert scope.get_span_context().trace_flags.sampled
    assert "OTEL_TRACES_SAMPLER_ARG" in caplog.text


@pytest.fixture
def _quiet() -> Any:
    # The SDK warns once for each attribute it drops.
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    yield
    logging.getLogger("opentelemetry").setLevel(logging.NOTSET)


@pytest.mark.usefixtures("_quiet")
def test_limits_on_counts(way: Any, named: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Past a limit exporters see the newest and a count of what is missing; the spool has all."""
    monkeypatch.setenv("OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT", "10")
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "4")
    monkeypatch.setenv("OTEL_SPAN_LINK_COUNT_LIMIT", "2")
    monkeypatch.setenv("OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "3")
    monkeypatch.setenv("OTEL_LINK_ATTRIBUTE_COUNT_LIMIT", "1")
    way.start()
    given = {f"a{i}": i for i in range(20)}
    with ci.scope("limited", **given) as scope:
        for i in range(3):
            ci.mark(f"m{i}", i)
        for i in range(3):
            scope.add_event(f"e{i}", {f"k{n}": n for n in range(5)})
        for i in range(3):
            scope.add_link(SpanContext(1, i + 1, is_remote=False), {"x": 1, "y": 2})
    span = named(way.finish(), "limited")
    assert len(span.attributes) == 10
    assert "a0" not in span.attributes
    ours = sum(key.startswith(("cirron.", "thread.")) for key in span.attributes)
    assert span.dropped_attributes >= 10 + ours
    assert [event.name for event in span.events] == ["m2", "e0", "e1", "e2"]
    assert span.dropped_events == 2
    assert len(span.events[-1].attributes) == 3
    assert span.events[-1].dropped_attributes == 2
    assert [link.context.span_id for link in span.links] == [2, 3]
    assert span.dropped_links == 1
    assert span.links[0].dropped_attributes == 1
    row = way.rows().one("limited")
    assert row.attrs == given
    assert len(row.mark_ids) == 3
    assert [event["name"] for event in row.otel.events] == ["e0", "e1", "e2"]
    assert len(row.otel.events[0]["attrs"]) == 5
    assert len(row.otel.links) == 3


@pytest.mark.usefixtures("_quiet")
@pytest.mark.parametrize("variable", ["OTEL_ATTRIBUTE_VALUE", "OTEL_SPAN_ATTRIBUTE_VALUE"])
def test_limits_on_length(
    way: Any, named: Any, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    """Exported strings are cut to the limit, those in lists too; the spool has them whole."""
    monkeypatch.setenv(f"{variable}_LENGTH_LIMIT", "5")
    way.start()
    with ci.scope("cut", text="0123456789", many=["0123456789"], number=12345678) as scope:
        scope.set_attribute("late", "abcdefghij")
        scope.add_event("ev", {"text": "0123456789"})
    span = named(way.finish(), "cut")
    assert span.attributes["text"] == "01234"
    assert span.attributes["late"] == "abcde"
    assert tuple(span.attributes["many"]) == ("01234",)
    assert span.attributes["number"] == 12345678
    everywhere = variable.startswith("OTEL_ATTRIBUTE")
    assert span.events[0].attributes["text"] == ("01234" if everywhere else "0123456789")
    row = way.rows().one("cut")
    assert row.attrs == {
        "text": "0123456789", "many": ["0123456789"], "number": 12345678, "late": "abcdefghij",
    }  # fmt: skip
    assert row.otel.events[0]["attrs"] == {"text": "0123456789"}


def test_limits_that_are_no_numbers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A bad limit is said in the log and the defaults hold; recording goes on."""
    monkeypatch.setenv("OTEL_SPAN_EVENT_COUNT_LIMIT", "many")
    assert ci.profile(frameworks=[]).enabled
    assert "OTEL_SPAN_EVENT_COUNT_LIMIT" in caplog.text


def test_more_than_128_events_of_a_scope(way: Any, named: Any) -> None:
    """Of a thousand marks the span shows the newest 128 and counts the rest; the spool has all."""
    way.start()
    with ci.scope("long"):
        for i in range(1000):
            ci.mark("loss", i)
    span = named(way.finish(), "long")
    assert [event.attributes["value"] for event in span.events] == list(range(872, 1000))
    assert span.dropped_events == 872
    assert span.attributes["cirron.mark.loss"] == 999
    rows = way.rows()
    assert [mark.value for mark in rows.marks_of(rows.one("long"))] == list(range(1000))
    assert not rows.one("long").otel.events
