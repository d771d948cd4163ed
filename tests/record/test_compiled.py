"""Lines, numbers, rules and verdicts are the same in compiled code and in Python."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cirron_otel.training_record import line_text, rules
from cirron_otel.training_record.canonical import canonical
from cirron_otel.training_record.chain import DIARY, GENESIS, METRICS, body_of
from cirron_otel.training_record.checking import course, diary, reader
from cirron_otel.training_record.checking.verify import Verdict, verify
from cirron_otel.training_record.compiled import compiled
from cirron_otel.training_record.rules import Decisions, Layers, Rules
from cirron_otel.training_record.writing.journal import Journal
from record.json_values import json_objects, spelled_lines
from record.tampering import RECORDS, TAMPERED
from record.writing import CONFIG, RUN_START, put, write

pytestmark = pytest.mark.skipif(compiled is None, reason="the compiled module was not built")

RUNS = sorted(
    path.parent for path in [*RECORDS.glob("*/diary.jsonl"), *TAMPERED.glob("*/diary.jsonl")]
)
#: Fields that a walk must not pass by unseen, and what may stand in any field; ...: it is gone.
_LOOKED_AT = st.sampled_from(["rule", "lost_before", "severity", "step", "time", "metrics_digest"])
_VALUES = st.sampled_from([..., None, True, 0, -1, 2**63, 1.0, 1e22, "warning", [], {"a": 1}])
#: Building a hostile value takes longer than what is tested on it.
few = settings(max_examples=50)


@contextmanager
def in_python() -> Iterator[None]:
    """All of it in Python, for as long as this lasts."""
    with pytest.MonkeyPatch.context() as patch:
        for module in (diary, reader, rules, line_text):
            patch.setattr(module, "compiled", None)
        yield


def both(path: Path, **more: Any) -> Verdict:
    """The verdict on a record, which is the same either way, to the last word."""
    found = verify(path, **more)
    with in_python():
        assert verify(path, **more) == found
    return found


def both_with(run: Path, path: Path, data: bytes) -> None:
    """The same with other bytes in one of the record's files, which then has its own again."""
    before = path.read_bytes()
    try:
        path.write_bytes(data)
        both(run)
    finally:
        path.write_bytes(before)


def walk() -> Any:
    """A walk at its start."""
    return compiled.Walk(sha256, course._FORMS, course._SEVERITIES)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """A real record and two of ours, to be changed in place and put back."""
    place = tmp_path_factory.mktemp("compiled")
    write(place / "ours")
    shutil.copytree(RECORDS / "lesion_watch", place / "theirs")
    write_crowd(place / "crowd")
    return [place / "ours", place / "theirs", place / "crowd"]


def write_crowd(directory: Path) -> None:
    """A record with many events at one step, of which the walk passes all but the first."""
    with Journal(directory, run_start=RUN_START, fsync_interval_s=None) as journal:
        decisions = Decisions(Rules.of(CONFIG))
        for step in range(24):
            grad = dict.fromkeys("abcdefgh", 1e-9 if 12 <= step < 18 else 0.5)
            for expected in decisions.check(step, 1.0, grad):
                put(journal, expected)
            journal.check(step, 1.0, grad, {})


# --- lines ----------------------------------------------------------------------------------------


def check_line(raw: bytes) -> bool:
    """Whether the compiled reader takes the line; where it does, all is as Python has it."""
    found = walk().line(raw)
    (value,) = compiled.Reader().values(raw + b"\n")
    if value is None:
        assert found is None
        return False
    wanted, flaws = reader.slow(raw)
    assert flaws == reader.Flaws()
    assert repr(value) == repr(wanted)
    if found is not None:
        assert repr(found[0]) == repr(wanted)
        assert found[1].decode() == canonical(body_of(wanted))
    return True


@given(spelled_lines())
@example(b'{"prev":1,"hash":{"b":[],"a":{}},"a":[[],{"z":1,"b":-0.0}]}')
@example(b'{"a": "\\u007f\\ud83d\\ude00\\n\\"\\\\", "b": "\\u00e9"}')
@example(b'{"a":"\\ud83d"}')
@example(b'{"a":"\\u000A"}')
@example(b'{"a":"\\/"}')
@example(b'{"a": 1,"b": 2}')
@example(b'{"a":1,}')
@example(b'{"a":[1,]}')
@example(b'{"a":1}x')
@example(b'{"a":{"b":1,"b":1}}')
@few
def test_a_line_that_is_taken_is_what_python_reads(raw: bytes) -> None:
    """No value and no canonical form differs, and nothing with a flaw is taken."""
    check_line(raw)


@given(json_objects(), st.sampled_from([(", ", ": "), (",", ":")]), st.data())
@few
def test_a_byte_more_or_less(
    value: dict[str, Any], marks: tuple[str, str], data: st.DataObject
) -> None:
    """The same holds for lines that are right but for one byte."""
    raw = bytearray(json.dumps(value, separators=marks).encode())
    at = data.draw(st.integers(0, len(raw) - 1))
    how = data.draw(st.sampled_from(["put", "change", "drop"]))
    byte = data.draw(st.sampled_from(b' ,:{}[]"\\/u0159.eE+-aAtfn\x00\x7f\xe9\r'))
    raw[at : at + (how != "put")] = b"" if how == "drop" else bytes([byte])
    if b"\n" not in raw:
        check_line(bytes(raw))


