"""What a run's facts amount to: how it went, and how far its record can be believed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from cirron_otel.training_record.report import words
from cirron_otel.training_record.report.model import Run

Level = Literal["good", "note", "bad", "unknown"]


@dataclass(frozen=True, slots=True)
class Status:
    """How the training went, in a few words and a sentence."""

    key: str
    level: Level
    title: str
    sentence: str


@dataclass(frozen=True, slots=True)
class Trust:
    """Whether the record can be believed, why, and what that means."""

    answer: Literal["yes", "partly", "no"]
    level: Level
    title: str
    reasons: list[str]
    meaning: str


@dataclass(frozen=True, slots=True)
class Check:
    """One check of the verification."""

    name: str
    label: str
    status: str
    message: str


@dataclass(frozen=True, slots=True)
class Cost:
    """What the time with stuck channels cost, by the price that was given. An estimate."""

    hours: float
    gpus: int
    price: float

    @property
    def total(self) -> float:
        """Price times hours times GPUs."""
        return self.hours * self.gpus * self.price


def checks(run: Run) -> list[Check]:
    """The verification's checks, in its order; its messages made safe to show."""
    listed = run.verdict.get("checks")
    found = []
    for item in listed if isinstance(listed, list) else ():
        if isinstance(item, dict):
            name, label, status, message = (
                words.clean(str(item.get(key) or ""), 600)
                for key in ("name", "label", "status", "message")
            )
            found.append(Check(name, label or name, status, message))
    return found


_CHANGED = (
    "It was changed after it was written, or damaged. Nothing in this report should be relied on "
    "until the difference is explained."
)
_SIGNATURE_ONLY = (
    "Its parts fit together, but the signature is missing or was not made with the key that was "
    "given. Until that is explained, anybody may have written it."
)


def trust(run: Run) -> Trust:
    """How far the record can be believed."""
    listed = checks(run)
    by_name = {check.name: check for check in listed}
    failed = [check for check in listed if check.status == "fail"]
    unfinished = run.end is None
    if failed and not (unfinished and _crash_only(run, failed)):
        return Trust(
            "no",
            "bad",
            "No: the record does not verify.",
            [f"{check.label}: {check.message}" for check in failed[:5]],
            _SIGNATURE_ONLY if {check.name for check in failed} == {"signature"} else _CHANGED,
        )
    if unfinished:
        return Trust(
            "partly",
            "note",
            "Partly: the record has no end.",
            [check.message for check in failed[:3]]
            or ["What is there links up, but no end of the run is recorded."],
            "The run crashed, is still going on, or its last lines were removed; by itself the "
            "record cannot tell these apart. What is there up to its last line links up.",
        )
    if _is(by_name, "signature", "pass"):
        return Trust(
            "yes",
            "good",
            "Yes: it is signed, and the signature matches the key that was given.",
            [by_name["signature"].message],
            "Nobody without the private key can have changed it since it was signed. A signature "
            "does not show that the program that wrote the record was itself honest.",
        )
    if _is(by_name, "signature", "unchecked"):
        return Trust(
            "partly",
            "note",
            "Partly: it is signed, but the signature was not checked.",
            [by_name["signature"].message],
            "Get the signer's public key from somewhere other than this record, and make the "
            "report again with it.",
        )
    if _is(by_name, "seal", "pass"):
        return Trust(
            "partly",
            "note",
            "Partly: it is sealed, but not signed.",
            [by_name["seal"].message],
            "The files are as they were when they were sealed, unless somebody rewrote all of "
            "them and the seal with them.",
        )
    return Trust(
        "partly",
        "note",
        "Partly: it is whole, but neither sealed nor signed.",
        ["Every line links to the one before it, and all of them verify."],
        "A change in the middle would show. Whoever holds the files could still have rewritten "
        "all of them.",
    )


def _is(by_name: dict[str, Check], name: str, status: str) -> bool:
    return name in by_name and by_name[name].status == status


def _crash_only(run: Run, failed: list[Check]) -> bool:
    """Whether what failed is what a crash leaves: no end, and perhaps half a last line."""
    expected = {"bookends"}
    if run.verdict.get("half_written") is True or (
        run.diary_reading.torn and run.diary_reading.bad == 1
    ):
        expected |= {"parse", "chain"}
    return {check.name for check in failed} <= expected


def monitored(run: Run) -> tuple[int | None, int | None]:
    """How many modules were watched, of how many with parameters of their own."""
    layers = run.manifest.get("layers")
    if not isinstance(layers, dict):
        return _int(run.start.get("layers")), None
    return _int(layers.get("monitored")), _int(layers.get("total"))


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def total_checks(run: Run) -> int:
    """Checks that were made: rows of the metrics, else what ``run_end`` says."""
    said = _int(run.end.get("checks")) if run.end else None
    return run.checks or max(said or 0, 0)


