"""Of OpenTelemetry only what is public is used, in whatever release."""

from __future__ import annotations

import ast
import tomllib
from pathlib import Path

import pytest

import cirron_otel as ci
from helpers import RunProgram

SOURCE = Path(ci.__file__).parent

#: Notes every access to a private attribute of the SDK's objects by anybody but itself.
PROGRAM = """
    import sys

    from opentelemetry import attributes, context, trace
    from opentelemetry.sdk import resources, trace as sdk
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    from opentelemetry.sdk.util import instrumentation

    seen = set()

    def watch(kind):
        looked_up = kind.__getattribute__

        def __getattribute__(self, name):
            if name.startswith("_") and not name.startswith(("__", "_cirron_otel_")):
                by = sys._getframe(1).f_globals.get("__name__", "")
                if not by.startswith("opentelemetry."):
                    seen.add(f"{kind.__name__}.{name} by {by}")
            return looked_up(self, name)

        kind.__getattribute__ = __getattribute__

    for kind in (
        sdk.TracerProvider, sdk.Tracer, sdk.ReadableSpan, sdk.Event, sdk.EventBase,
        trace.SpanContext, trace.Link, trace.Status, trace.TraceState, trace.NonRecordingSpan,
        attributes.BoundedAttributes, resources.Resource, instrumentation.InstrumentationScope,
        context.Context, SimpleSpanProcessor,
    ):
        watch(kind)

    provider = sdk.TracerProvider()
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    if "joined" in sys.argv:
        trace.set_tracer_provider(provider)

    import cirron_otel as ci

    profiler = ci.profile(frameworks=[], spans="all", resources=["cpu"])
    if "joined" not in sys.argv:
        profiler.tracer_provider.add_span_processor(SimpleSpanProcessor(exporter))
    tracer = trace.get_tracer("app", tracer_provider=profiler.tracer_provider)
    caller = {"traceparent": f"00-{7:032x}-{9:016x}-01", "tracestate": "a=1"}
    for _ in range(3):
        with ci.scope("work", index=0, lr=0.1) as scope:
            ci.mark("loss", 0.5)
            scope.set_attribute("more", 1)
            scope.add_event("event", {"a": 1})
            with tracer.start_as_current_span("theirs") as span:
                span.set_attribute("x", 1)
                with ci.scope("inside"):
                    ci.mark("text", "t")
        with ci.request(headers=caller, operation="chat", model="m") as request:
            request.chunk("token")
        try:
            with ci.scope("failing"):
                raise ValueError("no")
        except ValueError:
            pass
        for _ in ci.epochs(range(2)):
            for _ in ci.batches(range(3)):
                ci.mark("loss", 1)
    provider.force_flush()
    ci.shutdown()
    assert len(exporter.get_finished_spans()) > 40, len(exporter.get_finished_spans())
    print(*sorted(seen), sep="\\n")
    seen.clear()
    provider._active_span_processor
    assert seen == {"TracerProvider._active_span_processor by __main__"}
"""


@pytest.mark.parametrize(("provider", "pure"), [("own", ""), ("joined", ""), ("joined", "1")])
def test_nothing_private_is_read(run_program: RunProgram, provider: str, pure: str) -> None:
    """Spans, tracers, providers and contexts are used by their public names, compiled or not."""
    run = run_program(PROGRAM, args=(provider,), env={"CIRRON_OTEL_PURE": pure})
    # OpenTelemetry's `OnEnding` is experimental, and named so there; without it we do without.
    assert set(run.stdout.split("\n")) <= {
        "",
        "SimpleSpanProcessor._on_ending by cirron_otel.spans",
    }


def _imports() -> list[tuple[str, str]]:
    found = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names = [one.name for one in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [f"{node.module}.{one.name}" for one in node.names]
            else:
                continue
            found += [(path.name, name) for name in names if name.startswith("opentelemetry")]
    return found


def test_nothing_private_is_imported() -> None:
    """No module and no name of OpenTelemetry's with an underscore before it."""
    found = _imports()
    assert len(found) > 50
    assert [one for one in found if "._" in one[1]] == []


def test_the_newest_release_is_what_we_are_tested_with() -> None:
    """No upper bound keeps CI, which installs what is newest, from a release that breaks us."""
    project = tomllib.loads((SOURCE.parents[1] / "pyproject.toml").read_text())["project"]
    wanted = [
        one
        for group in (project["dependencies"], *project["optional-dependencies"].values())
        for one in group
        if one.startswith("opentelemetry")
    ]
    assert len(wanted) > 5
    assert [one for one in wanted if "<" in one or "==" in one or "~=" in one] == []
