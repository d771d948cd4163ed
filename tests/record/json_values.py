"""Arbitrary JSON for property tests: values, and texts that say them in unusual ways."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

_SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.sampled_from([0.0001, 0.00001, 1e16, 1e15, 9.5e-5, -0.0, 5e-324, 1e-7, 1e22, 123456.75])
    | st.text()
    | st.text('ab, :{}[]"\\\x7f\u00e9\U0001f600\ud800', max_size=8)
)


def json_values() -> st.SearchStrategy[Any]:
    """Any JSON value that Python reads, bare NaN and lone surrogates too."""
    return st.recursive(
        _SCALARS,
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
        max_leaves=10,
    )


def json_objects() -> st.SearchStrategy[dict[str, Any]]:
    """Any JSON object."""
    return st.dictionaries(st.text(max_size=6), json_values(), max_size=6)


@st.composite
def spelled_lines(draw: st.DrawFn) -> bytes:
    """One object a line, spelled in one of the ways that there are, some of them wrong."""
    value = draw(json_objects())
    separators = draw(st.sampled_from([(", ", ": "), (",", ":"), (" ,", ":"), (", ", ":")]))
    text = json.dumps(
        value,
        separators=separators,
        ensure_ascii=draw(st.booleans()),
        sort_keys=draw(st.booleans()),
    )
    how = draw(st.sampled_from(["", "", "", "double", "number", "cut", "space", "two", "crlf"]))
    if how == "double":
        text = text[:-1] + (", " if value else "") + '"a": 1, "a": 2}'
    elif how == "number":
        text = text[:-1] + (", " if value else "") + draw(
            st.sampled_from(
                ['"z": 1.50}', '"z": 1e5}', '"z": 1E-7}', '"z": 1e-7}', '"z": -0}', '"z": 1e400}',
                 '"z": 0.00001}', '"z": 1e16}', '"z": 1' + "0" * 5000 + "}", '"z": 10.0e1}',
                 '"z": 100000000000000000000.0}', '"z": 0.10000000000000000555}']
            )
        )  # fmt: skip
    elif how == "cut":
        text = text[: draw(st.integers(0, len(text)))]
    elif how == "space":
        text = f" {text}\t"
    elif how == "two":
        text = f"{text},{text}"
    elif how == "crlf":
        text += "\r"
    return text.encode("utf-8", "surrogatepass")
