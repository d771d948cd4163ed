"""What can be done to a record: each crime by name, done to a copy of a real record.

``python tests/record/tampering.py`` does all of them anew and writes ``tests/formats/tampered``:
a directory per crime, with an ``expected.json`` that names the crime and the checks it must fail.
"""

# ruff: noqa: D103 - what a crime is, its name says

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from cirron_otel.training_record.chain import DIARY, GENESIS, METRICS, SEAL, SIGNATURE, line_hash

FORMATS = Path(__file__).resolve().parent.parent / "formats"
RECORDS = FORMATS / "records"
TAMPERED = FORMATS / "tampered"

Event = dict[str, Any]


class Crime(NamedTuple):
    """What is done to a copy of ``base``, which checks say so, and in which words."""

    base: str
    do: Callable[[Path], None]
    #: Check to status, for every check of a kind that is not as in the base record.
    expected: dict[str, str]
    #: Check to a piece of its message.
    says: dict[str, str]


CRIMES: dict[str, Crime] = {}


def crime(
    base: str, says: dict[str, str] | None = None, **expected: str
) -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
    """Register a function as the crime of its name."""

    def register(do: Callable[[Path], None]) -> Callable[[Path], None]:
        CRIMES[do.__name__] = Crime(base, do, expected, says or {})
        return do

    return register


# --- tools ----------------------------------------------------------------------------------------


def read(run: Path) -> list[Event]:
    """The diary's lines."""
    return [json.loads(line) for line in (run / DIARY).read_text().splitlines()]


def texts(run: Path) -> list[str]:
    """The diary's lines as text."""
    return (run / DIARY).read_text().splitlines()


def write_texts(run: Path, lines: list[str], end: str = "\n") -> None:
    """Lines as they are given."""
    (run / DIARY).write_bytes(("\n".join(lines) + end).encode())


def rewrite(run: Path, events: list[Event]) -> None:
    """A whole new chain over the events, as somebody does who knows the format."""
    prev = GENESIS
    lines = []
    for seq, event in enumerate(events):
        body = {key: item for key, item in event.items() if key not in {"prev", "hash"}}
        body["seq"] = seq
        digest = line_hash(prev, body)
        lines.append(json.dumps({**body, "prev": prev, "hash": digest}))
        prev = digest
    write_texts(run, lines)


def change(run: Path, kind: str, **fields: object) -> None:
    """Change the first event of a type and all hashes after it."""
    events = read(run)
    next(event for event in events if event["event"] == kind).update(fields)
    rewrite(run, events)


def rows(run: Path) -> list[str]:
    """The metrics rows as text."""
    return (run / METRICS).read_text().splitlines()


def rewrite_rows(run: Path, lines: list[str], **run_end: object) -> None:
    """Write the rows, and put their new digest into ``run_end``."""
    data = "".join(f"{line}\n" for line in lines).encode()
    (run / METRICS).write_bytes(data)
    change(run, "run_end", metrics_sha256=hashlib.sha256(data).hexdigest(), **run_end)


def reseal(run: Path, **fields: object) -> None:
    """Change what the seal says, in canonical form."""
    seal = json.loads((run / SEAL).read_text())
    seal.update(fields)
    (run / SEAL).write_text(json.dumps(seal, sort_keys=True, separators=(",", ":")))


# --- the chain ------------------------------------------------------------------------------------


@crime("lesion_watch", {"chain": "event 5 (seq 5, alarm) was edited"}, chain="fail", replay="fail")
def edited_field(run: Path) -> None:
    lines = texts(run)
    lines[5] = (
        lines[5].replace('"vanishing"', '"exploding"').replace('"no_gradient"', '"vanishing"')
    )
    write_texts(run, lines)


@crime("lesion_watch", {"chain": "deleted, inserted or reordered"}, chain="fail", seq="fail",
       replay="fail", totals="fail")  # fmt: skip
def deleted_line(run: Path) -> None:
    lines = texts(run)
    del lines[6]
    write_texts(run, lines)


