"""A caller's trace is found without a propagator where that comes to the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from opentelemetry import propagate
from opentelemetry.context import Context
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.propagators.textmap import (
    CarrierT,
    Getter,
    Setter,
    TextMapPropagator,
    default_getter,
    default_setter,
)
from opentelemetry.trace import NonRecordingSpan, SpanContext, SpanKind, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

import cirron_otel as ci
from cirron_otel._guard import Guard
from cirron_otel.batch import SpanRecord
from cirron_otel.serving.callers import Callers, read_caller
from cirron_otel.serving.requests import open_request
from helpers import read_spool

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
CALLER = f"00-{TRACE}-{SPAN}-01"
UNSAMPLED = f"00-{TRACE}-{SPAN}-00"


class Said:
    """As much of a recorder as reading headers takes."""

    guard = Guard()


_PARENTS = st.sampled_from(
    [
        CALLER, UNSAMPLED, f"00-{TRACE}-{SPAN}-03", f" {CALLER}\t", f"01-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01-more", f"ff-{TRACE}-{SPAN}-01", f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01", CALLER.upper(), f"{CALLER}\n", "", "nonsense", "00-é-1-1",
    ]
)  # fmt: skip
_VALUES = {
    "traceparent": _PARENTS,
    "tracestate": st.sampled_from(["a=1", "a=1,b=2", "", "no state"]),
    "baggage": st.sampled_from(["key=value", "", "%%%"]),
    "x-request-id": st.sampled_from(["one", " two ", ""]),
    "accept": st.just("*/*"),
}


@st.composite
def _headers(draw: st.DrawFn) -> list[tuple[str | bytes, str | bytes]]:
    made: list[tuple[str | bytes, str | bytes]] = []
    for name in draw(st.lists(st.sampled_from(sorted(_VALUES)), max_size=5)):
        value = draw(_VALUES[name])
        spelt = draw(st.sampled_from([name, name.title(), name.upper()]))
        as_bytes = draw(st.booleans())
        made.append((spelt.encode(), value.encode()) if as_bytes else (spelt, value))
    return made


@given(_headers())
@example([("x-request-id", ""), ("x-request-id", "one")])
def test_headers_say_what_the_propagator_says(
    headers: list[tuple[str | bytes, str | bytes]],
) -> None:
    """Whatever the headers hold, read quickly or by the propagator, the caller is the same."""
    quick = Callers(Said()).read(headers)  # type: ignore[arg-type]
    slow = read_caller(headers)
    assert quick == slow
    assert (quick.span is None) == (slow.span is None)
    if quick.span is not None and slow.span is not None:
        assert quick.span.trace_state == slow.span.trace_state
        assert quick.span.trace_flags == slow.span.trace_flags


def _requests(headers: dict[str, str], directory: str) -> list[SpanRecord]:
    """Three requests of one caller, each made in another way, and a scope in each; their rows."""

    @ci.inference(headers=lambda: headers)
    def decorated() -> None:
        with ci.scope("inside"):
            carrier: dict[str, str] = {}
            propagate.inject(carrier)
            seen.append(carrier)

    seen: list[dict[str, str]] = []
    decorated()
    with ci.request(headers=headers) as request:
        assert request.kind is SpanKind.SERVER
        assert request.parent is not None
        assert request.parent.is_remote
        assert f"{request.parent.span_id:016x}" == SPAN
        request.fail("overloaded")
        assert request.kind is SpanKind.SERVER
    opened = open_request(headers=list(headers.items()), attach=False)
    assert opened is not None
    assert opened.state.kind == "server"
    opened.finish(ValueError("no"))
    (carrier,) = seen
    assert carrier.get("tracestate") == headers.get("tracestate")
    assert ci.shutdown()
    rows = read_spool(Path(directory))
    inside = rows.one("inside")
    assert carrier["traceparent"].split("-")[1:3] == [TRACE, inside.id[:16]]
    assert inside.otel
    assert f"{inside.otel.trace_id}{inside.id[16:]}" == TRACE
    return rows.named("request")


@pytest.mark.parametrize("sampler", ["", "always_on", "always_off", "parentbased_traceidratio"])
@pytest.mark.parametrize(
    "headers",
    [
        {"traceparent": CALLER},
        {"traceparent": UNSAMPLED},
        {"traceparent": CALLER, "tracestate": "a=1,b=2"},
    ],
)
def test_a_short_way_leaves_what_the_long_one_does(
    headers: dict[str, str], sampler: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of requests with a caller are alike, whatever else a recording has to do for each."""
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    said = []
    for directory, resources in (("short", None), ("long", ["cpu"])):
        monkeypatch.setenv("CIRRON_OUTPUT_DIR", directory)
        ci.profile(frameworks=[], resources=resources)
        said.append([_without_times(row) for row in _requests(headers, directory)])
    assert said[0] == said[1]


