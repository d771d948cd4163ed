"""What a mark's value and an attribute may be, whatever library it comes from."""

from __future__ import annotations

import enum
import json
import math
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cirron_otel.values import (
    MAX_ATTRIBUTE_BYTES,
    MAX_MARK_BYTES,
    Deferred,
    MarkValue,
    UnsupportedValueError,
    attribute_value,
    attributes,
    clean_text,
    cut_text,
    defer_torch,
    mark_value,
)


class _Color(enum.IntEnum):
    RED = 3


class _Level(enum.StrEnum):
    HIGH = "high"


class _MyFloat(float):
    pass


class _Floating:
    def __float__(self) -> float:
        return 2.5

    def __repr__(self) -> str:
        return "_Floating()"  # no address: a test has one name in every process


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (True, "bool", True),
        (0.5, "float", 0.5),
        (-0.0, "float", -0.0),
        (5e-324, "float", 5e-324),
        (2**63 - 1, "int", 2**63 - 1),
        (-(2**63), "int", -(2**63)),
        (2**63, "float", 2.0**63),
        (10**300, "float", 1e300),
        ("text", "string", "text"),
        ("", "string", ""),
        (Decimal("0.25"), "float", 0.25),
        (Fraction(1, 4), "float", 0.25),
        (_Color.RED, "int", 3),
        (_Level.HIGH, "string", "high"),
        (_MyFloat(1.5), "float", 1.5),
        (_Floating(), "float", 2.5),
        (np.float16(0.5), "float", 0.5),
        (np.float32(0.1), "float", float(np.float32(0.1))),
        (np.float64(0.1), "float", 0.1),
        (np.longdouble(0.5), "float", 0.5),
        (np.array([np.longdouble(0.5)]), "float", 0.5),
        (np.int8(-5), "int", -5),
        (np.uint64(2**64 - 1), "float", 2.0**64),
        (np.bool_(True), "bool", True),  # noqa: FBT003 - numpy's constructor
        (np.str_("np"), "string", "np"),
        (np.array(7), "int", 7),
        (np.array([[1.25]]), "float", 1.25),
        (np.ma.masked_array([2.0]), "float", 2.0),
        (torch.tensor(3), "int", 3),
        (torch.tensor([[2.5]]), "float", 2.5),
        (torch.tensor([True]), "bool", True),
        (torch.ones(1, requires_grad=True), "float", 1.0),
        (torch.nn.Parameter(torch.ones(())), "float", 1.0),
    ],
    ids=repr,
)
def test_a_scalar_of_any_kind_is_a_mark(value: object, kind: str, expected: object) -> None:
    """Python, numpy and torch scalars keep their kind and their exact value."""
    made = mark_value(value)
    assert made == MarkValue(kind, expected)  # type: ignore[arg-type]
    assert isinstance(made, MarkValue)
    assert type(made.value) is type(expected)


@pytest.mark.parametrize(
    "name",
    [
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int8",
        "uint8", "int16", "int32", "int64", "uint16", "uint32", "uint64", "bool",
    ],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_every_real_torch_type_is_a_mark(name: str, shape: tuple[int, ...]) -> None:
    """0-d and one-element tensors of any real dtype, 8-bit floats included."""
    made = mark_value(torch.ones(shape).to(getattr(torch, name)))
    assert isinstance(made, MarkValue)
    assert made.value == 1
    expected = "bool" if name == "bool" else "float" if "float" in name else "int"
    assert made.value_type == expected


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (math.nan, "nan"),
        (math.inf, "inf"),
        (-math.inf, "-inf"),
        (np.float32("nan"), "nan"),
        (torch.tensor(math.inf), "inf"),
        (Decimal("NaN"), "nan"),
        (Decimal("-Infinity"), "-inf"),
        (10**400, "inf"),
        (-(10**400), "-inf"),
        (Fraction(10**400), "inf"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_what_is_not_finite_is_null_with_its_name(value: object, name: str) -> None:
    """NaN and infinities stay visible as ``value_nonfinite`` beside a null (E.47)."""
    assert mark_value(value) == MarkValue("float", None, name)


class _RaisingFloat:
    def __float__(self) -> float:
        raise RuntimeError("no")


class _RaisingEverything:
    def __getattr__(self, name: str) -> object:
        raise RuntimeError(name)

    def __float__(self) -> float:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "advice"),
    [
        (None, "leave the mark out"),
        ({"a": 1}, "one mark per entry"),
        ([1, 2], "float() or str()"),
        (b"bytes", "float() or str()"),
        (1j, "float() or str()"),
        (object(), "float() or str()"),
        (Decimal("sNaN"), "float() or str()"),
        (np.zeros(3), ".mean()"),
        (np.zeros(0), ".mean()"),
        (torch.zeros(2, 2), ".mean()"),
        (torch.tensor(1j), "complex64"),
        (np.complex128(1), "complex128"),
        (np.datetime64("2020-01-01"), "datetime64"),
        (torch.empty(1, device="meta"), "that can be read"),
        (_RaisingFloat(), "RuntimeError"),
        (_RaisingEverything(), "RuntimeError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_anything_else_is_refused_with_advice(value: object, advice: str) -> None:
    """Arrays, containers, None and objects that raise: one error type, saying what to use."""
    with pytest.raises(UnsupportedValueError) as caught:
        mark_value(value)
    assert advice in str(caught.value)


def test_a_device_value_is_read_later_and_as_it_was() -> None:
    """Off the CPU the value is copied at once and read when asked for; nobody waits."""
    tensor = torch.tensor([1.5])
    made = defer_torch(tensor)  # as for any device that is not CUDA
    tensor.add_(1)
    assert isinstance(made, Deferred)
    assert made.ready()
    assert made.resolve() == 1.5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("a\0b", "a\ufffdb"),
        ("\ud800", "\ufffd"),
        ("\ud83d\ude00", "\U0001f600"),
        ("\ude00\ud83d", "\ufffd\ufffd"),
        ("\U0001f600", "\U0001f600"),
    ],
)
def test_text_that_no_store_takes_is_cleaned(text: str, expected: str) -> None:
    """NUL and lone surrogates become U+FFFD, pairs of surrogates the character they are."""
    assert clean_text(text) == expected


@given(st.text(st.characters(), max_size=200), st.integers(0, 300))
def test_text_is_cut_at_a_character(text: str, limit: int) -> None:
    """The cut is the longest beginning that fits and is whole characters."""
    text = clean_text(text)
    short = cut_text(text, limit)
    assert text.startswith(short)
    assert len(short.encode()) <= limit
    if short != text:
        assert len(text[: len(short) + 1].encode()) > limit


def test_a_marks_text_has_at_most_256_bytes() -> None:
    """The limit is on UTF-8 bytes, not characters, and never splits one."""
    assert mark_value("x" * 300) == MarkValue("string", "x" * MAX_MARK_BYTES)
    assert mark_value("x" + "\u20ac" * 100) == MarkValue("string", "x" + "\u20ac" * 85)
    assert mark_value("y" * 256) == MarkValue("string", "y" * 256)


_JSON = (bool, int, float, str, type(None), list, dict)


def _only_json(value: object) -> bool:
    if isinstance(value, dict):
        return all(type(key) is str and _only_json(item) for key, item in value.items())
    if isinstance(value, list):
        return all(map(_only_json, value))
    return type(value) in _JSON


_anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(st.characters()), st.binary(),
        st.decimals(), st.fractions(), st.complex_numbers(), st.datetimes(), st.uuids(),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(st.characters()), st.integers(), st.none()), inner),
    ),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.text(st.characters()), _anything, max_size=5))