@crime("lesion_watch", {"chain": "deleted, inserted or reordered"}, chain="fail", seq="fail",
       replay="fail")  # fmt: skip
def swapped_lines(run: Path) -> None:
    lines = texts(run)
    lines[5], lines[6] = lines[6], lines[5]
    write_texts(run, lines)


@crime("lesion_watch", {"chain": "deleted, inserted or reordered"}, chain="fail", seq="fail",
       replay="fail", totals="fail")  # fmt: skip
def inserted_line(run: Path) -> None:
    lines = texts(run)
    lines.insert(6, lines[5])
    write_texts(run, lines)


@crime("healthy", {"genesis": "not 64 zeros"}, genesis="fail")
def other_beginning(run: Path) -> None:
    events = read(run)
    prev = "ab" * 32
    lines = []
    for event in events:
        body = {key: item for key, item in event.items() if key not in {"prev", "hash"}}
        digest = line_hash(prev, body)
        lines.append(json.dumps({**body, "prev": prev, "hash": digest}))
        prev = digest
    write_texts(run, lines)


@crime("lesion_watch", {"bookends": "no run_end", "ending": "or its end was cut off"},
       bookends="fail", metrics="skipped", totals="skipped", ending="note")  # fmt: skip
def cut_end(run: Path) -> None:
    write_texts(run, texts(run)[:-1])


@crime("lesion_watch", {"replay": "which the diary does not have"},
       bookends="fail", metrics="skipped", totals="skipped", ending="note",
       replay="fail")  # fmt: skip
def cut_alarms_off(run: Path) -> None:
    write_texts(run, texts(run)[:5])


@crime("lesion_watch", {"parse": "line 10 is half-written", "chain": "all 9 hashes before it link",
       "bookends": "died while it wrote", "ending": "a crash"}, parse="fail", chain="fail",
       bookends="fail", metrics="skipped", totals="skipped", ending="note")  # fmt: skip
def half_written(run: Path) -> None:
    data = (run / DIARY).read_bytes()
    (run / DIARY).write_bytes(data[:-200])


@crime("lesion_watch", {"parse": "half-written"}, parse="fail", chain="fail",
       bookends="fail", metrics="skipped", totals="skipped", ending="note")  # fmt: skip
def zeros_at_the_end(run: Path) -> None:
    lines = texts(run)
    write_texts(run, lines[:-1], end="\n" + "\0" * 100)


@crime(
    "lesion_watch",
    {"parse": "line 10 is no JSON", "chain": "past line 10"},
    parse="fail",
    chain="fail",
    bookends="fail",
    metrics="skipped",
    totals="skipped",
    ending="note",
)
def broken_line_with_an_end(run: Path) -> None:
    lines = texts(run)
    write_texts(run, [*lines[:-1], lines[-1][:-10]])


# --- spelling -------------------------------------------------------------------------------------


@crime("healthy", {"duplicates": "line 1: model stands there twice"}, duplicates="fail")
def repeated_key(run: Path) -> None:
    lines = texts(run)
    lines[0] = lines[0].replace('"model": ', '"model": "AnotherNet", "model": ')
    write_texts(run, lines)


@crime("healthy", {"duplicates": "hash stands there twice"}, duplicates="fail")
def repeated_hash(run: Path) -> None:
    lines = texts(run)
    lines[1] = lines[1].replace('"hash": ', f'"hash": "{"0" * 64}", "hash": ')
    write_texts(run, lines)


@crime("healthy", {"duplicates": "line 1: sigma stands there twice"}, duplicates="fail")
def repeated_key_inside(run: Path) -> None:
    lines = texts(run)
    lines[0] = lines[0].replace('"sigma": 2.5', '"sigma": 9.5, "sigma": 2.5')
    write_texts(run, lines)


@crime("healthy", {"spelling": "line 1"}, spelling="note")
def respelled_number(run: Path) -> None:
    lines = texts(run)
    lines[0] = lines[0].replace('"sigma": 2.5', '"sigma": 2.50')
    write_texts(run, lines)


