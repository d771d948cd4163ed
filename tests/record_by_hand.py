"""Training records made by hand: real chained files, without the writer under test.

Kept apart from the library on purpose: what it writes is the format as the seed has it.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

T0 = 1_795_983_198.0

CONFIG = {
    "check_every": 5,
    "patience": 2,
    "sigma": 2.5,
    "warmup": 8,
    "baseline_rate_floor": 0.1,
    "alarm_min_decades": 1.0,
    "alarm_confirmations": 2,
    "loss_spike_factor": 1.5,
    "certified_repair_streak": 2,
    "decayed_rel_tol": 1e-05,
    "repair_seed": None,
    "certify_optimizers": [],
    "list_limit": 64,
    "channel_list_limit": 256,
    "layer_list_limit": 32,
    "repair": False,
    "layers": None,
}
START = {
    "name": "by hand",
    "tool": "by-hand 1",
    "model": "Sequential",
    "parameters": 1466,
    "layers": 2,
    "architecture_sha256": "ab" * 32,
    "optimizer": {"type": "SGD", "lr": 0.05},
    "python": "3.11.7",
    "torch": "2.13.0",
    "platform": "Linux",
    "record_version": 1,
    "config": CONFIG,
}


class RecordWriter:
    """Writes a record's diary and metrics, a second between events."""

    def __init__(self, directory: Path, **start: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.directory = directory
        self._lines: list[str] = []
        self._rows: list[str] = []
        self._prev = "0" * 64
        self.steps = 0
        self.event("run_start", **{**START, **start})

    def event(self, event: str, /, **fields: object) -> None:
        """Chain one event onto the diary."""
        seq = len(self._lines)
        body = {"seq": seq, "time": T0 + seq, "event": event, **fields}
        canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digest = hashlib.sha256((self._prev + canonical).encode()).hexdigest()
        self._lines.append(json.dumps({**body, "prev": self._prev, "hash": digest}))
        self._prev = digest
        self._write()

    def manifest(self, *layers: str, **fields: object) -> None:
        """Say that these layers are watched, each a Linear one."""
        self.event("structure", step=0, pairs={}, relu_after=[])
        self.event(
            "manifest",
            step=0,
            check_every=5,
            producers=[
                {
                    "layer": name,
                    "kind": "Linear",
                    "batchnorm": None,
                    "relu_after": False,
                    "certificate": False,
                    "reason": "no ReLU",
                }
                for name in layers
            ],
            **{
                "layers": {"monitored": len(layers), "total": len(layers), "filter": None},
                "channel_checks": True,
                "repair": {"mode": False},
                "precision": {"scaler": False},
                "distributed": {"mode": "none"},
                "notes": ["made by hand"],
                **fields,
            },
        )

    def row(
        self,
        step: int,
        loss: object,
        grad: dict[str, object] | None = None,
        stuck: dict[str, object] | None = None,
        **fields: object,
    ) -> None:
        """Append one row of metrics."""
        row = {"step": step, "loss": loss, "grad": grad or {}, "stuck": stuck or {}, **fields}
        self.raw_row(json.dumps(row, separators=(",", ":")))
        self.steps = step + 1

    def raw_row(self, text: str) -> None:
        """Append a line of metrics as it is."""
        self._rows.append(text)

    def end(self, steps: int | None = None, **fields: object) -> Path:
        """Write the metrics and ``run_end``; the directory."""
        content = "".join(row + "\n" for row in self._rows).encode()
        self.event(
            "run_end",
            steps=self.steps if steps is None else steps,
            checks=len(self._rows),
            counts={},
            metrics_sha256=hashlib.sha256(content).hexdigest(),
            **fields,
        )
        return self.stop()

    def stop(self, half_line: str = "") -> Path:
        """Write the files as they are, as a crash leaves them; the directory."""
        (self.directory / "metrics.jsonl").write_text("".join(row + "\n" for row in self._rows))
        self._write()
        with (self.directory / "diary.jsonl").open("a") as file:
            file.write(half_line)
        return self.directory

    def _write(self) -> None:
        (self.directory / "diary.jsonl").write_text("".join(line + "\n" for line in self._lines))


def channels(writer: RecordWriter, step: int, layer: str, stuck: int, of: int = 16) -> None:
    """A ``channels`` event with so many proven dead, ``channels_cleared`` with none."""
    writer.event(
        "channels" if stuck else "channels_cleared",
        step=step,
        severity="warning" if stuck else "info",
        layer=layer,
        batchnorm=None,
        channels=of,
        level="all" if stuck == of else "some" if stuck else "none",
        n_certified=stuck,
        n_flat=0,
        n_observed=0,
        n_decayed=0,
        certified=list(range(stuck)),
        flat=[],
        observed=[],
    )


def alarm(writer: RecordWriter, step: int, layer: str, *, cleared: bool = False) -> None:
    """An alarm of a gradient that vanished, or its end."""
    fields: dict[str, object] = {
        "step": step,
        "layer": layer,
        "diagnosis": "no_gradient",
        "grad_norm": 0.1 if cleared else 0.0,
        "baseline": 0.1,
    }
    if cleared:
        writer.event("alarm_cleared", **fields)
    else:
        writer.event("alarm", severity="warning", kind="Linear", sigma=2.5, **fields)


def repair(writer: RecordWriter, step: int, layer: str, count: int) -> None:
    """A repair of so many channels."""
    writer.event(
        "repair",
        step=step,
        severity="action",
        layer=layer,
        batchnorm=None,
        channels=list(range(count)),
        count=count,
        method="Kaiming normal",
        optimizer_slices_reset=2,
        modification_class="discrete",
        bound=None,
        delta_norm=1.0,
        weight_norm_before=2.0,
        weight_norm_after=2.1,
        relative_change=0.5,
        rng="seeded",
    )


def healthy(directory: Path, *, checks: int = 20, **start: object) -> RecordWriter:
    """A run whose loss falls and in which nothing is found; not ended yet."""
    writer = RecordWriter(directory, **start)
    writer.manifest("conv", "fc")
    for check in range(checks):
        writer.row(
            check * 5,
            2.0 - 0.05 * check,
            {"conv": 0.1 + 0.001 * check, "fc": 0.2},
            {"conv": [0, 0, 0, 0], "fc": [0, 0, 0, 0]},
        )
    return writer


def lesioned(directory: Path, *, mend: bool) -> Path:
    """A run whose layer ``conv`` dies at step 50 and is repaired at step 60 or not at all."""
    writer = RecordWriter(directory)
    writer.manifest("conv", "fc")
    for check in range(20):
        step = check * 5
        dead = step >= 50 and (step <= 60 or not mend)
        if step == 50:
            channels(writer, step, "conv", 16)
        if step == 55:
            alarm(writer, step, "conv")
        if mend and step == 60:
            repair(writer, step, "conv", 16)
        if mend and step == 65:
            alarm(writer, step, "conv", cleared=True)
            channels(writer, step, "conv", 0)
        writer.row(
            step,
            2.3 if dead else 2.0 - 0.005 * check,
            {"conv": 0.0 if dead else 0.1, "fc": 0.2},
            {"conv": [16 if dead else 0, 0, 0, 0], "fc": [0, 0, 0, 0]},
        )
    return writer.end()
