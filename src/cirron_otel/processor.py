"""The span processor that a joined provider gets.

Scopes of ours write their own rows when they end; what this processor adds is everybody else's
spans, when ``profile(spans="all")`` asks for them, and that flushing or shutting down the
application's provider flushes the spool too.

A processor cannot be taken off a provider again. So there is one per provider for the life of the
process, remembered on the provider itself, and it follows whichever recorder is current.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor

from cirron_otel import semconv
from cirron_otel.core import nothing
from cirron_otel.foreign_spans import foreign_row

if TYPE_CHECKING:
    from collections.abc import Callable

    from opentelemetry.sdk.trace import TracerProvider

    from cirron_otel.recorder import Recorder

_ATTRIBUTE = "_cirron_otel_processor"


class SpoolSpanProcessor(SpanProcessor):
    """Writes foreign spans to the spool of the current recorder. Never raises, never blocks."""

    recorder: Recorder | None

    def __init__(self) -> None:
        self.follow(None)

    @classmethod
    def on(cls, provider: TracerProvider) -> SpoolSpanProcessor:
        """The processor of ``provider``; added to it the first time."""
        found = getattr(provider, _ATTRIBUTE, None)
        if isinstance(found, cls):
            return found
        made = cls()
        provider.add_span_processor(made)
        setattr(provider, _ATTRIBUTE, made)
        return made

    # Both are called for every span of the application's, ours among them: where there is nothing
    # to do, nothing is done, compiled.
    on_start = staticmethod(nothing)
    on_end: Callable[[ReadableSpan], None]  # type: ignore[assignment] # on the instance

    def follow(self, rec: Recorder | None) -> None:
        """Work for ``rec`` from now on; for nobody when None."""
        self.recorder = rec
        wanted = rec is not None and rec.settings.spans == "all"
        self.on_end = self._write if wanted else nothing

    def _write(self, span: ReadableSpan) -> None:
        """Write a span that is not one of our scopes."""
        rec = self.recorder
        if rec is None or not rec.active:
            return
        try:
            scope = span.instrumentation_scope
            if scope is None or scope.name != semconv.INSTRUMENTATION_NAME:
                session = None if rec.session is None else rec.session.id
                now = 0 if span.end_time else rec.clock.now()
                rec.append_span(
                    foreign_row(span, session=session, pid=rec.pid, rank=rec.rank, now_ns=now)
                )
        except Exception as error:  # noqa: BLE001 - see _guard
            rec.guard.swallow("processor.on_end", error)

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Write everything recorded so far to the spool."""
        return self.recorder is None or self.recorder.flush(timeout_millis / 1000)

    def shutdown(self) -> None:
        """Flush; the recorder itself goes on until ``ci.shutdown()``."""
        self.force_flush(5000)
