"""Metrics that the forwarder makes of a spool: what arrives, and that nothing counts twice."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cirron_otel as ci
from cirron_otel import semconv
from cirron_otel.batch import SpanOtel
from cirron_otel.destinations.base import Accepted, Answer, Parcel, RetryAfter
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_settings import MetricsEndpoint
from cirron_otel.destinations.otlp_signals import otlp_receivers
from cirron_otel.errors import ConfigurationError
from cirron_otel.otlp.batches import read_batch
from cirron_otel.otlp.instruments import BOUNDARIES, INSTRUMENTS, MAX_SERIES
from cirron_otel.otlp.metrics import Totals
from delivery.otlp_server import OtlpServer, attributes, grpc_receiver, http_receiver
from spool_by_hand import T0, Writer, mark, span, training

WRITER = {"session": "session", "writer": "host-100-1"}


def to(server: OtlpServer, environ: dict[str, str] | None = None, **more: Any) -> OtlpDestination:
    """A destination for a test's receiver, with metrics and logs."""
    (target,) = otlp_receivers(
        [{"endpoint": server.url, "timeout": 2, **more}], environ=environ or {}
    )
    return OtlpDestination(target, pending=False)


def parcels(root: Path) -> list[Parcel]:
    """The batches of a spool in order."""
    return [Parcel.read(file) for file in sorted(root.glob("spool/*.json"))]


def deliver(destination: OtlpDestination, batches: Sequence[Parcel]) -> list[Answer]:
    """Send each until it is accepted; every answer."""
    answers: list[Answer] = []
    for parcel in batches:
        answers.append(destination.send(parcel))
        while isinstance(answers[-1], RetryAfter):
            answers.append(destination.send(parcel))
    destination.close()
    return answers


def last(server: OtlpServer, name: str) -> dict[str, Any]:
    """The last point of each series of a metric, by its attributes' values."""
    return {"/".join(map(str, attrs.values())): point for attrs, point in server.points(name)}


# --- what arrives ---------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", ["http/protobuf", "http/json", "grpc"])
def test_a_run_arrives_as_metrics(tmp_path: Path, protocol: str) -> None:
    """Losses, lengths of steps and phases and other marks arrive by each protocol."""
    training(tmp_path, epochs=2, steps=10)
    with grpc_receiver() if protocol == "grpc" else http_receiver() as server:
        more: dict[str, Any] = {} if protocol == "grpc" else {"protocol": protocol}
        assert set(deliver(to(server, **more), parcels(tmp_path))) == {Accepted()}
        losses = server.points("cirron.train.loss")
        steps, phases = last(server, "cirron.step.duration"), last(server, "cirron.phase.duration")
        assert [round(p.as_double, 6) for _, p in losses] == [
            round(2.3 / (1 + 0.2 * k), 6) for k in (9, 19)
        ]
        assert [p.time_unix_nano for _, p in losses] == [T0 + 505_000_000, T0 + 1_005_000_000]
        assert steps[""].count == sum(steps[""].bucket_counts) == 20
        assert tuple(steps[""].explicit_bounds) == BOUNDARIES
        assert steps[""].bucket_counts[BOUNDARIES.index(0.05)] == 20
        assert steps[""].sum == pytest.approx(20 * 0.05)
        assert steps[""].min == steps[""].max == pytest.approx(0.05)
        assert steps[""].start_time_unix_nano == T0
        assert {key: point.count for key, point in phases.items()} == {
            "data_load": 20, "forward": 20, "backward": 20, "optimizer_step": 20, "epoch": 2,
        }  # fmt: skip
        (at,) = last(server, "cirron.last_step.time").values()
        assert at.as_double == pytest.approx((T0 + 1_010_000_000) / 1e9)
        marks = last(server, "cirron.mark")
        assert marks["summary/accuracy"].as_double == 0.93
        assert marks["summary/val_accuracy"].as_double == pytest.approx(0.91)
        assert "cirron.overhead_ns" not in "".join(marks)
        assert server.spans


