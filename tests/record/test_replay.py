"""Recomputing events from rows: what is called for, what is not, and what nobody can decide."""

from __future__ import annotations

import json
import math
import platform
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirron_otel.training_record.chain import METRICS
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.rules import Decisions, Expected, Rules, number
from cirron_otel.training_record.writing.journal import Journal
from record.tampering import RECORDS, read, rewrite, rewrite_rows
from record.writing import CONFIG, put, troubled, write

EVENTS = {
    "alarm",
    "alarm_cleared",
    "loss_recovered",
    "loss_spike",
    "no_gradients",
    "nonfinite_gradient",
    "nonfinite_loss",
}


def decisions(**changes: Any) -> Decisions:
    """The rules with other settings."""
    return Decisions(Rules.of({**CONFIG, **changes}))


def names(found: list[Expected]) -> list[str]:
    """The types of events."""
    return [expected.event for expected in found]


# --- the rules, one at a time ---------------------------------------------------------------------


def calm(rules: Decisions, checks: int = 10, **norms: float) -> int:
    """Some checks in which nothing happens; returns the next step."""
    for step in range(checks):
        assert names(rules.check(step, 2.0, norms or {"a": 0.1})) == []
    return checks


def test_an_alarm_needs_two_checks_of_the_same_condition() -> None:
    """One strange check is none, two are an alarm, and the next calm one clears it."""
    rules = decisions()
    step = calm(rules)
    assert names(rules.check(step, 2.0, {"a": 1e-9})) == []
    (alarm,) = rules.check(step + 1, 2.0, {"a": 1e-9})
    assert alarm.event == "alarm"
    assert dict(alarm.exact) == {"layer": "a", "diagnosis": "vanishing"}
    assert dict(alarm.floats)["grad_norm"] == 1e-9
    assert dict(alarm.floats)["baseline"] == pytest.approx(0.1)
    (cleared,) = rules.check(step + 2, 2.0, {"a": 0.1})
    assert cleared.event == "alarm_cleared"
    assert dict(cleared.exact)["diagnosis"] == "vanishing"


def test_the_number_of_confirmations_is_that_of_the_config() -> None:
    """With one confirmation the first strange check is an alarm."""
    rules = decisions(alarm_confirmations=1)
    step = calm(rules)
    assert names(rules.check(step, 2.0, {"a": 1e-9})) == ["alarm"]


def test_alternating_conditions_never_confirm() -> None:
    """A check of another condition starts the count anew."""
    rules = decisions()
    step = calm(rules)
    for index in range(8):
        norm = 1e-9 if index % 2 else 1e9
        assert names(rules.check(step + index, 2.0, {"a": norm})) == []


def test_a_gradient_of_zero_has_its_own_name() -> None:
    """Zero after something else is no_gradient; zeros from the start are nothing."""
    rules = decisions()
    step = calm(rules, a=0.1, zero=0.0)
    rules.check(step, 2.0, {"a": 0.0, "zero": 0.0})
    (alarm,) = rules.check(step + 1, 2.0, {"a": 0.0, "zero": 0.0})
    assert dict(alarm.exact) == {"layer": "a", "diagnosis": "no_gradient"}


def test_a_spike_is_told_once_and_so_is_its_end() -> None:
    """The loss baseline stands still while the spike lasts."""
    rules = decisions()
    step = calm(rules)
    found = [names(rules.check(step + i, loss, {"a": 0.1})) for i, loss in enumerate([9, 9, 2, 2])]
    assert found == [["loss_spike"], [], ["loss_recovered"], []]


def test_nonfinite_losses_and_gradients_are_told_once_an_episode() -> None:
    """A finite check in between ends the episode."""
    rules = decisions()
    nan = math.nan
    found = [
        names(rules.check(step, loss, {"a": norm}))
        for step, (loss, norm) in enumerate([(nan, nan), (nan, nan), (1.0, 1.0), (nan, nan)])
    ]
    assert found == [["nonfinite_loss", "nonfinite_gradient"], [], [],
                     ["nonfinite_loss", "nonfinite_gradient"]]  # fmt: skip


def test_a_check_without_gradients_does_not_end_an_episode() -> None:
    """No gradient at all is told once a run, and is neither finite nor not."""
    rules = decisions()
    found = [names(rules.check(step, None, grad)) for step, grad in enumerate(
        [{"a": math.inf}, {}, {"a": math.inf}, {}, {"a": 1.0}, {"a": math.inf}]
    )]  # fmt: skip
    assert found == [["nonfinite_gradient"], ["no_gradients"], [], [], [], ["nonfinite_gradient"]]


