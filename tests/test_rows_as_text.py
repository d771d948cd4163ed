"""Rows that the compiled hot path writes as text: the same rows, in order, counted and bounded."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from msgspec import UNSET, json, structs

import cirron_otel as ci
from cirron_otel import batching, core, ids, recorder, semconv
from cirron_otel.batch import MarkRecord, SpanRecord, encode_rows
from cirron_otel.batching import Batcher
from cirron_otel.recorder import Recorder
from helpers import RunProgram, read_spool

pytestmark = pytest.mark.skipif(not core.COMPILED, reason="the compiled hot path was not built")

#: Hypothesis draws inside one recording: it is the same for every example.
RECORDING = settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])

TEXT = st.text(max_size=40) | st.text(st.characters(codec="ascii"), max_size=40)
PLAIN = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=30)
)


@pytest.fixture
def rec() -> Recorder:
    """A recorder whose flush thread does not come by itself; its first rows are written."""
    ci.profile(frameworks=[], flush_interval=3600)
    with ci.scope("warm"):
        ci.mark("warm", 1)
    assert ci.flush()
    made = recorder._current
    assert made is not None
    return made


def taken(batcher: Batcher, name: str) -> list[Any]:
    """What waits in a queue, as it is, taken out of it."""
    text = batcher._text[name]
    text.close()
    queue = getattr(batcher, name)
    items = [queue.popleft() for _ in range(len(queue))]
    for item in items:
        if not isinstance(item, SpanRecord | MarkRecord):
            text.took(item)
    assert (text.rows, text.blocks, text.bytes, len(queue)) == (0, 0, 0, 0)
    return items


def written(batcher: Batcher, name: str, rows: int = 1) -> bytes:
    """The one block of text that waits in a queue."""
    (block,) = taken(batcher, name)
    assert block.rows == rows
    return bytes(block)


@RECORDING
@given(
    name=TEXT.filter(lambda name: "\0" not in name),
    attrs=st.dictionaries(st.text(st.characters(codec="ascii", exclude_characters="\0")), PLAIN),
    index=st.none() | st.integers(-(2**63), 2**63 - 1),
    marks=st.integers(0, 5),
)
@example(name='"\\/\b\f\n\r\t\x1f\x7f\u2028\U0001f600', attrs={'"\\': "\x01"}, index=-1, marks=1)
@example(name="x" * 1024, attrs={"f": 5e-324, "g": 1e16, "h": -0.0}, index=2**63 - 1, marks=3)
@example(name="", attrs={}, index=None, marks=0)
@example(name="8", attrs={str(n): n / 8 for n in range(8)}, index=None, marks=0)
@example(name="9", attrs={str(n): None for n in range(9)}, index=None, marks=0)
@example(name="long", attrs={"x" * 1024: "y" * 1024, "z": "y" * 1025}, index=None, marks=0)
def test_a_span_is_written_as_msgspec_writes_it(
    rec: Recorder, name: str, attrs: dict[str, Any], index: int | None, marks: int
) -> None:
    """Whatever the name, the attributes and the numbers: the same bytes as for the object."""
    with ci.scope(name, index) as scope:
        scope.attrs.update(attrs)
        for number in range(marks):
            ci.mark("m", number)
    taken(rec.batcher, "marks")
    made = scope.row(scope.end_ns)
    assert written(rec.batcher, "spans") == encode_rows([made])


@RECORDING
@given(
    name=st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=64),
    value=st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.floats(1e-5, 2e9)
    # Those that are written without the encoder, and what is near to them.
    | st.builds(lambda whole, places: whole / 10**places, st.integers(-(10**15), 10**15),
                st.integers(0, 8)),
)  # fmt: skip
@example(name="a", value=0.0001)
@example(name="a", value=0.00011)
@example(name="a", value=-0.0)
@example(name="a", value=-999999999.999999)
@example(name="a", value=1e9)
@example(name="a\tb", value=1.7976931348623157e308)
@example(name="a", value=-(2**63))
@example(name="a", value=0.1 + 0.2)
def test_a_mark_is_written_as_msgspec_writes_it(rec: Recorder, name: str, value: float) -> None:
    """Whatever the name and the number: the same bytes as for the object."""
    scope = ci.scope("s").__enter__()
    ci.mark(name, value)
    scope.__exit__(None, None, None)
    taken(rec.batcher, "spans")
    made = MarkRecord(
        scope.marks[0], scope.id, name, type(value).__name__, value, {}, scope.last_ns, "point",
        scope.iteration,
    )  # fmt: skip
    assert written(rec.batcher, "marks") == encode_rows([made])
    assert scope.iteration is UNSET


def test_rows_with_a_number_and_in_a_window() -> None:
    """The iteration of a step, and the ``otel`` object of a window's children, are written."""
    ci.profile(frameworks=[], flush_interval=3600, trace_max_spans=10)
    rec = recorder._current
    assert rec is not None
    with ci.scope("warm"):
        ci.mark("warm", 1)
    taken(rec.batcher, "spans"), taken(rec.batcher, "marks")
    scopes = []
    for _ in ci.epochs(range(1)):
        for _ in ci.batches(range(40)):
            with ci.scope("forward") as inner:
                ci.mark("loss", 0.25)
            scopes.append(inner)
    items = taken(rec.batcher, "spans")
    text = b",".join(bytes(item) for item in items if not isinstance(item, SpanRecord))
    as_text = 0
    for scope in scopes:
        row = scope.row(scope.end_ns)
        assert isinstance(row.iteration, int)
        as_text += encode_rows([row]) in text
        assert (encode_rows([row]) in text) != (row in items)
    assert as_text > 30
    assert text.count(b'"parent_span_id"') > 5, "none of them stood in a window"
    marks = b",".join(map(bytes, taken(rec.batcher, "marks")))
    assert [f'"iteration":{at}}}'.encode() in marks for at in (0, 39, 40)] == [True, True, False]


