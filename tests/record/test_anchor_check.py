"""Anchors kept elsewhere: a cut or rewritten record does not fit them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from cirron_otel import semconv
from cirron_otel.errors import RecordError
from cirron_otel.training_record.chain import METRICS
from cirron_otel.training_record.checking.anchors import Anchor, load
from cirron_otel.training_record.checking.verify import verify
from cirron_otel.training_record.writing import journal as journals
from record.tampering import read, rewrite, rewrite_rows, texts, write_texts
from record.writing import write


@pytest.fixture
def kept() -> list[journals.Anchor]:
    """What the record's anchors are put into."""
    return []


@pytest.fixture
def run(tmp_path: Path, kept: list[journals.Anchor]) -> Path:
    """A finished record whose anchors are in ``kept``."""
    write(tmp_path / "run", on_anchor=kept.append)
    return tmp_path / "run"


def attributes(anchor: journals.Anchor) -> dict[str, Any]:
    """An anchor's attributes."""
    return {
        semconv.RECORD_RUN_ID: anchor.run_id,
        semconv.RECORD_SEQ: anchor.seq,
        semconv.RECORD_HASH: anchor.hash,
        semconv.RECORD_METRICS_DIGEST: anchor.metrics_digest,
    }


def otlp(anchors: list[journals.Anchor]) -> dict[str, Any]:
    """Anchors as log records in OTLP JSON, 64-bit integers as text."""
    records = [
        {
            "timeUnixNano": str(anchor.time_ns),
            "attributes": [
                {"key": k, "value": {"intValue": str(v)} if type(v) is int else {"stringValue": v}}
                for k, v in attributes(anchor).items()
            ],
        }
        for anchor in anchors
    ]
    return {"resourceLogs": [{"resource": {}, "scopeLogs": [{"logRecords": records}]}]}


@pytest.fixture
def export(tmp_path: Path, run: Path, kept: list[journals.Anchor]) -> Path:
    """A collector's export: one document a line."""
    assert run.exists()
    path = tmp_path / "logs.jsonl"
    path.write_text("".join(json.dumps(otlp([anchor])) + "\n" for anchor in kept))
    return path


def test_a_record_fits_its_anchors(run: Path, export: Path) -> None:
    """All anchors fit, and the last one is the head."""
    verdict = verify(run, anchors=export)
    assert verdict.ok
    assert verdict.check("anchors").status == "pass"
    assert verdict.check("anchors").message.endswith("the diary's last line")


def test_a_cut_end_names_the_anchor(run: Path, export: Path) -> None:
    """A diary cut to a whole line fails, and the anchor behind its end is named."""
    write_texts(run, texts(run)[:3])
    message = verify(run, anchors=export).check("anchors").message
    assert "anchor seq 3 in logs.jsonl" in message
    assert "its end was cut off" in message


def test_a_record_that_was_ended_early_and_rewritten_fails(run: Path, export: Path) -> None:
    """A whole new chain over changed events is consistent, and does not fit the anchors."""
    events = read(run)
    events[0]["name"] = "another"
    rewrite(run, events)
    verdict = verify(run, anchors=export)
    assert [check.name for check in verdict.checks if check.status == "fail"] == ["anchors"]
    assert "anchor seq 0" in verdict.check("anchors").message
    assert "was rewritten" in verdict.check("anchors").message


def test_a_record_under_another_name_has_no_anchors(run: Path, export: Path) -> None:
    """A new run id does not help: whoever asks for anchors gets a failure where there are none."""
    events = read(run)
    events[0]["run_id"] = events[-1]["run_id"] = "0" * 32
    rewrite(run, events)
    check = verify(run, anchors=export).check("anchors")
    assert check.status == "fail"
    assert "is of run 0000" in check.message


