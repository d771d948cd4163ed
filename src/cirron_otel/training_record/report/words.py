"""How a record's values and events read in a sentence. Plain text: whoever prints it escapes it."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Mapping
from datetime import UTC, datetime

from cirron_otel.training_record.report.model import Episode, Event, Finding, Run

_MINUTE, _HOUR, _DAY = 60, 3600, 86_400
#: Stands where there is no value.
NOTHING = "\N{EN DASH}"

DIAGNOSES: Mapping[str, str] = {
    "no_gradient": "no gradient",
    "vanishing": "vanishing gradient",
    "exploding": "exploding gradient",
    "stuck": "stuck channels",
    "loss_spike": "loss spike",
    "nonfinite": "loss not finite",
}

TITLES: Mapping[str, str] = {
    "run_start": "run started",
    "structure": "structure",
    "manifest": "what is watched",
    "alarm": "alarm",
    "alarm_cleared": "alarm cleared",
    "channels": "stuck channels",
    "channels_cleared": "channels cleared",
    "certificate": "proven dead",
    "certificate_refused": "no certificate",
    "no_gradients": "no gradients",
    "loss_reduced": "loss reduced",
    "repair": "repair",
    "loss_spike": "loss spike",
    "loss_recovered": "loss recovered",
    "nonfinite_loss": "loss not finite",
    "nonfinite_gradient": "gradient not finite",
    "skipped_step": "step skipped",
    "sink_error": "sink failed",
    "run_end": "run ended",
}


def clean(value: str, limit: int = 200) -> str:
    """Text of a record made safe to show: one line, no control, format or surrogate characters."""
    if len(value) <= limit and value.isascii() and value.isprintable():
        return value
    shown = "".join(map(_shown, value[: limit + 1]))
    return shown if len(shown) <= limit else shown[: limit - 1] + "…"


def _shown(char: str) -> str:
    if char.isspace():
        return " "
    return "\N{REPLACEMENT CHARACTER}" if unicodedata.category(char)[0] == "C" else char


def layer_name(name: str | None) -> str:
    """A module's name; the root module has an empty one."""
    if name is None:
        return "the whole run"
    return clean(name) or "(the whole model)"


def number(value: object, digits: int = 4) -> str:
    """A number with so many significant digits; what is none in words."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return NOTHING if value is None else clean(str(value), 40)
    try:
        value = float(value)
    except OverflowError:
        return "over 1e308"
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "infinite" if value > 0 else "minus infinite"
    if value == 0 or 1e-3 <= abs(value) < 1e6:  # noqa: PLR2004 - readable without an exponent
        shown = f"{value:.{digits}g}"
        return f"{value:.0f}" if "e" in shown else shown
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    if "." in mantissa:
        mantissa = mantissa.rstrip("0").rstrip(".")
    return f"{mantissa}e{int(exponent)}"


def count(value: object) -> str:
    """A whole number with thin spaces between thousands: ``12 345``."""
    if value is None or isinstance(value, bool) or not isinstance(value, int):
        return NOTHING
    if abs(value) >= 10**18:
        return f"{value:.2e}" if abs(value) < 10**300 else "a lot"
    return f"{value:,}".replace(",", "\N{NARROW NO-BREAK SPACE}")


def plural(many: int, one: str, more: str | None = None) -> str:
    """``1 check``, ``3 checks``."""
    return f"{count(many)} {one if many == 1 else more or one + 's'}"


def duration(seconds: float | None) -> str:  # noqa: PLR0911 - a unit each
    """A length of time in the two units that matter: ``3 min 20 s``."""
    if seconds is None or not math.isfinite(seconds):
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:  # noqa: PLR2004 - one decimal while it says something
        return f"{seconds:.1f} s"
    seconds = round(seconds)
    if seconds < _MINUTE:
        return f"{seconds} s"
    if seconds < _HOUR:
        return f"{seconds // _MINUTE} min {seconds % _MINUTE:02d} s"
    if seconds < _DAY:
        return f"{seconds // _HOUR} h {seconds % _HOUR // _MINUTE:02d} min"
    return f"{seconds // _DAY} d {seconds % _DAY // _HOUR:02d} h"


def short_duration(seconds: float) -> str:
    """A length of time in at most eight characters: ``12.3s``, ``4m03s``, ``2h05m``."""
    if seconds < 0:
        return "-" + short_duration(-seconds)
    if seconds < 99.95:  # noqa: PLR2004 - two digits
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < _HOUR:
        return f"{whole // _MINUTE}m{whole % _MINUTE:02d}s"
    if whole < _DAY:
        return f"{whole // _HOUR}h{whole % _HOUR // _MINUTE:02d}m"
    return f"{whole // _DAY}d{whole % _DAY // _HOUR:02d}h"


def moment(seconds: float | None) -> str:
    """A time in UTC: ``2026-11-30 14:05:12 UTC``."""
    if seconds is None:
        return "unknown"
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return number(seconds)


def title(name: str) -> str:
    """An event type in words; one that is not in the format as it is."""
    return TITLES.get(name) or clean(name.replace("_", " "), 40)


def describe(event: Event) -> str:
    """What an event says, in one line, without its layer's name."""
    say = _SENTENCES.get(event.name)
    told = say(event.fields) if say is not None else _fields(event.fields)
    cause = event.fields.get("caused_by")
    if isinstance(cause, str):
        told += f"; caused by {clean(cause)}"
    if event.count > 1:
        told += f" ({count(event.count)} times up to step {count(event.last_step)})"
    return told


