"""The facts of a report as text pairs, rows and plain data: what every form of it says alike."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict

from cirron_otel.training_record.report import conclusions, words
from cirron_otel.training_record.report.model import Episode, Event, Layer, Run

#: Keys of ``run_start`` that have a place of their own; the others are shown as they come.
_SHOWN = frozenset(
    {
        *("seq", "time", "event", "prev", "hash", "name", "tool", "model", "parameters", "layers"),
        *("architecture_sha256", "optimizer", "python", "torch", "platform", "record_version"),
        "config",
    }
)
MAX_EVENTS = 400


def tiles(run: Run) -> list[tuple[str, str, str]]:
    """Name, value and a small remark: the run at a glance."""
    loss = run.loss
    alarms = run.counts["alarm"]
    stuck = sum(layer.peak_stuck for layer in run.layers.values())
    proven = sum(layer.certified for layer in run.layers.values())
    repaired = sum(layer.channels_repaired for layer in run.layers.values())
    found = [
        ("steps", words.count(run.steps), words.plural(conclusions.total_checks(run), "check")),
        ("length", words.duration(run.seconds), "wall clock"),
        (
            "final loss",
            "not finite" if loss.ended_nonfinite else words.number(loss.final),
            f"mean of the last {len(loss.recent)}" if loss.final is not None else "",
        ),
        (
            "best loss",
            words.number(loss.best),
            f"at step {words.count(loss.best_step)}" if loss.best_step is not None else "",
        ),
        ("gradient alarms", words.count(alarms), _open_alarms(run)),
        ("channels stuck at most", words.count(stuck), f"{words.count(proven)} proven dead"),
        ("channels repaired", words.count(repaired), words.plural(run.counts["repair"], "repair")),
    ]
    if run.counts["skipped_step"]:
        found.append(("skipped steps", words.count(run.counts["skipped_step"]), "at checks"))
    return found


def _open_alarms(run: Run) -> str:
    left = sum(1 for layer in run.layers.values() if layer.open_alarm is not None)
    return f"{words.count(left)} open at the end" if run.counts["alarm"] else "none"


def identity(run: Run) -> list[tuple[str, str]]:
    """What was trained, with what, where and when."""
    start = run.start
    watched, total = conclusions.monitored(run)
    size = words.count(start.get("parameters"))
    of = f" of {words.count(total)}" if total is not None else ""
    python, torch = words.scalar(start.get("python")), words.scalar(start.get("torch"))
    pairs = [
        ("model", f"{words.scalar(start.get('model'))}, {size} parameters"),
        ("layers watched", words.count(watched) + of),
        ("optimizer", words.optimizer(run)),
        ("started", words.moment(run.first_time)),
        ("last event", words.moment(run.last_time)),
        ("platform", words.scalar(start.get("platform"))),
        ("Python, torch", f"{python}, {torch}"),
        ("written by", words.scalar(start.get("tool"))),
        ("record version", words.scalar(start.get("record_version"))),
        ("architecture SHA-256", words.scalar(start.get("architecture_sha256"))),
    ]
    return pairs if start else [("run_start", "the record has none")]


def extras(run: Run) -> list[tuple[str, str]]:
    """What else ``run_start`` says: ids, code, data and seed, where its writer gave them."""
    flat: dict[str, object] = {}
    for name, value in [*run.start.items()][:200]:
        if name not in _SHOWN:
            flat.update(words.flatten(value, name))
    return [(words.clean(name, 60), words.scalar(value)) for name, value in [*flat.items()][:60]]


def config(run: Run) -> list[tuple[str, str]]:
    """The monitor's settings."""
    flat = words.flatten(run.start.get("config") or {})
    return [
        (words.clean(name, 60), words.scalar(value)) for name, value in [*flat.items()][:80] if name
    ]


def manifest(run: Run) -> list[tuple[str, str]]:
    """How the run was watched: precision, distribution, repair."""
    pairs = []
    for part in ("precision", "distributed", "repair"):
        value = run.manifest.get(part)
        if isinstance(value, dict):
            pairs.append((part, words.scalar(value)))
    return pairs


