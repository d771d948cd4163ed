"""Printing for the commands on training records: quick to load, and quiet when nobody reads on."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any, Self

import click

from cirron_otel.errors import RecordError

#: Narrower terminals are written to as if they had so many columns.
_LEAST = 24
#: What stands for characters that an output without Unicode has not.
_ASCII = str.maketrans("✓✗→…·≥\u202f\N{EN DASH}", "+x>.->,-")


class ReaderGoneError(Exception):
    """Whoever read the output has stopped; there is no use in making more of it."""


class Paper:
    """Standard output. Colours and line breaks on a terminal only, and no colours with NO_COLOR."""

    def __init__(self) -> None:
        """Look at standard output as it is now."""
        out = sys.stdout
        self.is_terminal = out.isatty()
        self.columns = max(_columns(), _LEAST) if self.is_terminal else None
        self._color = (
            self.is_terminal
            and not os.environ.get("NO_COLOR")
            and os.environ.get("TERM") not in {"dumb", ""}
        )
        encoding = (getattr(out, "encoding", None) or "ascii").lower()
        self._plain = not encoding.startswith("utf")
        self._gone = False

    def line(self, *pieces: str | tuple[str, str], cut: bool = False) -> None:
        """Print a line of pieces, each a text or a text and its style; ``cut`` at the edge.

        Raises :class:`ReaderGoneError` where nobody reads on.
        """
        left = self.columns if cut else None
        made = []
        for piece in pieces:
            text, style = (piece, "") if isinstance(piece, str) else piece
            text = text.translate(_ASCII) if self._plain else text
            if left is not None:
                text = _fitting(text, left, "." if self._plain else "…")
                left -= len(text)
            made.append(self._styled(text, style))
        self.write("".join(made).rstrip(" ") + "\n")

    def hanging(self, head: str, style: str, text: str, *, indent: int) -> None:
        """Print ``head`` and behind it a text, which goes on under itself on a terminal."""
        if self.columns is None:
            self.line((head, style), text)
            return
        if self.columns < indent + _LEAST:
            self.line((head.rstrip(), style), cut=True)
            head, style, indent = "    ", "", 4
        width = max(self.columns - indent, _LEAST - indent, 8)
        broken = _wrapped(text, width, break_on_hyphens=False) or [""]
        self.line((head, style), broken[0])
        for more in broken[1:]:
            self.line(" " * indent + more)

    def paragraph(self, text: str, style: str = "") -> None:
        """Print a sentence, broken at the edge of a terminal."""
        lines = [text] if self.columns is None else _wrapped(text, self.columns)
        for line in lines:
            self.line((line, style))

    def json(self, value: object) -> None:
        """Print a JSON document, indented."""
        self.write(json.dumps(value, indent=2, allow_nan=False) + "\n")

    def write(self, text: str) -> None:
        """Print text as it is. Raises :class:`ReaderGoneError`, and ``RecordError`` on failure."""
        if self._gone:
            raise ReaderGoneError
        try:
            sys.stdout.write(text)
        except OSError as exc:
            self._failed(exc)

    def write_bytes(self, data: bytes) -> None:
        """Print bytes as they are; as :meth:`write`."""
        if self._gone:
            raise ReaderGoneError
        try:
            sys.stdout.flush()
            sys.stdout.buffer.write(data)
        except OSError as exc:
            self._failed(exc)

    def close(self) -> None:
        """Hand everything over; quiet where nobody reads it, otherwise as :meth:`write`."""
        if self._gone:
            return
        try:
            sys.stdout.flush()
        except BrokenPipeError:
            self._into_nothing()
        except OSError as exc:
            self._failed(exc)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        if kind is None:
            self.close()
        return kind is ReaderGoneError

    def _failed(self, exc: OSError) -> None:
        self._into_nothing()
        if isinstance(exc, BrokenPipeError):
            raise ReaderGoneError from None
        raise RecordError(f"cannot write the output: {exc.strerror or exc}") from exc

    def _into_nothing(self) -> None:
        """What is in the buffer still, the interpreter writes at exit: into nothing."""
        self._gone = True
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, sys.stdout.fileno())
        os.close(nothing)

    def _styled(self, text: str, style: str) -> str:
        if not self._color or not style:
            return text
        styles: dict[str, dict[str, Any]] = {
            "good": {"fg": "green"},
            "bad": {"fg": "red", "bold": True},
            "note": {"fg": "yellow"},
            "act": {"fg": "cyan"},
            "proof": {"fg": "magenta"},
            "dim": {"dim": True},
            "bold": {"bold": True},
        }
        return click.style(text, **styles[style])


# Only a terminal needs these two, and a command in a script should not wait for them.


def _columns() -> int:
    import shutil  # noqa: PLC0415

    return shutil.get_terminal_size().columns


def _wrapped(text: str, width: int, *, break_on_hyphens: bool = True) -> list[str]:
    import textwrap  # noqa: PLC0415

    return textwrap.wrap(text, width, break_on_hyphens=break_on_hyphens)


def _fitting(text: str, columns: int, dots: str) -> str:
    return text if len(text) <= columns else text[: max(columns - 1, 0)] + dots * (columns > 0)


def run_path(given: str) -> Path:
    """The record that a command is asked about."""
    return Path(given).expanduser()
