"""The example verifier, made from the format's page alone, comes to our verdicts."""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from cirron_otel.training_record.checking.verify import FORMAT_CHECKS, verify
from cirron_otel.training_record.events import COMMON, EVENTS
from cirron_otel.training_record.seal import sign
from cirron_otel.training_record.signing import keygen, load_private_key, load_public_key
from cirron_otel.training_record.writing.journal import Journal
from journal_records import ALARM, START
from record.tampering import RECORDS, TAMPERED

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "verify_record.py"
PAGE = ROOT / "docs" / "formats" / "training-record-v1.md"
KEY = RECORDS / "signed" / "signer.pub.pem"
#: What only a verifier finds that counts, orders or recomputes events; the example does not.
DEEPER = {"steps", "totals", "rows", "replay", "seal_details", "digests"}


@pytest.fixture(scope="module")
def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("verify_record", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _found(case: Path) -> Path:
    return next(iter(case.glob("*.diary.jsonl")), case)


@pytest.mark.parametrize(
    "case", sorted(p.parent.name for p in RECORDS.glob("*/expected_verify.json"))
)
def test_real_records(case: str, example: ModuleType) -> None:
    """All nine statuses and the verdict, of every real record, with a key where there is one."""
    place = _found(RECORDS / case)
    for key in (None, KEY):
        ours = verify(place, key=key)
        theirs = example.verify(place, None if key is None else load_public_key(key))
        assert {name: theirs[name][0] for name in FORMAT_CHECKS} == {
            name: ours.check(name).status for name in FORMAT_CHECKS
        }
        assert all(status != "fail" for status, _ in theirs.values()) is ours.ok


@pytest.mark.parametrize("crime", sorted(path.name for path in TAMPERED.iterdir()))
def test_changed_records(crime: str, example: ModuleType) -> None:
    """The nine statuses of every changed record; its verdict too, unless it takes a deeper look."""
    ours, theirs = verify(TAMPERED / crime), example.verify(TAMPERED / crime)
    assert {name: theirs[name][0] for name in FORMAT_CHECKS} == {
        name: ours.check(name).status for name in FORMAT_CHECKS
    }
    failed = {check.name for check in ours.checks if check.status == "fail"}
    if not failed or failed - DEEPER:
        assert all(status != "fail" for status, _ in theirs.values()) is ours.ok


def test_our_own_records(tmp_path: Path, example: ModuleType) -> None:
    """A record of ours, signed, passes everything; one changed digest fails."""
    with Journal(tmp_path / "run", run_start=START, signals=False) as journal:
        for step in range(3):
            journal.check(step, 0.5, {"conv1": 1.0}, {"conv1": [0, 0, 0, 0]})
        journal.append("alarm", **{**ALARM, "step": 2})
    keygen(tmp_path / "k", tmp_path / "k.pub")
    sign(tmp_path / "run", load_private_key(tmp_path / "k"))
    results = example.verify(tmp_path / "run", example.load_key(tmp_path / "k.pub"))
    assert {status for status, _ in results.values()} == {"pass"}, results
    rows = (tmp_path / "run" / "metrics.jsonl").read_text().replace("0.5", "0.4", 1)
    (tmp_path / "run" / "metrics.jsonl").write_text(rows)
    results = example.verify(tmp_path / "run")
    assert {results[name][0] for name in ("digests", "metrics", "seal")} == {"fail"}


def test_it_runs_by_itself(tmp_path: Path) -> None:
    """As a program without this library: statuses 0, 1 and 2."""
    assert "cirron" not in {
        name.split(".")[0].partition("_")[0]
        for node in ast.walk(ast.parse(EXAMPLE.read_text()))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for name in ([getattr(node, "module", None) or ""] + [item.name for item in node.names])
    }
    bad = Path(shutil.copytree(RECORDS / "signed", tmp_path / "bad"))
    (bad / "metrics.jsonl").write_bytes(b"")
    for words, status in (
        ([RECORDS / "signed", KEY], 0),
        ([bad], 1),
        ([tmp_path / "none"], 2),
        ([RECORDS / "signed", EXAMPLE], 2),
        ([], 2),
    ):
        done = subprocess.run(
            [sys.executable, "-I", EXAMPLE, *words], capture_output=True, text=True, timeout=60,
            check=False,
        )  # fmt: skip
        assert (done.returncode, done.stderr) == (status, ""), done.stdout


def test_the_page_has_every_event_and_field() -> None:
    """The table of the page is that of the code."""
    table = {}
    text = PAGE.read_text()
    section = text[text.index("### Events") : text.index("## Metrics")]
    for line in section.splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if len(cells) == 3 and any(f"`{name}`" in cells[0] for name in EVENTS):
            for name in cells[0].split(", "):
                table[name.strip("`")] = {field.strip("`") for field in cells[1].split()}
    assert table == {name: set(form.required) for name, form in EVENTS.items()}
    assert [name for name in COMMON if f"| `{name}` |" not in text] == []
    assert [name for name in FORMAT_CHECKS if f"| `{name}` |" not in text] == []
    own = {check.name for check in verify(RECORDS / "healthy").checks} - set(FORMAT_CHECKS)
    assert [name for name in own if f"`{name}`" not in text] == []


def test_the_page_has_every_field_we_write(tmp_path: Path) -> None:
    """Each field of a line or row of ours stands on the page."""
    with Journal(
        tmp_path, run_start=START, signals=False, trace=lambda: ("1" * 32, "2" * 16)
    ) as it:
        it.check(0, float("nan"), {"a": float("inf")}, {}, findings=[{"kind": "x"}])
        it.append("alarm", **ALARM)
        it.close(ValueError("x"))
    names = set()
    for path in tmp_path.glob("*.jsonl"):
        for line in path.read_text().splitlines():
            names |= json.loads(line).keys()
    text = PAGE.read_text()
    assert {"metrics_digest", "nonfinite", "ended_by", "trace_id"} <= names
    assert sorted(name for name in names if f"`{name}`" not in text) == []


def test_the_example_of_a_run(tmp_path: Path) -> None:
    """The example trains, and its record verifies with its key, ours and the example's verifier."""
    done = subprocess.run(
        [sys.executable, ROOT / "examples" / "record_a_run.py", tmp_path / "run"],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
        env={**os.environ, "PYTHONUTF8": "1"},
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    key = tmp_path / "run" / "signing.pub.pem"
    verdict = verify(tmp_path / "run", key=key, strict=True)
    assert verdict.passed
    assert verdict.check("replay").status == "pass"
    assert "loss spike" in done.stdout
    assert (tmp_path / "run" / "report.html").read_text().startswith("<!")
    verifier = subprocess.run(
        [sys.executable, EXAMPLE, tmp_path / "run", key], capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert verifier.returncode == 0
