"""What OpenTelemetry promises of a span holds for a scope, with both kinds of provider."""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.sdk.trace.export import ConsoleSpanExporter, SimpleSpanProcessor
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

import cirron_otel as ci

OTHER = SpanContext(0xABC, 0xDEF, is_remote=True, trace_flags=TraceFlags(1))


class Watcher(SpanProcessor):
    """A processor that writes down what it is told."""

    def __init__(self, log: list[tuple[Any, ...]], name: str = "") -> None:
        self.log = log
        self.name = name

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Note the start, what is set by then, and the parent the context gives."""
        above = trace.get_current_span(parent_context).get_span_context().span_id
        self.log.append((self.name, "start", span.name, dict(span.attributes), above))

    def on_end(self, span: ReadableSpan) -> None:
        """Note the end and the attributes then."""
        self.log.append((self.name, "end", span.name, dict(span.attributes or {})))


class Failing(SpanProcessor):
    """A processor that fails at everything."""

    def on_start(self, span: Any, parent_context: Any = None) -> None:
        """Fail."""
        raise RuntimeError("on_start", span, parent_context)

    def on_end(self, span: ReadableSpan) -> None:
        """Fail."""
        raise RuntimeError("on_end", span)


def test_a_scope_is_a_span_and_current(way: Any, named: Any, spool_id: Any) -> None:
    """Inside a scope the current span is the scope's, and the scope can stand for it."""
    way.start()
    with ci.scope("outer", lr=0.1) as scope:
        current = trace.get_current_span()
        assert isinstance(current, trace.Span)
        assert isinstance(scope, trace.Span)
        assert scope.get_span_context() == current.get_span_context()
        assert current.is_recording()
        assert scope.is_recording()
        assert spool_id(current) == scope.id
    assert not scope.is_recording()
    span = named(way.finish(), "outer")
    assert spool_id(span) == way.rows().one("outer").id
    session = named(way.exporter.get_finished_spans(), "cirron.session")
    assert span.parent == session.context


def test_third_party_spans_become_children(way: Any, named: Any) -> None:
    """A span made inside a scope is its child, and scopes in that span are the span's children."""
    way.start()
    with (
        ci.scope("ours") as ours,
        way.tracer().start_as_current_span("theirs", kind=SpanKind.CLIENT) as theirs,
        ci.scope("inner") as inner,
    ):
        assert trace.get_current_span().get_span_context() == inner.get_span_context()
        assert inner.get_span_context().trace_id == ours.get_span_context().trace_id
    spans = way.finish()
    assert named(spans, "theirs").parent == ours.get_span_context()
    assert named(spans, "theirs").kind is SpanKind.CLIENT
    assert named(spans, "theirs").instrumentation_scope.name == "third.party"
    assert named(spans, "inner").parent == theirs.get_span_context()
    rows = way.rows()
    assert rows.named("theirs") == []
    row = rows.one("inner")
    assert row.parent_id == rows.one("ours").id
    assert row.otel.parent_span_id == f"{theirs.get_span_context().span_id:016x}"
    assert named(spans, "inner").attributes["cirron.parent.id"] == row.parent_id


def test_inject_gives_the_scope(way: Any) -> None:
    """The propagation header names the scope's span, and a remote parent's state is passed on."""
    way.start()
    with ci.scope("call") as scope:
        carrier: dict[str, str] = {}
        propagate.inject(carrier)
        made = scope.get_span_context()
        version, trace_id, span_id, flags = carrier["traceparent"].split("-")
        assert (version, trace_id, span_id) == ("00", f"{made.trace_id:032x}", scope.id[:16])
        assert int(flags, 16) & 1
    remote = propagate.extract(
        {"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01", "tracestate": "vendor=x"}
    )
    token = otel_context.attach(remote)
    with ci.scope("request"), ci.scope("inner") as inner:
        propagate.inject(carrier)
        assert carrier["traceparent"].split("-")[1:3] == [f"{0xABC:032x}", inner.id[:16]]
        assert carrier["tracestate"] == "vendor=x"
    otel_context.detach(token)
    way.finish()
    row = way.rows().one("request")
    assert row.otel.parent_span_id == f"{0xDEF:016x}"
    assert row.parent_id == way.rows().one("cirron.session").id


