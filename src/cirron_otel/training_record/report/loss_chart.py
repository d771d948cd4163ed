"""The loss over the run, with the events above it in lanes."""

from __future__ import annotations

import math

from cirron_otel.training_record.report import svg, words
from cirron_otel.training_record.report.frame import LEFT, RIGHT, WIDTH, Frame
from cirron_otel.training_record.report.model import Run

LANE_NAMES = {
    "nonfinite": "not finite",
    "spike": "loss spike",
    "alarm": "gradient alarm",
    "channels": "stuck channels",
    "certificate": "proven dead",
    "repair": "repair",
    "cleared": "cleared",
}
_LANE = 18.0
_PLOT = 220.0
_TIP_EVENTS = 6
#: More lines down to the curve would hide it.
_MOST_DROPS = 40


def loss_chart(run: Run, frame: Frame) -> str:
    """The chart as SVG; empty where there is neither a loss nor an event to show."""
    lanes = {kind: run.marks[kind].all() for kind in LANE_NAMES if kind in run.marks}
    band = run.loss.band
    values = [
        value
        for at in range(len(band))
        for value in (band.low[at], band.high[at])
        if not math.isnan(value)
    ]
    if not values and not lanes:
        return ""
    top = 8.0 + _LANE * len(lanes)
    bottom = top + (_PLOT if values else 8.0)
    content = list(frame.axis(top, bottom))
    content += _nonfinite(run, frame, top, bottom)
    if values:
        y = _scale(values, top + 8, bottom)
        content += _grid(y)
        content += _curve(frame, y)
    for at, (kind, places) in enumerate(lanes.items()):
        content += _lane(frame, kind, places, 8.0 + _LANE * (at + 0.5), bottom)
    loss = run.loss
    many = sum(place[0] for places in lanes.values() for place in places)
    description = (
        f"Loss from {words.number(loss.first)} to {words.number(loss.final)}, "
        f"best {words.number(loss.best)}; {words.plural(many, 'event')}."
        if values
        else "Events by step; the record has no finite loss."
    )
    return svg.chart(WIDTH, bottom + 26, "Loss and events by step", description, content)


def _lane(
    frame: Frame, kind: str, places: list[tuple[int, int, str]], y: float, bottom: float
) -> list[str]:
    """One kind of events: its name, its line, and a glyph for each step (or each few pixels)."""
    content = [
        svg.text(LEFT - 10, y + 4, LANE_NAMES[kind], kind="lane", anchor="end"),
        f'<path class="lane-line" d="M{svg.px(LEFT)} {svg.px(y)}H{svg.px(RIGHT)}"/>',
    ]
    groups: list[tuple[float, list[tuple[int, int, str]]]] = []
    for place in places:
        at = frame.x(place[1])
        if groups and at - groups[-1][0] < 7:  # noqa: PLR2004 - they would cover each other
            groups[-1][1].append(place)
        else:
            groups.append((at, [place]))
    if kind != "cleared" and len(groups) <= _MOST_DROPS:
        content += [
            f'<path class="drop" d="M{svg.px(at)} {svg.px(y)}V{svg.px(bottom)}"/>'
            for at, _ in groups
        ]
    content += [svg.glyph(kind, at, y, _tip(group)) for at, group in groups]
    return content


def _tip(places: list[tuple[int, int, str]]) -> str:
    lines = [f"step {words.count(step)}: {what}" for _, step, what in places[:_TIP_EVENTS]]
    more = sum(many for many, _, _ in places) - len(lines)
    return " · ".join(lines) + (f" · and {words.count(more)} more" if more else "")


def _scale(values: list[float], top: float, bottom: float) -> svg.Scale:
    low, high = min(values), max(values)
    if low > 0 and high / low > 50:  # noqa: PLR2004 - a straight axis would flatten the end
        return svg.Scale(low / 1.15, high * 1.15, bottom, top, log=True)
    room = (high - low) * 0.06 or abs(high) * 0.1 or 1.0
    low, high = low - room if low < 0 or low > room else 0.0, high + room
    if not math.isfinite(high - low):
        return svg.Scale(-1e308, 1e308, bottom, top)
    return svg.Scale(low, high, bottom, top)


def _grid(y: svg.Scale) -> list[str]:
    content = []
    for tick in y.ticks(5):
        at = y(tick)
        content.append(
            f'<path class="grid" d="M{svg.px(LEFT)} {svg.px(at)}H{svg.px(RIGHT)}"/>'
            + svg.text(LEFT - 10, at + 4, words.number(tick, 3), kind="tick", anchor="end")
        )
    name = "loss (log scale)" if y.log else "loss"
    content.append(svg.text(LEFT + 8, y.end + 1, name, kind="axis"))
    return content


def _curve(frame: Frame, y: svg.Scale) -> list[str]:
    run = frame.run
    band, columns = run.loss.band, run.columns
    points: list[tuple[float, float] | None] = []
    upper: list[tuple[float, float]] = []
    lower: list[tuple[float, float]] = []
    areas: list[str] = []

    def close() -> None:
        if len(upper) > 1:
            outline = upper + lower[::-1]
            areas.append("M" + "L".join(f"{svg.px(a)} {svg.px(b)}" for a, b in outline) + "Z")
        upper.clear()
        lower.clear()

    for at in range(len(columns)):
        mean = band.mean(at)
        x = frame.x((columns.first[at] + columns.last[at]) / 2)
        if math.isnan(mean):
            # A gap only where the loss was no number; where none was given there is none to show.
            if band.bad[at]:
                points.append(None)
                close()
            continue
        points.append((x, y(mean)))
        upper.append((x, y(band.high[at])))
        lower.append((x, y(band.low[at])))
    close()
    content = [f'<path class="band" d="{"".join(areas)}"/>'] if columns.stride > 1 else []
    content.append(f'<path class="line" d="{svg.polyline(points)}"/>')
    best = run.loss.best
    if best is not None and run.loss.best_step is not None:
        at_x, at_y = frame.x(run.loss.best_step), y(best)
        tip = f"best loss {words.number(best)} at step {words.count(run.loss.best_step)}"
        content.append(
            f'<circle class="best" cx="{svg.px(at_x)}" cy="{svg.px(at_y)}" r="4">'
            f"<title>{svg.esc(tip)}</title></circle>"
        )
    return content


def _nonfinite(run: Run, frame: Frame, top: float, bottom: float) -> list[str]:
    content = []
    for item in run.episodes.all():
        if item.kind != "nonfinite":
            continue
        left, width = frame.span(item.start, item.end)
        tip = f"the loss was no finite number from step {words.count(item.start)}"
        content.append(
            f'<rect class="bad-area" x="{svg.px(left)}" y="{svg.px(top)}" width="{svg.px(width)}" '
            f'height="{svg.px(bottom - top)}"><title>{svg.esc(tip)}</title></rect>'
        )
        if width > 90:  # noqa: PLR2004 - the words fit
            content.append(
                svg.text(
                    left + width / 2,
                    (top + bottom) / 2,
                    "not finite",
                    kind="bad-text",
                    anchor="middle",
                )
            )
    return content
