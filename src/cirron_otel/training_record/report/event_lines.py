"""One line of a diary as an event, small and whatever is wrong with it."""

from __future__ import annotations

import math

from cirron_otel.training_record.report.lines import number, strings, text, whole
from cirron_otel.training_record.report.model import Event

SEVERITIES = frozenset({"info", "warning", "critical", "proof", "action"})
#: Where an event is silent about its severity; the others are information.
_SEVERITY_OF = {"sink_error": "warning"}
_LIST = 16


def event_of(line: dict[str, object]) -> Event:
    """The event of a line; fields of a wrong type are None, long lists and texts cut."""
    name = text(line.get("event"), 40) or "?"
    severity = line.get("severity")
    if not isinstance(severity, str) or severity not in SEVERITIES:
        severity = _SEVERITY_OF.get(name, "info")
    return Event(
        seq=whole(line.get("seq")),
        time=finite(number(line.get("time"))),
        step=whole(line.get("step")),
        name=name,
        severity=severity,
        layer=text(line.get("layer")),
        fields=_clip(line),
    )


def finite(value: float | None) -> float | None:
    """The value, None if it is not finite."""
    return value if value is not None and math.isfinite(value) else None


def _clip(line: dict[str, object]) -> dict[str, object]:
    """A line's own fields, long lists and texts cut, so that many events stay small."""
    skipped = {"seq", "time", "event", "prev", "hash", "step", "severity", "layer"}
    clipped: dict[str, object] = {}
    for name, value in line.items():
        if name in skipped or len(clipped) >= 2 * _LIST:
            continue
        if isinstance(value, str):
            clipped[name] = text(value, 300)
        elif isinstance(value, list):
            clipped[name] = (
                strings(value, _LIST)
                if value and isinstance(value[0], str)
                else [item for item in value[:_LIST] if isinstance(item, (int, float))]
            )
            clipped[f"{name}_total"] = len(value)
        elif value is None or isinstance(value, (int, float)):
            clipped[name] = value
    return clipped