@given(
    st.dictionaries(
        st.text("abc_. -", min_size=1),
        st.none()
        | st.booleans()
        | st.integers(-(10**18) + 1, 10**18 - 1)
        | st.floats(allow_nan=False, allow_infinity=False)
        | st.text(st.characters(codec="utf-8"))
        | st.lists(st.integers(0, 99)),
    ),
    st.sampled_from([(", ", ": "), (",", ":")]),
)
@few
def test_what_json_writes_is_taken(value: dict[str, Any], marks: tuple[str, str]) -> None:
    """Lines as writers make them go the quick way."""
    assert check_line(json.dumps(value, separators=marks).encode())


# --- numbers --------------------------------------------------------------------------------------


def numerals() -> st.SearchStrategy[str]:
    """Texts of numbers, near to what Python writes."""
    digits = st.text("0123456789", min_size=1, max_size=19)
    made = st.builds(
        lambda sign, whole, part, power: f"{sign}{whole}.{part}{power}",
        st.sampled_from(["", "-"]),
        st.sampled_from(["0", "1", "9", "10", "123456", "9007199254740993", "12345678901234567"]),
        st.builds(str.__add__, st.sampled_from(["", "0", "000", "0000"]), digits),
        st.sampled_from(
            ["", "", "", "e-05", "e-08", "e-5", "e+16", "e16", "e-120", "e+300", "e-04"]
        ),
    )
    return made | st.floats(allow_nan=False, allow_infinity=False).map(repr)


@given(numerals())
@example("0.30000000000000004")
@example("9007199254740993.0")
@example("4503599627370496.5")
@example("5e-324")
@example("1.7976931348623157e+308")
@example("2.2250738585072014e-308")
@example("0.0001")
@example("-0.0")
@example("0.00001")
@example("1e+16")
@example("1e22")
def test_a_number_is_taken_where_python_writes_it_so(text: str) -> None:
    """Exactly the shortest text of a float is taken, and it is that float."""
    (value,) = compiled.Reader().values(b'{"x":%b}\n' % text.encode())
    if repr(float(text)) == text:
        assert value is not None
        assert repr(value["x"]) == text
    else:
        assert value is None


@given(st.floats(1e-12, 1e16), st.integers(-3, 3), st.integers(15, 17))
def test_the_neighbours_of_a_number(number: float, off: int, digits: int) -> None:
    """Decimals that differ in the last of 15 to 17 digits are told apart."""
    mantissa, _, power = f"{number:.{digits - 1}e}".partition("e")
    whole = int(mantissa.replace(".", "")) + off
    text = repr(float(f"{whole}e{int(power) - digits + 1}"))
    for one in (text, _positional(whole, int(power) - digits + 1)):
        (value,) = compiled.Reader().values(b'{"x":%b}\n' % one.encode())
        assert (value is not None) == (repr(float(one)) == one)
        assert value is None or repr(value["x"]) == one


def _positional(whole: int, power: int) -> str:
    text = str(whole)
    if power >= 0:
        return f"{text}{'0' * power}.0"
    text = text.rjust(1 - power, "0")
    return f"{text[:power]}.{text[power:]}"


# --- rules and encoding ---------------------------------------------------------------------------

_NORMS = st.sampled_from([0.0, 1e-9, 1e-3, 0.01, 0.011, 0.1, 1.0, 1e9, 1.7976931348623157e308])


@given(
    st.lists(st.dictionaries(st.sampled_from("abc"), _NORMS | st.floats(0, 1e3)), max_size=40),
    st.sampled_from([0.0, 2.5, 1e300]),
    st.integers(-1, 9),
    st.integers(0, 3),
    st.sampled_from([0.0, 0.1, 1.0]),
)
@few
def test_the_rules_are_the_same(
    checks: list[dict[str, float]], sigma: float, warmup: int, confirmations: int, floor: float
) -> None:
    """The compiled rules find the same events, with the same bits, and are as unsure."""
    given_rules = Rules(sigma, warmup, floor, 1.0, confirmations, 1.5, 32)
    one, other = rules._layers(given_rules), Layers(given_rules)
    assert not isinstance(one, Layers)
    for step, grad in enumerate(checks):
        mine: list[Any] = []
        theirs: list[Any] = []
        one.check(step, grad, mine)
        other.check(step, grad, theirs)
        assert repr(mine) == repr(theirs)
    for name in "abcd":
        assert one.near(name) is other.near(name)


def test_rules_beyond_counting() -> None:
    """A warm-up of more checks than 64 bits count is no error."""
    decisions = Decisions(Rules.of({**CONFIG, "warmup": 2.0**80}))
    assert decisions.check(0, 1.0, {"a": 1.0}) == []
    assert decisions.near("a") is False
    assert decisions.near(["a"]) is False


