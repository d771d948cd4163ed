"""What a report gathers from a record, and what it concludes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from cirron_otel.errors import RecordError
from cirron_otel.training_record.report import conclusions, load, to_dict
from cirron_otel.training_record.report.model import Episode, Run
from cirron_otel.training_record.report.one_page import sections
from record_by_hand import RecordWriter, alarm, channels, healthy, lesioned


def episodes(run: Run) -> list[tuple[str, str | None, int, int | None, str]]:
    """Kind, layer, start, end and outcome of each episode."""
    listed: list[Episode] = run.episodes.all()
    return [(item.kind, item.layer, item.start, item.end, item.outcome) for item in listed]


def test_a_healthy_run_is_called_healthy(tmp_path: Path) -> None:
    """A run in which nothing was found says so, with its loss, steps and layers."""
    run = load(healthy(tmp_path).end())
    assert conclusions.status(run).key == "healthy"
    assert (run.steps, run.checks, run.finished) == (96, 20, True)
    assert run.loss.first == 2.0
    assert run.loss.best == pytest.approx(1.05)
    assert run.loss.best_step == 95
    assert list(run.layers) == ["conv", "fc"]
    assert episodes(run) == []


def test_an_unrepaired_lesion_stays_open(tmp_path: Path) -> None:
    """Stuck channels and an alarm that never end are the run's state, with the steps they took."""
    run = load(lesioned(tmp_path, mend=False))
    assert conclusions.status(run).key == "unrepaired"
    assert episodes(run) == [
        ("no_gradient", "conv", 55, None, "open"),
        ("stuck", "conv", 50, None, "open"),
    ]
    assert run.steps_stuck == run.steps - 50
    layer = run.layers["conv"]
    assert (layer.stuck_at_end, layer.peak_proven, layer.open_alarm) == (16, 16, "no_gradient")


def test_a_repair_ends_an_episode_at_its_own_check(tmp_path: Path) -> None:
    """A row's counts are those before the repair, so the episode ends at the repair's step."""
    run = load(lesioned(tmp_path, mend=True))
    assert conclusions.status(run).key == "repaired"
    assert episodes(run) == [
        ("no_gradient", "conv", 55, 65, "cleared"),
        ("stuck", "conv", 50, 60, "repaired"),
    ]
    assert run.steps_stuck == 10
    assert run.layers["conv"].channels_repaired == 16


def test_a_diary_alone_tells_of_stuck_channels_too(tmp_path: Path) -> None:
    """Without metrics the channels events and repairs give the same episodes."""
    lesioned(tmp_path, mend=True)
    alone = tmp_path / "copy.jsonl"
    alone.write_bytes((tmp_path / "diary.jsonl").read_bytes())
    run = load(alone)
    assert run.directory is None
    assert ("stuck", "conv", 50, 60, "repaired") in episodes(run)
    assert run.steps_stuck == 10
    assert conclusions.status(run).key == "repaired"


def test_channels_stuck_from_the_start_are_inherited(tmp_path: Path) -> None:
    """What was stuck at the first check is a matter of the starting weights, not of this run."""
    writer = RecordWriter(tmp_path)
    writer.manifest("conv")
    channels(writer, 0, "conv", 3)
    for step in range(0, 50, 5):
        writer.row(step, 1.0, {"conv": 0.1}, {"conv": [3, 0, 0, 0]})
    run = load(writer.end())
    assert run.layers["conv"].inherited == 3
    assert run.steps_stuck == 0
    assert episodes(run) == []
    assert conclusions.status(run).key == "healthy"


def test_silent_channels_are_not_stuck(tmp_path: Path) -> None:
    """Silent channels may wake by themselves: they are counted, but never as stuck."""
    writer = RecordWriter(tmp_path)
    for step in range(0, 50, 5):
        writer.row(step, 1.0, {"fc": 0.1}, {"fc": [0, 0, step, 0]})
    run = load(writer.end())
    assert run.layers["fc"].peak_silent == 45
    assert run.layers["fc"].peak_stuck == 0
    assert run.steps_stuck == 0


@pytest.mark.parametrize("spelling", ["bare", "null"])
def test_a_loss_that_is_no_number_is_found_in_either_spelling(
    tmp_path: Path, spelling: str
) -> None:
    """Bare NaN, as older writers have it, and null with ``nonfinite``, as ours, read the same."""
    writer = RecordWriter(tmp_path)
    for step in (0, 5):
        writer.row(step, 2.0, {"fc": 0.1})
    writer.event("nonfinite_loss", step=10, severity="critical", value="nan")
    writer.event("nonfinite_gradient", step=10, severity="critical", layers=["fc"])
    if spelling == "bare":
        writer.raw_row('{"step":10,"loss":NaN,"grad":{"fc":Infinity},"stuck":{}}')
    else:
        nonfinite = {"loss": "nan", "grad.fc": "inf"}
        writer.row(10, None, {"fc": None}, nonfinite=nonfinite)
    run = load(writer.end(11))
    assert conclusions.status(run).key == "broken"
    assert (run.loss.nonfinite, run.loss.first_nonfinite) == (1, 10)
    assert run.loss.final is None
    assert run.layers["fc"].nonfinite_gradients == 1
    assert episodes(run) == [("nonfinite", None, 10, None, "open")]


