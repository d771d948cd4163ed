"""Whole runs that export while they train: what the receiver has at the end."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import cirron_otel as ci
from delivery.otlp_server import OtlpServer, grpc_receiver, http_receiver
from helpers import RunProgram, read_spool


def attribute(span: Any, name: str) -> Any:
    """The value of a span's attribute, whatever its type; None without it."""
    for one in span.attributes:
        if one.key == name:
            return getattr(one.value, one.value.WhichOneof("value"))
    return None


def pending(server: OtlpServer) -> list[Any]:
    """The announcements among the spans."""
    return [one for one in server.spans.values() if attribute(one, "cirron.pending")]


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_no_trace_grows_past_the_budget() -> None:
    """A run of 20,000 steps arrives whole, in traces of at most 2,000 spans."""
    with http_receiver() as server:
        ci.profile(frameworks=[], otlp=server.url, exit_budget=120, export_rate=0)
        for _ in ci.epochs(range(4)):
            for step in ci.batches(range(5000)):
                with ci.scope("forward"):
                    ci.mark("loss", 1.0 / (1 + step))
        assert ci.shutdown()
    rows = read_spool()
    exported = [one for one in server.spans.values() if not attribute(one, "cirron.pending")]
    assert len(exported) == len(rows.spans) + len(rows.windows)
    assert len(exported) > 60_000
    sizes = Counter(one.trace_id for one in server.spans.values())
    assert max(sizes.values()) <= 2000
    steps = [one for one in exported if one.name == "step"]
    assert sorted(attribute(one, "dl.iteration") for one in steps) == list(range(20_000))
    assert Counter(attribute(one, "cirron.epoch") for one in steps) == dict.fromkeys(range(4), 5000)
    losses = [one for one in exported if one.name == "forward"]
    assert all(attribute(one, "cirron.mark.loss") is not None for one in losses)
    assert all(len(one.events) == 1 for one in losses)


def test_what_announces_an_epoch_counts_in_its_trace() -> None:
    """A session of many epochs, each seen while it is open, has no trace larger than it may be."""
    with http_receiver() as server:
        ci.profile(frameworks=[], otlp=server.url, exit_budget=60, trace_max_spans=200)
        for _ in ci.epochs(range(100)):
            for _ in ci.batches(range(1)):
                ci.flush()
        assert ci.shutdown()
    assert len(pending(server)) > 100
    sizes = Counter(one.trace_id for one in server.spans.values())
    assert 150 < max(sizes.values()) <= 200


@pytest.mark.parametrize("protocol", ["http/protobuf", "grpc"])
def test_a_running_scope_is_seen(protocol: str) -> None:
    """While the session and an epoch are open they are announced, and end under their own ids."""
    receiver = grpc_receiver() if protocol == "grpc" else http_receiver()
    with receiver as server:
        ci.profile(frameworks=[], otlp=server.url, flush_interval=0.05, run_id="seen")
        for _ in ci.epochs(range(1)):
            deadline = time.monotonic() + 30
            while len(pending(server)) < 2 and time.monotonic() < deadline:
                time.sleep(0.05)
            announced = {one.name: one for one in pending(server)}
        assert ci.shutdown()
    assert announced.keys() == {"cirron.session (open)", "epoch (open)"}
    ended = {one.name: one for one in server.spans.values()}
    for name in ("cirron.session", "epoch"):
        early = announced[f"{name} (open)"]
        assert early.parent_span_id == ended[name].span_id
        assert early.trace_id == ended[name].trace_id
        assert early.start_time_unix_nano == early.end_time_unix_nano
    assert len(pending(server)) == 2
    resource = {one.key: one.value.string_value for one in server.resources[0].attributes}
    assert resource["cirron.run.id"] == "seen"


