"""OTLP from spool rows: the same spans that OpenTelemetry's own exporter sends of the same run."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

import cirron_otel as ci
from cirron_otel.batch import Batch, SpanOtel, encode
from cirron_otel.otlp.batches import read_batch, read_later
from cirron_otel.otlp.gathering import MAX_MARKS, Gatherer
from cirron_otel.otlp.json_form import JsonWire
from cirron_otel.otlp.protobuf import ProtobufWire
from cirron_otel.otlp.rows import Limits, OtlpSpan, Scope, bounded, pending_id
from cirron_otel.otlp.wire import Encoded
from cirron_otel.provider import Limits as ProviderLimits
from helpers import read_batches
from spool_by_hand import T0, Writer, hex32, mark, span, training

OURS = Scope("cirron-otel", "0")


def gathered(batches: Sequence[Batch], gatherer: Gatherer | None = None) -> list[OtlpSpan]:
    """Every span of these batches, given to one gatherer in order, with all that comes later."""
    gatherer = gatherer or Gatherer()
    found: list[OtlpSpan] = []
    for i, batch in enumerate(batches):
        found += gatherer.spans(
            batch, lambda after=i + 1: (read_later(encode(one)) for one in batches[after:])
        )
    return found


def in_spool(directory: str = ".cirron") -> list[Batch]:
    """The batches of the test's spool, read as the exporter reads them."""
    files = sorted(Path(directory, "spool").glob("*.json"))
    return [read_batch(file.read_bytes()) for file in files]


