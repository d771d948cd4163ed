"""What was found in diary, rows and seal, put into checks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cirron_otel.training_record.chain import GENESIS, METRICS
from cirron_otel.training_record.checking.diary import Diary
from cirron_otel.training_record.checking.findings import (
    ABSENT,
    FAIL,
    NOTE,
    PASS,
    SKIPPED,
    Check,
    Findings,
    shown,
    shown_hash,
)
from cirron_otel.training_record.checking.replay import Replay
from cirron_otel.training_record.checking.seal_check import Seal
from cirron_otel.training_record.events import RECORD_VERSION

#: Records of this writer had no ``record_version`` yet.
_BEFORE_VERSIONS = "ormas-monitor 0.1"


# --- the format's own checks ----------------------------------------------------------------------


def format_checks(
    diary: Diary,
    findings: Findings,
    directory: Path | None,
    metrics_digest: str | None,
    why_no_metrics: str | None,
) -> list[Check]:
    """The first seven of the nine checks, in the order of the format."""
    return [
        _parse(diary, findings),
        _genesis(diary),
        _chain(diary),
        _seq(diary),
        _bookends(diary),
        _schema(diary, findings),
        _metrics(diary, directory, metrics_digest, why_no_metrics),
    ]


def _parse(diary: Diary, findings: Findings) -> Check:
    label = "JSON lines"
    if "parse" not in findings:
        return Check("parse", label, PASS, f"{diary.count} events parsed")
    text = findings.first("parse")
    more = findings.count("parse") - 1
    if more:
        text += f"; and {more} more lines"
    elif diary.half_line is not None:
        text += (
            ": its writer died in the middle of it, and what stands before it is whole. "
            "`cirron-otel record recover` ends the record"
        )
    return Check("parse", label, FAIL, text)


def _genesis(diary: Diary) -> Check:
    label = "genesis link"
    if diary.count == 0:
        return Check("genesis", label, FAIL, "there are no events")
    if diary.bad_genesis is not None:
        text = f"the first event's prev is {diary.bad_genesis}, not {len(GENESIS)} zeros"
        return Check("genesis", label, FAIL, text)
    return Check("genesis", label, PASS, "the first event links to the genesis hash")


def _chain(diary: Diary) -> Check:
    label = "hash chain"
    if diary.chain_break is not None:
        return Check("chain", label, FAIL, diary.chain_break)
    if diary.bad_line is not None:
        text = f"not checkable past line {diary.bad_line}"
        if diary.half_line is not None:
            text += f", which is half-written; all {diary.count} hashes before it link"
        return Check("chain", label, FAIL, text)
    return Check("chain", label, PASS, f"all {diary.count} hashes recompute and link")


def _seq(diary: Diary) -> Check:
    label = "sequence numbers"
    if diary.seq_break is not None:
        return Check("seq", label, FAIL, diary.seq_break)
    return Check("seq", label, PASS, f"seq runs from 0 to {diary.count - 1}")


def _bookends(diary: Diary) -> Check:
    label = "run_start / run_end"
    wrong = []
    if diary.first.get("event") != "run_start":
        wrong.append(f"the first event is {shown(diary.first.get('event'))}, not run_start")
    if diary.starts > 1:
        wrong.append(f"there are {diary.starts} run_start events")
    if diary.ends > 1:
        wrong.append(f"there are {diary.ends} run_end events")
    if diary.ends and not diary.finished:
        wrong.append(f"{shown(diary.last.get('event'))} comes after run_end")
    if not diary.ends:
        if diary.half_line is not None:
            wrong.append("no run_end: the writer died while it wrote a line")
        else:
            wrong.append(
                "no run_end: the record is incomplete or was cut; a crash and a cut end look the "
                "same here, a seal or anchors tell them apart"
            )
    if wrong:
        return Check("bookends", label, FAIL, "; ".join(wrong))
    return Check("bookends", label, PASS, "run_start is first and run_end last: the run finished")


def _schema(diary: Diary, findings: Findings) -> Check:
    label = "event schema"
    if diary.first.get("event") != "run_start" or "record_version" not in diary.first:
        text = "the first event is no run_start with a record_version: no schema to check against"
        return Check("schema", label, SKIPPED, text)
    if "schema" in findings:
        return Check("schema", label, FAIL, findings.text("schema"))
    text = f"all {diary.count} events match record schema {RECORD_VERSION}"
    return Check("schema", label, PASS, text)


def _metrics(
    diary: Diary, directory: Path | None, digest: str | None, why_not: str | None
) -> Check:
    label = "metrics hash"
    if directory is None:
        return Check("metrics", label, ABSENT, f"only a diary was given: no {METRICS} to compare")
    if not diary.finished:
        text = "no run_end, so no recorded metrics hash to compare"
        return Check("metrics", label, SKIPPED, text)
    wanted = diary.last.get("metrics_sha256")
    if not isinstance(wanted, str) or not wanted:
        return Check("metrics", label, FAIL, "run_end has no metrics_sha256")
    if digest is None:
        return Check("metrics", label, FAIL, f"{METRICS} {why_not}")
    if digest != wanted:
        text = (
            f"{METRICS} was changed: its SHA-256 is {shown_hash(digest)}, run_end says "
            f"{shown_hash(wanted)}"
        )
        return Check("metrics", label, FAIL, text)
    return Check("metrics", label, PASS, f"SHA-256 {shown_hash(digest)} as run_end says")


# --- ours -----------------------------------------------------------------------------------------


def own_checks(
    diary: Diary, findings: Findings, replay: Replay | None, seal: Seal
) -> Iterator[Check]:
    """The checks the format's first verifier does not make, those about other records left out."""
    yield _plain("duplicates", "repeated keys", findings, "no key stands twice in one object", FAIL)
    yield _plain(
        "spelling", "spelling", findings, "every line is written as JSON writers write it", NOTE
    )
    yield _plain(
        "portable", "strict JSON", findings, "nothing that only some JSON readers take", NOTE
    )
    yield _version(diary)
    yield _plain("unknown", "event types", findings, "all event types are known", NOTE)
    yield _plain("steps", "step order", findings, "steps never go back", FAIL)
    yield _plain("times", "clock", findings, "the clock was never set back by over a second", NOTE)
    yield _totals(diary, replay)
    yield _rows(diary, findings, replay)
    yield _digests(diary, findings, replay)
    yield _replay(diary, findings, replay)
    yield _seal_details(seal)
    yield _ending(diary)