def test_a_step_the_scaler_skipped_is_no_broken_gradient(tmp_path: Path) -> None:
    """Gradients that overflow under a gradient scaler are its everyday work."""
    writer = RecordWriter(tmp_path)
    writer.manifest("fc", precision={"scaler": True, "scaler_enabled": True, "scale": 65536.0})
    writer.row(0, 2.0, {"fc": 0.1})
    writer.event("skipped_step", step=5, severity="info", scale=65536.0, layers=["fc"])
    writer.row(5, 2.0, {"fc": None}, nonfinite={"grad.fc": "inf"})
    run = load(writer.end())
    assert run.layers["fc"].nonfinite_gradients == 0
    assert conclusions.status(run).key == "healthy"


def test_a_loss_that_was_not_given_is_not_broken(tmp_path: Path) -> None:
    """A null loss without ``nonfinite`` means that there was none."""
    writer = RecordWriter(tmp_path)
    for step in (0, 5, 10):
        writer.row(step, None, {"fc": 0.1})
    run = load(writer.end())
    assert (run.loss.missing, run.loss.nonfinite) == (3, 0)
    assert conclusions.status(run).key == "healthy"


def test_rows_of_three_counts_are_read(tmp_path: Path) -> None:
    """Records of the first version have no count of decayed channels."""
    writer = RecordWriter(tmp_path)
    writer.row(0, 1.0, {"fc": 0.1}, {"fc": [0, 0, 0]})
    writer.row(5, 1.0, {"fc": 0.1}, {"fc": [2, 1, 4]})
    layer = load(writer.end()).layers["fc"]
    assert (layer.stuck_at_end, layer.silent_at_end) == (3, 4)


def test_a_crash_is_told_apart_from_a_change(tmp_path: Path) -> None:
    """No ``run_end`` and half a last line is what a crash leaves: unfinished, not altered."""
    run = load(healthy(tmp_path).stop('{"seq": 3, "tim'))
    assert run.end is None
    assert conclusions.trust(run).answer == "partly"
    assert conclusions.status(run).key == "healthy"
    assert any("half written" in note for note in run.notes)


def test_a_changed_record_is_not_believed(tmp_path: Path) -> None:
    """One changed field, and the report leads with it, whatever the rest says."""
    lesioned(tmp_path, mend=True)
    diary = tmp_path / "diary.jsonl"
    diary.write_text(diary.read_text().replace('"count": 16', '"count": 61'))
    run = load(tmp_path)
    assert conclusions.trust(run).answer == "no"
    assert conclusions.status(run).key == "altered"


def test_changed_metrics_are_not_believed(tmp_path: Path) -> None:
    """The charts are drawn from the metrics: a change there is found as well."""
    healthy(tmp_path).end()
    metrics = tmp_path / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss":2.0', '"loss":1.0', 1))
    assert conclusions.trust(load(tmp_path)).answer == "no"


def test_an_error_of_the_program_is_the_state(tmp_path: Path) -> None:
    """A run that ended with an exception says which."""
    run = load(healthy(tmp_path).end(error="ValueError: bad row 17"))
    assert conclusions.status(run).key == "failed"
    assert "bad row 17" in conclusions.status(run).sentence
    assert not run.finished


def test_an_early_sign_of_a_loss_spike_is_named(tmp_path: Path) -> None:
    """The lead time of a spike is from the earliest sign since the loss was last well."""
    writer = RecordWriter(tmp_path)
    writer.row(0, 1.0, {"conv": 0.1})
    alarm(writer, 300, "old")
    alarm(writer, 420, "conv")
    channels(writer, 430, "conv", 16)
    writer.event("loss_spike", step=450, severity="warning", value=9.0, baseline=1.0)
    writer.event("loss_recovered", step=460, value=1.0, baseline=1.0)
    writer.event("loss_spike", step=470, severity="warning", value=9.0, baseline=1.0)
    first, second = load(writer.stop()).spikes.all()
    # The one at 300 is more than twenty checks before.
    assert (first.sign_step, first.recovered) == (420, 460)
    assert second.sign is None


