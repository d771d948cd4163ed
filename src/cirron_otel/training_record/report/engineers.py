"""The engineers' report: everything the record shows of a run, on one page."""

from __future__ import annotations

from cirron_otel.training_record.report import conclusions, facts, page, svg, words
from cirron_otel.training_record.report.frame import Frame
from cirron_otel.training_record.report.layer_charts import (
    ROWS,
    gradient_map,
    gradient_rows,
    stuck_map,
    stuck_rows,
)
from cirron_otel.training_record.report.loss_chart import loss_chart
from cirron_otel.training_record.report.model import Layer, Run
from cirron_otel.training_record.report.timeline_chart import timeline

_MAX_LAYER_ROWS = 1000
_MAX_FOUND = 12
#: Rows of a long table that are open from the start.
_OPEN_ROWS = 40
_MARKS = {"good": "✓", "note": "!", "bad": "✕", "unknown": "?"}


def html(run: Run, *, gpu_hour_cost: float | None = None, gpus: int = 1) -> str:
    """The report as one HTML document that needs nothing else.

    With ``gpu_hour_cost`` (a price per GPU and hour) it says what the time with stuck channels cost
    on ``gpus`` GPUs, as an estimate. Pure: reads no file, never blocks.
    """
    frame = Frame(run)
    doubted = conclusions.trust(run).answer == "no"
    parts = [
        head(run),
        _tiles(run),
        # What cannot be believed has to say why before anything else.
        verification(run) if doubted else "",
        _found(run, gpu_hour_cost, gpus),
        page.section(
            "Loss",
            loss_chart(run, frame) or "<p>The record has no loss and no events by step.</p>",
            _loss_say(run),
            "loss",
        ),
        _gradients(run, frame),
        _stuck(run, frame),
        _timeline(run, frame),
        _events(run),
        _layers(run),
        "" if doubted else verification(run),
        _facts(run),
        _reading(),
    ]
    return page.page(f"{words.clean(run.name)}: training report", "".join(parts))


def head(run: Run) -> str:
    """Title, and how the run went; also when the record has no end or does not verify."""
    status = conclusions.status(run)
    when = f"{words.moment(run.first_time)}, {words.duration(run.seconds)}"
    model = words.scalar(run.start.get("model")) if run.start else "no run_start"
    banner = ""
    if run.end is None:
        banner = _state(
            "note",
            "The record has no end",
            "The run crashed, is still going on, or the last lines are gone. What follows is what "
            "was written up to then.",
        )
    elif run.interrupted:
        banner = _state("note", "The run was interrupted", "It did not come to its own end.")
    return (
        f"<header><h1>{svg.esc(words.clean(run.name))}</h1>"
        f'<p class="sub-title">{svg.esc(f"{model} · {when}")}</p></header>'
        + _state(status.level, status.title, status.sentence)
        + banner
    )


def _state(level: str, title: str, sentence: str) -> str:
    mark = _MARKS[level]
    return (
        f'<div class="state {level}"><strong><span aria-hidden="true" style="color:inherit">{mark}'
        f"</span> {svg.esc(title)}</strong><span>{svg.esc(sentence)}</span></div>"
    )


def _tiles(run: Run) -> str:
    trust = conclusions.trust(run)
    cells = [
        *facts.tiles(run),
        (
            "record",
            trust.title.split(":")[0].capitalize(),
            trust.title.partition(": ")[2].rstrip("."),
        ),
    ]
    return (
        '<dl class="tiles">'
        + "".join(
            f"<div><dt>{svg.esc(name)}</dt><dd>{svg.esc(value)}"
            f"<small>{svg.esc(remark)}</small></dd></div>"
            for name, value, remark in cells
        )
        + "</dl>"
    )


