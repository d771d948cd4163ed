"""Heartbeats: log records that say where a program is."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import cirron_otel as ci
from delivery.otlp_server import attributes, http_receiver
from delivery.test_metrics import deliver, parcels, to
from helpers import read_spool


def beats() -> list[dict[str, Any]]:
    """The heartbeats in the spool, oldest first."""
    logs = [row for batch in read_spool().batches for row in (batch.logs or ())]
    return [row for row in logs if row["event_name"] == "cirron.heartbeat"]


def test_a_heartbeat_names_what_has_been_open_for_long(tmp_path: Path) -> None:
    """It lies in the innermost long scope, says how far the training is, and reaches a receiver."""
    ci.profile(frameworks=[], heartbeat=0.05, flush_interval=0.05)
    until = time.monotonic() + 60
    for _ in ci.epochs(range(1)):
        for _ in ci.batches(range(3)):
            with ci.scope("forward"):
                pass
        with ci.scope("evaluation") as evaluation:
            inside = len(beats())
            while len(beats()) < inside + 2 and time.monotonic() < until:
                ci.flush()
            trace_id, span_id = evaluation.trace.id, evaluation.id[:16]
    ci.shutdown()
    found = beats()[-1]
    epoch, session = read_spool().one("epoch"), read_spool().one("cirron.session")
    assert (found["severity_number"], found["severity_text"]) == (9, "INFO")
    assert (found["trace_id"], found["span_id"]) == (trace_id, span_id)
    said = found["attrs"]
    assert said["cirron.heartbeat.scopes"] == ["cirron.session", "epoch[0]", "evaluation"]
    assert said["cirron.heartbeat.span_ids"] == [session.id[:16], epoch.id[:16], span_id]
    assert said["cirron.heartbeat.open"] == sorted(said["cirron.heartbeat.open"], reverse=True)
    assert said["cirron.heartbeat.count"] == 3
    assert said["dl.iteration"] == 3
    assert found["body"].startswith("in evaluation for ")
    with http_receiver() as server:
        deliver(to(server), parcels(tmp_path / ".cirron"))
        (last,) = [one for one in server.logs() if one.time_unix_nano == found["ts_ns"]]
    assert last.event_name == "cirron.heartbeat"
    assert (last.trace_id.hex(), last.span_id.hex()) == (trace_id, span_id)
    names = attributes(last.attributes)["cirron.heartbeat.scopes"].values
    assert [one.string_value for one in names] == said["cirron.heartbeat.scopes"]


def test_without_heartbeats_there_is_none() -> None:
    """0 switches them off; and one that is not due is not written."""
    for seconds in (0, 3600):
        ci.profile(frameworks=[], heartbeat=seconds, flush_interval=0.05)
        with ci.scope("evaluation"):
            for _ in range(3):
                ci.flush()
        ci.shutdown()
    assert beats() == []
