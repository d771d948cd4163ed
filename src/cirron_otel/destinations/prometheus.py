"""A port for Prometheus: the metrics of what is recorded here, for whoever scrapes it.

Nothing is sent. Batches are added up as they come, and shown as long as their writer lives, and
five minutes longer: what ended long ago is no value of now. Names are those that Prometheus gives
to OTLP metrics, so that dashboards and rules hold for both.
"""

from __future__ import annotations

import contextlib
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from wsgiref.simple_server import WSGIServer

import msgspec
from msgspec import UNSET
from prometheus_client import REGISTRY, CollectorRegistry, start_http_server
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.core import (
    Metric as Family,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as Example
from prometheus_client.utils import floatToGoString

from cirron_otel import semconv
from cirron_otel._guard import logger
from cirron_otel.batch import Batch
from cirron_otel.destinations.base import Accepted, Answer, Parcel
from cirron_otel.destinations.prometheus_settings import PrometheusTarget
from cirron_otel.destinations.totals_files import TotalsFiles, writer_of
from cirron_otel.errors import SpoolFormatError
from cirron_otel.otlp.batches import breathing, read_batch
from cirron_otel.otlp.instruments import INSTRUMENTS, Instrument, Point
from cirron_otel.otlp.metrics import Totals
from cirron_otel.otlp.ranks import leaves_out
from cirron_otel.recovery import host_of, safe_host, writer_state

#: How long a writer that may have ended is shown; as long as Prometheus looks back by default.
_SHOWN_NS = 300_000_000_000
#: How long a port that is taken is left alone.
_AGAIN_S = 5.0
#: An application that exports its own metrics to Prometheus has loaded this.
_APPLICATIONS_EXPORTER = "opentelemetry.exporter.prometheus"
#: Of the resource, these tell the series of one scrape apart.
_LABELS = (
    semconv.RUN_ID, semconv.RUN_ATTEMPT, semconv.DL_RANK, semconv.HOST_NAME, semconv.PROCESS_PID,
)  # fmt: skip
_UNITS = {"s": "_seconds", "By": "_bytes", "1": "_ratio"}
_NO_LABEL = re.compile(r"[^a-zA-Z0-9_]|^(?=[0-9])")


class _Writer(msgspec.Struct):
    """A process that records: its labels, and its totals."""

    name: str
    run_directory: Path
    resource: Mapping[str, Any]
    totals: Totals

    @property
    def is_shown(self) -> bool:
        """Whether it lives, or was heard of lately."""
        if abs(time.time_ns() - self.totals.saved.time_ns) < _SHOWN_NS:
            return True
        return writer_state(self.run_directory, self.name) == "alive"


class PrometheusEndpoint(Collector):
    """Shows metrics of spool batches at a port. :meth:`send` is for one thread at a time.

    The port is opened with the first batch. Where the application has OpenTelemetry's exporter for
    Prometheus in this process, the metrics are shown at that one's port instead.
    """

    def __init__(self, target: PrometheusTarget) -> None:
        """Open nothing yet."""
        self.name = target.cursor_name
        self.description = f"Prometheus at {target.url}"
        self.measure: Callable[[], Mapping[str, Any]] | None = None
        self._target = target
        self._totals = TotalsFiles(self.name, exemplars=target.exemplars)
        self._writers: dict[str, _Writer] = {}
        #: Held while totals change or are read: by the sender, and by who answers a scrape.
        self._lock = threading.Lock()
        self._registry: CollectorRegistry | None = None
        self._server: WSGIServer | None = None
        self._again, self._why = 0.0, ""
        self._closed = threading.Event()

    @property
    def port(self) -> int | None:
        """The port that is open; None while none is."""
        return None if self._server is None else int(self._server.server_port)

    # --- batches -------------------------------------------------------------------------------

    def send(self, parcel: Parcel) -> Answer:
        """Take in a batch. Never asks for another try: a port that is taken holds up nothing."""
        if not leaves_out(self._target.ranks, parcel.data):
            breathe = breathing()
            try:
                self._add(parcel, read_batch(parcel.data, breathe), breathe)
            except SpoolFormatError as error:
                return Accepted(f"{parcel.path.name} is not a batch: {error}")
        return Accepted(self._open())

    def _add(self, parcel: Parcel, batch: Batch, breathe: Callable[[], object] | None) -> None:
        writer = writer_of(batch)
        only_host = self._target.only_host
        if only_host and host_of(writer) != safe_host(only_host):
            return
        with self._lock:
            totals, file = self._totals.of(parcel, batch)
            totals.add(batch, breathe)
            totals.accepted(parcel.batch_id)
            resource = {} if batch.resource is UNSET else batch.resource
            run_directory = parcel.path.parent.parent / "run"
            self._writers[writer] = _Writer(writer, run_directory, resource, totals)
        if file is not None:
            self._totals.keep(file, totals)

    # --- the port ------------------------------------------------------------------------------

    def _open(self) -> str:
        """Open the port, unless it is open; why that cannot be done, or nothing."""
        now = time.monotonic()
        if self._registry is not None or self._closed.is_set() or now < self._again:
            return self._why
        if _APPLICATIONS_EXPORTER in sys.modules:
            REGISTRY.register(self)
            self._registry = REGISTRY
            return ""
        registry = CollectorRegistry()
        registry.register(self)
        host, port = self._target.host, self._target.port
        try:
            self._server = start_http_server(port, host, registry)[0]
        except OSError as error:
            self._again = now + _AGAIN_S
            self._why = (
                f"the port cannot be opened ({error.strerror}), so nobody can read these metrics: "
                "set OTEL_EXPORTER_PROMETHEUS_PORT to another; for programs with directories of "
                "their own, one `cirron-otel forward DIR...` serves all of them at one port"
            )
            return self._why
        self._registry, self._why = registry, ""
        logger.info("cirron-otel: metrics for Prometheus at %s:%d/metrics", host, self.port)
        if self._closed.is_set():  # meanwhile
            self.close()
        return ""

    def close(self) -> None:
        """Close the port. From any thread."""
        self._closed.set()
        registry, self._registry = self._registry, None
        if registry is REGISTRY:
            with contextlib.suppress(KeyError):
                REGISTRY.unregister(self)
        server, self._server = self._server, None
        if server is None:
            return
        # Frees the port though a child may hold the socket, and wakes the thread that listens.
        with contextlib.suppress(OSError):
            server.socket.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        server.server_close()

    def close_in_child(self) -> None:
        """In a forked child: let go of the port, which is its parent's, and show nothing."""
        self._closed.set()
        server, self._server = self._server, None
        self._lock = threading.Lock()
        if server is not None:
            server.socket.close()

    # --- scrapes -------------------------------------------------------------------------------

    def describe(self) -> Iterable[Family]:
        """Nothing: names come and go."""
        return ()

    def collect(self) -> Iterator[Family]:
        """Every series, as prometheus-client asks for them. From any thread."""
        if self._closed.is_set():
            return
        with self._lock:
            self._writers = {name: one for name, one in self._writers.items() if one.is_shown}
            writers = sorted(self._writers.values(), key=lambda one: one.totals.saved.time_ns)
            found = [(one, one.totals.metrics()) for one in writers]
        # Two writers may have the same labels (a process that has recorded twice): the later wins.
        series: dict[str, dict[frozenset[tuple[str, str]], Point]] = {}
        for writer, metrics in found:
            own = labels_of({key: writer.resource.get(key) for key in _LABELS})
            for metric in metrics:
                of_metric = series.setdefault(metric.instrument.name, {})
                for point in metric.points:
                    of_metric[frozenset((own | labels_of(point.attrs)).items())] = point
        for name, points in series.items():
            yield _family(INSTRUMENTS[name], points)
        if self._registry is not REGISTRY and writers:
            yield _info(writers)
        yield from self._losses()

    def _losses(self) -> Iterator[Family]:
        said = None if self.measure is None else self.measure()
        if said is not None and said["losses"]:
            points = {
                frozenset(labels_of({semconv.REASON: why}).items()): Point({}, 0, 0, count)
                for why, count in said["losses"].items()
            }
            yield _family(INSTRUMENTS[semconv.DROPPED_METRIC], points)


def _info(writers: Iterable[_Writer]) -> Family:
    """What else is known of each writer: ``target_info``."""
    family = InfoMetricFamily("target", "What records")
    for labels in {frozenset(labels_of(one.resource).items()) for one in writers}:
        family.add_metric([], dict(labels))
    return family


def labels_of(attributes: Mapping[str, Any]) -> dict[str, str]:
    """Attributes as labels; those without a value are left out."""
    return {
        _NO_LABEL.sub("_", key): str(value).lower() if isinstance(value, bool) else str(value)
        for key, value in attributes.items()
        if value is not None
    }


def name_of(instrument: Instrument) -> str:
    """A metric's name in Prometheus, without the endings of its kind.

    By the rules of OpenTelemetry's *Prometheus and OpenMetrics Compatibility*: the unit at the end,
    but for one in braces.
    """
    name, unit = instrument.name.replace(".", "_"), _UNITS.get(instrument.unit, "")
    return name if name.endswith(unit) else name + unit


def _family(instrument: Instrument, points: Mapping[frozenset[tuple[str, str]], Point]) -> Family:
    names = sorted({name for labels in points for name, _ in labels})
    name, text = name_of(instrument), instrument.description
    rows = [
        ([dict(labels).get(one, "") for one in names], point) for labels, point in points.items()
    ]
    if instrument.kind == "gauge":
        gauge = GaugeMetricFamily(name, text, labels=names)
        for values, point in rows:
            gauge.add_metric(values, point.value)
        return gauge
    if instrument.kind == "sum":
        counter = CounterMetricFamily(name, text, labels=names)
        for values, point in rows:
            counter.add_metric(values, point.value)
        return counter
    histogram = HistogramMetricFamily(name, text, labels=names)
    for values, point in rows:
        histogram.add_metric(values, _buckets(instrument, point), point.value)
    return histogram


def _buckets(instrument: Instrument, point: Point) -> list[Any]:
    """Each bucket's upper bound, how many are in it and those below, and one of them."""
    bounds = (*instrument.boundaries, float("inf"))
    examples: dict[float, Example] = {}
    for one in point.exemplars:
        bound = next(bound for bound in bounds if one.value <= bound)
        ids = {"trace_id": one.trace_id, "span_id": one.span_id}
        examples[bound] = Example(ids, one.value, one.ts_ns / 1e9)
    total, out = 0, []
    for bound, count in zip(bounds, point.buckets, strict=True):
        total += count
        text = floatToGoString(bound)  # type: ignore[no-untyped-call] # comes without types
        out.append((text, total, examples.get(bound)))
    return out