def _found(run: Run, price: float | None, gpus: int) -> str:
    """What was found, what the stuck time amounts to, and what warned of loss spikes."""
    entries = found(run)
    if run.steps_stuck:
        share = f" ({run.steps_stuck / run.steps:.0%} of the run)" if run.steps else ""
        time = f", {words.duration(run.seconds_stuck)}" if run.seconds_stuck is not None else ""
        entries.append(
            f"{words.plural(run.steps_stuck, 'step')}{share}{time} with stuck channels that were "
            "not there at the start"
        )
    cost = conclusions.cost(run, price, gpus)
    if cost is not None:
        entries.append(
            f"estimated cost of that time: {cost.total:,.2f} ({cost.hours:.2f} hours on "
            f"{words.plural(gpus, 'GPU')} at {price})"
        )
    entries += facts.lead_times(run)
    body = page.items(entries) if entries else "<p>No finding in this record.</p>"
    if run.findings:
        body += page.table(
            [("steps", "n"), ("severity", "w"), ("layer", ""), ("finding", ""), ("times", "n")],
            [
                [
                    words.count(item.first)
                    + (f" to {words.count(item.last)}" if item.last != item.first else ""),
                    page.tag(item.severity),
                    svg.esc(words.layer_name(item.layer)),
                    svg.esc(words.finding(item)),
                    words.count(item.count),
                ]
                for item in run.findings[:100]
            ],
        )
    return page.section("What was found", body, "", "found")


def found(run: Run) -> list[str]:
    """The findings by layer, gravest first, one sentence each; also for the other reports."""
    entries = []
    if run.loss.nonfinite:
        entries.append(
            f"the loss was no finite number at {words.plural(run.loss.nonfinite, 'check')}, first "
            f"at step {words.count(run.loss.first_nonfinite)}"
        )
    if run.error is not None:
        entries.append(f"the run ended with {words.clean(run.error, 300)}")
    alike: dict[str, list[Layer]] = {}
    for layer in run.layers.values():
        if layer.has_findings:
            alike.setdefault(_layer_sentence(layer), []).append(layer)
    groups = sorted(alike.items(), key=lambda item: -max(map(_gravity, item[1])))
    entries += [f"{_names(layers)}: {sentence}" for sentence, layers in groups[:_MAX_FOUND]]
    hidden = sum(len(layers) for _, layers in groups[_MAX_FOUND:])
    if hidden:
        entries.append(f"and {words.plural(hidden, 'further layer')}, see the table of layers")
    for name, what in (
        ("no_gradients", "a check found no gradient in any layer"),
        ("sink_error", "a receiver of the events failed and was switched off"),
    ):
        if run.counts[name]:
            entries.append(what)
    return entries


def _gravity(layer: Layer) -> int:
    """What to tell first."""
    if layer.nonfinite_gradients:
        return 4
    if layer.open_alarm is not None or (layer.stuck_at_end or 0) > layer.inherited:
        return 3
    return 2 if layer.peak_stuck or layer.repairs else 1 if layer.alarms else 0


def _names(layers: list[Layer]) -> str:
    """One layer with its kind, or several by name and number."""
    shown = [words.layer_name(layer.name) for layer in layers[:3]]
    # A bare number is no name to a reader.
    prefix = "" if not all(name.isdigit() for name in shown) else "layer "
    if len(layers) == 1:
        kind = f" ({words.clean(layers[0].kind, 40)})" if layers[0].kind else ""
        return f"{prefix}{shown[0]}{kind}"
    more = f" and {words.count(len(layers) - 3)} more" if len(layers) > 3 else ""  # noqa: PLR2004
    return f"{prefix.replace('layer', 'layers')}{', '.join(shown)}{more}"


def _layer_sentence(layer: Layer) -> str:
    parts = []
    if layer.nonfinite_gradients:
        parts.append(f"gradient not finite at {words.plural(layer.nonfinite_gradients, 'check')}")
    if layer.alarms:
        named = " and ".join(words.DIAGNOSES.get(item, item) for item in layer.diagnoses)
        state = "still so at the end" if layer.open_alarm is not None else "cleared"
        parts.append(f"{named} ({state})")
    of = f" of {words.count(layer.channels)}" if layer.channels else ""
    if layer.peak_stuck:
        proven = f", {words.count(layer.certified)} proven dead" if layer.certified else ""
        parts.append(f"{words.count(layer.peak_stuck)}{of} channels stuck{proven}")
    if layer.peak_silent:
        parts.append(f"{words.count(layer.peak_silent)}{of} channels silent")
    if layer.repairs:
        parts.append(f"{words.plural(layer.channels_repaired, 'channel')} repaired")
    return "; ".join(words.clean(part, 160) for part in parts)