def coverage(run: Run) -> Literal["unknown", "blind", "partial", "full"]:
    """How much of the model was looked at."""
    if total_checks(run) == 0:
        return "unknown"
    seen = any(layer.last_gradient is not None for layer in run.layers.values())
    bad = any(layer.nonfinite_gradients for layer in run.layers.values())
    if run.checks and not seen and not bad:
        return "blind"
    watched, total = monitored(run)
    if run.manifest.get("channel_checks") is False or (
        watched is not None and total is not None and watched < total
    ):
        return "partial"
    return "full"


def status(run: Run) -> Status:
    """How the training went: the gravest that is true."""
    if trust(run).answer == "no":
        return Status(
            "altered",
            "bad",
            "The record does not verify",
            "What it says of the training cannot be relied on; below, which checks failed and why.",
        )
    return _broke(run) or _unseen(run) or _problems(run) or _coverage(run)


def _broke(run: Run) -> Status | None:
    if run.critical_events or run.loss.nonfinite:
        first = run.loss.first_nonfinite
        where = f", first at step {words.count(first)}" if first is not None else ""
        return Status(
            "broken",
            "bad",
            "The training broke",
            f"The loss or gradients were no longer finite numbers{where}.",
        )
    if run.error is not None:
        return Status(
            "failed",
            "bad",
            "The training stopped with an error",
            f"It ended with {words.clean(run.error, 160)}.",
        )
    return None


def _problems(run: Run) -> Status | None:
    layers = run.layers.values()
    left = [layer for layer in layers if layer.open_alarm is not None]
    stuck = [layer for layer in layers if (layer.stuck_at_end or 0) > layer.inherited]
    repaired = sum(layer.channels_repaired for layer in layers)
    stuck_at_end = [layer for layer in stuck if _open_stuck(run, layer.name)]
    if left or stuck_at_end:
        parts = []
        if stuck_at_end:
            count = sum((layer.stuck_at_end or 0) - layer.inherited for layer in stuck_at_end)
            where = words.plural(len(stuck_at_end), "layer")
            parts.append(f"{words.plural(count, 'channel')} in {where} had stopped learning")
        if left:
            parts.append(f"{words.plural(len(left), 'layer')} had a gradient out of its range")
        return Status(
            "unrepaired",
            "bad",
            "A problem was found and not mended",
            f"When the record ends, {' and '.join(parts)}.",
        )
    spikes = run.spikes.all()
    if spikes and spikes[-1].recovered is None:
        return Status(
            "unsettled",
            "note",
            "The loss rose and did not come back",
            f"A loss spike began at step {words.count(spikes[-1].step)} and was not over when the "
            "record ends.",
        )
    if repaired:
        where = words.plural(sum(1 for layer in layers if layer.repairs), "layer")
        return Status(
            "repaired",
            "note",
            "A problem was found and repaired",
            f"{words.plural(repaired, 'channel')} in {where} had stopped learning and were "
            "started afresh.",
        )
    if any(layer.alarms for layer in layers) or any(
        layer.peak_stuck > layer.inherited for layer in layers
    ):
        return Status(
            "cleared",
            "note",
            "A problem was found and went away",
            "Alarms or stuck channels were seen during the training, and none at its end.",
        )
    warnings = run.counts["loss_spike"] + run.counts["no_gradients"] + run.counts["sink_error"]
    warnings += sum(1 for finding in run.findings if finding.severity != "info")
    if warnings:
        return Status(
            "warnings",
            "note",
            "Warnings only",
            f"{words.plural(warnings, 'warning')} and no layer that stopped learning.",
        )
    return None


def _open_stuck(run: Run, name: str) -> bool:
    return any(
        item.kind == "stuck" and item.layer == name and item.outcome == "open"
        for item in run.episodes.all()
    )


def _unseen(run: Run) -> Status | None:
    seen = coverage(run)
    if seen == "unknown":
        return Status(
            "unknown",
            "unknown",
            "Nothing was checked",
            "The record has no check of the training, so it says nothing about its health.",
        )
    if seen == "blind":
        return Status(
            "blind",
            "unknown",
            "Not monitored",
            "No check ever saw a gradient, so nothing is known about the training's health.",
        )
    return None


def _coverage(run: Run) -> Status:
    if coverage(run) == "partial":
        watched, total = monitored(run)
        what = (
            f"Only {words.count(watched)} of {words.count(total)} layers were watched"
            if watched is not None and total is not None and watched < total
            else "Channels were not checked"
        )
        return Status(
            "partial", "note", "Healthy where it was watched", f"{what}; nothing was found."
        )
    return Status(
        "healthy",
        "good",
        "Healthy",
        f"{words.plural(total_checks(run), 'check')}, and nothing was found.",
    )


def cost(run: Run, price: float | None, gpus: int = 1) -> Cost | None:
    """What the stuck time cost; None without a price or without a known time."""
    if price is None or run.seconds_stuck is None:
        return None
    return Cost(run.seconds_stuck / 3600, gpus, price)
