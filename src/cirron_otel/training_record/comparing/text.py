"""A comparison of two records as lines for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from cirron_otel.training_record.comparing.parts import LayerChange
from cirron_otel.training_record.report import conclusions, words

if TYPE_CHECKING:
    from cirron_otel.training_record.comparing.diff import Difference

_STATES = ("worse", "mixed", "better")
_VERDICTS = {
    "unverified": "not comparable: a record does not verify",
    "regression": "the second run is worse",
    "better": "the second run is better",
    "different": "different, and nothing got worse",
    "same": "the same",
}


def text_lines(found: Difference) -> Iterator[str]:
    """The lines, without colour."""
    a, b = found.a, found.b
    yield f"{words.clean(a.name, 60)} → {words.clean(b.name, 60)}: {_VERDICTS[found.verdict]}"
    if found.regressions:
        yield ""
        yield "Regressions"
        yield from (f"  {item.kind:<13} {item.message}" for item in found.regressions)
    yield ""
    pairs: list[tuple[str, str, str]] = [
        ("status", conclusions.status(a).title, conclusions.status(b).title),
        ("record", conclusions.trust(a).title, conclusions.trust(b).title),
        ("steps", words.count(a.steps), words.count(b.steps)),
        ("wall clock", words.duration(a.seconds), words.duration(b.seconds)),
        ("final loss", words.number(a.loss.final), words.number(b.loss.final)),
        ("best loss", words.number(a.loss.best), words.number(b.loss.best)),
        ("loss, same steps", words.number(found.loss.mean_a), words.number(found.loss.mean_b)),
    ]
    yield from _columns(pairs)
    if found.loss.common:
        differs = found.loss.first_difference
        yield f"  {words.plural(found.loss.common, 'common check')}, the loss " + (
            "is the same at all of them"
            if differs is None
            else f"first differs at step {words.count(differs)}, most at step "
            f"{words.count(found.loss.largest_step)} by {words.number(found.loss.largest)}"
        )
    same = {True: "the same", False: "different", None: "unknown"}[found.same_architecture]
    yield f"  architecture: {same}"
    for title, changes in (
        ("Settings", found.config),
        ("Environment", found.environment),
        ("Events", found.events),
    ):
        if changes:
            yield ""
            yield title
            yield from _columns(
                [(item.name, words.scalar(item.a), words.scalar(item.b)) for item in changes]
            )
    if found.layers:
        yield ""
        yield "Layers"
        for item in sorted(found.layers, key=_rank):
            news = [f"new: {', '.join(item.new)}"] if item.new else []
            news += [f"no longer: {', '.join(item.fixed)}"] if item.fixed else []
            told = f"  ({'; '.join(words.clean(entry, 120) for entry in news)})" if news else ""
            yield f"  {words.layer_name(item.layer)}: {item.health}{told}"


def _rank(item: LayerChange) -> int:
    return _STATES.index(item.health) if item.health in _STATES else len(_STATES)


def _columns(listed: list[tuple[str, str, str]]) -> Iterator[str]:
    """Names and both values, each column as wide as it must be, up to a bound."""
    name = min(max(len(row[0]) for row in listed), 40)
    value = min(max(len(row[1]) for row in listed), 56)
    for row in listed:
        yield f"  {row[0]:<{name}}  {row[1]:<{value}}  {row[2]}".rstrip()