def _loss_say(run: Run) -> str:
    told = "Above it, each event at its step. The ring marks the best loss."
    if run.columns.stride > 1:
        told += (
            f" The line is the mean of {run.columns.stride} checks, the band their lowest and "
            "highest."
        )
    return told


def _gradients(run: Run, frame: Frame) -> str:
    layers = [layer for layer in run.layers.values() if _has_gradient(layer)]
    if not layers:
        body = "<p>The record has no gradient norms.</p>"
        return page.section("Gradient norm per layer", body, "", "gradients")
    if len(layers) <= ROWS:
        say = (
            "A row per layer on a logarithmic scale of its own, which spans at least a decade. "
            "Shaded: an alarm. Marks at the bottom: exactly zero."
        )
        body = gradient_rows(run, frame, layers)
    else:
        say = (
            "A row per layer in the model's order, darker (or, on a dark page, lighter) is larger. "
            "Point at a row for its name."
        )
        body = gradient_map(run, frame, layers)
        troubled = [layer for layer in layers if layer.alarms or layer.nonfinite_gradients][:8]
        if troubled:
            body += "<h3>Layers with alarms</h3>" + gradient_rows(run, frame, troubled)
    return page.section("Gradient norm per layer", body, say, "gradients")


def _has_gradient(layer: Layer) -> bool:
    return layer.last_gradient is not None or layer.nonfinite_gradients > 0


def _stuck(run: Run, frame: Frame) -> str:
    scanned = [layer for layer in run.layers.values() if layer.scanned]
    shown = [layer for layer in scanned if layer.stuck is not None]
    quiet = len(scanned) - len(shown)
    if not scanned:
        body = "<p>The record has no counts of channels.</p>"
    elif not shown:
        where = "the one layer" if len(scanned) == 1 else f"any of the {len(scanned)} layers"
        seen = any(layer.peak_stuck or layer.peak_silent for layer in scanned)
        body = (
            "<p>The record has no metrics; the table of layers has what its events say.</p>"
            if seen
            else f"<p>No stuck or silent channel in {where} that were scanned.</p>"
        )
    else:
        body = stuck_rows(frame, shown) if len(shown) <= ROWS else stuck_map(frame, shown)
        if quiet:
            body += f'<p class="say">{words.plural(quiet, "further layer")} had none.</p>'
    say = (
        "Proven dead: can never learn again. Constant: the same output for every input. Decayed: "
        "weights all but zero. Silent: no output in several checks, may wake by itself. At the "
        "right the most there were."
    )
    return page.section("Stuck channels per layer", body, say if shown else "", "stuck")


def _timeline(run: Run, frame: Frame) -> str:
    drawn = timeline(run, frame)
    if not drawn:
        return ""
    say = "From the check that saw it to the check that no longer did; an arrow: not over."
    if run.episodes.omitted:
        say += f" {words.plural(run.episodes.omitted, 'episode')} in the middle are left out."
    return page.section("Episodes", drawn, say, "episodes")


def _events(run: Run) -> str:
    listed, left_out = facts.events(run)
    rows = [
        [
            words.count(event.seq),
            words.count(event.step),
            page.tag(event.severity),
            svg.esc(words.title(event.name)),
            svg.esc(words.layer_name(event.layer) if event.layer is not None else ""),
            svg.esc(facts.event_text(event)),
        ]
        for event in listed
    ]
    heads = [
        ("seq", "n"),
        ("step", "n"),
        ("severity", "w"),
        ("event", "w"),
        ("layer", ""),
        ("what", ""),
    ]
    say = f"{words.plural(left_out, 'event')} in the middle left out." if left_out else ""
    return page.section(
        "Events",
        page.folded(heads, rows, _OPEN_ROWS, f"{len(rows) - _OPEN_ROWS} further rows"),
        say,
        "events",
    )


