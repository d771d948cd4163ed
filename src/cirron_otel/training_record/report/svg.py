"""The few drawing words that the charts are made of. All text is escaped here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from cirron_otel.training_record.report import words


def esc(value: object) -> str:
    """Text for HTML and attributes; what may not stand in a page is replaced."""
    return escape(words.clean(str(value), 2000), quote=True)


def px(value: float) -> str:
    """A coordinate, to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


@dataclass(frozen=True, slots=True)
class Scale:
    """From data to pixels, straight or by the logarithm."""

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value; outside the domain, that of its nearer end."""
        low, high = self.low, self.high
        value = min(max(value, low), high)
        if self.log:
            low, high, value = math.log10(low), math.log10(high), math.log10(value)
        # Halved, because the span of two huge numbers is more than a float can hold.
        share = (value / 2 - low / 2) / (high / 2 - low / 2) if high > low else 0.5
        return self.start + share * (self.end - self.start)

    def ticks(self, many: int) -> list[float]:
        """Round values inside the domain, about so many."""
        return _log_ticks(self, many) if self.log else _ticks(self, many)


def _ticks(scale: Scale, many: int) -> list[float]:
    span = scale.high - scale.low
    if span <= 0 or not math.isfinite(span):
        return [scale.low]
    rough = span / max(many, 1)
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 2.5, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(scale.low / step - 1e-9)
    last = math.floor(scale.high / step + 1e-9)
    return [0.0 if at == 0 else at * step for at in range(first, last + 1)][:20]


def _log_ticks(scale: Scale, many: int) -> list[float]:
    first, last = math.ceil(math.log10(scale.low) - 1e-9), math.floor(math.log10(scale.high) + 1e-9)
    if last - first < 1:
        return [scale.low, scale.high]
    stride = max(1, math.ceil((last - first + 1) / max(many, 2)))
    return [10.0**power for power in range(first, last + 1, stride)]


def step_ticks(scale: Scale, many: int) -> list[int]:
    """Round whole numbers inside the domain."""
    ticks = scale.ticks(many)
    return sorted({round(tick) for tick in ticks if math.isclose(tick, round(tick), abs_tol=1e-6)})


def polyline(points: Iterable[tuple[float, float] | None]) -> str:
    """Path data through points; None breaks the line, a lonely point becomes a dot."""
    parts: list[str] = []
    piece: list[str] = []

    def close() -> None:
        if len(piece) == 1:
            piece.append("h0.01")
        parts.extend(piece)
        piece.clear()

    for point in points:
        if point is None:
            close()
        else:
            piece.append(f"{'L' if piece else 'M'}{px(point[0])} {px(point[1])}")
    close()
    return "".join(parts)


def cells(runs: Iterable[tuple[int, int, int]]) -> str:
    """Path data of cells on a grid of unit squares: ``(column, row, length)`` each."""
    return "".join(f"M{column} {row}h{length}v1h-{length}z" for column, row, length in runs)


def text(x: float, y: float, content: object, *, kind: str = "", anchor: str = "") -> str:
    """A text element of the classes in ``kind``."""
    attributes = f' class="{kind}"' if kind else ""
    attributes += f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{px(x)}" y="{px(y)}"{attributes}>{esc(content)}</text>'


def chart(width: float, height: float, title: str, description: str, content: Sequence[str]) -> str:
    """A whole chart, named and described for those who do not see it."""
    return (
        f'<div class="chart"><svg viewBox="0 0 {px(width)} {px(height)}" role="img" '
        f'aria-label="{esc(title)}"><title>{esc(title)}</title><desc>{esc(description)}</desc>'
        f"{''.join(content)}</svg></div>"
    )


#: Glyphs differ in shape, not only in colour. Drawn around 0, 0, about ten pixels wide.
GLYPHS = {
    "alarm": "M0-5.5L5.5 4.5H-5.5Z",
    "channels": "M0-5.5L5.5 0L0 5.5L-5.5 0Z",
    "certificate": "M-4.5-4.5H4.5V4.5H-4.5Z",
    "repair": "M-1.7-5.5H1.7V-1.7H5.5V1.7H1.7V5.5H-1.7V1.7H-5.5V-1.7H-1.7Z",
    "spike": "M0 5.5L5.5-4.5H-5.5Z",
    "nonfinite": "M-5-3.2L-3.2-5L0-1.8L3.2-5L5-3.2L1.8 0L5 3.2L3.2 5L0 1.8L-3.2 5L-5 3.2L-1.8 0Z",
    "cleared": "M-5 0a5 5 0 1 0 10 0a5 5 0 1 0-10 0M-2.6 0a2.6 2.6 0 1 1 5.2 0a2.6 2.6 0 1 1-5.2 0",
    "other": "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0",
}


def glyph(kind: str, x: float, y: float, tip: str = "") -> str:
    """A glyph at a place, with a text for those who point at it."""
    title = f"<title>{esc(tip)}</title>" if tip else ""
    return (
        f'<path class="g g-{kind}" transform="translate({px(x)} {px(y)})" '
        f'd="{GLYPHS[kind]}">{title}</path>'
    )