def _without_times(row: SpanRecord) -> tuple[object, ...]:
    assert row.otel
    events = [one["name"] for one in row.otel.events or ()]
    attrs = {key: value for key, value in row.attrs.items() if key != "request_id"}
    return (
        row.name, attrs, row.otel.trace_id, row.id[16:], row.otel.parent_span_id, row.otel.kind,
        row.otel.sampled, row.otel.trace_state, row.otel.status, row.otel.links, events,
    )  # fmt: skip


class AnotherTrace(TraceContextTextMapPropagator):
    """Takes ``traceparent`` for another trace than it names."""

    def extract(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        getter: Getter[CarrierT] = default_getter,  # type: ignore[assignment]
    ) -> Context:
        """As a propagator's."""
        if not getter.get(carrier, "traceparent"):
            return context or Context()
        mine = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=True)
        return set_span_in_context(NonRecordingSpan(mine), context)


class InBaggage(TextMapPropagator):
    """Has a trace in ``baggage``, which wins over what others read before."""

    fields = {"baggage"}  # noqa: RUF012 - as a propagator's

    def inject(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        setter: Setter[CarrierT] = default_setter,  # type: ignore[assignment]
    ) -> None:
        """As a propagator's; nothing is sent here."""

    def extract(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        getter: Getter[CarrierT] = default_getter,  # type: ignore[assignment]
    ) -> Context:
        """As a propagator's."""
        if not getter.get(carrier, "baggage"):
            return context or Context()
        mine = SpanContext(trace_id=0xABC, span_id=0xDEF, is_remote=True)
        return set_span_in_context(NonRecordingSpan(mine), context)


@pytest.fixture(
    params=[
        AnotherTrace(), CompositePropagator([TraceContextTextMapPropagator(), InBaggage()])
    ]
)  # fmt: skip
def propagator(request: pytest.FixtureRequest) -> Iterator[TextMapPropagator]:
    """A propagator of the application's own, set after the recording began."""
    known = propagate.get_global_textmap()
    yield request.param
    propagate.set_global_textmap(known)


def test_a_propagator_that_comes_later_counts(propagator: TextMapPropagator) -> None:
    """An application may set it at any time, and what it reads is the caller from then on."""
    ci.profile(frameworks=[])
    headers = {"traceparent": CALLER, "baggage": "key=value"}
    with ci.request(headers=headers) as first:
        assert f"{first.get_span_context().trace_id:032x}" == TRACE
    propagate.set_global_textmap(propagator)
    with ci.request(headers=headers) as second:
        assert second.get_span_context().trace_id == 0xABC
    assert ci.shutdown()


class Asked(TraceContextTextMapPropagator):
    """Counts how often it is asked."""

    times = 0

    def extract(
        self,
        carrier: CarrierT,
        context: Context | None = None,
        getter: Getter[CarrierT] = default_getter,  # type: ignore[assignment]
    ) -> Context:
        """As a propagator's."""
        self.times += 1
        return super().extract(carrier, context, getter)


def test_no_propagator_is_asked_where_nothing_is_recorded() -> None:
    """The caller's id is kept all the same, in whatever form it comes; broken ones do no harm."""
    known, asked = propagate.get_global_textmap(), Asked()
    propagate.set_global_textmap(asked)
    try:
        headers: list[tuple[str | bytes, str | bytes]] = [
            ("traceparent", CALLER), (b"X-Request-ID", b" one "), ("x-request-id", "two"),
        ]  # fmt: skip
        assert ci.request(headers=headers).request_id == "one"
        assert ci.request(headers={"x-request-id": "one"}).request_id == "one"
        assert ci.request(headers=iter(headers)).request_id == "one"
        assert ci.request(headers=headers, request_id="mine").request_id == "mine"
        assert len(ci.request(headers=[("x-request-id",)]).request_id) == 32  # type: ignore[list-item]
        assert open_request(headers=headers) is None
    finally:
        propagate.set_global_textmap(known)
    assert asked.times == 0
