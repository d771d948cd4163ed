"""The port for Prometheus: what is shown there, to whom it belongs, and when it is closed."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

import cirron_otel as ci
from cirron_otel import transport
from cirron_otel.destinations import prometheus_settings
from cirron_otel.destinations.base import Accepted, Parcel
from cirron_otel.destinations.prometheus import PrometheusEndpoint, name_of
from cirron_otel.destinations.prometheus_settings import PrometheusTarget, prometheus_target
from cirron_otel.otlp.instruments import INSTRUMENTS
from cirron_otel.settings import resolve
from delivery.counterparts import free_port
from delivery.receivers import until
from delivery.test_deploy import prometheus_names
from delivery.test_metrics import parcels
from helpers import RunProgram
from spool_by_hand import T0, Writer, span, training

WANTED = {"OTEL_METRICS_EXPORTER": "prometheus"}
_HURRY_S = 60.0
wait_until = functools.partial(until, timeout=_HURRY_S)


def scrape(port: int, accept: str = "text/plain") -> str:
    """What is shown at a port."""
    url = f"http://127.0.0.1:{port}/metrics"
    request = urllib.request.Request(url, headers={"Accept": accept})
    with urllib.request.urlopen(request, timeout=30) as answer:  # noqa: S310 - the loopback
        return str(answer.read().decode())


def samples(text: str) -> dict[tuple[str, str], Any]:
    """Each sample by its name and the labels that are its own."""
    found: dict[tuple[str, str], Any] = {}
    for family in plain(text):
        for one in family.samples:
            own = {
                key: value
                for key, value in one.labels.items()
                if value and not key.startswith(("cirron_run", "dl_", "host_", "process_"))
            }
            found[one.name, ",".join(f"{key}={own[key]}" for key in sorted(own))] = one
    return found


def shows(port: int, text: str) -> bool:
    """Whether a port is open and shows this."""
    with contextlib.suppress(OSError):
        return text in scrape(port)
    return False


def steps_at(port: int) -> float:
    """How many steps a port shows; none while it is closed."""
    if not shows(port, "cirron_step_duration_seconds_count{"):
        return 0
    return float(samples(scrape(port))["cirron_step_duration_seconds_count", ""].value)


def is_closed(port: int) -> bool:
    """Whether nobody listens on a port."""
    with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 5):
        return False
    return True


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> int:
    """A free port that the environment names for Prometheus."""
    number = free_port()
    monkeypatch.setenv("OTEL_METRICS_EXPORTER", "prometheus")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_HOST", "127.0.0.1")
    monkeypatch.setenv("OTEL_EXPORTER_PROMETHEUS_PORT", str(number))
    return number


@pytest.mark.parametrize("forward", ["thread", "process"])
def test_a_run_can_be_scraped(port: int, forward: str) -> None:
    """Steps, losses and phases are shown while it runs, in both text forms; not after its end."""
    ci.profile(frameworks=[], forward=forward, run_id="scraped", flush_interval=0.1)
    for _ in ci.epochs(range(2)):
        for step in ci.batches(range(10)):
            ci.mark("loss", 1.0 / (1 + step))
            ci.mark("samples", 8)
    ci.flush()
    # The first step is a warm-up; the second epoch ends when the session does.
    wait_until(lambda: steps_at(port) == 19)
    text = scrape(port)
    found = samples(text)
    assert found["cirron_train_loss", ""].value == 0.1
    assert found["cirron_train_samples_total", ""].value == 160
    assert found["cirron_step_duration_seconds_bucket", "le=+Inf"].value == 19
    assert found["cirron_phase_duration_seconds_count", "cirron_phase=data_load"].value == 20
    labels = found["cirron_train_loss", ""].labels
    assert (labels["cirron_run_id"], labels["dl_rank"]) == ("scraped", "0")
    assert labels["host_name"] == socket.gethostname()
    assert labels["process_pid"] == str(os.getpid())
    assert 'service_name="' in next(row for row in text.splitlines() if "target_info{" in row)
    shown = set(prometheus_names()) | {"target_info"}
    assert {name for name, _ in found} <= shown
    families = {one.name: one for one in openmetrics(scrape(port, "application/openmetrics-text"))}
    buckets = families["cirron_step_duration_seconds"].samples
    assert any(one.exemplar and len(one.exemplar.labels["span_id"]) == 16 for one in buckets)
    (state,) = ci.health()["destinations"]
    assert state["description"] == f"Prometheus at http://127.0.0.1:{port}/metrics"
    ci.shutdown()
    wait_until(lambda: is_closed(port))


def test_the_names_are_those_that_the_dashboards_ask_for() -> None:
    """A metric has the name that Prometheus gives it when it comes by OTLP."""
    endings = {"gauge": ("",), "sum": ("_total",), "histogram": ("_sum", "_count", "_bucket")}
    made = {name_of(one) + end for one in INSTRUMENTS.values() for end in endings[one.kind]}
    assert made == set(prometheus_names())


def now_ms() -> int:
    """Of the hand-written spools' clock, the present."""
    return (time.time_ns() - T0) // 1_000_000