@crime("healthy", {"spelling": "line 1"}, spelling="note")
def respelled_exponent(run: Path) -> None:
    lines = texts(run)
    lines[0] = lines[0].replace("1e-05", "1e-5")
    write_texts(run, lines)


@crime("healthy", {"spelling": "line 1"}, spelling="note")
def respelled_text(run: Path) -> None:
    lines = texts(run)
    lines[0] = lines[0].replace('"run_start"', '"run\\u005fstart"')
    write_texts(run, lines)


@crime("healthy", {"spelling": "line 2"}, spelling="note")
def white_space(run: Path) -> None:
    lines = texts(run)
    lines[1] = lines[1].replace('"seq": 1,', '"seq":  1,')
    write_texts(run, lines)


@crime("healthy", {"spelling": "line 2: a blank line"}, spelling="note")
def blank_line(run: Path) -> None:
    lines = texts(run)
    write_texts(run, [lines[0], "", *lines[1:]])


# --- a rewritten chain ----------------------------------------------------------------------------


@crime("healthy", {"record_version": "turns the check of all fields off"}, record_version="fail",
       schema="skipped")  # fmt: skip
def no_record_version(run: Path) -> None:
    events = read(run)
    del events[0]["record_version"]
    rewrite(run, events)


@crime("healthy", {"unknown": "event 3 (weather)"}, unknown="note")
def unknown_event(run: Path) -> None:
    events = read(run)
    events.insert(3, {"seq": 3, "time": events[2]["time"], "event": "weather", "sky": "grey"})
    rewrite(run, events)


@crime("lesion_watch", {"schema": "event 5 (alarm): kind is missing"}, schema="fail")
def missing_field(run: Path) -> None:
    events = read(run)
    del events[5]["kind"]
    rewrite(run, events)


@crime("lesion_watch", {"schema": 'severity is not "warning"'}, schema="fail")
def milder_severity(run: Path) -> None:
    change(run, "alarm", severity="info")


@crime("lesion_watch", {"schema": "step is not a whole number"}, schema="fail", replay="fail")
def step_of_another_type(run: Path) -> None:
    change(run, "alarm", step=True)


@crime("lesion_watch", {"totals": "counts.alarms is 0, there are 4"}, totals="fail")
def counts_of_no_alarm(run: Path) -> None:
    events = read(run)
    events[-1]["counts"]["alarms"] = 0
    rewrite(run, events)


@crime("lesion_watch", {"totals": "run_end.checks is 999"}, totals="fail")
def more_checks(run: Path) -> None:
    change(run, "run_end", checks=999)


@crime("lesion_watch", {"totals": "run_end.steps is 3"}, totals="fail")
def fewer_steps(run: Path) -> None:
    change(run, "run_end", steps=3)


@crime("lesion_watch", {"replay": "the rows call for alarm at step"}, replay="fail")
def removed_alarm(run: Path) -> None:
    events = read(run)
    del events[5]
    events[-1]["counts"]["alarms"] -= 1
    rewrite(run, events)


@crime("lesion_watch", {"replay": "is not borne out by the rows"}, replay="fail")
def invented_alarm(run: Path) -> None:
    events = read(run)
    events.insert(6, {**events[5], "layer": "nowhere"})
    events[-1]["counts"]["alarms"] += 1
    rewrite(run, events)


@crime("lesion_watch", {"replay": "baseline not as the rows say"}, replay="fail")
def other_baseline(run: Path) -> None:
    events = read(run)
    change(run, "alarm", baseline=events[5]["baseline"] * 1.001)


@crime("nan_loss", {"replay": "the rows call for nonfinite_loss at step 60"}, replay="fail")
def removed_nan(run: Path) -> None:
    events = [event for event in read(run) if event["event"] != "nonfinite_loss"]
    events[-1]["counts"]["nonfinite"] -= 1
    rewrite(run, events)