def test_a_scaler_turns_nonfinite_gradients_into_skipped_steps() -> None:
    """Every such check is told, and a finite loss of such a step counts for nothing."""
    rules = decisions()
    rules.scaler = True
    step = calm(rules)
    for index in range(3):
        (skipped,) = rules.check(step + index, 90.0, {"a": math.inf, "b": 1.0})
        assert skipped.event == "skipped_step"
        assert dict(skipped.exact) == {"layers": ["a"]}
    assert names(rules.check(step + 3, 2.0, {"a": 0.1, "b": 1.0})) == []


def test_lists_of_layers_are_cut_at_the_limit() -> None:
    """No more names than layer_list_limit stand in an event."""
    (found,) = decisions(layer_list_limit=2).check(0, None, dict.fromkeys("abc", math.nan))
    assert dict(found.exact) == {"layers": ["a", "b"]}


@pytest.mark.parametrize(
    ("name", "value"),
    [("sigma", None), ("sigma", "x"), ("sigma", math.nan), ("warmup", 1.5), ("warmup", True)],
)
def test_a_config_that_is_none_is_named(name: str, value: object) -> None:
    """What is missing or no number is named."""
    with pytest.raises(ValueError, match=name):
        Rules.of({**CONFIG, name: value})


@given(st.none() | st.booleans() | st.text() | st.lists(st.integers()) | st.integers())
def test_a_number_is_a_float_or_none(value: object) -> None:
    """Reading a number never raises."""
    found = number(value)
    assert found is None or isinstance(found, float)


# --- records of our own ---------------------------------------------------------------------------


def test_our_own_record_replays(tmp_path: Path) -> None:
    """Everything the rules know happens in the run, and all of it follows from the rows."""
    journal = write(tmp_path / "run")
    assert {event["event"] for event in read(tmp_path / "run")} >= EVENTS
    verdict = verify(tmp_path / "run")
    assert verdict.ok
    assert {c.name: c.status for c in verdict.checks if c.status not in {"pass", "absent"}} == {}
    assert "to the last bit" in verdict.check("replay").message
    assert verdict.run_id == journal.run_id
    rows = (tmp_path / "run" / METRICS).read_text()
    assert "NaN" not in rows
    assert '"nonfinite":{"loss":"nan"}' in rows


def test_an_event_that_is_kept_back_is_missed(tmp_path: Path) -> None:
    """Each event of the run, left out, is called for by the rows."""
    rules = Decisions(Rules.of(CONFIG))
    all_events = [
        e for i, (loss, grad) in enumerate(troubled()) for e in rules.check(5 * i, loss, grad)
    ]
    assert len(all_events) >= len(EVENTS)
    for index, left_out in enumerate(all_events):
        run = tmp_path / str(index)
        write(run, change=lambda _journal, expected, left_out=left_out: expected == left_out)
        message = verify(run).check("replay").message
        assert f"the rows call for {left_out.event} at step {left_out.step}" in message


def test_an_event_of_a_further_rule_is_left_alone(tmp_path: Path) -> None:
    """An event that names its rule need not follow from the rows, and counts may hold it or not."""

    def twice(journal: Journal, expected: Expected) -> bool:
        if expected.event == "alarm":
            put(journal, expected, layer="another", rule="frozen_baseline")
        return False

    write(tmp_path / "run", change=twice)
    assert verify(tmp_path / "run").ok


@pytest.mark.parametrize(("factor", "status"), [(1 + 1e-12, "pass"), (1 + 1e-7, "fail")])
def test_another_platform_may_differ_in_the_last_bits(
    tmp_path: Path, factor: float, status: str
) -> None:
    """Elsewhere numbers may differ by 1e-9; on the same platform by nothing."""

    def nearly(journal: Journal, expected: Expected) -> bool:
        if expected.event != "alarm":
            return False
        put(journal, expected, baseline=dict(expected.floats)["baseline"] * factor)
        return True

    run = tmp_path / "run"
    write(run, change=nearly)
    assert verify(run).check("replay").status == "fail"
    events = read(run)
    assert events[0]["platform"] == platform.platform()
    events[0]["platform"] = "Elsewhere-1.0"
    rewrite(run, events)
    assert verify(run).check("replay").status == status


