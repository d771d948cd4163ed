"""What must hold of scopes in a joined provider whichever way, short or long, they open and close.

The short way is compiled where that was built; `make test` runs this file on both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanLimits, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, StaticSampler
from opentelemetry.trace import Span, StatusCode

import cirron_otel as ci
from helpers import RunProgram, read_spool


def join(
    *processors: SpanProcessor, **provider: Any
) -> tuple[TracerProvider, InMemorySpanExporter]:
    """A recording in an application that has set up a provider of its own."""
    made, exporter = TracerProvider(**provider), InMemorySpanExporter()
    for processor in (*processors, SimpleSpanProcessor(exporter)):
        made.add_span_processor(processor)
    trace.set_tracer_provider(made)
    ci.profile(frameworks=[])
    assert ci.health()["provider"] == "joined"
    return made, exporter


class AtStart(SpanProcessor):
    """A processor that does something to each span named ``one`` when that starts."""

    def __init__(self, act: Callable[[Span], object]) -> None:
        self.act = act
        self.seen: list[Span] = []

    def on_start(self, span: Any, parent_context: Any = None) -> None:  # noqa: ARG002
        """Act, and remember the span."""
        self.seen.append(span)
        if span.name == "one":
            self.act(span)


def _link(span: Span) -> None:
    other = trace.SpanContext(7, 8, is_remote=True)
    span.add_link(other, {"why": "test"})


#: What somebody does to a span, and what must then be in its row.
TOUCHES: dict[str, tuple[Callable[[Span], object], Callable[[Any], bool]]] = {
    "nothing": (lambda _: None, lambda row: not row.attrs and not row.otel.events),
    "an attribute": (
        lambda span: span.set_attribute("theirs", 1),
        lambda row: row.attrs == {"theirs": 1},
    ),
    "an event": (
        lambda span: span.add_event("seen", {"k": "v"}),
        lambda row: [(e["name"], e["attrs"]) for e in row.otel.events] == [("seen", {"k": "v"})],
    ),
    "a link": (_link, lambda row: [link["attrs"] for link in row.otel.links] == [{"why": "test"}]),
    "a status": (
        lambda span: span.set_status(StatusCode.ERROR, "bad"),
        lambda row: (row.otel.status, row.otel.status_message) == ("error", "bad"),
    ),
    "a name": (lambda span: span.update_name("other"), lambda row: row.name == "other"),
}


@pytest.mark.parametrize("marked", [False, True], ids=["bare", "marked"])
@pytest.mark.parametrize("how", ["in the body", "at the start"])
@pytest.mark.parametrize("touch", TOUCHES)
def test_what_others_set_on_the_span_is_in_the_row(touch: str, how: str, marked: bool) -> None:  # noqa: FBT001
    """Neither the short way out nor marks of ours hide what was set on the span directly."""
    act, holds = TOUCHES[touch]
    join(*([AtStart(act)] if how == "at the start" else []))
    with ci.scope("outer"):
        with ci.scope("one") as one:
            if how == "in the body":
                act(trace.get_current_span())
            if marked:
                ci.mark("loss", 0.5)
                ci.mark("loss", 0.25)
        known = one.id
    assert ci.shutdown()
    rows = read_spool()
    row = next(row for row in rows.spans if row.id == known)
    assert holds(row)
    assert len(row.mark_ids) == (2 if marked else 0)
    assert not row.otel.events or "loss" not in [event["name"] for event in row.otel.events]


def test_the_last_values_and_the_index_are_attributes(named: Any) -> None:
    """A scope's marks are events of its span, their last values attributes beside its index."""
    _, exporter = join()
    with ci.scope("outer"), ci.scope("one", index=3):
        ci.mark("loss", 0.5)
        ci.mark("loss", 0.25)
        ci.mark("seen", 7)
    assert ci.shutdown()
    span = named(exporter.get_finished_spans(), "one")
    assert dict(span.attributes) == {
        "cirron.index": 3, "cirron.mark.loss": 0.25, "cirron.mark.seen": 7,
    }  # fmt: skip
    assert [dict(event.attributes) for event in span.events] == [
        {"value": 0.5}, {"value": 0.25}, {"value": 7},
    ]  # fmt: skip
    row = read_spool().named("one")[0]
    assert (row.index, row.attrs) == (3, {})
    assert row.mark_ids == tuple(f"{row.id[:16]}{event.timestamp:016x}" for event in span.events)