@contextlib.contextmanager
def endpoint(number: int = 0, **more: Any) -> Iterator[PrometheusEndpoint]:
    """A port of the loopback that shows what it is given."""
    shown = PrometheusEndpoint(PrometheusTarget(host="127.0.0.1", port=number, **more))
    try:
        yield shown
    finally:
        shown.close()


def give(shown: PrometheusEndpoint, batches: list[Parcel]) -> list[Any]:
    """Hand it batches; its answers."""
    return [shown.send(parcel) for parcel in batches]


def steps_of(shown: PrometheusEndpoint) -> dict[str, float]:
    """How many steps of each process are shown, by its id."""
    assert shown.port is not None
    return {
        one.labels["process_pid"]: one.value
        for family in plain(scrape(shown.port))
        for one in family.samples
        if one.name == "cirron_step_duration_seconds_count"
    }


def recent(root: Path, pid: int, *, host: str = "host") -> None:
    """The spool of a process that has just made three steps."""
    at = now_ms()
    rows = [span(f"{pid}-{k}", "step", None, at + k, at + k + 5) for k in range(3)]
    resource = {"cirron.run.id": "digits-cnn", "process.pid": pid, "host.name": host}
    Writer(root, writer=f"{host}-{pid}-1").batch(at + 10, rows, resource=resource)


def test_what_ended_long_ago_is_not_shown(tmp_path: Path) -> None:
    """A queue of an old run is taken in, and no value of it passes for one of now."""
    training(tmp_path, epochs=1, steps=3)
    with endpoint() as shown:
        assert set(give(shown, parcels(tmp_path))) == {Accepted()}
        assert steps_of(shown) == {}
        recent(tmp_path / "new", 7)
        give(shown, parcels(tmp_path / "new"))
        assert steps_of(shown) == {"7": 3}


def test_another_process_goes_on_with_the_sums(tmp_path: Path) -> None:
    """Who takes over shows what was counted before, and counts no batch twice."""
    recent(tmp_path, 7)
    recent(tmp_path, 8)
    first, second = parcels(tmp_path)
    with endpoint() as shown:
        give(shown, [first, first])
        assert sum(steps_of(shown).values()) == 3
    with endpoint() as shown:
        give(shown, [first, second])
        assert steps_of(shown) == {"7": 3, "8": 3}


def test_each_node_shows_its_own(tmp_path: Path) -> None:
    """With a directory that nodes share, a node's port has the processes of that node."""
    recent(tmp_path, 7, host="node-1")
    recent(tmp_path, 8, host="node-1-2")
    with endpoint(only_host="node-1") as shown:
        give(shown, parcels(tmp_path))
        assert steps_of(shown) == {"7": 3}
    name = "nöde_3.local"  # what is no file name is spelt otherwise there
    recent(tmp_path / "odd", 9, host="n_de_3.local")
    with endpoint(only_host=name) as shown:
        give(shown, parcels(tmp_path / "odd"))
        assert steps_of(shown) == {"9": 3}
    names = {PrometheusTarget(only_host=host).cursor_name for host in ("node-1", "node-1-2", "")}
    assert len(names) == 3