def _layers(run: Run) -> str:
    if not run.layers:
        return ""
    rows = []
    listed = [*run.layers.values()]
    if len(listed) > 2 * _OPEN_ROWS:
        # In a long table, what has findings comes first; the order is the model's otherwise.
        listed.sort(key=lambda layer: -_gravity(layer) if layer.has_findings else 1)
    for layer in listed[:_MAX_LAYER_ROWS]:
        severity, state = facts.layer_state(layer)
        peak = words.count(layer.peak_stuck) if layer.scanned else words.NOTHING
        certificate = words.NOTHING
        if layer.certifiable is not None:
            certificate = "possible" if layer.certifiable else f"no: {layer.reason or 'unknown'}"
        rows.append(
            [
                f"<code>{svg.esc(words.layer_name(layer.name))}</code>",
                svg.esc(words.clean(layer.kind or "", 30)),
                page.tag(severity, state),
                words.number(facts.median_gradient(layer), 3),
                words.number(layer.last_gradient, 3),
                words.count(layer.alarms),
                peak + (f" of {words.count(layer.channels)}" if layer.channels else ""),
                svg.esc(certificate),
            ]
        )
    left = len(run.layers) - len(rows)
    heads = [
        ("layer", "l"), ("kind", "w"), ("at the end", "w"), ("median norm", "n"),
        ("last norm", "n"), ("alarms", "n"), ("stuck at most", "n"), ("certificate", ""),
    ]  # fmt: skip
    say = f"{words.plural(left, 'further layer')} left out." if left > 0 else ""
    return page.section(
        "Layers",
        page.folded(heads, rows, _OPEN_ROWS, f"{len(rows) - _OPEN_ROWS} further layers"),
        say,
        "layers",
    )


def verification(run: Run) -> str:
    """Whether the record can be believed, with each check."""
    trust = conclusions.trust(run)
    rows = [
        [page.tag(check.status), svg.esc(check.label), svg.esc(check.message)]
        for check in conclusions.checks(run)
    ]
    body = f"<p><strong>{svg.esc(trust.title)}</strong> {svg.esc(trust.meaning)}</p>"
    body += page.table([("result", "w"), ("check", "w"), ("what was seen", "")], rows)
    head = run.verdict.get("head")
    if isinstance(head, str):
        body += f'<p class="say">Head of the chain: <code>{svg.esc(head)}</code></p>'
    return page.section("Can the record be believed?", body, "", "verification")


def _facts(run: Run) -> str:
    body = page.facts(facts.identity(run))
    extra, manifest, config = facts.extras(run), facts.manifest(run), facts.config(run)
    columns = ""
    if config:
        columns += f"<div><h3>Settings of the monitor</h3>{page.facts(config)}</div>"
    if extra:
        columns += f"<div><h3>Identity and more</h3>{page.facts(extra)}</div>"
    if manifest:
        columns += f"<div><h3>How it was watched</h3>{page.facts(manifest)}</div>"
    body += f'<div class="two">{columns}</div>' if columns else ""
    remarks = facts.notes(run)
    if remarks:
        body += f"<h3>Notes of the monitor</h3>{page.items(remarks)}"
    if run.notes:
        body += f"<h3>Notes on reading this record</h3>{page.items(run.notes)}"
    return page.section("The run", body, "", "run")


def _reading() -> str:
    return (
        "<footer><p>Made from the record alone; nothing was fetched. An alarm opens when a layer's "
        "gradient norm leaves its usual range at consecutive checks, and clears when it is back. "
        "What happens between two checks is not in the record. Stuck counts leave out channels "
        "that were so at the first check. Wall-clock times are in proportion between events."
        "</p></footer>"
    )