ODD_NAMES = ["nul \0", "bad \ud800", "x" * 1025, "\u20ac" * 2000]


@pytest.mark.parametrize("name", ODD_NAMES, ids=range(len(ODD_NAMES)))
def test_an_odd_name_goes_the_other_way(rec: Recorder, name: str) -> None:
    """What may have to be cleaned or cut is queued as an object, in its place among the rest."""
    for label in ("before", name, "after"):
        with ci.scope(label):
            pass
    before, odd, after = taken(rec.batcher, "spans")
    assert isinstance(odd, SpanRecord)
    assert odd.name == name
    assert (b"before" in bytes(before), b"after" in bytes(after)) == (True, True)


ODD_ATTRIBUTES: list[dict[Any, Any]] = [
    {"k": "nul \0"},
    {"k": "\udfff"},
    {"k": [1, 2]},
    {"k": float("nan")},
    {"k": 2**64},
    {"k": object()},
    {"k": "x" * 100_000},
    {f"k{number}": "y" * 4000 for number in range(20)},
    {1: 2},
]


@pytest.mark.parametrize("attrs", ODD_ATTRIBUTES, ids=range(len(ODD_ATTRIBUTES)))
def test_odd_attributes_go_the_other_way(rec: Recorder, attrs: dict[Any, Any]) -> None:
    """Attributes that have to be cleaned, or are large, are left to the general way."""
    with ci.scope("x") as scope:
        scope.attrs.update(attrs)
    (row,) = taken(rec.batcher, "spans")
    assert isinstance(row, SpanRecord)
    assert len(row.attrs) == len(attrs)


@pytest.mark.parametrize(
    ("field", "value"),
    [("id", "x" * 2000), ("id", None), ("index", 2**70), ("index", "1"), ("iteration", 1.5)],
)
def test_what_a_user_has_set_goes_the_other_way(rec: Recorder, field: str, value: object) -> None:
    """A field that holds something else than it should makes no broken text."""
    with ci.scope("x") as scope:
        before = scope.id
        setattr(scope, field, value)
        if field == "id":
            rec.open.pop(before)
            rec.open[value] = scope  # type: ignore[index]
    for item in taken(rec.batcher, "spans"):
        assert isinstance(item, SpanRecord)


def test_rows_come_out_in_order_whichever_way_they_went(rec: Recorder) -> None:
    """Text and objects keep their order in a batch, and so do marks."""
    assert rec.batcher.queued == 0
    for number in range(300):
        with ci.scope("x", number) as scope:
            ci.mark("m", number)
            if number % 7 == 0:
                scope.attrs["k"] = [number]
                ci.mark("m", number + 0.5, kind="summary")
            if number % 50 == 0:
                scope.attrs["k"] = "y" * 3000
    assert rec.batcher.queued == 300 + 300 + 43
    assert ci.flush()
    assert rec.batcher.queued == 0
    rows = read_spool()
    assert [row.index for row in rows.spans if row.name == "x"] == list(range(300))
    values = [mark.value for mark in rows.marks if mark.name == "m"]
    assert values == sorted(values, key=float)
    assert len(values) == 343


