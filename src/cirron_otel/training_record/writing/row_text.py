"""The text of a metrics row: one check, one line."""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from cirron_otel.errors import RecordError
from cirron_otel.training_record.canonical import json_value
from cirron_otel.training_record.line_text import is_plain

_encode = json.JSONEncoder(separators=(",", ":"), allow_nan=False).encode
_RESERVED = frozenset({"nonfinite", "digest", "lost_before"})


def metrics_row(
    step: int,
    loss: float | None,
    grad: Mapping[str, float],
    stuck: Mapping[str, Sequence[int]],
    more: Mapping[str, object],
) -> dict[str, Any]:
    """A row as plain JSON data, without its digest.

    A number that is not finite is null, and ``nonfinite`` says under ``loss`` or ``grad.<module>``
    what it was. Raises :class:`~cirron_otel.errors.RecordError` for what is no row.
    """
    nonfinite: dict[str, str] = {}
    try:
        row: dict[str, Any] = {
            "step": operator.index(step),
            "loss": None if loss is None else _number(loss, "loss", nonfinite),
            "grad": {
                _name(name): _number(value, f"grad.{name}", nonfinite)
                for name, value in grad.items()
            },
            "stuck": {
                _name(name): [operator.index(count) for count in counts]
                for name, counts in stuck.items()
            },
        }
    except (TypeError, ValueError, AttributeError, OverflowError) as exc:
        raise RecordError(f"no metrics row can be made of what the check gave: {exc}") from exc
    if row["step"] < 0 or isinstance(step, bool):
        raise RecordError(f"step is {step!r}: a step is a whole number from 0 on")
    if any(norm is not None and norm < 0 for norm in row["grad"].values()):
        raise RecordError(f"a gradient norm at step {step} is negative: no norm is")
    if not _RESERVED.isdisjoint(more):
        raise RecordError(f"a row's {', '.join(sorted(_RESERVED))} are made by the journal")
    if nonfinite:
        row["nonfinite"] = nonfinite
    for key, value in more.items():
        row[key] = value if is_plain(value) else json_value(value)
    return row


def row_line(row: dict[str, Any]) -> tuple[dict[str, Any], bytes]:
    """The row as it will be read back, and its line."""
    text = _encode(row)
    if "\\ud" in text:  # see line_text.body_text
        row = json.loads(text)
        text = _encode(row)
    return row, text.encode("ascii") + b"\n"


def _name(name: object) -> str:
    return name if type(name) is str else str(json_value(name))


def _number(value: float, where: str, nonfinite: dict[str, str]) -> float | None:
    if type(value) is int and -(2**63) <= value < 2**63:
        return value
    number = value if type(value) is float else float(value)
    if math.isfinite(number):
        return number
    nonfinite[where] = "nan" if math.isnan(number) else "inf" if number > 0 else "-inf"
    return None
