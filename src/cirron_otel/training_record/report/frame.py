"""The frame that all charts of a report share: the same steps at the same place on the page."""

from __future__ import annotations

from collections.abc import Iterator

from cirron_otel.training_record.report import svg, words
from cirron_otel.training_record.report.model import Layer, Run

WIDTH = 960.0
LEFT = 168.0
RIGHT = 884.0
_LABEL = 25
#: Columns drawn at most: finer ones would be thinner than a pixel or two.
_BINS = 192
_CELLS = 28_000
_FEWEST_BINS = 48


class Frame:
    """Steps to pixels, and the columns of the run gathered into bins wide enough to be seen."""

    def __init__(self, run: Run) -> None:
        low = run.first_step or 0
        seen = max(run.last_step or 0, (run.steps or 1) - 1, low)
        end = max(run.steps or 0, seen + 1)
        self.run = run
        self.x = svg.Scale(low, end, LEFT, RIGHT)
        self._end = end

    def bins(self, rows: int) -> list[tuple[int, int, float, float]]:
        """Start, stop, left and right of each bin; fewer for many rows, to keep the page small."""
        columns = self.run.columns
        most = max(min(_BINS, _CELLS // max(rows, 1)), _FEWEST_BINS)
        size = max(1, -(-len(columns) // most))
        found = []
        for start in range(0, len(columns), size):
            stop = min(start + size, len(columns))
            left = self.x(columns.first[start])
            right = self.x(columns.first[stop] if stop < len(columns) else self._end)
            found.append((start, stop, left, max(right, left + 0.5)))
        return found

    def axis(self, top: float, bottom: float) -> Iterator[str]:
        """Light vertical lines at round steps, and their numbers below."""
        for tick in svg.step_ticks(self.x, 8):
            at = self.x(tick)
            yield f'<path class="grid" d="M{svg.px(at)} {svg.px(top)}V{svg.px(bottom)}"/>'
            yield svg.text(at, bottom + 16, words.count(tick), kind="tick", anchor="middle")
        yield svg.text(LEFT - 10, bottom + 16, "step", kind="tick", anchor="end")

    def span(self, start: int, end: int | None) -> tuple[float, float]:
        """Left edge and width of an episode, never too thin to see."""
        left = self.x(start)
        right = RIGHT if end is None else self.x(end)
        return left, max(right - left, 2.0)


def label(layer: Layer) -> str:
    """A layer's name, cut in its middle to what fits beside a chart."""
    return shorten(words.layer_name(layer.name))


def shorten(name: str, limit: int = _LABEL) -> str:
    """A dotted name cut at its left: its end tells more."""
    return name if len(name) <= limit else "…" + name[-(limit - 1) :]
