"""From events of the record to findings that a person reads, and to the sinks of the user's."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from cirron_otel import findings
from cirron_otel._guard import logger
from cirron_otel.findings import Finding, Findings, OnFinding

if TYPE_CHECKING:
    from cirron_otel.errors import StopTraining
    from cirron_otel.recorder import Recorder
    from cirron_otel.training_record.writing.journal import Journal

Sink = Callable[[str, dict[str, Any]], object]
_MAX_NAMES = 4


class Teller:
    """Writes events into the record and tells everybody else of them. The training thread.

    ``rec`` gives the recording that runs now, or None; ``on_finding`` are the functions given to
    this monitor, beside those of the recording.
    """

    def __init__(  # noqa: PLR0913 - whom to tell
        self,
        journal: Journal,
        rec: Callable[[], Recorder | None],
        sinks: Iterable[Sink],
        on_finding: tuple[OnFinding, ...],
        stop_on: Iterable[str],
        *,
        verbose: bool,
    ) -> None:
        self._journal = journal
        self._rec = rec
        self._sinks = list(sinks)
        self._callbacks = on_finding
        #: For this monitor's own functions and ``stop_on``; everybody's are the recording's.
        self._own = Findings()
        self._own.stop_on = frozenset(stop_on)
        self._verbose = verbose
        #: Findings of the check under way.
        self._waiting: list[Finding] | None = None

    def hold(self) -> None:
        """A check begins: keep its findings until it is written."""
        self._waiting = []

    def release(self) -> None:
        """It is written: what the functions of the user's do now harms no record."""
        waiting, self._waiting = self._waiting, None
        for finding in waiting or ():
            self.finding(finding)

    def event(self, kind: str, /, **fields: object) -> None:
        """Write an event, and tell of it."""
        line = self._journal.append(kind, **fields)
        if line is not None:
            self._to_sinks("event", line)
        found = finding_of(kind, fields)
        if found is not None:
            self.finding(found)

    def finding(self, finding: Finding) -> None:
        """Tell of a finding, everywhere but in the record; after the check if one is under way."""
        if self._waiting is not None:
            self._waiting.append(finding)
            return
        rec = self._rec()
        is_new = self._own.note(finding)
        if rec is not None and rec.active:
            findings.report(rec, finding, to_log=self._verbose)
        elif is_new and self._verbose:
            findings.log(finding)
        findings.call_back(self._own, finding, self._callbacks)

    def row(self, row: dict[str, Any] | None) -> None:
        """Give a metrics row that was written to the sinks."""
        if row is not None:
            self._to_sinks("metrics", row)

    def take_stop(self) -> StopTraining | None:
        """What asks to stop the training, if anything does."""
        rec = self._rec()
        asked = None if rec is None else rec.findings.take_stop()
        return self._own.take_stop() or asked

    def _to_sinks(self, kind: str, payload: dict[str, Any]) -> None:
        for sink in list(self._sinks):
            try:
                sink(kind, payload)
            except Exception as error:  # noqa: BLE001 - the user's; the training goes on
                self._sinks.remove(sink)
                self._sink_failed(sink, error)

    def _sink_failed(self, sink: Sink, error: Exception) -> None:
        name = findings.safe_repr(sink)
        logger.warning(
            "cirron-otel: the sink %s of a monitor raised %r and is told no more", name, error
        )
        # Behind run_end nothing may follow.
        if self._journal.run_end is None:
            line = self._journal.append("sink_error", sink=name, error=type(error).__name__)
            if line is not None:
                self._to_sinks("event", line)


# --- words ------------------------------------------------------------------------------------


def finding_of(kind: str, fields: Mapping[str, Any]) -> Finding | None:
    """What a person should read about an event; None for one that says nothing of the training."""
    make = _WORDS.get(kind)
    return None if make is None else make(fields)


def _alarm(line: Mapping[str, Any]) -> Finding:
    layer, norm, baseline = line["layer"], line["grad_norm"], line["baseline"]
    shown = _layer(layer)
    cause = line.get("caused_by")
    kind, what = {
        "no_gradient": (
            "no_gradient",
            f"{shown} gets no gradient any more (usually {baseline:.3g})",
        ),
        "vanishing": (
            "vanishing_gradient",
            f"the gradient of {shown} has fallen to {norm:.3g} from {baseline:.3g}",
        ),
        "exploding": (
            "exploding_gradient",
            f"the gradient of {shown} has grown to {norm:.3g} from {baseline:.3g}",
        ),
    }[line["diagnosis"]]
    if cause is not None:
        what += f"; it begins at {_layer(cause)}"
    more = {"grad_norm": norm, "baseline": baseline}
    if cause is not None:
        more["caused_by"] = cause
    severity: Any = "warning" if cause is None else "info"
    return Finding(kind, severity, what, layer, line["step"], more)


