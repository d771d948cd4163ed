"""Reading lines: the fast way and the slow way are one, whatever the lines hold."""

from __future__ import annotations

import io
import json
import os
import tracemalloc
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cirron_otel.training_record.checking import reader
from cirron_otel.training_record.checking.reader import (
    Line,
    NotRegularError,
    is_blank,
    open_regular,
    read_lines,
    slow,
)
from record.json_values import spelled_lines


def read(data: bytes, *, floats: bool = False, pure: bool = False) -> list[Line]:
    """All lines of a file with these bytes; ``pure``: as where nothing was compiled."""
    with pytest.MonkeyPatch.context() as patch:
        if pure:
            patch.setattr(reader, "compiled", None)
        return list(read_lines(cast("Any", io.BytesIO(data)), floats=floats))


WAYS = [(False, False), (True, False), (False, True)]


@given(lines=st.lists(spelled_lines(), max_size=6), ended=st.booleans(), way=st.sampled_from(WAYS))
@example(lines=[b'{"a": 1, "a": 1.0e1}'], ended=True, way=WAYS[2])
@example(lines=[b'{"a": ", ", "b": ": "}', b'{"a":1,\n"b":2}'], ended=True, way=WAYS[2])
@example(lines=[b'{"a": 1}, {"b": 2}', b"", b'{"c": 3}'], ended=True, way=WAYS[2])
@example(lines=['{"a": "\u00e9"}'.encode(), b'{"a": "\x7f"}'], ended=True, way=WAYS[2])
@example(lines=[b'{"t": 0.00001}', b'{"t": 1e-05}', b'{"t": 1e-5}'], ended=True, way=WAYS[1])
def test_the_fast_way_gives_what_the_slow_way_gives(
    lines: list[bytes], *, ended: bool, way: tuple[bool, bool]
) -> None:
    """Every line has the value and the flaws that reading it alone gives."""
    floats, pure = way
    data = b"\n".join(lines) + (b"\n" if ended else b"")
    raws = data.split(b"\n")
    found = {line.number: line for line in read(data, floats=floats, pure=pure)}
    for number, raw in enumerate(raws, 1):
        line = found.pop(number, None)
        if line is None:
            assert number == len(raws)
            assert not raw.strip()
            continue
        assert line.raw == raw
        if is_blank(line):
            assert not raw.strip()
            continue
        value, flaws = slow(raw)
        if number == len(raws):
            flaws = flaws._replace(unended=True)
        if line.flaws is None:
            assert flaws == reader.Flaws()
            assert repr(line.value) == repr(value)
        else:
            assert line.flaws == flaws
            assert repr(line.value) == repr(value)
    assert not found


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1))
def test_numbers_as_python_writes_them_are_read_the_fast_way(numbers: list[float]) -> None:
    """No float that Python's repr prints sends its line the slow way."""
    data = json.dumps({"x": numbers}).encode() + b"\n"
    for pure in (False, True):
        line = read(data, pure=pure)[0]
        assert line.flaws is None
        assert line.value == {"x": numbers}


@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b"[1]", "holds a list where an object must be"),
        (b"7", "holds a number where an object must be"),
        (b'"x"', "holds a text where an object must be"),
        (b"null", "holds null where an object must be"),
        (b'{"a": 1', "is no JSON"),
        (b"\xef\xbb\xbf{}", "is no JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "holds an integer that is too long"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "is nested too deep"),
        (b'{"a":' * 50_000 + b"1" + b"}" * 50_000, "is nested too deep"),
    ],
)
def test_a_line_that_is_no_object_says_why(line: bytes, error: str) -> None:
    """What cannot be read is an error of that line, and the next line is read as ever."""
    first, second = read(line + b'\n{"b": 2}\n')
    assert first.flaws is not None
    assert error in str(first.flaws.error)
    assert second.value == {"b": 2}


def test_bytes_that_are_no_text_are_read_and_noted() -> None:
    """Invalid UTF-8 is replaced, as every reader of the format does, and said."""
    (line,) = read(b'{"a": "\xff"}\n')
    assert line.value == {"a": "\ufffd"}
    assert line.flaws is not None
    assert line.flaws.spelling == "bytes that are no UTF-8"


def test_lines_may_end_as_on_windows() -> None:
    """A carriage return before the line end is no flaw."""
    for line in read(b'{"a": 1}\r\n{"a": 2}\r\n'):
        assert line.flaws == reader.Flaws()


def test_a_line_without_end_is_passed_over_in_little_memory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A line over the limit is an error, costs no more than the limit, and ends at its end."""
    monkeypatch.setattr(reader, "MAX_LINE", 1 << 20)
    path = tmp_path / "long"
    path.write_bytes(b'{"a": "' + b"x" * (8 << 20) + b'"}\n{"b": 1}\n' + b"y" * (3 << 20))
    tracemalloc.start()
    try:
        with open_regular(path) as file:
            lines = [(line.value, line.flaws) for line in read_lines(file)]
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [value for value, _ in lines] == [{}, {"b": 1}, {}]
    assert [bool(flaws and flaws.error) for _, flaws in lines] == [True, False, True]
    assert peak < 4 << 20


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A pipe does not make the reader wait, and neither it nor a link or directory is opened."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "file").write_text("x")
    (tmp_path / "link").symlink_to("file")
    for name in ("pipe", "link", "."):
        with pytest.raises(NotRegularError):
            open_regular(tmp_path / name)
    with open_regular(tmp_path / "link", follow=True) as file:
        assert file.read() == b"x"