def _alarm(fields: Mapping[str, object]) -> str:
    what = DIAGNOSES.get(str(fields.get("diagnosis")), clean(str(fields.get("diagnosis")), 40))
    return f"{what}: norm {number(fields.get('grad_norm'))}, usual {number(fields.get('baseline'))}"


def _channels(fields: Mapping[str, object]) -> str:
    kinds = (
        ("n_certified", "proven dead"),
        ("n_flat", "constant"),
        ("n_decayed", "decayed"),
        ("n_observed", "silent"),
    )
    parts = [f"{count(fields.get(key))} {word}" for key, word in kinds if fields.get(key)]
    of = f" of {count(fields.get('channels'))} channels"
    told = (", ".join(parts) or "none") + of
    if "n_violated" in fields:
        gone = count(fields.get("n_violated"))
        return f"{gone} no longer proven dead: {clean(str(fields.get('reason')), 160)}; {told}"
    return told


def _many(fields: Mapping[str, object], key: str) -> int:
    total = fields.get(f"{key}_total")
    return total if isinstance(total, int) else 0


def _names(fields: Mapping[str, object]) -> str:
    value = fields.get("layers")
    listed = value if isinstance(value, list) else []
    names = [layer_name(name) for name in listed if isinstance(name, str)]
    shown = ", ".join(names[:4])
    more = _many(fields, "layers") - len(names[:4])
    return shown + (f" and {more} more" if more > 0 else "") or "no layer named"


def _repair(fields: Mapping[str, object]) -> str:
    size = fields.get("relative_change")
    change = (
        f"; the weight changed by {number(size, 3)} of its norm"
        if isinstance(size, (int, float))
        else ""
    )
    what = "put back as they were" if fields.get("rule") == "undone" else "re-initialised"
    return f"{count(fields.get('count'))} channels {what}{change}"


def _end(fields: Mapping[str, object]) -> str:
    told = f"after {count(fields.get('steps'))} steps and {count(fields.get('checks'))} checks"
    if isinstance(fields.get("error"), str):
        told += f", with {clean(str(fields['error']), 120)}"
    if fields.get("interrupted") is True:
        told += ", interrupted"
    return told


def _fields(fields: Mapping[str, object]) -> str:
    """The scalars of an event that the format does not know."""
    parts = [
        f"{clean(name, 40)} {clean(value, 60) if isinstance(value, str) else number(value)}"
        for name, value in fields.items()
        if isinstance(value, (str, int, float)) and not name.endswith("_total")
    ]
    return ", ".join(parts[:6])


