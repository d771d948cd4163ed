"""The spool format: golden files, round trips, its JSON Schema, and the seed's own reader."""

from __future__ import annotations

import contextlib
import json
import runpy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from msgspec import UNSET

import cirron_otel as ci
from cirron_otel.batch import (
    Batch,
    MarkRecord,
    SnapshotRecord,
    SpanOtel,
    SpanRecord,
    decode,
    encode,
    encode_rows,
)
from cirron_otel.errors import SpoolFormatError
from helpers import read_spool

FORMATS = Path(__file__).parent / "formats"
SCHEMA = Path(__file__).parents[1] / "docs" / "formats" / "spool-v1.schema.json"
TOOL = Path(__file__).parents[1] / "tools" / "make_schema.py"

LOW = "00000000deadbeef"
HIGH = "0123456789abcdef"


def _id(number: int) -> str:
    return f"{number:016x}{LOW}"


def _span(number: int, name: str, parent: int | None, **more: Any) -> SpanRecord:
    given = {"index": None, "start_ns": 1_000 * number, "end_ns": 1_000 * number + 500, **more}
    above = None if parent is None else _id(parent)
    return SpanRecord(id=_id(number), name=name, parent_id=above, **given)


def _mark(number: int, value: Any, value_type: str = "float", **more: Any) -> MarkRecord:
    given = {"attrs": {}, "ts_ns": 1_100, "kind": "point", **more}
    return MarkRecord(
        id=f"{number:032x}", span_id=_id(1), name="loss", value_type=value_type, value=value,
        **given,
    )  # fmt: skip


def _batch(**content: Any) -> Batch:
    return Batch(1, "0.1.0", f"{7:032x}", 1_795_000_000_000_000_000, **content)


_SNAPSHOT = SnapshotRecord(
    id=f"{5:032x}", span_id=_id(1), tensor_name="layer.weight", shape=[2, 3], dtype="float32",
    mode="stats", stats={"mean": 0.5, "histogram": {"bins": [0.0, 1.0], "counts": [6]}},
    blob_uri=None, ts_ns=1_200, attrs={},
)  # fmt: skip

