"""Reports of real records: another writer's, crashed ones, tampered ones, and our own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cirron_otel.training_record.comparing.diff import diff
from cirron_otel.training_record.recovering.recovery import recover
from cirron_otel.training_record.report import conclusions, html, load, markdown, summary, to_dict
from cirron_otel.training_record.report.show import lines, rows
from cirron_otel.training_record.writing.journal import Journal
from journal_records import START
from record_by_hand import CONFIG

FORMATS = Path(__file__).parent.parent / "formats"
RECORDS = FORMATS / "records"
TAMPERED = sorted(place for place in (FORMATS / "tampered").iterdir() if place.is_dir())

#: Record, how it went, whether it can be believed.
STATES = [
    ("bn_eval_false_certificate", "unrepaired", "partly"),
    ("exception", "failed", "partly"),
    ("gradscaler", "healthy", "partly"),
    ("healthy", "healthy", "partly"),
    ("kill9", "unrepaired", "partly"),
    ("lesion_repair", "repaired", "partly"),
    ("lesion_watch", "unrepaired", "partly"),
    ("momentum_refused", "cleared", "partly"),
    ("nan_loss", "broken", "partly"),
    ("signed", "repaired", "partly"),
    ("sink_error", "warnings", "partly"),
    ("sink_error_after_run_end", "altered", "no"),
    ("two_optimizers_false_certificate", "cleared", "partly"),
    ("v0_1_fixture/v0_1_cifar10_with_repair.diary.jsonl", "repaired", "partly"),
]


@pytest.mark.parametrize(("name", "status", "trust"), STATES)
def test_a_real_record_comes_to_its_conclusion(name: str, status: str, trust: str) -> None:
    """Each record of the other writer is read, and judged as a person would judge it."""
    run = load(RECORDS / name)
    assert (conclusions.status(run).key, conclusions.trust(run).answer) == (status, trust)
    assert run.notes == []
    for told in (html(run), summary(run), markdown(run)):
        assert conclusions.status(run).title in told


def test_a_signature_with_its_key_is_believed() -> None:
    """With the signer's key the answer is yes; with another key it is no."""
    record = RECORDS / "signed"
    assert conclusions.trust(load(record, key=record / "signer.pub.pem")).answer == "yes"
    stranger = conclusions.trust(load(record, key=bytes(32)))
    assert stranger.answer == "no"
    assert "signature" in stranger.meaning


def test_a_key_without_a_signature_is_not_believed() -> None:
    """Who asks for a signature is not told that all is well without one."""
    key = RECORDS / "signed" / "signer.pub.pem"
    assert conclusions.trust(load(RECORDS / "healthy", key=key)).answer == "no"


@pytest.mark.parametrize("place", TAMPERED, ids=lambda place: place.name)
def test_a_tampered_record_is_reported_on(place: Path) -> None:
    """Reports come of every tampered record, and lead with what verification says."""
    diary = place / "diary.jsonl"
    record = place if diary.exists() else next(place.glob("*.jsonl"))
    run = load(record)
    json.dumps(to_dict(run), allow_nan=False)
    failed = run.verdict["ok"] is False
    crashed = run.end is None and conclusions.trust(run).answer == "partly"
    assert ("The record does not verify" in html(run)) == (failed and not crashed)
    assert list(lines(rows(record)))
    found = diff(RECORDS / "healthy", record)
    assert (found.verdict == "unverified") == (failed and not crashed)


def journal(directory: Path) -> Journal:
    """Our own writer with a few checks behind it."""
    writer = Journal(directory, name="ours", run_start={**START, "config": CONFIG}, signals=False)
    for step in (0, 5, 10):
        writer.check(step, 2.0 - 0.01 * step, {"fc": 0.1}, {"fc": [0, 0, 0, 0]})
        writer.steps = step + 1
    return writer


def test_our_own_record_is_read(tmp_path: Path) -> None:
    """What the journal writes is verified and shown, its extra fields too."""
    journal(tmp_path).close()
    run = load(tmp_path)
    assert run.verdict["ok"] is True
    assert conclusions.status(run).key == "healthy"
    assert run.checks == 3
    assert str(run.start["run_id"]) in html(run)


def test_our_own_nonfinite_loss_is_read(tmp_path: Path) -> None:
    """The journal writes null and says what it was; the report finds it."""
    writer = journal(tmp_path)
    writer.append("nonfinite_loss", step=15, severity="critical", value="nan")
    writer.check(15, float("nan"), {"fc": 0.1}, {})
    writer.steps = 16
    writer.close()
    run = load(tmp_path)
    assert conclusions.status(run).key == "broken"
    assert run.loss.first_nonfinite == 15


def test_a_recovered_record_says_that_it_was_interrupted(tmp_path: Path) -> None:
    """A crash that was recovered is no run that came to its end."""
    writer = journal(tmp_path / "whole")
    crashed = tmp_path / "crashed"
    crashed.mkdir()
    for name in ("diary.jsonl", "metrics.jsonl"):
        (crashed / name).write_bytes((tmp_path / "whole" / name).read_bytes() + b'{"step":')
    writer.close()
    before = load(crashed)
    assert conclusions.trust(before).answer == "partly"
    assert before.end is None
    recover(crashed)
    run = load(crashed)
    assert run.verdict["ok"] is True
    assert run.interrupted
    assert "The run was interrupted" in html(run)
    assert diff(tmp_path / "whole", crashed).regressions[0].kind == "unfinished"
