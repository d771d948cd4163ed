"""Which provider records, what it tells of itself, and how often it may be started and ended."""

from __future__ import annotations

import logging
import random
import threading
from pathlib import Path
from typing import Any

import pytest
from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import cirron_otel as ci
from helpers import read_spool


def test_the_applications_provider_is_joined_and_stays(named: Any) -> None:
    """An SDK provider is used as it is: global before and after, its resource its own."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider(resource=Resource.create({"service.name": "app"}))
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    profiler = ci.profile(frameworks=[])
    assert profiler.tracer_provider is provider
    assert ci.health()["provider"] == "joined"
    with ci.scope("work"):
        pass
    ci.shutdown()
    assert trace.get_tracer_provider() is provider
    with provider.get_tracer("app").start_as_current_span("after"):
        pass
    spans = exporter.get_finished_spans()
    assert {span.name for span in spans} == {"cirron.session", "work", "after"}
    assert named(spans, "work").resource.attributes["service.name"] == "app"
    assert named(spans, "work").instrumentation_scope.name == "cirron-otel"


def test_again_and_again_with_one_provider(tmp_path: Path) -> None:
    """Two hundred recordings on one provider leave no thread, no processor, no double span."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)

    def once() -> None:
        ci.profile(frameworks=[], path=tmp_path / "out")
        with ci.scope("work"):
            pass
        assert ci.shutdown()

    once()
    threads = threading.active_count()
    added = len(provider._active_span_processor._span_processors)
    for _ in range(199):
        once()
    assert threading.active_count() == threads
    assert len(provider._active_span_processor._span_processors) == added
    assert len([span for span in exporter.get_finished_spans() if span.name == "work"]) == 200
    assert len(read_spool(tmp_path / "out").named("work")) == 200


def test_again_and_again_with_our_own() -> None:
    """The same with our own provider."""
    ci.profile(frameworks=[])
    ci.shutdown()
    threads = threading.active_count()
    for _ in range(100):
        ci.profile(frameworks=[])
        ci.shutdown()
    assert threading.active_count() == threads


def test_a_second_profile_changes_nothing() -> None:
    """``profile()`` while recording returns the running recording, and nothing is added twice."""
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    first = ci.profile(frameworks=[])
    assert ci.profile(frameworks=[]) is first
    assert len(provider._active_span_processor._span_processors) == 2


def test_foreign_spans_are_in_the_spool_only_on_demand(way: Any) -> None:
    """With ``spans="all"`` third-party spans are rows, each under the span it was made in."""
    way.start(spans="all")
    tracer = way.tracer()
    with ci.scope("ours"), tracer.start_as_current_span("http", attributes={"u": 1}) as http:
        http.add_event("sent")
        with tracer.start_as_current_span("socket", kind=trace.SpanKind.CLIENT):
            pass
        with ci.scope("inner"):
            pass
    tracer.start_span("background", context=trace.set_span_in_context(trace.INVALID_SPAN)).end()
    way.finish()
    rows = way.rows()
    assert rows.one("http").parent_id == rows.one("ours").id
    assert rows.one("socket").parent_id == rows.one("http").id
    assert rows.one("inner").parent_id == rows.one("ours").id
    assert rows.one("background").parent_id == rows.one("cirron.session").id
    assert rows.one("http").attrs == {"u": 1}
    assert [event["name"] for event in rows.one("http").otel.events] == ["sent"]
    assert rows.one("http").otel.scope == {"name": "third.party", "version": "1.2"}
    assert rows.one("socket").otel.kind == "client"
    assert rows.one("inner").otel.parent_span_id == rows.one("http").id[:16]


def test_foreign_spans_are_not_announced(way: Any) -> None:
    """With ``spans="own"`` nothing of a third-party span reaches the spool, not even while open."""
    way.start()
    with way.tracer().start_as_current_span("theirs"), ci.scope("ours"):
        ci.flush()
        assert "ours" in [row.name for row in way.rows().open]
        assert "theirs" not in [row.name for row in way.rows().open]
    way.finish()
    assert {row.name for row in way.rows().spans} == {"cirron.session", "ours"}
    known = {row.id for row in way.rows().spans}
    assert {mark.span_id for mark in way.rows().marks} <= known


def test_flushing_the_provider_flushes_the_spool(way: Any) -> None:
    """``force_flush`` of either provider writes what was recorded so far."""
    way.start(flush_interval=3600)
    with ci.scope("work"):
        pass
    assert way.provider.force_flush()
    assert len(way.rows().named("work")) == 1
    assert "work" in [span.name for span in way.exporter.get_finished_spans()]