@crime("gradscaler", {"replay": "the rows call for skipped_step"}, replay="fail")
def removed_skip(run: Path) -> None:
    events = read(run)
    events.remove(next(event for event in events if event["event"] == "skipped_step"))
    events[-1]["counts"]["skipped_steps"] -= 1
    rewrite(run, events)


@crime("lesion_watch", {"replay": "n_certified"}, replay="fail")
def fewer_dead_channels(run: Path) -> None:
    change(run, "channels", n_certified=0)


@crime("lesion_watch", {"replay": "the rows call for channels"}, replay="fail")
def removed_dead_channels(run: Path) -> None:
    events = [event for event in read(run) if event["event"] != "channels"]
    events[-1]["counts"]["stuck_layers"] -= 1
    rewrite(run, events)


@crime("healthy", {"times": "before the one before it"}, times="note")
def clock_set_back(run: Path) -> None:
    events = read(run)
    change(run, "manifest", time=events[2]["time"] - 3600)


@crime("momentum_refused", {"steps": "is of step 0, after one of"}, steps="fail", rows="fail")
def step_set_back(run: Path) -> None:
    change(run, "certificate_refused", step=0)


@crime("lesion_watch", {"rows": "which has no row"}, rows="fail")
def step_between_rows(run: Path) -> None:
    events = read(run)
    step = next(event["step"] for event in events if event["event"] == "certificate")
    change(run, "certificate", step=step + 1)


@crime("healthy", {"bookends": "comes after run_end"}, bookends="fail", metrics="skipped",
       totals="skipped", ending="note")  # fmt: skip
def event_after_the_end(run: Path) -> None:
    events = read(run)
    late = {"time": events[-1]["time"], "event": "sink_error", "sink": "s", "error": "late"}
    rewrite(run, [*events, {"seq": 0, **late}])


@crime("healthy", {"bookends": "2 run_end events"}, bookends="fail")
def two_ends(run: Path) -> None:
    events = read(run)
    rewrite(run, [*events, events[-1]])


@crime("healthy", {"bookends": "not run_start"}, bookends="fail", schema="skipped",
       record_version="fail", replay="skipped")  # fmt: skip
def no_beginning(run: Path) -> None:
    rewrite(run, read(run)[1:])


# --- the metrics ----------------------------------------------------------------------------------


@crime("healthy", {"metrics": "was changed"}, metrics="fail")
def edited_row(run: Path) -> None:
    lines = rows(run)
    row = json.loads(lines[3])
    row["loss"] = 0.125
    lines[3] = json.dumps(row, separators=(",", ":"))
    (run / METRICS).write_text("".join(f"{line}\n" for line in lines))


@crime("healthy", {"metrics": "is missing"}, metrics="fail", rows="absent", digests="absent",
       replay="absent")  # fmt: skip
def no_metrics(run: Path) -> None:
    (run / METRICS).unlink()


@crime("healthy", {"totals": "run_end.checks is 24, there are 23 rows"}, totals="fail")
def removed_row(run: Path) -> None:
    lines = rows(run)
    del lines[12]
    rewrite_rows(run, lines)


@crime("healthy", {"rows": "comes after step"}, rows="fail")
def swapped_rows(run: Path) -> None:
    lines = rows(run)
    lines[5], lines[6] = lines[6], lines[5]
    rewrite_rows(run, lines)


@crime("healthy", {"duplicates": "metrics row 3: loss stands there twice"}, duplicates="fail")
def repeated_key_in_a_row(run: Path) -> None:
    lines = rows(run)
    lines[2] = lines[2].replace('"loss":', '"loss":99.0,"loss":', 1)
    rewrite_rows(run, lines)


@crime("lesion_watch", {"replay": "is not borne out by the rows"}, replay="fail")
def healed_rows(run: Path) -> None:
    lines = [json.loads(line) for line in rows(run)]
    for row in lines[1:]:
        row["grad"] = lines[0]["grad"]
    rewrite_rows(run, [json.dumps(row, separators=(",", ":")) for row in lines])