def _plain(name: str, label: str, findings: Findings, good: str, status: str) -> Check:
    if name in findings:
        return Check(name, label, status, findings.text(name))
    return Check(name, label, PASS, good)


def _version(diary: Diary) -> Check:
    name, label = "record_version", "record version"
    if "record_version" in diary.first:
        return Check(name, label, PASS, "run_start says by which rules to read the record")
    if str(diary.first.get("tool", "")).startswith(_BEFORE_VERSIONS):
        text = "the record's writer is older than record versions; its fields were not checked"
        return Check(name, label, NOTE, text)
    text = "run_start has no record_version, which turns the check of all fields off"
    return Check(name, label, FAIL, text)


def _totals(diary: Diary, replay: Replay | None) -> Check:
    name, label = "totals", "counts in run_end"
    if not diary.finished:
        return Check(name, label, SKIPPED, "there is no run_end")
    wrong = _wrong_counts(diary, replay) + _wrong_steps(diary, replay)
    first, last = diary.first.get("run_id"), diary.last.get("run_id")
    if last is not None and first != last:
        wrong.append(f"run_id is {shown(last)} in run_end and {shown(first)} in run_start")
    if wrong:
        return Check(name, label, FAIL, "; ".join(wrong))
    return Check(name, label, PASS, "steps, checks and counts fit the events and rows")


def _wrong_counts(diary: Diary, replay: Replay | None) -> list[str]:
    counts = diary.last.get("counts")
    if not isinstance(counts, Mapping):
        return ["run_end.counts is no object"]
    kinds = diary.kinds
    found: dict[str, int] = {
        "alarms": kinds["alarm"],
        "stuck_layers": diary.stuck_layers,
        "repairs": kinds["repair"],
        "channels_repaired": diary.channels_repaired,
        "loss_spikes": kinds["loss_spike"],
        "nonfinite": kinds["nonfinite_loss"] + kinds["nonfinite_gradient"],
        "skipped_steps": kinds["skipped_step"],
    }
    if replay is not None and not replay.rows.broken:
        found["checks_without_gradients"] = replay.rows.without_gradients
    wrong = []
    for name, number in found.items():
        said = counts.get(name, number)
        # A count may be of all events, or of those alone that the basic rules call for.
        least = number - sum(diary.by_rule[kind] for kind in _RULED.get(name, ()))
        slack = diary.lost_events
        if type(said) is not int or not least <= said <= number + slack:
            wrong.append(f"counts.{name} is {shown(said)}, there are {number}")
    return wrong


_RULED = {
    "alarms": ("alarm",),
    "stuck_layers": ("channels",),
    "loss_spikes": ("loss_spike",),
    "nonfinite": ("nonfinite_loss", "nonfinite_gradient"),
    "skipped_steps": ("skipped_step",),
}


def _wrong_steps(diary: Diary, replay: Replay | None) -> list[str]:
    steps, checks = diary.last.get("steps"), diary.last.get("checks")
    if type(steps) is not int or type(checks) is not int:
        return ["run_end.steps or checks is no whole number"]
    wrong = []
    if replay is not None and not replay.rows.broken:
        rows = replay.rows
        if not rows.count <= checks <= rows.count + _lost_rows(diary, replay):
            wrong.append(f"run_end.checks is {checks}, there are {rows.count} rows")
        if rows.last_step >= steps:
            wrong.append(f"run_end.steps is {steps}, the last row is of step {rows.last_step}")
    if diary.last_step >= steps:
        wrong.append(f"run_end.steps is {steps}, the last event is of step {diary.last_step}")
    return wrong


