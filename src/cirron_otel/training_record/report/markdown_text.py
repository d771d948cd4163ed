"""The same reports as Markdown, for pull requests, wikis and mail."""

from __future__ import annotations

import re

from cirron_otel.training_record.report import conclusions, facts, words
from cirron_otel.training_record.report.engineers import found
from cirron_otel.training_record.report.model import Run
from cirron_otel.training_record.report.one_page import sections

_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#|~!&])")
_MAX_EVENTS = 60
_MAX_LAYERS = 200


def esc(value: object) -> str:
    """Text that stands for itself in Markdown and in the HTML it becomes."""
    return _SPECIAL.sub(r"\\\1", words.clean(str(value), 2000))


def summary_markdown(run: Run, *, gpu_hour_cost: float | None = None, gpus: int = 1) -> str:
    """The one-page summary. Pure, never blocks."""
    lines = _head(run)
    for title, sentences, entries in sections(run, gpu_hour_cost=gpu_hour_cost, gpus=gpus):
        lines += [f"## {title}", ""]
        for sentence in sentences:
            lines += [esc(sentence), ""]
        lines += [f"- {esc(entry)}" for entry in entries] + ([""] if entries else [])
    return "\n".join(lines).rstrip() + "\n"


def markdown(run: Run) -> str:
    """The engineers' report without its charts. Pure, never blocks."""
    lines = _head(run)
    lines += ["## At a glance", "", "| | | |", "|---|---:|---|"]
    lines += [f"| {esc(a)} | {esc(b)} | {esc(c)} |" for a, b, c in facts.tiles(run)]
    lines += ["", "## What was found", ""]
    entries = [*found(run), *facts.lead_times(run), *map(words.finding, run.findings[:50])]
    lines += [f"- {esc(entry)}" for entry in entries] or ["No finding in this record."]
    lines += ["", "## Episodes", ""]
    lines += [
        f"- {esc(words.layer_name(item.layer))}: {esc(words.episode(item))} from step "
        f"{words.count(item.start)}, {esc(facts.episode_end(item))}"
        for item in run.episodes.all()[:_MAX_EVENTS]
    ] or ["None."]
    lines += _events(run)
    lines += _layers(run)
    trust = conclusions.trust(run)
    lines += ["", "## Can the record be believed?", "", f"{esc(trust.title)} {esc(trust.meaning)}"]
    lines += ["", "| result | check | what was seen |", "|---|---|---|"]
    lines += [
        f"| {esc(check.status)} | {esc(check.label)} | {esc(check.message)} |"
        for check in conclusions.checks(run)
    ]
    lines += ["", "## The run", "", "| | |", "|---|---|"]
    pairs = [*facts.identity(run), *facts.extras(run), *facts.config(run), *facts.manifest(run)]
    lines += [f"| {esc(name)} | {esc(value)} |" for name, value in pairs]
    remarks = [*facts.notes(run), *run.notes]
    if remarks:
        lines += ["", "## Notes", "", *(f"- {esc(remark)}" for remark in remarks)]
    return "\n".join(lines) + "\n"


def _head(run: Run) -> list[str]:
    status = conclusions.status(run)
    lines = [f"# {esc(run.name)}", "", f"**{esc(status.title)}.** {esc(status.sentence)}", ""]
    if run.end is None:
        lines += ["**The record has no end**: a crash, a run still going on, or cut lines.", ""]
    elif run.interrupted:
        lines += ["**The run was interrupted.**", ""]
    return lines


def _events(run: Run) -> list[str]:
    listed, left_out = facts.events(run)
    if len(listed) > _MAX_EVENTS:
        left_out += sum(event.count for event in listed[_MAX_EVENTS:])
        listed = listed[:_MAX_EVENTS]
    lines = [
        "",
        "## Events",
        "",
        "| seq | step | severity | event | layer | what |",
        "|---:|---:|---|---|---|---|",
    ]
    for event in listed:
        layer = words.layer_name(event.layer) if event.layer is not None else ""
        lines.append(
            f"| {words.count(event.seq)} | {words.count(event.step)} | {event.severity} | "
            f"{esc(words.title(event.name))} | {esc(layer)} | {esc(facts.event_text(event))} |"
        )
    return [*lines, "", f"{words.plural(left_out, 'event')} left out."] if left_out else lines


def _layers(run: Run) -> list[str]:
    if not run.layers:
        return []
    lines = [
        "",
        "## Layers",
        "",
        "| layer | kind | at the end | median norm | last norm | alarms | stuck at most |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for layer in [*run.layers.values()][:_MAX_LAYERS]:
        stuck = words.count(layer.peak_stuck) if layer.scanned else words.NOTHING
        lines.append(
            f"| {esc(words.layer_name(layer.name))} | {esc(layer.kind or '')} | "
            f"{esc(facts.layer_state(layer)[1])} | "
            f"{words.number(facts.median_gradient(layer), 3)} | "
            f"{words.number(layer.last_gradient, 3)} | {words.count(layer.alarms)} | {stuck} |"
        )
    left = len(run.layers) - _MAX_LAYERS
    return [*lines, "", f"{words.plural(left, 'further layer')} left out."] if left > 0 else lines