def test_names_units_and_kinds_are_those_of_the_table(tmp_path: Path) -> None:
    """What goes out bears the names, units and kinds of the table, under the run's resource."""
    training(tmp_path, epochs=1, steps=3)
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path))
    seen = set()
    for request in server.beside:
        (resource,) = request.message.resource_metrics
        assert attributes(resource.resource.attributes)["cirron.run.id"] == "digits-cnn"
        assert request.path == "/v1/metrics"
        for metric in resource.scope_metrics[0].metrics:
            instrument = INSTRUMENTS[metric.name]
            assert (metric.unit, metric.WhichOneof("data")) == (instrument.unit, instrument.kind)
            if instrument.kind == "sum":
                assert metric.sum.is_monotonic
            if instrument.kind != "gauge":
                assert getattr(metric, instrument.kind).aggregation_temporality == 2
            seen.add(metric.name)
    assert seen >= {"cirron.train.loss", "cirron.step.duration", "cirron.phase.duration"}
    known = ("cirron.", "gen_ai.server.", "process.")
    assert all(name.startswith(known) for name in INSTRUMENTS)
    assert BOUNDARIES[0] == 0.001
    assert BOUNDARIES[-1] == 6 * 3600
    assert list(BOUNDARIES) == sorted(set(BOUNDARIES))


def test_marks_become_what_their_names_say(tmp_path: Path) -> None:
    """Known names have instruments, tokens add up, text is no metric, NaN is only counted."""
    marks = [
        mark("s/t", "lr", 0.1, 1), mark("s/t", "grad_norm", 3.0, 1), mark("s/t", "tokens", 512, 1),
        mark("s/t", "tokens", 256, 2), mark("s/t", "tokens", -1, 3), mark("s/t", "note", "hi", 1),
        mark("s/t", "on", value=True, at=1), mark("s/t", "loss", None, 2, value_nonfinite="nan"),
        mark("s/t", "loss", 1.5, 1), mark("s/t", "late", 2.0, 9), mark("s/t", "late", 1.0, 4),
    ]  # fmt: skip
    Writer(tmp_path, **WRITER).batch(10, [], marks)
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path))
    one = {name: points for name in INSTRUMENTS if (points := last(server, name))}
    assert one["cirron.train.learning_rate"][""].as_double == 0.1
    assert one["cirron.train.grad_norm"][""].as_double == 3.0
    assert one["cirron.train.tokens"][""].as_int == 768
    assert one["cirron.train.loss"][""].as_double == 1.5
    assert one["cirron.mark.nonfinite"]["loss"].as_int == 1
    assert {name: p.as_double for name, p in one["cirron.mark"].items()} == {"on": 1, "late": 2}


def test_losses_of_an_evaluation_are_not_the_training_loss(tmp_path: Path) -> None:
    """A loss marked below an evaluation goes to ``cirron.mark`` with its phase."""
    rows = [
        span("eval/t", "evaluation", None, 0, 9), span("batch/t", "batch", "eval/t", 1, 2),
        span("f/t", "forward", None, 3, 4, attrs={"mode": "eval"}),
    ]  # fmt: skip
    marks = [mark("batch/t", "loss", 7.0, 2), mark("f/t", "loss", 8.0, 4), mark("x/t", "loss", 1.0)]
    Writer(tmp_path, **WRITER).batch(10, rows, marks)
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path))
        assert last(server, "cirron.train.loss")[""].as_double == 1.0
        assert last(server, "cirron.mark")["evaluation/loss"].as_double == 8.0
        assert {"evaluation", "eval/forward"} == set(last(server, "cirron.phase.duration"))


def test_what_was_closed_by_others_has_no_length(tmp_path: Path) -> None:
    """Recovered scopes, and other instrumentations' spans of the same names, are not measured."""
    foreign = SpanOtel(scope={"name": "other", "version": "1"})
    rows = [
        span("a/t", "step", None, 0, 5, attrs={"recovered": True}),
        span("b/t", "step", None, 0, 5, otel=foreign), span("c/t", "step", None, 0, 2),
    ]  # fmt: skip
    Writer(tmp_path, **WRITER).batch(10, rows)
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path))
        assert last(server, "cirron.step.duration")[""].count == 1