def _alarm_cleared(line: Mapping[str, Any]) -> Finding:
    layer = line["layer"]
    message = f"the gradient of {_layer(layer)} is usual again ({line['grad_norm']:.3g})"
    return Finding(
        "gradient_recovered", "info", message, layer, line["step"],
        {"diagnosis": line["diagnosis"]},
    )  # fmt: skip


def _loss_spike(line: Mapping[str, Any]) -> Finding:
    value, baseline = line["value"], line["baseline"]
    message = f"the loss has jumped to {value:.4g} from {baseline:.4g}"
    return Finding(
        "loss_spike", "warning", message, None, line["step"],
        {"value": value, "baseline": baseline},
    )  # fmt: skip


def _loss_recovered(line: Mapping[str, Any]) -> Finding:
    message = f"the loss is usual again ({line['value']:.4g})"
    return Finding("loss_recovered", "info", message, None, line["step"])


def _nonfinite_loss(line: Mapping[str, Any]) -> Finding:
    message = f"the loss is {line['value']}"
    return Finding("nonfinite_loss", "critical", message, None, line["step"])


def _nonfinite_gradient(line: Mapping[str, Any]) -> Finding:
    layers = line["layers"]
    message = f"the gradients of {_several(layers)} are not finite"
    layer = layers[-1] if layers else None
    return Finding("nonfinite_gradient", "critical", message, layer, line["step"])


def _skipped_step(line: Mapping[str, Any]) -> Finding:
    message = (
        f"the gradient scaler (scale {line['scale']:g}) skips this step: the gradients of "
        f"{_several(line['layers'])} are not finite"
    )
    return Finding("skipped_step", "info", message, None, line["step"], {"scale": line["scale"]})


def _no_gradients(line: Mapping[str, Any]) -> Finding:
    return Finding("no_gradients", "warning", line["message"], None, line["step"])


def _channels(line: Mapping[str, Any]) -> Finding:
    layer, total = line["layer"], line["channels"]
    if "n_violated" in line:
        return _violated(line)
    counts = {
        "proven dead": line["n_certified"],
        "constant": line["n_flat"],
        "silent": line["n_observed"],
        "decayed": line["n_decayed"],
    }
    stuck = sum(counts.values())
    parts = ", ".join(f"{count} {name}" for name, count in counts.items() if count)
    how_many = f"all {total}" if stuck == total else f"{stuck} of {total}"
    message = f"{how_many} channels of {_layer(layer)} are stuck ({parts})"
    more = {"stuck": stuck, "channels": total, "level": line["level"]}
    return Finding("stuck_channels", "warning", message, layer, line["step"], more)


def _violated(line: Mapping[str, Any]) -> Finding:
    layer, count = line["layer"], line["n_violated"]
    message = (
        f"the proof that {_count(count)} of {_layer(layer)} stay dead no longer holds: "
        f"{line['reason']}"
    )
    step = line.get("seen_at", line["step"])
    return Finding(
        "certificate_violated", "warning", message, layer, step, {"channels": count}
    )  # fmt: skip


def _certificate(line: Mapping[str, Any]) -> Finding:
    layer, count = line["layer"], line["count"]
    message = f"{_count(count)} of {_layer(layer)} can be proven to stay dead"
    return Finding("proven_dead", "info", message, layer, line["step"], {"channels": count})


def _repair(line: Mapping[str, Any]) -> Finding:
    layer, count, change = line["layer"], line["count"], line["relative_change"]
    size = "" if change is None else f"; its weight changed by {change:.1%} of its norm"
    if line.get("rule") == "undone":
        kind, what = "repair_undone", f"the repair of {_count(count)} of {_layer(layer)} was undone"
    else:
        kind, what = "repaired", f"{_count(count)} of {_layer(layer)} were begun anew"
    return Finding(
        kind, "warning", what + size, layer, line["step"],
        {"channels": count, "delta_norm": line["delta_norm"]},
    )  # fmt: skip


def _count(channels: int) -> str:
    return "one channel" if channels == 1 else f"{channels} channels"


def _channels_cleared(line: Mapping[str, Any]) -> Finding:
    layer = line["layer"]
    message = f"no channel of {_layer(layer)} is stuck any more"
    return Finding("channels_recovered", "info", message, layer, line["step"])


def _layer(name: str) -> str:
    return f"layer {name!r}" if name else "the model's own parameters"


def _several(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_MAX_NAMES]))
    more = len(names) - _MAX_NAMES
    text = shown + (f" and {more} more" if more > 0 else "")
    return f"{'layer' if len(names) == 1 else 'layers'} {text}"


_WORDS: dict[str, Callable[[Mapping[str, Any]], Finding]] = {
    "alarm": _alarm,
    "alarm_cleared": _alarm_cleared,
    "loss_spike": _loss_spike,
    "loss_recovered": _loss_recovered,
    "nonfinite_loss": _nonfinite_loss,
    "nonfinite_gradient": _nonfinite_gradient,
    "skipped_step": _skipped_step,
    "no_gradients": _no_gradients,
    "channels": _channels,
    "channels_cleared": _channels_cleared,
    "certificate": _certificate,
    "repair": _repair,
}
