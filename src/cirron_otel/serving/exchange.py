"""One HTTP request and its answer, as either middleware watches them go by."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron_otel import semconv
from cirron_otel.serving import usage
from cirron_otel.serving.following import CLOSED, FAILED, end_by
from cirron_otel.serving.redaction import Kept

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cirron_otel.serving.options import Options
    from cirron_otel.serving.requests import JoinedRequest, RequestSpan
    from cirron_otel.serving.state import InnerError

CLIENT_DISCONNECTED = "client_disconnected"
_NOT_FINISHED = "incomplete_response"
_SERVER_ERROR = 500
#: Bodies longer than this are not searched for what they say of tokens.
_MAX_BODY = 8 << 20
#: What the type of a body that is text has in it; one without a type may be.
_TEXTS = ("text/", "json", "xml", "x-www-form-urlencoded", "event-stream", "javascript")


class Exchange:
    """What is learned of one request on its way. Nothing here raises, but for ``BaseException``.

    ``kind`` is the ``content-type`` of what the client sends.
    """

    __slots__ = (
        "_is_json", "_is_stream", "_options", "_reads", "complete", "gone", "request", "sent",
        "status", "taken",
    )  # fmt: skip

    def __init__(self, request: RequestSpan | JoinedRequest, options: Options, kind: str) -> None:
        self.request = request
        self._options = options
        #: 0 until the application has said it.
        self.status = 0
        self._is_json = self._is_stream = False
        #: Whether the answer can be read: nothing has compressed it.
        self._reads = True
        #: The whole answer has been made; and the client has left.
        self.complete = self.gone = False
        record = options.content.record
        #: The texts, where they are asked for and are texts.
        self.taken = Kept(is_text=bool(kind)) if record and _may_be_text(kind) else None
        self.sent = Kept() if record else None

    # --- on the way --------------------------------------------------------------------------

    def begun(self, status: object, headers: Mapping[str, str]) -> None:
        """The answer begins; the names of its headers are in small letters."""
        digits = str(status)
        self.status = int(digits) if digits.isdecimal() else 0
        kind = headers.get("content-type", "")
        self._is_json = "json" in kind
        # Where the length is known beforehand, it is a file that is sent in parts.
        self._is_stream = "content-length" not in headers
        self._reads = headers.get("content-encoding", "identity") == "identity"
        if self.sent is not None:
            self.sent = Kept(is_text=bool(kind)) if self._reads and _may_be_text(kind) else None

    def note_body(self, body: bytes, *, in_parts: bool) -> None:
        """The answer, or one more part of it."""
        try:
            state = self.request.state
            if self.sent is not None:
                self.sent.add(body)
            if self._is_stream and in_parts:
                # Of a stream that a decorated function follows, it knows more.
                if not (state.joined and state.is_stream):
                    state.is_stream = True
                    if body:
                        state.count_tokens = self._options.token_counter if self._reads else None
                        state.note_chunk(body)
            elif self._is_json and len(body) <= _MAX_BODY and not state.joined:
                facts = state.facts or usage.Facts()
                if usage.read_json(facts, bytes(body)):
                    state.facts = facts
        except Exception as error:  # noqa: BLE001 - see _guard
            self.swallow(error)

    # --- the end -----------------------------------------------------------------------------

    def over(self, error: BaseException | None = None) -> None:
        """The answer is complete, or there will be no more of it; the first word counts."""
        request = self.request
        if not request.is_open:
            return
        try:
            self.say()
        except Exception as failure:  # noqa: BLE001 - see _guard
            self.swallow(failure)
        left = self.gone and not self.complete
        state = request.known_state
        if state is not None and state.is_stream and state.stream_end is None:
            if left:
                state.stream_end = CLOSED
            elif error is None and not self.complete:
                state.stream_end = FAILED
            else:
                state.stream_end = end_by(error)
        if left:
            request.finish(
                error_type=CLIENT_DISCONNECTED, message="the client left before the answer ended"
            )
        elif error is not None or self.status >= _SERVER_ERROR:
            self._failed(error, None if state is None else state.inner)
        elif not self.complete:
            request.finish(
                error_type=_NOT_FINISHED, message="the application returned without a whole answer"
            )
        else:
            request.finish()

    def _failed(self, error: BaseException | None, inner: InnerError | None) -> None:
        """``inner`` left a decorated function and stands on the request already."""
        if inner is not None and (error is None or inner.id == id(error)):
            self.request.finish(error_type=inner.type, message=inner.message)
        elif error is not None:
            self.request.finish(error)
        else:
            self.request.finish(error_type=str(self.status))

    def say(self) -> None:
        """Put what was learned on the request, which is still open."""
        request = self.request
        if self.status:
            request.clean = None
            request.attrs = {**request.attrs, semconv.HTTP_STATUS: self.status}
        state = request.known_state
        if state is not None and state.content is not None:
            return  # a decorated function says its texts, and may have kept them out
        content = self._options.content
        if self.taken is not None:
            content.say(request, "input", self.taken.text())
        if self.sent is not None:
            content.say(request, "output", self.sent.text())

    def swallow(self, error: Exception) -> None:
        """Take an exception of ours out of the way."""
        self.request._rec.guard.swallow("middleware", error)  # noqa: SLF001 - a scope's own kind


def _may_be_text(kind: str) -> bool:
    return not kind or any(text in kind.lower() for text in _TEXTS)