def notes(run: Run) -> list[str]:
    """What the watching monitor had to say about its own limits."""
    listed = run.manifest.get("notes")
    return (
        [words.clean(item, 500) for item in listed[:20] if isinstance(item, str)]
        if isinstance(listed, list)
        else []
    )


def events(run: Run) -> tuple[list[Event], int]:
    """Events for the table, in order, at most :data:`MAX_EVENTS`; and how many are left out."""
    listed = sorted(
        run.events.all() + run.minor_events.all(),
        key=lambda event: (event.seq is None, event.seq or 0),
    )
    grouped = list(_group(listed))
    half = MAX_EVENTS // 2
    if len(grouped) > MAX_EVENTS:
        grouped = grouped[:half] + grouped[-half:]
    shown = sum(event.count for event in grouped)
    return grouped, max(sum(run.counts.values()) - shown, 0)


def _group(listed: list[Event]) -> Iterator[Event]:
    """Several alarms of one check with one diagnosis become one row."""
    at = 0
    while at < len(listed):
        event = listed[at]
        stop = at + 1
        while stop < len(listed) and _alike(event, listed[stop]):
            stop += 1
        if stop - at < 3:  # noqa: PLR2004 - two rows are as quick to read as one that sums up
            yield from listed[at:stop]
        else:
            many = listed[at:stop]
            names = [words.layer_name(item.layer) for item in many[:4]]
            more = f" and {len(many) - 4} more" if len(many) > 4 else ""  # noqa: PLR2004
            yield Event(
                event.seq,
                event.time,
                event.step,
                event.name,
                event.severity,
                layer=f"{len(many)} layers: {', '.join(names)}{more}",
                fields={"diagnosis": event.fields.get("diagnosis"), "grouped": True},
                count=len(many),
                last_step=event.step,
            )
        at = stop


def _alike(one: Event, other: Event) -> bool:
    return (
        one.name in {"alarm", "alarm_cleared"}
        and one.name == other.name
        and one.step == other.step
        and one.fields.get("diagnosis") == other.fields.get("diagnosis")
    )


def event_text(event: Event) -> str:
    """What an event says; a group of alarms by its diagnosis alone."""
    if event.fields.get("grouped"):
        what = words.DIAGNOSES.get(str(event.fields.get("diagnosis")), "alarm")
        return what if event.name == "alarm" else f"back in range after {what}"
    return words.describe(event)


def layer_state(layer: Layer) -> tuple[str, str]:  # noqa: PLR0911 - a state each
    """How a layer ended: severity and words."""
    if layer.nonfinite_gradients:
        return "critical", f"not finite at {words.plural(layer.nonfinite_gradients, 'check')}"
    left = (layer.stuck_at_end or 0) - layer.inherited
    if layer.open_alarm is not None:
        return "warning", words.DIAGNOSES.get(layer.open_alarm, words.clean(layer.open_alarm, 40))
    if left > 0:
        return "warning", f"{words.plural(left, 'channel')} stuck"
    if layer.repairs:
        return "action", f"{words.plural(layer.channels_repaired, 'channel')} repaired"
    if layer.inherited:
        return "info", f"{words.plural(layer.inherited, 'channel')} stuck from the start"
    if layer.alarms or layer.peak_stuck:
        return "info", "went away"
    return "pass", "nothing found"