@pytest.mark.parametrize(
    "times",
    [(0, 999_999_999), (1_000_000_000, 1_999_999_999), (2_000_000_001, 2**63 - 1),
     (-(2**63), -1), (1_700_000_000_000_000_009, 1_700_000_000_100_000_000)],
)  # fmt: skip
def test_times_of_any_second(rec: Recorder, times: tuple[int, int]) -> None:
    """Every digit of a time is written, in whichever second the one before it lay."""
    with ci.scope("parent") as parent:
        assert parent.add_here("load", *times)
        taken(rec.batcher, "marks")
        row = json.decode(written(rec.batcher, "spans"))
    assert (row["start_ns"], row["end_ns"]) == times
    assert (row["thread_id"], row["pid"], row["rank"]) == (parent.thread_id, rec.pid, rec.rank)


def test_a_row_of_another_thread_says_so(rec: Recorder) -> None:
    """What is kept of the last row is never another thread's."""

    def record() -> None:
        with ci.scope("there"):
            pass

    found = set()
    for _ in range(2):
        thread = threading.Thread(target=record)
        thread.start()
        found.add(thread.ident)
        thread.join()
        record()
        found.add(threading.get_ident())
    rows = json.decode(b"[" + b",".join(map(bytes, taken(rec.batcher, "spans"))) + b"]")
    assert {row["thread_id"] for row in rows} == found


def test_ids_are_hex_and_never_zero() -> None:
    """The compiled maker of ids writes the bytes it is given, and leaves out what is all zero."""
    hex_ids = pytest.importorskip("cirron_otel._fast").hex_ids
    drawn = bytes(range(240, 256)) + bytes(8) + b"\0" * 7 + b"\x01"
    assert hex_ids(drawn, 8) == [drawn[:8].hex(), drawn[8:16].hex(), "0" * 15 + "1"]
    assert hex_ids(bytes(32), 16) == []
    with pytest.raises(ValueError, match="so many ids"):
        hex_ids(drawn, 7)
    for made, digits in ((ids.span_ids(1000), 16), (ids.mark_ids(1000), 32)):
        assert len(set(made)) == 1000
        assert all(re.fullmatch(f"[0-9a-f]{{{digits}}}", one) for one in made)


def test_a_thousand_mark_ids_and_one_more(rec: Recorder) -> None:
    """The list of marks is written whole up to its limit; beyond it the count is there too."""
    for count in (1024, 1025):
        with ci.scope("x", count) as scope:
            for number in range(count):
                ci.mark("m", number)
        taken(rec.batcher, "marks")
        (row,) = taken(rec.batcher, "spans")
        made = scope.row(scope.end_ns)
        assert len(made.mark_ids) == 1024
        if count == 1024:
            assert bytes(row) == encode_rows([made])
        else:
            assert (row, row.mark_count) == (made, 1025)


def test_what_children_cost_is_written(rec: Recorder) -> None:
    """The mark of our own overhead has its attribute, and the bytes msgspec writes."""
    rec.overhead_ns = 1000.0
    with ci.scope("parent") as scope, ci.scope("child"):
        pass
    text = written(rec.batcher, "marks")
    made = MarkRecord(
        scope.marks[0], scope.id, "cirron.overhead_ns", "int", 1000, {"estimated": True},
        scope.end_ns, "point",
    )  # fmt: skip
    value = min(1000, scope.end_ns - scope.start_ns)
    assert text == encode_rows([structs.replace(made, value=value, name=text_name(text))])
    assert written(rec.batcher, "spans", 2).endswith(encode_rows([scope.row(scope.end_ns)]))


def text_name(text: bytes) -> str:
    """The name in a mark's row."""
    return text.split(b'"name":"')[1].split(b'"')[0].decode()


