"""Every tampered record is told apart from the record it was made of, and names its crime."""

from __future__ import annotations

import filecmp
import json
from pathlib import Path

import pytest

from cirron_otel.training_record.checking.verify import verify
from record.tampering import CRIMES, RECORDS, TAMPERED, commit

KEY = RECORDS / "signed" / "signer.pub.pem"


@pytest.mark.parametrize("name", sorted(path.name for path in TAMPERED.iterdir()))
def test_a_tampered_record_names_its_crime(name: str) -> None:
    """The checks that differ from the untouched record's say why (R-W1, R-W2, R-W11)."""
    run = TAMPERED / name
    expected = json.loads((run / "expected.json").read_text())
    key = KEY if expected["record"] == "signed" else None
    before = {c.name: c for c in verify(RECORDS / expected["record"], key=key).checks}
    after = {c.name: c for c in verify(run, key=key).checks}
    differing = {name: c.status for name, c in after.items() if c.status != before[name].status}
    wanted = {name: status for name, status in expected["checks"].items()
              if status != before[name].status}  # fmt: skip
    assert differing == wanted, [c for c in after.values() if c.status not in {"pass", "absent"}]
    for check, text in expected["says"].items():
        assert text in after[check].message


def test_the_tampered_records_are_those_of_the_list(tmp_path: Path) -> None:
    """The directory holds exactly what the script makes, so neither can drift from the other."""
    assert {path.name for path in TAMPERED.iterdir()} == set(CRIMES)
    for name in CRIMES:
        commit(name, tmp_path / name)
        same = filecmp.dircmp(tmp_path / name, TAMPERED / name)
        assert same.left_only + same.right_only + same.diff_files == [], name
