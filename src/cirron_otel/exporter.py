"""``CirronSpanExporter``: spans of a pipeline that is not ours, to the Cirron platform.

The name ``cirron`` of ``OTEL_TRACES_EXPORTER`` stands for it, so a service needs no line of code::

    CIRRON_API_KEY=... OTEL_TRACES_EXPORTER=otlp,cirron opentelemetry-instrument python serve.py
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from cirron_otel import ids, recorder, semconv, transport
from cirron_otel._guard import Guard, logger
from cirron_otel.batch import SCHEMA_VERSION, SpanRecord, encode_rows
from cirron_otel.cursors import Delivered
from cirron_otel.destinations.base import Accepted, Destination, DestinationSpec, Parcel
from cirron_otel.errors import SpoolError
from cirron_otel.foreign_spans import foreign_row
from cirron_otel.forwarder import Forwarder, describe_left
from cirron_otel.settings import Settings, resolve
from cirron_otel.spool import Spool
from cirron_otel.values import attributes
from cirron_otel.version import VERSION

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

_MAX_BATCH_BYTES = 3_000_000
#: How long not to try the network directly again after that failed too.
_DIRECT_PAUSE_S = 30.0


class CirronSpanExporter(SpanExporter):
    """Writes spans to the spool and has them delivered to the platform from there.

    The keywords are the settings of ``Cirron()`` (``api_key``, ``api_endpoint``, ``output_dir``
    and others); what is not given comes from ``CIRRON_*`` variables, the files or the defaults.
    Without an API key the spans stay on disk, for ``cirron-otel spool flush``.

    An export waits for the disk only; the network is waited for on a thread of its own, so that a
    platform that hangs fills no queue of the SDK. What could not be sent when the process ends is
    sent by the next one. Spans that ``ci.profile()`` records itself are passed over.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for a setting that cannot be used; after
    that nothing is raised. Methods may be called from any thread and in forked children.
    """

    def __init__(self, **settings: Any) -> None:
        """Read the settings; nothing is started, written or connected before the first export."""
        self._settings = resolve(call={}, constructor=settings)
        self._guard = Guard()
        self._spec: DestinationSpec | None = None
        if self._settings.enabled:
            if self._settings.api_key is None:
                self._guard.warn(
                    "exporter_key",
                    "the exporter has no API key (CIRRON_API_KEY): spans stay in "
                    f"{self._settings.output_dir / 'spool'}",
                )
            else:
                self._spec = transport.platform_spec(self._settings)
                transport.connect(self._spec).close()  # says now what cannot be used
        self._lock = threading.Lock()
        self._process: _Process | None = None
        self._ended = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the spans to the spool; success when they are there, or else at the platform.

        Blocks as long as the disk does; if that refuses, for one request.
        """
        if self._ended:
            return SpanExportResult.FAILURE
        if not self._settings.enabled:
            return SpanExportResult.SUCCESS
        try:
            process = self._here()
            kept = [process.keep(*batch) for batch in self._batches(spans)]
        except Exception as error:  # noqa: BLE001 - see _guard
            self._guard.swallow("exporter.export", error)
            return SpanExportResult.FAILURE
        return SpanExportResult.SUCCESS if all(kept) else SpanExportResult.FAILURE

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Deliver what is in the spool; says whether all is. Blocks for at most the timeout."""
        process = self._process
        if process is None or process.pid != os.getpid() or process.forwarder is None:
            return True
        process.forwarder.wake()
        return not process.forwarder.drain(timeout_millis / 1000)

    def health(self) -> dict[str, Any]:
        """Losses by reason, swallowed errors by place, and the platform's state; never raises."""
        process = self._process
        here = process is not None and process.pid == os.getpid()
        forwarder = process.forwarder if process is not None and here else None
        return {
            "losses": dict(self._guard.losses),
            "swallowed_errors": dict(self._guard.swallowed),
            "destinations": [] if forwarder is None else forwarder.health(),
        }

    def shutdown(self, timeout_millis: float | None = None) -> None:
        """Deliver for at most ``exit_budget`` seconds, then end; the rest stays on disk."""
        if self._ended:
            return
        self._ended = True
        process = self._process
        if process is not None and process.pid == os.getpid():
            budget = self._settings.exit_budget
            if timeout_millis is not None:
                budget = min(budget, timeout_millis / 1000)
            process.end(budget)

    def _here(self) -> _Process:
        """What this process has of files and threads; a forked child gets its own."""
        process = self._process
        if process is not None and process.pid == os.getpid():
            return process
        if process is not None:
            # A thread of the parent may have held the lock while the child was made.
            self._lock = threading.Lock()
            process.leave_to_parent()
            self._process = None
        with self._lock:
            if self._process is None:
                self._process = _Process(self._settings, self._spec, self._guard)
            return self._process

    def _batches(self, spans: Sequence[ReadableSpan]) -> Iterator[tuple[str, int, bytes]]:
        """Ids and bytes of the batches that hold the spans; one per resource, if not too large."""
        recording = recorder._current  # noqa: SLF001 - the recorder of this process
        everything = (
            recording is not None and recording.active and recording.settings.spans == "all"
        )
        groups: dict[int, tuple[dict[str, Any], list[SpanRecord]]] = {}
        for span in [] if everything else spans:
            scope = span.instrumentation_scope
            if scope is not None and scope.name == semconv.INSTRUMENTATION_NAME:
                continue
            if id(span.resource) not in groups:
                groups[id(span.resource)] = (self._resource(span), [])
            resource, rows = groups[id(span.resource)]
            try:
                rows.append(self._row(span, resource))
            except Exception as error:  # noqa: BLE001 - one odd span takes no other with it
                self._guard.lost("not_encodable")
                self._guard.swallow("exporter.row", error)
        for resource, rows in groups.values():
            yield from self._encoded(rows, resource)

    def _resource(self, span: ReadableSpan) -> dict[str, Any]:
        settings = self._settings
        known = {
            semconv.RUN_ID: settings.run_id,
            semconv.WORKSPACE_ID: settings.workspace_id,
            semconv.PIPELINE_ID: settings.pipeline_id,
            semconv.DEPLOYMENT_ID: settings.deployment_id,
            semconv.MODEL_ID: settings.model_id,
            semconv.PROCESS_PID: os.getpid(),
        }
        given = {name: value for name, value in known.items() if value is not None}
        return {**given, **attributes(span.resource.attributes)[0]}

    def _row(self, span: ReadableSpan, resource: dict[str, Any]) -> SpanRecord:
        rank = resource.get(semconv.DL_RANK, self._settings.rank)
        return foreign_row(
            span,
            session=None,
            pid=os.getpid(),
            rank=rank if isinstance(rank, int) else 0,
            now_ns=time.time_ns(),
        )

    def _encoded(
        self, rows: list[SpanRecord], resource: dict[str, Any]
    ) -> Iterator[tuple[str, int, bytes]]:
        if not rows:
            return
        batch_id, created_ns = ids.new_row_id(), time.time_ns()
        document = {
            "schema_version": SCHEMA_VERSION,
            "sdk_version": VERSION,
            "batch_id": batch_id,
            "created_ns": created_ns,
            "spans": (),
            "marks": (),
            "snapshots": (),
            "resource": resource,
        }
        try:
            # batch.encode looks for keys of others in every row: 70 us per span instead of 42.
            document["spans"] = msgspec.Raw(b"[%b]" % encode_rows(rows))
            data = msgspec.json.encode(document)
        except Exception as error:  # noqa: BLE001 - whatever a span may hold
            if len(rows) == 1:
                self._guard.lost("not_encodable")
                self._guard.repeat_warning("exporter", f"a span cannot be written: {error!r}")
                return
            data = b""
        if data and (len(data) <= _MAX_BATCH_BYTES or len(rows) == 1):
            yield batch_id, created_ns, data
            return
        middle = len(rows) // 2
        yield from self._encoded(rows[:middle], resource)
        yield from self._encoded(rows[middle:], resource)


