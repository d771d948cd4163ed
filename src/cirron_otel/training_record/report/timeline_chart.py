"""Episodes as bars: what began at which step in which layer, and when it was over."""

from __future__ import annotations

from cirron_otel.training_record.report import svg, words
from cirron_otel.training_record.report.frame import LEFT, RIGHT, WIDTH, Frame, shorten
from cirron_otel.training_record.report.model import Episode, Run

_ROW = 22.0
#: More rows would be a wall, not a picture; the table below has the rest.
MAX_ROWS = 40


def timeline(run: Run, frame: Frame) -> str:
    """The chart as SVG; empty where there was no episode."""
    rows: dict[str | None, list[Episode]] = {}
    for item in run.episodes.all():
        rows.setdefault(item.layer, []).append(item)
    if not rows:
        return ""
    # What concerns the whole run first, then by when trouble began.
    order = sorted(rows, key=lambda layer: (layer is not None, rows[layer][0].start))
    shown = order[:MAX_ROWS]
    bottom = 6 + _ROW * len(shown)
    content = list(frame.axis(6, bottom))
    for at, layer in enumerate(shown):
        top = 6 + _ROW * at
        name = words.layer_name(layer)
        content.append(
            f"<g><title>{svg.esc(name)}</title>"
            + svg.text(LEFT - 10, top + 14, shorten(name), kind="name", anchor="end")
            + "</g>"
        )
        # An alarm often comes with stuck channels: each then has half of the row.
        halves = {"stuck"} < {item.kind for item in rows[layer]}
        for item in rows[layer]:
            lower = halves and item.kind == "stuck"
            content.append(_bar(frame, item, top + (11 if lower else 3), 7 if halves else 15))
    hidden = len(order) - len(shown)
    if hidden:
        content.append(
            svg.text(LEFT, bottom + 38, f"and {words.plural(hidden, 'further layer')}", kind="tick")
        )
    return svg.chart(
        WIDTH,
        bottom + (46 if hidden else 26),
        "Episodes by step",
        "; ".join(_sentence(item) for item in run.episodes.all()[:60]),
        content,
    )


def _bar(frame: Frame, item: Episode, top: float, height: float) -> str:
    left, width = frame.span(item.start, item.end)
    kind = "bad" if item.kind == "nonfinite" else item.kind
    shape = (
        f'<rect class="bar b-{svg.esc(kind)}" x="{svg.px(left)}" y="{svg.px(top)}" '
        f'width="{svg.px(width)}" height="{svg.px(height)}" rx="2"/>'
    )
    if item.end is None:
        middle, tip = top + height / 2, min(6.0, height * 0.6)
        x, half = svg.px(RIGHT), svg.px(tip)
        shape += (
            f'<path class="arrow" d="M{x} {svg.px(middle - tip)}v{svg.px(2 * tip)}'
            f'l{svg.px(1.5 * tip)}-{half}Z"/>'
        )
    name = words.DIAGNOSES.get(item.kind, item.kind)
    if width > 7 * len(name) + 10 and height > 10:  # noqa: PLR2004 - the words fit
        shape += svg.text(left + 6, top + 12, name, kind="on-bar")
    return f"<g><title>{svg.esc(_sentence(item))}</title>{shape}</g>"


def _sentence(item: Episode) -> str:
    until = (
        f"{item.outcome} at {words.count(item.end)}"
        if item.end is not None
        else "not over at the end"
    )
    return (
        f"{words.layer_name(item.layer)}: {words.episode(item)} from step "
        f"{words.count(item.start)}, {until}"
    )
