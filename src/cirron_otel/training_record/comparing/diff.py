"""What is different between two records, what got worse, and whether that should stop a merge.

The first record is the one to compare with (the baseline), the second the one in question.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from cirron_otel.training_record.comparing.parts import (
    LayerChange,
    LossChange,
    equal,
    layer_change,
    losses,
)
from cirron_otel.training_record.comparing.text import text_lines
from cirron_otel.training_record.report import conclusions, words
from cirron_otel.training_record.report.gather import load
from cirron_otel.training_record.report.lines import whole
from cirron_otel.training_record.report.model import Run

#: By how much of itself the loss may be higher before that is a regression.
LOSS_TOLERANCE = 0.05
_ENVIRONMENT = ("tool", "python", "torch", "platform", "model", "parameters", "record_version")


@dataclass(frozen=True, slots=True)
class Change:
    """A fact that differs; None where one record does not have it."""

    name: str
    a: object
    b: object


@dataclass(frozen=True, slots=True)
class Regression:
    """Something that got worse, why it counts as that, and in which layer."""

    kind: str
    message: str
    layer: str | None = None


@dataclass(slots=True)
class Difference:
    """Two records side by side. Made by :func:`diff`."""

    a: Run
    b: Run
    same_architecture: bool | None
    config: list[Change] = field(default_factory=list)
    environment: list[Change] = field(default_factory=list)
    events: list[Change] = field(default_factory=list)
    layers: list[LayerChange] = field(default_factory=list)
    loss: LossChange = field(default_factory=LossChange)
    regressions: list[Regression] = field(default_factory=list)

    @property
    def differences(self) -> list[str]:
        """What differs at all, one sentence each; wall-clock time does not count."""
        told = []
        if self.same_architecture is False:
            told.append("the architecture differs")
        told += [
            f"{item.name}: {words.scalar(item.a)} → {words.scalar(item.b)}"
            for item in (*self.config, *self.environment)
        ]
        if self.a.steps != self.b.steps:
            told.append(f"steps: {words.count(self.a.steps)} → {words.count(self.b.steps)}")
        if self.loss.first_difference is not None:
            told.append(f"the loss differs from step {words.count(self.loss.first_difference)} on")
        told += [
            f"events {words.title(item.name)}: {words.scalar(item.a)} → {words.scalar(item.b)}"
            for item in self.events
        ]
        told += [f"{words.layer_name(item.layer)}: {item.health}" for item in self.layers]
        return told

    @property
    def verdict(self) -> str:
        """One of ``unverified``, ``regression``, ``better``, ``different``, ``same``."""
        if any(item.kind == "verification" for item in self.regressions):
            return "unverified"
        if self.regressions:
            return "regression"
        if any(item.health == "better" for item in self.layers):
            return "better"
        return "different" if self.differences else "same"

    def fails(self, gate: str) -> bool:
        """Whether a gate is to fail: ``never``, on a ``regression``, or on any ``difference``."""
        if gate == "never":
            return False
        if gate not in {"regression", "difference"}:
            raise ValueError(f"{gate!r} is no gate: use never, regression or difference")
        return bool(self.regressions or (gate == "difference" and self.differences))

    def to_dict(self) -> dict[str, object]:
        """The difference as plain data that JSON can hold. The layout may gain keys."""
        return {
            "verdict": self.verdict,
            "regressions": [asdict(item) for item in self.regressions],
            "differences": self.differences,
            "a": _side(self.a),
            "b": _side(self.b),
            "same_architecture": self.same_architecture,
            "config_changes": _changes(self.config),
            "environment_changes": _changes(self.environment),
            "events": _changes(self.events),
            "loss": asdict(self.loss),
            "layers": [asdict(item) for item in self.layers],
        }

    def text(self) -> Iterator[str]:
        """The difference as aligned lines for a terminal, without colour."""
        yield from text_lines(self)


def diff(
    a: str | Path,
    b: str | Path,
    *,
    loss_tolerance: float = LOSS_TOLERANCE,
    key: bytes | str | Path | None = None,
    verdicts: tuple[Mapping[str, object], Mapping[str, object]] | None = None,
) -> Difference:
    """Compare record ``b`` with record ``a``: run directories or diary files.

    ``loss_tolerance`` is the share by which the loss of ``b`` may be higher (0.05: five per cent);
    ``key`` is the public key for the signatures of both; ``verdicts`` are verifications done
    before. Raises :class:`~cirron_otel.errors.RecordError` where one of them cannot be read, and
    ``ValueError`` for a tolerance that is no share. Reads both records, in bounded memory.
    """
    if not 0 <= loss_tolerance < math.inf:
        raise ValueError(f"loss_tolerance is {loss_tolerance}: use a share such as 0.05")
    first, second = verdicts or (None, None)
    run_a, run_b = load(a, key=key, verdict=first), load(b, key=key, verdict=second)
    runs = (run_a, run_b)
    hashes = [run.start.get("architecture_sha256") for run in runs]
    found = Difference(
        run_a,
        run_b,
        same_architecture=None if None in hashes else hashes[0] == hashes[1],
        config=[
            change
            for part in ("optimizer", "config")
            for change in _compare(*(words.flatten(run.start.get(part), part) for run in runs))
        ],
        environment=_compare(
            *({name: run.start.get(name) for name in _ENVIRONMENT} for run in runs)
        ),
        events=_compare(dict(run_a.counts), dict(run_b.counts), absent=0),
        loss=losses(run_a, run_b),
    )
    names = [*run_a.layers, *(name for name in run_b.layers if name not in run_a.layers)]
    for name in names:
        change = layer_change(name, run_a.layers.get(name), run_b.layers.get(name))
        if change is not None:
            found.layers.append(change)
    found.regressions = list(_regressions(found, loss_tolerance))
    return found


def _compare(
    a: Mapping[str, object], b: Mapping[str, object], *, absent: object = None
) -> list[Change]:
    names = [*a, *(name for name in b if name not in a)]
    pairs = ((name, a.get(name, absent), b.get(name, absent)) for name in names)
    return [Change(words.clean(name, 80), x, y) for name, x, y in pairs if not equal(x, y)]


# ------------------------------------------------------------------ regressions


def _regressions(found: Difference, tolerance: float) -> Iterator[Regression]:
    a, b = found.a, found.b
    for side, run in (("first", a), ("second", b)):
        failed = [check for check in conclusions.checks(run) if check.status == "fail"]
        if conclusions.trust(run).answer == "no":
            yield Regression(
                "verification",
                f"the {side} record does not verify: "
                + "; ".join(f"{check.label}: {check.message}" for check in failed[:3]),
            )
    if b.end is None or (not b.finished and a.finished):
        why = b.error or ("it was interrupted" if b.interrupted else "its record has no end")
        yield Regression("unfinished", f"the second run did not finish: {words.clean(why, 200)}")
    if b.loss.nonfinite > a.loss.nonfinite:
        yield Regression(
            "nonfinite",
            f"the loss was not finite at {words.plural(b.loss.nonfinite, 'check')}, "
            f"{words.count(a.loss.nonfinite)} before",
        )
    yield from _layer_regressions(found)
    yield from _loss_regression(found, tolerance)
    seen = {(item.kind, item.layer) for item in a.findings}
    for item in b.findings:
        if (item.kind, item.layer) not in seen and item.severity in {"warning", "critical"}:
            yield Regression("finding", words.finding(item), item.layer)


def _layer_regressions(found: Difference) -> Iterator[Regression]:
    for change in found.layers:
        a, b = change.a, change.b
        if not b:
            continue
        name = words.layer_name(change.layer)
        if _rose(a, b, "nonfinite"):
            yield Regression("nonfinite", f"{name}: its gradient was not finite", change.layer)
        for what in ("alarms", "open_alarms"):
            if _rose(a, b, what):
                diagnoses = b.get("diagnoses")
                named = ", ".join(
                    words.DIAGNOSES.get(item, str(item))
                    for item in (diagnoses if isinstance(diagnoses, list) else [])
                )
                often = f"{words.scalar(a.get('alarms') or 0)} → {words.scalar(b['alarms'])} alarms"
                still = ", still open at the end" if b.get("open_alarms") else ""
                yield Regression("alarm", f"{name}: {often} ({named}){still}", change.layer)
                break
        if _rose(a, b, "peak_stuck") or _rose(a, b, "stuck_at_end"):
            yield Regression(
                "stuck",
                f"{name}: {words.scalar(a.get('peak_stuck') or 0)} → "
                f"{words.scalar(b['peak_stuck'])} channels stuck at most, "
                f"{words.scalar(b['stuck_at_end'])} at the end",
                change.layer,
            )


def _rose(a: Mapping[str, object], b: Mapping[str, object], key: str) -> bool:
    before, after = a.get(key) or 0, b.get(key) or 0
    return isinstance(before, int) and isinstance(after, int) and after > before


def _loss_regression(found: Difference, tolerance: float) -> Iterator[Regression]:
    """The loss at common steps; where there are none, or ``b`` went on longer, also the ends."""
    loss = found.loss
    pairs = [("at the same steps", loss.mean_a, loss.mean_b)]
    if not loss.common or (found.b.steps or 0) >= (found.a.steps or 0):
        pairs.append(("at the end", loss.final_a, loss.final_b))
    for where, a, b in pairs:
        if a is not None and b is not None and b - a > tolerance * max(abs(a), 1e-12):
            rise = f"{(b - a) / abs(a):+.1%}" if a else "up from zero"
            yield Regression(
                "loss",
                f"the loss {where} went from {words.number(a)} to {words.number(b)} ({rise}; "
                f"{tolerance:.1%} is allowed)",
            )
            return


def _changes(changes: list[Change]) -> dict[str, object]:
    return {item.name: {"a": _plain(item.a), "b": _plain(item.b)} for item in changes}


def _plain(value: object, depth: int = 16) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if depth == 0 and isinstance(value, (list, dict)):
        return "…"
    if isinstance(value, list):
        return [_plain(item, depth - 1) for item in value[:64]]
    if isinstance(value, dict):
        return {str(key): _plain(item, depth - 1) for key, item in [*value.items()][:64]}
    return value


def _side(run: Run) -> dict[str, object]:
    failed = [check.name for check in conclusions.checks(run) if check.status == "fail"]
    statuses = {check.name: check.status for check in conclusions.checks(run)}
    return {
        "path": str(run.path),
        "name": words.clean(run.name),
        "model": words.scalar(run.start.get("model")),
        "architecture_sha256": words.scalar(run.start.get("architecture_sha256")),
        "parameters": whole(run.start.get("parameters")),
        "steps": run.steps,
        "checks": conclusions.total_checks(run),
        "seconds": run.seconds,
        "status": conclusions.status(run).key,
        "intact": conclusions.trust(run).answer != "no",
        "complete": run.end is not None,
        "finished": run.finished,
        "sealed": statuses.get("seal") == "pass",
        "signed": statuses.get("signature") in {"pass", "unchecked"},
        "signature_verified": statuses.get("signature") == "pass",
        "failed_checks": failed,
        "counts": dict(run.counts),
        "final_loss": run.loss.final,
        "best_loss": run.loss.best,
    }