def test_a_receiver_that_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a dead receiver did not get in this run, it gets in the next one in this directory."""
    with http_receiver() as server:
        pass
    port = int(server.url.rpartition(":")[2])
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
    ci.profile(frameworks=[], exit_budget=0.2)
    with ci.scope("first"):
        ci.mark("x", 1)
    assert ci.shutdown()
    with http_receiver(port=port) as again:
        ci.profile(frameworks=[], exit_budget=30)
        assert ci.shutdown()
        names = [one.name for one in again.spans.values() if not attribute(one, "cirron.pending")]
    assert sorted(names) == ["cirron.session", "cirron.session", "first"]


def test_two_receivers_at_once() -> None:
    """Both receivers get everything; one that refuses for a while holds up nobody."""
    with http_receiver() as one, grpc_receiver() as two:
        one.script = [503, 503]
        profiler = ci.profile(
            frameworks=[], exit_budget=30, otlp=[one.url, two.url], headers={"x-key": "secret"}
        )
        with ci.scope("work"):
            ci.mark("x", 1)
        assert ci.shutdown()
        health = profiler.health()
        assert {"cirron.session", "work"} <= {span.name for span in one.spans.values()}
        assert {"cirron.session", "work"} <= {span.name for span in two.spans.values()}
        assert one.requests[0].headers["x-key"] == two.requests[0].headers["x-key"] == "secret"
    assert [each["queue_batches"] for each in health["destinations"]] == [0, 0]
    assert "secret" not in repr(health)


def test_disabled_by_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """With OTEL_SDK_DISABLED or OTEL_TRACES_EXPORTER=none nothing is sent, whatever is set."""
    with http_receiver() as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", server.url)
        for name, value in [("OTEL_SDK_DISABLED", "true"), ("OTEL_TRACES_EXPORTER", "none")]:
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                ci.profile(frameworks=[])
                with ci.scope("quiet"):
                    pass
                assert ci.shutdown()
        assert server.requests == []
    assert [row.name for row in read_spool().spans].count("quiet") == 2


def test_the_example_fans_out() -> None:
    """``examples/fan_out.py`` brings its whole run to a receiver by HTTP and one by gRPC."""
    example = Path(__file__).resolve().parents[2] / "examples" / "fan_out.py"
    with http_receiver() as one, grpc_receiver() as two:
        done = subprocess.run(
            [sys.executable, str(example), one.url, two.url],
            capture_output=True,
            text=True,
            timeout=100,
            check=True,
            env={**os.environ, "CIRRON_EXIT_BUDGET": "60"},
        )
        for server in (one, two):
            names = Counter(
                each.name for each in server.spans.values() if not attribute(each, "cirron.pending")
            )
            assert (names["step"], names["forward"], names["epoch"]) == (1000, 1000, 5)
            assert names["cirron.session"] == 1
    assert "y = 2.0" in done.stdout
    lines = done.stdout.splitlines()
    assert [line for line in lines if line.startswith("OTLP http/protobuf to http://127.0.0.1")]
    assert [line for line in lines if line.startswith("OTLP grpc to http://127.0.0.1")]
    assert done.stdout.count(" 0 waiting") == 2


def test_forks_beside_a_grpc_channel(run_program: RunProgram) -> None:
    """Children forked while gRPC delivers end as they should, and their scopes arrive as well."""
    with grpc_receiver() as server:
        run = run_program(
            """
            import os, time
            import cirron_otel as ci

            profiler = ci.profile(frameworks=[], flush_interval=0.05, exit_budget=30)
            for i in range(10):
                with ci.scope("parent", index=i):
                    time.sleep(0.05)
                    child = os.fork()
                    if child == 0:
                        with ci.scope("child", index=i):
                            pass
                        os._exit(0)
                    assert os.waitpid(child, 0)[1] == 0
            ci.shutdown()
            print(profiler.health()["destinations"][0]["delivered"])
            """,
            env={
                "OTEL_EXPORTER_OTLP_ENDPOINT": server.url.replace("grpc://", "http://"),
                "OTEL_EXPORTER_OTLP_PROTOCOL": "grpc",
            },
            measured=False,
        )
        names = Counter(one.name for one in server.spans.values())
    assert int(run.stdout) > 1
    assert (names["parent"], names["child"], names["cirron.session"]) == (10, 10, 1)


@pytest.mark.parametrize("asked", [False, True])
def test_beside_the_application_s_own_provider(run_program: RunProgram, asked: bool) -> None:  # noqa: FBT001
    """With a joined provider ours sends nothing unless asked; then the same spans as it exports."""
    with http_receiver() as server:
        run = run_program(
            f"""
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import SimpleSpanProcessor
            from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
            import cirron_otel as ci

            exporter = InMemorySpanExporter()
            provider = TracerProvider()
            provider.add_span_processor(SimpleSpanProcessor(exporter))
            trace.set_tracer_provider(provider)
            ci.profile(frameworks=[], exit_budget=30, otlp={server.url!r} if {asked} else None)
            with ci.scope("outer", lr=0.1):
                with ci.scope("inner"):
                    ci.mark("x", 1)
            ci.shutdown()
            for span in exporter.get_finished_spans():
                above = span.parent.span_id if span.parent else 0
                print(span.name, f"{{span.context.trace_id:032x}} {{span.context.span_id:016x}}",
                      f"{{above:016x}}", span.start_time, span.end_time)
            """,
            env={"OTEL_EXPORTER_OTLP_ENDPOINT": server.url},
        )
    sent = [one for one in server.spans.values() if not attribute(one, "cirron.pending")]
    if not asked:
        assert server.requests == []
        return
    told = {
        f"{one.name} {one.trace_id.hex()} {one.span_id.hex()} "
        f"{one.parent_span_id.hex() or '0' * 16} "
        f"{one.start_time_unix_nano} {one.end_time_unix_nano}"
        for one in sent
    }
    assert told == set(run.stdout.splitlines())
    assert len(told) == 3
