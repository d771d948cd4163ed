"""The check as one HTML page: no script, nothing fetched, in the form of the record's reports."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cirron_otel.checkpoints.checking import Result
from cirron_otel.checkpoints.rules import SEVERITIES
from cirron_otel.reading.values import clean, counted, size
from cirron_otel.training_record.report import page as pages
from cirron_otel.training_record.report.svg import esc

if TYPE_CHECKING:
    from cirron_otel.checkpoints.comparing import Difference

_SHOWN = 25
_MOST_ROWS = 2000
_STATES = {"critical": "bad", "warning": "note"}


def page(found: Result) -> str:
    """The page. Pure, never blocks."""
    one = found.checkpoint
    counts = found.counts()
    worst = next((name for name in SEVERITIES if counts[name]), "none")
    told = ", ".join(f"{counts[name]:,} {name}" for name in SEVERITIES if counts[name])
    head = (
        f"<h1>{_text(one.path.name)}</h1>"
        f'<p class="sub-title">A check of the weights in {_text(str(one.path))}</p>'
        f'<div class="state {_STATES.get(worst, "good")}"><strong>{_text(found.verdict())}</strong>'
        f"<span>{_text(told or 'No findings.')}</span></div>"
    )
    body = [head, _facts(found), _findings(found)]
    if found.diff is not None:
        body.append(_changes(found.diff, str(found.against)))
    if found.layers:
        body.append(_layers(found))
    return pages.page(f"{clean(one.path.name)}: check", "".join(body))


def _text(value: str) -> str:
    return esc(clean(value))


def _facts(found: Result) -> str:
    one = found.checkpoint
    pairs = [
        ("Format", f"{one.format}, {counted(len(one.files), 'file')}, {size(found.bytes)}"),
        ("Tensors", f"{len(one.tensors):,}"),
        ("Parameters", f"{found.parameters:,}"),
        ("Types", ", ".join(f"{n} ({count:,})" for n, count in found.dtypes.most_common(8))),
        ("BatchNorms", f"{len(found.layers):,}"),
        ("Other norms", f"{found.norms:,}"),
    ]
    if one.model_type:
        pairs.append(("Kind of model", one.model_type))
    if one.wrapper:
        pairs.append(("Weights under", one.wrapper))
    pairs += [("Note", note) for note in one.notes[:20]]
    return pages.section("The checkpoint", pages.facts([(k, clean(v)) for k, v in pairs]))


def _findings(found: Result) -> str:
    if not found.findings:
        return pages.section("Findings", "<p>None.</p>")
    rows = [
        [
            pages.tag(each.severity),
            f"<code>{_text(each.kind)}</code>",
            f"<code>{_text(each.layer or '')}</code>",
            _text(each.message),
        ]
        for each in found.findings[:_MOST_ROWS]
    ]
    heads = [("Severity", "w"), ("Kind", "w"), ("Where", ""), ("What", "")]
    say = _rest(len(found.findings), "findings")
    return pages.section("Findings", pages.folded(heads, rows, _SHOWN, "all findings"), say)


def _rest(count: int, what: str) -> str:
    return "" if count <= _MOST_ROWS else f"The first {_MOST_ROWS:,} of {count:,} {what}."


def _changes(diff: Difference, against: str) -> str:
    pairs = [
        ("Changed", len(diff.changed)), ("Unchanged", len(diff.unchanged)),
        ("Added", len(diff.added)), ("Removed", len(diff.removed)),
        ("Of another shape", len(diff.reshaped)), ("Of another type", len(diff.dtype_changed)),
    ]  # fmt: skip
    tiles = "".join(f"<div><dt>{name}</dt><dd>{count:,}</dd></div>" for name, count in pairs)
    rows = [
        [
            f"<code>{_text(one.tensor)}</code>",
            "" if one.change is None else f"{one.change:.4%}",
            "" if one.abs_change is None else f"{one.abs_change:.4g}",
        ]
        for one in diff.changed[:_SHOWN]
    ]
    heads = [("Tensor", ""), ("Change, share of the norm before", "n"), ("Length", "n")]
    table = pages.table(heads, rows) if rows else ""
    title = f"Against {clean(against)}"
    return pages.section(title, f'<dl class="tiles">{tiles}</dl>{table}')


def _layers(found: Result) -> str:
    heads = [
        ("BatchNorm", ""), ("Fed by (by its name)", ""), ("Channels", "n"), ("Dead", "n"),
        ("Decayed", "n"), ("Constant", "n"), ("Dormant", "n"), ("ReLU", ""),
    ]  # fmt: skip
    rows = []
    for one in found.layers[:_MOST_ROWS]:
        norm = one.batchnorm
        numbers = (len(one.dead), len(one.decayed), len(one.flat), len(one.dormant))
        relu = ("stated" if norm.wiring == "stated" else "supposed") if norm.feeds_relu else "no"
        rows.append([
            f"<code>{_text(norm.name)}</code>",
            f"<code>{_text(norm.producer or '')}</code>",
            f"{norm.channels:,}",
            *(f"{number:,}" if number else "" for number in numbers),
            relu,
        ])  # fmt: skip
    say = "A file of weights does not tell how layers are connected: what feeds what is guessed "
    say += "from names, and that a ReLU follows is supposed unless it was stated. "
    say += _rest(len(found.layers), "layers")
    return pages.section("BatchNorms", pages.folded(heads, rows, _SHOWN, "all BatchNorms"), say)
