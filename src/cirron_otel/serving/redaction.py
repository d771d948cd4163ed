"""Texts of requests and answers: never recorded unless asked, and then through the user's hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from cirron_otel import semconv
from cirron_otel.errors import ConfigurationError
from cirron_otel.values import cut_text

if TYPE_CHECKING:
    from cirron_otel.serving.requests import RequestMethods

#: Gets what it is (``"input"`` or ``"output"``) and the text; what it returns is recorded, and
#: nothing where that is None.
Redact = Callable[[str, str], str | None]

#: Bytes of each text that are kept.
MAX_CONTENT = 64 * 1024


class Content:
    """Whether texts are recorded, and how.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for a hook that would never be called.
    """

    def __init__(self, *, record: bool, redact: Redact | None) -> None:
        if redact is not None and not record:
            raise ConfigurationError(
                "redact= is given without record_content=True: nothing of the texts is recorded, "
                "so there is nothing to redact; leave it out, or ask for the texts"
            )
        if redact is not None and not callable(redact):
            raise ConfigurationError(
                "redact= must be a function of the kind ('input' or 'output') and the text"
            )
        self.record = record
        self._redact = redact

    def say(
        self, scope: RequestMethods, kind: Literal["input", "output"], text: str | bytes
    ) -> None:
        """Put a text on a request that is still open. A hook that raises keeps it out."""
        if not self.record or not text:
            return
        plain = text if isinstance(text, str) else text.decode("utf-8", "replace")
        if self._redact is not None:
            guard = scope._rec.guard  # noqa: SLF001 - a scope's own kind
            try:
                kept = self._redact(kind, plain)
            except Exception as error:  # noqa: BLE001 - the hook is the user's
                guard.lost("redaction_failed")
                # Not its message: that may repeat the text.
                guard.repeat_warning(
                    "redact",
                    f"redact= raised {type(error).__name__}; the text is not recorded",
                )
                return
            if kept is None:
                return
            plain = str(kept)
        key = semconv.CONTENT_INPUT if kind == "input" else semconv.CONTENT_OUTPUT
        scope.clean = None
        scope.attrs = {**scope.attrs, key: cut_text(plain, MAX_CONTENT)}


class Kept:
    """The first bytes of a body that comes in parts."""

    __slots__ = ("_size", "parts")

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """Keep what there is room for."""
        if self._size < MAX_CONTENT and part:
            self.parts.append(bytes(part[: MAX_CONTENT - self._size]))
            self._size += len(part)

    def text(self) -> bytes:
        """What was kept."""
        return b"".join(self.parts)