_SENTENCES = {
    "run_start": lambda f: (
        f"{clean(str(f.get('model')), 60)}, {count(f.get('parameters'))} parameters, "
        f"{clean(str(f.get('tool')), 60)}"
    ),
    "structure": lambda f: f"read from the {clean(str(f.get('graph') or 'model'), 40)}",
    "manifest": lambda f: f"a check every {count(f.get('check_every'))} steps",
    "alarm": _alarm,
    "alarm_cleared": lambda f: "back in range after " + _alarm(f),
    "channels": _channels,
    "channels_cleared": lambda f: f"all {count(f.get('channels'))} channels are free again",
    "certificate": lambda f: f"{count(f.get('count'))} channels can never learn again",
    "certificate_refused": lambda f: (
        f"{count(f.get('count'))} channels look dead: {clean(str(f.get('reason')), 160)}"
    ),
    "no_gradients": lambda f: clean(str(f.get("message")), 200),
    "loss_reduced": lambda f: f"mean of {count(f.get('elements'))} elements",
    "repair": _repair,
    "loss_spike": lambda f: f"{number(f.get('value'))}, usual {number(f.get('baseline'))}",
    "loss_recovered": lambda f: f"{number(f.get('value'))}, usual {number(f.get('baseline'))}",
    "nonfinite_loss": lambda f: f"the loss is {clean(str(f.get('value')), 20)}",
    "nonfinite_gradient": lambda f: f"in {_names(f)}",
    "skipped_step": lambda f: f"by the gradient scaler at scale {number(f.get('scale'))}",
    "sink_error": lambda f: f"{clean(str(f.get('sink')), 60)}: {clean(str(f.get('error')), 120)}",
    "run_end": _end,
}


def episode(item: Episode) -> str:
    """What an episode is, without its layer and steps."""
    what = DIAGNOSES.get(item.kind, clean(item.kind, 40))
    return f"{what} ({clean(item.detail)})" if item.detail else what


def finding(item: Finding) -> str:
    """A finding in a line, without its layer."""
    told = f"{clean(item.kind.replace('_', ' '), 60)}: {clean(item.message, 300)}"
    return told if item.message else told.rstrip(": ")


def optimizer(run: Run) -> str:
    """The optimizer with what is known of its settings: ``AdamW, lr 0.001``."""
    value = run.start.get("optimizer")
    if not isinstance(value, dict):
        return "none given"
    parts = [clean(str(value.get("type", "unknown")), 60)]
    parts += [
        f"{clean(str(key), 40)} {scalar(item)}" for key, item in value.items() if key != "type"
    ]
    return ", ".join(parts[:12])


def scalar(value: object, depth: int = 4) -> str:  # noqa: PLR0911 - a type each
    """Any JSON value as short text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if value is None:
        return "none"
    if isinstance(value, str):
        return clean(value, 200)
    if isinstance(value, int):
        return str(value) if abs(value) < 10**15 else number(value)
    if isinstance(value, float):
        return number(value, 6)
    if depth == 0 and isinstance(value, (list, dict)):
        return "…"
    if isinstance(value, list):
        shown = ", ".join(scalar(item, depth - 1) for item in value[:8])
        return (shown + (f", … ({len(value)} in all)" if len(value) > 8 else "")) or "none"  # noqa: PLR2004
    if isinstance(value, dict):
        shown = ", ".join(
            f"{clean(str(key), 40)}: {scalar(item, depth - 1)}"
            for key, item in [*value.items()][:8]
        )
        return clean(shown or "none", 300)
    return clean(str(value))


def flatten(value: object, prefix: str = "", depth: int = 4) -> dict[str, object]:
    """Nested objects as ``outer.inner`` keys; lists stay whole."""
    if not isinstance(value, dict) or depth == 0:
        return {prefix: value}
    flat: dict[str, object] = {}
    for key, item in [*value.items()][:500]:
        flat.update(flatten(item, f"{prefix}.{key}" if prefix else str(key), depth - 1))
    return flat