def median_gradient(layer: Layer) -> float | None:
    """The median of the means per column: exact for runs of up to 800 checks."""
    band = layer.gradient
    means = sorted(band.mean(at) for at in range(len(band)) if band.count[at])
    return means[len(means) // 2] if means else None


def lead_times(run: Run) -> list[str]:
    """For each loss spike, the warning that came before it."""
    told = []
    for spike in run.spikes.all():
        what = f"loss spike at step {words.count(spike.step)} ({words.number(spike.value)})"
        if spike.sign is not None and spike.sign_step is not None:
            ahead = spike.step - spike.sign_step
            told.append(
                f"{what}: {words.clean(spike.sign)} came {words.plural(ahead, 'step')} before it"
            )
        else:
            told.append(f"{what}: nothing was found before it")
    return told


def to_dict(run: Run, *, gpu_hour_cost: float | None = None, gpus: int = 1) -> dict[str, object]:
    """A report as plain data that JSON can hold; numbers that are not finite are None.

    The layout may gain keys. Series are thinned as in the charts: ``columns.stride`` checks each.
    """
    status, trust = conclusions.status(run), conclusions.trust(run)
    cost = conclusions.cost(run, gpu_hour_cost, gpus)
    watched, total = conclusions.monitored(run)
    loss, columns = run.loss, run.columns
    listed, left_out = events(run)
    return {
        "name": words.clean(run.name),
        "path": str(run.path),
        "status": asdict(status),
        "trust": asdict(trust),
        "finished": run.finished,
        "interrupted": run.interrupted,
        "error": run.error,
        "started": run.first_time,
        "ended": run.last_time,
        "seconds": run.seconds,
        "steps": run.steps,
        "checks": conclusions.total_checks(run),
        "coverage": {"state": conclusions.coverage(run), "monitored": watched, "total": total},
        "loss": {
            "first": loss.first,
            "final": loss.final,
            "last": loss.last,
            "best": loss.best,
            "best_step": loss.best_step,
            "nonfinite_checks": loss.nonfinite,
            "ended_nonfinite": loss.ended_nonfinite,
            "first_nonfinite": loss.first_nonfinite,
        },
        "series": {
            "stride": columns.stride,
            "step": list(columns.first),
            "loss_low": _finite(loss.band.low),
            "loss_high": _finite(loss.band.high),
        },
        "counts": dict(run.counts),
        "steps_stuck": run.steps_stuck,
        "seconds_stuck": run.seconds_stuck,
        "cost": None if cost is None else {**asdict(cost), "total": cost.total, "estimate": True},
        "layers": [_layer(layer) for layer in run.layers.values()],
        "episodes": [asdict(item) for item in run.episodes.all()],
        "spikes": [asdict(item) for item in run.spikes.all()],
        "findings": [asdict(item) for item in run.findings],
        "events": [
            {
                "seq": event.seq, "time": event.time, "step": event.step, "event": event.name,
                "severity": event.severity, "layer": event.layer, "count": event.count,
                "text": event_text(event),
            }
            for event in listed
        ],
        "events_left_out": left_out,
        "identity": dict(identity(run)),
        "more": dict(extras(run)),
        "config": dict(config(run)),
        "verification": run.verdict,
        "notes": run.notes,
    }  # fmt: skip


def _layer(layer: Layer) -> dict[str, object]:
    return {
        "layer": layer.name,
        "kind": layer.kind,
        "batchnorm": layer.batchnorm,
        "state": layer_state(layer)[1],
        "gradient_last": layer.last_gradient,
        "gradient_median": median_gradient(layer),
        "gradient_nonfinite_checks": layer.nonfinite_gradients,
        "alarms": layer.alarms,
        "open_alarm": layer.open_alarm,
        "diagnoses": layer.diagnoses,
        "channels": layer.channels,
        "channels_scanned": layer.scanned,
        "stuck_inherited": layer.inherited,
        "stuck_peak": layer.peak_stuck,
        "stuck_at_end": layer.stuck_at_end,
        "proven_peak": layer.peak_proven,
        "proven_at_end": layer.proven_at_end,
        "silent_peak": layer.peak_silent,
        "silent_at_end": layer.silent_at_end,
        "certified": layer.certified,
        "certificates_refused": layer.refused,
        "repairs": layer.repairs,
        "channels_repaired": layer.channels_repaired,
    }


def _finite(values: object) -> list[float | None]:
    return [value if math.isfinite(value) else None for value in values]  # type: ignore[attr-defined]


def episode_end(item: Episode) -> str:
    """How and when an episode ended, in words."""
    if item.end is None:
        return "not over at the end of the record"
    return f"{item.outcome} at step {words.count(item.end)}"