def test_attributes_are_always_json(given_attrs: dict[str, object]) -> None:
    """Whatever is given, out comes what strict JSON takes and gives back unchanged."""
    clean, _ = attributes(given_attrs)
    assert _only_json(clean)
    text = json.dumps(clean, allow_nan=False)
    assert json.loads(text) == clean
    assert msgspec.json.decode(msgspec.json.encode(clean)) == clean
    assert "\0" not in str(clean)


class _Mute:
    def __str__(self) -> str:
        raise RuntimeError("mute")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (math.nan, "nan"),
        (2**64, str(2**64)),
        (2**63 - 1, 2**63 - 1),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.arange(3), [0, 1, 2]),
        (np.zeros((100, 2)), "ndarray(shape=(100, 2), dtype=float64, device=cpu)"),
        (torch.tensor([1, 2]), [1, 2]),
        (torch.zeros(100), "Tensor(shape=(100,), dtype=torch.float32, device=cpu)"),
        (torch.empty(2, device="meta"), "Tensor(shape=(2,), dtype=torch.float32, device=meta)"),
        (torch.float32, "torch.float32"),
        ({1}, [1]),
        (OrderedDict(a=(1, 2)), {"a": [1, 2]}),
        (_Color.RED, 3),
        (_Level.HIGH, "high"),
        (b"ab\xff", "ab\ufffd"),
        (Decimal("1.50"), "1.50"),
        (_Mute(), "<unserializable>"),
        ({"k": _Mute()}, "<unserializable>"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_attribute_values(value: object, expected: object) -> None:
    """Scalars of libraries become numbers, small arrays lists, large ones a description."""
    assert attribute_value(value) == expected
    assert type(attribute_value(value)) is type(expected)


def test_deep_and_cyclic_attributes_end() -> None:
    """Nesting stops at a depth, a cycle where it closes; neither is an error."""
    deep: list[object] = []
    for _ in range(1000):
        deep = [deep]
    cycle: dict[str, object] = {}
    cycle["self"] = cycle
    clean, _ = attributes({"deep": deep, "cycle": cycle})
    assert clean["cycle"] == {"self": "<cycle>"}
    assert json.loads(json.dumps(clean)) == clean


def test_long_attributes_are_cut_and_named() -> None:
    """Over 64 KiB of UTF-8 a string is cut; one at the limit is not."""
    clean, cut = attributes({"at": "x" * MAX_ATTRIBUTE_BYTES, "over": "\u20ac" * 30_000, "n": 1})
    assert cut == ["over"]
    assert len(clean["at"]) == MAX_ATTRIBUTE_BYTES
    assert len(clean["over"].encode()) == MAX_ATTRIBUTE_BYTES - 1


@pytest.mark.parametrize("make", [lambda: 1.5, lambda: "text", lambda: Decimal(1), lambda: [1]])
def test_no_library_is_imported_for_a_value(make: Callable[[], object]) -> None:
    """A value of a library can only exist where the library is loaded; we load none."""
    value = repr(make())
    program = (
        "import sys; from decimal import Decimal\n"
        "from cirron_otel.values import attribute_value, mark_value, UnsupportedValueError\n"
        f"value = {value}\n"
        "attribute_value(value)\n"
        "try:\n    mark_value(value)\nexcept UnsupportedValueError:\n    pass\n"
        "assert not {'numpy', 'torch', 'jax', 'tensorflow'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=50)