def test_batches_of_text_are_sealed_in_time(rec: Recorder) -> None:
    """Neither rows nor bytes of a batch pass what a file may have (C-W18)."""
    with ci.scope("all"):
        for number in range(50_000):
            ci.mark("a mark with a name that makes its row somewhat longer", number)
    for number in range(2500):
        with ci.scope("wide", number) as scope:
            scope.attrs["t"] = "y" * 4000
    assert ci.shutdown()
    rows = read_spool()
    assert len({mark.id for mark in rows.marks if mark.name.startswith("a mark")}) == 50_000
    assert [span.index for span in rows.spans if span.name == "wide"] == list(range(2500))
    assert all(len(batch.spans) + len(batch.marks) <= 20_000 for batch in rows.batches)
    sizes = [path.stat().st_size for path in rec.spool.files()]
    assert max(sizes) < 4_000_000
    assert len(sizes) >= 6


def test_what_is_dropped_of_text_while_the_disk_refuses(
    rec: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest point marks go first, summaries stay, then the oldest spans; all counted."""
    monkeypatch.setattr(batching, "ASSIST_ROWS", 1000)
    monkeypatch.setattr(batching, "MAX_ROWS", 8000)
    batcher, losses = rec.batcher, rec.guard.losses
    batcher.disk_refuses = True
    with ci.scope("all"):
        ci.mark("kept", 1, kind="summary")
        for number in range(20_000):
            ci.mark("m", number)
    gone = losses["disk_full_marks"]
    assert 11_000 < gone < 14_000
    assert batcher.queued == 20_002 - gone
    kept, first, *_ = taken(batcher, "marks")
    assert (kept.name, kept.kind) == ("kept", "summary")
    assert b'"value":%d,' % gone in bytes(first)[:300]
    taken(batcher, "spans")
    for number in range(20_000):
        with ci.scope("x", number):
            pass
    gone = losses["disk_full_spans"]
    assert 11_000 < gone < 14_000
    first = taken(batcher, "spans")[0]
    assert b'"index":%d,' % gone in bytes(first)[:200]
    batcher.disk_refuses = False


def test_the_flush_thread_comes_early_when_there_is_much(
    rec: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Long before its time, where a program records as fast as it can."""
    monkeypatch.setattr(batching, "WAKE_BYTES", 100_000)
    rang: list[int] = []
    rec.batcher.wake = lambda: rang.append(rec.batcher.queued)
    for number in range(1000):
        ci.mark("m", number)
    assert rang
    assert 300 < rang[0] < 700


def test_lines_want_rows_that_are_objects(capsys: pytest.CaptureFixture[str]) -> None:
    """With ``output="stdout"`` nothing is written as text, and every span has its line."""
    ci.profile(frameworks=[], output=["spool", "stdout"])
    for _ in range(3):
        with ci.scope("x"):
            ci.mark("m", 1)
    rec = recorder._current
    assert rec is not None
    assert rec.span_rows is None
    assert ci.shutdown()
    assert capsys.readouterr().out.count("[cirron] x ") == 3
    assert len(read_spool().named("x")) == 3


SAME = """
import cirron_otel as ci
ci.profile(frameworks=[], path="OUT")
def value(number):
    return [number, number / 3, -number, 10.0 ** number, 1e-9 * number][number % 5]
for epoch in ci.epochs(range(2)):
    for at in ci.batches(range(60)):
        with ci.scope("for\\u00e9ward", lr=0.1 * at, label="a\\"b", on=True, none=None) as scope:
            ci.mark("loss", value(at))
            if at % 9 == 0:
                scope.attrs.update(odd=[1, {"a": "\\0"}], text="\\ud800")
        with ci.scope("nul \\0" if at % 10 == 0 else "x\\n", at):
            pass
ci.shutdown()
"""


def test_both_ways_write_the_same(run_program: RunProgram) -> None:
    """A program's rows are the same, but for ids and times, as those of the hot path in Python."""
    told = []
    for pure in ("0", "1"):
        rows = run_program(SAME.replace("OUT", f"out{pure}"), env={"CIRRON_OTEL_PURE": pure})
        rows = read_spool(rows.output_dir.parent / f"out{pure}")
        number = {span.id: at for at, span in enumerate(rows.spans)}
        told.append(
            (
                [
                    (one.name, one.index, one.attrs, one.iteration, len(one.mark_ids), one.rank,
                     number.get(one.parent_id or ""), one.attrs_truncated)
                    for one in rows.spans if one.name != "cirron.session"
                ],
                [
                    (one.name, one.value, one.value_type, one.kind, one.iteration,
                     number[one.span_id], one.attrs)
                    for one in rows.marks if one.name not in semconv.FOR_METRICS
                ],
            )
        )  # fmt: skip
    assert told[0] == told[1]
    assert len(told[0][0]) > 300