#: One golden file each: ``tests/formats/<name>.json``.
GOLDEN: dict[str, Batch] = {
    "empty": _batch(),
    "span": _batch(
        spans=[
            _span(2, "step", 1, index=0, iteration=4, rank=1, pid=12, thread_id=34, cpu_ns=5,
                  gpu_ns=6, memory_peak_bytes=7,
                  attrs={"lr": 0.1, "tags": ["a", None, {"b": True}]}),
            _span(1, "cirron.session", None),
        ],
    ),
    "mark": _batch(
        marks=[
            _mark(1, 0.5),
            _mark(2, 9_007_199_254_740_993, "int", kind="summary", iteration=4),
            _mark(3, "t\u00e9xt \U0001f600", "string", attrs={"note": "n"}),
            _mark(4, True, "bool"),  # noqa: FBT003 - the value itself
        ],
    ),
    "nonfinite": _batch(
        marks=[
            _mark(1, None, value_nonfinite="nan"),
            _mark(2, None, value_nonfinite="inf"),
            _mark(3, None, value_nonfinite="-inf"),
        ],
    ),
    "many_marks": _batch(
        spans=[_span(1, "epoch", None, mark_ids=(f"{1:032x}", f"{2:032x}"), mark_count=3)],
    ),
    "attrs_truncated": _batch(
        spans=[_span(1, "x", None, attrs={"text": "cut"}, attrs_truncated=["text"])],
    ),
    "open": _batch(
        open=[_span(1, "cirron.session", None, end_ns=UNSET), _span(2, "a", 1, end_ns=UNSET)],
        writer="host-12-1795000000000000000",
    ),
    "windows": _batch(
        windows=[
            _span(9, "steps[0..399]", None,
                  otel=SpanOtel(trace_id=HIGH, links=[{"trace_id": HIGH + LOW, "span_id": "1" * 16,
                                                       "attrs": {}}])),
        ],
    ),
    "otel": _batch(
        resource={"service.name": "train", "dl.rank": 0},
        scope={"name": "cirron-otel", "version": "0.1.0"},
        spans=[
            _span(2, "bad", 1, attrs={"error": "ValueError: x"},
                  otel=SpanOtel(
                      trace_id=HIGH, parent_span_id="2" * 16, kind="client", status="error",
                      status_message="ValueError: x", trace_state="k=v", sampled=False,
                      events=[{"name": "exception", "ts_ns": 2_100, "attrs": {"a": 1}}],
                      dropped={"events": 2}, scope={"name": "third.party"},
                  )),
        ],
    ),
    "snapshots": _batch(snapshots=[_SNAPSHOT]),
    "logs": _batch(
        logs=[
            {"ts_ns": 1, "severity_number": 9, "severity_text": "INFO", "event_name": "a.b",
             "body": "text", "attrs": {"cirron.record.seq": 4}, "trace_id": HIGH + LOW,
             "span_id": "1" * 16, "trace_flags": 1},
            {"ts_ns": 2, "severity_number": 13, "severity_text": "WARN", "event_name": "a.b",
             "body": "text", "attrs": {}},
        ],
    ),
    "unknown_keys": _batch(
        unknown={"later": {"x": [1]}},
        spans=[_span(1, "x", None, otel=SpanOtel(trace_id=HIGH, unknown={"more": 1}),
                     unknown={"s": None})],
        marks=[_mark(1, 0.5, unknown={"m": "kept"})],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_file(name: str) -> None:
    """What we write is what the file has, key for key and in order; what we read is the batch."""
    text = (FORMATS / f"{name}.json").read_text(encoding="utf-8")
    written = encode(GOLDEN[name]).decode()
    assert json.dumps(json.loads(written), indent=2, ensure_ascii=False) + "\n" == text
    assert decode(text.encode()) == GOLDEN[name]
    Draft202012Validator(json.loads(SCHEMA.read_text())).validate(json.loads(text))


def test_every_golden_file_is_checked() -> None:
    """No file lies there that no test reads."""
    assert {file.stem for file in FORMATS.glob("*.json")} == set(GOLDEN)


_text = st.text(max_size=8)
_number = st.integers(0, 2**63 - 1)
_json = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | _text
    | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_text, inner, max_size=3),
    max_leaves=3,
)  # fmt: skip
_attrs = st.dictionaries(_text, _json, max_size=3)
_more = st.just(UNSET) | st.dictionaries(st.text("XYZ", min_size=1), _json, min_size=1, max_size=2)


def _maybe(strategy: Any) -> Any:
    return st.just(UNSET) | strategy


_otel = st.builds(
    SpanOtel, trace_id=_maybe(_text), status=_maybe(_text), sampled=_maybe(st.booleans()),
    links=_maybe(st.lists(_attrs, max_size=2)), events=_maybe(st.lists(_attrs, max_size=2)),
    dropped=_maybe(st.dictionaries(_text, _number, max_size=2)), unknown=_more,
)  # fmt: skip
_spans = st.builds(
    SpanRecord, id=_text, name=_text, parent_id=st.none() | _text, index=st.none() | _number,
    start_ns=_number, end_ns=_maybe(_number), cpu_ns=st.none() | _number, attrs=_attrs,
    mark_ids=st.lists(_text, max_size=2).map(tuple), mark_count=_maybe(_number),
    iteration=_maybe(_number), otel=_maybe(_otel), unknown=_more,
)  # fmt: skip
_marks = st.builds(
    MarkRecord, id=_text, span_id=_text, name=_text, value_type=_text,
    value=st.none() | st.booleans() | _number | _text
    | st.floats(allow_nan=False, allow_infinity=False),
    attrs=_attrs, ts_ns=_number, kind=_text, iteration=_maybe(_number), unknown=_more,
)  # fmt: skip
_snapshots = st.builds(
    SnapshotRecord, id=_text, span_id=_text, tensor_name=_text, shape=st.lists(_number, max_size=3),
    dtype=_text, mode=_text, stats=st.none() | _attrs, blob_uri=st.none() | _text, ts_ns=_number,
    attrs=_attrs, unknown=_more,
)  # fmt: skip
_batches = st.builds(
    Batch, schema_version=st.just(1), sdk_version=_text, batch_id=_text, created_ns=_number,
    spans=st.lists(_spans, max_size=3), marks=st.lists(_marks, max_size=3),
    snapshots=st.lists(_snapshots, max_size=2), resource=_maybe(_attrs), writer=_maybe(_text),
    open=_maybe(st.lists(_spans, max_size=2)), windows=_maybe(st.lists(_spans, max_size=2)),
    logs=_maybe(st.lists(_attrs, max_size=2)), unknown=_more,
)  # fmt: skip