@crime("healthy", {"totals": "checks_without_gradients", "replay": "no_gradients"}, totals="fail",
       replay="fail")  # fmt: skip
def row_without_gradients(run: Path) -> None:
    lines = rows(run)
    row = json.loads(lines[9])
    row["grad"] = {}
    lines[9] = json.dumps(row, separators=(",", ":"))
    rewrite_rows(run, lines)


# --- seal and signature ---------------------------------------------------------------------------


@crime("signed", {"seal": "the diary has 15"}, bookends="fail", metrics="skipped", seal="fail",
       totals="skipped", ending="note")  # fmt: skip
def cut_end_of_a_sealed_record(run: Path) -> None:
    write_texts(run, texts(run)[:-1])


@crime("signed", {"seal": "diary.jsonl was changed after it had been sealed"}, seal="fail",
       spelling="note")  # fmt: skip
def white_space_in_a_sealed_record(run: Path) -> None:
    lines = texts(run)
    write_texts(run, [lines[0] + " ", *lines[1:]])


@crime("signed", {"signature": "not over this seal"}, signature="fail")
def other_signature(run: Path) -> None:
    data = bytearray((run / SIGNATURE).read_bytes())
    data[5] ^= 1
    (run / SIGNATURE).write_bytes(bytes(data))


@crime("signed", {"signature": "the seal names a signer"}, signature="fail")
def removed_signature(run: Path) -> None:
    (run / SIGNATURE).unlink()


@crime("signed", {"signature": "but no seal"}, signature="fail", seal="absent",
       seal_details="absent")  # fmt: skip
def removed_seal(run: Path) -> None:
    (run / SEAL).unlink()


@crime("signed", {"signature": "not over this seal"}, signature="fail")
def resealed_by_another_hand(run: Path) -> None:
    reseal(run, created="2020-01-01T00:00:00Z")


@crime("signed", {"seal": "not the canonical form"}, seal="fail", signature="fail")
def seal_with_a_line_end(run: Path) -> None:
    (run / SEAL).write_bytes((run / SEAL).read_bytes() + b"\n")


@crime("signed", {"seal": "is no bare file name"}, seal="fail", signature="fail")
def seal_over_another_directory(run: Path) -> None:
    seal = json.loads((run / SEAL).read_text())
    reseal(run, files={**seal["files"], "../healthy/diary.jsonl": "0" * 64})


@crime("signed", {"seal": "metrics.jsonl is not listed"}, seal="fail", signature="fail")
def seal_without_the_metrics(run: Path) -> None:
    seal = json.loads((run / SEAL).read_text())
    reseal(run, files={"diary.jsonl": seal["files"]["diary.jsonl"]})


@crime("signed", {"seal_details": "algorithm is ROT13"}, seal_details="fail", signature="fail")
def seal_of_another_algorithm(run: Path) -> None:
    seal = json.loads((run / SEAL).read_text())
    reseal(run, signer={**seal["signer"], "algorithm": "ROT13"})


# --- writing them down ----------------------------------------------------------------------------

#: Found in the copies and not needed in them.
_LEFT_OUT = shutil.ignore_patterns("expected_verify.json", "*.pem")


def commit(name: str, run: Path) -> None:
    """Do the crime ``name`` in the directory ``run``, which is made."""
    crime = CRIMES[name]
    shutil.copytree(RECORDS / crime.base, run, ignore=_LEFT_OUT)
    crime.do(run)
    (run / "expected.json").write_text(
        json.dumps(
            {
                "crime": name.replace("_", " "),
                "record": crime.base,
                "checks": crime.expected,
                "says": crime.says,
            },
            indent=1,
        )
        + "\n"
    )


def main() -> int:
    """Write all of them."""
    shutil.rmtree(TAMPERED, ignore_errors=True)
    for name in CRIMES:
        commit(name, TAMPERED / name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