def test_processors_in_order_around_the_changes(way: Any) -> None:
    """Each processor, in order of adding, sees the start before and the end after all changes."""
    log: list[tuple[Any, ...]] = []
    way.start(Watcher(log, "a"), Watcher(log, "b"))
    log.clear()
    with ci.scope("outer") as outer, ci.scope("inner", given=1) as inner:
        inner.set_attribute("late", 2)
        trace.get_current_span().set_attribute("direct", 3)
    inner_log = [entry for entry in log if entry[2] == "inner"]
    assert [entry[:2] for entry in inner_log] == [
        ("a", "start"), ("b", "start"), ("a", "end"), ("b", "end"),
    ]  # fmt: skip
    assert inner_log[0][3]["given"] == 1
    assert "late" not in inner_log[0][3]
    assert inner_log[0][4] == outer.get_span_context().span_id
    last = inner_log[-1][3]
    assert (last["given"], last["late"], last["direct"]) == (1, 2, 3)
    way.finish()
    attrs = way.rows().one("inner").attrs
    assert attrs == {"given": 1, "late": 2, "direct": 3}


def test_a_failing_processor_is_not_the_users_business(
    way: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """What a foreign processor raises is counted; user code and spool do not notice."""
    way.start(Failing())
    done = False
    with ci.scope("outer"):
        ci.mark("loss", 0.5)
        with ci.scope("inner"):
            done = True
    assert done
    swallowed = ci.health()["swallowed_errors"]
    assert swallowed["processor.on_start"] >= 2
    way.finish()
    rows = way.rows()
    assert rows.one("inner").parent_id == rows.one("outer").id
    assert rows.one("outer").parent_id == rows.one("cirron.session").id
    assert [mark.name for mark in rows.marks_of(rows.one("outer"))] == ["loss"]
    assert "on_start" in caplog.text


def test_failing_at_the_end_only(way: Any) -> None:
    """A processor that fails when a span ends does not take the row with it."""

    class FailingEnd(Failing):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            """Nothing."""

    way.start(FailingEnd())
    with ci.scope("work"):
        pass
    assert ci.health()["swallowed_errors"]["processor.on_end"] >= 1
    way.finish()
    assert way.rows().one("work").end_ns


def test_explicit_times(way: Any, named: Any) -> None:
    """A tracer's start time and an end time are taken as they are given."""
    way.start()
    span = way.tracer().start_span("timed", start_time=1_000, attributes={"a": 1})
    span.add_event("then", {"b": 2}, timestamp=1_500)
    span.end(end_time=2_000)
    ended = named(way.finish(), "timed")
    assert (ended.start_time, ended.end_time) == (1_000, 2_000)
    assert [(event.name, event.timestamp) for event in ended.events] == [("then", 1_500)]


def test_end_is_idempotent(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    """A second end warns and changes nothing; what is set after the end is ignored."""
    way.start()
    span = way.tracer().start_span("once")
    span.end(end_time=time.time_ns() + 5_000)
    first = span.end_time  # type: ignore[attr-defined]
    with caplog.at_level(logging.WARNING):
        span.end()
    assert "end()" in caplog.text
    assert span.end_time == first  # type: ignore[attr-defined]
    span.set_attribute("late", 1)
    span.add_event("late")
    assert not span.is_recording()
    exported = [one for one in way.finish() if one.name == "once"]
    assert len(exported) == 1
    assert "late" not in (exported[0].attributes or {})
    assert exported[0].events == ()


def test_ending_the_current_span_by_hand(way: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Code that ends the span of a scope it stands in ends it once; the scope goes on quietly."""
    way.start()
    with caplog.at_level(logging.WARNING), ci.scope("work"):
        trace.get_current_span().end()
    assert "ended" not in caplog.text
    assert len([span for span in way.finish() if span.name == "work"]) == 1
    assert way.rows().one("work").end_ns


@pytest.mark.parametrize("through", ["scope", "current"])
def test_status_rules(way: Any, through: str) -> None:
    """OK is final, UNSET is ignored, and a description belongs to errors only."""
    way.start()

    def each(name: str, change: Callable[[Any], None]) -> None:
        with ci.scope(name) as scope:
            change(scope if through == "scope" else trace.get_current_span())

    each("error", lambda span: span.set_status(StatusCode.ERROR, "why"))
    error = Status(StatusCode.ERROR, "x")
    each("unset", lambda span: (span.set_status(error), span.set_status(StatusCode.UNSET)))
    each("ok", lambda span: (span.set_status(StatusCode.OK), span.set_status(error)))
    with pytest.raises(ValueError, match="user"), ci.scope("ok then raise") as scope:  # noqa: PT012 - what the body does matters
        (scope if through == "scope" else trace.get_current_span()).set_status(StatusCode.OK)
        raise ValueError("user")
    spans = way.finish()
    got = {s.name: (s.status.status_code.name, s.status.description) for s in spans}
    assert got["error"] == ("ERROR", "why")
    assert got["unset"] == ("ERROR", "x")
    assert got["ok"] == ("OK", None)
    assert got["ok then raise"] == ("OK", None)
    rows = way.rows()
    assert rows.one("error").otel.status == "error"
    assert rows.one("error").otel.status_message == "why"
    assert rows.one("ok").otel.status == "ok"
    assert rows.one("ok then raise").otel.status == "ok"


def test_an_exception_that_passes_through(way: Any, named: Any) -> None:
    """The span bears status, event and error type, the spool the attribute error as well."""
    way.start()
    with pytest.raises(KeyError), ci.scope("bad"):
        raise KeyError("k")
    span = named(way.finish(), "bad")
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == "KeyError"
    assert span.attributes["error"] == "KeyError: 'k'"
    (event,) = span.events
    assert event.name == "exception"
    assert event.attributes["exception.type"] == "KeyError"
    assert "raise KeyError" in event.attributes["exception.stacktrace"]
    row = way.rows().one("bad")
    assert row.attrs == {"error": "KeyError: 'k'"}
    assert [event["name"] for event in row.otel.events] == ["exception"]


@pytest.mark.parametrize("through", ["scope", "current"])
def test_recording_by_hand(way: Any, named: Any, through: str) -> None:
    """Events, exceptions, links, names and attributes set by hand are exported and spooled."""
    way.start()
    with ci.scope("first name", early=1) as scope:
        span: Any = scope if through == "scope" else trace.get_current_span()
        span.add_event("ev", {"a": 1, "nested": [1, 2]}, 123)
        span.record_exception(ValueError("v"), {"extra": True})
        span.add_link(OTHER, {"why": "because"})
        span.add_link(trace.INVALID_SPAN_CONTEXT)
        span.update_name("renamed")
        span.set_attributes({"x": 1, "early": 2})
    ended = named(way.finish(), "renamed")
    assert ended.status.status_code is StatusCode.UNSET
    events = {event.name: event for event in ended.events}
    assert events["ev"].timestamp == 123
    assert events["ev"].attributes["a"] == 1
    assert tuple(events["ev"].attributes["nested"]) == (1, 2)
    assert events["exception"].attributes["exception.message"] == "v"
    assert events["exception"].attributes["extra"] is True
    assert [(link.context.span_id, dict(link.attributes)) for link in ended.links] == [
        (0xDEF, {"why": "because"})
    ]
    assert (ended.attributes["x"], ended.attributes["early"]) == (1, 2)
    row = way.rows().one("renamed")
    assert row.attrs == {"x": 1, "early": 2}
    assert {event["name"] for event in row.otel.events} == {"ev", "exception"}
    assert row.otel.links == [
        {"trace_id": f"{0xABC:032x}", "span_id": f"{0xDEF:016x}", "attrs": {"why": "because"}}
    ]


def test_a_tracers_span_as_context_manager(way: Any, named: Any) -> None:
    """``with tracer.start_span()`` ends the span, with the exception, but is never current."""
    way.start()
    with pytest.raises(ValueError, match="v"), way.tracer().start_span("plain") as span:  # noqa: PT012 - what the body does matters
        assert trace.get_current_span() is not span
        raise ValueError("v")
    quiet = way.tracer().start_span("quiet", record_exception=False, set_status_on_exception=False)
    with pytest.raises(ValueError, match="v"), quiet:
        raise ValueError("v")
    spans = way.finish()
    assert named(spans, "plain").status.status_code is StatusCode.ERROR
    assert named(spans, "plain").status.description == "ValueError: v"
    assert [event.name for event in named(spans, "plain").events] == ["exception"]
    assert named(spans, "quiet").status.status_code is StatusCode.UNSET
    assert named(spans, "quiet").events == ()


def test_a_tracers_spans_follow_the_given_context(way: Any, named: Any) -> None:
    """The parent is the span of the context that is given; an empty one starts a trace."""
    way.start()
    tracer = way.tracer()
    root = tracer.start_span("root", context=otel_context.Context())
    child = tracer.start_span("child", context=trace.set_span_in_context(root), links=[Link(OTHER)])
    remote = tracer.start_span(
        "remote", context=trace.set_span_in_context(trace.NonRecordingSpan(OTHER))
    )
    for span in (child, root, remote):
        span.end()
    spans = way.finish()
    assert named(spans, "root").parent is None
    assert named(spans, "child").parent == root.get_span_context()
    assert [link.context for link in named(spans, "child").links] == [OTHER]
    assert named(spans, "remote").parent == OTHER
    assert named(spans, "remote").context.trace_id == OTHER.trace_id


def test_deep_third_party_spans_are_not_lost(way: Any) -> None:
    """The limit of 64 nested scopes is about scopes; spans of others may be deeper."""
    way.start()

    def nest(depth: int) -> None:
        with way.tracer().start_as_current_span(f"level {depth}"):
            if depth < 100:
                nest(depth + 1)

    nest(1)
    assert len([span for span in way.finish() if span.name.startswith("level ")]) == 100


def test_setting_while_it_ends(way: Any) -> None:
    """Threads that set attributes while the span ends lose none set before, and break nothing."""
    way.start()
    errors: list[BaseException] = []
    stop = threading.Event()
    logging.getLogger("cirron_otel").setLevel(logging.ERROR)
    logging.getLogger("opentelemetry").setLevel(logging.ERROR)
    try:
        for turn in range(30):
            ready = threading.Barrier(4)
            with ci.scope(f"hammered {turn}") as scope:
                span: Any = trace.get_current_span()

                def hammer(
                    number: int, span: Any = span, scope: Any = scope, ready: Any = ready
                ) -> None:
                    try:
                        for i in range(8):
                            (span if i % 2 else scope).set_attribute(f"before.{number}.{i}", i)
                        ready.wait()
                        for i in range(200):
                            span.set_attribute(f"after.{number}.{i % 5}", i)
                            scope.set_attribute(f"later.{number}.{i % 5}", i)
                    except Exception as error:  # noqa: BLE001 - reported below
                        errors.append(error)

                threads = [threading.Thread(target=hammer, args=(n,)) for n in range(3)]
                for thread in threads:
                    thread.start()
                ready.wait()
            for thread in threads:
                thread.join()
    finally:
        stop.set()
        logging.getLogger("cirron_otel").setLevel(logging.NOTSET)
        logging.getLogger("opentelemetry").setLevel(logging.NOTSET)
    assert errors == []
    wanted = {f"before.{n}.{i}" for n in range(3) for i in range(8)}
    for span in way.finish():
        if span.name.startswith("hammered"):
            assert wanted <= set(span.attributes)
            assert dict(span.attributes) == dict(span.attributes)
            assert wanted <= set(way.rows().one(span.name).attrs)


def test_every_field_that_otlp_reads(way: Any, named: Any) -> None:
    """The OTLP encoder finds every field of a scope's span as it was recorded."""
    way.start()
    given = {"text": "t", "number": 1, "real": 0.5, "flag": True, "many": [1, 2]}
    with (  # noqa: PT012 - what the body does matters
        ci.scope("outer", index=3) as outer,
        pytest.raises(RuntimeError, match="boom"),
        ci.scope("inner", **given, table={"k": "v"}),
    ):
        ci.mark("loss", 0.25)
        trace.get_current_span().add_link(OTHER, {"l": 1})
        raise RuntimeError("boom")
    way.finish()
    spans = [span for span in way.exporter.get_finished_spans() if span.name in ("outer", "inner")]
    request = encode_spans(spans)
    (resource_spans,) = request.resource_spans
    resource = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
    assert resource["telemetry.sdk.language"] == "python"
    (scope_spans,) = resource_spans.scope_spans
    assert scope_spans.scope.name == "cirron-otel"
    assert scope_spans.scope.version == ci.__version__
    proto = {span.name: span for span in scope_spans.spans}["inner"]
    row = way.rows().one("inner")
    made = named(spans, "inner").context
    assert proto.trace_id == made.trace_id.to_bytes(16, "big")
    assert proto.span_id == bytes.fromhex(row.id[:16])
    assert proto.parent_span_id == bytes.fromhex(outer.id[:16])
    assert proto.trace_state == ""
    assert proto.kind == 1
    assert (proto.start_time_unix_nano, proto.end_time_unix_nano) == (row.start_ns, row.end_ns)
    assert (proto.status.code, proto.status.message) == (2, "RuntimeError: boom")
    assert proto.flags == 0x100
    values = {item.key: item.value for item in proto.attributes}
    assert values["text"].string_value == "t"
    assert values["number"].int_value == 1
    assert values["real"].double_value == 0.5
    assert values["flag"].bool_value is True
    assert [one.int_value for one in values["many"].array_value.values] == [1, 2]
    assert values["table"].kvlist_value.values[0].key == "k"
    assert values["cirron.mark.loss"].double_value == 0.25
    assert values["error.type"].string_value == "RuntimeError"
    assert [event.name for event in proto.events] == ["loss", "exception"]
    loss = {item.key: item.value for item in proto.events[0].attributes}
    assert loss["value"].double_value == 0.25
    shown_at = proto.events[0].time_unix_nano
    assert row.mark_ids[0] == f"{row.id[:16]}{shown_at:016x}"
    assert proto.events[0].time_unix_nano == way.marks()[0].ts_ns
    assert proto.links[0].span_id == OTHER.span_id.to_bytes(8, "big")
    assert proto.links[0].flags == 0x300
    assert proto.dropped_attributes_count == 0
    assert proto.dropped_events_count == 0
    assert proto.dropped_links_count == 0
    outer_proto = {span.name: span for span in scope_spans.spans}["outer"]
    assert {i.key: i.value for i in outer_proto.attributes}["cirron.index"].int_value == 3


def test_the_console_exporter_prints_it(way: Any) -> None:
    """The stock console exporter prints a scope's span as the SDK prints its own."""
    text = io.StringIO()
    printing = ConsoleSpanExporter(out=text, formatter=lambda span: span.to_json(None) + "\n")
    way.start(SimpleSpanProcessor(printing))
    with ci.scope("shown", a=1) as scope:
        ci.mark("loss", 0.5)
        trace.get_current_span().add_link(OTHER)
    way.finish()
    printed = [json.loads(line) for line in text.getvalue().splitlines()]
    (shown,) = [one for one in printed if one["name"] == "shown"]
    assert shown["context"]["span_id"] == f"0x{scope.id[:16]}"
    assert shown["attributes"]["a"] == 1
    assert shown["start_time"].endswith("Z")
    assert shown["status"] == {"status_code": "UNSET"}
    assert shown["kind"] == "SpanKind.INTERNAL"
    assert [event["name"] for event in shown["events"]] == ["loss"]
    assert shown["links"][0]["context"]["span_id"] == f"0x{OTHER.span_id:016x}"
    assert "telemetry.sdk.name" in shown["resource"]["attributes"]


def test_what_was_exported_stays_as_it_is(way: Any, named: Any) -> None:
    """After its end a span can be read again and again, and changing the scope changes nothing."""
    way.start()
    with ci.scope("frozen", a=1) as scope:
        pass
    scope.attrs["late"] = 1
    span = named(way.finish(), "frozen")
    scope.attrs["later"] = 1
    assert "late" not in span.attributes
    assert "later" not in span.attributes
    assert dict(span.attributes) == dict(span.attributes)
