"""The 19 event types of a training record: what each must carry, and what must have which value.

A line may carry more fields than its type asks for, never fewer. New data goes into further
fields: a new event type would make the record fail in readers that know only these.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

#: ``run_start.record_version`` of this form of record.
RECORD_VERSION = 1

COMMON = ("seq", "time", "event", "prev", "hash")
SEVERITIES = frozenset({"info", "warning", "critical", "proof", "action"})
DIAGNOSES = frozenset({"no_gradient", "vanishing", "exploding"})
LEVELS = frozenset({"none", "some", "most", "all"})


class EventType(NamedTuple):
    """What an event must carry beyond the common fields, and what is fixed in it."""

    required: frozenset[str]
    fixed: Mapping[str, object]
    choices: Mapping[str, frozenset[str]]


def _event(
    fields: str,
    choices: Mapping[str, frozenset[str]] = MappingProxyType({}),
    **fixed: object,
) -> EventType:
    return EventType(frozenset(fields.split()), MappingProxyType(fixed), choices)


_DIAGNOSED = MappingProxyType({"diagnosis": DIAGNOSES})
_LEVELLED = MappingProxyType({"level": LEVELS})
_CHANNELS = (
    "step severity layer batchnorm channels level n_certified n_flat n_observed n_decayed "
    "certified flat observed"
)

EVENTS: Mapping[str, EventType] = MappingProxyType(
    {
        "run_start": _event(
            "name tool model parameters layers architecture_sha256 optimizer python torch platform "
            "config record_version",
            record_version=RECORD_VERSION,
        ),
        "structure": _event("step pairs relu_after"),
        "manifest": _event(
            "step check_every layers producers channel_checks repair precision distributed notes"
        ),
        "alarm": _event(
            "step severity layer kind diagnosis grad_norm baseline sigma",
            _DIAGNOSED,
            severity="warning",
        ),
        "alarm_cleared": _event("step layer diagnosis grad_norm baseline", _DIAGNOSED),
        "channels": _event(_CHANNELS, _LEVELLED),
        "channels_cleared": _event(_CHANNELS, _LEVELLED),
        "certificate": _event(
            "step severity layer batchnorm channels count statement assumes", severity="proof"
        ),
        "certificate_refused": _event(
            "step severity layer batchnorm count reason", severity="info"
        ),
        "no_gradients": _event("step severity message", severity="warning"),
        "loss_reduced": _event("step severity elements", severity="info"),
        "repair": _event(
            "step severity layer batchnorm channels count method optimizer_slices_reset "
            "modification_class bound delta_norm weight_norm_before weight_norm_after "
            "relative_change rng",
            severity="action",
            modification_class="discrete",
            bound=None,
        ),
        "loss_spike": _event("step severity value baseline", severity="warning"),
        "loss_recovered": _event("step value baseline"),
        "nonfinite_loss": _event("step severity value", severity="critical"),
        "nonfinite_gradient": _event("step severity layers", severity="critical"),
        "skipped_step": _event("step severity scale layers", severity="info"),
        "sink_error": _event("sink error"),
        "run_end": _event("steps checks counts metrics_sha256"),
    }
)

is_hash = re.compile(r"[0-9a-f]{64}").fullmatch


class Quick(NamedTuple):
    """An event type's rules, ready to be looked at a hundred thousand times."""

    required: frozenset[str]
    fixed: tuple[tuple[str, object], ...]
    choices: tuple[tuple[str, frozenset[str]], ...]
    has_step: bool
    #: There is no ``severity`` that is not fixed.
    severe: bool


def _quick(form: EventType) -> Quick:
    fixed = tuple(form.fixed.items())
    choices = tuple(form.choices.items())
    return Quick(form.required, fixed, choices, "step" in form.required, "severity" in form.fixed)


QUICK: Mapping[str, Quick] = {name: _quick(form) for name, form in EVENTS.items()}


def is_in_order(event: Mapping[str, object], form: Quick) -> bool:
    """Whether :func:`field_problems` finds nothing, beyond doubt; where not, ask that."""
    if not form.required <= event.keys():
        return False
    for name, wanted in form.fixed:
        found = event[name]
        if found is not wanted and (type(found) is not type(wanted) or found != wanted):
            return False
    for name, allowed in form.choices:
        found = event[name]
        if type(found) is not str or found not in allowed:
            return False
    if form.has_step:
        step = event["step"]
        if type(step) is not int or step < 0:
            return False
    if not form.severe and "severity" in event:
        found = event["severity"]
        return type(found) is str and found in SEVERITIES
    return True


def problems(event: Mapping[str, object]) -> list[str]:
    """What is wrong with a whole line, in a reader's words; empty for a line that is in order.

    An event type that is not in :data:`EVENTS` is a problem here, as a writer must not invent one;
    a reader passes it over (:func:`field_problems` has nothing to say about it).
    """
    found = [f"{name} is missing" for name in COMMON if name not in event]
    seq = event.get("seq", 0)
    if type(seq) is not int or seq < 0:
        found.append("seq is not a whole number from 0 on")
    if type(event.get("time", 0)) not in {int, float}:
        found.append("time is not a number")
    for name in ("prev", "hash"):
        value = event.get(name, "0" * 64)
        if not isinstance(value, str) or not is_hash(value):
            found.append(f"{name} is not 64 lower-case hex digits")
    kind = event.get("event", "run_end")
    if not isinstance(kind, str):
        found.append("event is not text")
    elif kind not in EVENTS:
        found.append("event type is unknown")
    return found + field_problems(event)


def field_problems(event: Mapping[str, object]) -> list[str]:
    """What is wrong with the fields that belong to the event's type, the common ones left out.

    For a writer, before ``seq``, ``time`` and the hashes exist. An unknown event type has none but
    a wrong ``severity``.
    """
    found: list[str] = []
    kind = event.get("event")
    form = EVENTS.get(kind) if isinstance(kind, str) else None
    if form is not None:
        if not form.required <= event.keys():
            found += [f"{name} is missing" for name in sorted(form.required - event.keys())]
        for name, value in form.fixed.items():
            if name in event and not _is(event[name], value):
                found.append(f"{name} is not {_json(value)}")
        for name, allowed in form.choices.items():
            if name in event and not _one_of(event[name], allowed):
                found.append(f"{name} is none of {', '.join(sorted(allowed))}")
        if "step" in form.required and "step" in event:
            step = event["step"]
            if type(step) is not int or step < 0:
                found.append("step is not a whole number from 0 on")
    if "severity" in event and not _one_of(event["severity"], SEVERITIES):
        found.append(f"severity is none of {', '.join(sorted(SEVERITIES))}")
    return found


def _is(value: object, expected: object) -> bool:
    """Equal and of the same type: True is not 1 here."""
    return type(value) is type(expected) and value == expected


def _one_of(value: object, allowed: frozenset[str]) -> bool:
    return isinstance(value, str) and value in allowed


def _json(value: object) -> str:
    return "null" if value is None else repr(value).replace("'", '"')