def test_rewritten_rows_do_not_fit_the_anchors(
    run: Path, kept: list[journals.Anchor], export: Path
) -> None:
    """Rows rewritten together with all digests and hashes are not those the anchors know."""
    lines = [json.loads(line) for line in (run / METRICS).read_text().splitlines()]
    for line in lines:
        del line["digest"]
    lines[-1]["loss"] = 2.02
    rewrite(run, [{k: v for k, v in e.items() if k != "metrics_digest"} for e in read(run)])
    rewrite_rows(run, [json.dumps(line) for line in lines])
    assert verify(run).ok
    head = [Anchor(a.run_id, e["seq"], e["hash"], a.metrics_digest, "here")
            for a in kept for e in read(run) if e["seq"] == a.seq]  # fmt: skip
    check = verify(run, anchors=head).check("anchors")
    assert check.status == "fail"
    assert "metrics.jsonl is not what it was then" in check.message
    assert verify(run, anchors=export).check("anchors").status == "fail"


def test_lines_behind_the_last_anchor_are_counted(run: Path, kept: list[journals.Anchor]) -> None:
    """What no anchor covers is said."""
    few = [Anchor(a.run_id, a.seq, a.hash, a.metrics_digest, "here") for a in kept if a.seq <= 2]
    check = verify(run, anchors=few).check("anchors")
    assert check.status == "pass"
    assert f"no anchor covers the {verify(run).events - 3} lines after it" in check.message


def test_anchors_are_found_in_a_document_a_spool_and_spans(
    tmp_path: Path, run: Path, kept: list[journals.Anchor]
) -> None:
    """One document, spool batches with logs or span attributes: all hold the same anchors."""
    (tmp_path / "one.json").write_text(json.dumps(otlp(kept), indent=2))
    spool = tmp_path / "out" / "spool"
    spool.mkdir(parents=True)
    for index, anchor in enumerate(kept):
        row = {"attributes": attributes(anchor)} if index % 2 else {}
        span = {} if index % 2 else {"attrs": attributes(anchor)}
        (spool / f"{index:05}.json").write_text(json.dumps({"logs": [row], "spans": [span]}))
    for source in (tmp_path / "one.json", spool, tmp_path / "out"):
        assert {a.hash for a in load(source)} == {a.hash for a in kept}
        assert verify(run, anchors=source).ok


class Answer(BaseHTTPRequestHandler):
    """Answers with what the server holds."""

    def do_GET(self) -> None:
        """Anchors at /v1/logs, 404 elsewhere."""
        body = self.server.body if self.path == "/v1/logs" else b""  # type: ignore[attr-defined]
        self.send_response(200 if body else 404)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_args: object) -> None:
        """Say nothing."""


@pytest.fixture
def url(run: Path, kept: list[journals.Anchor]) -> Iterator[str]:
    """A server that has the anchors."""
    assert run.exists()
    with HTTPServer(("127.0.0.1", 0), Answer) as server:
        server.body = json.dumps(otlp(kept)).encode()  # type: ignore[attr-defined]
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_anchors_come_from_a_server(run: Path, url: str) -> None:
    """An address that answers with OTLP JSON is as good as a file; another answer is an error."""
    assert verify(run, anchors=f"{url}/v1/logs").ok
    with pytest.raises(RecordError, match="answered 404"):
        verify(run, anchors=f"{url}/elsewhere")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nothing", "no OTLP JSON"),
        ("[" * 100_000, "no OTLP JSON"),
        ('{"attributes": {"cirron.record.hash": "x", "cirron.record.seq": 1}}', "no hash"),
        ('{"attrs": {"cirron.record.hash": "x", "cirron.record.seq": []}}', "no number"),
    ],
)
def test_what_holds_no_anchors_is_an_error(tmp_path: Path, text: str, error: str) -> None:
    """A file that is something else says so instead of passing for one without anchors."""
    path = tmp_path / "export.json"
    path.write_text(text)
    with pytest.raises(RecordError, match=error):
        load(path)


def test_a_place_that_is_none_is_an_error(tmp_path: Path) -> None:
    """A missing file, an empty directory and a dead address are errors."""
    for source in (tmp_path / "none.json", tmp_path, "http://127.0.0.1:9/v1/logs"):
        with pytest.raises(RecordError):
            load(source)


def test_an_export_without_anchors_fails(tmp_path: Path, run: Path) -> None:
    """Anchors were asked for: none found is a failure, not a pass."""
    path = tmp_path / "export.json"
    path.write_text('{"resourceLogs": []}')
    check = verify(run, anchors=path).check("anchors")
    assert check.status == "fail"
    assert check.message == "no anchor was found there"
