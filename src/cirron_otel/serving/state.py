"""What is known of one request beside its scope: chunks and their times, tokens, how it ended.

Most requests have none of it, so it is made when it is first asked for. It belongs to whoever
consumes the result; only its end may come from any thread.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from cirron_otel import semconv
from cirron_otel.marks import record_mark_on
from cirron_otel.scope_core import OPEN
from cirron_otel.serving import gen_ai, usage
from cirron_otel.serving.gaps import Gaps

if TYPE_CHECKING:
    from collections.abc import Callable

    from cirron_otel.scope_base import BaseScope
    from cirron_otel.serving.redaction import Content
    from cirron_otel.serving.texts import AnswerText

_MS = 1e6
_ESTIMATE: dict[str, Any] = {semconv.ESTIMATED: True}
_COUNTED: dict[str, Any] = {semconv.ESTIMATED: True, "source": "token_counter"}
_CHUNKS: dict[str, Any] = {semconv.ESTIMATED: True, "source": "chunks"}


class InnerError(NamedTuple):
    """An exception that left a part of the request; it is not kept itself."""

    id: int
    type: str
    message: str


class RequestState:
    """The facts of one request. Nothing here raises or blocks.

    Times are ns since the epoch, as the scope's.
    """

    __slots__ = (
        "_finished", "chunks", "content", "count_tokens", "counted", "each_chunk", "facts",
        "first_ns", "gaps", "inner", "is_stream", "joined", "last_ns", "scope", "shared",
        "stream_end", "texts",
    )  # fmt: skip

    def __init__(self, scope: BaseScope) -> None:
        self.scope = scope
        #: What results and chunks said of their model and tokens.
        self.facts: usage.Facts | None = None
        self.first_ns: int | None = None
        self.last_ns: int | None = None
        self.chunks = 0
        #: Tokens of the output by the counter that the user gave.
        self.counted: int | None = None
        self.count_tokens: Callable[[Any], int] | None = None
        #: Whether each chunk after the first leaves a mark ``chunk_ms``.
        self.each_chunk = False
        #: Where a decorated call says its texts: how, and that of the chunks so far.
        self.content: Content | None = None
        self.texts: AnswerText | None = None
        self.gaps: Gaps | None = None
        self.is_stream = False
        #: How the stream ended: one of ``complete``, ``closed``, ``cancelled``, ``error``,
        #: ``abandoned``, ``not_started``; None: it has not, or there is none.
        self.stream_end: str | None = None
        #: Made by a middleware; and a decorated call has taken it as its own.
        self.shared = False
        self.inner: InnerError | None = None
        self.joined = False
        self._finished = False

    @property
    def start_ns(self) -> int:
        """When the request began."""
        return self.scope.start_ns

    @property
    def kind(self) -> str:
        """``server`` where nothing else in the trace stands for the service's side, else
        ``internal``.
        """  # noqa: D205 - one sentence
        said = self.scope.otel.kind
        if type(said) is str:
            return said
        extra = self.scope.extra
        return "internal" if extra is None else str(extra.kind.name.lower())

    # --- while it runs -----------------------------------------------------------------------

    def note_result(self, result: object) -> None:
        """Take what a result says of its tokens and its model."""
        try:
            facts = self.facts or usage.Facts()
            if usage.read(facts, result):
                self.facts = facts
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow("request.result", error)

    def note_chunk(self, chunk: object) -> None:
        """Take one chunk of the output that has just been made."""
        try:
            self._take(chunk)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow("request.chunk", error)

    def _take(self, chunk: object) -> None:
        scope = self.scope
        now = scope._rec.clock.monotonic_ns() + scope._offset  # noqa: SLF001 - a scope's own
        self.chunks += 1
        last = self.last_ns
        self.last_ns = now
        if last is None:
            self.first_ns = now
        else:
            gaps = self.gaps
            if gaps is None:
                gaps = self.gaps = Gaps()
            gaps.add(now - last)
            if self.each_chunk:
                took = (now - last) / _MS
                self.mark(semconv.CHUNK_MS, took, kind="point", index=self.chunks - 1)
        if type(chunk) is not str or chunk.startswith(("data:", "event:")):
            facts = self.facts or usage.Facts()
            if usage.read(facts, chunk):
                self.facts = facts
        if self.count_tokens is not None:
            self._count(self.count_tokens, chunk)
        if self.texts is not None:
            self.texts.add(chunk)

    def _count(self, count: Callable[[Any], int], chunk: object) -> None:
        try:
            number = int(count(chunk))
        except Exception as error:  # noqa: BLE001 - the counter is the user's
            self.count_tokens = None
            self.scope._rec.guard.repeat_warning(  # noqa: SLF001 - a scope's own
                "token_counter", f"token_counter raised {error!r}; tokens are not counted"
            )
        else:
            self.counted = (self.counted or 0) + max(0, number)

    def mark(self, name: str, value: object, *, kind: str = "summary", **attrs: Any) -> None:
        """Leave a mark on the request, whatever scope is current."""
        self.record(name, value, kind, attrs)

    def record(self, name: object, value: object, kind: object, attrs: dict[str, Any]) -> None:
        """The same, with attributes that may have any name."""
        scope = self.scope
        try:
            if scope._state == OPEN:  # noqa: SLF001 - a scope's own kind
                record_mark_on(scope._rec, scope, name, value, kind, attrs)  # noqa: SLF001
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow("request.mark", error)

    # --- the end -----------------------------------------------------------------------------

    def output_tokens(self) -> tuple[int, bool] | None:
        """Tokens of the output, and whether that is an estimate; None where nobody knows."""
        facts = self.facts
        if facts is not None and facts.output_tokens is not None:
            return facts.output_tokens, False
        return None if self.counted is None else (self.counted, True)

    def finish(self) -> None:
        """Say everything that is known, once; the scope is still open."""
        if self._finished:
            return
        self._finished = True
        try:
            late = 0 if self.facts is None else self.facts.settle()
            if late:
                self.scope._rec.guard.lost("device_not_ready", late)  # noqa: SLF001 - its own
            self._say()
            if self.content is not None and self.texts is not None:
                self.content.say(self.scope, "output", self.texts.text())
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow("request.finish", error)
        try:
            gen_ai.finish(self)
        except Exception as error:  # noqa: BLE001 - see _guard
            self._swallow("request.gen_ai", error)

    def _say(self) -> None:
        facts = self.facts
        if facts is not None:
            given = facts.input_tokens
            if given is not None:
                self.mark(semconv.INPUT_TOKENS, given)
            made = facts.output_tokens
            if made is not None and not self.is_stream:
                self.mark(semconv.OUTPUT_TOKENS, made)
            total = facts.total_tokens
            if total is None and given is not None and made is not None:
                total = given + made
            if total is not None:
                self.mark(semconv.TOTAL_TOKENS, total)
        if self.is_stream:
            self._say_stream()

    def _say_stream(self) -> None:
        scope = self.scope
        now = scope._rec.clock.monotonic_ns() + scope._offset  # noqa: SLF001 - a scope's own
        end = self.stream_end
        if end is not None:
            scope.attrs = {**scope.attrs, semconv.STREAM_END: end}
        first, last = self.first_ns, self.last_ns
        if first is not None:
            self.mark(semconv.TIME_TO_FIRST_TOKEN_MS, (first - scope.start_ns) / _MS)
        self.mark(semconv.REQUEST_DURATION_MS, (now - scope.start_ns) / _MS)
        self.mark(semconv.OUTPUT_CHUNKS, self.chunks)
        known = self.output_tokens()
        if known is None:
            tokens, how = self.chunks, _CHUNKS
        else:
            tokens, how = known[0], _COUNTED if known[1] else {}
        self.mark(semconv.OUTPUT_TOKENS, tokens, **how)
        if first is not None and last is not None and last > first and tokens > 1:
            rate = (tokens - 1) / ((last - first) / 1e9)
            self.mark(semconv.TOKENS_PER_SECOND, rate, **({} if not how else _ESTIMATE))
        gaps = self.gaps
        if gaps is not None:
            self.mark(semconv.INTER_TOKEN_MS_P50, (gaps.quantile(0.5) or 0.0) / _MS)
            self.mark(semconv.INTER_TOKEN_MS_P95, (gaps.quantile(0.95) or 0.0) / _MS)
            self.mark(semconv.INTER_TOKEN_MS_MAX, gaps.max_ns / _MS)

    def _swallow(self, place: str, error: Exception) -> None:
        self.scope._rec.guard.swallow(place, error)  # noqa: SLF001 - a scope's own