def test_exemplars_lead_to_the_traces(tmp_path: Path) -> None:
    """Losses and buckets name spans that are at the receiver, but none that was not sampled."""
    known = SpanOtel(trace_id="0123456789abcdef")
    hidden = SpanOtel(trace_id="0123456789abcdef", sampled=False)
    rows = [
        span("a/t", "step", None, 0, 5, otel=known), span("b/t", "step", None, 5, 300, otel=known),
        span("c/u", "step", None, 5, 7000, otel=hidden),
    ]  # fmt: skip
    marks = [mark("a/t", "loss", 1.0, 3), mark("c/u", "hidden", 1.0, 4)]
    write = Writer(tmp_path, **WRITER)
    write.batch(10, rows, marks)
    write.batch(20, [], [])
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path))
        ids = {(one.trace_id, one.span_id) for one in server.spans.values()}
        first, second = server.points("cirron.step.duration")
        (loss,) = server.points("cirron.train.loss")
        (mark_,) = server.points("cirron.mark")
    assert len(first[1].exemplars) == 2
    assert len(loss[1].exemplars) == 1
    for one in (*first[1].exemplars, *loss[1].exemplars):
        assert (one.trace_id, one.span_id) in ids
    assert sorted(one.as_double for one in first[1].exemplars) == [0.005, 0.295]
    assert not second[1].exemplars
    assert not mark_[1].exemplars
    with http_receiver() as server:
        deliver(to(server, {"OTEL_METRICS_EXEMPLAR_FILTER": "always_off"}), parcels(tmp_path)[:1])
        assert not server.points("cirron.step.duration")[0][1].exemplars


def test_series_are_capped(tmp_path: Path) -> None:
    """Names past the cap share one series that says so, also after a restart."""
    write = Writer(tmp_path, **WRITER)
    write.batch(1, [], [mark("s/t", f"m{i}", float(i), i) for i in range(MAX_SERIES + 5)])
    write.batch(2, [], [mark("s/t", f"n{i}", float(i), 9e6) for i in range(5)])
    with http_receiver() as server:
        for parcel in parcels(tmp_path):
            deliver(to(server), [parcel])
        points = server.points("cirron.mark")
    assert len({attrs.get("name") for attrs, _ in points}) == MAX_SERIES + 1
    over = [point for attrs, point in points if attrs == {"otel.metric.overflow": True}]
    assert [point.as_double for point in over] == [MAX_SERIES + 4, 4]


def test_the_interval_bounds_the_requests(tmp_path: Path) -> None:
    """With OTEL_METRIC_EXPORT_INTERVAL requests keep their distance; the end is never missed."""
    write = Writer(tmp_path, **WRITER)
    for second in range(10):
        write.batch(second * 1000, [span(f"{second}/t", "step", None, 0, 1)],
                    [mark(f"{second}/t", f"m{second}", 1.0, second)])  # fmt: skip
    write.batch(9100, [span("session", "cirron.session", None, 0, 5)])
    with http_receiver() as server:
        deliver(to(server, {"OTEL_METRIC_EXPORT_INTERVAL": "4000"}), parcels(tmp_path))
        steps = [point.count for _, point in server.points("cirron.step.duration")]
        names = {attrs["name"] for attrs, _ in server.points("cirron.mark")}
    assert steps == [1, 5, 9, 10]
    assert names == {f"m{second}" for second in range(10)}


# --- once -----------------------------------------------------------------------------------------


def test_a_batch_sent_again_counts_once(tmp_path: Path) -> None:
    """The same batches, sent again by the same and by a new process, change no sum."""
    training(tmp_path, epochs=2, steps=5)
    with http_receiver() as server:
        for _ in range(3):
            destination = to(server)
            for parcel in parcels(tmp_path):
                destination.send(parcel)
                destination.send(parcel)
            destination.close()
        points = [point for _, point in server.points("cirron.step.duration")]
    assert points[-1].count == 10
    assert {point.start_time_unix_nano for point in points} == {T0}
    assert sorted(point.count for point in points) == [point.count for point in points]