def test_norms_at_the_end_of_what_floats_hold(tmp_path: Path) -> None:
    """A baseline that no float can hold is infinite, to the monitor and to the verifier."""
    journal = Journal(tmp_path, run_start=RUN_START, fsync_interval_s=None)
    decisions = Decisions(Rules.of(CONFIG))
    for step in range(14):
        grad = {"a": 1.7976931348623157e308 if step < 12 else 1e-3}
        for expected in decisions.check(step, 1.0, grad):
            put(journal, expected)
        journal.check(step, 1.0, grad, {})
    journal.close()
    assert b'"baseline":"inf"' in (tmp_path / DIARY).read_bytes()
    assert both(tmp_path).check("replay").status == "pass"


@given(json_objects())
@example({"a": math.nan})
@example({"a": "\ud83d\ude00", "\u00e9": 1})
@example({"b": [True, 2**64, {"z": 1, "a": [0.1, -0.0, 1e22]}]})
@few
def test_what_is_encoded_is_the_canonical_form(value: dict[str, Any]) -> None:
    """Text that is made is that of Python, and what is not plain is left to it."""
    text = compiled.encode(value)
    assert text in {None, canonical(value)}
    line = compiled.diary_line(GENESIS, value)
    if text is None or not value:
        assert line is None
    elif line is not None:  # None where the processor has no instructions for the hash
        assert line == line_text.diary_line(GENESIS, text)


def test_the_hash_is_that_of_hashlib() -> None:
    """Texts of any length, so with any padding, hash as the standard library says."""
    text = bytes(range(256)) * 2
    for size in range(200):
        assert compiled.hash_hex(text[:size]) in {None, sha256(text[:size]).hexdigest()}


def test_without_instructions_for_the_hash(records: list[Path]) -> None:
    """Where the processor has none, hashlib makes the hashes, and the verdict is the same."""
    found = [both(run) for run in records]
    compiled.use_sha(0)
    try:
        assert compiled.hash_hex(b"") is None
        assert [both(run) for run in records] == found
        assert compiled.diary_line(GENESIS, {"a": 1}) is None
    finally:
        compiled.use_sha(1)


# --- verdicts -------------------------------------------------------------------------------------


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_every_record_has_one_verdict(run: Path) -> None:
    """Real and tampered records get the same checks, counts and messages either way."""
    both(run)


@given(st.data())
@few
def test_any_change_has_one_verdict(records: list[Path], data: st.DataObject) -> None:
    """A changed byte, and a line that is gone, doubled or moved, is said in the same words."""
    run = data.draw(st.sampled_from(records))
    path = run / data.draw(st.sampled_from([DIARY, METRICS]))
    before = path.read_bytes()
    lines = before.splitlines(keepends=True)
    at = data.draw(st.integers(0, len(lines) - 1))
    how = data.draw(st.sampled_from(["byte", "byte", "byte", "drop", "double", "swap", "cut"]))
    if how == "byte":
        line = bytearray(lines[at])
        line[data.draw(st.integers(0, len(line) - 1))] = data.draw(st.integers(0, 255))
        lines[at] = bytes(line)
    elif how == "drop":
        del lines[at]
    elif how == "double":
        lines.insert(at, lines[at])
    elif how == "swap":
        lines[at], lines[-1 - at] = lines[-1 - at], lines[at]
    else:
        lines = [before[: data.draw(st.integers(0, len(before)))]]
    both_with(run, path, b"".join(lines))


@given(st.data())
@few
def test_any_change_with_new_hashes_has_one_verdict(
    records: list[Path], data: st.DataObject
) -> None:
    """So is a field that is changed, gone or new in a diary that was chained anew after it."""
    run = records[-1]
    lines = [json.loads(line) for line in (run / DIARY).read_bytes().splitlines()]
    changed = data.draw(st.sampled_from(lines))
    name = data.draw(_LOOKED_AT | st.sampled_from(sorted(body_of(changed))))
    changed[name] = data.draw(_VALUES)
    if changed[name] is ...:
        del changed[name]
    made, prev = [], GENESIS
    for line in lines:
        prev, text = line_text.diary_line(prev, canonical(body_of(line)))
        made.append(text)
    both_with(run, run / DIARY, b"".join(made))


def test_calm_lines_are_passed(records: list[Path]) -> None:
    """The walk passes every line behind the first that says nothing beyond itself."""
    for run in records:
        data = (run / DIARY).read_bytes()
        first, rest = data.split(b"\n", 1)
        going = walk()
        going.count, going.chained = 1, json.loads(first)["hash"]
        at = 0
        while at < len(rest):
            reached = going.follow(rest, at)
            if reached == at:  # one that is looked at
                line = json.loads(rest[at : rest.index(b"\n", at)])
                assert line["event"] in course._LOOKED_AT or "rule" in line
                going.count, going.chained = line["seq"] + 1, line["hash"]
                reached = rest.index(b"\n", at) + 1
            at = reached
        assert sum(going.seen().values()) > 0
