"""What the rows of requests say for the metrics of a service: ``gen_ai.server.*``.

Every request counts, whatever the sampler or a limit says of its span. Pure functions.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from msgspec import UNSET

from cirron_otel import semconv
from cirron_otel.batch import SpanRecord
from cirron_otel.otlp.instruments import MAX_KEY_CHARS, PART
from cirron_otel.otlp.rows import error_type

_LONGEST_S = 1e9


class Measured(NamedTuple):
    """Lengths in ns of one series, and the row of each."""

    lengths: list[int]
    rows: list[SpanRecord]


def measured(rows: Iterable[SpanRecord]) -> dict[tuple[str, str], Measured]:
    """The measurements that closed rows of requests give, by metric and key of the series."""
    out: dict[tuple[str, str], Measured] = {}

    def note(name: str, key: str, length_ns: int, row: SpanRecord) -> None:
        series = out.get((name, key))
        if series is None:
            series = out[name, key] = Measured([], [])
        series.lengths.append(length_ns)
        series.rows.append(row)

    for row in rows:
        attrs = row.attrs
        if row.end_ns is UNSET or semconv.GEN_AI_OPERATION not in attrs:
            continue  # a scope that somebody else named so
        who = PART.join(
            _word(attrs.get(name))
            for name in (
                semconv.GEN_AI_OPERATION,
                semconv.GEN_AI_PROVIDER,
                semconv.GEN_AI_REQUEST_MODEL,
                semconv.GEN_AI_RESPONSE_MODEL,
            )
        )
        length = max(0, row.end_ns - row.start_ns)
        failed = row.otel is not UNSET and row.otel.status == "error"
        why = error_type(row)
        what = (_word(why) or "_OTHER") if failed else ""
        note(semconv.SERVER_DURATION, f"{what}{PART}{who}", length, row)
        first = _nanoseconds(attrs.get(semconv.GEN_AI_TIME_TO_FIRST_CHUNK))
        if failed or first is None:
            continue
        note(semconv.SERVER_TIME_TO_FIRST_TOKEN, who, first, row)
        tokens = attrs.get(semconv.GEN_AI_OUTPUT_TOKENS)
        if type(tokens) is int and tokens > 1 and length >= first:
            each = (length - first) // (tokens - 1)
            note(semconv.SERVER_TIME_PER_OUTPUT_TOKEN, who, each, row)
    return out


def _word(value: Any) -> str:  # noqa: ANN401 - whatever stands in a row
    """An attribute's value as a part of a series' key; nothing where it is no text."""
    return value[:MAX_KEY_CHARS].replace(PART, " ") if isinstance(value, str) else ""


def _nanoseconds(value: Any) -> int | None:  # noqa: ANN401 - as above
    if isinstance(value, (int, float)) and 0 <= value < _LONGEST_S:
        return round(value * 1e9)
    return None