def test_a_restart_goes_on_where_it_was(tmp_path: Path) -> None:
    """One process per batch says at the end what one process for all says."""
    one, many = tmp_path / "one", tmp_path / "many"
    with http_receiver() as server:
        training(one, epochs=3, steps=4)
        deliver(to(server), parcels(one))
        whole = {name: last(server, name) for name in INSTRUMENTS}
    with http_receiver() as server:
        training(many, epochs=3, steps=4)
        for parcel in parcels(many):
            deliver(to(server), [parcel])
        pieces = {name: last(server, name) for name in INSTRUMENTS}
    for name, points in whole.items():
        for key, point in points.items():
            for other in (point, pieces[name][key]):
                del other.exemplars[:]
            assert point == pieces[name][key], name
    assert pieces["cirron.step.duration"][""].count == 12


def test_a_batch_put_off_is_in_once(tmp_path: Path) -> None:
    """A batch that others overtake, also over a restart, is added once."""
    training(tmp_path, epochs=3, steps=4)
    first, second, *_ = parcels(tmp_path)
    with http_receiver() as server:
        destination = to(server)
        server.script = [500]
        assert isinstance(destination.send(first), RetryAfter)
        assert destination.send(second) == Accepted()
        destination.close()
        deliver(to(server), [first])
        assert [point.count for _, point in server.points("cirron.step.duration")] == [8, 8]


PROGRAM = """
import sys
from pathlib import Path
from cirron_otel.forwarder import Forwarder
from cirron_otel.destinations.otlp import OtlpDestination
from cirron_otel.destinations.otlp_signals import otlp_receivers
(target,) = otlp_receivers(sys.argv[2], environ={})
forwarder = Forwarder([Path(sys.argv[1])], [OtlpDestination(target, pending=False)])
forwarder.start()
left = forwarder.stop(60)
sys.exit(f"left: {left}" if left else 0)
"""


@pytest.mark.timeout(120)
def test_killed_while_the_answer_is_on_its_way(tmp_path: Path) -> None:
    """Killed again and again between the receiver's taking and our noting, the sums stay exact."""
    training(tmp_path, epochs=6, steps=5)
    with http_receiver() as server:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path), server.url]
        for round_ in range(4):
            # The receiver has the metrics, and says so half a minute later.
            server.beside_script["/v1/metrics"] = [None] * (round_ % 2) + [30.0]
            taken = len(server.beside) + round_ % 2
            process = subprocess.Popen(command)
            deadline = time.monotonic() + 60
            while len(server.beside) <= taken and time.monotonic() < deadline:
                time.sleep(0.01)
            process.kill()
            process.wait()
        server.beside_script.clear()
        assert subprocess.run(command, timeout=60, check=False).returncode == 0
        points = [point for _, point in server.points("cirron.step.duration")]
        phases = last(server, "cirron.phase.duration")
    counts = [point.count for point in points]
    assert counts == sorted(counts)
    assert counts[-1] == 30
    assert len(counts) > 7
    assert {point.start_time_unix_nano for point in points} == {T0}
    assert phases["forward"].count == 30


def test_totals_that_cannot_be_read_begin_anew(tmp_path: Path) -> None:
    """With a broken file the sums begin again under a later start, as after a counter's reset."""
    training(tmp_path, epochs=2, steps=5)
    first, second, _ = parcels(tmp_path)
    with http_receiver() as server:
        deliver(to(server), [first])
        (file,) = tmp_path.glob("cursors/*.metrics/*.json")
        file.write_bytes(file.read_bytes()[:40])
        deliver(to(server), [second])
        before, after = (point for _, point in server.points("cirron.step.duration"))
    assert (before.count, after.count) == (5, 5)
    assert after.start_time_unix_nano >= before.start_time_unix_nano


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(0, 40), max_size=5), lengths=st.lists(
    st.integers(0, 30_000_000), min_size=1, max_size=40))  # fmt: skip
def test_how_rows_fall_into_batches_does_not_matter(cuts: list[int], lengths: list[int]) -> None:
    """The same rows in any batches give the same totals."""
    rows = [span(f"{i}/t", "step", None, i, i + n / 1000) for i, n in enumerate(lengths)]
    marks = [mark(f"{i}/t", "tokens", n, i) for i, n in enumerate(lengths)]

    def totals(edges: list[int]) -> Any:
        found = None
        with tempfile.TemporaryDirectory() as home:
            write = Writer(Path(home), **WRITER)
            for number, (a, b) in enumerate(pairwise(edges)):
                write.batch(100 + number, rows[a:b], marks[a:b])
            for parcel in parcels(Path(home)):
                batch = read_batch(parcel.data)
                found = found or Totals.begin(batch)
                assert found.add(batch)
                assert not found.add(batch)
        assert found is not None
        return found.saved

    whole = totals([0, len(rows)])
    pieces = totals(sorted({0, len(rows), *(cut for cut in cuts if cut < len(rows))}))
    assert pieces.histograms == whole.histograms
    assert pieces.sums == whole.sums
    assert pieces.gauges == whole.gauges
    assert whole.histograms["cirron.step.duration"][""].sum_ns == sum(lengths) * 1000


