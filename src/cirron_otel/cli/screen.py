"""Printing: colours on a terminal, bare text in a pipe, warnings beside both."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import click
import msgspec

from cirron_otel.reading.notes import Segment
from cirron_otel.reading.values import clean, width

#: Styles of segments in the words of rich.
_RICH: Mapping[str, str] = {
    "guide": "dim",
    "name": "bold",
    "index": "cyan",
    "time": "",
    "mark": "green",
    "value": "bold green",
    "final": "bold",
    "attr": "dim",
    "error": "bold red",
    "open": "bold blue",
    "lost": "yellow",
    "dim": "dim",
    "plain": "",
}
#: So many warnings about files are written out; the others are counted.
_WARNINGS = 5

#: Of a command that prints either lines or JSON.
json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON.")
no_color_option = click.option("--no-color", is_flag=True, help="Print without colours.")


class Screen:
    """Where a command prints its lines.

    On a terminal a line is cut at the right edge; in a pipe it is whole. Colours only on a
    terminal, and not with ``NO_COLOR``, ``TERM=dumb`` or ``color=False``.
    """

    def __init__(self, *, color: bool = True) -> None:
        """Look at standard output as it is now."""
        self.is_terminal = sys.stdout.isatty()
        self.columns = shutil.get_terminal_size().columns if self.is_terminal else None
        encoding = (getattr(sys.stdout, "encoding", None) or "ascii").lower().replace("-", "")
        self.ascii_only = not encoding.startswith("utf")
        color = color and self.is_terminal
        color = color and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        self._styled = _Styled(self.columns or 80) if color else None

    def line(self, segments: Iterable[Segment], *, cut: bool = True) -> None:
        """Print one line; with ``cut=False`` the terminal breaks it where it is too long."""
        if self._styled is not None:
            self._styled.line(segments, cut=cut)
            return
        shown = "".join(piece for piece, _ in segments).rstrip()
        if cut and self.columns is not None and width(shown) > self.columns:
            shown = _cut(shown, self.columns, "..." if self.ascii_only else "…")
        sys.stdout.write(shown + "\n")

    def text(self, shown: str, style: str = "plain") -> None:
        """Print a sentence, whole."""
        self.line([(shown, style)], cut=False)

    def table(
        self,
        head: Sequence[str],
        rows: Sequence[Sequence[Segment]],
        right: str,
        *,
        cut: bool = True,
    ) -> None:
        """Print aligned columns; ``right`` has an ``r`` for each that holds numbers.

        ``cut`` as for :meth:`line`.
        """
        columns = range(len(head))
        widths = [max(width(line[i][0]) for line in [[(h, "") for h in head], *rows])
                  for i in columns]  # fmt: skip
        for cells in [[(h, "dim") for h in head], *rows]:
            line: list[Segment] = []
            for i, (shown, style) in enumerate(cells):
                padding = " " * (widths[i] - width(shown))
                line.append((padding + shown if right[i] == "r" else shown + padding, style))
                line.append(("  ", "plain"))
            self.line(line, cut=cut)


class _Styled:
    """Lines through rich, which knows what the terminal can do."""

    def __init__(self, columns: int) -> None:
        # Only here: a pipe should not wait for it.
        from rich.console import Console  # noqa: PLC0415
        from rich.text import Text  # noqa: PLC0415

        self._text = Text
        self._console = Console(width=columns, highlight=False, markup=False, emoji=False)

    def line(self, segments: Iterable[Segment], *, cut: bool) -> None:
        line = self._text.assemble(*((piece, _RICH[style]) for piece, style in segments))
        line.rstrip()
        if cut:
            self._console.print(line, no_wrap=True, overflow="ellipsis", crop=True)
        else:
            self._console.print(line, soft_wrap=True)


def _cut(shown: str, columns: int, dots: str) -> str:
    while shown and width(shown) + len(dots) > columns:
        shown = shown[:-1]
    return shown + dots


def print_json(value: object) -> None:
    """Print a JSON document, indented."""
    sys.stdout.write(msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n")


class Warnings:
    """Says on standard error which files were passed over."""

    def __init__(self) -> None:
        """Begin with none."""
        self._seen: set[Path] = set()

    def __call__(self, path: Path, exc: Exception) -> None:
        """One file that could not be read."""
        if path in self._seen:
            return
        self._seen.add(path)
        if len(self._seen) <= _WARNINGS:
            click.echo(f"warning: skipped {path.name}: {clean(str(exc))}", err=True)

    def close(self) -> None:
        """Say how many more there were."""
        more = len(self._seen) - _WARNINGS
        if more > 0:
            click.echo(f"warning: and {more} more files like this", err=True)
