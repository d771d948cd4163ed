"""Records that go on from others: the verifier follows them, and sees where one was changed."""

from __future__ import annotations

from pathlib import Path

import pytest

from cirron_otel.training_record.chain import DIARY
from cirron_otel.training_record.checking.verify import verify
from record.tampering import read, rewrite, texts, write_texts
from record.writing import write


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Three segments: one that ended, one that was cut short, one that goes on from both."""
    run = tmp_path / "run"
    write(run, 20)
    write(run, 12, append=True)
    write(run, 15, append=True)
    return run


def test_all_segments_are_followed(run: Path) -> None:
    """Each segment names the head of the one before it, and that is where it ends."""
    assert verify(run).check("previous").status == "pass"
    assert verify(run / "previous-2").check("previous").status == "pass"
    assert verify(run / "previous-1").check("previous").status == "absent"
    assert verify(run).ok


def test_a_changed_segment_is_seen_from_the_next(run: Path) -> None:
    """A segment rewritten whole no longer ends in the head that the next one names."""
    events = read(run / "previous-2")
    events[0]["name"] = "another"
    rewrite(run / "previous-2", events)
    check = verify(run).check("previous")
    assert check.status == "fail"
    assert "does not end in the head" in check.message


def test_a_segment_further_back_is_seen_from_the_last(run: Path) -> None:
    """What is wrong with the first segment makes the second fail, and that the third."""
    path = run / "previous-1" / DIARY
    path.write_bytes(path.read_bytes().replace(b'"name":"run"', b'"name":"fun"'))
    check = verify(run).check("previous")
    assert check.status == "fail"
    assert check.message == "previous-2 fails previous"


def test_a_segment_that_is_gone_is_absent(run: Path) -> None:
    """A record whose predecessor was moved away is none the worse; it is said."""
    (run / "previous-2").rename(run.parent / "elsewhere")
    assert verify(run).check("previous").status == "absent"
    assert verify(run).ok


def test_a_link_is_not_followed(run: Path) -> None:
    """A link in the place of the older record, which might lead in circles, counts for nothing."""
    (run / "previous-2").rename(run.parent / "elsewhere")
    (run / "previous-2").symlink_to(".")
    assert verify(run).check("previous").status == "absent"


def test_a_record_that_replaced_another_does_not_answer_for_it(tmp_path: Path) -> None:
    """Only segments must be good; a record that was set aside may be of a run that crashed."""
    run = tmp_path / "run"
    write(run, 5)
    write_texts(run, texts(run)[:-1])
    write(run, 5, overwrite=True)
    assert not verify(run / "previous-1").ok
    assert verify(run).check("previous").status == "pass"
    assert verify(run).ok