def messages(request: bytes | ExportTraceServiceRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """The spans of a request by trace and span id, in a form to compare."""
    if isinstance(request, bytes):
        request = ExportTraceServiceRequest.FromString(request)
    return {
        (one.trace_id.hex(), one.span_id.hex()): {**_comparable(one), "scope": scope.scope.name}
        for resource in request.resource_spans
        for scope in resource.scope_spans
        for one in scope.spans
    }


def _comparable(one: Any) -> dict[str, Any]:
    out = json_format.MessageToDict(one)
    for thing in (out, *out.get("events", ()), *out.get("links", ())):
        thing["attributes"] = {each["key"]: each["value"] for each in thing.get("attributes", ())}
        # Whether a link's target, or a parent out of sight, is remote is in no row.
        thing.pop("flags", None)
    return out


def encoded(spans: Sequence[OtlpSpan]) -> bytes:
    """A protobuf request of these spans."""
    wire = ProtobufWire()
    return wire.request({}, [Encoded(one.scope or OURS, wire.span(one)) for one in spans])


def live_and_spooled(
    program: Callable[[Any], None], **settings: Any
) -> tuple[dict[tuple[str, str], dict[str, Any]], dict[tuple[str, str], dict[str, Any]]]:
    """What the stock exporter would send of a run with our provider, and what we make of its rows.

    Spans that the rows say more about (a mark of our own overhead is on no live span) are equal all
    the same; the scope of ours is named alike.
    """
    exporter = InMemorySpanExporter()
    profiler = ci.profile(frameworks=[], **settings)
    profiler.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    program(profiler)
    assert ci.shutdown()
    live = messages(encode_spans(exporter.get_finished_spans()))
    spooled = messages(encoded(gathered(in_spool())))
    return live, spooled


def one(spans: dict[tuple[str, str], dict[str, Any]], name: str) -> dict[str, Any]:
    """The only span of this name."""
    found = [each for each in spans.values() if each["name"] == name]
    assert len(found) == 1, f"{len(found)} spans are named {name!r}"
    return found[0]


def everyday(_: Any) -> None:
    """A small training run with marks of all kinds, an error, and spans of others."""
    for epoch in ci.epochs(range(2)):
        for step in ci.batches(range(3)):
            with ci.scope(
                "forward", shape=[2, 3], mode="train", nothing=None, deep={"a": [1, None]}
            ):
                ci.mark("loss", 1.5 / (1 + step + epoch))
            ci.mark("grad_norm", float("nan"))
        ci.mark("val_accuracy", 1, kind="summary", split="val")
    with suppress(ValueError), ci.scope("checkpoint", index=3, lr=float("inf")):
        ci.mark("size", 4096)
        ci.mark("path", "model.pt", shard=0)
        ci.mark("done", True)  # noqa: FBT003 - a mark's value
        raise ValueError("bad")


def otel_things(profiler: Any) -> None:
    """Kinds, links, events, status, a third-party span between two of ours."""
    tracer = profiler.tracer_provider.get_tracer("third.party", "1.2")
    other = trace.SpanContext(0xABC, 0xDEF, is_remote=False, trace_flags=trace.TraceFlags(1))
    with ci.scope("ours") as ours:
        ours.set_status(StatusCode.OK)
        ours.add_link(other, {"why": "because", "n": 2})
        ours.add_event("noted", {"x": 1.25, "list": ["a", "b"]})
        ci.mark("seen", 1)
        with tracer.start_as_current_span("theirs", kind=SpanKind.CLIENT) as theirs:
            theirs.set_attribute("http.method", "GET")
            with ci.scope("inner"):
                ci.mark("deep", "yes")
        ours.set_attribute("late", "value")


@pytest.mark.parametrize("program", [everyday, otel_things])
def test_equal_to_a_live_exporter(program: Callable[[Any], None]) -> None:
    """Every span the stock exporter sends comes out of the spool the same, and no other one."""
    live, spooled = live_and_spooled(program, spans="all", run_id="r")
    assert spooled.keys() == live.keys()
    for key, span_ in live.items():
        assert spooled[key] == span_


def test_windows_equal_to_a_live_exporter() -> None:
    """Window roots with their links and the steps in them come out of the spool the same."""

    def program(_: Any) -> None:
        for _epoch in ci.epochs(range(1)):
            for _step in ci.batches(range(60)):
                with ci.scope("forward"):
                    ci.mark("loss", 1.0)

    live, spooled = live_and_spooled(program, trace_max_spans=40)
    assert len({trace_id for trace_id, _ in live}) > 3
    assert spooled.keys() == live.keys()
    # `cirron.parent.id` may be left out of a live span where the window's root says it.
    for key, span_ in live.items():
        mine = spooled[key]
        if "cirron.parent.id" not in span_["attributes"]:
            mine["attributes"].pop("cirron.parent.id", None)
        assert mine == span_


def test_limits_equal_to_a_live_exporter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The span limits of the environment cut what comes out of the spool as they cut it live."""
    for name, value in {
        "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT": "8",
        "OTEL_SPAN_EVENT_COUNT_LIMIT": "5",
        "OTEL_SPAN_LINK_COUNT_LIMIT": "1",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT": "4",
        "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT": "1",
    }.items():
        monkeypatch.setenv(name, value)

    def program(_: Any) -> None:
        context = trace.SpanContext(1, 2, is_remote=False, trace_flags=trace.TraceFlags(1))
        with ci.scope("big", **{f"a{i}": "long text" for i in range(12)}) as scope:
            for i in range(9):
                ci.mark(f"m{i % 3}", i, unit="seconds")
                scope.add_event(f"e{i}", {"x": "abcdefgh", "y": 2})
            scope.add_link(context, {"one": 1})
            scope.add_link(context, {"two": 2})

    live, spooled = live_and_spooled(program)
    assert one(live, "big")["droppedEventsCount"] == 13
    assert one(spooled, "big") == one(live, "big")


@pytest.mark.parametrize("value", ["", "0", "7", "-1", "many"])
def test_limits_are_read_as_opentelemetry_reads_them(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    """Each limit variable, set, empty or wrong, means to us what it means to our provider."""
    names = {
        "OTEL_ATTRIBUTE_COUNT_LIMIT", "OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_SPAN_EVENT_COUNT_LIMIT", "OTEL_SPAN_LINK_COUNT_LIMIT",
        "OTEL_EVENT_ATTRIBUTE_COUNT_LIMIT", "OTEL_LINK_ATTRIBUTE_COUNT_LIMIT",
        "OTEL_ATTRIBUTE_VALUE_LENGTH_LIMIT", "OTEL_SPAN_ATTRIBUTE_VALUE_LENGTH_LIMIT",
    }  # fmt: skip
    for name in sorted(names):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            theirs, ours = ProviderLimits(), Limits.from_environment()
        assert ours == Limits(
            attributes=theirs.max_attributes,
            attribute_length=theirs.max_attribute_length,
            events=theirs.shown_events,
            links=theirs.shown_links,
            event_attributes=theirs.max_event_attributes,
            link_attributes=theirs.max_link_attributes,
            value_length=theirs.max_value_length,
        ), name


def test_session_comes_from_a_remote_parent() -> None:
    """TRACEPARENT becomes a link of the session, in OTLP as in the live span."""
    remote = propagate.extract({"traceparent": f"00-{0xABC:032x}-{0xDEF:016x}-01"})
    token = otel_context.attach(remote)
    live, spooled = live_and_spooled(lambda _: None)
    otel_context.detach(token)
    links = one(spooled, "cirron.session")["links"]
    assert links == one(live, "cirron.session")["links"]
    assert base64.b64decode(links[0]["spanId"]) == (0xDEF).to_bytes(8)


# --- marks and spans in different files -------------------------------------------------------


def test_marks_of_a_long_scope_come_from_earlier_files() -> None:
    """A scope's span bears the marks of all batches before it, the newest 128 as events."""
    ci.profile(frameworks=[])
    with ci.scope("long"):
        for i in range(200):
            ci.mark("loss", float(i))
            if i % 50 == 0:
                ci.flush()
        ci.mark("best", 3)
    assert ci.shutdown()
    batches = in_spool()
    assert len(batches) > 3
    found = next(span_ for span_ in gathered(batches) if span_.name == "long")
    assert found.attrs["cirron.mark.loss"] == 199.0
    assert found.attrs["cirron.mark.best"] == 3
    assert [event.attrs["value"] for event in found.events[:-1]] == [
        float(i) for i in range(73, 200)
    ]
    assert found.dropped_events == 201 - 128


def test_a_mark_in_the_next_file_is_found_there(tmp_path: Path) -> None:
    """A value that came after its span was written stands on the span, and is not kept again."""
    write = Writer(tmp_path, session="s/1", writer="w")
    late = mark("a/x", "loss", 0.5, at=3)
    write.batch(10, [span("a/x", "step", "s/1", 0, 5, mark_ids=(late.id,))])
    write.batch(20, [], [late])
    batches = read_batches(tmp_path)
    gatherer = Gatherer()
    (found,) = gathered(batches, gatherer)
    assert found.attrs["cirron.mark.loss"] == 0.5
    assert [event.name for event in found.events] == ["loss"]
    assert found.dropped_events == 0
    assert gatherer.missed_marks == 0
    (without,) = gathered(batches[:1], other := Gatherer())
    assert (without.events, without.dropped_events, other.missed_marks) == ([], 1, 1)


def test_epoch_of_a_span_whose_parents_come_later(tmp_path: Path) -> None:
    """The epoch is found through scopes still open, closed in this file, and closed in the next."""
    write = Writer(tmp_path, session="s/1", writer="w")
    epoch = span("s/e", "epoch", "s/1", 0, None, index=4)
    write.batch(1, [], open=[span("s/1", "cirron.session", None, 0, None), epoch])
    write.batch(
        10,
        [
            span("s/f", "forward", "s/step1", 1, 2),
            span("s/step1", "step", "s/e", 1, 3),
            span("s/f2", "forward", "s/step2", 3, 4),
            span("s/other", "export", "s/1", 3, 4),
        ],
    )
    write.batch(20, [span("s/step2", "step", "s/e", 3, 9)])
    spans = {one.span_id: one for one in gathered(read_batches(tmp_path))}
    epochs = {key: spans[hex32(key)[:16]].attrs.get("cirron.epoch") for key in
              ("s/f", "s/step1", "s/f2", "s/step2", "s/other")}  # fmt: skip
    assert epochs == {"s/f": 4, "s/step1": 4, "s/f2": 4, "s/step2": 4, "s/other": None}


def test_marks_that_wait_are_bounded(tmp_path: Path) -> None:
    """Of marks whose spans do not come, a bounded number is remembered; the rest is counted."""
    write = Writer(tmp_path, session="s/1", writer="w")
    marks = [mark(f"a/{i}", "x", i, at=1) for i in range(MAX_MARKS + 500)]
    write.batch(10, [], marks)
    write.batch(20, [span(f"a/{MAX_MARKS + 499}", "last", "s/1", 0, 5, mark_ids=("m",)),
                     span("a/0", "first", "s/1", 0, 5, mark_ids=("m",))])  # fmt: skip
    gatherer = Gatherer()
    last, first = gathered(read_batches(tmp_path), gatherer)
    assert last.attrs["cirron.mark.x"] == MAX_MARKS + 499
    assert (first.events, first.dropped_events) == ([], 1)
    assert (gatherer.forgotten_marks, gatherer.missed_marks) == (500, 1)


# --- what is left out, what is added -----------------------------------------------------------


def test_sampled_out_spans_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the sampler dropped is in the spool and not in OTLP."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    ci.profile(frameworks=[])
    with ci.scope("dropped"):
        ci.mark("x", 1)
    assert ci.shutdown()
    assert {row.name for row in in_spool()[-1].spans} == {"dropped", "cirron.session"}
    assert gathered(in_spool(), Gatherer(pending=True)) == []


def test_a_long_scope_is_announced_once(tmp_path: Path) -> None:
    """Session, epoch and window are announced when first seen open, others after five seconds."""
    write = Writer(tmp_path, session="s/1", writer="w")
    session = span("s/1", "cirron.session", None, 0, None)
    epoch = span("s/e", "epoch", "s/1", 1, None, index=0)
    slow = span("s/slow", "checkpoint", "s/e", 2, None, mark_ids=("m",))
    window = span("v/w", "steps[9..]", None, 3, None, otel=SpanOtel(window=True))
    write.batch(10, [], open=[session, epoch, slow, window])
    write.batch(20, [span("s/e", "epoch", "s/1", 1, 9, index=0)], open=[session, epoch, slow])
    write.batch(6000, [], open=[session, slow])
    batches = read_batches(tmp_path)
    gatherer = Gatherer(pending=True)
    first, second, third = (list(gatherer.spans(batch)) for batch in batches)
    assert [each.name for each in first] == [
        "cirron.session (open)", "epoch (open)", "steps[9..] (open)",
    ]  # fmt: skip
    assert [each.name for each in second] == ["epoch"]
    assert [each.name for each in third] == ["checkpoint (open)"]
    announced = first[1]
    assert announced.parent_id == hex32("s/e")[:16]
    assert announced.span_id == pending_id(hex32("s/e")) != announced.parent_id
    assert announced.end_ns == announced.start_ns
    assert announced.attrs["cirron.pending"] is True
    assert announced.attrs["cirron.epoch"] == 0
    assert third[0].dropped_events == 0


def test_learning_remembers_without_sending(tmp_path: Path) -> None:
    """After a restart the files before the first one tell of marks, epochs and announcements."""
    write = Writer(tmp_path, session="s/1", writer="w")
    session = span("s/1", "cirron.session", None, 0, None)
    epoch = span("s/e", "epoch", "s/1", 1, None, index=7)
    loss = mark("s/e", "loss", 2.0, at=3)
    write.batch(10, [], [loss], open=[session, epoch])
    write.batch(20, [span("s/step", "step", "s/e", 1, 9)], open=[session, epoch])
    write.batch(30, [span("s/e", "epoch", "s/1", 1, 9, index=7, mark_ids=(loss.id,))],
                open=[session])  # fmt: skip
    first, second, third = read_batches(tmp_path)
    gatherer = Gatherer(pending=True)
    gatherer.learn(first)
    (step,) = gatherer.spans(second)
    assert step.attrs["cirron.epoch"] == 7
    (ended,) = gatherer.spans(third)
    assert ended.attrs["cirron.mark.loss"] == 2.0


# --- the two encodings ------------------------------------------------------------------------


def test_json_says_the_same_as_protobuf(tmp_path: Path) -> None:
    """OTLP JSON, read by the official messages, is the protobuf request of the same spans."""
    live_and_spooled(everyday, spans="all", trace_max_spans=20)
    live_and_spooled(otel_things, spans="all")
    training(tmp_path / "more")
    spans = gathered(in_spool()) + gathered(in_spool("more"))
    spans[0].trace_state, spans[0].dropped_attributes = "vendor=x", 3
    assert any(each.links for each in spans)
    protobuf, text = ProtobufWire(), JsonWire()
    resource = {"service.name": "x", "n": 1, "list": [1, 2.5, True, None, {"a": "b"}]}
    body = text.request(resource, [Encoded(OURS, text.span(each)) for each in spans])
    # The official reader takes ids as base64, OTLP JSON has them in hex.
    document = json.loads(body)
    for each in document["resourceSpans"][0]["scopeSpans"][0]["spans"]:
        for holder in (each, *each.get("links", ())):
            for key in ("traceId", "spanId", "parentSpanId"):
                if key in holder:
                    holder[key] = base64.b64encode(bytes.fromhex(holder[key])).decode()
    read = json_format.ParseDict(document, ExportTraceServiceRequest())
    expected = ExportTraceServiceRequest.FromString(
        protobuf.request(resource, [Encoded(OURS, protobuf.span(each)) for each in spans])
    )
    # NaN is not equal to itself, so the text is compared.
    assert json_format.MessageToJson(read) == json_format.MessageToJson(expected)
    assert len(read.resource_spans[0].scope_spans[0].spans) > 200


_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=20)
    | st.floats(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3)
    | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=8), _values, max_size=6), st.integers(0, 200_000))
