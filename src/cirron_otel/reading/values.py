"""How values look in a terminal: durations, sizes, times, numbers, and text one must not trust.

Whatever comes out of a spool file may hold control characters; nothing here lets them through to
a terminal.
"""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime

#: Longest text of one value in a line; whole values are in the JSON output.
MAX_TEXT = 80

_US, _MS, _S = 1_000, 1_000_000, 1_000_000_000
_MINUTE, _HOUR, _DAY = 60 * _S, 3600 * _S, 86_400 * _S
_UNITS: Mapping[str, int] = {
    "ns": 1,
    "us": _US,
    "µs": _US,  # MICRO SIGN
    "μs": _US,  # GREEK SMALL LETTER MU
    "ms": _MS,
    "s": _S,
    "m": _MINUTE,
    "min": _MINUTE,
    "h": _HOUR,
}


def duration(ns: float) -> str:
    """A length of time, three digits and a unit: ``12.3 ms``, ``2 m 03 s``."""
    if ns < 0:
        return "-" + duration(-ns)
    if ns >= _DAY:
        return f"{ns // _DAY:.0f} d {ns % _DAY // _HOUR:02.0f} h"
    if ns >= _HOUR:
        return f"{ns // _HOUR:.0f} h {ns % _HOUR // _MINUTE:02.0f} m"
    for unit, size, limit in (("us", _US, 999.5), ("ms", _MS, 999.5), ("s", _S, 99.95)):
        if ns / size < limit:
            # "s" at the end lines up below "ms" and "us".
            return f"{ns / size:.1f} {unit}"
    return f"{ns // _MINUTE:.0f} m {ns % _MINUTE // _S:02.0f} s"


def parse_duration(text: str) -> int:
    """The ns in a text such as ``5ms``, ``1.5 s`` or ``2h``; raises ``ValueError``."""
    stripped = text.strip()
    number = stripped.rstrip("abcdefghijklmnopqrstuvwxyzµμ ")
    unit = stripped[len(number) :].strip()
    try:
        length = float(number) * _UNITS[unit]
    except (KeyError, ValueError):
        length = math.nan
    if not 0 <= length < math.inf:
        raise ValueError(f"{text!r} is not a duration; write for example 500us, 5ms, 1.5s, 2m, 1h")
    return round(length)


def size(count: float) -> str:
    """Bytes: ``512 B``, ``1.4 kB``, ``3.2 MB``."""
    if count < 1000:  # noqa: PLR2004 - the first unit
        return f"{count:.0f} B"
    for unit in ("kB", "MB", "GB"):
        count /= 1000
        if count < 999.95:  # noqa: PLR2004 - prints as 1000.0
            return f"{count:.1f} {unit}"
    return f"{count / 1000:.1f} TB"


def local_time(ns: int) -> str:
    """A time of day here: ``2026-11-29 21:52:03``; the number itself when no calendar has it."""
    try:
        return datetime.fromtimestamp(ns // _S, UTC).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError, OSError):
        return str(ns)


def iso_time(ns: int) -> str:
    """A time as ISO 8601 in UTC, with all nine digits."""
    try:
        moment = datetime.fromtimestamp(ns // _S, UTC)
    except (ValueError, OverflowError, OSError):
        return str(ns)
    return f"{moment:%Y-%m-%dT%H:%M:%S}.{ns % _S:09d}Z"


def number(value: float) -> str:
    """A number: ints whole, floats to four digits."""
    return str(value) if isinstance(value, int) else f"{value:.4g}"


def text(value: object, limit: int = MAX_TEXT) -> str:
    """Any value of a row in one short piece of a line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return number(value)
    out = _nested(value, limit)
    return out if len(out) <= limit else out[: limit - 1] + "…"


def _nested(value: object, limit: int) -> str:
    if isinstance(value, str):
        out = clean(value[: limit + 1])
        quoted = out == "" or any(c.isspace() or c in "=\"'" for c in out)
        return '"' + out.replace('"', '\\"') + '"' if quoted else out
    if isinstance(value, Mapping):
        pairs = [f"{clean(str(k))}: {clean(str(v))}" for k, v in list(value.items())[:limit]]
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, Sequence):
        return "[" + ", ".join(clean(str(item)) for item in value[:limit]) + "]"
    return clean(str(value))


def clean(raw: str) -> str:
    """The text without anything that a terminal would act on; such characters are spelled out."""
    if raw.isprintable():
        return raw
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in raw)


def width(shown: str) -> int:
    """How many columns a text takes on a terminal."""
    if shown.isascii():
        return len(shown)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in shown
    )


def plural(name: str, count: int) -> str:
    """``step`` for one, ``steps`` for several; ``GET /items`` and ``items`` stay as they are."""
    if count == 1 or not name.replace("_", "").isalpha():
        return name
    if name.endswith("s") and not name.endswith("ss"):
        return name
    return name + ("es" if name.endswith(("s", "x", "tch", "sh")) else "s")


def counted(count: int, name: str) -> str:
    """``1 tensor``, ``2,000 tensors``."""
    return f"{count:,} {plural(name, count)}"