def test_a_replay_says_everything_again(tmp_path: Path) -> None:
    """``traces replay`` sends metrics and logs as well, and touches no lasting totals."""
    training(tmp_path, epochs=2, steps=5)
    Writer(tmp_path, **WRITER).batch(5000, [], logs=[{"ts_ns": T0, "body": "x", "attrs": {}}])
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path))
        (file,) = tmp_path.glob("cursors/*.metrics/*.json")
        before = file.read_bytes()
        del server.beside[:]
        subprocess.run(
            [sys.executable, "-m", "cirron_otel.cli.main", "traces", "replay", "--all", "--spool",
             str(tmp_path), "--otlp", server.url],
            check=True, timeout=60, capture_output=True,
        )  # fmt: skip
        assert [p.count for _, p in server.points("cirron.step.duration")][-1] == 10
        assert {p.start_time_unix_nano for _, p in server.points("cirron.step.duration")} == {T0}
        assert len(server.logs()) == 1
        assert file.read_bytes() == before


# --- answers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [404, 405, 501, 403])
def test_a_receiver_without_metrics(tmp_path: Path, status: int) -> None:
    """Who does not know metrics gets all spans, is asked once, and the user is told once."""
    training(tmp_path, epochs=3, steps=2)
    with http_receiver() as server:
        server.beside_script = {"/v1/metrics": [status] * 99}
        first, *rest = deliver(to(server), parcels(tmp_path))
        assert isinstance(first, Accepted)
        assert "no metrics go there" in first.note
        assert "/v1/metrics" in first.note
        assert set(rest) == {Accepted()}
        assert server.beside_requests == 1
        assert len(server.spans) == 3 * 2 * 5 + 3 + 1


def test_a_grpc_receiver_of_traces_alone(tmp_path: Path) -> None:
    """Where the metrics service is not implemented the spans arrive, with one line about it."""
    training(tmp_path, epochs=1, steps=2)
    with grpc_receiver(traces_only=True) as server:
        first, second = deliver(to(server), parcels(tmp_path))
        assert isinstance(first, Accepted)
        assert "no metrics go there" in first.note
        assert second == Accepted()
        assert len(server.spans) == 12


def test_a_trouble_of_metrics_holds_the_batch(tmp_path: Path) -> None:
    """While metrics are refused for now the batch is not settled; its spans go out once."""
    training(tmp_path, epochs=1, steps=2)
    with http_receiver() as server:
        server.beside_script = {"/v1/metrics": [503, (429, {"Retry-After": "3"}, b"")]}
        *refused, taken = deliver(to(server), parcels(tmp_path)[:1])
        assert [
            (one.seconds, one.reason, one.status) for one in refused if isinstance(one, RetryAfter)
        ] == [(None, "metrics: HTTP 503", 503), (3.0, "metrics: HTTP 429", 429)]
        assert taken == Accepted()
        assert server.copies == 0
        assert last(server, "cirron.step.duration")[""].count == 2


def test_a_refused_request_costs_no_sum(tmp_path: Path) -> None:
    """What a 400, or 500 three times, kept from arriving is in the sums of the next batch."""
    training(tmp_path, epochs=3, steps=2)
    with http_receiver() as server:
        server.beside_script = {"/v1/metrics": [400, 500, 500, 500]}
        answers = deliver(to(server), parcels(tmp_path))
        assert [getattr(one, "note", "") != "" for one in answers] == [
            True, False, False, True, False, False,
        ]  # fmt: skip
        assert [point.count for _, point in server.points("cirron.step.duration")] == [6, 6]
        assert {attrs["name"] for attrs, _ in server.points("cirron.mark")} == {
            "val_accuracy", "accuracy",
        }  # fmt: skip


