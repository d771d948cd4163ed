"""Canonical JSON and the hash of a line, against the peer's vectors and Python's own encoder."""

from __future__ import annotations

import enum
import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cirron_otel.training_record.canonical import canonical, json_value
from cirron_otel.training_record.chain import GENESIS, body_of, line_hash
from cirron_otel.training_record.line_text import body_text
from record.json_values import json_values

VECTORS = json.loads(
    (Path(__file__).resolve().parent.parent / "formats/records/vectors.json").read_text()
)


@pytest.mark.parametrize("vector", VECTORS["chain"])
def test_the_chain_vectors_of_the_peer_hold(vector: dict[str, str]) -> None:
    """Canonical form and hash of each vector are the existing writer's, byte for byte."""
    body = json.loads(vector["body_ascii_json"])
    assert canonical(body) == vector["canonical"]
    assert line_hash(vector["prev"], body) == vector["hash"]


@given(json_values())
def test_the_canonical_form_is_that_of_json_dumps(value: object) -> None:
    """Whatever JSON can say comes out as json.dumps with sorted keys and no white space says it."""
    expected = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert canonical(value) == expected


def test_the_first_line_links_to_zeros() -> None:
    """The genesis hash has 64 zeros, and what is hashed leaves out prev and hash."""
    assert GENESIS == "0" * 64
    assert body_of({"seq": 0, "prev": "a", "hash": "b"}) == {"seq": 0}


class Colour(enum.IntEnum):
    """An integer of another type."""

    RED = 3


class Loud:
    """An object that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "nan"),
        (-math.inf, "-inf"),
        ((1, 2.5), [1, 2.5]),
        ({"b", "a"}, ["a", "b"]),
        ({1: 2, None: 3, False: 4}, {"1": 2, "null": 3, "false": 4}),
        (Colour.RED, 3),
        (Path("/x"), "/x"),
        (b"ab", "b'ab'"),
        (Loud(), "<Loud without text>"),
        (-0.0, -0.0),
        ("\ud800", "\ud800"),
    ],
)
def test_what_json_cannot_say_becomes_text(value: object, expected: object) -> None:
    """Every value is turned into plain JSON data of the documented form."""
    found = json_value(value)
    assert repr(found) == repr(expected)


def test_an_integer_that_no_reader_takes_becomes_text() -> None:
    """More digits than Python reads from text come as hexadecimal text."""
    assert json_value(1 << 20_000) == "0x1" + "0" * 5000


def test_a_value_that_holds_itself_is_cut_off() -> None:
    """A circular value ends in its text at the depth limit instead of never."""
    circular: list[object] = []
    circular.append(circular)
    assert json.loads(canonical(json_value(circular)))


@given(st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary(max_size=8)
    | st.sets(st.integers()),
    lambda inner: st.lists(inner) | st.dictionaries(st.integers() | st.text(), inner)
    | st.tuples(inner, inner),
    max_leaves=12,
))  # fmt: skip
def test_what_is_written_hashes_to_the_same_when_it_is_read(value: object) -> None:
    """A line's text, read back and made canonical again, is the text that was hashed."""
    _, text = body_text({"seq": 0, "x": value})
    assert canonical(json.loads(text)) == text