def test_a_limit_on_attributes_changes_no_row(named: Any) -> None:
    """Where the span has no room for the values of marks, the row is as ever."""
    _, exporter = join(span_limits=SpanLimits(max_span_attributes=1))
    with ci.scope("outer"), ci.scope("one"):
        ci.mark("loss", 0.5)
        ci.mark("seen", 7)
    assert ci.shutdown()
    assert len(named(exporter.get_finished_spans(), "one").attributes) == 1
    assert len(read_spool().named("one")[0].mark_ids) == 2


@pytest.mark.parametrize("decision", [Decision.RECORD_ONLY, Decision.DROP])
def test_a_span_is_started_once(decision: Decision) -> None:
    """Spans that the sampler does not let out are started once, as any, and are in the spool."""
    watcher = AtStart(lambda _: None)
    join(watcher, sampler=StaticSampler(decision))
    for _ in range(3):
        with ci.scope("outer"), ci.scope("one"):
            pass
    assert ci.shutdown()
    rows = read_spool().named("one")
    assert len({row.id for row in rows}) == 3
    assert {row.otel.sampled for row in rows} == {False}
    started = [span for span in watcher.seen if getattr(span, "name", "") == "one"]
    assert len(started) == (3 if decision is Decision.RECORD_ONLY else 0)


def test_a_processor_that_ends_the_span_at_once() -> None:
    """A span that is over before it begins does not lose the scope, nor those below it."""
    join(AtStart(lambda span: span.end()))
    with ci.scope("outer"), ci.scope("one"), ci.scope("below"):
        ci.mark("loss", 0.5)
    assert ci.shutdown()
    rows = read_spool()
    assert rows.named("below")[0].parent_id == rows.named("one")[0].id


def test_a_processor_that_raises_at_the_start(caplog: pytest.LogCaptureFixture) -> None:
    """It is named in the log, counted, and costs no row."""

    def fail(span: Span) -> None:
        raise ValueError(span)

    join(AtStart(fail))
    with ci.scope("outer"), ci.scope("one"), ci.scope("below"):
        pass
    assert ci.health()["swallowed_errors"] == {"processor.on_start": 1}
    assert ci.shutdown()
    rows = read_spool()
    assert rows.named("below")[0].parent_id == rows.named("one")[0].id
    assert "a processor of the application.on_start() raised" in caplog.text


@pytest.mark.parametrize(
    "field",
    ["name", "index", "attrs", "otel", "iteration", "prev", "ctx", "above", "trace", "extra",
     "marks", "span", "_given", "_seen", "_shared", "values", "_rec"],
)  # fmt: skip
def test_deleting_a_field_does_not_crash(run_program: RunProgram, field: str) -> None:
    """The interpreter survives, and the program never hears of it."""
    done = run_program(
        f"""
        import contextlib
        from opentelemetry import trace
        from opentelemetry.sdk.trace import TracerProvider
        trace.set_tracer_provider(TracerProvider())
        import cirron_otel as ci
        ci.profile(frameworks=[])
        for late in (False, True):
            try:
                with ci.scope("outer"), ci.scope("inner") as one:
                    if late:
                        ci.mark("number", 1.0)
                    with contextlib.suppress(AttributeError):  # it may not be there yet
                        del one.{field}
                    ci.mark("number", 1.0)
                    ci.mark("text", "x")
                    with ci.scope("below"):
                        pass
                    ci.flush()
            except AttributeError:
                assert {field!r} == "_rec"  # without its recorder a scope has nobody to tell
        ci.shutdown()
        print("survived")
        """,
        env={"CIRRON_OTEL_STRICT": "0"},
    )
    assert "survived" in done.stdout


def test_nothing_is_kept_of_scopes_that_have_ended() -> None:
    """Ten thousand scopes with marks later, no more objects are alive than before."""
    import gc  # noqa: PLC0415 - for this test only

    join()
    with ci.scope("outer"):
        for count in (200, 10_000):
            for index in range(count):
                with ci.scope("one", index=index):
                    ci.mark("loss", index)
            ci.flush()
            gc.collect()
            alive = sum(type(found).__name__ == "Joined" for found in gc.get_objects())
            assert alive < 60, f"after {count}"  # the session, windows of the trace, "outer"
