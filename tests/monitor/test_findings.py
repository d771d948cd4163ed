"""A finding is told everywhere at once, and never harms the program."""

from __future__ import annotations

import json
import logging
import os
import threading
from pathlib import Path

import pytest

import cirron_otel as ci
from cirron_otel import recorder
from cirron_otel.findings import Finding, report
from helpers import read_spool

SPIKE = Finding("loss_spike", "warning", "the loss has jumped", "head", 7, {"value": 3.5})


def _report(finding: Finding) -> None:
    report(recorder._current, finding)


def test_a_finding_is_told_everywhere(caplog: pytest.LogCaptureFixture) -> None:
    """Mark, log record with trace context, health, log line and callback have one finding."""
    told: list[Finding] = []
    ci.profile(frameworks=[], on_finding=told.append)
    with ci.scope("work") as scope:
        _report(SPIKE)
    health = ci.health()["findings"]
    ci.shutdown()
    spool = read_spool()
    (mark,) = [found for found in spool.marks if found.name == "cirron.finding"]
    assert (mark.value, mark.span_id) == (SPIKE.message, scope.id)
    assert mark.attrs["cirron.finding.layer"] == "head"
    files = sorted(Path(".cirron/spool").glob("*.json"))
    (log,) = [row for file in files for row in json.loads(file.read_text()).get("logs", [])]
    assert (log["severity_text"], log["event_name"]) == ("WARN", "cirron.finding")
    assert log["span_id"] == scope.id[:16]
    assert log["attrs"] == {
        "value": 3.5,
        "cirron.finding.kind": "loss_spike",
        "cirron.finding.severity": "warning",
        "cirron.finding.layer": "head",
        "cirron.finding.step": 7,
    }
    assert (health["count"], health["by_kind"]) == (1, {"loss_spike": 1})
    assert health["recent"][0]["message"] == SPIKE.message
    assert told == [SPIKE]
    assert "warning: the loss has jumped (step 7)" in caplog.text


def test_the_log_has_a_line_once_a_kind_and_layer(caplog: pytest.LogCaptureFixture) -> None:
    """The same finding of the same layer is counted again and not logged again."""
    ci.profile(frameworks=[])
    for layer in ("a", "a", "b"):
        _report(Finding("dead", "critical", f"layer {layer} is dead", layer))
    lines = [record for record in caplog.records if "is dead" in record.message]
    assert [line.levelno for line in lines] == [logging.ERROR, logging.ERROR]
    assert ci.health()["findings"]["by_severity"] == {"info": 0, "warning": 0, "critical": 3}


def test_a_callback_that_raises_keeps_nobody_from_knowing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The error of one function is logged, the next function is called, the program goes on."""
    told: list[Finding] = []

    def fails(_finding: Finding) -> None:
        raise ValueError("no network")

    ci.profile(frameworks=[], on_finding=[fails, told.append])
    _report(SPIKE)
    assert told == [SPIKE]
    assert "no network" in caplog.text


def test_recent_findings_are_bounded_and_kept_from_any_thread() -> None:
    """A thousand findings from four threads are all counted; the newest hundred are kept."""
    ci.profile(frameworks=[])

    def many() -> None:
        for number in range(250):
            _report(Finding("k", "info", str(number)))

    threads = [threading.Thread(target=many) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    health = ci.health()["findings"]
    assert (health["count"], len(health["recent"])) == (1000, 100)


def test_without_a_recording_a_finding_is_a_line(caplog: pytest.LogCaptureFixture) -> None:
    """What is found while nothing is recorded is logged, and nothing fails."""
    report(None, SPIKE)
    assert "the loss has jumped" in caplog.text
    assert ci.health()["findings"]["count"] == 0


@pytest.mark.parametrize("given", [3, ["x"], {"a": 1}])
def test_what_cannot_be_called_is_refused(given: object) -> None:
    """profile() says so before it has any effect."""
    with pytest.raises(ci.ConfigurationError, match="on_finding"):
        ci.profile(frameworks=[], on_finding=given)
    assert not ci.health()["enabled"]


def test_a_forked_child_begins_anew() -> None:
    """The parent's findings are not the child's."""
    ci.profile(frameworks=[])
    _report(SPIKE)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        found = recorder._current.findings.health()["count"]  # type: ignore[union-attr]
        os.write(write, str(found).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(read, 9) == b"0"
    os.close(read)
    os.close(write)
