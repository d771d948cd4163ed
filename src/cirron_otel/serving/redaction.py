"""Texts of requests and answers: never recorded unless asked, and then through the user's hook."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from cirron_otel import semconv
from cirron_otel.errors import ConfigurationError
from cirron_otel.values import clean_text, cut_text

if TYPE_CHECKING:
    from cirron_otel.scope_base import BaseScope

Kind = Literal["input", "output"]
#: Gets what it is (``"input"`` or ``"output"``) and the text; what it returns is recorded, and
#: nothing where that is None.
Redact = Callable[[str, str], str | None]

#: Bytes of each text that are kept.
MAX_CONTENT = 64 * 1024


class Content:
    """Whether texts are recorded, and how.

    Raises :class:`~cirron_otel.errors.ConfigurationError` for a hook that would never be called.
    """

    __slots__ = ("_redact", "record")

    def __init__(self, *, record: bool, redact: Redact | None) -> None:
        if redact is not None and not record:
            raise ConfigurationError(
                "redact= is given without record_content=True: nothing of the texts is recorded, "
                "so there is nothing to redact; leave it out, or ask for the texts"
            )
        self.record = record
        self._redact = redact

    def say(self, scope: BaseScope, kind: Kind, text: str) -> None:
        """Put a text on a request that is still open. A hook that raises keeps it out."""
        if not self.record or not text:
            return
        if self._redact is not None:
            guard = scope._rec.guard  # noqa: SLF001 - a scope's own kind
            try:
                kept = self._redact(kind, text)
                if kept is None:
                    return
                text = str(kept)
            except Exception as error:  # noqa: BLE001 - the hook is the user's
                guard.lost("redaction_failed")
                # Not its message: that may repeat the text.
                guard.repeat_warning(
                    "redact",
                    f"redact= raised {type(error).__name__}; the text is not recorded",
                )
                return
        key = semconv.CONTENT_INPUT if kind == "input" else semconv.CONTENT_OUTPUT
        scope.clean = None
        scope.attrs = {**scope.attrs, key: cut_text(clean_text(text), MAX_CONTENT)}


class Kept:
    """The first bytes of a text that comes in parts, UTF-8."""

    __slots__ = ("_kept", "is_text")

    def __init__(self, *, is_text: bool = True) -> None:
        self._kept = bytearray()
        #: Whether it is known to be a text; if not, it is one where it is UTF-8.
        self.is_text = is_text

    @property
    def room(self) -> int:
        """Bytes there is room for."""
        return MAX_CONTENT - len(self._kept)

    def add(self, part: bytes) -> None:
        """Keep what there is room for."""
        if part and self.room > 0:
            self._kept += part[: self.room]

    def text(self) -> str:
        """What was kept; a character that was cut in two is left out."""
        decoder = codecs.getincrementaldecoder("utf-8")("replace" if self.is_text else "strict")
        try:
            return decoder.decode(self._kept, final=self.room > 0)
        except UnicodeDecodeError:
            return ""