@settings(max_examples=50)
@given(_batches)
def test_decode_gives_back_what_encode_took(batch: Batch) -> None:
    """Every field, unknown keys included, survives writing and reading."""
    data = encode(batch)
    again = decode(data)
    assert again == batch
    assert encode(again) == data
    assert json.loads(data)["created_ns"] == batch.created_ns


@settings(max_examples=30)
@given(st.lists(_spans.filter(lambda span: span.unknown is UNSET), max_size=4))
def test_rows_are_the_inside_of_an_array(spans: list[SpanRecord]) -> None:
    """Rows encoded slice by slice and joined are the same array as in one piece."""
    spans = [span for span in spans if span.otel is UNSET or span.otel.unknown is UNSET]
    whole = b"[" + encode_rows(spans) + b"]"
    parts = b"[" + b",".join(filter(None, (encode_rows([span]) for span in spans))) + b"]"
    assert whole == parts
    assert [row["id"] for row in json.loads(whole)] == [span.id for span in spans]


@settings(max_examples=100)
@given(st.binary(max_size=60) | _json.map(lambda value: json.dumps(value).encode()))
def test_what_is_no_batch_is_refused_with_one_error(data: bytes) -> None:
    """Any other bytes raise ``SpoolFormatError`` and nothing else."""
    with pytest.raises(SpoolFormatError):
        decode(data)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"schema_version": 2}, "schema_version"),
        ({"schema_version": True}, "schema_version"),
        ({"spans": {}}, "spans must be an array"),
        ({"spans": [1]}, "spans[0] must be an object"),
        ({"marks": [{}]}, "marks[0]"),
        ({"open": [{"id": 1}]}, "open[0]"),
        ({"batch_id": 5}, "batch_id"),
    ],
)
def test_a_tampered_batch_says_where(change: dict[str, Any], where: str) -> None:
    """The message names the place that is wrong."""
    document = {**json.loads(encode(GOLDEN["span"])), **change}
    with pytest.raises(SpoolFormatError) as caught:
        decode(json.dumps(document).encode())
    assert where in str(caught.value)


def test_a_batch_of_the_existing_sdk_is_read() -> None:
    """Only the seed's keys, ``end_ns`` null on an odd row, and keys nobody knows: all readable."""
    row = {
        "id": "a" * 32, "name": "x", "parent_id": None, "index": None,
        "start_ns": 1, "end_ns": None, "cpu_ns": None, "gpu_ns": None,
        "memory_peak_bytes": None, "thread_id": 1, "pid": 1, "rank": 0, "attrs": {}, "mark_ids": [],
    }  # fmt: skip
    batch = decode(
        json.dumps(
            {"schema_version": 1, "sdk_version": "0.3.0", "batch_id": "b", "created_ns": 1,
             "spans": [row], "marks": [], "snapshots": [], "novel": 1}
        ).encode()
    )  # fmt: skip
    assert batch.spans[0].end_ns is UNSET
    assert batch.unknown == {"novel": 1}