def test_a_port_that_is_taken_holds_up_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of, batches are taken in all the same, and it is opened once it is free."""
    monkeypatch.setattr("cirron_otel.destinations.prometheus._AGAIN_S", 0.0)
    recent(tmp_path, 7)
    with socket.create_server(("127.0.0.1", 0)) as other:
        number = int(other.getsockname()[1])
        shown = PrometheusEndpoint(PrometheusTarget(host="127.0.0.1", port=number))
        (answer,) = give(shown, parcels(tmp_path))
        assert isinstance(answer, Accepted)
        assert "OTEL_EXPORTER_PROMETHEUS_PORT" in answer.note
    assert give(shown, parcels(tmp_path)) == [Accepted()]
    assert steps_of(shown) == {"7": 3}
    shown.close()
    assert is_closed(number)


def test_what_is_no_batch_is_told(tmp_path: Path) -> None:
    """It is passed over with a word and set aside by nobody."""
    file = tmp_path / "spool" / "x.json"
    with endpoint() as shown:
        (answer,) = give(shown, [Parcel("0" * 32, file, b"{}")])
    assert isinstance(answer, Accepted)
    assert "not a batch" in answer.note


# --- who asks for it ------------------------------------------------------------------------------


def test_the_variables() -> None:
    """Host, port and exemplars are OpenTelemetry's variables; a wrong port is an error."""
    assert prometheus_target({}) is None
    assert prometheus_target({"OTEL_METRICS_EXPORTER": "otlp"}) is None
    assert prometheus_target({**WANTED, "OTEL_SDK_DISABLED": "true"}) is None
    plain_ = prometheus_target({"OTEL_METRICS_EXPORTER": "otlp, Prometheus"})
    assert plain_ is not None
    assert plain_.url == "http://localhost:9464/metrics"
    given = prometheus_target({
        **WANTED, "OTEL_EXPORTER_PROMETHEUS_HOST": "::1", "OTEL_EXPORTER_PROMETHEUS_PORT": "9000",
        "OTEL_METRICS_EXEMPLAR_FILTER": "always_off",
    })  # fmt: skip
    assert given is not None
    assert (given.url, given.exemplars) == ("http://[::1]:9000/metrics", False)
    for wrong in ("http", "70000", "-1", "9464.5"):
        with pytest.raises(ci.ConfigurationError, match="OTEL_EXPORTER_PROMETHEUS_PORT"):
            prometheus_target({**WANTED, "OTEL_EXPORTER_PROMETHEUS_PORT": wrong})


def test_without_its_library_it_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message says what to install."""
    monkeypatch.setattr(prometheus_settings, "is_importable", lambda _: False)
    with pytest.raises(ci.CirronDependencyError, match=r"cirron-otel\[prometheus\]"):
        prometheus_target(WANTED)


def test_it_is_no_place_to_flush_to(tmp_path: Path) -> None:
    """What sends a queue and ends opens no port, and marks nothing as delivered."""
    settings = resolve(call={"path": tmp_path})
    (spec,) = transport.resolve(settings, WANTED)
    assert (spec.kind, spec.name) == ("prometheus", "prometheus")
    (own,) = transport.resolve(settings, WANTED, scraped="this_host")
    assert own.options["only_host"] == socket.gethostname()
    assert transport.resolve(settings, WANTED, scraped="no") == []


def test_a_sidecar_shows_all_its_directories(tmp_path: Path, port: int) -> None:
    """`cirron-otel forward` is one port for the programs of a node, wherever they write."""
    recent(tmp_path / "one", 7)
    recent(tmp_path / "two", 8)
    command = [str(Path(sys.executable).with_name("cirron-otel")), "forward", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            wait_until(lambda: shows(port, 'process_pid="7"') and shows(port, 'process_pid="8"'))
        finally:
            process.terminate()
        assert process.wait(_HURRY_S) == 0
    assert is_closed(port)


PROGRAM = dedent("""
    import os, socket, sys, time
    from opentelemetry import metrics
    from prometheus_client import REGISTRY, generate_latest
    import cirron_otel as ci
    port = int(os.environ["OTEL_EXPORTER_PROMETHEUS_PORT"])

    def record():
        ci.profile(frameworks=[], flush_interval=0.05)
        for _ in ci.batches(range(5)):
            pass
        ci.flush()

    def wait_until(holds):
        until = time.monotonic() + 60
        while not holds():
            assert time.monotonic() < until
            time.sleep(0.02)

    def is_open():
        with socket.socket() as one:
            return one.connect_ex(("127.0.0.1", port)) == 0

    # A forked child does not keep the port.
    record()
    wait_until(is_open)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)
        os._exit(0)
    ci.shutdown()
    wait_until(lambda: not is_open())
    with socket.create_server(("127.0.0.1", port)):
        pass
    os.close(writing)
    os.waitpid(child, 0)

    # An application with a port of its own shows ours there.
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    metrics.set_meter_provider(MeterProvider([PrometheusMetricReader()]))
    metrics.get_meter("app").create_counter("app.requests").add(3)
    record()
    shown = lambda: generate_latest(REGISTRY).decode()
    wait_until(lambda: "cirron_step_duration_seconds_count" in shown())
    text = shown()
    assert "app_requests_total" in text, text
    assert text.count("# TYPE target_info ") <= 1, text
    assert not is_open()
    ci.shutdown()
    assert "cirron_" not in shown()
    print("done")
""")


def test_forks_and_applications_with_a_port_of_their_own(
    run_program: RunProgram, port: int
) -> None:
    """A child lets go of the port; beside the application's exporter there is no second port."""
    done = run_program(PROGRAM)
    assert done.completed.stdout.strip() == "done"
    assert port
