"""The one-page summary for those who do not train models themselves."""

from __future__ import annotations

from cirron_otel.training_record.report import conclusions, page, svg, words
from cirron_otel.training_record.report.engineers import found, head
from cirron_otel.training_record.report.model import Run

_MOST = 6

GLOSSARY = (
    ("step", "one round of learning: the model sees some data and is changed a little"),
    ("loss", "how wrong the model was on that data; it should fall"),
    ("gradient", "how each part of the model is to change; without one it does not learn"),
    ("channel", "one of the many detectors inside a layer of the model"),
    ("stuck channel", "a channel that has stopped to learn; proven dead: it can never learn again"),
    ("signature", "a seal that only the holder of a secret key can make"),
)

_STYLE = (
    "main{max-width:780px}section{padding:12px 18px;margin:10px 0}h2{font-size:15.5px}"
    "p,li{max-width:none}@media print{body{font-size:10.5px}section{margin:2px 0;padding:2px 0}"
    ".state{margin-top:8px;padding:6px 12px}footer{margin-top:6px}}"
)


def sections(
    run: Run, *, gpu_hour_cost: float | None = None, gpus: int = 1
) -> list[tuple[str, list[str], list[str]]]:
    """The summary as ``(heading, sentences, list entries)``; every form of it has the same."""
    trust = conclusions.trust(run)
    return [
        ("What was trained", _trained(run), []),
        ("Did it stay healthy?", *_healthy(run)),
        ("What was done about it", _done(run), []),
        *_cost(run, gpu_hour_cost, gpus),
        ("Can this record be relied on?", [trust.title, trust.meaning], _reasons(trust)),
        ("What this does not tell", _limits(run), []),
    ]


def summary(run: Run, *, gpu_hour_cost: float | None = None, gpus: int = 1) -> str:
    """The summary as one HTML document that fits a printed page. Pure, never blocks."""
    body = [head(run)]
    listed = sections(run, gpu_hour_cost=gpu_hour_cost, gpus=gpus)
    for title, sentences, entries in listed:
        told = "".join(f"<p>{svg.esc(sentence)}</p>" for sentence in sentences)
        body.append(page.section(title, told + (page.items(entries) if entries else "")))
    body.append(page.section("Words", page.facts(list(GLOSSARY))))
    digest = run.verdict.get("head")
    body.append(
        f"<footer>Made from the training record {svg.esc(run.path.resolve().name)}"
        + (f", whose last entry is <code>{svg.esc(digest)}</code>" if digest else "")
        + ".</footer>"
    )
    return page.page(f"{words.clean(run.name)}: summary", "".join(body), style=_STYLE)


def _trained(run: Run) -> list[str]:
    if not run.start:
        return ["The record does not say: its first entry is missing."]
    start = run.start
    size = words.count(start.get("parameters"))
    what = (
        f"A model of the kind {words.scalar(start.get('model'))} with {size} adjustable numbers "
        f"(parameters), called “{words.clean(run.name)}”, with the optimizer "
        f"{words.optimizer(run)}."
    )
    when = (
        f"It started on {words.moment(run.first_time)}, ran for {words.duration(run.seconds)} and "
        f"made {words.plural(run.steps or 0, 'step')}, of which "
        f"{words.count(conclusions.total_checks(run))} were checked."
    )
    sentences = [what, when]
    loss = run.loss
    if loss.first is not None and loss.final is not None:
        way = "fell" if loss.final < loss.first else "rose"
        sentences.append(
            f"Its loss {way} from {words.number(loss.first, 3)} to {words.number(loss.final, 3)}; "
            f"the best was {words.number(loss.best, 3)}."
        )
    elif loss.ended_nonfinite:
        sentences.append("At its end the loss was no longer a number at all.")
    return sentences


def _healthy(run: Run) -> tuple[list[str], list[str]]:
    status = conclusions.status(run)
    told = [f"{status.title}. {status.sentence}"]
    if conclusions.trust(run).answer == "no":
        told.append("For what it is worth, this is what the record says:")
    entries = found(run)
    if len(entries) > _MOST:
        entries = [*entries[:_MOST], f"and {len(entries) - _MOST} more, see the full report"]
    entries += [words.finding(item) for item in run.findings[:3] if item.severity != "info"]
    return told, entries


def _done(run: Run) -> list[str]:
    repaired = sum(layer.channels_repaired for layer in run.layers.values())
    if repaired:
        where = words.plural(sum(1 for item in run.layers.values() if item.repairs), "layer")
        told = (
            f"{words.plural(repaired, 'channel')} in {where} were given new starting values by the "
            "monitor while the training ran. This changes the model, and each time is on record."
        )
        return [told]
    config = run.start.get("config")
    mode = config.get("repair") if isinstance(config, dict) else None
    if mode is None:
        return ["Nothing: the record has no repair."]
    if not mode:
        return ["Nothing: the monitor was set to watch only."]
    if any(layer.peak_stuck > layer.inherited for layer in run.layers.values()):
        return ["Nothing: the monitor was set to repair, and found no channel that it could."]
    return ["Nothing needed repair."]


def _cost(run: Run, price: float | None, gpus: int) -> list[tuple[str, list[str], list[str]]]:
    if not run.steps_stuck:
        return []
    share = f", {run.steps_stuck / run.steps:.0%} of the run" if run.steps else ""
    told = (
        f"Part of the model had stopped learning for {words.plural(run.steps_stuck, 'step')}{share}"
    )
    if run.seconds_stuck is not None:
        told += f" ({words.duration(run.seconds_stuck)})"
    cost = conclusions.cost(run, price, gpus)
    if cost is None:
        return [("What it cost", [told + "."], [])]
    money = (
        f"At {price} per GPU and hour on {words.plural(gpus, 'GPU')} that time cost "
        f"{_money(cost.total)}. This is an estimate: the rest of the model went on learning."
    )
    return [("What it cost", [told + ".", money], [])]


def _money(amount: float) -> str:
    return f"about {amount:,.2f}" if amount >= 0.01 else "less than 0.01"  # noqa: PLR2004


def _reasons(trust: conclusions.Trust) -> list[str]:
    return trust.reasons if trust.answer != "partly" else []


def _limits(run: Run) -> list[str]:
    every = run.manifest.get("check_every")
    between = "; what happened in between is not recorded"
    if every == 1:
        looked, between = "at every step", ""
    else:
        looked = f"every {words.count(every)} steps" if isinstance(every, int) else "now and then"
    told = (
        f"The training was looked at {looked}{between}. The record shows whether the model could "
        "learn, not whether it learnt the right thing: how good it is has to be measured with "
        "other data."
    )
    watched, total = conclusions.monitored(run)
    if watched is not None and total is not None and watched < total:
        told += f" Only {words.count(watched)} of {words.count(total)} layers were watched."
    return [told, *(f"On reading it: {note}." for note in run.notes[:3])]
