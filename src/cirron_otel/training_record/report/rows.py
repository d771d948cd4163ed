"""The rows of the metrics, one by one, into the series of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from cirron_otel.training_record.report.event_lines import SEVERITIES
from cirron_otel.training_record.report.lines import number, text, whole
from cirron_otel.training_record.report.model import RECENT, Episode, Finding, Layer, Run
from cirron_otel.training_record.report.stuck_tracker import StuckTracker

_MAX_FINDINGS = 500


class RowTaker:
    """Takes the rows of a run whose diary has been read.

    ``layer`` finds a layer by its name, or makes it; None where there are too many. ``skipped`` are
    the steps that a gradient scaler skipped.
    """

    def __init__(
        self,
        run: Run,
        stuck: StuckTracker,
        layer: Callable[[str], Layer | None],
        skipped: set[int],
    ) -> None:
        self.run = run
        self._stuck = stuck
        self._layer = layer
        self._skipped = skipped
        self._nonfinite: Episode | None = None
        self._found: dict[tuple[str, str | None, str], Finding] = {}
        self._ignored_findings = 0
        #: The layers in the order of the first gradients, which is the model's.
        self._order: list[str] = []

    def row(self, row: dict[str, object]) -> None:
        """Take one row of the metrics."""
        run = self.run
        step = whole(row.get("step"))
        if step is None:
            step = 0 if run.last_step is None else run.last_step
        if run.columns.full():
            self._merge()
        column = run.columns.add(step)
        run.checks += 1
        run.saw(step)
        said = row.get("nonfinite")
        nonfinite = said if isinstance(said, dict) else {}
        self._loss(step, column, row, nonfinite)
        layers = run.layers
        gradients = row.get("grad")
        if not self._order and isinstance(gradients, dict):
            found = map(self._layer, gradients)
            self._order = [layer.name for layer in found if layer is not None]
        for name, value in gradients.items() if isinstance(gradients, dict) else ():
            layer = layers.get(name) or self._layer(name)
            if layer is None:
                continue
            norm = number(value)
            if norm is not None and math.isfinite(norm):
                layer.last_gradient = norm
            elif norm is not None or f"grad.{name}" in nonfinite or value is None:
                norm = None
                # A scaler that finds such gradients skips the step and goes on: that is its work.
                layer.nonfinite_gradients += step not in self._skipped
            layer.gradient.add(column, norm)
        stuck = row.get("stuck")
        if isinstance(stuck, dict):
            known = [
                (layers.get(name) or self._layer(name), value) for name, value in stuck.items()
            ]
            self._stuck.check(step, column, [(layer, value) for layer, value in known if layer])
        self._take_findings(step, row.get("findings"))

    def _merge(self) -> None:
        run = self.run
        columns = len(run.columns)
        run.columns.merge()
        run.loss.band.merge(columns)
        for layer in run.layers.values():
            layer.gradient.merge(columns)
            if layer.stuck is not None:
                layer.stuck.merge(columns)

    def _loss(
        self, step: int, column: int, row: dict[str, object], nonfinite: Mapping[str, object]
    ) -> None:
        loss = self.run.loss
        value = number(row.get("loss"))
        if value is None and "loss" not in nonfinite:
            loss.missing += 1
            loss.band.extend(column + 1)
            return
        finite = value is not None and math.isfinite(value)
        loss.band.add(column, value if finite else None)
        loss.ended_nonfinite = not finite
        if value is None or not finite:
            loss.nonfinite += 1
            if loss.first_nonfinite is None:
                loss.first_nonfinite = step
            if self._nonfinite is None:
                self._nonfinite = Episode("nonfinite", None, step)
                self.run.episodes.add(self._nonfinite)
            return
        if self._nonfinite is not None:
            self._nonfinite.end, self._nonfinite.outcome = step, "cleared"
            self._nonfinite = None
        loss.first = value if loss.first is None else loss.first
        loss.last = value
        if loss.best is None or value < loss.best:
            loss.best, loss.best_step = value, step
        loss.recent = [*loss.recent, value][-RECENT:]

    def _take_findings(self, step: int, findings: object) -> None:
        for item in findings[:64] if isinstance(findings, list) else ():
            if not isinstance(item, dict):
                continue
            kind = text(item.get("kind"), 60) or "finding"
            layer = text(item.get("layer"))
            message = text(item.get("message"), 300) or ""
            severity = item.get("severity")
            key = (kind, layer, "" if layer is not None else message)
            found = self._found.get(key)
            if found is not None:
                found.count += 1
                found.last = step
            elif len(self._found) < _MAX_FINDINGS:
                severity = severity if severity in SEVERITIES else "info"
                found = Finding(kind, str(severity), layer, message, step, step)
                self._found[key] = found
            else:
                self._ignored_findings += 1

    def finish(self) -> None:
        """Bring all series to one length, the layers into the model's order."""
        run = self.run
        order = {name: at for at, name in enumerate(self._order)}
        by_model = sorted(run.layers.items(), key=lambda item: order.get(item[0], len(order)))
        run.layers = dict(by_model)
        columns = len(run.columns)
        run.loss.band.extend(columns)
        for layer in run.layers.values():
            layer.gradient.extend(columns)
            if layer.stuck is not None:
                layer.stuck.extend(columns)
        run.findings = list(self._found.values())
        if self._ignored_findings:
            run.notes.append(f"{self._ignored_findings} further findings are not shown")