def test_our_provider_becomes_global_only_on_demand() -> None:
    """``set_global=True`` makes every library's tracer ours, for later recordings as well."""
    ci.profile(frameworks=[])
    assert isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider)
    ci.shutdown()
    profiler = ci.profile(frameworks=[], set_global=True, spans="all", path="first")
    assert trace.get_tracer_provider() is profiler.tracer_provider
    library = trace.get_tracer("library")
    with ci.scope("ours"), library.start_as_current_span("theirs") as theirs:
        assert theirs.is_recording()
    ci.shutdown()
    with library.start_as_current_span("between") as between:
        assert not between.is_recording()
    assert read_spool("first").one("theirs").parent_id == read_spool("first").one("ours").id
    again = ci.profile(frameworks=[], set_global=True, spans="all", path="second")
    assert again.tracer_provider is trace.get_tracer_provider()
    with library.start_as_current_span("theirs again"):
        pass
    ci.shutdown()
    assert len(read_spool("second").named("theirs again")) == 1


class Vendor(trace.TracerProvider):
    """A provider that is no SDK's."""

    def get_tracer(self, *args: Any, **more: Any) -> trace.Tracer:
        """A tracer that does nothing."""
        del args, more
        return trace.NoOpTracer()


def test_a_provider_of_another_kind(caplog: pytest.LogCaptureFixture) -> None:
    """It is left alone: we record with a private one, and say so in one line."""
    vendor = Vendor()
    trace.set_tracer_provider(vendor)
    with caplog.at_level(logging.INFO, logger="cirron_otel"):
        profiler = ci.profile(frameworks=[])
        with ci.scope("work"):
            pass
        ci.shutdown()
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.INFO]
    assert len([line for line in lines if "Vendor" in line]) == 1
    assert profiler.tracer_provider is not vendor
    assert trace.get_tracer_provider() is vendor
    assert len(read_spool().named("work")) == 1


def test_disabled_by_the_environment(way: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """``OTEL_SDK_DISABLED``: nobody sees a span, the spool goes on, and ``health()`` says so."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "TRUE")
    way.start()
    assert ci.health()["otel"] == "disabled by OTEL_SDK_DISABLED"
    assert ci.health()["provider"] == "own"
    with ci.scope("ours"), way.tracer().start_as_current_span("theirs") as theirs:
        assert not theirs.is_recording()
        with ci.scope("inner"):
            pass
    assert way.finish() == []
    rows = way.rows()
    assert rows.one("inner").parent_id == rows.one("ours").id


def test_a_parent_from_the_environment_is_a_link(
    way: Any, named: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``TRACEPARENT`` is what the session is linked to; its trace is one of its own."""
    monkeypatch.setenv("TRACEPARENT", f"00-{0xABC:032x}-{0xDEF:016x}-01")
    way.start()
    session = named(way.finish(), "cirron.session")
    assert session.parent is None
    assert session.context.trace_id != 0xABC
    assert [(link.context.trace_id, link.context.span_id) for link in session.links] == [
        (0xABC, 0xDEF)
    ]
    assert way.rows().one("cirron.session").otel.links[0]["span_id"] == f"{0xDEF:016x}"


@pytest.mark.parametrize("text", ["nonsense", "", "00-0-0-01"])
def test_a_bad_parent_is_ignored(
    way: Any, named: Any, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """A malformed ``TRACEPARENT`` is no reason to say anything."""
    monkeypatch.setenv("TRACEPARENT", text)
    way.start()
    assert named(way.finish(), "cirron.session").links == ()


def resource_of(**settings: Any) -> dict[str, Any]:
    """The resource attributes of a recording with our own provider."""
    exporter = InMemorySpanExporter()
    profiler = ci.profile(frameworks=[], **settings)
    profiler.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    ci.shutdown()
    (session,) = exporter.get_finished_spans()
    return dict(session.resource.attributes)


def test_the_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """The resource says which run, rank, process and host this is."""
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_RANK", "1")
    found = resource_of(run_id="r1")
    assert found["cirron.run.id"] == "r1"
    assert found["service.instance.id"] == "r1-rank2"
    assert (found["dl.rank"], found["dl.world_size"], found["dl.local_rank"]) == (2, 4, 1)
    assert found["host.name"]
    assert found["process.pid"] > 0
    assert not found["service.name"].startswith("unknown_service")


def test_whose_word_counts_for_the_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    """OTEL_SERVICE_NAME beats OTEL_RESOURCE_ATTRIBUTES, and both beat our default."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "service.name=from-attributes,team=a%20b")
    found = resource_of()
    assert (found["service.name"], found["team"]) == ("from-attributes", "a b")
    monkeypatch.setenv("OTEL_SERVICE_NAME", "from-name")
    assert resource_of()["service.name"] == "from-name"


def test_ids_are_our_own(way: Any) -> None:
    """Seeding the random module does not repeat ids with our own provider."""
    if way.kind == "joined":
        pytest.skip("the application's provider makes the ids")
    ids = []
    for _ in range(2):
        random.seed(42)
        before = random.getstate()
        ci.profile(frameworks=[])
        with ci.scope("x") as scope:
            ids.append(scope.id)
        ci.shutdown()
        assert random.getstate() == before
    assert ids[0] != ids[1]