def test_too_large_is_halved(tmp_path: Path) -> None:
    """A receiver that takes less gets the metrics in several requests."""
    training(tmp_path, epochs=1, steps=2)
    with http_receiver() as server:
        server.beside_script = {"/v1/metrics": [413, 413]}
        assert set(deliver(to(server), parcels(tmp_path)[:1])) == {Accepted()}
        assert len(server.beside) == 3
        assert last(server, "cirron.step.duration")[""].count == 2
        assert last(server, "cirron.train.loss")


# --- settings -------------------------------------------------------------------------------------

ENDPOINT = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}


@pytest.mark.parametrize(
    ("environ", "signals"),
    [
        (ENDPOINT, "traces metrics logs"),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "none"}, "traces logs"),
        ({**ENDPOINT, "OTEL_METRICS_EXPORTER": "prometheus"}, "traces logs"),
        ({**ENDPOINT, "OTEL_LOGS_EXPORTER": "none"}, "traces metrics"),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none"}, "metrics logs"),
        ({**ENDPOINT, "OTEL_LOGS_EXPORTER": "console,otlp"}, "traces metrics logs"),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c/t"}, "traces"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c/m"}, "metrics"),
        ({"OTEL_METRICS_EXPORTER": "otlp"}, "metrics"),
        ({**ENDPOINT, "OTEL_SDK_DISABLED": "true"}, ""),
        ({**ENDPOINT, "OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none",
          "OTEL_LOGS_EXPORTER": "none"}, ""),
    ],
)  # fmt: skip
def test_which_signals_the_environment_asks_for(environ: dict[str, str], signals: str) -> None:
    """The exporter variables switch each signal for itself."""
    found = [
        " ".join(name for name in ("traces", "metrics", "logs") if getattr(target, name))
        for target in otlp_receivers(environ=environ)
    ]
    assert found == [signals] if signals else found == []


def test_a_joined_application_keeps_its_traces() -> None:
    """Beside an application's own export of traces, metrics and logs are ours."""
    (target,) = otlp_receivers(environ=ENDPOINT, joined=True)
    assert not target.traces
    assert target.metrics is not None
    assert target.logs is not None
    (own,) = otlp_receivers(environ=ENDPOINT)
    assert target.cursor_name == own.cursor_name


def test_variables_of_the_signals() -> None:
    """A signal's own variables win, for each thing there is one for."""
    base = "OTEL_EXPORTER_OTLP_"
    (target,) = otlp_receivers(
        environ={
            f"{base}ENDPOINT": "http://c:4318/otlp",
            f"{base}HEADERS": "k=general",
            f"{base}METRICS_ENDPOINT": "https://m/own",
            f"{base}METRICS_HEADERS": "k=metrics",
            f"{base}METRICS_PROTOCOL": "http/json",
            f"{base}METRICS_TIMEOUT": "3",
            f"{base}METRICS_COMPRESSION": "gzip",
            f"{base}METRICS_CERTIFICATE": "/m.pem",
            f"{base}LOGS_TIMEOUT": "4",
            "OTEL_METRIC_EXPORT_INTERVAL": "500",
        }
    )
    assert target.url == "http://c:4318/otlp/v1/traces"
    assert target.headers == {"k": "general"}
    metrics, logs = target.metrics, target.logs
    assert isinstance(metrics, MetricsEndpoint)
    assert (metrics.url, metrics.headers, metrics.protocol, metrics.timeout, metrics.compression) \
        == ("https://m/own", {"k": "metrics"}, "http/json", 3.0, "gzip")  # fmt: skip
    assert metrics.tls.ca == "/m.pem"
    assert metrics.interval == 0.5
    assert logs is not None
    assert (logs.url, logs.headers, logs.timeout) == (
        "http://c:4318/otlp/v1/logs", {"k": "general"}, 4.0,
    )  # fmt: skip
    (grpc,) = otlp_receivers(environ={f"{base}ENDPOINT": "http://c:1", f"{base}PROTOCOL": "grpc"})
    assert grpc.metrics is not None
    assert grpc.metrics.url == grpc.url == "http://c:1"