def _lost_rows(diary: Diary, replay: Replay) -> int:
    lost = diary.last.get("lost_rows")
    return max(replay.rows.lost, lost if type(lost) is int else 0)


def _rows(  # noqa: PLR0911 - one line for each outcome
    diary: Diary, findings: Findings, replay: Replay | None
) -> Check:
    name, label = "rows", "metrics rows"
    if replay is None:
        return Check(name, label, ABSENT, f"there is no {METRICS} to look at")
    if "rows" in findings:
        return Check(name, label, FAIL, findings.text("rows"))
    if replay.rowless > replay.rows.lost:
        return Check(name, label, FAIL, findings.text("no row"))
    if "behind rows" in findings:
        text = f"behind the last row: {findings.text('behind rows')}"
        # A check writes its row after its events: an end in between leaves them without one, and
        # rows may not have reached the disk. A run that came to its end has them all.
        known = _lost_rows(diary, replay) or diary.rows_missing or _interruption(diary.last)
        return Check(name, label, NOTE if known or not diary.finished else FAIL, text)
    if replay.rowless:
        text = f"{findings.text('no row')}: the writer says that it lost as many rows"
        return Check(name, label, NOTE, text)
    if "rows half" in findings:
        text = f"{findings.text('rows half')}: its writer died in the middle of it"
        return Check(name, label, FAIL if diary.finished else NOTE, text)
    text = f"{replay.rows.count} rows, in order, one for every step that an event names"
    return Check(name, label, PASS, text)


def _digests(diary: Diary, findings: Findings, replay: Replay | None) -> Check:
    name, label = "digests", "running metrics digest"
    if replay is None:
        return Check(name, label, ABSENT, f"there is no {METRICS} to look at")
    if "digests" in findings:
        text = f"{METRICS} is not what it was at {findings.text('digests')}"
        return Check(name, label, FAIL, text)
    if diary.rows_missing:
        text = f"the diary vouches for {diary.rows_missing} rows that {METRICS} does not have"
        said = diary.last.get("rows_missing")
        if diary.finished and type(said) is int and said >= diary.rows_missing:
            return Check(name, label, NOTE, f"{text}, as whoever recovered the record says")
        return Check(name, label, FAIL, text)
    if "metrics_digest" not in diary.first:
        return Check(name, label, ABSENT, "the lines carry no digest of the metrics")
    return Check(name, label, PASS, f"{METRICS} is what it was at every line")


def _replay(  # noqa: PLR0911 - one line for each outcome
    diary: Diary, findings: Findings, replay: Replay | None
) -> Check:
    name, label = "replay", "recomputed events"
    if replay is None:
        return Check(name, label, ABSENT, f"there is no {METRICS} to recompute from")
    if replay.why_not is not None:
        return Check(name, label, SKIPPED, f"nothing was recomputed: {replay.why_not}")
    if "replay" in findings:
        return Check(name, label, FAIL, findings.text("replay"))
    missing = findings.count("replay missing")
    if missing > diary.lost_events:
        return Check(name, label, FAIL, findings.text("replay missing"))
    if missing:
        text = f"{findings.text('replay missing')}: the writer says that it lost as many"
        return Check(name, label, NOTE, text)
    if "replay near" in findings:
        text = f"inconclusive: {findings.text('replay near')}"
        return Check(name, label, NOTE, text)
    how = "to the last bit" if replay.bit_for_bit else "within 1e-9, on another platform"
    text = f"{replay.compared} events follow from {replay.rows.count} rows, {how}"
    return Check(name, label, PASS, text)


def _seal_details(seal: Seal) -> Check:
    name, label = "seal_details", "what the seal says of itself"
    if seal.signer is None:
        return Check(name, label, ABSENT, "there is no seal to read")
    if seal.details:
        return Check(name, label, FAIL, "; ".join(seal.details))
    return Check(name, label, PASS, "version, time and algorithm are in order")


def _ending(diary: Diary) -> Check:
    name, label = "ending", "how the record ends"
    if diary.finished:
        said = _interruption(diary.last)
        if said is not None:
            return Check(name, label, NOTE, said)
        if diary.unended:
            return Check(name, label, NOTE, "the last line has no line end")
        return Check(name, label, PASS, "the run came to its end")
    if diary.half_line is not None:
        size = len(diary.half_line)
        text = f"a crash: after event {diary.count - 1} there are {size} bytes of a line"
        return Check(name, label, NOTE, text)
    if diary.ends:
        return Check(name, label, NOTE, "something was written after the end")
    return Check(name, label, NOTE, "the run did not come to its end, or its end was cut off")


def _interruption(run_end: Mapping[str, Any]) -> str | None:
    if run_end.get("interrupted") is not True and "error" not in run_end:
        return None
    said = [f"run_end says: ended by {shown(run_end.get('ended_by', 'an error'))}"]
    said += [f"{key} {shown(run_end[key])}" for key in ("signal", "error") if key in run_end]
    if run_end.get("recovered") is True:
        said.append("and put there after the writer's death")
    return ", ".join(said)