def test_the_schema_on_disk_is_up_to_date() -> None:
    """``docs/formats/spool-v1.schema.json`` is what ``tools/make_schema.py`` writes."""
    assert runpy.run_path(str(TOOL))["text"]() == SCHEMA.read_text(encoding="utf-8"), (
        "run: python tools/make_schema.py"
    )
    Draft202012Validator.check_schema(json.loads(SCHEMA.read_text()))


def test_the_schema_refuses_what_is_wrong() -> None:
    """It is strict: a missing end, a wrong type, an unknown kind are each refused."""
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))
    document = json.loads(encode(_batch(spans=[_span(1, "x", None)], marks=[_mark(1, 0.5)])))
    validator.validate(document)
    for place, key, wrong in (
        ("spans", "end_ns", None), ("spans", "id", "xyz"), ("marks", "kind", "other"),
        ("marks", "span_id", "nobody"), ("marks", "value_type", "number"),
    ):  # fmt: skip
        broken = json.loads(json.dumps(document))
        if wrong is None:
            del broken[place][0][key]
        else:
            broken[place][0][key] = wrong
        assert not validator.is_valid(broken), (place, key)


def _record_a_run() -> None:
    """A run with everything in it that this library writes."""
    ci.mark("early", 1)
    ci.profile(frameworks=[], trace_max_spans=12, flush_interval=0.05)
    for _ in ci.epochs(range(2)):
        for number in ci.batches(range(20)):
            with ci.scope("forward", number, lr=0.1):
                ci.mark("loss", 0.5)
            ci.mark("odd", float("nan"))
            ci.mark("kind", "text", kind="summary", note={"a": [1]})
            assert number % 10 or ci.flush()
    error = ValueError("x")
    with contextlib.suppress(ValueError), ci.scope("bad\ud800", text="y" * 70_000) as bad:
        bad.add_event("event", {"a": 1})
        raise error
    assert ci.shutdown()


def test_everything_a_run_writes_satisfies_the_schema() -> None:
    """Each file of a real run with windows, events and odd values is valid and strict JSON."""
    _record_a_run()
    validator = Draft202012Validator(json.loads(SCHEMA.read_text()))

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    files = sorted(Path(".cirron/spool").glob("*.json"))
    assert len(files) > 2
    keys: set[str] = set()
    for file in files:
        document = json.loads(file.read_bytes(), parse_constant=refuse)
        validator.validate(document)
        keys |= document.keys()
        assert file.name == f"{document['created_ns']:020d}-{document['batch_id']}.json"
    assert {"open", "windows", "resource", "scope", "writer"} <= keys


def test_what_a_run_writes_reads_and_writes_itself_again() -> None:
    """A batch of ours, read and written by us, is the same document."""
    _record_a_run()
    for file in Path(".cirron/spool").glob("*.json"):
        data = file.read_bytes()
        assert json.loads(encode(decode(data))) == json.loads(data)


def test_the_seeds_reader_reads_a_run(capsys: pytest.CaptureFixture[str]) -> None:
    """The reading loop of the format's documentation works on our files as it stands there."""
    _record_a_run()
    capsys.readouterr()
    for batch_file in sorted(Path("./.cirron/spool").glob("*.json")):
        batch = json.loads(batch_file.read_text())
        for span in batch["spans"]:
            print(span["name"], span["end_ns"] - span["start_ns"])  # noqa: T201
        for snap in batch["snapshots"]:
            assert snap["blob_uri"] is None
    lines = capsys.readouterr().out.splitlines()
    names = [line.rpartition(" ")[0] for line in lines]
    assert names.count("step") == names.count("forward") == 40
    assert names.count("epoch") == 2
    assert names[-1] == "cirron.session"
    assert all(int(line.rpartition(" ")[2]) >= 0 for line in lines)
    assert len(lines) == len(read_spool().spans)