def test_a_decision_by_a_hair_is_inconclusive(tmp_path: Path) -> None:
    """An alarm whose threshold was missed by less than 1e-9 may be there or not."""
    run = tmp_path / "run"
    write(run, 10)
    lines = (run / METRICS).read_text().splitlines()
    row = json.loads(lines[-1])
    mean = sum(math.log10(json.loads(line)["grad"]["a"]) for line in lines) / 10
    for step in (50, 55):
        row.update(step=step, digest=None)
        row["grad"]["a"] = 10 ** (mean - 1.0) * (1 - 1e-12)
        del row["digest"]
        lines.append(json.dumps(row, separators=(",", ":")))
        row["digest"] = None
    rewrite_rows(run, lines, checks=12, steps=60)
    events = read(run)
    for event in events[-1:]:
        event.pop("metrics_digest")
    rewrite(run, events)
    check = verify(run).check("replay")
    assert check.status == "note"
    assert "inconclusive" in check.message


def test_channel_events_follow_from_the_rows(tmp_path: Path) -> None:
    """A layer's change of level that has no event is missed, in its counts too."""
    run = tmp_path / "run"
    write(run, 10)
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    lines[4]["stuck"]["a"] = [1, 2, 0, 0]
    for row in lines:
        row.pop("digest")
    events = [{k: v for k, v in e.items() if k != "metrics_digest"} for e in read(run)]
    rewrite(run, events)
    rewrite_rows(run, [json.dumps(row) for row in lines])
    message = verify(run).check("replay").message
    assert "the rows call for channels at step 20 of a" in message
    assert "the rows call for channels_cleared at step 25 of a" in message


def test_rows_that_are_cut_off_an_unfinished_run_are_missed(tmp_path: Path) -> None:
    """The digests in the diary vouch for the rows of a run that has no end yet (R-W5)."""
    run = tmp_path / "run"
    journal = write(run, close=False)
    assert "digests" not in {c.name for c in verify(run).checks if c.status == "fail"}
    whole = (run / METRICS).read_text().splitlines()
    (run / METRICS).write_text("".join(f"{line}\n" for line in whole[:20]))
    assert verify(run).check("digests").status == "fail"
    changed = json.loads(whole[3])
    changed["loss"] = 7.5
    (run / METRICS).write_text("".join(
        f"{json.dumps(changed, separators=(',', ':')) if i == 3 else line}\n"
        for i, line in enumerate(whole)
    ))  # fmt: skip
    assert verify(run).check("digests").status == "fail"
    assert verify(run).check("rows").status == "fail"
    (run / METRICS).write_text("".join(f"{line}\n" for line in whole))
    journal.close()
    assert verify(run).ok


def test_rows_that_never_reached_the_disk_are_noted(tmp_path: Path) -> None:
    """A run that was killed and lost its last rows, which nobody vouched for, is no forgery."""
    run = tmp_path / "run"
    write(run)
    events = [{k: v for k, v in e.items() if k != "metrics_digest"} for e in read(run)]
    rewrite(run, events[:-1])
    lines = (run / METRICS).read_text().splitlines()
    (run / METRICS).write_text("".join(f"{line}\n" for line in lines[:20]) + lines[20][:40])
    verdict = verify(run)
    assert [check.name for check in verdict.checks if check.status == "fail"] == ["bookends"]
    assert verdict.check("rows").status == "note"
    assert "behind the last row" in verdict.check("rows").message
    rewrite(run, events)
    assert verify(run).check("rows").status == "fail"


def test_what_was_lost_is_no_crime(tmp_path: Path) -> None:
    """A record that says how many events it lost, and lacks as many, does not fail for it."""
    run = tmp_path / "run"
    write(run)
    events = read(run)
    index = next(i for i, event in enumerate(events) if event["event"] == "loss_spike")
    del events[index]
    events[index]["lost_before"] = 1
    rewrite(run, events)
    verdict = verify(run)
    assert verdict.check("replay").status == "note"
    assert verdict.ok


@pytest.mark.parametrize("case", ["healthy", "lesion_watch", "gradscaler"])
def test_null_and_nan_mean_the_same(tmp_path: Path, case: str) -> None:
    """Rows with bare NaN and rows with null and a nonfinite entry give the same events."""
    before = verify(RECORDS / case).check("replay")
    assert before.status == "pass"
    run = tmp_path / "run"
    run.mkdir()
    for path in (RECORDS / case).glob("*.jsonl"):
        (run / path.name).write_bytes(path.read_bytes())
    lines = []
    for line in (run / METRICS).read_text().splitlines():
        row = json.loads(line)
        special = {
            f"grad.{name}": str(norm)
            for name, norm in row["grad"].items()
            if not math.isfinite(norm)
        }
        row["grad"] = {n: None if f"grad.{n}" in special else v for n, v in row["grad"].items()}
        lines.append(json.dumps({**row, "nonfinite": special}, allow_nan=False))
    rewrite_rows(run, lines)
    verdict = verify(run)
    assert verdict.check("replay") == before
    assert verdict.check("portable").status == "pass"
