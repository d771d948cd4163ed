"""What goes to an OTLP receiver beside the spans of a batch: metrics and log records.

A batch is settled when its spans, its metrics and its logs were taken. But spans wait for neither
where the receiver does not know that signal at all (a 404, say): it is left out for ten minutes at
a time, and told of once.

The totals that metrics are made of outlast the process; see :mod:`.totals_files`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import Batch
from cirron_otel.destinations.base import Accepted, Parcel, Rejected, RetryAfter, TooLarge
from cirron_otel.destinations.otlp_http import HttpSender, Sender
from cirron_otel.destinations.otlp_settings import Endpoint, OtlpTarget
from cirron_otel.destinations.otlp_values import GRPC, JSON
from cirron_otel.destinations.retrying import ABOUT_THE_RECEIVER
from cirron_otel.destinations.totals_files import TotalsFiles
from cirron_otel.otlp.instruments import INSTRUMENTS, Metric, Point
from cirron_otel.otlp.logs import log_records
from cirron_otel.otlp.metrics import Totals, series_attributes, series_key
from cirron_otel.otlp.rows import Scope, scope_of
from cirron_otel.otlp.wire import Beside, Wire

#: Answers that say that the receiver has no such signal, or not for us; of gRPC its word for it.
_NOT_FOR_US = frozenset({404, 405, 406, 410, 415, 501})
_FORBIDDEN = frozenset({401, 403})
_NO_SUCH_METHOD = "UNIMPLEMENTED"
#: How long a signal that the receiver does not know is left out.
_OFF_S = 600.0
#: An answer about this very request (a 500, say) is believed after so many tries.
_MOST_TRIES = 3
#: Points or records in one request.
_MOST_ROWS = 2000


class Request(msgspec.Struct):
    """One request that is still to be made; ``rows`` are metrics or log records."""

    signal: str
    rows: list[Any]
    tries: int = 0


class Work(msgspec.Struct):
    """What is left to send of a batch."""

    batch_id: str
    resource: Mapping[str, Any]
    scope: Scope
    created_ns: int
    #: The next one last.
    requests: list[Request] = []
    totals: Totals | None = None
    file: Path | None = None
    refused: int = 0
    note: str = ""


class BesideSender:
    """Metrics and logs of the batches of one receiver. One thread at a time."""

    def __init__(self, target: OtlpTarget, *, lasting: bool = True) -> None:
        """Connect to nothing yet. ``lasting`` totals of metrics outlive this object."""
        self._target = target
        metrics = target.metrics
        self._totals = TotalsFiles(
            target.cursor_name,
            exemplars=metrics is not None and metrics.exemplars,
            exponential=metrics is not None and metrics.exponential,
            lasting=lasting,
        )
        self._endpoints: dict[str, Endpoint] = {}
        self._wires: dict[str, Beside] = {}
        self._senders: dict[str, Sender] = {}
        for signal, endpoint in (("metrics", target.metrics), ("logs", target.logs)):
            if endpoint is not None:
                self._endpoints[signal] = endpoint
                self._wires[signal] = _wire(endpoint.protocol)
                self._senders[signal] = sender_of(endpoint, signal)
        self._off_until: dict[str, float] = {}
        self._told: set[str] = set()
        self._begun_ns = time.time_ns()
        #: Says how the queue of this destination is; see :class:`..base.Measured`.
        self.measure: Callable[[], Mapping[str, Any]] | None = None
        self.counts = {"metric_requests": 0, "log_records": 0, "log_records_refused": 0}

    def close(self) -> None:
        """Give up the connections. From any thread."""
        for sender in self._senders.values():
            sender.close()

    # --- from a batch to requests --------------------------------------------------------------

    def prepare(
        self, parcel: Parcel, batch: Batch, breathe: Callable[[], object] | None = None
    ) -> Work:
        """The requests of a batch. Reads and writes no network."""
        work = Work(
            parcel.batch_id,
            {} if batch.resource is UNSET else batch.resource,
            Scope("", "") if batch.scope is UNSET else scope_of(batch.scope),
            batch.created_ns,
        )
        if "logs" in self._endpoints and batch.logs is not UNSET:
            records, wrong = log_records(batch.logs)
            if wrong:
                work.refused += wrong
                work.note = f"{wrong:,} log rows cannot be said in OTLP"
            if self._is_on("logs"):
                for at in range(0, len(records), _MOST_ROWS):
                    work.requests.append(Request("logs", records[at : at + _MOST_ROWS]))
            else:
                self.counts["log_records_refused"] += len(records)
        if self._target.metrics is not None:
            work.totals, work.file = self._totals.of(parcel, batch)
            work.totals.add(batch, breathe)
            if self._is_on("metrics") and self._is_due(work.totals, batch):
                metrics = [*work.totals.metrics(), *self._own_metrics()]
                if metrics:
                    work.requests.append(Request("metrics", metrics))
        return work

    def _is_on(self, signal: str) -> bool:
        return time.monotonic() >= self._off_until.get(signal, 0.0)

    def _is_due(self, totals: Totals, batch: Batch) -> bool:
        target = self._target.metrics
        interval_ns = 0 if target is None else target.interval * 1e9
        # A batch that others overtook is older, and what it says may be news.
        return not 0 <= batch.created_ns - totals.saved.sent_ns < interval_ns or any(
            row.name == semconv.SESSION and row.parent_id is None for row in batch.spans
        )

    def _own_metrics(self) -> list[Metric]:
        """How delivery to this receiver goes, as the one who reads the spool sees it."""
        said = None if self.measure is None else self.measure()
        if said is None:
            return []
        now, name = time.time_ns(), self._target.cursor_name
        values: dict[str, list[tuple[str, float]]] = {
            semconv.QUEUE_AGE: [(series_key(name), said["queue_age_s"])],
            semconv.QUEUE_BATCHES: [(series_key(name), float(said["queue_batches"]))],
            semconv.QUEUE_SIZE: [(series_key(name), float(said["queue_bytes"]))],
            semconv.DELIVERY_BATCHES: [
                (series_key(outcome, name), said[key])
                for outcome, key in (
                    ("delivered", "delivered"),
                    ("rejected", "rejected"),
                    ("gone", "gone_undelivered"),
                )
            ],
            semconv.DELIVERY_FAILURES: [(series_key(name), said["failures"])],
            semconv.DROPPED_METRIC: [(series_key(why), n) for why, n in said["losses"].items()],
        }
        metrics = []
        for metric, points in values.items():
            instrument = INSTRUMENTS[metric]
            start_ns = 0 if instrument.kind == "gauge" else self._begun_ns
            made = [Point(series_attributes(metric, k), start_ns, now, v) for k, v in points]
            if made:
                metrics.append(Metric(instrument, made))
        return metrics

    # --- requests ------------------------------------------------------------------------------

    def send(self, work: Work) -> RetryAfter | None:
        """Make the next request; None when there is progress of some kind."""
        request = work.requests[-1]
        wire = self._wires[request.signal]
        make = wire.metrics if request.signal == "metrics" else wire.logs
        try:
            body = make(work.resource, work.scope, request.rows)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            self._give_up(work, request, f"cannot be said in OTLP: {error!r}"[:200])
            return None
        answer = self._senders[request.signal].send(body)
        if isinstance(answer, TooLarge):
            if len(request.rows) > 1:
                middle = len(request.rows) // 2
                work.requests[-1:] = [
                    Request(request.signal, request.rows[middle:]),
                    Request(request.signal, request.rows[:middle]),
                ]
            else:
                self._give_up(work, request, f"larger than the receiver takes: {answer.answer}")
        elif isinstance(answer, Rejected):
            self._give_up(work, request, f"refused: {answer.answer}"[:300])
        elif isinstance(answer, RetryAfter):
            return self._refused(work, request, answer)
        else:
            self._taken(work, request, answer)
        return None

    def _taken(self, work: Work, request: Request, answer: Accepted) -> None:
        work.requests.pop()
        if request.signal == "logs":
            self.counts["log_records"] += len(request.rows) - answer.refused_rows
            self.counts["log_records_refused"] += answer.refused_rows
            work.refused += answer.refused_rows
        else:
            self.counts["metric_requests"] += 1
            if work.totals is not None and not any(r.signal == "metrics" for r in work.requests):
                work.totals.sent(work.created_ns)
        if answer.note or answer.refused_rows:
            work.note = work.note or f"{request.signal}: {answer.note or 'some refused'}"

    def _refused(self, work: Work, request: Request, answer: RetryAfter) -> RetryAfter | None:
        request.tries += 1
        status = answer.status
        not_for_us = status in _NOT_FOR_US or (
            status is None and answer.reason.startswith(_NO_SUCH_METHOD)
        )
        if not_for_us or (status in _FORBIDDEN and self._target.traces):
            said = answer.reason[:100] if status is None else f"HTTP {status}"
            self._switch_off(work, request.signal, said)
            return None
        about_request = status is not None and status not in ABOUT_THE_RECEIVER | _FORBIDDEN
        if about_request and request.tries >= _MOST_TRIES:
            self._give_up(work, request, answer.reason)
            return None
        return msgspec.structs.replace(answer, reason=f"{request.signal}: {answer.reason}")

    def _switch_off(self, work: Work, signal: str, reason: str) -> None:
        self._off_until[signal] = time.monotonic() + _OFF_S
        for request in work.requests:
            if request.signal == "logs" == signal:
                self.counts["log_records_refused"] += len(request.rows)
        work.requests = [one for one in work.requests if one.signal != signal]
        if signal not in self._told:
            self._told.add(signal)
            url = self._endpoints[signal].shown
            work.note = f"no {signal} go there, {url} does not take them ({reason})"

    def _give_up(self, work: Work, request: Request, why: str) -> None:
        work.requests.pop()
        if request.signal == "logs":
            self.counts["log_records_refused"] += len(request.rows)
            work.refused += len(request.rows)
        work.note = work.note or f"{request.signal} of a batch left out: {why}"

    def done(self, work: Work) -> None:
        """The batch is about to be settled: keep the totals with it."""
        if work.totals is not None and work.file is not None:
            work.totals.accepted(work.batch_id)
            self._totals.keep(work.file, work.totals)


def _wire(protocol: str) -> Beside:
    """The encoding of a protocol. Loads the protobuf library only where it is needed."""
    if protocol == JSON:
        from cirron_otel.otlp.beside_json import JsonBeside  # noqa: PLC0415 - as the next

        return JsonBeside()
    from cirron_otel.otlp.beside_protobuf import ProtobufBeside  # noqa: PLC0415 - an extra

    return ProtobufBeside()


def wire_of(protocol: str) -> Wire:
    """The encoding of spans by a protocol. Loads the protobuf library only where it is needed."""
    if protocol == JSON:
        from cirron_otel.otlp.json_form import JsonWire  # noqa: PLC0415 - as the next

        return JsonWire()
    from cirron_otel.otlp.protobuf import ProtobufWire  # noqa: PLC0415 - an extra

    return ProtobufWire()


def sender_of(endpoint: Endpoint, signal: str = "traces") -> Sender:
    """What carries requests of a signal to an endpoint; connects to nothing yet."""
    wire = wire_of(endpoint.protocol)
    if endpoint.protocol == GRPC:
        from cirron_otel.destinations.otlp_grpc import GrpcSender  # noqa: PLC0415 - an extra

        return GrpcSender(endpoint, wire, signal)
    return HttpSender(endpoint, wire)
