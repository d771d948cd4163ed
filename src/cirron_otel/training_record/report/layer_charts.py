"""Gradient norms and stuck channels per layer: a row each while there are few, else a heat map."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

from cirron_otel.training_record.report import svg, words
from cirron_otel.training_record.report.frame import LEFT, RIGHT, WIDTH, Frame, label
from cirron_otel.training_record.report.model import (
    CERTIFIED,
    CONSTANT,
    DECAYED,
    SILENT,
    Episode,
    Layer,
    Run,
    stuck_count,
)
from cirron_otel.training_record.report.thinning import Peaks

#: Up to so many layers get a curve of their own.
ROWS = 14
_ROW = 46.0
LEVELS = 12
#: How a heat map's cell is classed: a level from 0 to LEVELS - 1, or one of these.
ZERO, BAD, NOTHING = "z", "b", ""

_ALARMS = frozenset({"no_gradient", "vanishing", "exploding"})
#: Stacked from the bottom: the most certain first.
STACK = (
    (CERTIFIED, "certified", "proven dead"),
    (CONSTANT, "constant", "constant"),
    (DECAYED, "decayed", "decayed"),
    (SILENT, "silent", "silent"),
)


def gradient_rows(run: Run, frame: Frame, layers: list[Layer]) -> str:
    """A curve per layer, each on a logarithmic scale of its own."""
    content = list(frame.axis(6, 6 + _ROW * len(layers)))
    alarms = _by_layer(run, _ALARMS)
    for at, layer in enumerate(layers):
        content += _gradient_row(frame, layer, 6 + _ROW * at, alarms.get(layer.name, []))
    return svg.chart(
        WIDTH,
        6 + _ROW * len(layers) + 24,
        "Gradient norm by step, one row per layer",
        "; ".join(f"{words.layer_name(layer.name)}: {_gradient_words(layer)}" for layer in layers),
        content,
    )


def _by_layer(run: Run, kinds: Iterable[str]) -> dict[str, list[Episode]]:
    found: dict[str, list[Episode]] = {}
    for item in run.episodes.all():
        if item.kind in kinds and item.layer is not None:
            found.setdefault(item.layer, []).append(item)
    return found


def _gradient_words(layer: Layer) -> str:
    low, high = _range(layer)
    if high <= 0:
        return "always zero" if layer.last_gradient == 0 else "no gradient recorded"
    return f"{words.number(low, 2)} to {words.number(high, 2)}"


def _range(layer: Layer) -> tuple[float, float]:
    """Lowest and highest positive norm."""
    band = layer.gradient
    positive = [value for series in (band.low, band.high) for value in series if value > 0]
    return (min(positive), max(positive)) if positive else (0.0, 0.0)


def _gradient_row(frame: Frame, layer: Layer, top: float, alarms: list[Episode]) -> list[str]:
    bottom = top + _ROW - 6
    content = [_row_label(layer, top, bottom)]
    content += [_shade(frame, item, top, bottom) for item in alarms]
    content.append(f'<path class="base" d="M{svg.px(LEFT)} {svg.px(bottom)}H{svg.px(RIGHT)}"/>')
    low, high = _range(layer)
    # At least one decade, so that a steady gradient looks steady.
    if high > 0:
        middle = math.sqrt(low * high) if math.sqrt(low) * math.sqrt(high) > 0 else low
        low, high = min(low, middle / 3.2), max(high, middle * 3.2)
        low = max(low, 5e-324)
    y = svg.Scale(low, high, bottom - 3, top + 3, log=True) if high > 0 else None
    band, columns = layer.gradient, frame.run.columns
    points: list[tuple[float, float] | None] = []
    ribbon = []
    for at in range(len(band)):
        x = frame.x((columns.first[at] + columns.last[at]) / 2)
        if band.low[at] == 0:
            content.append(f'<path class="zero" d="M{svg.px(x)} {svg.px(bottom)}v-6"/>')
        if band.bad[at]:
            content.append(svg.glyph("nonfinite", x, top + 6, "gradient not finite"))
        value = _typical(band.low[at], band.high[at], band.mean(at))
        if value is None or y is None:
            points.append(None)
            continue
        points.append((x, y(value)))
        if columns.stride > 1 and band.high[at] > 0:
            lowest = y(band.low[at]) if band.low[at] > 0 else bottom
            ribbon.append(f"M{svg.px(x)} {svg.px(y(band.high[at]))}V{svg.px(lowest)}")
    if ribbon:
        content.append(f'<path class="ribbon" d="{"".join(ribbon)}"/>')
    content.append(f'<path class="line thin" d="{svg.polyline(points)}"/>')
    if high > 0:
        seen_low, seen_high = _range(layer)
        content.append(svg.text(RIGHT + 8, top + 11, words.number(seen_high, 2), kind="tick"))
        content.append(svg.text(RIGHT + 8, bottom - 2, words.number(seen_low, 2), kind="tick"))
    return content


def _typical(low: float, high: float, mean: float) -> float | None:
    if math.isnan(mean) or high <= 0:
        return None
    return mean if mean > 0 else low if low > 0 else high


def _row_label(layer: Layer, top: float, bottom: float) -> str:
    middle = (top + bottom) / 2
    kind = svg.text(LEFT - 10, middle + 11, layer.kind or "", kind="sub", anchor="end")
    lift = 0 if layer.kind else 4
    name = svg.text(LEFT - 10, middle - 2 + lift, label(layer), kind="name", anchor="end")
    return f"<g><title>{svg.esc(words.layer_name(layer.name))}</title>{name}{kind}</g>"


def _shade(frame: Frame, item: Episode, top: float, bottom: float) -> str:
    left, width = frame.span(item.start, item.end)
    until = f"to {words.count(item.end)}" if item.end is not None else "to the end"
    tip = f"{words.episode(item)}, step {words.count(item.start)} {until}"
    return (
        f'<rect class="alarm-area" x="{svg.px(left)}" y="{svg.px(top)}" width="{svg.px(width)}" '
        f'height="{svg.px(bottom - top)}"><title>{svg.esc(tip)}</title></rect>'
    )


# -------------------------------------------------------------------- heat maps


def gradient_map(run: Run, frame: Frame, layers: list[Layer]) -> str:
    """All layers as a heat map of the norm's logarithm, with a legend."""
    logs = sorted(
        math.log10(value)
        for layer in layers
        for series in (layer.gradient.low, layer.gradient.high)
        for value in series
        if value > 0
    )
    # The outermost hundredth does not set the scale: it would leave one colour for the rest.
    low = logs[len(logs) // 100] if logs else 0.0
    high = logs[-1 - len(logs) // 100] if logs else 1.0
    low, high = (low, high) if high - low > 0.5 else (low - 0.25, low + 0.5)  # noqa: PLR2004

    def level(layer: Layer, start: int, stop: int) -> int | str:
        band = layer.gradient
        if any(band.bad[start:stop]):
            return BAD
        lows = [value for value in band.low[start:stop] if not math.isnan(value)]
        if not lows:
            return NOTHING
        if min(lows) == 0:
            return ZERO
        means = [band.mean(at) for at in range(start, stop) if band.count[at]]
        mean = sum(means) / len(means)
        share = (math.log10(mean) - low) / (high - low) if mean > 0 else 0.0
        return min(max(int(share * LEVELS), 0), LEVELS - 1)

    content, bottom = _map(frame, layers, level, _gradient_words)
    alarms = _by_layer(run, _ALARMS)
    height = _row_height(len(layers))
    for at, layer in enumerate(layers):
        for item in alarms.get(layer.name, []):
            left, width = frame.span(item.start, item.end)
            content.append(
                f'<rect class="alarm-box" x="{svg.px(left)}" y="{svg.px(6 + at * height)}" '
                f'width="{svg.px(width)}" height="{svg.px(height)}"/>'
            )
    legend = [(BAD, "not finite"), (ZERO, "exactly zero")]
    content += _legend(bottom + 34, (f"1e{low:.1f}", f"1e{high:.1f}"), legend, boxed="alarm")
    return svg.chart(
        WIDTH,
        bottom + 56,
        f"Gradient norm of {len(layers)} layers by step, as a heat map",
        f"Norms from {words.number(10**low, 2)} (palest) to {words.number(10**high, 2)}.",
        content,
    )


def stuck_map(frame: Frame, layers: list[Layer]) -> str:
    """Share of stuck channels of many layers as a heat map, with a legend."""

    def level(layer: Layer, start: int, stop: int) -> int | str:
        peak = _peak(layer, start, stop)
        if not peak:
            return NOTHING
        share = peak / max(layer.channels or layer.peak_stuck, 1)
        return min(int(share * LEVELS), LEVELS - 1)

    content, bottom = _map(frame, layers, level, _stuck_words)
    content += _legend(bottom + 34, ("few", "all channels"), [], boxed=None)
    return svg.chart(
        WIDTH,
        bottom + 56,
        f"Share of stuck channels of {len(layers)} layers by step, as a heat map",
        "; ".join(
            f"{words.layer_name(layer.name)}: {_stuck_words(layer)}" for layer in layers[:40]
        ),
        content,
    )


def _peak(layer: Layer, start: int, stop: int) -> int:
    peaks = layer.stuck
    if peaks is None:
        return 0
    return max(
        (stuck_count([series[at] for series in peaks.kinds]) for at in range(start, stop)),
        default=0,
    )


def _row_height(many: int) -> float:
    return min(max(560 / max(many, 1), 2.0), 16.0)


def _map(
    frame: Frame,
    layers: list[Layer],
    level: Callable[[Layer, int, int], int | str],
    tell: Callable[[Layer], str],
) -> tuple[list[str], float]:
    """The cells, the names beside them and the axis below; and where the cells end."""
    height = _row_height(len(layers))
    bottom = 6 + height * len(layers)
    content = list(frame.axis(6, bottom))
    paths: dict[int | str, list[str]] = {}
    bins = frame.bins(len(layers))
    for row, layer in enumerate(layers):
        open_level: int | str = NOTHING
        open_left = open_right = 0.0
        for start, stop, left, right in bins:
            here = level(layer, start, stop)
            if here == open_level:
                open_right = right
                continue
            _cell(paths, open_level, row, open_left, open_right)
            open_level, open_left, open_right = here, left, right
        _cell(paths, open_level, row, open_left, open_right)
    content.append(f'<g transform="translate(0 6) scale(1 {height:.3f})" class="map">')
    content += [
        f'<path class="h{key}" d="{"".join(parts)}"/>'
        for key, parts in sorted(paths.items(), key=lambda item: str(item[0]))
    ]
    content.append("</g>")
    every = max(1, math.ceil(11 / height))
    for row, layer in enumerate(layers):
        tip = f"{words.layer_name(layer.name)}: {tell(layer)}"
        top = 6 + row * height
        content.append(
            f'<rect class="hover" x="{svg.px(LEFT)}" y="{top:.2f}" '
            f'width="{svg.px(RIGHT - LEFT)}" height="{height:.2f}">'
            f"<title>{svg.esc(tip)}</title></rect>"
        )
        if row % every == 0:
            content.append(
                svg.text(
                    LEFT - 10, top + height / 2 + 3.5, label(layer), kind="name small", anchor="end"
                )
            )
    return content, bottom


def _cell(
    paths: dict[int | str, list[str]], level: int | str, row: int, left: float, right: float
) -> None:
    if level != NOTHING:
        width = svg.px(right - left)
        paths.setdefault(level, []).append(f"M{svg.px(left)} {row}h{width}v1h-{width}z")


def _legend(
    y: float, ends: tuple[str, str], extra: list[tuple[str, str]], *, boxed: str | None
) -> list[str]:
    x = LEFT
    content = [svg.text(x, y + 10, ends[0], kind="tick")]
    x += 12 + 6.2 * len(ends[0])
    for level in range(LEVELS):
        content.append(
            f'<rect class="h{level}" x="{svg.px(x)}" y="{svg.px(y)}" width="14" height="12"/>'
        )
        x += 14
    content.append(svg.text(x + 6, y + 10, ends[1], kind="tick"))
    x += 30 + 6.2 * len(ends[1])
    for shade, name in extra:
        content.append(
            f'<rect class="h{shade}" x="{svg.px(x)}" y="{svg.px(y)}" width="14" height="12"/>'
            + svg.text(x + 20, y + 10, name, kind="tick")
        )
        x += 44 + 6.2 * len(name)
    if boxed:
        content.append(
            f'<rect class="alarm-box" x="{svg.px(x)}" y="{svg.px(y)}" width="14" height="12"/>'
            + svg.text(x + 20, y + 10, boxed, kind="tick")
        )
    return content


# -------------------------------------------------------------- stuck channels


def _stuck_words(layer: Layer) -> str:
    of = f" of {words.count(layer.channels)}" if layer.channels else ""
    told = f"at most {words.count(layer.peak_stuck)}{of} stuck"
    if layer.peak_silent:
        told += f", {words.count(layer.peak_silent)} silent"
    return told


def stuck_rows(frame: Frame, layers: list[Layer]) -> str:
    """The channels of each layer that are stuck or silent, stacked, one row per layer."""
    content = list(frame.axis(6, 6 + _ROW * len(layers)))
    for at, layer in enumerate(layers):
        content += _stuck_row(frame, layer, 6 + _ROW * at)
    bottom = 6 + _ROW * len(layers)
    x = LEFT
    for _, kind, name in STACK:
        content.append(
            f'<rect class="k-{kind}" x="{svg.px(x)}" y="{svg.px(bottom + 32)}" width="14" '
            f'height="12"/>' + svg.text(x + 20, bottom + 42, name, kind="tick")
        )
        x += 50 + 6.4 * len(name)
    return svg.chart(
        WIDTH,
        bottom + 54,
        "Stuck and silent channels by step, one row per layer",
        "; ".join(f"{words.layer_name(layer.name)}: {_stuck_words(layer)}" for layer in layers),
        content,
    )


def _stuck_row(frame: Frame, layer: Layer, top: float) -> list[str]:
    bottom = top + _ROW - 8
    content = [_row_label(layer, top, bottom)]
    peaks = layer.stuck
    if peaks is None:
        return content
    columns = range(len(frame.run.columns))
    highest = max((sum(series[at] for series in peaks.kinds) for at in columns), default=0)
    full = max(layer.channels or highest, highest, 1)
    if highest < full / 4:
        # A few of very many would be a line too thin to see.
        full = 2 * max(highest, 1)
    paths: dict[str, list[str]] = {kind: [] for _, kind, _ in STACK}
    for counts, left, right in _bars(frame, peaks):
        base = bottom
        for index, kind, _ in STACK:
            share = counts[index] / full * (bottom - top)
            if share > 0:
                base -= share
                width = svg.px(right - left)
                paths[kind].append(
                    f"M{svg.px(left)} {svg.px(base)}h{width}v{svg.px(share)}h-{width}z"
                )
    content += [
        f'<path class="k k-{kind}" d="{"".join(parts)}"/>' for kind, parts in paths.items() if parts
    ]
    content.append(f'<path class="base" d="M{svg.px(LEFT)} {svg.px(bottom)}H{svg.px(RIGHT)}"/>')
    tip = f"{words.layer_name(layer.name)}: {_stuck_words(layer)}"
    content.append(
        f'<rect class="hover" x="{svg.px(LEFT)}" y="{svg.px(top)}" '
        f'width="{svg.px(RIGHT - LEFT)}" height="{svg.px(bottom - top)}">'
        f"<title>{svg.esc(tip)}</title></rect>"
    )
    content.append(svg.text(RIGHT + 8, top + 16, words.count(highest), kind="tick"))
    if layer.channels:
        of = f"of {words.count(layer.channels)}"
        content.append(svg.text(RIGHT + 8, top + 29, of, kind="tick"))
    return content


def _bars(frame: Frame, peaks: Peaks) -> list[tuple[list[int], float, float]]:
    """Counts, left and right of each bar; neighbours alike are one, so that no seam shows."""
    bars: list[tuple[list[int], float, float]] = []
    for start, stop, left, right in frame.bins(1):
        # The fullest check of the bin, whole: kinds of different checks do not add up.
        at = max(range(start, stop), key=lambda index: sum(s[index] for s in peaks.kinds))
        counts = [series[at] for series in peaks.kinds]
        alike = bool(bars) and bars[-1][0] == counts
        bars.append((counts, bars.pop()[1] if alike else left, right))
    return bars
