"""A record as lines for a terminal."""

from __future__ import annotations

import os
from pathlib import Path
from textwrap import dedent

import pytest

from cirron_otel.errors import RecordError
from cirron_otel.training_record.report.show import HEADS, heading, lines, rows
from record_by_hand import RecordWriter, lesioned


def test_a_record_is_shown_aligned(tmp_path: Path) -> None:
    """Each event is a line with the same columns."""
    shown = "\n".join(lines(rows(lesioned(tmp_path, mend=True), since_step=50)))
    expected = """
       seq  time           step  severity  event                layer                     what
         3  3.0s             50  warning   stuck channels       conv                      16 proven dead of 16 channels
         4  4.0s             55  warning   alarm                conv                      no gradient: norm 0, usual 0.1
         5  5.0s             60  action    repair               conv                      16 channels re-initialised; the weight changed by 0.5 of its norm
         6  6.0s             65  info      alarm cleared        conv                      back in range after no gradient: norm 0.1, usual 0.1
         7  7.0s             65  info      channels cleared     conv                      all 16 channels are free again
    """  # noqa: E501 - the lines as they are
    assert dedent(shown) == dedent(expected).strip("\n")


def test_only_what_was_asked_for(tmp_path: Path) -> None:
    """By type, severity and layer; together they narrow."""
    record = lesioned(tmp_path, mend=True)
    assert [row.event for row in rows(record, events={"alarm", "repair"})] == ["alarm", "repair"]
    assert {row.severity for row in rows(record, severities={"action"})} == {"action"}
    assert list(rows(record, layer="fc")) == []
    assert len(list(rows(record, layer="con", severities={"warning"}))) == 2


def test_each_row_has_every_column(tmp_path: Path) -> None:
    """Who prints with colour gets the cells one by one."""
    for row in rows(lesioned(tmp_path, mend=True)):
        assert len(row.cells) == len(HEADS)
    assert dict(heading(tmp_path))["model"].startswith("Sequential")


def test_nothing_of_a_record_steers_the_terminal(tmp_path: Path) -> None:
    """Control characters, line breaks and direction marks of a record do not come through."""
    hostile = "x\x1b[31m\r\n\u202e\u2028y"
    writer = RecordWriter(tmp_path, name=hostile, tool=hostile)
    writer.event(hostile, layer=hostile, severity=hostile, text=hostile)
    writer.event("sink_error", sink=hostile, error=hostile)
    shown = list(lines(rows(writer.stop())))
    assert len(shown) == 4
    told = "".join(shown) + "".join(value for _, value in heading(tmp_path))
    for char in "\x1b\r\n\u202e\u2028":
        assert char not in told


def test_a_half_written_line_is_told(tmp_path: Path) -> None:
    """What a crash left is said at the end, and what came before it is shown."""
    shown = list(lines(rows(RecordWriter(tmp_path).stop('{"seq": 1'))))
    assert "run started" in shown[1]
    assert "half written" in shown[-1]


def test_a_missing_record_is_an_error_before_the_first_row(tmp_path: Path) -> None:
    """The error comes from the call, so that nothing is printed before it."""
    with pytest.raises(RecordError, match=r"diary\.jsonl"):
        rows(tmp_path)


def test_rows_come_as_the_file_is_read(tmp_path: Path) -> None:
    """The first row is there before the rest is read: a long record needs no memory."""
    record = RecordWriter(tmp_path).stop()
    with (record / "diary.jsonl").open("ab") as file:
        # As good as endless: a sparse gigabyte of one line that nobody may read in whole.
        os.truncate(file.fileno(), 1 << 30)
    first = next(iter(rows(record)))
    assert first.event == "run_start"
