"""Records of our own for tests, with events that follow from their rows."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cirron_otel.training_record.rules import Decisions, Expected, Rules
from cirron_otel.training_record.writing.journal import Journal
from record.tampering import RECORDS

CONFIG = json.loads((RECORDS / "healthy/diary.jsonl").read_text().splitlines()[0])["config"]
RUN_START: dict[str, Any] = {
    "model": "Net",
    "parameters": 10,
    "layers": 2,
    "architecture_sha256": "0" * 64,
    "optimizer": None,
    "torch": "2.13.0",
    "config": CONFIG,
}
_SEVERITY = {
    "alarm": "warning",
    "loss_spike": "warning",
    "no_gradients": "warning",
    "nonfinite_loss": "critical",
    "nonfinite_gradient": "critical",
    "skipped_step": "info",
}
_MORE = {
    "alarm": {"kind": "Linear"},
    "no_gradients": {"message": "nothing was trained"},
    "skipped_step": {"scale": 1.0},
}

Check = tuple[float | None, dict[str, float]]


def troubled(checks: int = 40, *, seed: int = 0) -> Iterator[Check]:
    """Loss and gradients of a run in which everything happens that the rules know."""
    draw = random.Random(seed)
    for index in range(checks):
        loss: float | None = 2.0 + draw.random() / 10
        grad = {"a": 0.01 + draw.random() / 100, "b": 0.5 + draw.random() / 10}
        if 12 <= index < 16:
            grad["a"] = 1e-9
        if 18 <= index < 21:
            grad["b"] = 0.0
        if index in {22, 23}:
            loss = 90.0
        if index in {26, 27}:
            loss = math.nan
        if index in {29, 30}:
            grad["b"] = math.inf
        if index == 33:
            loss = None
        if index == 35:
            grad = {}
        yield loss, grad


def put(journal: Journal, expected: Expected, **more: object) -> None:
    """Write the event that the numbers call for."""
    fields = {**dict(expected.exact), **dict(expected.floats), **_MORE.get(expected.event, {})}
    if expected.event in _SEVERITY:
        fields["severity"] = _SEVERITY[expected.event]
    journal.append(expected.event, step=expected.step, **{**fields, **more})


def write(
    directory: Path,
    checks: int = 40,
    *,
    change: Callable[[Journal, Expected], bool] = lambda _journal, _expected: False,
    close: bool = True,
    **arguments: Any,
) -> Journal:
    """A whole record of :func:`troubled`. ``change`` may write an event in its own way."""
    arguments = {"run_start": RUN_START, "name": "run", "fsync_interval_s": None, **arguments}
    journal = Journal(directory, **arguments)
    rules = Decisions(Rules.of(CONFIG))
    for index, (loss, grad) in enumerate(troubled(checks)):
        step = 5 * index
        for expected in rules.check(step, loss, grad):
            if not change(journal, expected):
                put(journal, expected)
        journal.check(step, loss, grad, {"a": [0, 0, 0, 0]})
    journal.steps = 5 * checks
    if close:
        journal.close()
    return journal