def test_any_attributes_can_be_said(attrs: dict[str, Any], padding: int) -> None:
    """Whatever JSON holds becomes valid protobuf and valid OTLP JSON, of any length."""
    made = OtlpSpan("0" * 31 + "1", "0" * 15 + "1", "", "n" * padding, 1, 1, 2, attrs, [], [])
    read = ExportTraceServiceRequest.FromString(encoded([made, made]))
    both = read.resource_spans[0].scope_spans[0].spans
    assert len(both) == 2
    assert len(both[0].name) == padding
    assert len(both[0].attributes) == len(attrs)
    said = json.loads(JsonWire().span(made))
    assert [each["key"] for each in said["attributes"]] == list(attrs)


def test_the_newest_attributes_stay() -> None:
    """Past the limit the oldest attributes go, an empty name always, and each is counted."""
    assert bounded({"a": 1, "": 2, "b": 3, "c": 4}, 2, None) == ({"b": 3, "c": 4}, 2)
    assert bounded({"a": "long", "b": ["text", 1]}, None, 2) == ({"a": "lo", "b": ["te", 1]}, 0)
    assert bounded({"a": 1}, 0, None) == ({}, 1)


def test_reading_in_slices_reads_the_same() -> None:
    """A batch read a slice at a time, for the training's sake, is the batch read at once."""
    live_and_spooled(everyday)
    breaths: list[None] = []
    for file in sorted(Path(".cirron/spool").glob("*.json")):
        data = file.read_bytes()
        assert read_batch(data, lambda: breaths.append(None)) == read_batch(data)
    assert len(breaths) > 2


def test_foreign_batches_are_read(tmp_path: Path) -> None:
    """A batch of the seed's shape, without any of our keys, becomes spans with what it says."""
    write = Writer(tmp_path)
    write.batch(10, [span("one", "epoch", None, 0, 5, index=1, attrs={"lr": 0.5})])
    (found,) = gathered(in_spool(str(tmp_path)))
    assert (found.trace_id, found.span_id) == ("0" * 16 + hex32("one")[16:], hex32("one")[:16])
    assert found.attrs == {"lr": 0.5, "cirron.rank": 0, "thread.id": 1, "cirron.index": 1,
                           "cirron.epoch": 1}  # fmt: skip
    assert found.end_ns - found.start_ns == 5_000_000
    assert found.start_ns == T0


@pytest.fixture(autouse=True)
def _no_provider_left() -> Iterator[None]:
    """Nothing of ours is the global provider after a test."""
    yield
    ci.shutdown()