@pytest.mark.parametrize(
    ("given_", "metrics", "logs"),
    [
        ("http://c:4318", "http://c:4318/v1/metrics", "http://c:4318/v1/logs"),
        ("https://c/x/v1/traces?k=1", "https://c/x/v1/metrics?k=1", "https://c/x/v1/logs?k=1"),
        ({"traces_endpoint": "http://c/custom"}, None, None),
        ({"traces_endpoint": "http://c/t", "metrics_endpoint": "http://m/own"}, "http://m/own",
         None),
        ({"endpoint": "http://c", "signals": ["traces", "logs"]}, None, "http://c/v1/logs"),
        ("grpc://c:4317", "http://c:4317", "http://c:4317"),
    ],
)  # fmt: skip
def test_receivers_of_the_call(given_: Any, metrics: str | None, logs: str | None) -> None:
    """A receiver that the call names gets metrics and logs beside its traces."""
    (target,) = otlp_receivers(given_, environ={})
    assert (target.metrics.url if target.metrics else None) == metrics
    assert (target.logs.url if target.logs else None) == logs
    assert target.traces


@pytest.mark.parametrize(
    ("given_", "environ"),
    [
        ({"endpoint": "http://c", "signals": ["profiles"]}, {}),
        ({"endpoint": "http://c", "signals": []}, {}),
        ({"endpoint": "http://c", "metrics_endpoint": 5}, {}),
        ("http://c", {"OTEL_METRIC_EXPORT_INTERVAL": "soon"}),
        (None, {**ENDPOINT, "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "never"}),
        (None, {**ENDPOINT, "OTEL_EXPORTER_OTLP_LOGS_PROTOCOL": "pigeon"}),
    ],
)
def test_what_cannot_be_used_is_named(given_: Any, environ: dict[str, str]) -> None:
    """A wrong value is a clear error that says where it stands."""
    with pytest.raises(ConfigurationError, match=r"METRIC|LOGS|signals|metrics_endpoint"):
        otlp_receivers(given_, environ=environ)


def test_delta_is_refused_with_a_word(caplog: pytest.LogCaptureFixture) -> None:
    """A wish for delta temporality is told that it is not followed."""
    preference = "OTEL_EXPORTER_OTLP_METRICS_TEMPORALITY_PREFERENCE"
    otlp_receivers(environ={**ENDPOINT, preference: "delta"})
    assert preference in caplog.text


# --- whole runs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("forward", ["thread", "process", "off"])
@pytest.mark.timeout(120)
def test_each_way_of_forwarding_makes_metrics(forward: str) -> None:
    """A run's steps, losses and queue arrive as metrics in each of the three ways."""
    with http_receiver() as server:
        ci.profile(frameworks=[], otlp=server.url, forward=forward, exit_budget=30, run_id="ways")
        for _ in ci.epochs(range(2)):
            for step in ci.batches(range(25)):
                ci.mark("loss", 1.0 / (1 + step))
                ci.mark("samples", 8)
        ci.shutdown()
        if forward == "off":
            subprocess.run(
                [sys.executable, "-m", "cirron_otel.cli.main", "spool", "flush",
                 "--otlp", server.url],
                check=True, timeout=60, capture_output=True,
            )  # fmt: skip
        # The first one is a warm-up.
        assert last(server, "cirron.step.duration")[""].count == 49
        assert last(server, "cirron.phase.duration")["epoch"].count == 2
        assert last(server, "cirron.train.samples")[""].as_int == 400
        assert last(server, "cirron.train.loss")[""].as_double == 1 / 25
        assert last(server, "cirron.train.loss")[""].exemplars
        attrs, size = server.points(semconv.QUEUE_SIZE)[-1]
        assert size.as_double > 0
        assert attrs["cirron.destination"].startswith("otlp-")
        assert server.points(semconv.QUEUE_AGE)
        outcomes = {attrs["outcome"] for attrs, _ in server.points(semconv.DELIVERY_BATCHES)}
        assert outcomes == {"delivered", "rejected", "gone"}
        (resource, *_) = (request.message.resource_metrics[0] for request in server.beside)
        assert attributes(resource.resource.attributes)["cirron.run.id"] == "ways"