def test_a_loss_that_does_not_come_back_is_said(tmp_path: Path) -> None:
    """An alarm that went away does not make good a loss spike that was never over."""
    writer = healthy(tmp_path)
    alarm(writer, 100, "conv")
    writer.event("alarm_cleared", step=110, layer="conv", diagnosis="no_gradient",
                 grad_norm=0.1, baseline=0.1)  # fmt: skip
    writer.event("loss_spike", step=110, severity="warning", value=9.0, baseline=1.0)
    status = conclusions.status(load(writer.stop()))
    assert (status.key, "step 110" in status.sentence) == ("unsettled", True)
    writer.event("loss_recovered", step=115, value=1.0, baseline=1.0)
    assert conclusions.status(load(writer.stop())).key == "cleared"


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({}, "has no repair"),
        ({"repair": False}, "watch only"),
        ({"repair": True}, "found no channel that it could"),
    ],
)
def test_what_was_not_repaired_is_not_called_well(
    tmp_path: Path, config: dict[str, object], said: str
) -> None:
    """Stuck channels that nobody repaired: why, as far as the record says."""
    writer = RecordWriter(tmp_path, config=config)
    writer.row(0, 1.0, {"conv": 0.1}, {"conv": [0, 0, 0, 0]})
    writer.row(5, 1.0, {"conv": 0.1}, {"conv": [4, 0, 0, 0]})
    told = {title: text for title, text, _ in sections(load(writer.end()))}
    assert said in told["What was done about it"][0]


def test_findings_of_rows_are_gathered(tmp_path: Path) -> None:
    """Findings that are no event of the format: alike ones become one, with a count."""
    writer = RecordWriter(tmp_path)
    for step in (0, 5, 10):
        finding = {"kind": "stale", "severity": "warning", "layer": "fc", "message": "m"}
        writer.row(step, 1.0, {"fc": 0.1}, findings=[finding, "no finding"])
    (found,) = load(writer.end()).findings
    assert (found.kind, found.layer, found.first, found.last, found.count) == (
        "stale",
        "fc",
        0,
        10,
        3,
    )


def test_a_record_without_checks_claims_nothing(tmp_path: Path) -> None:
    """No check means unknown, not healthy."""
    writer = RecordWriter(tmp_path)
    assert conclusions.status(load(writer.end())).key == "unknown"


def test_a_run_that_never_saw_a_gradient_was_not_monitored(tmp_path: Path) -> None:
    """Checks that saw no gradient at all know nothing."""
    writer = RecordWriter(tmp_path)
    writer.event("no_gradients", step=0, severity="warning", message="call step() after backward")
    writer.row(0, 1.0)
    assert conclusions.status(load(writer.end())).key == "blind"


def test_a_partly_watched_run_says_so(tmp_path: Path) -> None:
    """Where a filter left layers out, healthy holds for the rest only."""
    writer = RecordWriter(tmp_path)
    writer.manifest("fc", layers={"monitored": 1, "total": 4, "filter": ["fc"]})
    writer.row(0, 1.0, {"fc": 0.1})
    status = conclusions.status(load(writer.end()))
    assert status.key == "partial"
    assert "1 of 4" in status.sentence


def test_a_missing_record_is_a_clear_error(tmp_path: Path) -> None:
    """Where there is no diary, the error names what was looked for."""
    with pytest.raises(RecordError, match=r"diary\.jsonl"):
        load(tmp_path)


def test_a_pipe_in_place_of_the_diary_never_blocks(tmp_path: Path) -> None:
    """What is no regular file is refused at once."""
    os.mkfifo(tmp_path / "diary.jsonl")
    with pytest.raises(RecordError, match="regular"):
        load(tmp_path)


def test_missing_metrics_are_noted(tmp_path: Path) -> None:
    """A directory without metrics is still reported on, and says what is missing."""
    healthy(tmp_path).end()
    (tmp_path / "metrics.jsonl").unlink()
    run = load(tmp_path)
    assert run.metrics_reading is None
    assert any("metrics.jsonl" in note for note in run.notes)
    assert conclusions.trust(run).answer == "no"


def test_the_data_form_is_strict_json(tmp_path: Path) -> None:
    """What ``to_dict`` gives can be read by every JSON reader, NaN in the record or not."""
    writer = RecordWriter(tmp_path, config={"sigma": float("inf")})
    writer.raw_row('{"step":0,"loss":NaN,"grad":{"a":Infinity},"stuck":{}}')
    told = json.loads(json.dumps(to_dict(load(writer.end(1))), allow_nan=False))
    assert told["status"]["key"] == "broken"
    assert told["series"]["loss_low"] == [None]


def test_the_price_of_stuck_time_is_an_estimate(tmp_path: Path) -> None:
    """Hours stuck times GPUs times price, and only where a price was given."""
    run = load(lesioned(tmp_path, mend=True))
    told = to_dict(run, gpu_hour_cost=3.0, gpus=8)["cost"]
    assert told["estimate"] is True
    assert told["total"] == pytest.approx(run.seconds_stuck / 3600 * 8 * 3.0)
    assert to_dict(run)["cost"] is None