class _Process:
    """The files and threads of one process."""

    def __init__(self, settings: Settings, spec: DestinationSpec | None, guard: Guard) -> None:
        self.pid = os.getpid()
        self.forwarder: Forwarder | None = None
        self._guard = guard
        self._spec = spec
        self._lock = threading.Lock()
        self._direct: Destination | None = None
        self._direct_not_before = 0.0
        root: Path = settings.output_dir
        order = Delivered(root, [spec.name]) if spec is not None else None
        self.spool = Spool(root, max_bytes=settings.spool_max_bytes, evict_order=order)
        if spec is not None and settings.forward != "off":
            self.forwarder = Forwarder(
                [root],
                [transport.connect(spec, guard)],
                guard=guard,
                max_bytes=settings.spool_max_bytes,
            )
            self.forwarder.start()

    def keep(self, batch_id: str, created_ns: int, data: bytes) -> bool:
        """Whether a batch is on disk, or where that refuses at the platform."""
        try:
            with self._lock:
                self.spool.write([data], created_ns=created_ns, batch_id=batch_id)
        except SpoolError as error:
            self._guard.repeat_warning("exporter_disk", str(error))
        else:
            return True
        path = self.spool.directory / f"{created_ns:020d}-{batch_id}.json"
        return self._send(Parcel(batch_id, path, data))

    def _send(self, parcel: Parcel) -> bool:
        """One try to deliver a batch that is in no file."""
        if self._spec is not None:
            with self._lock:
                if time.monotonic() >= self._direct_not_before:
                    if self._direct is None:
                        self._direct = transport.connect(self._spec, self._guard)
                    if isinstance(self._direct.send(parcel), Accepted):
                        return True
                    self._direct_not_before = time.monotonic() + _DIRECT_PAUSE_S
        self._guard.lost("exporter_disk_and_network")
        return False

    def leave_to_parent(self) -> None:
        """In a forked child: keep nothing that is the parent's."""
        if self.forwarder is not None:
            self.forwarder.after_fork()

    def end(self, budget: float) -> None:
        if self._direct is not None:
            self._direct.close()
        if self.forwarder is not None:
            text = describe_left(self.forwarder.stop(budget), self.spool.root)
            if text is not None:
                logger.warning("cirron-otel: %s", text)
